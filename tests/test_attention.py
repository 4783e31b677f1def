"""Attention: exact forward, renormalised backward."""

import pytest
import torch
from conftest import decoded, draw, groups_of, noise, run

from keepgrad import Layout
from keepgrad.ops.attention import Core, SelfAttention, add_dense, rotate
from keepgrad.ops.oracle import matrices
from keepgrad.ops.stages import Linear, linear

# Stored in 8 bits


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
    kept = draw(0, Layout((3, 4)), 0.5, "grid", "drop", batch=2) if reduced else None
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


# Everything kept


WIDTH, HEADS, DIM = 12, 3, 4


def attention(method="qkv", kv_heads=HEADS, tensors=(), **core):
    """The stage, with the tensors of its projection to q, k, v (and a gate) and of its core."""
    sections = (HEADS * DIM, kv_heads * DIM, kv_heads * DIM, *((HEADS * DIM,) if "gate" in core else ()))
    torch.manual_seed(0)
    projection = (
        torch.randn(sum(sections), WIDTH, dtype=torch.float64) * 0.4,
        torch.randn(sum(sections), dtype=torch.float64),
    )
    stage = SelfAttention(method, Linear(True), Core(HEADS, kv_heads, sections, **core), (2, len(tensors)))
    return stage, tuple(t.requires_grad_(t.is_floating_point()) for t in (*projection, *tensors))


def split(qkv, kv_heads=HEADS):
    """q, k, v and perhaps a gate, each `[batch, heads, n, dim]`, with k and v repeated for the heads of q."""
    heads = [HEADS, kv_heads, kv_heads] + [HEADS] * (qkv.shape[-1] == (2 * HEADS + 2 * kv_heads) * DIM)
    parts = qkv.split([count * DIM for count in heads], -1)
    parts = [one.unflatten(-1, (-1, DIM)).transpose(1, 2) for one in parts]
    return [one.repeat_interleave(HEADS // one.shape[1], 1) for one in parts]


def softmax_attention(q, k, v, added=0.0):
    scores = q @ k.mT / DIM**0.5 + added
    weight = (scores - scores.amax(-1, keepdim=True)).exp()
    return (weight / weight.sum(-1, keepdim=True) @ v).transpose(1, 2).flatten(2)


def tables():
    """Sine and cosine of rotary positions, `[12, dim]`, each angle for a channel and for the one half further on."""
    angles = torch.arange(12, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.3]).repeat(2)
    return angles.sin(), angles.cos()


def turned(rows):
    """Rotary positions as products of complex numbers."""
    numbers = torch.complex(rows[..., : DIM // 2], rows[..., DIM // 2 :])
    angles = torch.arange(12, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.3])
    numbers = numbers * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([numbers.real, numbers.imag], -1)


def forms():
    """A stage with its tensors, and the same attention written out as a function of qkv and the core's tensors."""
    later = torch.full((12, 12), -torch.inf, dtype=torch.float64).triu(1)
    bias = torch.randn(HEADS, 12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def rotary(qkv, *_):
        q, k, v = split(qkv)
        return softmax_attention(turned(q), turned(k), v)

    def gated(qkv):
        *rows, gate = split(qkv)
        return softmax_attention(*rows) * gate.transpose(1, 2).flatten(2).sigmoid()

    return {
        "bare": (attention(), lambda qkv: softmax_attention(*split(qkv))),
        "causal": (attention(causal=True), lambda qkv: softmax_attention(*split(qkv), later)),
        "fewer heads of k and v": (attention(kv_heads=1), lambda qkv: softmax_attention(*split(qkv, 1))),
        "a learned bias": (
            attention(biases=(add_dense(),), tensors=(bias.clone(),)),
            lambda qkv, bias: softmax_attention(*split(qkv), bias),
        ),
        "rotary": (attention(turn=rotate(half=True), tensors=tables()), rotary),
        "a gate": (attention(gate=torch.sigmoid), gated),
    }


@pytest.mark.parametrize("name", forms())
@pytest.mark.parametrize("save", ["heavy", "input"])
def test_all_kept_equals_autograd(name, save):
    (stage, tensors), written = forms()[name]
    x = torch.randn(2, 12, WIDTH, dtype=torch.float64, requires_grad=True)
    found = run([(stage, tensors)], x, None, save)
    weight, bias, *core = tensors
    wanted = written(x @ weight.t() + bias, *core)
    torch.testing.assert_close(found, wanted)
    inputs = (x, *tensors[: 2 + len(core) * (name == "a learned bias")])
    dy = torch.randn_like(wanted)
    for own, other in zip(torch.autograd.grad(found, inputs, dy), torch.autograd.grad(wanted, inputs, dy), strict=True):
        torch.testing.assert_close(own, other)


def test_gradcheck():
    stage, tensors = attention()
    x = torch.randn(1, 4, WIDTH, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *tensors: run([(stage, tensors)], x, None, "heavy"), (x, *tensors))


# Reduced


@pytest.mark.parametrize("reduce", ["drop", "fold", "pool"])
@pytest.mark.parametrize("save", ["heavy", "input"])
def test_kept_rows_attend_to_one_another_in_backward(reduce, save):
    """Softmax over the slots, each of which counts as often as it has members."""
    stage, tensors = attention()
    kept = draw(0, Layout((3, 4)), 0.5, "grid", reduce)
    m = matrices(groups_of(kept), kept.picked.tolist(), 12, reduce)
    x = torch.randn(2, 12, WIDTH, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(2, 12, HEADS * DIM, dtype=torch.float64)
    out = run([(stage, tensors)], x, kept, save)
    weight, bias = tensors
    qkv = x.detach() @ weight.t() + bias
    torch.testing.assert_close(out, softmax_attention(*split(qkv)))
    found = torch.autograd.grad(out, (x, weight, bias), dy)

    rows = (m.value @ x.detach()).requires_grad_()
    attended = softmax_attention(*split(rows @ weight.t() + bias), m.size.log())
    d_rows, *wanted = torch.autograd.grad(attended, (rows, weight, bias), m.place.t() @ dy)
    for own, other in zip(found, (m.grad.t() @ d_rows, *wanted), strict=True):
        torch.testing.assert_close(own, other)


@pytest.mark.parametrize("save", ["heavy", "input"])
def test_kept_queries_attend_to_everything_in_backward(save):
    stage, tensors = attention("query")
    kept = draw(0, Layout((3, 4)), 0.5, "grid", "drop")
    x = torch.randn(2, 12, WIDTH, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(2, 12, HEADS * DIM, dtype=torch.float64)
    found = torch.autograd.grad(run([(stage, tensors)], x, kept, save), (x, *tensors), dy)
    mask = torch.zeros(12, dtype=torch.float64).index_fill(0, kept.picked, 1).view(1, 12, 1)
    weight, bias = tensors
    wanted = torch.autograd.grad(softmax_attention(*split(x @ weight.t() + bias)), (x, *tensors), dy * mask)
    for own, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, other)
