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
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._torch import only_counts
from ..sampling import Kept
from .stages import Link, Noise, Point, Pull, Stage, Tensors, autocast_dtype, cast
from .store import Packed, pack, packs, unpack

__all__ = ["SAVES", "Chain", "engine", "run_stages"]

SAVES = ("heavy", "input")
PIECE_BYTES = 2**24
"""About the largest temporary of a forward pass on the CPU that would otherwise have twice as much, or more."""
_KEPT_TENSORS = 5
Saved = Tensor | Packed | None


class _Engine(threading.local):
    """`saves` is True while autograd saves what a chain asks it to, which is packed already where it is to be.

    `outside` is what packs the rest of the model meanwhile (see `outside`); it need not watch what a chain does.
    """

    saves = False
    outside: Any = None


engine = _Engine()


class Chain:
    """Stages in a row, with `counts` tensors each. What follows from them is worked out once for each way to run."""

    def __init__(self, stages: Sequence[Stage], counts: Sequence[int]) -> None:
        self.stages, self.counts = tuple(stages), tuple(counts)
        self.specs: dict[Any, _Spec] = {}

    def run(
        self,
        x: Tensor,
        tensors: Sequence[Tensor],
        kept: Kept | None,
        save: str,
        residual: Tensor | None = None,
        noise: Tensor | None = None,
    ) -> Tensor:
        """Run the chain on `x`, all positions forward and the kept slots backward.

        Args:
            x: rows `[batch, positions, channels]`.
            tensors: those of all stages, in order.
            kept: the slots of the backward pass; None keeps every position.
            save: one of `SAVES`.
            residual: what to add to the output, `x` itself or another tensor.
            noise: random numbers to round with, where what is saved is stored in 8 bits (see `store`).

        Returns:
            The output of the chain, plus the residual.
        """
        needs = tuple([t.requires_grad for t in tensors])
        input_needs = x.requires_grad
        if not (input_needs or True in needs) or not torch.is_grad_enabled():
            out = self.plain(x, tensors)
            return out if residual is None else residual + out
        adds_input = residual is x
        if adds_input:
            residual = None
        key = (needs, input_needs, save, kept is not None, adds_input, autocast_dtype(x))
        if torch.compiler.is_compiling():
            spec = _Spec(self.stages, self.counts, *key)
            frame, indices = (None, ()) if kept is None else (kept.frame, kept.tensors)
            return _Chain.apply(spec, frame, x, residual, noise, *indices, *tensors)
        found = self.specs.get(key)
        if found is None:
            found = self.specs[key] = _Spec(self.stages, self.counts, *key)
        if noise is None:
            return _Chain.apply(found, kept, x, residual, None, *tensors)
        engine.saves = True
        paused = engine.outside is not None and engine.outside.pause()
        try:
            return _Chain.apply(found, kept, x, residual, noise, *tensors)
        finally:
            if paused:
                engine.outside.resume()
            engine.saves = False

    def plain(self, x: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """The same under ordinary autograd."""
        rest = iter(tensors)
        return run_stages([(s, tuple(islice(rest, n))) for s, n in zip(self.stages, self.counts, strict=True)], x)


def run_stages(links: Sequence[Link], x: Tensor) -> Tensor:
    """The plain forward of a chain, under ordinary autograd."""
    for stage, tensors in links:
        x, _ = stage.forward(x, tensors, None, False)
    return x


class _Turn(NamedTuple):
    """A stage in backward: which one, and what it has to do there."""

    place: int
    stage: Stage
    needs: tuple[bool, ...]
    need_output: bool
    need_input: bool
    casts_output: bool


class _Spec:
    """All of a chain that is not a tensor, and what follows from it.

    `first` is the first stage whose backward has to run. `saves` tells whether the value before each stage, and after
    the last one, is saved, `all_rows` whether it is needed at every position, `extras` whether a stage saves what it
    needs besides its input. A segment is a run of stages that is redone from the saved value before it: where it
    begins, and the turns of its stages. `overwrites` tells whether a stage may write over the value before it, if that
    is not saved.
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
        self.tensor_count = sum(counts)
        self.no_gradients: list[tuple[Tensor | None, ...]] = [(None,) * count for count in counts]
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
        self.saved_at = [i for i, saves in enumerate(self.saves) if saves]
        # Noise is always saved, because it cannot be redone.
        self.extras = [not stage.heavy or (i >= self.first and not redo) for i, stage in enumerate(stages)]
        self.all_rows = [any(stage.reads_all for stage in stages[i:]) for i in range(self.count + 1)]
        self.overwrites = [stage.overwrites and i > 0 and stages[i - 1].makes_new for i, stage in enumerate(stages)]
        self.segments: list[tuple[int, list[_Turn]]] = []
        end = self.count
        while end > self.first:
            start = next(i for i in reversed(range(end)) if i == 0 or self.saves[i])
            needed, turns = False, []
            for i in reversed(range(start, end)):
                if i >= self.first or needed:
                    casts = autocast is not None and i + 1 < end and stages[i + 1].casts
                    turns.append(_Turn(i, stages[i], self.needs[i], needed, i > self.first or input_needs, casts))
                needed = reads[i] or needed
            self.segments.append((start, turns[::-1]))
            end = start

    def groups(self, flat: Sequence[Tensor]) -> list[Tensors]:
        """A flat list of tensors, stage by stage."""
        return [tuple(flat[start:end]) for start, end in self.places]


class _Chain(torch.autograd.Function):
    """`kept` is a Kept; under torch.compile its frame, with its tensors before the others."""

    @staticmethod
    def forward(
        ctx, spec: _Spec, kept: Any, x: Tensor, residual: Tensor | None, noise: Tensor | None, *tensors: Tensor
    ) -> Tensor:
        ctx.spec, ctx.kept = spec, kept
        indices: tuple[Tensor, ...] = ()
        if isinstance(kept, tuple):
            indices, tensors = tensors[:_KEPT_TENSORS], tensors[_KEPT_TENSORS:]
            kept = Kept(*kept, *indices)
        if spec.autocast is None:
            out, values, extras = _forward(spec, x, spec.groups(tensors), kept, noise)
        else:
            # Its cache would hand casts made here, which carry no graph, to other users of a weight.
            with torch.autocast(x.device.type, dtype=spec.autocast, cache_enabled=False):
                out, values, extras = _forward(spec, x, spec.groups(tensors), kept, noise)
        ctx.extra_counts = [len(group) for group in extras]
        ctx.dtypes = out.dtype, x.dtype
        saved: list[Any] = [value for value, saves in zip(values, spec.saves, strict=True) if saves]
        saved += [one for group in extras for one in group]
        ctx.forms = None
        if noise is not None:
            ctx.forms = [one.dtype if isinstance(one, Packed) else None for one in saved]
            saved = [t for one in saved for t in (one[:2] if isinstance(one, Packed) else (one,))]
        ctx.save_for_backward(*indices, *tensors, *saved)
        if spec.adds_input:
            residual = x
        if residual is None:
            return out
        # A new tensor that nobody else holds takes the sum.
        in_place = spec.stages[-1].makes_new and out.dtype == residual.dtype
        return out.add_(residual) if in_place else residual + out

    @staticmethod
    def backward(ctx, dy: Tensor):
        # The decorator costs as much as a stage; it is for gradients of gradients, which it refuses.
        return _backward_once(ctx, dy) if torch.is_grad_enabled() else _backward(ctx, dy)


Walked = tuple[Tensor, list[Saved], list[tuple[Saved, ...]]]
"""An output, the saved values before each stage and after the last one, and the extras of each stage."""


def _forward(spec: _Spec, x: Tensor, tensors: list[Tensors], kept: Kept | None, noise: Tensor | None) -> Walked:
    return _in_pieces(spec, x, tensors, kept, noise) or _walk(spec, 0, spec.count, x, tensors, kept, noise)


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
    values: list[Saved] = [_value(spec, start, x, kept, noise) if spec.saves[start] else None]
    extras: list[tuple[Saved, ...]] = []
    extra: tuple[Saved, ...]
    out = x
    for i in range(start, end):
        stage = spec.stages[i]
        if spec.overwrites[i] and i > start and out is not values[-1]:
            out, extra = stage.overwrite(out), ()
        else:
            out, extra = stage.forward(out, tensors[i], kept, spec.extras[i])
        if noise is not None and extra and not stage.exact_extras:
            extra = tuple([_stored(one, noise, i + 7) for one in extra])
        extras.append(extra)
        values.append(_value(spec, i + 1, out, kept, noise) if spec.saves[i + 1] else None)
    return out, values, extras


def _value(spec: _Spec, i: int, rows: Tensor, kept: Kept | None, noise: Tensor | None) -> Saved:
    """The slots of the value before stage `i`, as they are saved."""
    slots = rows if kept is None or spec.all_rows[i] else kept.gather(rows)
    if noise is None:
        return slots
    return _stored(slots, noise, i, i < spec.count and spec.stages[i].reads_signs)


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
    if x.device.type != "cpu" or spec.autocast is not None or torch.compiler.is_compiling():
        return None
    if noise is None if kept is None else not kept.is_shared:
        return None  # all rows are saved as they are, or each sample has a mask of its own
    end = spec.count
    while end and isinstance(spec.stages[end - 1], Noise):
        end -= 1
    if any(isinstance(stage, Noise) or stage.noises for stage in spec.stages[:end]):
        return None
    if any(t.dim() == 4 and t.shape[0] > 1 for group in tensors for t in group):
        return None  # a mask of attention that differs from sample to sample
    widest = max([x.shape[-1], *(t.shape[0] for group in tensors for t in group if t.dim() == 2)])
    per_sample = x.shape[1] * widest * x.element_size()
    count = max(1, PIECE_BYTES // max(1, per_sample))
    if x.shape[0] < 2 * count:
        return None
    whole: list[Tensor] = []
    starts = range(0, x.shape[0], count)
    for start in starts[:2] if only_counts(x) else starts:  # two stand for all: one is held while the next is made
        rows = x[start : start + count]
        out, values, extras = _walk(spec, 0, end, rows, tensors, kept and kept.of_first(len(rows)), noise)
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


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    spec: _Spec = ctx.spec
    kept, given, first = ctx.kept, ctx.saved_tensors, 0
    if isinstance(kept, tuple):
        first = _KEPT_TENSORS
        kept = Kept(*kept, *given[:first])
    last = first + spec.tensor_count
    tensors, saved = spec.groups(given[first:last]), given[last:]
    if ctx.forms is not None:
        rest = iter(saved)
        saved = [next(rest) if form is None else Packed(next(rest), next(rest), form) for form in ctx.forms]
    place = len(spec.saved_at)
    values = dict(zip(spec.saved_at, saved, strict=False))
    extras: list[Any] = []
    for count in ctx.extra_counts:
        extras.append(saved[place : place + count])
        place += count
    del given, saved

    branch_dtype, input_dtype = ctx.dtypes
    slots = None if spec.all_rows[-1] else kept
    grad: Tensor | None = cast(dy if slots is None else slots.gather_grad(dy), branch_dtype)
    is_owned = slots is not None
    if spec.autocast is None:
        grad, found = _through(spec, grad, is_owned, values, tensors, extras, kept)
    else:
        with torch.autocast(dy.device.type, dtype=spec.autocast, cache_enabled=False):
            grad, found = _through(spec, grad, is_owned, values, tensors, extras, kept)
    dx = None
    if spec.input_needs:
        assert grad is not None
        dx = cast(grad, input_dtype)
        onto = cast(dy, input_dtype) if spec.adds_input else None
        if kept is not None and not spec.all_rows[0]:
            dx = kept.give_back(dx, onto)
        elif onto is not None:
            dx = dx + onto
    d_residual = dy if ctx.needs_input_grad[3] else None
    return (None, None, dx, d_residual, None, *(None,) * first, *[one for group in found for one in group])


_backward_once = once_differentiable(_backward)


def _through(
    spec: _Spec,
    grad: Tensor | None,
    is_owned: bool,
    values: dict[int, Saved],
    tensors: list[Tensors],
    extras: list[Any],
    kept: Kept | None,
) -> tuple[Tensor | None, list[tuple[Tensor | None, ...]]]:
    """The gradient of the chain's output slots back to its input slots, and those of the tensors of each stage.

    Each segment is redone from the saved value before it, and then goes back stage by stage.
    """
    found = spec.no_gradients.copy()
    for start, turns in spec.segments:
        pulls = _redo(spec, turns, values.pop(start, None), tensors, extras, kept)
        for turn in reversed(turns):
            if turn.place < spec.first:
                break
            assert grad is not None
            if turn.stage.overwrites and not is_owned:
                grad = grad.clone()
            grad, found[turn.place] = pulls.pop()(grad)
            is_owned = turn.stage.makes_new
    return grad, found


def _redo(
    spec: _Spec, turns: list[_Turn], saved: Saved, tensors: list[Tensors], extras: list[Any], kept: Kept | None
) -> list[Pull]:
    """Redo the stages of a segment from the saved value before it; the pull-back of each."""
    pulls: list[Pull] = []
    value = _unstored(saved)
    for i, stage, needs, need_output, need_input, casts_output in turns:
        extra = extras[i]
        if extra:
            extra = [_unstored(one) for one in extra]
        value, pull = stage.vjp(Point(value, tensors[i], needs, extra, kept, need_output, need_input))
        pulls.append(pull)
        if casts_output and value is not None:
            value = value.to(spec.autocast)  # what is held until the next stage's turn is what it reads
    return pulls


def _unstored(saved: Saved) -> Tensor | None:
    return unpack(saved) if isinstance(saved, Packed) else saved
