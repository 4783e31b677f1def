"""The specification of a chain: what to save, redo and differentiate. It is worked out once and holds no tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .stages import Noise, Stage, Tensors
from .straight import write_backward, write_forward

__all__ = ["Spec", "Turn"]


class Turn(NamedTuple):
    """What one stage has to do in backward.

    Attributes:
        place: the number of the stage in the chain.
        stage: the stage itself.
        needs: for each of its tensors, whether it needs a gradient.
        need_output: whether its output has to be redone.
        need_input: whether the gradient of its input is needed.
        casts_output: the type to which autocast casts its output for the next stage; None for no cast.
        redoes: True if forward saved no extras for it.
    """

    place: int
    stage: Stage
    needs: tuple[bool, ...]
    need_output: bool
    need_input: bool
    casts_output: torch.dtype | None
    redoes: bool


class Spec:
    """The specification of a chain for one way to run it.

    Value `i` is the input of stage `i`; the last value is the output of the chain.

    Attributes:
        first: the first stage whose backward has to run.
        saves: for each value, whether it is saved.
        all_rows: for each value, whether it is needed at every position and not at the slots alone.
        extras: for each stage, whether it saves what its backward needs besides its input.
        overwrites: for each stage, whether it may write its output over its input, if that is not saved.
        segments: in backward order. A segment is a run of stages that are redone from one saved value: the number of
            its first stage, and the turns of its stages.
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
        is_uniform: bool = False,
    ) -> None:
        self.stages, self.input_needs, self.adds_input, self.autocast = stages, input_needs, adds_input, autocast
        self.reduced, self.is_uniform = reduced, is_uniform
        self.count = len(stages)
        ends = [sum(counts[: i + 1]) for i in range(self.count)]
        self.places = [(end - count, end) for end, count in zip(ends, counts, strict=True)]
        self.tensor_count = sum(counts)
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
        # Noise is always saved because it cannot be redone.
        self.extras = [not stage.heavy or (i >= self.first and not redo) for i, stage in enumerate(stages)]
        self.all_rows = [any(stage.reads_all for stage in stages[i:]) for i in range(self.count + 1)]
        self.overwrites = [stage.overwrites and i > 0 and stages[i - 1].makes_new for i, stage in enumerate(stages)]
        self.segments: list[tuple[int, list[Turn]]] = []
        end = self.count
        while end > self.first:
            start = next(i for i in reversed(range(end)) if i == 0 or self.saves[i])
            needed, turns = False, []
            for i in reversed(range(start, end)):
                if i >= self.first or needed:
                    casts = autocast if i + 1 < end and stages[i + 1].casts else None
                    need_input = i > self.first or input_needs
                    turns.append(Turn(i, stages[i], self.needs[i], needed, need_input, casts, not self.extras[i]))
                needed = reads[i] or needed
            self.segments.append((start, turns[::-1]))
            end = start

        self.makes_new = bool(stages) and stages[-1].makes_new
        self.piece_end = self._piece_end()
        self.written: dict[Any, Callable[..., Any]] = {}
        self.widest: int | None = None

    def _piece_end(self) -> int | None:
        """How many of the stages can run for some samples at a time (see `chain`); None if none can."""
        end = self.count
        while end and isinstance(self.stages[end - 1], Noise):
            end -= 1
        draws = any(isinstance(stage, Noise) or stage.noises for stage in self.stages[:end])
        return None if draws or self.autocast is not None else end

    def widening(self, x: Tensor, tensors: Sequence[Tensor]) -> float:
        """Channels of the widest value of the chain, divided by those of its input."""
        if self.widest is None:
            self.widest = max([x.shape[-1], *(t.shape[0] for t in tensors if t.dim() == 2)])
        return self.widest / x.shape[-1]

    def forward(self, start: int, end: int, packs: bool) -> Callable[..., Any]:
        """The function that runs stages `start` to `end` forward (see `straight`)."""
        found = self.written.get((start, end, packs))
        if found is None:
            found = self.written[start, end, packs] = write_forward(self, start, end, packs)
        return found

    def backward(self, packs: bool) -> Callable[..., Any]:
        """The function that runs the backward of the chain (see `straight`)."""
        found = self.written.get(packs)
        if found is None:
            found = self.written[packs] = write_backward(self, packs)
        return found

    def groups(self, flat: Sequence[Tensor]) -> list[Tensors]:
        """A flat list of tensors, split into one group per stage."""
        return [tuple(flat[start:end]) for start, end in self.places]
