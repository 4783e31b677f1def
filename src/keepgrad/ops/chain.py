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
from dataclasses import dataclass

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
) -> Tensor:
    """Run a chain on `x`, all positions forward and the kept slots backward.

    Args:
        links: the stages and their tensors.
        x: rows `[batch, positions, channels]`.
        kept: the slots of the backward pass; None keeps every position.
        save: one of `SAVES`.
        residual: what to add to the output, `x` itself or another tensor.
        noise: random numbers to round with, where what is saved is stored in 8 bits (see `store`).

    Returns:
        The output of the chain, plus the residual.
    """
    stages = tuple(stage for stage, _ in links)
    tensors = tuple(tensors for _, tensors in links)
    needs = tuple(tuple(t.requires_grad for t in group) for group in tensors)
    if not torch.is_grad_enabled() or not (x.requires_grad or any(map(any, needs))):
        out = run_stages(links, x)
        return out if residual is None else residual + out
    spec = _Spec(
        stages=stages,
        needs=needs,
        input_needs=x.requires_grad,
        save=save,
        frame=None if kept is None else kept.frame,
        adds_input=residual is x,
        autocast=autocast_dtype(x),
    )
    kept_tensors = (None,) * _KEPT_TENSORS if kept is None else kept.tensors
    flat = [t for group in tensors for t in group]
    arguments = (spec, x, None if residual is x else residual, noise, *kept_tensors, *flat)
    if noise is None or torch.compiler.is_compiling():
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


@dataclass(frozen=True)
class _Spec:
    """All of a chain that is not a tensor."""

    stages: tuple[Stage, ...]
    needs: tuple[tuple[bool, ...], ...]
    input_needs: bool
    save: str
    frame: tuple[str, int, int, int] | None
    adds_input: bool
    autocast: torch.dtype | None

    @property
    def first(self) -> int:
        """The first stage whose backward has to run."""
        if self.input_needs:
            return 0
        return next(i for i, needs in enumerate(self.needs) if any(needs))

    def saves(self) -> list[bool]:
        """Whether the value before each stage, and after the last one, is saved."""
        found = [False] * (len(self.stages) + 1)
        needed = False
        for i in reversed(range(len(self.stages))):
            stage = self.stages[i]
            redoable = stage.redoable(self.frame is not None)
            wanted = stage.heavy and self.save == "heavy" and not stage.redoes_output
            found[i + 1] = needed and (wanted or not redoable)
            reads = i >= self.first and stage.needs_input(self.needs[i], self.save == "input")
            needed = reads or (needed and not found[i + 1])
        found[0] = needed
        return found

    def keeps_extras(self, i: int) -> bool:
        """Whether stage `i` saves what it needs besides its input: noise always, because it cannot be redone."""
        return not self.stages[i].heavy or (i >= self.first and self.save == "heavy")

    def kept_at(self, i: int, kept: Kept | None) -> Kept | None:
        """The slots of the value before stage `i`."""
        return None if any(stage.reads_all for stage in self.stages[i:]) else kept

    def groups(self, flat: Sequence[Tensor]) -> list[Tensors]:
        """A flat list of tensors, stage by stage."""
        rest = iter(flat)
        return [tuple(next(rest) for _ in needs) for needs in self.needs]

    def context(self, device: torch.device) -> AbstractContextManager:
        """The autocast state of the forward pass, without its cache: that would hand casts made here, which carry no
        graph, to other users of a weight."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.autocast, cache_enabled=False)


class _Chain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, spec: _Spec, x: Tensor, residual: Tensor | None, noise: Tensor | None, *rest: Tensor) -> Tensor:
        kept_tensors, flat = rest[:_KEPT_TENSORS], rest[_KEPT_TENSORS:]
        kept = None if spec.frame is None else Kept(*spec.frame, *kept_tensors)
        tensors = spec.groups(flat)
        with spec.context(x.device):
            walked = _in_pieces(spec, x, tensors, kept, noise)
            out, values, extras = walked or _walk(spec, 0, len(tensors), x, tensors, kept, noise)
        ctx.spec = spec
        ctx.extra_counts = tuple(map(len, extras))
        ctx.branch_dtype = out.dtype
        ctx.input_dtype = x.dtype
        saved = [*values, *(one for group in extras for one in group)]
        ctx.forms = tuple(one[1:] if isinstance(one, Packed) else None for one in saved)
        ctx.save_for_backward(*kept_tensors, *(one[0] if isinstance(one, Packed) else one for one in saved), *flat)
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
        count = len(spec.stages)
        given = iter(ctx.saved_tensors)
        kept_tensors = [next(given) for _ in range(_KEPT_TENSORS)]
        saved = iter([next(given) if form is None else Packed(next(given), *form) for form in ctx.forms])
        values: list[Saved] = [next(saved) for _ in range(count + 1)]
        extras: list[tuple[Saved, ...]] = [tuple(next(saved) for _ in range(n)) for n in ctx.extra_counts]
        tensors = spec.groups(list(given))
        kept = None if spec.frame is None else Kept(*spec.frame, *kept_tensors)

        last = spec.kept_at(count, kept)
        grad: Tensor | None = cast(dy if last is None else last.gather_grad(dy), ctx.branch_dtype)
        found: list[tuple[Tensor | None, ...]] = [(None,) * len(needs) for needs in spec.needs]
        end = count
        owned = last is not None
        with spec.context(dy.device):
            while end > spec.first:
                start = next(i for i in reversed(range(end)) if i == 0 or values[i] is not None)
                pulls = _redo(spec, start, end, values[start], tensors, extras, kept)
                for i in reversed(range(max(start, spec.first), end)):
                    assert grad is not None
                    if spec.stages[i].overwrites and not owned:
                        grad = grad.clone()
                    grad, found[i] = pulls[i](grad)
                    owned = spec.stages[i].makes_new
                    del pulls[i]
                end = start
        dx = None
        if spec.input_needs:
            assert grad is not None
            grad = cast(grad, ctx.input_dtype)
            onto = cast(dy, ctx.input_dtype) if spec.adds_input else None
            dx = _give_back(grad, spec.kept_at(0, kept), onto)
        d_residual = dy if ctx.needs_input_grad[2] else None
        flat = [g for group in found for g in group]
        return (None, dx, d_residual, None, *(None,) * _KEPT_TENSORS, *flat)


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
    saves = spec.saves()

    def value(rows: Tensor, i: int) -> Saved:
        """The slots of the value before stage `i`, as they are saved."""
        if not saves[i]:
            return None
        signs = i < len(spec.stages) and spec.stages[i].reads_signs
        return _stored(_slots(rows, spec.kept_at(i, kept)), noise, i, signs)

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
            out, extra = stage.forward(out, tensors[i], kept, spec.keeps_extras(i))
        extras.append(extra if stage.exact_extras else tuple(_stored(one, noise, i + 7) for one in extra))
        values.append(value(out, i + 1))
    return out, values, extras


def _stored(rows: Tensor, noise: Tensor | None, number: int, keeps_signs: bool = False) -> Saved:
    return rows if noise is None or not packs(rows) else pack(rows, noise, number, keeps_signs)


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
    end = len(spec.stages)
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
        parts = [out, *(one[0] if isinstance(one, Packed) else one for one in saved)]
        whole = whole or [part.new_empty(x.shape[0], *part.shape[1:]) for part in parts]
        for all_samples, part in zip(whole, parts, strict=True):
            all_samples[start : start + count] = part
    rest = iter(whole)

    def of_all(one: Saved) -> Saved:
        if one is None:
            return None
        return Packed(next(rest), *one[1:]) if isinstance(one, Packed) else next(rest)

    out = next(rest)
    values = [of_all(value) for value in values]
    extras = [tuple(of_all(one) for one in group) for group in extras]
    out, more_values, more_extras = _walk(spec, end, len(spec.stages), out, tensors, kept, noise)
    return out, [*values, *more_values[1:]], [*extras, *more_extras]


def _slots(rows: Tensor, kept: Kept | None) -> Tensor:
    return rows if kept is None else kept.gather(rows)


def _give_back(slots: Tensor, kept: Kept | None, onto: Tensor | None) -> Tensor:
    if kept is not None:
        return kept.give_back(slots, onto)
    return slots if onto is None else slots + onto


def _redo(
    spec: _Spec,
    start: int,
    end: int,
    saved: Saved,
    tensors: list[Tensors],
    extras: list[tuple[Saved, ...]],
    kept: Kept | None,
) -> dict[int, Pull]:
    """Redo stages `start` to `end` from the saved value before them; the pull-back of each."""
    needed = [False] * (end + 1)
    for i in reversed(range(start, end)):
        reads = i >= spec.first and spec.stages[i].needs_input(spec.needs[i], spec.save == "input")
        needed[i] = reads or needed[i + 1]
    pulls = {}
    value = _unstored(saved)
    for i in range(start, end):
        if i < spec.first and not needed[i + 1]:
            continue
        need_input = i > spec.first or spec.input_needs
        extra = tuple(one for one in map(_unstored, extras[i]) if one is not None)
        at = Point(value, tensors[i], spec.needs[i], extra, kept, needed[i + 1], need_input)
        value, pulls[i] = spec.stages[i].vjp(at)
        if value is not None and spec.autocast is not None and i + 1 < end and spec.stages[i + 1].casts:
            # What is held until the next stage's turn is what it reads.
            value = cast(value, spec.autocast)
    return pulls


def _unstored(saved: Saved) -> Tensor | None:
    return unpack(saved) if isinstance(saved, Packed) else saved
