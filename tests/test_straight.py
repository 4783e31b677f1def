"""The straight code of a chain does what walking it does, to the bit, and frees what it redoes."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from conftest import draw, noise

from keepgrad import Layout
from keepgrad.ops.attention import Core, SelfAttention
from keepgrad.ops.spec import Spec
from keepgrad.ops.stages import Linear, Pointwise, gelu, layer_norm, linear, pointwise
from keepgrad.ops.store import Packed
from keepgrad.ops.walk import walk_backward, walk_forward

WIDTH, POSITIONS = 32, 12


def tensor(*shape):
    return torch.randn(shape) * 0.3


def links_of(kind):
    torch.manual_seed(0)
    norm = layer_norm((WIDTH,), tensor(WIDTH), tensor(WIDTH), 1e-6)
    if kind == "attention":
        projection, tensors = linear(tensor(3 * WIDTH, WIDTH), tensor(3 * WIDTH))
        core = Core(heads=2, kv_heads=2, sections=(WIDTH,) * 3)
        attention = SelfAttention("qkv", projection, core, (len(tensors), 0)), tensors
        return [norm, attention, linear(tensor(WIDTH, WIDTH), tensor(WIDTH))]
    if kind == "others":  # stages that are called by their own methods, between those that are written out
        return [
            pointwise(torch.tanh),
            linear(tensor(64, WIDTH)),
            pointwise(F.silu),
            gelu("tanh"),
            linear(tensor(WIDTH, 64)),
        ]
    return [
        norm,
        linear(tensor(64, WIDTH), tensor(64)),
        gelu("none"),
        linear(tensor(WIDTH, 64), tensor(WIDTH), tensor(WIDTH)),
    ]


def spec_of(links, save, reduced, frozen=(), input_needs=True):
    stages, groups = zip(*links, strict=True)
    needs = tuple(i not in frozen for i, group in enumerate(groups) for _ in group)
    counts = tuple(len(group) for group in groups)
    return Spec(tuple(stages), counts, needs, input_needs, save, reduced, True, None, True)


def flat(run):
    """All tensors of a forward: its output, what it saved, its extras."""
    out, values, extras = run
    saved = [*values, *(one for group in extras for one in group)]
    return [out, *(t for one in saved for t in (one[:2] if isinstance(one, Packed) else [one]))]


@torch.no_grad()
@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("frozen", [(), (0, 1), (1, 2, 3)], ids=["all", "first frozen", "last frozen"])
@pytest.mark.parametrize("reduce", [None, "fold", "scaled"])
@pytest.mark.parametrize("save", ["heavy", "input"])
@pytest.mark.parametrize("kind", ["mlp", "attention", "others"])
def test_it_is_the_walk_to_the_bit(kind, save, reduce, frozen, packs):
    links = links_of(kind)
    spec = spec_of(links, save, reduce is not None, frozen)
    tensors = [t for _, group in links for t in group]
    kept = None if reduce is None else draw(3, Layout((3, 4)), 0.5, "grid", reduce)
    x, dy, rounds = tensor(2, POSITIONS, WIDTH), tensor(2, POSITIONS, WIDTH), noise() if packs else None
    straight = spec.forward(0, spec.count, packs)(x, tensors, kept, rounds)
    walked = walk_forward(spec, x, tensors, kept, rounds)
    torch.testing.assert_close(flat(straight), flat(walked), rtol=0, atol=0)
    dtypes = (x.dtype, x.dtype)
    dx, found = spec.backward(packs)(dy, tensors, kept, *straight[1:], dtypes)
    wanted_dx, wanted = walk_backward(spec, dy, tensors, kept, *walked[1:], dtypes)
    torch.testing.assert_close((dx, list(found)), (wanted_dx, list(wanted)), rtol=0, atol=0)
    assert [one is None for one in found] == [i in frozen for i, (_, group) in enumerate(links) for _ in group]


@torch.no_grad()
def test_what_is_redone_is_freed_before_the_next_gradient_is_made(monkeypatch):
    """The output of a GELU, the largest value of an MLP, is gone when the gradient of the same size is made."""
    links = [*links_of("mlp")[:3], linear(tensor(WIDTH, 64))]
    spec = spec_of(links, "heavy", False)
    tensors = [t for _, group in links for t in group]
    x = tensor(2, POSITIONS, WIDTH)
    _, values, extras = spec.forward(0, 4, False)(x, tensors, None, None)
    backward = spec.backward(False)
    redone, alive = [], []
    own_gelu, own_mm = F.gelu, torch.Tensor.mm

    def watched_gelu(*args, **kwargs):
        out = own_gelu(*args, **kwargs)
        redone.append(weakref.ref(out))
        return out

    def watched_mm(a, b):
        if b is tensors[-1]:
            alive.extend(one() is not None for one in redone)
        return own_mm(a, b)

    monkeypatch.setitem(backward.__globals__, "gelu", watched_gelu)
    monkeypatch.setattr(torch.Tensor, "mm", watched_mm)
    backward(tensor(2, POSITIONS, WIDTH), tensors, None, values, extras, (x.dtype, x.dtype))
    assert alive == [False]


def test_equal_chains_share_their_code():
    first, second = (spec_of(links_of("mlp"), "heavy", True) for _ in range(2))
    assert first.backward(False).__code__ is second.backward(False).__code__
    assert "native_layer_norm" in first.backward(False).source


def test_a_type_that_differs_is_left_to_the_stages():
    stages = (Linear(False), Pointwise(torch.tanh))
    spec = Spec(stages, (1, 0), (True,), True, "heavy", False, False, None, False)
    assert ".mm(" not in spec.backward(False).source
