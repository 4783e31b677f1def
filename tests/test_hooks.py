"""Modules with hooks inside of sites: a hook is called once, with what it is given in the plain model."""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import assert_same, convnext, grads, images, vit
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

import keepgrad

NOISY = {"proj_drop_rate": 0.3, "drop_path_rate": 0.3, "init_values": 0.5}
INSIDE = ["norm1", "attn.proj", "ls1", "drop_path1", "norm2", "mlp", "mlp.fc1", "mlp.act", "mlp.drop1", "mlp.fc2"]
EVERY = [*INSIDE, "attn", "attn.qkv", ""]


def watched(model: nn.Module, names: list[str]) -> list[tuple[str, Tensor, Tensor]]:
    """What hooks on these layers of the second block are given from now on."""
    calls: list[tuple[str, Tensor, Tensor]] = []

    def note(name: str, args: tuple, out: Tensor) -> None:
        assert len(args) == 1
        assert out.requires_grad
        calls.append((name, args[0].detach().clone(), out.detach().clone()))

    for name in names:
        layer = model.blocks[1].get_submodule(name)
        layer.register_forward_hook(lambda m, args, out, name=name: note(name, args, out))
    return calls


def assert_same_calls(found, wanted) -> None:
    assert [name for name, *_ in found] == [name for name, *_ in wanted]
    for (_, *a), (_, *b) in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("names", [*([name] for name in EVERY), INSIDE], ids=lambda names: "+".join(names)[:20])
def test_a_hook_is_called_once_with_all_rows(names):
    plain = vit(**NOISY).double()
    model = copy.deepcopy(plain)
    wanted_calls, calls = watched(plain, names), watched(model, names)
    wanted = grads(plain, images(dtype=torch.float64), seed=1)
    plan = keepgrad.apply(model, keep_ratio=1.0)
    left = {"attn", "attn.qkv"} & set(names)
    assert len(plan.sites) == (3 if left else 4)
    assert ("has hooks, which expect to see every position once" in str(plan)) == bool(left)
    found = grads(model, images(dtype=torch.float64), seed=1)
    torch.testing.assert_close(found[0], wanted[0])
    assert_same(found[1], wanted[1])
    assert len(calls) == len(names)
    assert_same_calls(calls, wanted_calls)
    assert not any("forward" in vars(layer) for layer in model.blocks[1].children())
    keepgrad.remove(model)
    assert_same(grads(model, images(dtype=torch.float64), seed=1)[1], wanted[1])


@pytest.mark.parametrize("reduce", ["drop", "scaled", "fold"])
@pytest.mark.parametrize("method", ["qkv", "query", "head"])
@pytest.mark.parametrize("save", ["heavy", "input"])
def test_hooks_change_no_reduced_gradient(reduce, method, save):
    model = vit().double()
    hooked = copy.deepcopy(model)
    calls = watched(hooked, ["norm1", "attn.proj", "norm2", "mlp", "mlp.act", "mlp.fc2"])
    options = {"keep_ratio": 0.5, "reduce": reduce, "attention": method, "save": save, "seed": 3}
    for one in (model, hooked):
        keepgrad.apply(one, **options)
    wanted, found = (grads(one, images(dtype=torch.float64)) for one in (model, hooked))
    torch.testing.assert_close(found[0], wanted[0])
    assert_same(found[1], wanted[1])
    assert len(calls) == 6
    assert all(rows.shape[1] == out.shape[1] == 17 for _, rows, out in calls)


@pytest.mark.parametrize("name", ["mlp.act", "mlp.fc1", "norm2", "mlp"])
def test_hooks_may_change_values_and_gradients(name):
    plain = vit().double()
    model = copy.deepcopy(plain)
    keepgrad.apply(model, keep_ratio=1.0)
    found = []
    for one in (plain, model):
        layer, seen = one.blocks[1].get_submodule(name), []
        layer.register_forward_pre_hook(lambda m, args: (args[0] * 1.5,))
        layer.register_forward_hook(lambda m, args, out: out.tanh())
        layer.register_full_backward_hook(
            lambda m, given, made, seen=seen: seen.append((given[0].clone(), made[0].clone()))
        )
        found.append((*grads(one, images(dtype=torch.float64)), seen))
    torch.testing.assert_close(found[1][0], found[0][0])
    assert_same(found[1][1], found[0][1])
    assert len(found[1][2]) == 1
    torch.testing.assert_close(found[1][2], found[0][2])


def test_features_that_a_hook_takes_have_their_gradient():
    plain = vit().double()
    model = copy.deepcopy(plain)
    keepgrad.apply(model, keep_ratio=1.0)
    found = []
    for one in (plain, model):
        features: list[Tensor] = []
        one.blocks[0].mlp.fc1.register_forward_hook(lambda m, args, out, features=features: features.append(out))
        loss = one(images(dtype=torch.float64)).sum() + features[0].square().sum()
        loss.backward()
        found.append({name: p.grad for name, p in one.named_parameters()})
    assert_same(found[1], found[0])


def test_hooks_on_a_block_of_maps_see_maps():
    plain = convnext().double()
    model = copy.deepcopy(plain)
    plan = keepgrad.apply(model, keep_ratio=0.5)
    shapes = []
    for one in (plain, model):
        one.stages[0].blocks[0].mlp.fc1.register_forward_hook(lambda m, args, out: shapes.append(out.shape))
    plain(images(64, dtype=torch.float64))
    with pytest.warns(UserWarning, match="Linear has hooks"):
        model(images(64, dtype=torch.float64))
    assert len(shapes) == 2
    assert shapes[0] == shapes[1]
    keepgrad.remove(model)
    again = keepgrad.plan(model, keep_ratio=0.5)
    assert len(again.sites) == len(plan.sites) - 1
    assert "left alone: stages.0.blocks.0.mlp: Linear has hooks" in str(again)


def test_hooks_on_a_module_that_is_a_site_by_itself():
    class Mine(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

        def forward(self, x):
            return x + self.mlp(x)

    torch.manual_seed(0)
    model, calls = nn.Sequential(Mine(), Mine()).double(), []
    model[0].mlp.register_forward_hook(lambda m, args, out: calls.append(out.shape))
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    _, wanted = grads(model, x)
    plan = keepgrad.apply(model, keep_ratio=1.0, modules={"mlp": [one.mlp for one in model]})
    assert len(plan.sites) == 2
    assert_same(grads(model, x)[1], wanted)
    assert len(calls) == 2


def test_hooks_of_all_modules():
    plain = vit(**NOISY).double()
    model = copy.deepcopy(plain)
    keepgrad.apply(model, keep_ratio=1.0)
    calls: dict[int, list] = {id(plain): [], id(model): []}
    names = {id(m): (id(one), name) for one in (plain, model) for name, m in one.named_modules()}

    def note(module, args, out):
        owner, name = names[id(module)]
        calls[owner].append((name, args[0].detach().clone(), out.detach().clone()))

    before = grads(model, images(dtype=torch.float64), seed=1)
    handle = register_module_forward_hook(note)
    try:
        wanted = grads(plain, images(dtype=torch.float64), seed=1)
        with pytest.warns(UserWarning, match=r"\(attention\) now runs with full backprop: Attention has hooks") as said:
            found = grads(model, images(dtype=torch.float64), seed=1)
    finally:
        handle.remove()
    assert len(said) == 2
    assert_same_calls(calls[id(model)], calls[id(plain)])
    after = grads(model, images(dtype=torch.float64), seed=1)
    for one in (before, found, after):
        torch.testing.assert_close(one[0], wanted[0])
        assert_same(one[1], wanted[1])


def test_torchs_flop_counter_is_not_heard():
    """It notes the names of modules by hooks of all modules; what it counts is the model as it is."""
    from torch.utils.flop_counter import FlopCounterMode

    model = vit()
    keepgrad.apply(model, keep_ratio=0.5)
    runs = [block.forward.run for block in model.blocks]
    with FlopCounterMode(display=False):
        grads(model, images())
    assert [block.forward.run for block in model.blocks] == runs
