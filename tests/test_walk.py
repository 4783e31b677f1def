"""A chain walked stage by stage, called as torch.compile traces it, against autograd and the oracle's matrices."""

import pytest
import torch
import torch.nn.functional as F
from conftest import draw, groups_of

from keepgrad import Layout
from keepgrad.ops.oracle import matrices
from keepgrad.ops.spec import Spec
from keepgrad.ops.stages import gelu, layer_norm, linear
from keepgrad.ops.walk import walk_backward, walk_forward


def mlp():
    """A norm, two linear layers with a GELU between, and their tensors."""
    torch.manual_seed(0)
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in ((6,), (6,), (10, 6), (10,), (6, 10))]
    weight, bias, first, first_bias, last = (t.requires_grad_() for t in tensors)
    links = [layer_norm((6,), weight, bias, 1e-5), linear(first, first_bias), gelu("none"), linear(last)]
    return links, [t for _, own in links for t in own]


def written_out(x, weight, bias, first, first_bias, last):
    return F.gelu(F.layer_norm(x, (6,), weight, bias) @ first.t() + first_bias) @ last.t()


def walked(links, tensors, x, dy, kept, save):
    """Output and gradients, of the input first; the input is added to the output."""
    stages, counts = zip(*((stage, len(own)) for stage, own in links), strict=True)
    needs = tuple(t.requires_grad for t in tensors)
    spec = Spec(stages, counts, needs, True, save, kept is not None, True, None)
    with torch.no_grad():
        out, values, extras = walk_forward(spec, x, tensors, kept, None)
        dx, found = walk_backward(spec, dy, tensors, kept, values, extras, (x.dtype, x.dtype))
    return out, [dx, *found]


@pytest.mark.parametrize("save", ["heavy", "input"])
@pytest.mark.parametrize("shape", [(2, 12), (1, 1)])
def test_all_kept_equals_autograd(save, shape):
    links, tensors = mlp()
    x = torch.randn(*shape, 6, dtype=torch.float64, requires_grad=True)
    dy = torch.randn_like(x)
    before = [t.clone() for t in (x, dy)]
    out, found = walked(links, tensors, x, dy, None, save)
    wanted = written_out(x, *tensors)
    torch.testing.assert_close(out, wanted)
    for own, other in zip(found, torch.autograd.grad(x + wanted, (x, *tensors), dy), strict=True):
        torch.testing.assert_close(own, other)
    assert all(torch.equal(own, other) for own, other in zip((x, dy), before, strict=True))


@pytest.mark.parametrize("save", ["heavy", "input"])
@pytest.mark.parametrize("reduce", ["drop", "scaled", "fold"])
def test_slots_have_the_gradient_of_the_picked_rows(reduce, save):
    """With the picked activations nothing is approximate but the gradients: the chain on slots, by matrices."""
    links, tensors = mlp()
    kept = draw(0, Layout((3, 4)), 0.5, "grid", reduce)
    m = matrices(groups_of(kept), kept.picked.tolist(), 12, reduce)
    x = torch.randn(2, 12, 6, dtype=torch.float64, requires_grad=True)
    dy = torch.randn_like(x)
    out, found = walked(links, tensors, x, dy, kept, save)
    torch.testing.assert_close(out, written_out(x, *tensors))
    slots = (m.value @ x.detach()).requires_grad_()
    d_slots, *wanted = torch.autograd.grad(written_out(slots, *tensors), (slots, *tensors), m.place.t() @ dy)
    for own, other in zip(found, (dy + m.grad.t() @ d_slots, *wanted), strict=True):
        torch.testing.assert_close(own, other)


def test_frozen_tensors_have_no_gradient():
    links, tensors = mlp()
    x = torch.randn(2, 12, 6, dtype=torch.float64)
    for number in (0, 2):
        tensors[number].requires_grad_(False)
    _, (_, *found) = walked(links, tensors, x, torch.randn_like(x), None, "heavy")
    assert [one is None for one in found] == [True, False, True, False, False]
