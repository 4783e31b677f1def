"""RMS norms with a weight, as language models write them, against autograd's backward of their formula."""

import pytest
import torch
from conftest import draw, run

from keepgrad import Layout
from keepgrad.ops.norms import weighted_rms_norm
from keepgrad.ops.stages import linear

FORMS = {
    "Llama": {"one_more": False, "casts_first": True},
    "Gemma": {"one_more": True, "casts_first": False},
    "both": {"one_more": True, "casts_first": True},
    "neither": {"one_more": False, "casts_first": False},
}
forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
EPS = 1e-3


def weight_of(dtype=torch.float32):
    return torch.linspace(0.5, 2, 6).to(dtype).requires_grad_()


def written_out(x, weight, one_more, casts_first):
    rows = x.float()
    normed = rows / (rows.square().sum(-1, keepdim=True) / rows.shape[-1] + EPS).sqrt()
    if casts_first:
        return normed.to(x.dtype) * (weight + one_more)
    return (normed * (weight.float() + one_more)).to(x.dtype)


def assert_gradients(found, wanted, inputs, **tolerance):
    torch.testing.assert_close(found, wanted, **tolerance)
    dy = torch.randn_like(wanted)
    pairs = zip(torch.autograd.grad(found, inputs, dy), torch.autograd.grad(wanted, inputs, dy), strict=True)
    for own, other in pairs:
        assert own.dtype == other.dtype
        torch.testing.assert_close(own, other, **tolerance)


@forms
@pytest.mark.parametrize("shape", [(2, 12), (1, 1), (0, 12)])
def test_all_kept_equals_autograd(form, shape):
    weight, x = weight_of(), torch.randn(*shape, 6, requires_grad=True)
    found = run([weighted_rms_norm(weight, EPS, **form)], x, None, "heavy")
    assert_gradients(found, written_out(x, weight, **form), (x, weight), rtol=1e-4, atol=1e-5)


@forms
def test_rows_of_lower_precision(form):
    weight, x = weight_of(torch.bfloat16), torch.randn(2, 12, 6).bfloat16().requires_grad_()
    found = run([weighted_rms_norm(weight, EPS, **form)], x, None, "heavy")
    assert torch.equal(found, written_out(x, weight, **form))
    assert_gradients(found, written_out(x, weight, **form), (x, weight), rtol=3e-2, atol=3e-2)


@forms
@pytest.mark.parametrize("save", ["heavy", "input"])
def test_between_matmuls(form, save):
    """In a chain a stage may overwrite what it is given."""
    first, last = (torch.randn(6, 6, requires_grad=True) for _ in range(2))
    weight, x = weight_of(), torch.randn(2, 5, 6, requires_grad=True)
    found = run([linear(first), weighted_rms_norm(weight, EPS, **form), linear(last)], x, None, save, x)
    wanted = x + written_out(x @ first.t(), weight, **form) @ last.t()
    assert_gradients(found, wanted, (x, first, weight, last), rtol=1e-4, atol=1e-4)


@forms
def test_kept_rows_are_those_of_the_whole(form):
    """With drop, the gradient of the weight is that of the kept rows, and dropped rows get none."""
    kept = draw(0, Layout((3, 4)), 0.5, "grid", "drop")
    weight, x = weight_of(), torch.randn(2, 12, 6, requires_grad=True)
    dy = torch.randn_like(x)
    mask = torch.zeros(12).index_fill(0, kept.picked, 1).view(1, 12, 1)
    found = torch.autograd.grad(run([weighted_rms_norm(weight, EPS, **form)], x, kept, "heavy"), (x, weight), dy)
    wanted = torch.autograd.grad(written_out(x, weight, **form), (x, weight), dy * mask)
    for own, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)


def test_a_frozen_weight_gets_no_gradient():
    weight, x = weight_of().detach(), torch.randn(2, 3, 6, requires_grad=True)
    run([weighted_rms_norm(weight, EPS)], x, None, "heavy").square().sum().backward()
    assert weight.grad is None
    assert x.grad.abs().max() > 0
