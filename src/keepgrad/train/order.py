"""Which samples come when, and with which random numbers: a function of the seed, the epoch and the sample alone."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..errors import InputError

__all__ = ["Batches", "Unreadable", "loaded", "mixed_seed", "seeded"]


class Unreadable(NamedTuple):
    """A file that is no image. It travels in place of its batch: exceptions lose their form between processes."""

    name: str
    reason: str


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


def _ignore_interrupt(_: int) -> None:
    """Ctrl-C reaches every process of a terminal, but it is for the training process to stop in order."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def loaded(
    dataset: Dataset, batches: list[list[int]], workers: int, collate: Callable[[list[Any]], Any]
) -> Iterator[Any]:
    """The batches of a dataset, given by the numbers of their samples, loaded by `workers` processes.

    Raises:
        InputError: names the file that cannot be read as an image.
    """
    found = DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=min(workers, len(batches), _processors()),
        collate_fn=collate,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),  # so that torch's own random state is left alone
        worker_init_fn=_ignore_interrupt,
    )
    for batch in found:
        if isinstance(batch, Unreadable):
            raise InputError(f"{batch.name} cannot be read as an image: {batch.reason}; mend it or take it away")
        yield batch
