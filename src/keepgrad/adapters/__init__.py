"""Where the sites are in a model.

An adapter is one class per kind of block: it finds the blocks of a model, turns a branch of a block into the stages of
the engine, and runs the block's forward around its branches. It reads the modules anew in each forward pass, so a
layer that is replaced, frozen, sharded or re-parametrised after `apply` is seen as it is.

Model libraries are looked at only if the program has imported them: a model of theirs cannot exist otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from ..ops.branch import AttentionBranch, Branch

__all__ = ["Adapter", "Block", "RunBranch", "Unsupported", "find_blocks"]


class Unsupported(Exception):  # noqa: N818
    """A branch that cannot be reduced; the message is the reason."""


class RunBranch(Protocol):
    """Runs the branch `kind` of a block on rows `[batch, positions, channels]`, by the engine or by `own`."""

    def __call__(
        self,
        kind: str,
        x: Tensor,
        grid: tuple[int, int],
        prefix: int,
        own: Callable[[Tensor], Tensor],
        residual: Tensor | None = None,
        **options: Any,
    ) -> Tensor: ...


class Adapter(Protocol):
    """What keepgrad has to know of one kind of block. Used as a class, never instantiated."""

    @staticmethod
    def find(model: nn.Module) -> list[Block]:
        """The blocks of this kind in `model`."""

    @staticmethod
    def branch(module: Any, kind: str, **options: Any) -> Branch | AttentionBranch:
        """The branch as it is now. Raises Unsupported with the reason."""

    @staticmethod
    def forward(block: Block, run: RunBranch, *args: Any, **kwargs: Any) -> Tensor:
        """The block's forward in training, with its branches given to `run`."""

    @staticmethod
    def paper_layers(blocks: Sequence[Block]) -> set[int]:
        """The indices of the blocks that the paper covers."""


@dataclass
class Block:
    """A module that holds sites.

    `index` counts the blocks; a downsampling layer has the index of the block behind it. `stage` counts
    the resolutions of a pyramid and `stride` is that resolution's, relative to the first stage. `patch_embed` and
    `prefix` say where the tokens of a transformer come from.
    """

    name: str
    module: nn.Module
    adapter: type[Adapter]
    kinds: tuple[str, ...]
    index: int = 0
    stage: int = 0
    stride: int = 1
    patch_embed: nn.Module | None = None
    prefix: int = 0


def find_blocks(model: nn.Module) -> list[Block]:
    """All blocks of the model, in the order of its modules."""
    adapters: list[type[Adapter]] = []
    if "timm" in sys.modules:
        from . import timm

        adapters += timm.ADAPTERS
    blocks = [block for adapter in adapters for block in adapter.find(model)]
    order = {id(module): i for i, module in enumerate(model.modules())}
    return sorted(blocks, key=lambda block: order[id(block.module)])
