"""The branch engine: runs a chain of stages and its residual add as one autograd.Function.

Forward runs every stage on all rows `[batch, positions, channels]`. Of the values between the stages it saves only a
few, and of those only the slots. Backward reduces the output gradient to slots once, goes back through the chain on
slots alone, and gives the result back to all positions once.

The setting `save` says which values are saved:
- `heavy`: the input of the chain and the outputs of heavy stages. Cheap stages are redone in backward.
- `input`: the input of the chain, and what cannot be redone from it (the output of reduced attention, noise).
A value is saved only if the backward of some stage reads it. With frozen weights, most values are not read. If `noise`
is given, values are packed into 8 bits when they are saved, and unpacked one by one in backward.

Backward redoes the values that were not saved, on the slots. Where a value was saved, the saved one is used.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, islice
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._torch import only_counts
from ..sampling import Kept
from .spec import Spec
from .stages import Link, Stage, autocast_dtype
from .store import Packed
from .straight import typed_count
from .walk import Saved, Walked, walk_backward, walk_forward

__all__ = ["SAVES", "Chain", "engine", "run_stages"]

SAVES = ("heavy", "input")
PIECE_BYTES = 2**24
"""Target size of one temporary on the CPU. Batches that would need twice as much or more run in pieces of this size."""
_KEPT_TENSORS = 5


class _Engine(threading.local):
    """What the engine tells `outside.Outside`, the context that packs what the rest of the model saves.

    `saves` is True while a chain runs that packs its own values, so they must not be packed again. `outside` is the
    context that is on, or None. Such a chain pauses it while it runs, if possible.
    """

    saves = False
    outside: Any = None


engine = _Engine()


class Chain:
    """A sequence of stages. `counts` says how many tensors each stage has.

    `specs` caches one `Spec` for each way to run the chain.
    """

    def __init__(self, stages: Sequence[Stage], counts: Sequence[int]) -> None:
        self.stages, self.counts = tuple(stages), tuple(counts)
        self.specs: dict[Any, Spec] = {}
        places = zip(self.stages, self.counts, accumulate(self.counts, initial=0), strict=False)
        self.typed = [place + i for stage, count, place in places for i in range(typed_count(stage, count))]

    def run(
        self,
        x: Tensor,
        tensors: Sequence[Tensor],
        kept: Kept | None,
        save: str,
        residual: Tensor | None = None,
        noise: Tensor | None = None,
    ) -> Tensor:
        """Run the chain on `x`: forward on all positions, backward on the kept slots.

        Args:
            x: rows `[batch, positions, channels]`.
            tensors: the tensors of all stages, in order.
            kept: the slots of the backward pass; None keeps every position.
            save: one of `SAVES`.
            residual: a tensor to add to the output; it may be `x` itself.
            noise: if given, saved values are stored in 8 bits, rounded with these random numbers (see `store`).

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
        autocast = autocast_dtype(x)
        key = (needs, input_needs, save, kept is not None, adds_input, autocast)
        if torch.compiler.is_compiling():
            spec = Spec(self.stages, self.counts, *key)
            frame, indices = (None, ()) if kept is None else (kept.frame, kept.tensors)
            return _Chain.apply(spec, frame, x, residual, noise, *indices, *tensors)
        dtype = x.dtype
        is_uniform = autocast is None and all([tensors[i].dtype is dtype for i in self.typed])
        found = self.specs.get((key, is_uniform))
        if found is None:
            found = self.specs[key, is_uniform] = Spec(self.stages, self.counts, *key, is_uniform)
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
        """Run the chain under ordinary autograd."""
        rest = iter(tensors)
        return run_stages([(s, tuple(islice(rest, n))) for s, n in zip(self.stages, self.counts, strict=True)], x)


def run_stages(links: Sequence[Link], x: Tensor) -> Tensor:
    """Run stages one after the other, under ordinary autograd."""
    for stage, tensors in links:
        x, _ = stage.forward(x, tensors, None, False)
    return x


class _Chain(torch.autograd.Function):
    """The autograd.Function of a chain.

    In eager mode `kept` is a `Kept`. Under torch.compile it is the frame of a `Kept`, and the tensors of the `Kept` are
    the first of `tensors`.
    """

    @staticmethod
    def forward(
        ctx, spec: Spec, kept: Any, x: Tensor, residual: Tensor | None, noise: Tensor | None, *tensors: Tensor
    ) -> Tensor:
        if torch.compiler.is_compiling():
            indices = () if kept is None else tensors[:_KEPT_TENSORS]
            given = tensors[len(indices) :]
            slots = None if kept is None else Kept(*kept, *indices)
        else:
            given, slots = tensors, kept
        if spec.autocast is None:
            out, saved, extras = _forward(spec, x, given, slots, noise)
        else:
            # Cache off: casts made here carry no graph, and the cache would hand them to other users of a weight.
            with torch.autocast(x.device.type, dtype=spec.autocast, cache_enabled=False):
                out, saved, extras = _forward(spec, x, given, slots, noise)
        for group in extras:
            saved += group
        counts = [len(group) for group in extras]
        forms = None
        if noise is not None:
            forms = [one.dtype if isinstance(one, Packed) else None for one in saved]
            saved = [t for one in saved for t in (one[:2] if isinstance(one, Packed) else (one,))]
        ctx.state = spec, kept, counts, forms, (out.dtype, x.dtype)
        ctx.save_for_backward(*tensors, *saved)
        if spec.adds_input:
            residual = x
        if residual is None:
            return out
        # Add in place if the output is a new tensor that nobody else holds.
        in_place = spec.makes_new and out.dtype == residual.dtype
        return out.add_(residual) if in_place else residual + out

    @staticmethod
    def backward(ctx, dy: Tensor):
        # The decorator raises an error for second derivatives. It costs as much time as a stage, so use it only then.
        return _backward_once(ctx, dy) if torch.is_grad_enabled() else _backward(ctx, dy)


def _forward(spec: Spec, x: Tensor, tensors: Sequence[Tensor], kept: Kept | None, noise: Tensor | None) -> Walked:
    if torch.compiler.is_compiling():
        return walk_forward(spec, x, tensors, kept, noise)
    count = _samples_at_once(spec, x, tensors, kept, noise)
    if count is None:
        return spec.forward(0, spec.count, noise is not None)(x, tensors, kept, noise)
    return _in_pieces(spec, count, x, tensors, kept, noise)


def _samples_at_once(
    spec: Spec, x: Tensor, tensors: Sequence[Tensor], kept: Kept | None, noise: Tensor | None
) -> int | None:
    """How many samples to run at a time on the CPU; None to run all at once, where pieces gain nothing.

    Pieces are faster because a temporary of tens of megabytes does not fit the processor's cache, and the allocator
    returns it to the system and gets it back page by page. Under autocast a chain always runs whole: there, a run on
    the CPU may be an estimate for another device.
    """
    if spec.piece_end is None or x.device.type != "cpu":
        return None
    if noise is None if kept is None else not kept.is_shared:
        return None  # all rows are saved unchanged, or each sample has its own mask
    if x.nbytes * spec.widening(x, tensors) < 2 * PIECE_BYTES:
        return None
    if any(t.dim() == 4 and t.shape[0] > 1 for t in tensors):
        return None  # an attention mask that differs from sample to sample
    per_sample = x.nbytes // x.shape[0] * spec.widening(x, tensors)
    count = max(1, int(PIECE_BYTES // per_sample))
    return None if x.shape[0] < 2 * count else count


def _in_pieces(
    spec: Spec, count: int, x: Tensor, tensors: Sequence[Tensor], kept: Kept | None, noise: Tensor | None
) -> Walked:
    """Run forward for `count` samples at a time.

    Noise stages at the end of the chain (drop path) run once afterwards, so that they draw for all samples at once.
    """
    end = spec.piece_end
    assert end is not None
    some_stages = spec.forward(0, end, noise is not None)
    whole: list[Tensor] = []
    starts = range(0, x.shape[0], count)
    for start in starts[:2] if only_counts(x) else starts:  # if only bytes are counted, two pieces show the peak
        rows = x[start : start + count]
        out, values, extras = some_stages(rows, tensors, kept and kept.of_first(len(rows)), noise)
        saved = [*values, *(one for group in extras for one in group)]
        parts = [out, *(t for one in saved for t in (one[:2] if isinstance(one, Packed) else (one,)))]
        whole = whole or [part.new_empty(x.shape[0], *part.shape[1:]) for part in parts]
        for all_samples, part in zip(whole, parts, strict=True):
            all_samples[start : start + count] = part
    rest = iter(whole)

    def of_all(one: Saved) -> Saved:
        return Packed(next(rest), next(rest), one.dtype) if isinstance(one, Packed) else next(rest)

    out = next(rest)
    values = [of_all(value) for value in values]
    extras = [tuple(of_all(one) for one in group) for group in extras]
    out, more_values, more_extras = spec.forward(end, spec.count, noise is not None)(out, tensors, kept, noise)
    return out, [*values, *more_values], [*extras, *more_extras]


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    spec, kept, counts, forms, dtypes = ctx.state
    given, first = ctx.saved_tensors, 0
    is_compiling = torch.compiler.is_compiling()
    if is_compiling and kept is not None:
        first = _KEPT_TENSORS
        kept = Kept(*kept, *given[:first])
    last = first + spec.tensor_count
    tensors, saved = given[first:last], given[last:]
    if forms is not None:
        rest = iter(saved)
        saved = [next(rest) if form is None else Packed(next(rest), next(rest), form) for form in forms]
    place = len(spec.saved_at)
    values, extras = saved[:place], []
    for count in counts:
        extras.append(saved[place : place + count])
        place += count
    del given, saved
    back = partial(walk_backward, spec) if is_compiling else spec.backward(forms is not None)
    if spec.autocast is None:
        dx, found = back(dy, tensors, kept, values, extras, dtypes)
    else:
        with torch.autocast(dy.device.type, dtype=spec.autocast, cache_enabled=False):
            dx, found = back(dy, tensors, kept, values, extras, dtypes)
    d_residual = dy if ctx.needs_input_grad[3] else None
    return (None, None, dx, d_residual, None, *(None,) * first, *found)


_backward_once = once_differentiable(_backward)
