"""Which samples come when, and with which random numbers: a function of the seed, the epoch and the sample alone."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..errors import InputError, KeepgradError

__all__ = ["Batches", "Unreadable", "loaded", "mixed_seed", "seeded"]


PATIENCE = 60  # seconds that a loader process has after SIGTERM


class Unreadable(NamedTuple):
    """A file that cannot be used. It travels in place of its batch: exceptions lose their form between processes."""

    name: str
    reason: str
    problem: str = "cannot be read as an image"
    remedy: str = "mend it or take it away"


def mixed_seed(*numbers: int) -> int:
    """A seed of 32 bits from numbers, each of which changes it wholly."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The random numbers of Python, NumPy and torch from `seed`, and from before afterwards."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


class Batches:
    """The numbers of the images in each batch of an epoch, for one of several processes.

    With `shuffled`, whole batches in an order of the epoch; what does not fill a batch of every process is left out.
    Otherwise all images in their order, the last ones repeated until every process has as many.
    """

    def __init__(
        self, count: int, batch_size: int, seed: int, shuffled: bool, process: int = 0, processes: int = 1
    ) -> None:
        self.count, self.batch_size, self.seed, self.shuffled = count, batch_size, seed, shuffled
        self.process, self.processes = process, processes

    def __len__(self) -> int:
        """Batches in an epoch."""
        if self.shuffled:
            return self.count // (self.batch_size * self.processes)
        return -(-self._share() // self.batch_size)

    def _share(self) -> int:
        return -(-self.count // self.processes)

    def of(self, epoch: int, start: int = 0) -> list[list[int]]:
        """The batches of an epoch, from batch `start` on."""
        if self.shuffled:
            generator = torch.Generator().manual_seed(mixed_seed(self.seed, epoch))
            order = torch.randperm(self.count, generator=generator)
            rows = order[: len(self) * self.processes * self.batch_size].view(-1, self.processes, self.batch_size)
            return (rows[start:, self.process] + epoch * self.count).tolist()
        mine = torch.arange(self.process, self._share() * self.processes, self.processes).clamp(max=self.count - 1)
        return [part.tolist() for part in mine.split(self.batch_size)][start:]

    def is_first(self, batch: int, size: int) -> Tensor:
        """Which of the images of a batch are no repetition, where the order is not shuffled."""
        place = (torch.arange(size) + batch * self.batch_size) * self.processes + self.process
        return place < self.count


def _processors() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _leave_signals(_: int) -> None:
    """Signals reach every process of a group, but it is for the training process to stop in order, and to end this one.

    Where it does not, this one ends by itself.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "alarm"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, lambda *_: signal.alarm(PATIENCE))


@contextmanager
def _deaths_unheard() -> Iterator[None]:
    """When a loader process dies, torch raises an error wherever the training process is, also in the middle of a step.

    Not in this block: there the next batch says it.
    """
    if not hasattr(signal, "SIGCHLD") or not _in_main_thread():
        yield
        return
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        if _in_main_thread():
            signal.signal(signal.SIGCHLD, before)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def loaded(
    dataset: Dataset, batches: list[list[int]], workers: int, collate: Callable[[list[Any]], Any]
) -> Iterator[Any]:
    """The batches of a dataset, given by the numbers of their samples, loaded by `workers` processes.

    Raises:
        InputError: names the file that cannot be used.
        KeepgradError: if a loader process died.
    """
    found = DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=min(workers, len(batches), _processors()),
        collate_fn=collate,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),  # so that torch's own random state is left alone
        worker_init_fn=_leave_signals,
    )
    iterator = iter(found)
    with _deaths_unheard():
        try:
            for _ in batches:
                batch = _next(iterator)
                if isinstance(batch, Unreadable):
                    raise InputError(f"{batch.name} {batch.problem}: {batch.reason}; {batch.remedy}")
                yield batch
        finally:
            del iterator  # and so its processes


def _next(iterator: Iterator[Any]) -> Any:
    try:
        return next(iterator)
    except (RuntimeError, ConnectionError, EOFError) as error:
        if isinstance(error, RuntimeError) and "exited unexpectedly" not in str(error):
            raise
        reason = str(error) or type(error).__name__
    # Not in the block above: that error keeps the iterator, and with it the other loader processes.
    raise KeepgradError(
        f"a process that loads data was killed ({reason}); if memory is short, lower --workers, and --resume"
    )
