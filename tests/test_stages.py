"""Stages with a backward of their own against autograd's."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from conftest import draw, run

from keepgrad import Layout
from keepgrad.ops.stages import LayerNorm, gelu, layer_norm, linear, rms_norm

WEIGHT, BIAS = torch.linspace(0.5, 2, 6), torch.linspace(-1, 1, 6)


def cases(dtype=torch.float64):
    """Links, the same as a function of x and the parameters, and the parameters."""
    weight, bias = (t.to(dtype).requires_grad_() for t in (WEIGHT.clone(), BIAS.clone()))
    return {
        "gelu": (gelu("none"), F.gelu, ()),
        "gelu tanh": (gelu("tanh"), partial(F.gelu, approximate="tanh"), ()),
        "layer norm": (
            layer_norm((6,), weight, bias, 1e-3),
            lambda x, w, b: F.layer_norm(x, (6,), w, b, 1e-3),
            (weight, bias),
        ),
        "layer norm without bias": (
            layer_norm((6,), weight, None, 1e-3),
            lambda x, w: F.layer_norm(x, (6,), w, None, 1e-3),
            (weight,),
        ),
        "layer norm alone": (layer_norm((6,), None, None, 1e-3), lambda x: F.layer_norm(x, (6,), eps=1e-3), ()),
        "rms norm": (rms_norm((6,), weight, 1e-3), lambda x, w: F.rms_norm(x, (6,), w, 1e-3), (weight,)),
    }


@pytest.mark.parametrize("name", cases())
@pytest.mark.parametrize("shape", [(2, 12), (1, 1), (0, 12)])
def test_all_kept_equals_autograd(name, shape):
    link, fn, tensors = cases()[name]
    x = torch.randn(*shape, 6, dtype=torch.float64, requires_grad=True)
    dy = torch.randn_like(x)
    out, wanted = run([link], x, None, "heavy"), fn(x, *tensors)
    torch.testing.assert_close(out, wanted)
    found = torch.autograd.grad(out, (x, *tensors), dy)
    for a, b in zip(found, torch.autograd.grad(wanted, (x, *tensors), dy), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", cases())
@pytest.mark.parametrize("save", ["heavy", "input"])
def test_gradcheck_between_matmuls(name, save):
    """In a chain the stage may overwrite what it is given; the numerical gradient would see it."""
    link, _, tensors = cases()[name]
    first, last = (torch.randn(6, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)

    def chain(x, first, last, *_):
        return run([linear(first), link, linear(last)], x, None, save, x)

    assert torch.autograd.gradcheck(chain, (x, first, last, *tensors))


@pytest.mark.parametrize("name", cases())
def test_kept_rows_are_those_of_the_whole(name):
    """With drop, the gradient of the parameters is that of the kept rows, and dropped rows get none."""
    link, fn, tensors = cases()[name]
    kept = draw(0, Layout((3, 4)), 0.5, "grid", "drop")
    x = torch.randn(2, 12, 6, dtype=torch.float64, requires_grad=True)
    dy = torch.randn_like(x)
    mask = torch.zeros(12, dtype=torch.float64).index_fill(0, kept.picked, 1).view(1, 12, 1)
    found = torch.autograd.grad(run([link], x, kept, "heavy"), (x, *tensors), dy)
    for a, b in zip(found, torch.autograd.grad(fn(x, *tensors), (x, *tensors), dy * mask), strict=True):
        torch.testing.assert_close(a, b)


def test_frozen_norms_get_no_gradient():
    weight, bias = WEIGHT.clone(), BIAS.clone().requires_grad_()
    x = torch.randn(2, 3, 6)
    out = run([layer_norm((6,), weight, bias, 1e-5)], x, None, "heavy")
    out.sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(bias.grad, torch.full((6,), 6.0))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_norm_in_other_types(dtype, autocast):
    weight, bias = WEIGHT.clone().requires_grad_(), BIAS.clone().requires_grad_()
    link = layer_norm((6,), weight, bias, 1e-5)
    assert isinstance(link[0], LayerNorm)
    x = torch.randn(2, 5, 6).to(dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        out = run([link], x, None, "heavy")
        wanted = F.layer_norm(x, (6,), weight, bias, 1e-5)
    assert out.dtype == wanted.dtype
    torch.testing.assert_close(out, wanted)
    dy = torch.randn_like(wanted)
    found = torch.autograd.grad(out, (x, weight, bias), dy)
    for a, b in zip(found, torch.autograd.grad(wanted, (x, weight, bias), dy), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
