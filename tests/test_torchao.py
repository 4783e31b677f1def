"""Quantised linear layers inside of sites: through their own forward, never through their raw weights."""

import copy

import pytest
import torch
from conftest import assert_same, grads, images, vit
from torch import nn

import keepgrad
from keepgrad import NoSiteError

torchao = pytest.importorskip("torchao")

pytestmark = pytest.mark.filterwarnings("ignore")


def quantised(config: str) -> nn.Module:
    """A ViT whose blocks have quantised weights, by the name of a configuration of torchao's."""
    from torchao.prototype import quantized_training
    from torchao.quantization import quantize_

    model = vit(embed_dim=48)
    made = getattr(quantized_training, config, None) or getattr(torchao.quantization, config)
    quantize_(model.blocks, made())
    return model


TRAINED = ["int8_weight_only_quantized_training", "int8_mixed_precision_training", "bitnet_training"]
FROZEN = ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"]


@pytest.mark.parametrize("config", [*TRAINED, *FROZEN])
@pytest.mark.parametrize("save", ["heavy", "input"])
def test_ratio_one_is_autograd(config, save):
    model = quantised(config)
    y, wanted = grads(model, images(), seed=1)
    plan = keepgrad.apply(model, keep_ratio=1.0, save=save)
    assert len(plan.sites) == 4
    assert any("blocks.0.mlp.fc1.weight" in name for name in wanted) == (config in TRAINED)
    y_kept, found = grads(model, images(), seed=1)
    torch.testing.assert_close(y_kept, y)
    assert_same(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("config", [*TRAINED, *FROZEN])
def test_reduced_and_packed(config):
    model = quantised(config)
    y, wanted = grads(model, images(), seed=1)
    keepgrad.apply(model, keep_ratio=0.5, store="int8")
    y_kept, found = grads(model, images(), seed=1)
    torch.testing.assert_close(y_kept, y)
    assert found.keys() == wanted.keys()


def test_a_layer_that_is_quantised_after_apply():
    from torchao.prototype.quantized_training import bitnet_training
    from torchao.quantization import quantize_

    model = vit(embed_dim=48)
    keepgrad.apply(model, keep_ratio=1.0)
    grads(model, images())
    quantize_(model.blocks, bitnet_training())
    found = grads(model, images())
    keepgrad.remove(model)
    wanted = grads(model, images())
    torch.testing.assert_close(found[0], wanted[0])
    assert_same(found[1], wanted[1], rtol=1e-4, atol=1e-4)


def test_float8_training_layers():
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = vit(embed_dim=48)
    try:
        convert_to_float8_training(model.blocks, config=Float8LinearConfig(emulate=True))
        y, wanted = grads(model, images())
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"it does not run here: {error}")
    assert type(model.blocks[0].mlp.fc1).__name__ == "Float8Linear"
    keepgrad.apply(model, keep_ratio=1.0)
    y_kept, found = grads(model, images())
    assert torch.equal(y_kept, y)
    assert_same(found, wanted, rtol=1e-4, atol=1e-4)


def test_what_passes_no_gradient_has_no_sites():
    model = quantised("Int8DynamicActivationInt8WeightConfig")
    before = copy.deepcopy(model)
    with pytest.raises(NoSiteError, match="Linear with a weight of Int8Tensor passes no gradient on"):
        keepgrad.apply(model, keep_ratio=0.5)
    torch.testing.assert_close(model(images()), before(images()))
