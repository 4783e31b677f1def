"""How a chain runs: all of it that is not a tensor, and what follows from that, worked out once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .stages import Noise, Stage, Tensors
from .straight import write_backward, write_forward

__all__ = ["Spec", "Turn"]


class Turn(NamedTuple):
    """A stage in backward: which one, and what it has to do there.

    `casts_output` is the type in which autocast has the next stage read its output, `redoes` says that it saved no
    extras.
    """

    place: int
    stage: Stage
    needs: tuple[bool, ...]
    need_output: bool
    need_input: bool
    casts_output: torch.dtype | None
    redoes: bool


class Spec:
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
        # Noise is always saved, because it cannot be redone.
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
        """How many stages run for some samples at a time (see `chain`); None where that cannot be."""
        end = self.count
        while end and isinstance(self.stages[end - 1], Noise):
            end -= 1
        draws = any(isinstance(stage, Noise) or stage.noises for stage in self.stages[:end])
        return None if draws or self.autocast is not None else end

    def widening(self, x: Tensor, tensors: Sequence[Tensor]) -> float:
        """How much wider the widest value of the chain is than its input."""
        if self.widest is None:
            self.widest = max([x.shape[-1], *(t.shape[0] for t in tensors if t.dim() == 2)])
        return self.widest / x.shape[-1]

    def forward(self, start: int, end: int, packs: bool) -> Callable[..., Any]:
        """Stages `start` to `end` as straight code."""
        found = self.written.get((start, end, packs))
        if found is None:
            found = self.written[start, end, packs] = write_forward(self, start, end, packs)
        return found

    def backward(self, packs: bool) -> Callable[..., Any]:
        """The backward of the chain as straight code."""
        found = self.written.get(packs)
        if found is None:
            found = self.written[packs] = write_backward(self, packs)
        return found

    def groups(self, flat: Sequence[Tensor]) -> list[Tensors]:
        """A flat list of tensors, stage by stage."""
        return [tuple(flat[start:end]) for start, end in self.places]
