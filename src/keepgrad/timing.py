"""Time training steps so that they can be compared: the steps take turns, and the first turn does not count."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

__all__ = ["seconds_in_turns"]


def seconds_in_turns(steps: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The median time of each step, in seconds."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 1):
        for name, step in steps.items():
            _wait()
            start = time.perf_counter()
            step()
            _wait()
            found[name].append(time.perf_counter() - start)
    return {name: statistics.median(values[1:]) for name, values in found.items()}


def _wait() -> None:
    """Wait until the accelerator is done."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
