"""Frozen parameters: no gradient, no work, and the right gradients for the others."""

import pytest
import torch
from conftest import assert_same, grads, images, vit

import keepgrad


@pytest.mark.parametrize("save", ["heavy", "input"])
@pytest.mark.parametrize(
    "frozen", ["mlp.fc1", "attn.qkv", "attn.proj", "norm1", "blocks.0", "bias", "gamma", "patch_embed", "weight"]
)
def test_frozen_parameters_get_no_gradient_and_the_others_the_right_one(frozen, save):
    model = vit(init_values=0.5, class_token=False, global_pool="avg", pos_embed="none").double()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen not in name)
    x = images(dtype=torch.float64)
    _, wanted = grads(model, x)
    keepgrad.apply(model, keep_ratio=1.0, save=save)
    assert_same(grads(model, x)[1], wanted)


def test_frozen_parameters_cost_no_work():
    from torch.utils.flop_counter import FlopCounterMode

    def flops(model):
        with FlopCounterMode(display=False) as counter:
            grads(model, images())
        return counter.get_total_flops()

    model = vit()
    keepgrad.apply(model, keep_ratio=0.5, reduce="drop")
    all_trained = flops(model)
    kept, tokens, width = 9, 17, 24
    assert tokens > kept
    fc1 = model.blocks[1].mlp.fc1.weight.requires_grad_(False)
    assert all_trained - flops(model) == 2 * 2 * kept * width * 4 * width  # the one product that is gone
    fc1.requires_grad_(True)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.head.weight.requires_grad_(True)
    head_only = flops(model)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(images())
    assert head_only == counter.get_total_flops() + 2 * 2 * width * 5


@pytest.mark.parametrize("trained", ["mlp.fc1.bias", "mlp.fc2", "attn.qkv.bias", "attn.q_norm", "attn.proj.bias"])
@pytest.mark.parametrize("save", ["heavy", "input"])
@pytest.mark.parametrize("method", ["qkv", "query", "head"])
def test_a_single_trained_layer_in_a_frozen_model(trained, save, method):
    model = vit(depth=1, qk_norm=True, proj_drop_rate=0.3).double()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    x = images(dtype=torch.float64)
    _, wanted = grads(model, x, seed=1)
    for ratio in (1.0, 0.5):
        keepgrad.apply(model, keep_ratio=ratio, save=save, attention=method)
        _, found = grads(model, x, seed=1)
        if ratio == 1:
            assert_same(found, wanted)
        assert found.keys() == wanted.keys()
        keepgrad.remove(model)


@pytest.mark.parametrize("method", ["qkv", "query", "head"])
def test_a_frozen_projection_costs_less_with_every_method(method):
    from torch.utils.flop_counter import FlopCounterMode

    model = vit()
    keepgrad.apply(model, keep_ratio=0.5, attention=method)
    counts = []
    for trained in (True, False):
        model.blocks[1].attn.qkv.weight.requires_grad_(trained)
        with FlopCounterMode(display=False) as counter:
            grads(model, images())
        counts.append(counter.get_total_flops())
    assert counts[1] < counts[0]
