"""The order of the samples, and the random numbers for each. Both depend only on seed, epoch and sample."""

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


PATIENCE = 60  # seconds until a loader process ends after SIGTERM


class Unreadable(NamedTuple):
    """A file that cannot be used. Loaders return it in place of a batch, as exceptions change between processes."""

    name: str
    reason: str
    problem: str = "cannot be read as an image"
    remedy: str = "mend it or take it away"


def mixed_seed(*numbers: int) -> int:
    """A 32-bit seed made from several numbers. Changing one of them gives an unrelated seed."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed Python, NumPy and torch within a block, and restore their random states afterwards."""
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

    With `shuffled`, each epoch has its own random order, and images that do not fill a batch in every process are left
    out. Otherwise all images come in order, and the last one is repeated until every process has the same number.
    """

    def __init__(
        self, count: int, batch_size: int, seed: int, shuffled: bool, process: int = 0, processes: int = 1
    ) -> None:
        self.count, self.batch_size, self.seed, self.shuffled = count, batch_size, seed, shuffled
        self.process, self.processes = process, processes

    def __len__(self) -> int:
        """The number of batches per epoch."""
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
        """Which images of a batch are not repetitions, as booleans. Only for an order that is not shuffled."""
        place = (torch.arange(size) + batch * self.batch_size) * self.processes + self.process
        return place < self.count


def _processors() -> int:
    """The number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _leave_signals(_: int) -> None:
    """Make a loader process ignore SIGINT, and end only some time after SIGTERM.

    Signals reach every process of a group, but the training process should stop properly and then end its loaders. If
    it does not, the loader ends by itself after `PATIENCE` seconds.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "alarm"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, lambda *_: signal.alarm(PATIENCE))


@contextmanager
def _deaths_unheard() -> Iterator[None]:
    """Within this block, the death of a loader process is reported only when the next batch is requested.

    Otherwise torch raises an error at once, wherever the training process is, even in the middle of a step.
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
    """Load batches with `workers` processes. `batches` lists the numbers of the samples in each batch.

    Raises:
        InputError: if a file cannot be used; the message names it.
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
            del iterator  # this ends its processes


def _next(iterator: Iterator[Any]) -> Any:
    try:
        return next(iterator)
    except (RuntimeError, ConnectionError, EOFError) as error:
        if isinstance(error, RuntimeError) and "exited unexpectedly" not in str(error):
            raise
        reason = str(error) or type(error).__name__
    # Not raised in the except block: the old error would keep the iterator and the other loader processes alive.
    raise KeepgradError(
        f"a process that loads data was killed ({reason}); if memory is short, lower --workers, and --resume"
    )
