"""How a run stops: on a signal, or when another process fails.

If one process stops alone, the others wait for it forever and the state cannot be saved. So code that may fail in one
process runs inside `with together():`. At the end of this block every process learns whether one has failed, and all
stop at the same step.
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

# Signals within this many seconds of the first count as one: a launcher may repeat one that the processes got.
SAME = 5.0

_group: list[Any] = []
"""The process group used to tell the others about a failure. Empty until it is first needed."""

__all__ = ["each", "memory_errors_named", "noted_signals", "together"]


@contextmanager
def noted_signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM in a list. The run stops after its current step; a second signal ends it at once."""
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
    """Turn out-of-memory errors of a block into a message that says what to do.

    Raises:
        KeepgradError: if memory runs out.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # torch raises OutOfMemoryError on accelerators only, and a plain RuntimeError on the CPU.
        is_named = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if not is_named and "can't allocate memory" not in str(error):
            raise
        raise KeepgradError(
            f"memory runs out: {reason_of(error, 200)}; lower --batch-size and raise --accumulate, or lower --size or "
            "--keep-ratio, and --resume"
        ) from None


@contextmanager
def together() -> Iterator[None]:
    """Make a block fail in all processes if it fails in one. All processes must enter it.

    At the end of the block they tell each other, over a process group on the CPU, so none waits for an accelerator.

    Raises:
        KeepgradError: the original error, in the process with the lowest rank that failed.
        StoppedElsewhereError: in all other processes.
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
    """The minimum of `value` over all processes."""
    if not _group:
        _group.append(dist.new_group(backend="gloo"))
    found = torch.tensor(value)
    dist.all_reduce(found, dist.ReduceOp.MIN, group=_group[0])
    return int(found)


@atexit.register
def _leave() -> None:
    """Destroy the process groups before Python exits.

    A gloo thread frees the last tensor shortly after all processes have its value, and needs Python for that. If Python
    has exited by then, the thread aborts the process. Destroying a group waits for its threads, but only if nothing
    else holds a reference to the group. That is why this file uses its own group, which no model refers to.
    """
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    _group.clear()


def each(items: Iterator[T]) -> Iterator[T]:
    """Yield the items. If one process fails to get its next item, all stop. All must have the same number of items."""
    end: Any = object()
    while True:
        with together():
            item = next(items, end)
        if item is end:
            return
        yield item
