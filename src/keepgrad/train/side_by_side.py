"""The same training with full backprop and with keepgrad, after one another, and what each takes and gives."""

from __future__ import annotations

import dataclasses
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ConfigError
from ..fidelity import fidelity
from ..memory import peak_bytes
from ..report import Table, readable_bytes
from .classify import Classification
from .config import TrainConfig
from .loop import Outcome, Trainer, accelerator_for

__all__ = ["side_by_side"]

SAMPLES, ROUNDS, DRAWS = 256, 12, 8


def side_by_side(config: TrainConfig, output: Path) -> Table:
    """Train both in folders below `output`; accuracy, time and memory of a step, and the cosine of gradients.

    Raises:
        ConfigError: if the settings leave nothing to compare.
    """
    if config.full:
        raise ConfigError("full backprop is one of the two that are compared; leave that out, or give --data")
    outcomes = {}
    for name, own in (("full backprop", config.without_keepgrad()), ("keepgrad", config)):
        one = dataclasses.replace(own, output=str(output / name.replace(" ", "-")))
        accelerator = accelerator_for(one)
        task = Classification(one, accelerator)
        outcomes[name] = Trainer(task, one, accelerator).run(name)
    images, labels = _batch(task)
    kept = outcomes["keepgrad"]
    agreement = fidelity(kept.model, (images, labels), F.cross_entropy, draws=DRAWS).whole
    cosines = {"full backprop": 1.0, "keepgrad": agreement.cosine}
    seconds = _seconds({name: outcome.model for name, outcome in outcomes.items()}, images, labels)
    return _table(outcomes, seconds, _peaks(outcomes, images, labels), cosines, config)


def _batch(task: Classification) -> tuple[Tensor, Tensor]:
    """Training images, so many that a step takes its time."""
    images, labels = [], []
    for some, own in task.batches(0, 0):
        images.append(some)
        labels.append(own)
        if sum(map(len, labels)) >= SAMPLES:
            break
    return torch.cat(images)[:SAMPLES], torch.cat(labels)[:SAMPLES]


def _step(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    model.zero_grad()
    F.cross_entropy(model(images), labels).backward()


def _seconds(models: dict[str, nn.Module], images: Tensor, labels: Tensor) -> dict[str, float]:
    """Median time of a step, the models taking turns."""
    found: dict[str, list[float]] = {name: [] for name in models}
    for model in models.values():
        model.train()
    for _ in range(ROUNDS):
        for name, model in models.items():
            start = time.perf_counter()
            _step(model, images, labels)
            found[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in found.items()}


def _peaks(outcomes: dict[str, Outcome], images: Tensor, labels: Tensor) -> dict[str, int]:
    return {
        name: peak_bytes(lambda model=outcome.model: _step(model, images, labels))  # type: ignore[misc]
        for name, outcome in outcomes.items()
    }


def _table(
    outcomes: dict[str, Outcome],
    seconds: dict[str, float],
    peaks: dict[str, int],
    cosines: dict[str, float],
    config: TrainConfig,
) -> Table:
    plain = "full backprop"
    rows = []
    for name, outcome in outcomes.items():
        rows.append(
            (
                name if name == plain else f"keepgrad {_setting(config)}",
                f"{outcome.history[-1]['top1']:.1%}",
                f"{seconds[name] * 1e3:.0f} ms",
                f"{seconds[name] / seconds[plain]:.2f}x",
                readable_bytes(peaks[name]),
                f"{peaks[name] / peaks[plain]:.2f}x",
                f"{cosines[name]:.3f}",
            )
        )
    head = ("", "accuracy", "step", "", "peak memory", "", "cosine")
    note = (
        f"step: forward and backward of {SAMPLES} images, median of {ROUNDS}, taking turns. peak memory: the most\n"
        f"that tensors of such a step occupy. cosine: with the exact gradient of the trained model, mean of {DRAWS}\n"
        "masks."
    )
    return Table(f"\n{config.epochs} epochs with full backprop and with keepgrad", head, rows, note)


def _setting(config: TrainConfig) -> str:
    keep = config.keep_config()
    return keep.settings().preset or f"{keep.keep_ratio}"
