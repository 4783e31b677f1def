"""The registry: which kinds of blocks keepgrad knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from .items import Attention, Scale

__all__ = ["PATCHES", "REGISTRY", "Adapter", "RunBranch", "adapts", "parameters_of"]


class RunBranch(Protocol):
    """Runs the branch `kind` of a block in the engine, or as the list of modules it is.

    `x` is rows `[batch, positions, channels]`. `residual` is added to the result. `shape` is that of the map the
    rows come from, where the block's forward knows it. `options` go to attention; for text, `attn_mask` tells every
    branch what is padding. `kinds` are the block's branches.
    """

    kinds: tuple[str, ...]

    def __call__(
        self,
        kind: str,
        x: Tensor,
        residual: Tensor | None = None,
        shape: tuple[int, ...] | None = None,
        **options: Any,
    ) -> Tensor: ...


class Adapter:
    """What keepgrad has to know of one kind of block. Subclasses say which branches it has.

    Where the block is not `x = x + branch(x)` for one branch after the other, they write `forward` too.
    """

    tier = 1
    gives_rows = True
    """Whether its forward gives `run` what the model itself gives its modules, so that their hooks see the same. Where
    it makes rows of maps it is False, and a branch with hooks inside is left alone."""
    has_frames = False
    """True if the blocks are for clips, and their forward gives shapes `(frames, height, width)` to `run`."""

    def modules(self, m: Any) -> Sequence[nn.Module]:
        """The modules that get a forward of keepgrad's: the block, unless its branches are modules of their own."""
        return [m]

    def branches(self, m: Any) -> dict[str, Any]:
        """The branches, "attention", "mlp" or "downsample", each a list of modules, `Scale`, `LinearOf` or `Attention`.

        A branch that cannot be reduced is the reason instead, a string.

        Raises:
            Unsupported: if the block is not as it should be.
        """
        raise NotImplementedError

    def forward(self, m: Any, run: RunBranch, *args: Any, **options: Any) -> Any:
        """The block's forward in training, with its branches given to `run`. `options` go to attention."""
        (x,) = args
        for kind in run.kinds:
            x = run(kind, x, x, **(options if kind == "attention" else {}))
        return x

    def covers(self, m: Any) -> bool:
        """Whether every parameter of the block belongs to a branch. If not, the block is not what the adapter is for.

        An adapter with a forward of its own may have others, unless it asks for itself.
        """
        if type(self).forward is not Adapter.forward:
            return True
        items = [item for items in self.branches(m).values() for item in items]
        inside = {id(p) for item in items for p in parameters_of(item)}
        return all(id(p) in inside for p in m.parameters())


def parameters_of(item: Any) -> list[Any]:
    """The parameters of an item of a branch."""
    if isinstance(item, nn.Module):
        return list(item.parameters())
    if isinstance(item, Attention):
        return list(item.module.parameters())
    if isinstance(item, Scale):
        return [item.read()]
    return [item.weight(), item.bias()]


REGISTRY: dict[str, Adapter] = {}
"""From the import path of a class to the adapter for it."""


PATCHES: dict[str, Callable[[Any, Any], tuple[int, ...]]] = {}
"""From the import path of a class that makes patches of images, and is no convolution, to a function of such a module
and of what it returns: how many patches there are each way.
"""


def adapts(*paths: str) -> Callable[[type[Adapter]], type[Adapter]]:
    """Register an adapter class for the blocks with these import paths, e.g. "mypackage.models.MyBlock".

    A block belongs to the class that defines its `forward`: a subclass with another forward is another kind of block.
    """

    def add(adapter: type[Adapter]) -> type[Adapter]:
        REGISTRY.update(dict.fromkeys(paths, adapter()))
        return adapter

    return add
