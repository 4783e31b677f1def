"""Run the same training with full backprop, then with keepgrad, and compare accuracy, time and memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ...errors import ConfigError, StoppedError
from ...fidelity import fidelity
from ...files import locked
from ...flags import write_yaml
from ...memory import peak_bytes
from ...report import Table, readable_bytes
from ...timing import seconds_in_turns
from ..config import RunFlags
from .trainer import Outcome, Task, Trainer, accelerator_for

__all__ = ["side_by_side"]

PLAIN, KEPT = "full backprop", "keepgrad"
ROUNDS, DRAWS = 8, 8


def side_by_side(
    config: RunFlags, output: Path, task_of: Callable[[Any, Any], Task], metrics: Mapping[str, str]
) -> Table:
    """Train with full backprop and with keepgrad, each in its own folder below `output`.

    Args:
        config: the settings of the training, including keepgrad's.
        output: the folder for results.
        task_of: creates the task from settings and an accelerator.
        metrics: the quality metrics to show. Maps the title of a table column to the name of a metric.

    Returns:
        A table with the metrics, the time and peak memory of a step, and the cosine with exact gradients.

    Raises:
        ConfigError: if the settings ask for full backprop only, or there is more than one process.
    """
    if config.full:
        raise ConfigError("full backprop is one of the two that are compared; leave that out, or give --data")
    if accelerator_for(config).num_processes > 1:
        raise ConfigError("the comparison runs in one process; start it without torchrun, or give --data")
    with locked(output):
        return _compared(config, output, task_of, metrics)


def _compared(config: RunFlags, output: Path, task_of: Callable[[Any, Any], Task], metrics: Mapping[str, str]) -> Table:
    write_yaml(output / "config.yaml", dataclasses.replace(config, output=str(output)))
    outcomes: dict[str, Outcome] = {}
    for name, own in ((PLAIN, config.without_keepgrad()), (KEPT, config)):
        one = dataclasses.replace(own, output=str(output / name.replace(" ", "-")))
        accelerator = accelerator_for(one)
        task = task_of(one, accelerator)
        try:
            outcomes[name] = Trainer(task, one, accelerator).run(name)
        except StoppedError as error:  # the message must name the folder of the comparison
            raise StoppedError(str(error).replace(str(one.output), str(output))) from None
    batch = task.sample()
    steps = {name: _Step(task, outcome.model).train() for name, outcome in outcomes.items()}
    agreement = fidelity(steps[KEPT], (batch, None), lambda loss, _: loss, draws=DRAWS).whole
    cosines = {PLAIN: 1.0, KEPT: agreement.cosine}
    once = {name: lambda step=step: step(*batch).backward() for name, step in steps.items()}
    seconds = seconds_in_turns(once, ROUNDS)
    peaks = {name: peak_bytes(step) for name, step in once.items()}
    rows = [
        (
            PLAIN if name == PLAIN else f"{KEPT} {_setting(config)}",
            *(f"{outcome.history[-1][metric]:.1%}" for metric in metrics.values()),
            f"{seconds[name] * 1e3:.0f} ms",
            f"{seconds[name] / seconds[PLAIN]:.2f}x",
            readable_bytes(peaks[name]),
            f"{peaks[name] / peaks[PLAIN]:.2f}x",
            f"{cosines[name]:.3f}",
        )
        for name, outcome in outcomes.items()
    ]
    head = ("", *metrics, "step", "", "peak memory", "", "cosine")
    note = (
        f"step: forward and backward of {len(batch[0])} images, median of {ROUNDS}, taking turns. peak memory: the\n"
        "most that tensors of such a step occupy. cosine: with the exact gradient of the trained model, mean\n"
        f"of {DRAWS} masks."
    )
    return Table(f"\n{config.epochs} epochs with full backprop and with keepgrad", head, rows, note)


class _Step(nn.Module):
    """A model together with its loss, as one module."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.loss = task.loss

    def forward(self, *batch: Any) -> Tensor:
        return self.loss(self.model, batch)


def _setting(config: RunFlags) -> str:
    keep = config.keep_config()
    return keep.settings().preset or f"{keep.keep_ratio}"
