"""Algorithm 1 on whole models: the forward it changes and the gradients it keeps."""

import copy

import pytest
import torch
from conftest import convnext, images, vit

import keepgrad
from keepgrad import KeepConfig
from keepgrad.baseline import algorithm1
from keepgrad.memory import saved_bytes


def test_position_wise_models_have_their_own_forward():
    model = convnext()
    twin = copy.deepcopy(model)
    algorithm1(twin, KeepConfig(preset="paper"))
    x = images(64)
    torch.testing.assert_close(twin(x), model(x))


def test_dropout_in_the_middle_stays_where_it_is():
    model = vit(proj_drop_rate=0.3, drop_path_rate=0.3)
    algorithm1(model, KeepConfig(keep_ratio=0.5))
    x = images()
    kept = saved_bytes(lambda: model(x), model)
    plain = vit(proj_drop_rate=0.3, drop_path_rate=0.3)
    assert kept < 0.85 * saved_bytes(lambda: plain(x), plain)
    model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_attention_sees_only_its_own_half():
    model = vit()
    mlp_only, both = copy.deepcopy(model), copy.deepcopy(model)
    algorithm1(mlp_only, KeepConfig(keep_ratio=0.5, attention="off"))
    algorithm1(both, KeepConfig(keep_ratio=0.5))
    x = images()
    torch.testing.assert_close(mlp_only(x), model(x))
    assert not torch.allclose(both(x), model(x))
    torch.testing.assert_close(both.eval()(x), model.eval()(x))


@pytest.mark.parametrize(("make", "size"), [(vit, 32), (convnext, 64)])
def test_all_kept_is_exact(make, size):
    model = make()
    twin = copy.deepcopy(model)
    algorithm1(twin, KeepConfig(keep_ratio=1.0))
    x = images(size)
    for one in (model, twin):
        one(x).square().sum().backward()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)


def test_gradients_of_an_mlp_are_those_of_drop():
    """With one MLP reduced, Algorithm 1 and keepgrad's drop are the same for its parameters, mask for mask."""
    model = vit(depth=1).double()
    x = images(dtype=torch.float64)
    found = []
    for seed in range(8):
        ours = copy.deepcopy(model)
        keepgrad.apply(ours, keep_ratio=0.5, attention="off", reduce="drop", seed=seed)
        ours(x).square().sum().backward()
        found.append(ours.blocks[0].mlp.fc1.weight.grad)
    algorithm1(model, KeepConfig(keep_ratio=0.5, attention="off"))
    for seed in range(8):
        torch.manual_seed(seed)
        model.zero_grad()
        model(x).square().sum().backward()
        grad = model.blocks[0].mlp.fc1.weight.grad
        if any(torch.allclose(grad, other) for other in found):
            return
    pytest.fail("no draw of Algorithm 1 gave a gradient of drop")


def test_keepgrad_saves_less_than_algorithm_1():
    ours, theirs = vit(), vit()
    keepgrad.apply(ours, keep_ratio=0.5)
    algorithm1(theirs, KeepConfig(keep_ratio=0.5))
    x = images()
    assert saved_bytes(lambda: ours(x), ours) < 0.65 * saved_bytes(lambda: theirs(x), theirs)


def test_without_the_fused_kernel_attention_is_the_same():
    model = vit()
    twin = copy.deepcopy(model)
    for block in twin.blocks:
        block.attn.fused_attn = False
    x = images()
    outs = []
    for one in (model, twin):
        algorithm1(one, KeepConfig(keep_ratio=0.5))
        torch.manual_seed(0)
        outs.append(one(x))
    torch.testing.assert_close(*outs)
