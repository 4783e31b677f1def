"""The questions of a study: six sweeps, each over a few settings of `keepgrad.apply` that differ in one option.

| question  | what differs                                    | lines in its figure                                 |
| ---       | ---                                             | ---                                                 |
| mask      | grid, random, block, at 0.5                     | drop as in the paper, fold                          |
| reduce    | drop, scaled, fold, pool, at 0.5                | all branches; MLPs only, with attention exact       |
| ratio     | 0.125 to 0.875                                  | the same, and all branches with reduced queries     |
| schedule  | uniform, increasing, decreasing, careful, first | all of them at equal memory                         |
|           | and last half                                   |                                                     |
| attention | qkv, query, head, off, at 0.5                   | drop as in the paper, fold                          |
| store     | full, int8                                      | everything kept; 0.5 in all branches                |

The presets and the settings that save the fewest bytes are measured as well. A setting that occurs in several questions
is measured once.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..config import DEFAULTS, PRESETS
from ..errors import MapTooSmallError
from ..ops.attention import METHODS
from ..ops.store import STORES
from ..sampling import IMAGE_MASKS, REDUCTIONS

__all__ = [
    "EVERYWHERE",
    "FULL",
    "Case",
    "Question",
    "all_keys",
    "is_exact",
    "key_of",
    "name_of",
    "questions",
    "trained_as",
]

Options = Mapping[str, Any]

FULL = "full backprop"
RATIOS = tuple(n / 8 for n in range(1, 8))
EVERYWHERE, MLP_ONLY, QUERIES = "all branches", "MLPs only", "MLPs and queries"


@dataclass(frozen=True)
class Case:
    """A setting, and where it appears in the figure of a question: its label on the x axis, and its line."""

    label: str
    series: str
    options: Options

    @property
    def key(self) -> str:
        return key_of(self.options)


@dataclass(frozen=True)
class Question:
    """One sweep. `cases` are the settings to compare; `paper` says what the paper found."""

    name: str
    title: str
    paper: str
    cases: tuple[Case, ...]

    def lines(self) -> dict[str, list[Case]]:
        """The cases of each line in the figure."""
        found: dict[str, list[Case]] = {}
        for case in self.cases:
            found.setdefault(case.series, []).append(case)
        return found


def key_of(options: Options) -> str:
    """A setting as JSON text. Options that equal their defaults are left out, so equal settings have equal keys."""
    given = {name: value for name, value in options.items() if DEFAULTS.get(name) != value}
    return json.dumps(given, sort_keys=True)


def name_of(key: str) -> str:
    """A short name for a setting, e.g. `fold 0.5, attention query`."""
    if key == FULL:
        return FULL
    options = json.loads(key)
    if "preset" in options:
        return f"preset {options['preset']}"
    if options["keep_ratio"] == 1:
        return ", ".join(["exact", *(f"{name} {options[name]}" for name in ("save", "store") if name in options)])
    ratio, reduce = options["keep_ratio"], options.get("reduce", DEFAULTS["reduce"])
    if isinstance(ratio, dict):
        ratio = f"{ratio['mlp']:g}, MLPs only"
    elif isinstance(ratio, list):
        ratio = ", ".join(f"{value:g} x{len(list(same))}" for value, same in itertools.groupby(ratio))
    else:
        ratio = f"{ratio:g}"
    more = [f"{name} {options[name]}" for name in ("mask", "schedule", "attention", "save", "store") if name in options]
    return ", ".join([f"{reduce} {ratio}", *more])


def questions(
    has_attention: bool, blocks: int, saved: Callable[[Options], int], own: Options | None = None
) -> list[Question]:
    """The questions to ask about a model.

    Args:
        has_attention: whether the model has attention that can be reduced.
        blocks: the number of its blocks.
        saved: a function that returns the bytes a setting saves for backward.
        own: the user's own setting, shown with the presets.
    """

    def both(ratio: float, **more: Any) -> list[tuple[str, dict[str, Any]]]:
        everywhere = (EVERYWHERE, {"keep_ratio": ratio, **more})
        if not has_attention:
            return [everywhere]
        return [everywhere, (MLP_ONLY, {"keep_ratio": {"attention": 1.0, "mlp": ratio}, **more})]

    def ways(ratio: float) -> list[tuple[str, dict[str, Any]]]:
        queries = [(QUERIES, {"keep_ratio": ratio, "attention": "query"})] if has_attention else []
        return [*both(ratio), *queries]

    asked = [
        Question(
            "mask",
            "Which positions?",
            "A grid is better than a random mask.",
            _at_half("mask", IMAGE_MASKS),
        ),
        Question(
            "reduce",
            "What becomes of the other positions?",
            "Their gradients are dropped; no other way is tried.",
            tuple(
                Case(reduce, series, options) for reduce in REDUCTIONS for series, options in both(0.5, reduce=reduce)
            ),
        ),
        Question(
            "ratio",
            "How many positions?",
            "0.5 is the best balance of memory and accuracy.",
            tuple(Case(f"{ratio:g}", series, options) for ratio in RATIOS for series, options in ways(ratio)),
        ),
        Question(
            "schedule",
            "Which layers, at equal memory?",
            "One ratio for all layers is better than ratios that rise or fall.",
            tuple(Case(label, "equal memory", options) for label, options in _equal_memory(saved, blocks).items()),
        ),
    ]
    if has_attention:
        asked.append(
            Question(
                "attention",
                "How is attention reduced?",
                "Dropping all of q, k and v is better than dropping queries or heads.",
                _at_half("attention", METHODS),
            )
        )
    asked.append(
        Question(
            "store",
            "In how many bits are kept values stored?",
            "In those they were computed in; no other way is tried.",
            tuple(
                Case(store, series, {"keep_ratio": ratio, "store": store})
                for series, ratio in (("everything kept", 1.0), (f"0.5, {EVERYWHERE}", 0.5))
                for store in STORES
            ),
        )
    )
    ready = {f"preset {name}": _without_preset(name, has_attention) for name in PRESETS}
    for ratio in (1.0, 0.5, 0.25):
        ready.setdefault(f"{ratio:g}, save input", {"keep_ratio": ratio, "save": "input"})
    if own:
        ready["as given"] = own
    named = tuple(Case(label, "presets", options) for label, options in ready.items())
    asked.append(Question("presets", "The presets, and the smallest settings", "", named))
    return [question for question in asked if question.cases]


def _at_half(option: str, values: Sequence[str]) -> tuple[Case, ...]:
    """A case for each value of an option at keep-ratio 0.5: with drop as in the paper, and with fold."""
    return tuple(
        Case(value, reduce, {"keep_ratio": 0.5, option: value, "reduce": reduce})
        for reduce in ("drop", "fold")
        for value in values
    )


def _without_preset(name: str, has_attention: bool) -> Options:
    """The options that a preset stands for, so that an equal setting of another question is not measured twice."""
    options = dict(PRESETS[name])
    if "layers" in options:
        return {"preset": name}
    if not has_attention:
        options.pop("attention", None)
        if isinstance(options["keep_ratio"], Mapping):
            options["keep_ratio"] = options["keep_ratio"]["mlp"]
    return options


def is_exact(key: str) -> bool:
    """True if a setting gives the same gradients as full backprop."""
    options = json.loads(key)
    return options.get("keep_ratio") == 1 and "store" not in options


def trained_as(key: str) -> str:
    """The setting to train in place of this one. `save` does not change gradients, so it is left out."""
    if key == FULL:
        return FULL
    options = json.loads(key)
    options.pop("save", None)
    return key_of(options)


def _equal_memory(saved: Callable[[Options], int], blocks: int) -> dict[str, Options]:
    """Ways to distribute the kept positions over the blocks. Ratios are chosen so that all save about the same bytes.

    The goal is the bytes saved with 0.5 in all blocks, or more if one of the ways cannot go that low.
    """
    half = max(1, blocks // 2)

    def some(ratio: float, where: slice) -> list[float]:
        values = [1.0] * blocks
        values[where] = [ratio] * len(values[where])
        return values

    ways: dict[str, Callable[[float], Options]] = {
        "uniform": lambda ratio: {"keep_ratio": ratio},
        "increasing": lambda ratio: {"keep_ratio": ratio, "schedule": "increasing"},
        "decreasing": lambda ratio: {"keep_ratio": ratio, "schedule": "decreasing"},
        "careful": lambda ratio: {"keep_ratio": ratio, "schedule": "careful"},
        "first half": lambda ratio: {"keep_ratio": some(ratio, slice(half))},
        "last half": lambda ratio: {"keep_ratio": some(ratio, slice(half, None))},
    }
    if blocks == 1:
        ways = {"uniform": ways["uniform"]}
    ways = {name: way for name, way in ways.items() if _allowed(way(0.5), saved)}
    if "uniform" not in ways:
        return {}
    least = next(ratio for ratio in (0.125, 0.25, 0.5) if all(_allowed(way(ratio), saved) for way in ways.values()))
    smallest = [saved(way(least)) for way in ways.values()]
    goal = max(saved({"keep_ratio": 0.5}), *smallest)
    return {name: way(_ratio_at(goal, way, saved, least)) for name, way in ways.items()}


def _allowed(options: Options, saved: Callable[[Options], int]) -> bool:
    """True if the feature maps are large enough for a setting."""
    try:
        saved(options)
    except MapTooSmallError:
        return False
    return True


def _ratio_at(
    goal: int, way: Callable[[float], Options], saved: Callable[[Options], int], low: float, steps: int = 7
) -> float:
    """The highest ratio at which `way` saves at most `goal` bytes, found by bisection."""
    high = 1.0
    if saved(way(0.5)) == goal:
        return 0.5
    for _ in range(steps):
        middle = round((low + high) / 2, 3)
        low, high = (middle, high) if saved(way(middle)) <= goal else (low, middle)
    return low


def all_keys(asked: Sequence[Question]) -> list[str]:
    """The keys of all settings, each once, in order."""
    return list(dict.fromkeys(case.key for question in asked for case in question.cases))
