"""Attention: exact forward, renormalised backward."""

import pytest
import torch
from conftest import decoded, draw, noise, run

import keepgrad
from keepgrad.ops.attention import Core, SelfAttention
from keepgrad.ops.stages import Linear, linear

# Sites


@pytest.mark.parametrize("reduced", [False, True])
def test_attention_is_differentiated_at_the_rounded_q_k_and_v(reduced):
    """The oracle is autograd's attention at the values that are in the bytes."""
    torch.manual_seed(0)
    core = Core(heads=2, kv_heads=2, sections=(32, 32, 32))
    weight, bias = (t.requires_grad_() for t in (torch.randn(96, 32) * 0.4, torch.randn(96)))
    out_weight = (torch.randn(32, 32) * 0.3).requires_grad_()
    stage = SelfAttention("qkv", Linear(True), core, (2, 0))
    x = torch.randn(2, 12, 32, requires_grad=True)
    saved = []
    kept = draw(0, keepgrad.Layout((3, 4)), 0.5, "grid", "drop", batch=2) if reduced else None
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = run([(stage, (weight, bias)), linear(out_weight)], x, kept, "heavy", None, noise())
    dy = torch.randn_like(y)
    y.backward(dy)
    found = [t.grad.clone() for t in (weight, bias, out_weight, x)]

    pairs = [(t, saved[i + 1]) for i, t in enumerate(saved) if t.dtype == torch.int8]
    # The input of the chain and, where it is not redone, the output of attention come first.
    rows, *middle, qkv = [decoded(*pair) for pair in pairs]
    slots = slice(None) if kept is None else kept.picked
    leaf = qkv.clone().requires_grad_()
    q, k, v = (part.unflatten(-1, (2, 16)).transpose(1, 2) for part in leaf.split(32, -1))
    attended = ((q @ k.mT / 4).softmax(-1) @ v).transpose(1, 2).flatten(2)
    d_slots = dy[:, slots]
    (d_qkv,) = torch.autograd.grad(attended, leaf, d_slots @ out_weight)
    read = middle[0] if middle else attended.detach()
    d_x = torch.zeros_like(x)
    d_x[:, slots] = d_qkv @ weight.detach()
    wanted = [
        d_qkv.flatten(0, 1).T @ rows.flatten(0, 1),
        d_qkv.sum((0, 1)),
        d_slots.flatten(0, 1).T @ read.flatten(0, 1),
        d_x,
    ]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
