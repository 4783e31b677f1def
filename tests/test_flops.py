"""Kept gradients cost what they should: the forward pass, and the kept part of the backward pass."""

import pytest
import torch
import torch.nn.functional as F
from conftest import convnext, images, vit
from torch.utils.flop_counter import FlopCounterMode

import keepgrad


def flops(fn):
    with FlopCounterMode(display=False) as counter:
        fn()
    return counter.get_total_flops()


def attention_flops(tokens, width, heads, batch):
    """Forward, and forward with backward, of attention alone."""
    q = torch.randn(batch, heads, tokens, width // heads, requires_grad=True)
    forward = flops(lambda: F.scaled_dot_product_attention(q, q, q))
    return forward, flops(lambda: F.scaled_dot_product_attention(q, q, q).sum().backward())


@pytest.mark.parametrize("ratio", [0.25, 0.5])
@pytest.mark.parametrize("reduce", ["drop", "fold", "pool"])
def test_vit(ratio, reduce):
    model, x = vit(img_size=64, class_token=False, global_pool="avg"), images(64)  # 64 tokens
    width, heads, batch, depth = 24, 3, 2, 2
    forward = flops(lambda: model(x))
    full = flops(lambda: model(x).sum().backward())
    att_forward, att_step = attention_flops(64, width, heads, batch)
    _, att_kept = attention_flops(int(64 * ratio), width, heads, batch)
    linears = 12 * 2 * 64 * batch * width * width * depth
    outside = full - forward - 2 * linears - depth * (att_step - att_forward)
    expected = forward + outside + 2 * linears * ratio + depth * att_kept
    keepgrad.apply(model, keep_ratio=ratio, reduce=reduce)
    assert flops(lambda: model(x).sum().backward()) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("reduce", ["drop", "fold", "pool"])
def test_convnext(reduce):
    model, x = convnext(), images(64)
    forward = flops(lambda: model(x))
    full = flops(lambda: model(x).sum().backward())
    positions = {8: 256, 12: 64, 16: 16, 20: 4}
    linears = sum(2 * 8 * c * c * n * 2 * (2 if c == 16 else 1) for c, n in positions.items())
    expected = full - 2 * linears * 0.5
    assert forward < expected < full
    keepgrad.apply(model, keep_ratio=0.5, reduce=reduce)
    assert flops(lambda: model(x).sum().backward()) == pytest.approx(expected, rel=0.05)


def test_exact_costs_what_autograd_costs():
    model, x = vit(), images()
    full = flops(lambda: model(x).sum().backward())
    keepgrad.apply(model, preset="exact")
    assert flops(lambda: model(x).sum().backward()) == full
