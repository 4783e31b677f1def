"""KeepConfig: every setting of keepgrad, frozen and validated, with its flag on the command line; and the presets.

A field that is None takes its value from the preset. If the preset does not set it either, the field takes the
default. So a value that the user gave overrides the preset, and the preset overrides the defaults.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from .errors import ConfigError, reason_of
from .flags import flag, pairs
from .numbers import Numbers
from .ops.attention import METHODS
from .ops.chain import SAVES
from .ops.store import STORES
from .sampling import MASKS, REDUCTIONS
from .schedule import SCHEDULES, Layers, Ratio, parse_layers

__all__ = ["PRESETS", "KeepConfig", "Settings"]

BRANCHES = ("attention", "mlp")
SMALLEST_RATIO = 1e-9

DEFAULTS: dict[str, Any] = {
    "mask": "grid",
    "reduce": "fold",
    "schedule": "uniform",
    "layers": "all",
    "attention": "qkv",
    "mlp": True,
    "downsample": False,
    "save": "heavy",
    "store": "full",
}

PRESETS: dict[str, dict[str, Any]] = {
    "exact": {"keep_ratio": 1.0},
    "text": {"keep_ratio": 1.0, "store": "int8"},
    "accurate": {"keep_ratio": {"attention": 1.0, "mlp": 0.5}, "schedule": "careful"},
    "balanced": {"keep_ratio": 0.5, "attention": "query", "schedule": "careful"},
    "small": {
        "keep_ratio": {"attention": 1.0, "mlp": 0.5},
        "schedule": "careful",
        "save": "input",
        "store": "int8",
    },
    "paper": {"keep_ratio": 0.5, "reduce": "drop", "layers": "paper", "downsample": True},
}


def _ratio(text: Any) -> Any:
    """Turn the text of a flag into a keep-ratio. A value that is not text is returned unchanged."""
    if not isinstance(text, str):
        return text
    try:
        if "=" in text:
            return pairs(text, float)
        return [float(one) for one in text.split(",")] if "," in text else float(text)
    except ValueError:
        raise ValueError(f"{text!r} is no number, and not like attention=1,mlp=0.5") from None


def _policy(text: Any) -> Any:
    return pairs(text, str) if isinstance(text, str) and "=" in text else text


def _layers(text: Any) -> Any:
    is_numbers = isinstance(text, str) and all(part.strip().isdecimal() for part in text.split(","))
    return [int(part) for part in text.split(",")] if is_numbers else text


@dataclass(frozen=True)
class KeepConfig:
    """Every setting of keepgrad: which gradients are kept, and in which blocks.

    Args:
        preset: "exact", "text", "accurate", "balanced", "small" or "paper". If neither preset nor keep_ratio is given,
            blocks whose positions are words use "text" and all other blocks use "accurate".
        keep_ratio: the share of positions whose gradient is kept, in (0, 1]. Give a number; a dictionary
            `{"attention": ..., "mlp": ...}` (a branch that is left out keeps everything); a list with one ratio per
            chosen block, in the order of the blocks; or a function `f(i, n)` that returns the ratio of block `i` of
            the `n` chosen blocks.
        mask: which positions are kept: "grid", "random", "block", or, for video models only, "frame", which keeps
            whole frames.
        reduce: what happens to the dropped positions: "drop", "scaled", "fold" (the default) or "pool".
        schedule: how the ratio changes over the blocks. "uniform": it does not. "increasing" and "decreasing": it
            changes linearly, and its mean is keep_ratio. "careful": the blocks where reducing hurts most keep
            everything, which are those of the coarsest stage, or the first block of a transformer.
        layers: which blocks are reduced: "all"; "first 2/3" or "last 2/3" (any fraction); indices; "paper"; or a
            function that takes the block's name and returns True or False.
        attention: how attention is reduced: "qkv", "query", "head", or "off" to run it with full backprop.
        mlp: whether MLP branches are reduced.
        downsample: whether downsampling layers between stages are reduced.
        save: which values are saved for backward: "heavy" or "input", or a dictionary
            `{"attention": ..., "mlp": ...}`.
        store: how saved values are stored until backward: "full" stores them as they were computed, "int8" in 8 bits.
            Or a dictionary `{"attention": ..., "mlp": ...}`. `store="int8"` for all branches also packs what the rest
            of the model saves, and works for models without any block that keepgrad knows.
        modules: `{"mlp": MyMlp}` turns modules of your own into sites. Give a class, its full name, a module or a list
            of them. They must work on each position alone.
        seed: if given, masks are drawn from this seed; if None, from torch's random state.

    Raises:
        ConfigError: if a value cannot work for any model.
    """

    preset: str | None = flag(None, "a set of options; with none and no --keep-ratio: accurate", choices=list(PRESETS))
    keep_ratio: float | Mapping[str, Ratio] | Sequence[float] | Callable[[int, int], float] | None = flag(
        None,
        "share of positions kept: 0.5; attention=1,mlp=0.5; or one a block, 1,0.5,0.5",
        type=_ratio,
        metavar="RATIO",
    )
    mask: str | None = flag(None, "which positions are kept", choices=list(MASKS))
    reduce: str | None = flag(None, "what becomes of the others", choices=list(REDUCTIONS))
    schedule: str | None = flag(None, "the ratio over the blocks", choices=list(SCHEDULES))
    layers: Layers | None = flag(
        None, "which blocks: all, 'first 2/3', 'last 2/3', paper, or numbers, 0,1,2", type=_layers, metavar="LAYERS"
    )
    attention: str | None = flag(None, "how attention is reduced", choices=list(METHODS))
    mlp: bool | None = flag(None, "reduce MLPs", type=bool)
    downsample: bool | None = flag(None, "reduce downsampling layers between stages", type=bool)
    save: str | Mapping[str, str] | None = flag(
        None,
        "which values wait for backward: heavy, input, or attention=input,mlp=heavy",
        type=_policy,
        metavar="POLICY",
    )
    store: str | Mapping[str, str] | None = flag(
        None, "in how many bits it is stored: full, int8, or attention=full,mlp=int8", type=_policy, metavar="STORE"
    )
    modules: Mapping[str, Any] | None = flag(
        None,
        "a position-wise class of your own, by its full name: mlp=my.package.MyMlp",
        type=_policy,
        metavar="MODULES",
    )
    seed: int | None = flag(
        None, "makes the masks a sequence of their own", type=Numbers(int, least=0, most=2**63 - 2**32 - 1)
    )

    def __post_init__(self) -> None:
        _one_of("preset", self.preset, tuple(PRESETS))
        _one_of("mask", self.mask, MASKS)
        _one_of("reduce", self.reduce, REDUCTIONS)
        _one_of("schedule", self.schedule, SCHEDULES)
        _one_of("attention", self.attention, METHODS)
        for name in ("mlp", "downsample"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise ConfigError(f"{name}={value!r}: give True or False")
        for name, known in (("save", SAVES), ("store", STORES)):
            value = getattr(self, name)
            if isinstance(value, Mapping):
                _branches(name, value)
            for one in value.values() if isinstance(value, Mapping) else [value]:
                _one_of(name, one, known)
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            raise ConfigError(f"seed={self.seed!r}: give a whole number or None")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63 - 2**32:
            raise ConfigError(f"seed={self.seed!r} does not fit into 64 bits; give a smaller number")
        if self.modules is not None and (not isinstance(self.modules, Mapping) or set(self.modules) != {"mlp"}):
            raise ConfigError(f"modules={self.modules!r}: give {{'mlp': MyMlp}}, a class, a module or a list of them")
        if self.modules is not None:
            named = {kind: _class_named(one) if isinstance(one, str) else one for kind, one in self.modules.items()}
            object.__setattr__(self, "modules", named)
        if self.layers is not None:
            parse_layers(self.layers)
        if isinstance(self.keep_ratio, Mapping):
            _branches("keep_ratio", self.keep_ratio)
            for value in self.keep_ratio.values():
                _check_ratio(value)
        elif self.keep_ratio is not None:
            _check_ratio(self.keep_ratio)
        varied = self.schedule not in (None, "uniform")
        if varied and not isinstance(self.keep_ratio, (int, float, Mapping, type(None))):
            raise ConfigError(f"schedule={self.schedule!r} goes with one keep_ratio; a list or function is a schedule")

    def settings(self, text: bool = False) -> Settings:
        """Fill in every value: the user's, else the preset's, else the default.

        `text` is True for blocks whose positions are words. It decides the preset if the user gave neither a preset
        nor a keep_ratio.
        """
        preset = self.preset
        if preset is None and self.keep_ratio is None:
            preset = "text" if text else "accurate"
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "preset"}
        given = {name: value for name, value in given.items() if value is not None}
        values = {**DEFAULTS, **(PRESETS[preset] if preset else {}), **given}
        values = {"seed": None, "modules": None, **values}
        return Settings(preset=preset, chose_preset=self.preset is not None, given=frozenset(given), **values)


@dataclass(frozen=True)
class Settings:
    """A KeepConfig with every value filled in."""

    preset: str | None
    chose_preset: bool
    given: frozenset[str]
    keep_ratio: Any
    mask: str
    reduce: str
    schedule: str
    layers: Layers
    attention: str
    mlp: bool
    downsample: bool
    save: str | Mapping[str, str]
    store: str | Mapping[str, str]
    modules: Mapping[str, Any] | None
    seed: int | None

    def save_of(self, kind: str) -> str:
        return _of_branch(self.save, kind, "heavy")

    def store_of(self, kind: str) -> str:
        return _of_branch(self.store, kind, "full")

    @property
    def packs_the_rest(self) -> bool:
        """True if values that are saved outside of sites are stored in 8 bits too."""
        return self.store == "int8"

    @property
    def reduces_nothing(self) -> bool:
        """True if the user asked only for storing in 8 bits, which works for any model."""
        asked = self.given - {"store", "seed"}
        return self.packs_the_rest and not asked and (self.preset == "exact" or not self.chose_preset)

    def ratio_of(self, kind: str) -> Ratio:
        if isinstance(self.keep_ratio, Mapping):
            return self.keep_ratio.get(branch_of(kind), 1.0)
        return self.keep_ratio


def _class_named(path: str) -> type:
    """Import the class with a full name such as `my.package.MyMlp`."""
    package, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(package), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"modules: there is no class {path!r:.80}: {reason_of(error, 200)}") from None
    if not isinstance(found, type):
        raise ConfigError(f"modules: {path} is no class; give the full name of one, e.g. my.package.MyMlp")
    return found


def _of_branch(value: str | Mapping[str, str], kind: str, otherwise: str) -> str:
    return value.get(branch_of(kind), otherwise) if isinstance(value, Mapping) else value


def branch_of(kind: str) -> str:
    """Whose settings a site of `kind` uses, "attention" or "mlp": downsampling layers use those of the MLPs."""
    return "attention" if kind == "attention" else "mlp"


def _one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value is not None and value not in known:
        raise ConfigError(f"{name}={value!r} is not known; use one of {', '.join(map(repr, known))}")


def _branches(name: str, given: Mapping[str, object]) -> None:
    wrong = [key for key in given if key not in BRANCHES]
    if wrong or not given:
        raise ConfigError(f"{name}={dict(given)!r}: give a value for 'attention', for 'mlp', or for both")


def _check_ratio(value: object) -> None:
    if callable(value):
        return
    if isinstance(value, Sequence) and not isinstance(value, str):
        if not value:
            raise ConfigError("keep_ratio is an empty list; give one ratio per block")
        for item in value:
            check_number(item)
        return
    check_number(value)


def check_number(value: object) -> float:
    """Return a keep-ratio as a float; raise ConfigError if it is not in (0, 1]."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"keep_ratio={value!r}: give a number in (0, 1], e.g. 0.5")
    if not 0 < value <= 1:
        raise ConfigError(f"keep_ratio={value!r} is outside (0, 1]; 0.5 keeps the gradient of half of the positions")
    if value < SMALLEST_RATIO:
        raise ConfigError(
            f"keep_ratio={value!r} is less than one position of any input; give at least {SMALLEST_RATIO}"
        )
    return float(value)
