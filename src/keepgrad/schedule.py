"""Which blocks are reduced, and the keep-ratio of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

from .errors import ConfigError

__all__ = ["SCHEDULES", "Layers", "Ratio", "careful", "choose", "paper_layers", "parse_layers", "ratios"]

SCHEDULES = ("uniform", "increasing", "decreasing", "careful")

Ratio = float | Sequence[float] | Callable[[int, int], float]
Layers = str | Sequence[int] | Callable[[str], bool]


def ratios(keep_ratio: Ratio, schedule: str, blocks: int) -> list[float]:
    """The keep-ratio of each of `blocks` blocks.

    "increasing" and "decreasing" change the ratio linearly, between 0.5 and 1.5 times `keep_ratio`, so that the mean
    is `keep_ratio`. The range is smaller if the largest ratio would exceed 1. For "careful", see `careful`.

    Raises:
        ConfigError: if `keep_ratio` is a list whose length is not the number of blocks.
    """
    if callable(keep_ratio):
        return [keep_ratio(i, blocks) for i in range(blocks)]
    if isinstance(keep_ratio, Sequence):
        if len(keep_ratio) != blocks:
            raise ConfigError(f"keep_ratio lists {len(keep_ratio)} ratios, but {blocks} blocks are chosen: one each")
        return [float(r) for r in keep_ratio]
    if schedule in ("uniform", "careful") or blocks == 1:
        return [float(keep_ratio)] * blocks
    spread = _spread(keep_ratio)
    rising = [keep_ratio + spread * (2 * i / (blocks - 1) - 1) for i in range(blocks)]
    return rising if schedule == "increasing" else rising[::-1]


def _spread(keep_ratio: float) -> float:
    return min(keep_ratio / 2, 1 - keep_ratio)


def careful(keep_ratio: float, stages: Mapping[int, int], index: int) -> float:
    """The keep-ratio of block number `index` with the schedule "careful", which keeps more where reducing hurts most.

    `stages` maps the index of each block of a trunk to its stage; stage 0 has the finest resolution.

    - A model with several stages: at the finest resolution, neighbours are most alike and most of the memory is used,
      so less is kept there (half of `keep_ratio`, if it is at most 2/3). At the coarsest resolution there are few
      positions and little memory is used, so everything is kept there.
    - A model with one resolution, such as a transformer: the tokens of the first block have not seen each other yet and
      are least alike, so the first block keeps everything.
    """
    last = max(stages.values())
    if last == 0:
        return 1.0 if index == min(stages) else keep_ratio
    if stages[index] == last:
        return 1.0
    return keep_ratio - _spread(keep_ratio) if stages[index] == 0 else keep_ratio


def paper_layers(stages: Mapping[int, int]) -> set[int]:
    """The blocks of a trunk that the paper reduces. `stages` maps the index of each block to its stage.

    In a transformer, these are the last two thirds of the blocks, e.g. 8 of 12. In a model with several stages, the
    last stage is left alone. Of the stage before it, the first 6 of 9 or 21 of 27 blocks are reduced, or the first two
    thirds of any other number. All blocks of the earlier stages are reduced.
    """
    last = max(stages.values())
    if last == 0:
        blocks = sorted(stages)
        return set(blocks[len(blocks) - round(len(blocks) * 2 / 3) :])
    covered = set()
    for stage in range(last):
        inside = sorted(index for index, at in stages.items() if at == stage)
        count = len(inside)
        if stage == last - 1:
            count = {9: 6, 27: 21}.get(count, round(count * 2 / 3))
        covered.update(inside[:count])
    return covered


def parse_layers(layers: Layers) -> tuple[str, Fraction] | None:
    """Split a string such as "last 2/3" into the end ("last") and the share (2/3). None for every other kind of choice.

    Raises:
        ConfigError: if the choice cannot be understood.
    """
    if callable(layers):
        return None
    if not isinstance(layers, str):
        if not isinstance(layers, Sequence) or not all(isinstance(i, int) for i in layers):
            raise ConfigError(f"layers={layers!r}: give 'all', 'first 2/3', 'last 2/3', block indices, or a function")
        if not len(layers):
            raise ConfigError("layers is empty: no block would be chosen; use layers='all' or name some")
        return None
    if layers in ("all", "paper"):
        return None
    end, _, share = layers.partition(" ")
    try:
        fraction = Fraction(share)
    except (ValueError, ZeroDivisionError):
        fraction = Fraction(0)
    if end not in ("first", "last") or not 0 < fraction <= 1:
        raise ConfigError(
            f"layers={layers!r} is not understood; use 'all', 'paper', or a share in (0, 1] such as 'last 2/3'"
        )
    return end, fraction


def choose(layers: Layers, names: Sequence[str]) -> list[int]:
    """The indices of the chosen blocks, in order.

    Raises:
        ConfigError: if an index is out of range, or nothing is chosen.
    """
    blocks = len(names)
    share = parse_layers(layers)
    if share is not None:
        end, fraction = share
        count = max(1, round(blocks * fraction))
        chosen = list(range(count) if end == "first" else range(blocks - count, blocks))
    elif callable(layers):
        chosen = [i for i, name in enumerate(names) if layers(name)]
    elif isinstance(layers, str):
        chosen = list(range(blocks))
    else:
        wrong = [i for i in layers if not -blocks <= i < blocks]
        if wrong:
            raise ConfigError(f"layers names block {wrong[0]}, but the model has blocks 0 to {blocks - 1}")
        chosen = sorted({i % blocks for i in layers})
    if not chosen:
        raise ConfigError(f"layers chooses none of the {blocks} blocks, e.g. {names[0]!r}; choose at least one")
    return chosen
