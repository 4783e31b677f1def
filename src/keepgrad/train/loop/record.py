"""What a run shows and writes: a progress bar, metrics.csv, TensorBoard events and a plot of the curves.

metrics.csv and the plot are made from the history in the state, so a resumed run writes the same files as a run that
was never interrupted.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ...errors import FileError
from ...files import written_whole
from ...report import figures, readable_bytes

__all__ = ["Record", "peak_memory"]


def peak_memory(device: torch.device) -> int:
    """The peak memory so far: of the device on CUDA, otherwise of this process. 0 where it cannot be measured."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return 0
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024


class Record:
    """The progress bar and the files of one run. With `on=False` (all processes but the first) it does nothing."""

    def __init__(self, output: Path, on: bool, title: str, shown: Sequence[str], steps: int, step: int) -> None:
        self.output, self.on = output, on
        self.shown = ("train_loss", *shown)
        if not on:
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        from torch.utils.tensorboard import SummaryWriter

        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(),
        )
        self.task = self.progress.add_task(title, total=steps, completed=step, facts="")
        try:
            self.events = SummaryWriter(str(output / "events"), purge_step=step + 1)
        except OSError as error:
            raise FileError(f"cannot write {output / 'events'}: {error.strerror}; give another output") from None

    def __enter__(self) -> Record:
        if self.on:
            self.progress.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.on:
            self.progress.stop()
            with suppress(OSError):  # an error such as a full disk has already been reported
                self.events.close()

    def print(self, line: str) -> None:
        if self.on:
            self.progress.console.print(line, highlight=False, soft_wrap=True)

    def step(self, step: int, loss: float, rate: float, device: torch.device) -> None:
        """Update the progress bar after a step. `rate` is in samples per second."""
        if self.on:
            facts = f"loss {loss:.3f}  {rate:.0f}/s  {readable_bytes(peak_memory(device))}"
            self.progress.update(self.task, completed=step, facts=facts)

    def epoch(self, history: Sequence[Mapping[str, float]]) -> None:
        """After an epoch, print a line about it and update the files."""
        if not self.on:
            return
        row = history[-1]
        shown = (f"{name} {_short(name, row[name])}" for name in self.shown)
        self.print("  ".join([f"epoch {row['epoch']:3.0f}", *shown, f"{row['seconds']:.1f} s"]))
        try:
            for name, value in row.items():
                if name not in ("epoch", "step"):
                    self.events.add_scalar(name, value, int(row["step"]))
            self.events.flush()
        except OSError as error:
            raise FileError(f"cannot write {self.output / 'events'}: {error.strerror}; is there space?") from None
        with written_whole(self.output / "metrics.csv") as partial, partial.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(row))
            writer.writeheader()
            writer.writerows(history)
        with written_whole(self.output / "curves.png") as partial:
            curves(history, self.shown).savefig(partial, dpi=120)


def _short(name: str, value: float) -> str:
    return f"{value:.4f}" if "loss" in name else f"{value:.1%}"


def curves(history: Sequence[Mapping[str, float]], shown: Sequence[str]) -> Any:
    """Plot the metrics over the epochs: losses on the left, the others on the right."""
    figure = figures().Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    epochs = [row["epoch"] for row in history]
    for name in shown:
        axes = left if "loss" in name else right
        axes.plot(epochs, [row[name] for row in history], marker="." if len(epochs) < 30 else "", label=name)
    left.set(xlabel="epoch", ylabel="loss")
    right.set(xlabel="epoch")
    for axes in (left, right):
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.legend()
    return figure
