"""What a training step asks of the host: how many kernels it launches, and that it never waits for the device."""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import convnext, images, vit
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import keepgrad

aten = torch.ops.aten


def step(model: nn.Module, x: torch.Tensor) -> None:
    model.zero_grad()
    model(x).square().sum().backward()


class Kernels(TorchDispatchMode):
    """Counts operations whose result is no view of an argument and not just new memory."""

    launches_nothing = (aten.empty, aten.empty_strided, aten.empty_like, aten.detach, aten._unsafe_view)

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        returns = func._schema.returns
        is_view = bool(returns) and all(one.alias_info and not one.alias_info.is_write for one in returns)
        self.count += not is_view and func.overloadpacket not in self.launches_nothing
        return func(*args, **(kwargs or {}))


def kernels_of_a_block(make, options) -> float:
    counts = []
    for depth in (3, 5):
        model = make(depth)
        if options is not None:
            keepgrad.apply(model, **options)
        step(model, images(32))
        with Kernels() as found:
            step(model, images(32))
        counts.append(found.count)
    return (counts[1] - counts[0]) / 2


@pytest.mark.parametrize(
    ("options", "most"),
    [
        (None, 30),
        ({"preset": "exact"}, 32),
        ({"preset": "accurate"}, 36),
        ({"preset": "small", "store": "full"}, 38),
        ({"keep_ratio": 0.5}, 42),
        ({"preset": "balanced"}, 49),
        ({"preset": "exact", "store": "int8"}, 65),
    ],
    ids=str,
)
def test_kernels_of_a_vit_block(options, most):
    assert kernels_of_a_block(lambda depth: vit(depth=depth), options) <= most


class NoWaiting(TorchDispatchMode):
    """Fails where the host would wait for the device: a value that is read, or a copy from one to the other.

    The meta device stands for an accelerator.
    """

    reads = (aten._local_scalar_dense, aten.item, aten.is_nonzero, aten.equal, aten.nonzero, aten.masked_select)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
        devices = {t.device.type for t in given if t.dim()}
        if "meta" in devices:
            assert func.overloadpacket not in self.reads, f"{func} reads a value off the device"
            assert devices == {"meta"}, f"{func} copies between host and device"
            assert str(kwargs.get("device", "meta")) == "meta", f"{func} copies to the host"
        else:
            assert "meta" not in str(kwargs.get("device", "")) or not given, f"{func} copies to the device"
        return func(*args, **kwargs)


@pytest.mark.parametrize("make", [vit, convnext])
@pytest.mark.parametrize(
    "options",
    [
        {"preset": "exact"},
        {"preset": "accurate"},
        {"preset": "small"},
        {"preset": "balanced"},
        {"keep_ratio": 0.5, "mask": "random"},
        {"keep_ratio": 0.25, "reduce": "pool"},
        {"keep_ratio": 0.5, "attention": "head"},
        {"preset": "accurate", "store": "int8"},
    ],
    ids=str,
)
def test_a_step_never_waits_for_the_device(make, options):
    if make is convnext and ("attention" in options or options.get("preset") == "balanced"):
        pytest.skip("no attention")
    model = make().to("meta")
    keepgrad.apply(model, **options)
    x = torch.empty(2, 3, 32 if make is vit else 64, 32 if make is vit else 64, device="meta")
    with NoWaiting():
        step(model, x)
    assert all(p.grad is not None for p in model.parameters())


def test_the_mode_sees_what_waits():
    x = torch.ones(3, device="meta")
    with NoWaiting():
        with pytest.raises(AssertionError, match="copies to the host"):
            x.cpu()
        with pytest.raises(AssertionError, match="copies to the device"):
            torch.ones(3).to("meta")
        with pytest.raises(AssertionError, match="reads a value"):
            x.nonzero()


@pytest.mark.filterwarnings("default", "error:keepgrad")
@pytest.mark.parametrize(
    "options",
    [{"preset": "exact"}, {"keep_ratio": 0.5}, {"keep_ratio": 0.5, "store": "int8"}, {"keep_ratio": 0.5, "seed": 3}],
    ids=str,
)
def test_equal_blocks_are_compiled_once(options):
    model = vit(depth=4)
    keepgrad.apply(model, **options)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)
    found = []
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            step(model, images(32))
            found.append(model.blocks[1].mlp.fc1.weight.grad.clone())
    assert len(graphs) == 1
    if "keep_ratio" in options:  # another mask in every step
        assert not torch.equal(found[0], found[1])
        assert not torch.equal(found[1], found[2])


@pytest.mark.filterwarnings("default", "error:keepgrad")
def test_compiled_blocks_have_the_gradients_of_eager_ones():
    model = vit(depth=3)
    keepgrad.apply(model, keep_ratio=0.5, seed=3)
    twin = copy.deepcopy(model)
    torch.compiler.reset()
    for block in twin.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    for _ in range(2):
        step(model, images(32))
        step(twin, images(32))
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("default", "error:keepgrad")
def test_compiled_blocks_in_an_eager_model_pack_in_sites_alone():
    """Saved-tensor hooks around compiled code would make torch.func fail in it."""
    model = vit(depth=2)
    keepgrad.apply(model, preset="exact", store="int8")
    torch.compiler.reset()
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    step(model, images(32))
    assert all(p.grad is not None for p in model.parameters())
