"""The registry: the kinds of blocks that keepgrad knows, and the adapter for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from .items import Attention, Scale

__all__ = ["PATCHES", "REGISTRY", "Adapter", "RunBranch", "adapts", "parameters_of"]


class RunBranch(Protocol):
    """Runs the branch `kind` of a block: in the engine, or by calling its modules one after the other.

    `x` has the shape `[batch, positions, channels]`. `residual` is added to the result. `shape` is the shape of the
    map, such as `(height, width)`, if the block's forward knows it. `options` are passed to attention; for text, every
    branch reads `attn_mask` to see which positions are padding. `kinds` are the names of the block's branches.
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
    """Describes one kind of block to keepgrad. A subclass defines `branches`.

    The default `forward` computes `x = x + branch(x)` for one branch after the other. If the block does something else,
    the subclass defines `forward` too.
    """

    tier = 1
    gives_rows = True
    """True if `forward` passes to `run` the same tensors that the model passes to its modules, so that hooks on those
    modules see the usual input. False if `forward` changes their layout first, for example turns maps into rows; a
    branch with hooks inside is then not reduced."""
    has_frames = False
    """True if the blocks work on video clips. `forward` then passes `(frames, height, width)` to `run` as the shape."""

    def modules(self, m: Any) -> Sequence[nn.Module]:
        """The modules whose forward keepgrad replaces. By default the block itself; a subclass may return others."""
        return [m]

    def branches(self, m: Any) -> dict[str, Any]:
        """The branches by name: "attention", "mlp" or "downsample".

        Each is a list of modules, `Scale`, `LinearOf` or `Attention`. If a branch cannot be reduced, a string that says
        why takes the place of the list.

        Raises:
            Unsupported: if the block is not built as the adapter expects.
        """
        raise NotImplementedError

    def forward(self, m: Any, run: RunBranch, *args: Any, **options: Any) -> Any:
        """The block's forward in training. It calls `run` for each branch, and passes `options` on to attention."""
        (x,) = args
        for kind in run.kinds:
            x = run(kind, x, x, **(options if kind == "attention" else {}))
        return x

    def covers(self, m: Any) -> bool:
        """True if every parameter of the block belongs to a branch. If not, the adapter does not fit the block.

        An adapter that defines `forward` may use further parameters there, so for it this is True without a check. It
        can override this method to check them itself.
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
"""Maps the import path of a block's class to its adapter."""


PATCHES: dict[str, Callable[[Any, Any], tuple[int, ...]]] = {}
"""For modules that cut images into patches and are not convolutions. Maps the import path of the class to a function
that takes the module and its output, and returns the number of patches along each dimension.
"""


def adapts(*paths: str) -> Callable[[type[Adapter]], type[Adapter]]:
    """Register an adapter class for the blocks with these import paths, e.g. "mypackage.models.MyBlock".

    A block is looked up by the class that defines its `forward`. So the adapter also serves a subclass that inherits
    `forward`, but not one that overrides it.
    """

    def add(adapter: type[Adapter]) -> type[Adapter]:
        REGISTRY.update(dict.fromkeys(paths, adapter()))
        return adapter

    return add
