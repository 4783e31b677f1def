"""Runs a chain stage by stage. This is what torch.compile traces.

Eager mode runs the same operations in the same order as generated code (see `straight`), which takes less CPU time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..sampling import Kept
from .spec import Spec, Turn
from .stages import Point, Pull, Tensors, cast
from .store import Packed, stored, unstored

__all__ = ["Saved", "Walked", "walk_backward", "walk_forward"]

Saved = Tensor | Packed
Walked = tuple[Tensor, list[Saved], list[tuple[Saved, ...]]]
"""The output, the saved values, and the extras of each stage."""


def walk_forward(spec: Spec, x: Tensor, tensors: Sequence[Tensor], kept: Kept | None, noise: Tensor | None) -> Walked:
    """Run all stages on all rows."""
    groups = spec.groups(tensors)
    values: list[Saved] = [_value(spec, 0, x, kept, noise)] if spec.saves[0] else []
    extras: list[tuple[Saved, ...]] = []
    extra: tuple[Saved, ...]
    out = x
    for i, stage in enumerate(spec.stages):
        is_saved = spec.saves[i] and out is values[-1]
        if spec.overwrites[i] and not is_saved:
            out, extra = stage.overwrite(out), ()
        else:
            out, extra = stage.forward(out, groups[i], kept, spec.extras[i])
        if noise is not None and not stage.exact_extras:
            extra = tuple([stored(one, noise, i + 7) for one in extra])
        extras.append(extra)
        if spec.saves[i + 1]:
            values.append(_value(spec, i + 1, out, kept, noise))
    return out, values, extras


def _value(spec: Spec, i: int, rows: Tensor, kept: Kept | None, noise: Tensor | None) -> Saved:
    """What is saved of the value before stage `i`: its slots (or all rows), in 8 bits if `noise` is given."""
    slots = rows if kept is None or spec.all_rows[i] else kept.gather(rows)
    if noise is None:
        return slots
    return stored(slots, noise, i, i < spec.count and spec.stages[i].reads_signs)


def walk_backward(
    spec: Spec,
    dy: Tensor,
    tensors: Sequence[Tensor],
    kept: Kept | None,
    values: Sequence[Saved],
    extras: Sequence[Any],
    dtypes: tuple[torch.dtype, torch.dtype],
) -> tuple[Tensor | None, list[Tensor | None]]:
    """The gradients of the input and of the tensors, from the gradient `dy` of the output.

    Each segment is redone from the saved value before it; then its stages are differentiated, last one first. `dtypes`
    are those of the chain's output and input.
    """
    groups, saved = spec.groups(tensors), dict(zip(spec.saved_at, values, strict=True))
    slots = None if spec.all_rows[-1] else kept
    grad: Tensor | None = cast(dy if slots is None else slots.gather_grad(dy), dtypes[0])
    is_owned = slots is not None
    found: list[tuple[Tensor | None, ...]] = [(None,) * len(group) for group in groups]
    for start, turns in spec.segments:
        pulls = _redo(turns, saved.get(start), groups, extras, kept)
        for turn in reversed(turns):
            if turn.place < spec.first:
                break
            assert grad is not None
            if turn.stage.overwrites and not is_owned:
                grad = grad.clone()
            grad, found[turn.place] = pulls.pop()(grad)
            is_owned = turn.stage.makes_new
    dx = None
    if spec.input_needs:
        assert grad is not None
        dx = cast(grad, dtypes[1])
        onto = cast(dy, dtypes[1]) if spec.adds_input else None
        if kept is not None and not spec.all_rows[0]:
            dx = kept.give_back(dx, onto)
        elif onto is not None:
            dx = dx + onto
    return dx, [one for group in found for one in group]


def _redo(
    turns: list[Turn], saved: Saved | None, groups: list[Tensors], extras: Sequence[Any], kept: Kept | None
) -> list[Pull]:
    """Redo the stages of a segment from the saved value before it. Returns the pull-back of each stage."""
    pulls: list[Pull] = []
    value = None if saved is None else unstored(saved)
    for i, stage, needs, need_output, need_input, casts_output, _ in turns:
        extra: Any = [unstored(one) for one in extras[i]]
        value, pull = stage.vjp(Point(value, groups[i], needs, extra, kept, need_output, need_input))
        pulls.append(pull)
        if casts_output is not None and value is not None:
            value = value.to(casts_output)  # hold it in the type in which the next stage reads it
    return pulls
