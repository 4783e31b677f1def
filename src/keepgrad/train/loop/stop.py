"""How a run stops: at a signal, and with the other processes.

A process that stops alone leaves the others waiting for it, and then nobody can save the state. So what may fail in one
process stands in `with together():`, at whose end all of them learn of it and stop at the same step.
"""

from __future__ import annotations

import atexit
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ...errors import KeepgradError, StoppedElsewhereError, reason_of

T = TypeVar("T")

# Seconds in which further signals count as the first one: a launcher passes on what its process group has had already.
SAME = 5.0

_group: list[Any] = []
"""The group over which the processes tell each other, once there is one."""

__all__ = ["each", "memory_errors_named", "noted_signals", "together"]


@contextmanager
def noted_signals() -> Iterator[list[int]]:
    """The signals that came: at the first one a run stops between two steps, a later one ends it at once."""
    found: list[int] = []
    first = 0.0
    if threading.current_thread() is not threading.main_thread():
        yield found
        return

    def note(number: int, _: Any) -> None:
        nonlocal first
        if not found:
            first = time.monotonic()
        elif time.monotonic() - first > SAME:
            raise KeyboardInterrupt
        found.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield found
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def memory_errors_named() -> Iterator[None]:
    """A block whose errors for want of memory say what to do.

    Raises:
        KeepgradError: if memory runs out.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # torch has a class of its own for accelerators only.
        is_named = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if not is_named and "can't allocate memory" not in str(error):
            raise
        raise KeepgradError(
            f"memory runs out: {reason_of(error, 200)}; lower --batch-size and raise --accumulate, or lower --size or "
            "--keep-ratio, and --resume"
        ) from None


@contextmanager
def together() -> Iterator[None]:
    """A block that fails in all processes if it fails in one; to be entered by all of them.

    They tell each other at its end, over a group of the CPU, so that no accelerator has to be waited for.

    Raises:
        KeepgradError: its own, in the first of the processes that failed.
        StoppedElsewhereError: in all others.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    error: KeepgradError | None = None
    try:
        yield
    except KeepgradError as found:
        error = found
    own, count = dist.get_rank(), dist.get_world_size()
    failed = _lowest(count if error is None else own)
    if error is not None and failed == own:
        raise error
    if failed < count:
        raise StoppedElsewhereError(f"process {failed} stopped, and this one with it; see what that one says")


def _lowest(value: int) -> int:
    """The lowest value of all processes."""
    if not _group:
        _group.append(dist.new_group(backend="gloo"))
    found = torch.tensor(value)
    dist.all_reduce(found, dist.ReduceOp.MIN, group=_group[0])
    return int(found)


@atexit.register
def _leave() -> None:
    """End the groups before Python ends.

    A thread of gloo lets go of the last tensor a moment after everyone has its value, and for that it needs Python. If
    Python has ended by then, the thread aborts the process. The end of a group waits for its threads, once nothing else
    holds the group: so these words go over a group of their own, which no model holds.
    """
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    _group.clear()


def each(items: Iterator[T]) -> Iterator[T]:
    """The items, of which every process has as many; where one process cannot get its next one, all stop."""
    end: Any = object()
    while True:
        with together():
            item = next(items, end)
        if item is end:
            return
        yield item
