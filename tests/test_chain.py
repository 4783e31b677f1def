"""The branch engine and its stages, on chains of their own."""

import pytest
import torch
import torch.nn.functional as F
from conftest import draw, run
from torch import nn

from keepgrad import Layout
from keepgrad.memory import saved_bytes
from keepgrad.ops.stages import gelu, linear, noise, parallel, pointwise
from keepgrad.sampling import Kept


def parts(width=6, hidden=10, dtype=torch.float64):
    torch.manual_seed(0)
    shapes = {"w1": (hidden, width), "b1": (hidden,), "w2": (width, hidden), "b2": (width,), "scale": (width,)}
    return {name: torch.randn(shape, dtype=dtype, requires_grad=True) for name, shape in shapes.items()}


def chain(p, scale=True):
    return [
        pointwise(F.gelu),
        linear(p["w1"], p["b1"]),
        pointwise(torch.tanh),
        linear(p["w2"], p["b2"], scale=p["scale"] if scale else None),
    ]


@pytest.mark.parametrize("save", ["heavy", "input"])
@pytest.mark.parametrize("residual", ["own", "other", "none"])
def test_gradcheck_with_everything_kept(save, residual):
    p = parts()
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    other = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)

    def fn(x, other, *tensors):
        q = dict(zip(p, tensors, strict=True))
        add = {"own": x, "other": other, "none": None}[residual]
        return run(chain(q), x, None, save, add)

    assert torch.autograd.gradcheck(fn, (x, other, *p.values()))


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 7), (0, 4)])
def test_odd_shapes(shape):
    p = parts()
    x = torch.randn(*shape, 6, dtype=torch.float64, requires_grad=True)
    y = run(chain(p), x, None, "heavy", x)
    y.sum().backward()
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("save", ["heavy", "input"])
def test_kept_and_dropped_add_up_to_the_whole_gradient(save):
    p = parts()
    x = torch.randn(2, 12, 6, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(2, 12, 6, dtype=torch.float64)
    kept = draw(0, Layout((3, 4)), 0.25, "random", "drop")
    rest = torch.tensor([i for i in range(12) if i not in kept.picked.tolist()])
    dropped = Kept("drop", 12, len(rest), 0, torch.cat([rest, rest + 12]))

    def grads(which):
        return torch.autograd.grad(run(chain(p), x, which, save), (x, *p.values()), dy)

    for a, b, whole in zip(grads(kept), grads(dropped), grads(None), strict=True):
        torch.testing.assert_close(a + b, whole)


def test_scaled_is_right_on_average():
    p = parts()
    x = torch.randn(2, 4, 6, dtype=torch.float64)
    dy = torch.randn(2, 4, 6, dtype=torch.float64)

    def grad(kept):
        return torch.autograd.grad(run(chain(p), x, kept, "heavy"), p["w1"], dy)[0]

    phases = [Kept("scaled", 4, 1, 0, torch.tensor([i, i + 4])) for i in range(4)]
    torch.testing.assert_close(sum(grad(kept) for kept in phases) / 4, grad(None))


def test_several_linears_on_one_input_equal_their_concatenation():
    p = parts(hidden=6)
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    pair = run([parallel([linear(p["w1"], p["b1"]), linear(p["w2"])], [6, 6])], x, None, "heavy")
    wanted = torch.cat([F.linear(x, p["w1"], p["b1"]), F.linear(x, p["w2"])], -1)
    inputs = (x, p["w1"], p["b1"], p["w2"])
    dy = torch.randn_like(wanted)
    torch.testing.assert_close(pair, wanted)
    for a, b in zip(torch.autograd.grad(pair, inputs, dy), torch.autograd.grad(wanted, inputs, dy), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("module", [nn.Dropout(0.4), nn.Dropout(0.4, inplace=True)])
def test_noise_draws_what_the_module_draws_and_backpropagates_through_it(module):
    p = parts()
    x = torch.randn(2, 8, 6, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(2)
    wanted = module(F.linear(F.gelu(x), p["w1"], p["b1"]))
    links = [pointwise(F.gelu), linear(p["w1"], p["b1"]), noise(module)]
    torch.manual_seed(2)
    found = run(links, x, None, "heavy")
    torch.testing.assert_close(found, wanted)
    dy = torch.randn_like(wanted)
    for a, b in zip(
        torch.autograd.grad(found, (x, p["w1"]), dy), torch.autograd.grad(wanted, (x, p["w1"]), dy), strict=True
    ):
        torch.testing.assert_close(a, b)


class Holder(nn.Module):
    """Parameters that do not count as saved."""

    def __init__(self, tensors):
        super().__init__()
        self.tensors = nn.ParameterList(tensors)


@pytest.mark.parametrize(("save", "rows"), [("heavy", 6 + 10), ("input", 6)])
@pytest.mark.parametrize(("reduce", "slots"), [("drop", 4), (None, 16)])
def test_saved_bytes_are_the_input_and_the_matmul_outputs(save, rows, reduce, slots):
    p = {name: nn.Parameter(t) for name, t in parts(dtype=torch.float32).items()}
    x = torch.randn(2, 16, 6)
    kept = None if reduce is None else draw(0, Layout((4, 4)), 0.25, "grid", reduce)
    found = saved_bytes(lambda: run(chain(p), x, kept, save, x), Holder(p.values()))
    assert found == 2 * slots * rows * 4


def test_nothing_is_saved_for_frozen_layers():
    p = {name: nn.Parameter(t) for name, t in parts(dtype=torch.float32).items()}
    for name in ("w1", "b1", "w2"):
        p[name].requires_grad_(False)
    x = torch.randn(2, 16, 6)
    links = [linear(p["w1"], p["b1"]), linear(p["w2"], p["b2"])]
    assert saved_bytes(lambda: run(links, x, None, "heavy"), Holder(p.values())) == 0
    run(links, x, None, "heavy").sum().backward()
    assert p["b2"].grad.tolist() == [32.0] * 6


def test_a_gradient_that_is_also_somebody_elses_is_not_overwritten():
    """With one row, autograd gives x and a bias added to it the same gradient tensor, which is that of the output."""
    bias = torch.randn(6, dtype=torch.float64, requires_grad=True)
    x = torch.randn(1, 1, 6, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(1, 1, 6, dtype=torch.float64)
    before = dy.clone()
    out = run([gelu("none"), pointwise(torch.add, bias)], x, None, "heavy")
    wanted = F.gelu(x) + bias
    for a, b in zip(torch.autograd.grad(out, (x, bias), dy), torch.autograd.grad(wanted, (x, bias), dy), strict=True):
        torch.testing.assert_close(a, b)
    assert torch.equal(dy, before)


def test_the_input_and_a_residual_are_not_overwritten():
    p = parts()
    x = torch.randn(2, 12, 6, dtype=torch.float64, requires_grad=True)
    residual = torch.randn(2, 12, 6, dtype=torch.float64)
    before = x.detach().clone(), residual.clone()
    run([gelu("none"), *chain(p)], x, None, "input", residual).sum().backward()
    run([gelu("none")], x, None, "heavy", x).sum().backward()
    assert torch.equal(x.detach(), before[0])
    assert torch.equal(residual, before[1])
