"""Find what fits a memory budget: the largest keep-ratio, the largest batch, or the cheapest setting.

The search uses `estimate`, so it needs no GPU and no memory. Each setting that is tried takes a few seconds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from .config import PRESETS
from .errors import AlreadyAppliedError, BudgetError, CheckpointingError, ConfigError, MapTooSmallError, NoSiteError
from .memory import MemoryReport, estimate
from .methods import CHECKPOINTING, FULL, Method, kept
from .patch import block_names
from .report import Report, Table, figures, readable_bytes

__all__ = ["Fit", "Trial", "bytes_of", "fit"]

BY = ("keep_ratio", "batch_size", "cheapest")
STEPS = 32  # keep-ratios tried are multiples of 1/32
LARGEST_BATCH = 2**20

# Classes of methods, those that change the gradient least first. A class is tried only if nothing in the classes before
# it fits. Among the methods that fit, the one with the fewest FLOPs wins.
CLASSES: tuple[tuple[Method, ...], ...] = (
    (
        FULL,
        kept(preset="exact"),
        kept(preset="accurate"),
        kept(preset="small", store="full"),
        kept(preset="exact", save="input"),
        kept(preset="exact", store="int8"),
        kept(preset="accurate", store="int8"),
        kept(preset="small"),
        CHECKPOINTING,
    ),
    (kept(preset="balanced"), kept(preset="balanced", store="int8")),
    *((kept(keep_ratio=ratio), kept(keep_ratio=ratio, save="input", store="int8")) for ratio in (0.5, 0.25, 0.125)),
)


@dataclass(frozen=True)
class Trial:
    """A method that was tried, with the memory and FLOPs of one training step."""

    method: Method
    batch_size: int
    memory: MemoryReport
    flops: int
    fits: bool

    @property
    def name(self) -> str:
        return self.method.name

    @property
    def options(self) -> Mapping[str, Any] | None:
        """Options for `apply`; None if the method does not use keepgrad."""
        return self.method.options

    @property
    def checkpointing(self) -> bool:
        return self.method is CHECKPOINTING

    def to_dict(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"name": self.name, "options": self.options, "checkpointing": self.checkpointing}
        facts |= {"batch_size": self.batch_size, "flops": self.flops, "fits": self.fits}
        return {**facts, "memory": self.memory.to_dict()}


@dataclass(frozen=True)
class Fit(Report):
    """The result of `fit`. If `options` is not None, use it by `keepgrad.apply(model, **fit.options)`."""

    budget: int
    best: Trial
    trials: tuple[Trial, ...]

    @property
    def options(self) -> Mapping[str, Any] | None:
        return self.best.options

    @property
    def checkpointing(self) -> bool:
        return self.best.checkpointing

    @property
    def batch_size(self) -> int:
        return self.best.batch_size

    @property
    def keep_ratio(self) -> Any:
        """The keep-ratio of the best setting; None if it does not use keepgrad."""
        options = self.best.options
        if options is None or "keep_ratio" in options:
            return None if options is None else options["keep_ratio"]
        return PRESETS[options["preset"]]["keep_ratio"]

    @property
    def memory(self) -> MemoryReport:
        return self.best.memory

    def to_dict(self) -> dict[str, Any]:
        trials = [trial.to_dict() for trial in self.trials]
        return {"budget": self.budget, "best": self.best.to_dict(), "trials": trials}

    def tables(self) -> list[Table]:
        head = ("setting", "batch", "memory", "TFLOP", "fits", "")
        rows = [
            (
                trial.name,
                str(trial.batch_size),
                readable_bytes(trial.memory.total),
                f"{trial.flops / 1e12:.3g}",
                "yes" if trial.fits else "no",
                "best" if trial is self.best else "",
            )
            for trial in self.trials
        ]
        return [Table(f"What fits into {readable_bytes(self.budget)}", head, rows)]

    def plot(self) -> Any:
        """A bar for the memory of every trial, and a line for the budget."""
        figure = figures().Figure(figsize=(7, 1.5 + 0.3 * len(self.trials)), layout="constrained")
        axes = figure.subplots()
        names = [f"{trial.name}, batch {trial.batch_size}" for trial in self.trials]
        colors = ["C0" if trial.fits else "C3" for trial in self.trials]
        axes.barh(names, [trial.memory.total / 2**30 for trial in self.trials], color=colors)
        axes.axvline(self.budget / 2**30, color="black", linewidth=1)
        axes.set(xlabel="GiB", title=f"budget {readable_bytes(self.budget)}")
        axes.invert_yaxis()
        return figure


def fit(
    model: nn.Module,
    input_shape: Sequence[int],
    budget: str | int = "8GiB",
    by: str = "keep_ratio",
    **options: Any,
) -> Fit:
    """Find what fits a memory budget.

    Args:
        model: the model. It must not be patched, except with by="batch_size", where it may be patched or checkpointed.
            It is not changed.
        input_shape: the shape of a batch. With by="batch_size", its first number is ignored.
        budget: bytes, as a number or as text such as "8GiB" or "500MB".
        by: what to search for. "keep_ratio": the largest keep-ratio, in steps of 1/32, the same for all blocks.
            "batch_size": the largest batch. "cheapest": the setting with the fewest FLOPs among those that hurt the
            gradient least. It tries keep-ratios, save policies, stores and checkpointing: first settings that keep
            all of attention and at least half of the MLP (checkpointing is one of them), then the preset "balanced",
            then 0.5, 0.25 and 0.125 everywhere. Of settings with equal FLOPs, one that stores in 8 bits comes last.
        **options: `optimizer`, `amp` and `loss`, as for `estimate`. With by="keep_ratio", options of `apply` too.

    Raises:
        BudgetError: if nothing fits. The message says how much memory would be needed.
        ConfigError: if an argument is not one of those above.
        AlreadyAppliedError: if the model is patched and `by` is not "batch_size".
    """
    limit = bytes_of(budget)
    if by not in BY:
        raise ConfigError(f"by={by!r} is not known; use one of {', '.join(map(repr, BY))}")
    if by != "batch_size" and block_names(model):
        raise AlreadyAppliedError(f"by={by!r} tries settings of its own; call keepgrad.remove(model) first")
    how = {key: options.pop(key) for key in ("optimizer", "amp", "loss") if key in options}
    if options and by != "keep_ratio":
        raise ConfigError(f"by={by!r} takes no {', '.join(options)}; only optimizer, amp and loss")
    if "keep_ratio" in options:
        raise ConfigError("by='keep_ratio' finds the keep_ratio; leave it out, or estimate that one setting")
    shape = tuple(input_shape)

    def attempt(method: Method, batch_size: int = shape[0]) -> Trial:
        with method.put_on(model), FlopCounterMode(display=False) as counter:
            memory = estimate(model, (batch_size, *shape[1:]), **how)
        return Trial(method, batch_size, memory, counter.get_total_flops(), memory.total <= limit)

    search: dict[str, Callable[[], tuple[Trial, list[Trial]]]] = {
        "keep_ratio": lambda: _largest_ratio(lambda ratio: attempt(kept(keep_ratio=ratio, **options))),
        "batch_size": lambda: _largest_batch(lambda size: attempt(FULL, size), limit),
        "cheapest": lambda: _cheapest(attempt),
    }
    best, trials = search[by]()
    if not best.fits:
        least = min(trials, key=lambda trial: trial.memory.total)
        raise BudgetError(
            f"nothing fits into {readable_bytes(limit)}: the least is {readable_bytes(least.memory.total)} "
            f"({least.name}, batch {least.batch_size}); {_remedy(least, limit)}"
        )
    return Fit(limit, best, tuple(trials))


def bytes_of(budget: str | int) -> int:
    """Turn a budget into bytes: a number, or text with a unit such as "8GiB"."""
    units = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
    units |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(budget).lower())
    if isinstance(budget, bool) or found is None or found[2] not in units or float(found[1]) == 0:
        raise ConfigError(f"budget={budget!r}: give bytes, or text such as '8GiB' or '500MB'")
    return int(float(found[1]) * units[found[2]])


def _largest_ratio(attempt: Callable[[float], Trial]) -> tuple[Trial, list[Trial]]:
    trials = [attempt(1.0)]
    if trials[0].fits:
        return trials[0], trials
    low, high = 0, STEPS  # the ratio high / STEPS does not fit; low / STEPS does, or is 0
    best = trials[0]
    while high - low > 1:
        middle = (low + high) // 2
        try:
            trial = attempt(middle / STEPS)
        except MapTooSmallError:
            low = middle
            continue
        trials.append(trial)
        if trial.fits:
            low, best = middle, trial
        else:
            high = middle
    return best, trials


def _largest_batch(attempt: Callable[[int], Trial], limit: int) -> tuple[Trial, list[Trial]]:
    """Memory is nearly linear in the batch size, so a few guesses are enough."""
    trials = [attempt(1)]
    if not trials[0].fits:
        return trials[0], trials
    low, high = trials[0], None
    guess = 8
    while high is None or high.batch_size - low.batch_size > 1:
        top = LARGEST_BATCH if high is None else high.batch_size - 1
        trial = attempt(min(max(guess, low.batch_size + 1), top))
        trials.append(trial)
        if trial.fits and trial.batch_size == LARGEST_BATCH:
            return trial, trials
        slope = (trial.memory.total - trials[0].memory.total) / (trial.batch_size - 1)
        low, high = (trial, high) if trial.fits else (low, trial)
        reach = (limit - trials[0].memory.total) / slope if slope > 0 else LARGEST_BATCH
        guess = 1 + int(min(reach, LARGEST_BATCH))
    return low, trials


def _cheapest(attempt: Callable[[Method], Trial]) -> tuple[Trial, list[Trial]]:
    trials: list[Trial] = []
    for candidates in CLASSES:
        for method in candidates:
            with suppress(MapTooSmallError, CheckpointingError, NoSiteError):
                trials.append(attempt(method))
        fitting = [trial for trial in trials if trial.fits]
        if fitting:
            return min(fitting, key=lambda trial: trial.flops), trials
    return trials[-1], trials


def _remedy(least: Trial, limit: int) -> str:
    fixed = sum(getattr(least.memory, part) for part in ("parameters", "gradients", "optimizer"))
    if fixed > limit:
        return (
            f"parameters, gradients and optimizer alone take {readable_bytes(fixed)}: take a smaller model or optimizer"
        )
    return f"take {'a smaller batch' if least.batch_size > 1 else 'a smaller model'} or smaller images"
