"""The results of a study so far, in one file that is rewritten after every setting, and as CSV files."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigError, FileError
from ..files import written_whole
from ..report import brief
from .questions import FULL, name_of, trained_as

__all__ = ["Measured", "Results", "Trained", "mean_and_error"]


SAVED = ("about", "measured", "trained", "left_out")


@dataclass(frozen=True)
class Measured:
    """What was measured for one setting.

    `bytes` (saved for backward), `flops` and `time` are those of a training step, divided by those of full backprop.
    `layers` has a name, a cosine and a norm ratio for each layer; a value is None if it is undefined because a gradient
    is zero.
    """

    cosine: float
    norm_ratio: float
    bias: float
    spread: float
    adam: float
    bytes: float
    flops: float
    time: float
    layers: list[tuple[str, float | None, float | None]]


@dataclass(frozen=True)
class Trained:
    """The result of a short training: mean loss over the last tenth of its steps, final accuracy, number of steps."""

    loss: float
    top1: float
    steps: int


@dataclass
class Results:
    """All results of a study.

    The keys of the dictionaries are settings (see `key_of`); those within `trained` are seeds. `left_out` has the
    settings that cannot be used with the model, and why. Trainings from earlier runs of the study are kept too: only
    those with `steps` steps and one of `seeds` are used now.
    """

    about: dict[str, Any]
    measured: dict[str, Measured] = field(default_factory=dict)
    trained: dict[str, dict[str, Trained]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    steps: int = 0
    seeds: tuple[str, ...] = ()

    def write(self, path: Path) -> None:
        found = dataclasses.asdict(self)
        with written_whole(path) as partial:
            partial.write_text(json.dumps({name: found[name] for name in SAVED}, indent=1))

    def of(self, keys: Sequence[str]) -> Results:
        """The same results, with the measurements of these settings only."""
        return dataclasses.replace(self, measured={key: self.measured[key] for key in keys if key in self.measured})

    @classmethod
    def read(cls, path: Path, about: dict[str, Any]) -> Results:
        """Read results from a file.

        Raises:
            FileError: if the file is not from a study.
            ConfigError: if it is from a study with other settings.
        """
        try:
            found = json.loads(path.read_text())
            results = cls(
                found["about"],
                {key: Measured(**value) for key, value in found["measured"].items()},
                {
                    key: {seed: Trained(**value) for seed, value in runs.items()}
                    for key, runs in found["trained"].items()
                },
                found["left_out"],
            )
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise FileError(f"{path} is not the result of a study: {error}; give another output") from None
        for name, value in about.items():
            if results.about.get(name) != value:
                raise ConfigError(
                    f"{path} is of a study with {name}={brief(results.about.get(name))}, and this one has "
                    f"{brief(value)}; continue with the settings it was begun with, or give another output"
                )
        return results

    def runs(self, key: str) -> dict[str, Trained]:
        """The short trainings of a setting that are used now, by seed."""
        found = self.trained.get(trained_as(key), {})
        return {seed: found[seed] for seed in self.seeds if seed in found and found[seed].steps == self.steps}

    def top1(self, key: str) -> list[float]:
        return [run.top1 for run in self.runs(key).values()]

    def loss(self, key: str) -> float:
        """The mean loss of the short trainings; infinite if one of them diverged, NaN if there are none."""
        losses = [run.loss for run in self.runs(key).values()]
        return statistics.fmean(losses) if losses else math.nan

    def against_full(self, key: str) -> list[float]:
        """The difference in accuracy from full backprop, for each seed."""
        plain = self.runs(FULL)
        return [run.top1 - plain[seed].top1 for seed, run in self.runs(key).items() if seed in plain]

    def write_csv(self, folder: Path, front: Sequence[str]) -> None:
        """Write `study.csv`, with a row per setting, and `layers.csv`, with a row per setting and layer."""
        head = [f.name for f in dataclasses.fields(Measured) if f.name != "layers"]
        with written_whole(folder / "study.csv") as partial, partial.open("w", newline="") as file:
            writer = csv.writer(file)
            trained = ["seeds", "loss", "top1", "against_full", "against_full_error"]
            writer.writerow(["setting", "options", *head, "front", *trained])
            for key in [FULL, *self.measured] if self.runs(FULL) else self.measured:
                top1 = mean_and_error(self.top1(key))[0]
                quality = [len(self.runs(key)), self.loss(key), top1, *mean_and_error(self.against_full(key))]
                one = self.measured.get(key)
                values = [getattr(one, name) for name in head] if one else [1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0]
                cells = [_rounded(value) for value in (*values, key in front, *quality)]
                writer.writerow([name_of(key), key if one else "", *cells])
        with written_whole(folder / "layers.csv") as partial, partial.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["setting", "layer", "cosine", "norm_ratio"])
            for key, one in self.measured.items():
                writer.writerows([name_of(key), *map(_rounded, layer)] for layer in one.layers)


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error. Each is NaN if there are too few values for it."""
    mean = statistics.mean(values) if values else math.nan
    return mean, statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return "" if math.isnan(value) else round(value, 6)
    return "" if value is None else value
