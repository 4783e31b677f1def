"""What the tests have to know of a family."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.metadata import version

import pytest
import torch
from conftest import spread
from oracle_model import Branch
from packaging.version import Version
from torch import Tensor, nn

from keepgrad import Layout


@dataclass
class Family:
    """A small model of a family, an input for it, and where its branches are.

    `specs` has the branches by the class name of the patched module and the kind of branch. `output` takes the tensor
    from what the model returns. `limit` is the share of full backprop's saved values that 0.5 may save in the branches.
    `rtol` is larger where the model itself computes in float32, whatever the type of its parameters.
    `apart` is a context in which the model has its branches in modules of their own, for the oracle, where they are
    not. `since` is the first version of its library that can build the model, where that is above the least that
    keepgrad asks for.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[torch.dtype], dict[str, Tensor] | Tensor]
    specs: dict[str, dict[str, Branch]]
    methods: tuple[str, ...] = ("qkv", "query", "head")
    output: Callable[[object], Tensor] = lambda out: out
    limit: float = 0.40
    rtol: float = 1e-7  # of gradients, in float64
    apart: Callable[[nn.Module], AbstractContextManager] = lambda model: nullcontext()
    since: str = ""

    def model(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        if self.since:
            library, least = self.since.split()
            if Version(version(library)) < Version(least):
                pytest.skip(f"a model of {self.since}")
        torch.manual_seed(0)
        return spread(self.make()).train().to(dtype)

    def run(self, model: nn.Module, dtype: torch.dtype = torch.float32) -> Tensor:
        given = self.inputs(dtype)
        return self.output(model(**given) if isinstance(given, dict) else model(given))


def images(size: int, dtype: torch.dtype, batch: int = 2, channels: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, channels, size, size, generator=generator, dtype=torch.float64).to(dtype)


def tokens(side: int, prefix: int) -> Layout:
    return Layout((side, side), prefix)
