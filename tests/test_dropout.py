"""Dropout inside of a stage: the noise is the module's own, waits in bits, and is the same in backward."""

import pytest
import torch
import torch.nn.functional as F
from conftest import draw, run
from torch import nn

import keepgrad
from keepgrad import Layout
from keepgrad.ops.dropout import Drop, OpaqueWithDropout


def drop_of(p):
    return Drop(lambda x: F.dropout(x, p), p)


@pytest.mark.parametrize("width", [1, 7, 8, 9, 40])
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_what_was_drawn_is_done_again(p, width):
    x = torch.randn(2, 12, width, dtype=torch.float64)
    torch.manual_seed(4)
    wanted = F.dropout(x, p)
    torch.manual_seed(4)
    found, bits = drop_of(p).apply(x, None)
    torch.testing.assert_close(found, wanted)
    assert bits.dtype == torch.uint8
    assert bits.shape == (2, 12, -(-width // 8))
    torch.testing.assert_close(drop_of(p).again(x, bits), wanted)


def test_slots_have_the_noise_of_their_picked_position():
    kept = draw(0, Layout((3, 4)), 0.5, "grid", "fold")
    x = torch.randn(2, 12, 10, dtype=torch.float64)
    drop = drop_of(0.5)
    found, bits = drop.apply(x, kept)
    rows = x[:, kept.picked]
    torch.testing.assert_close(drop.again(rows, bits), found[:, kept.picked])


class Twice(nn.Module):
    """Position-wise, with two dropouts, of which the second comes after something that is not linear."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Dropout(0.4), nn.Dropout(0.2)
        self.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.float64))

    def forward(self, x):
        return self.second(F.gelu(F.linear(self.first(x), self.weight)))


def stage_of(module, *dropouts):
    """The module as a stage that takes its weight as a tensor."""
    drops = tuple(Drop(partial_forward(one), one.p) for one in dropouts)

    def fn(x, weight):
        return torch.func.functional_call(module, {"weight": weight}, (x,))

    return OpaqueWithDropout(fn, modules=dropouts, drops=drops), (module.weight,)


def partial_forward(dropout):
    """Its class's forward: that of the module is taken while the stage runs."""
    return lambda x: type(dropout).forward(dropout, x)


@pytest.mark.parametrize("save", ["heavy", "input"])
def test_a_module_with_dropouts_is_autograd_with_the_same_noise(save):
    module = Twice()
    x = torch.randn(2, 12, 6, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(2)
    wanted = module(x)
    torch.manual_seed(2)
    found = run([stage_of(module, module.first, module.second)], x, None, save)
    torch.testing.assert_close(found, wanted)
    assert "forward" not in vars(module.first)
    dy = torch.randn_like(wanted)
    inputs = (x, module.weight)
    for own, other in zip(torch.autograd.grad(found, inputs, dy), torch.autograd.grad(wanted, inputs, dy), strict=True):
        torch.testing.assert_close(own, other)


def test_kept_rows_have_their_gradient_through_the_noise():
    module = Twice()
    kept = draw(0, Layout((3, 4)), 0.5, "grid", "drop")
    x = torch.randn(2, 12, 6, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(2, 12, 6, dtype=torch.float64)
    mask = torch.zeros(12, dtype=torch.float64).index_fill(0, kept.picked, 1).view(1, 12, 1)
    torch.manual_seed(2)
    wanted = torch.autograd.grad(module(x), (x, module.weight), dy * mask)
    torch.manual_seed(2)
    out = run([stage_of(module, module.first, module.second)], x, kept, "heavy")
    for own, other in zip(torch.autograd.grad(out, (x, module.weight), dy), wanted, strict=True):
        torch.testing.assert_close(own, other)


class Again(Twice):
    """The same dropout for two things: its bits would be those of the last."""

    def forward(self, x):
        return self.first(F.linear(self.first(x), self.weight))


def test_a_dropout_that_is_called_twice_is_refused():
    module = Again()
    x = torch.randn(2, 12, 6, dtype=torch.float64, requires_grad=True)
    with pytest.raises(keepgrad.InputError, match="calls a dropout twice"):
        run([stage_of(module, module.first)], x, None, "heavy")
    assert "forward" not in vars(module.first)
