"""Every method of the list can be put on a model and taken off again."""

import conftest
import pytest
import torch
from conftest import assert_same, grads, images
from torch import nn

import keepgrad
from keepgrad.errors import CheckpointingError
from keepgrad.methods import METHODS, checkpointed, kept, methods_for

EAGER = [name for name, method in METHODS.items() if not method.is_compiled and method.text is not True]


@pytest.mark.parametrize("name", EAGER)
def test_a_method_goes_on_a_model_and_off_again(name):
    model, x = conftest.vit(class_token=False, global_pool="avg"), images()
    before = {key: list(vars(module)) for key, module in model.named_modules()}
    out, exact = grads(model, x)
    method = METHODS[name]
    with method.put_on(model) as forward:
        model.zero_grad()
        torch.manual_seed(0)
        own = forward(x)
        if not name.startswith("Algorithm 1"):  # where kept rows do not see the others
            torch.testing.assert_close(own, out, rtol=1e-5, atol=1e-5)
        own.square().sum().backward()
        found = {key: p.grad.clone() for key, p in model.named_parameters()}
        if method.is_exact:
            assert_same(found, exact, rtol=1e-4, atol=1e-4)
        else:
            assert any(not torch.equal(found[key], exact[key]) for key in exact)
    assert {key: list(vars(module)) for key, module in model.named_modules()} == before
    assert_same(grads(model, x)[1], exact, rtol=0, atol=0)


def test_a_forward_of_the_users_own_is_put_back():
    model = conftest.vit()
    own = model.blocks[0].forward
    model.blocks[0].forward = own
    with METHODS["selective checkpointing"].put_on(model):
        assert model.blocks[0].forward is not own
    assert model.blocks[0].forward is own


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "keepgrad default"),
        ({"preset": "accurate"}, "keepgrad accurate (default)"),
        ({"preset": "exact", "store": "int8"}, "keepgrad exact, int8"),
        ({"keep_ratio": {"attention": 1.0, "mlp": 0.25}}, "keepgrad attention 1.0, mlp 0.25"),
        ({"keep_ratio": 0.5, "save": "input", "mask": "random"}, "keepgrad 0.5, save input, mask random"),
    ],
)
def test_settings_name_themselves(options, name):
    assert kept(**options).name == name


def test_language_models_have_methods_of_their_own():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    names = [method.name for method in methods_for(transformers.LlamaModel(config))]
    assert "keepgrad text (default)" in names
    assert "keepgrad accurate (default)" not in names
    assert "keepgrad text (default)" not in [method.name for method in methods_for(conftest.vit())]


def test_checkpointing_is_asked_of_models_that_have_it():
    with pytest.raises(CheckpointingError, match="no set_grad_checkpointing"), checkpointed(nn.Linear(1, 1)):
        pass


def test_what_can_estimate_does():
    model = conftest.vit()
    for method in methods_for(model):
        if method.can_estimate:
            with method.put_on(model):
                assert keepgrad.estimate(model, (64, 3, 32, 32)).activations > 0
