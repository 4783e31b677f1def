"""A linear layer with low-rank adapters, against the formula in plain autograd. PEFT itself is in test_peft.py."""

import pytest
import torch
import torch.nn.functional as F
from conftest import draw, run
from torch import nn

from keepgrad import Layout
from keepgrad.memory import saved_bytes
from keepgrad.ops.dropout import Drop
from keepgrad.ops.lora import Lora, LowRank
from keepgrad.ops.stages import Linear

SCALING = (0.5, 3.0)


def layer(p=0.0, has_bias=False, dtype=torch.float64):
    """The stage of two adapters, and its tensors: of the base, then of each adapter."""
    torch.manual_seed(0)
    drop = Drop(lambda x: F.dropout(x, p), p) if p else None
    stage = Lora(Linear(True), 2, tuple(LowRank(s, has_bias, drop) for s in SCALING))
    shapes = [(5, 6), (5,), *((2, 6), (5, 2), (5,)), *((3, 6), (5, 3), (5,))]
    shapes = [shape for number, shape in enumerate(shapes) if has_bias or number not in (4, 7)]
    return stage, tuple(torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)


def written_out(x, tensors, p=0.0, has_bias=False):
    weight, bias, *rest = tensors
    out = x @ weight.t() + bias
    for scaling in SCALING:
        down, up, *more = rest[: 2 + has_bias]
        rest = rest[2 + has_bias :]
        out = out + scaling * (F.dropout(x, p) @ down.t() @ up.t() + (more[0] if more else 0))
    return out


def rows(dtype=torch.float64):
    return torch.randn(2, 12, 6, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("save", ["heavy", "input"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_all_kept_equals_autograd(p, has_bias, save):
    stage, tensors = layer(p, has_bias)
    x = rows()
    torch.manual_seed(3)
    wanted = written_out(x, tensors, p, has_bias)
    torch.manual_seed(3)
    found = run([(stage, tensors)], x, None, save)
    torch.testing.assert_close(found, wanted)
    dy = torch.randn_like(wanted)
    every = (x, *tensors)
    for own, other in zip(torch.autograd.grad(found, every, dy), torch.autograd.grad(wanted, every, dy), strict=True):
        torch.testing.assert_close(own, other)


def test_gradcheck():
    stage, tensors = layer(has_bias=True)
    x = torch.randn(1, 3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *tensors: run([(stage, tensors)], x, None, "heavy"), (x, *tensors))


@pytest.mark.parametrize("p", [0.0, 0.4])
def test_kept_rows_are_those_of_the_whole(p):
    stage, tensors = layer(p)
    kept = draw(0, Layout((3, 4)), 0.5, "grid", "drop")
    mask = torch.zeros(12, dtype=torch.float64).index_fill(0, kept.picked, 1).view(1, 12, 1)
    x = rows()
    dy = torch.randn(2, 12, 5, dtype=torch.float64)
    torch.manual_seed(3)
    wanted = torch.autograd.grad(written_out(x, tensors, p), (x, *tensors), dy * mask)
    torch.manual_seed(3)
    out = run([(stage, tensors)], x, kept, "heavy")
    for own, other in zip(torch.autograd.grad(out, (x, *tensors), dy), wanted, strict=True):
        torch.testing.assert_close(own, other)


@pytest.mark.parametrize("trained", [(2,), (3,), (2, 3), (0, 4), (1,)])
def test_frozen_tensors_get_no_gradient_and_change_nothing(trained):
    stage, tensors = layer()
    x = rows().detach()
    dy = torch.randn(2, 12, 5, dtype=torch.float64)
    wanted = torch.autograd.grad(written_out(x, tensors), tensors, dy)
    tensors = tuple(t.detach().requires_grad_(number in trained) for number, t in enumerate(tensors))
    run([(stage, tensors)], x, None, "heavy").backward(dy)
    for number, (tensor, grad) in enumerate(zip(tensors, wanted, strict=True)):
        if number in trained:
            torch.testing.assert_close(tensor.grad, grad)
        else:
            assert tensor.grad is None


@pytest.mark.parametrize("p", [0.0, 0.4])
def test_what_is_saved_is_the_kept_input_and_a_bit_for_each_dropped_value(p):
    stage, tensors = layer(p)
    tensors = tuple(t.detach().requires_grad_(number > 1) for number, t in enumerate(tensors))
    holder = nn.ParameterList([nn.Parameter(t, t.requires_grad) for t in tensors])
    kept = draw(0, Layout((3, 4)), 0.5, "grid", "drop")
    x = rows()
    found = saved_bytes(lambda: run([(stage, tuple(holder))], x, kept, "heavy"), holder)
    bits = 2 * 2 * 6 if p else 0  # of two adapters, two samples and six slots, one byte for six channels
    masks = sum(t.nbytes for t in vars(kept).values() if isinstance(t, torch.Tensor))
    assert 2 * 6 * 6 * 8 + bits <= found <= 2 * 6 * 6 * 8 + bits + masks
