"""How much is kept in each block, and which blocks take part."""

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

    A schedule moves linearly around the mean `keep_ratio`, from half of it to one and a half times, or as far as
    1 allows. For the careful one, see `careful`.

    Raises:
        ConfigError: if a list has another length than there are blocks.
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
    """The keep-ratio of block number `index`, where reducing it hurts as little as it can.

    `stages` has the stage of each block of a trunk, from the finest resolution to the coarsest. In a model of stages,
    neighbours at the finest resolution are most alike, and most of the memory is there; at the coarsest there are few
    positions, and little memory. So less is kept at the one (half, at most ratios), everything at the other. In a model
    of one resolution, a transformer, the tokens of the first block have not seen one another, and are least alike:
    there everything is kept.
    """
    last = max(stages.values())
    if last == 0:
        return 1.0 if index == min(stages) else keep_ratio
    if stages[index] == last:
        return 1.0
    return keep_ratio - _spread(keep_ratio) if stages[index] == 0 else keep_ratio


def paper_layers(stages: Mapping[int, int]) -> set[int]:
    """The blocks of a trunk that the paper reduces, where `stages` has the stage of each block.

    Of a transformer these are the last two thirds, 8 of 12. Of a model of stages, all but the last stage, and of the
    last but one 6 of 9 or 21 of 27 blocks, two thirds of any other number.
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
    """The end ("first" or "last") and share that a string of that form names; None for every other choice.

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
