"""The branch engine: a chain of stages, with its residual add, as one autograd.Function.

Forward runs every stage on all rows `[batch, positions, channels]` and saves slots of a few values. Backward reduces
the output gradient to slots once, walks the chain on slots alone, and gives the result back to all positions once.

What is saved depends on the policy:
- `heavy`: the input of the chain and the outputs of heavy stages; cheap stages are redone.
- `input`: the input of the chain, and what cannot be redone from it (the output of reduced attention, noise).
A value is saved only where the backward of some stage reads it: with frozen weights most are not. Where `noise` is
given, values are packed into 8 bits when they are saved, and unpacked one by one in backward.

Backward is the backward of the same chain on the slots, in which each saved value takes the place of the redone one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..sampling import Kept
from .stages import Link, Noise, Point, Pull, Stage, Tensors, autocast_dtype, cast
from .store import Packed, pack, packs, unpack

__all__ = ["SAVES", "engine", "run", "run_stages"]

SAVES = ("heavy", "input")
PIECE_BYTES = 2**24
"""About the largest temporary of a forward pass on the CPU that would otherwise have twice as much, or more."""
_KEPT_TENSORS = 5
Saved = Tensor | Packed | None


class _Engine(threading.local):
    """`saves` is True while autograd saves what a chain asks it to, which is packed already where it is to be."""

    saves = False


engine = _Engine()


def run(
    links: Sequence[Link],
    x: Tensor,
    kept: Kept | None,
    save: str,
    residual: Tensor | None = None,
    noise: Tensor | None = None,
    specs: dict[Any, _Spec] | None = None,
) -> Tensor:
    """Run a chain on `x`, all positions forward and the kept slots backward.

    Args:
        links: the stages and their tensors.
        x: rows `[batch, positions, channels]`.
        kept: the slots of the backward pass; None keeps every position.
        save: one of `SAVES`.
        residual: what to add to the output, `x` itself or another tensor.
        noise: random numbers to round with, where what is saved is stored in 8 bits (see `store`).
        specs: where what follows from these stages alone is kept from one step to the next.

    Returns:
        The output of the chain, plus the residual.
    """
    flat = [t for _, tensors in links for t in tensors]
    needs = tuple([t.requires_grad for t in flat])
    input_needs = x.requires_grad
    if not torch.is_grad_enabled() or not (input_needs or True in needs):
        out = run_stages(links, x)
        return out if residual is None else residual + out
    key = (needs, input_needs, save, kept is not None, residual is x, autocast_dtype(x))
    compiling = torch.compiler.is_compiling()
    spec = None if specs is None or compiling else specs.get(key)
    if spec is None:
        spec = _Spec(tuple(stage for stage, _ in links), tuple(len(tensors) for _, tensors in links), *key)
        if specs is not None and not compiling:
            specs[key] = spec
    kept_tensors = (None,) * _KEPT_TENSORS if kept is None else kept.tensors
    frame = None if kept is None else kept.frame if compiling else kept
    arguments = (spec, frame, x, None if residual is x else residual, noise, *kept_tensors, *flat)
    if noise is None or compiling:
        return _Chain.apply(*arguments)
    engine.saves = True
    try:
        return _Chain.apply(*arguments)
    finally:
        engine.saves = False


def run_stages(links: Sequence[Link], x: Tensor) -> Tensor:
    """The plain forward of a chain, under ordinary autograd."""
    for stage, tensors in links:
        x, _ = stage.forward(x, tensors, None, False)
    return x


class _Spec:
    """All of a chain that is not a tensor, and what follows from it.

    `first` is the first stage whose backward has to run. `saves` tells whether the value before each stage, and after
    the last one, is saved, `all_rows` whether it is needed at every position, `extras` whether a stage saves what it
    needs besides its input. A segment is a run of stages that is redone from the saved value before it: where it begins
    and ends, and for each value in it whether it is needed.
    """

    def __init__(
        self,
        stages: tuple[Stage, ...],
        counts: tuple[int, ...],
        needs: tuple[bool, ...],
        input_needs: bool,
        save: str,
        reduced: bool,
        adds_input: bool,
        autocast: torch.dtype | None,
    ) -> None:
        self.stages, self.input_needs, self.adds_input, self.autocast = stages, input_needs, adds_input, autocast
        self.count = len(stages)
        ends = [sum(counts[: i + 1]) for i in range(self.count)]
        self.places = [(end - count, end) for end, count in zip(ends, counts, strict=True)]
        self.needs = [needs[start:end] for start, end in self.places]
        self.first = 0 if input_needs else next(i for i, own in enumerate(self.needs) if any(own))
        redo = save == "input"
        reads = [i >= self.first and stages[i].needs_input(self.needs[i], redo) for i in range(self.count)]
        self.saves = [False] * (self.count + 1)
        needed = False
        for i in reversed(range(self.count)):
            stage = stages[i]
            wanted = stage.heavy and not redo and not stage.redoes_output
            self.saves[i + 1] = needed and (wanted or not stage.redoable(reduced))
            needed = reads[i] or (needed and not self.saves[i + 1])
        self.saves[0] = needed
        # Noise is always saved, because it cannot be redone.
        self.extras = [not stage.heavy or (i >= self.first and not redo) for i, stage in enumerate(stages)]
        self.all_rows = [any(stage.reads_all for stage in stages[i:]) for i in range(self.count + 1)]
        self.segments: list[tuple[int, int, list[bool]]] = []
        end = self.count
        while end > self.first:
            start = next(i for i in reversed(range(end)) if i == 0 or self.saves[i])
            later = [False] * (end - start + 1)
            for i in reversed(range(start, end)):
                later[i - start] = reads[i] or later[i - start + 1]
            self.segments.append((start, end, later))
            end = start

    def groups(self, flat: Sequence[Tensor]) -> list[Tensors]:
        """A flat list of tensors, stage by stage."""
        return [tuple(flat[start:end]) for start, end in self.places]

    def context(self, device: torch.device) -> AbstractContextManager:
        """The autocast state of the forward pass, without its cache: that would hand casts made here, which carry no
        graph, to other users of a weight."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.autocast, cache_enabled=False)


class _Chain(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, spec: _Spec, frame: Any, x: Tensor, residual: Tensor | None, noise: Tensor | None, *rest: Tensor
    ) -> Tensor:
        kept_tensors, flat = rest[:_KEPT_TENSORS], rest[_KEPT_TENSORS:]
        kept = Kept(*frame, *kept_tensors) if isinstance(frame, tuple) else frame
        tensors = spec.groups(flat)
        with spec.context(x.device):
            walked = _in_pieces(spec, x, tensors, kept, noise)
            out, values, extras = walked or _walk(spec, 0, spec.count, x, tensors, kept, noise)
        ctx.spec, ctx.frame = spec, frame
        ctx.extra_counts = [len(group) for group in extras]
        ctx.branch_dtype = out.dtype
        ctx.input_dtype = x.dtype
        saved = [*values, *(one for group in extras for one in group)]
        if noise is None:
            ctx.forms = None
        else:
            ctx.forms = [one.dtype if isinstance(one, Packed) else None for one in saved]
            saved = [t for one in saved for t in (one[:2] if isinstance(one, Packed) else (one,))]
        ctx.save_for_backward(*kept_tensors, *saved, *flat)
        if spec.adds_input:
            residual = x
        if residual is None:
            return out
        # A new tensor that nobody else holds takes the sum.
        in_place = spec.stages[-1].makes_new and out.dtype == residual.dtype
        return out.add_(residual) if in_place else residual + out

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        spec: _Spec = ctx.spec
        count, given = spec.count, iter(ctx.saved_tensors)
        kept_tensors = [next(given) for _ in range(_KEPT_TENSORS)]
        forms = ctx.forms or (None,) * (count + 1 + sum(ctx.extra_counts))
        saved = [next(given) if form is None else Packed(next(given), next(given), form) for form in forms]
        values, rest = saved[: count + 1], iter(saved[count + 1 :])
        extras: list[tuple[Saved, ...]] = [tuple([next(rest) for _ in range(n)]) for n in ctx.extra_counts]
        tensors = spec.groups(list(given))
        kept = Kept(*ctx.frame, *kept_tensors) if isinstance(ctx.frame, tuple) else ctx.frame

        last = None if spec.all_rows[count] else kept
        grad: Tensor | None = cast(dy if last is None else last.gather_grad(dy), ctx.branch_dtype)
        found: list[tuple[Tensor | None, ...]] = [(None,) * len(needs) for needs in spec.needs]
        owned = last is not None
        with spec.context(dy.device):
            for start, end, needed in spec.segments:
                pulls = _redo(spec, start, end, needed, values[start], tensors, extras, kept)
                for i in reversed(range(max(start, spec.first), end)):
                    assert grad is not None
                    if spec.stages[i].overwrites and not owned:
                        grad = grad.clone()
                    grad, found[i] = pulls[i](grad)
                    owned = spec.stages[i].makes_new
                    del pulls[i]
        dx = None
        if spec.input_needs:
            assert grad is not None
            grad = cast(grad, ctx.input_dtype)
            onto = cast(dy, ctx.input_dtype) if spec.adds_input else None
            dx = _give_back(grad, None if spec.all_rows[0] else kept, onto)
        d_residual = dy if ctx.needs_input_grad[3] else None
        return (None, None, dx, d_residual, None, *(None,) * _KEPT_TENSORS, *[g for group in found for g in group])


Walked = tuple[Tensor, list[Saved], list[tuple[Saved, ...]]]
"""An output, the saved values before each stage and after the last one, and the extras of each stage."""


def _walk(
    spec: _Spec,
    start: int,
    end: int,
    x: Tensor,
    tensors: list[Tensors],
    kept: Kept | None,
    noise: Tensor | None,
) -> Walked:
    """Stages `start` to `end` on all rows."""

    def value(rows: Tensor, i: int) -> Saved:
        """The slots of the value before stage `i`, as they are saved."""
        if not spec.saves[i]:
            return None
        slots = rows if kept is None or spec.all_rows[i] else kept.gather(rows)
        if noise is None:
            return slots
        return _stored(slots, noise, i, i < spec.count and spec.stages[i].reads_signs)

    values = [value(x, start)]
    extras: list[tuple[Saved, ...]] = []
    extra: Tensors
    out = x
    for i in range(start, end):
        stage = spec.stages[i]
        disposable = i > start and spec.stages[i - 1].makes_new and out is not values[-1]
        if stage.overwrites and disposable:
            out, extra = stage.overwrite(out), ()
        else:
            out, extra = stage.forward(out, tensors[i], kept, spec.extras[i])
        if noise is None or stage.exact_extras:
            extras.append(extra)
        else:
            extras.append(tuple(_stored(one, noise, i + 7) for one in extra))
        values.append(value(out, i + 1))
    return out, values, extras


def _stored(rows: Tensor, noise: Tensor, number: int, keeps_signs: bool = False) -> Saved:
    return pack(rows, noise, number, keeps_signs) if packs(rows) else rows


def _in_pieces(
    spec: _Spec, x: Tensor, tensors: list[Tensors], kept: Kept | None, noise: Tensor | None
) -> Walked | None:
    """The same for some samples at a time, on the CPU; None where that gains nothing.

    A temporary of tens of megabytes leaves the processor's cache, and the allocator returns it to the system, which
    hands it out again page by page. Drop path, at the end of a chain, draws its noise for all samples at once.
    Under autocast a chain runs whole, because there an estimate on the CPU stands for a run on an accelerator.
    """
    if kept is None or x.device.type != "cpu" or spec.autocast is not None or torch.compiler.is_compiling():
        return None
    if not kept.is_shared:
        return None  # each sample has a mask of its own
    end = spec.count
    while end and isinstance(spec.stages[end - 1], Noise):
        end -= 1
    if any(isinstance(stage, Noise) for stage in spec.stages[:end]):
        return None
    if any(t.dim() == 4 and t.shape[0] > 1 for group in tensors for t in group):
        return None  # a mask of attention that differs from sample to sample
    widest = max([x.shape[-1], *(t.shape[0] for group in tensors for t in group if t.dim() == 2)])
    per_sample = x.shape[1] * widest * x.element_size()
    count = max(1, PIECE_BYTES // max(1, per_sample))
    if x.shape[0] < 2 * count:
        return None
    whole: list[Tensor] = []
    for start in range(0, x.shape[0], count):
        rows = x[start : start + count]
        out, values, extras = _walk(spec, 0, end, rows, tensors, kept.of_first(len(rows)), noise)
        saved = [one for one in (*values, *(one for group in extras for one in group)) if one is not None]
        parts = [out, *(t for one in saved for t in (one[:2] if isinstance(one, Packed) else (one,)))]
        whole = whole or [part.new_empty(x.shape[0], *part.shape[1:]) for part in parts]
        for all_samples, part in zip(whole, parts, strict=True):
            all_samples[start : start + count] = part
    rest = iter(whole)

    def of_all(one: Saved) -> Saved:
        if one is None:
            return None
        return Packed(next(rest), next(rest), one.dtype) if isinstance(one, Packed) else next(rest)

    out = next(rest)
    values = [of_all(value) for value in values]
    extras = [tuple(of_all(one) for one in group) for group in extras]
    out, more_values, more_extras = _walk(spec, end, spec.count, out, tensors, kept, noise)
    return out, [*values, *more_values[1:]], [*extras, *more_extras]


def _give_back(slots: Tensor, kept: Kept | None, onto: Tensor | None) -> Tensor:
    if kept is not None:
        return kept.give_back(slots, onto)
    return slots if onto is None else slots + onto


def _redo(
    spec: _Spec,
    start: int,
    end: int,
    needed: list[bool],
    saved: Saved,
    tensors: list[Tensors],
    extras: list[tuple[Saved, ...]],
    kept: Kept | None,
) -> dict[int, Pull]:
    """Redo stages `start` to `end` from the saved value before them; the pull-back of each."""
    pulls = {}
    value = _unstored(saved)
    for i in range(start, end):
        need_output = needed[i + 1 - start]
        if i < spec.first and not need_output:
            continue
        need_input = i > spec.first or spec.input_needs
        extra: Any = extras[i]
        if extra:
            extra = tuple(map(_unstored, extra))
        at = Point(value, tensors[i], spec.needs[i], extra, kept, need_output, need_input)
        value, pulls[i] = spec.stages[i].vjp(at)
        if value is not None and spec.autocast is not None and i + 1 < end and spec.stages[i + 1].casts:
            # What is held until the next stage's turn is what it reads.
            value = cast(value, spec.autocast)
    return pulls


def _unstored(saved: Saved) -> Tensor | None:
    return unpack(saved) if isinstance(saved, Packed) else saved
