"""What fits a memory budget: the largest keep-ratio, the largest batch, or the cheapest setting.

All of it is found by `estimate`, so it takes no GPU and no memory, and a few seconds for each setting that is tried.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from .config import PRESETS
from .errors import AlreadyAppliedError, BudgetError, CheckpointingError, ConfigError, MapTooSmallError, NoSiteError
from .memory import MemoryReport, estimate
from .patch import apply, block_names, remove
from .report import Report, Table, figures, readable_bytes

__all__ = ["Fit", "Trial", "bytes_of", "checkpointed", "fit"]

BY = ("keep_ratio", "batch_size", "cheapest")
STEPS = 32  # of the keep-ratio
LARGEST_BATCH = 2**20

# By what they do to the gradient. A class is tried when nothing in the one before fits; in it, the least work wins.
CLASSES: tuple[tuple[tuple[dict[str, Any] | None, bool], ...], ...] = (
    (
        (None, False),
        ({"preset": "exact"}, False),
        ({"preset": "accurate"}, False),
        ({"preset": "small", "store": "full"}, False),
        ({"preset": "exact", "save": "input"}, False),
        ({"preset": "exact", "store": "int8"}, False),
        ({"preset": "accurate", "store": "int8"}, False),
        ({"preset": "small"}, False),
        (None, True),
    ),
    (({"preset": "balanced"}, False), ({"preset": "balanced", "store": "int8"}, False)),
    *(
        (({"keep_ratio": ratio}, False), ({"keep_ratio": ratio, "save": "input", "store": "int8"}, False))
        for ratio in (0.5, 0.25, 0.125)
    ),
)


@dataclass(frozen=True)
class Trial:
    """A setting that was tried: options for `apply` (None: full backprop), checkpointing, and what it takes."""

    options: Mapping[str, Any] | None
    checkpointing: bool
    batch_size: int
    memory: MemoryReport
    flops: int
    fits: bool

    @property
    def name(self) -> str:
        parts = [f"{key} {value}" for key, value in (self.options or {}).items()]
        if self.checkpointing:
            parts.append("checkpointing")
        return ", ".join(parts) or "full backprop"


@dataclass(frozen=True)
class Fit(Report):
    """What fits. `keepgrad.apply(model, **fit.options)` puts it into force, unless `options` is None."""

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
        """The keep-ratio of the best setting; None where the model is left as it is."""
        options = self.best.options
        if options is None or "keep_ratio" in options:
            return None if options is None else options["keep_ratio"]
        return PRESETS[options["preset"]]["keep_ratio"]

    @property
    def memory(self) -> MemoryReport:
        return self.best.memory

    def to_dict(self) -> dict[str, Any]:
        def plain(trial: Trial) -> dict[str, Any]:
            return {**asdict(trial), "name": trial.name, "memory": trial.memory.to_dict()}

        return {"budget": self.budget, "best": plain(self.best), "trials": [plain(trial) for trial in self.trials]}

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
        """The memory of every trial, and the budget."""
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
        model: the model. For by="batch_size" it may be patched or checkpointed; else it has to be plain. It stays as
            it is.
        input_shape: the shape of a batch; by="batch_size" does not look at its first number.
        budget: bytes, as a number or as text such as "8GiB" or "500MB".
        by: "keep_ratio", the largest one (in steps of 1/32) on all blocks; "batch_size", the largest one; or
            "cheapest", the setting of keep-ratio, save policy, store and checkpointing with the fewest FLOPs among
            those that hurt the gradient least: first those that keep attention exact and the MLP half or better
            (checkpointing is one of them), then 0.5, 0.25 and 0.125 everywhere. Of those with equal FLOPs it is the one
            that does least besides: packing into 8 bits comes last.
        **options: `optimizer`, `amp` and `loss`, as for `estimate`; with by="keep_ratio" also options of `apply`.

    Raises:
        BudgetError: if nothing fits; says how much would be needed.
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

    def attempt(settings: dict[str, Any] | None, checkpointing: bool = False, batch_size: int = shape[0]) -> Trial:
        with _patched(model, settings), checkpointed(model, checkpointing), FlopCounterMode(display=False) as counter:
            memory = estimate(model, (batch_size, *shape[1:]), **how)
        fits = memory.total <= limit
        return Trial(settings, checkpointing, batch_size, memory, counter.get_total_flops(), fits)

    search: dict[str, Callable[[], tuple[Trial, list[Trial]]]] = {
        "keep_ratio": lambda: _largest_ratio(lambda ratio: attempt({"keep_ratio": ratio, **options})),
        "batch_size": lambda: _largest_batch(lambda size: attempt(None, batch_size=size), limit),
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
    """A number of bytes, from a number or from text with a unit."""
    units = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
    units |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(budget).lower())
    if isinstance(budget, bool) or found is None or found[2] not in units or float(found[1]) == 0:
        raise ConfigError(f"budget={budget!r}: give bytes, or text such as '8GiB' or '500MB'")
    return int(float(found[1]) * units[found[2]])


@contextmanager
def checkpointed(model: nn.Module, on: bool = True) -> Iterator[None]:
    """The model's own checkpointing turned on, as it was before at the end; with `on` False, nothing.

    Raises:
        CheckpointingError: if the model has none.
    """
    if not on:
        yield
        return
    # transformers, which has renamed its switches
    enable, disable = (
        getattr(model, f"activation_checkpointing_{do}", getattr(model, f"gradient_checkpointing_{do}", None))
        for do in ("enable", "disable")
    )
    if enable is not None and disable is not None:
        if not getattr(model, "supports_gradient_checkpointing", True):
            raise CheckpointingError(f"{type(model).__name__} does not support checkpointing")
        was_on = any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
        enable()
        try:
            yield
        finally:
            if not was_on:
                disable()
        return
    switch = getattr(model, "set_grad_checkpointing", None)
    if switch is None:
        raise CheckpointingError(f"{type(model).__name__} has no set_grad_checkpointing; keepgrad cannot turn it on")
    before = [(m, m.grad_checkpointing) for m in model.modules() if "grad_checkpointing" in vars(m)]
    try:
        try:
            switch(True)
        except AssertionError as error:
            raise CheckpointingError(f"{type(model).__name__} cannot be checkpointed: {error}") from None
        yield
    finally:
        for module, state in before:
            module.grad_checkpointing = state


@contextmanager
def _patched(model: nn.Module, settings: dict[str, Any] | None) -> Iterator[None]:
    if settings is None:
        yield
        return
    apply(model, **settings)
    try:
        yield
    finally:
        remove(model)


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
    """Memory grows with the batch nearly in a straight line, so few guesses are enough."""
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


def _cheapest(attempt: Callable[..., Trial]) -> tuple[Trial, list[Trial]]:
    trials: list[Trial] = []
    for candidates in CLASSES:
        for settings, checkpointing in candidates:
            with suppress(MapTooSmallError, CheckpointingError, NoSiteError):
                trials.append(attempt(settings, checkpointing))
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
