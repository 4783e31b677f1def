"""What a training step keeps for its backward pass, and how high its memory rises."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ._torch import TorchDispatchMode, tree_leaves

__all__ = ["peak_bytes", "saved_bytes"]


def saved_bytes(forward: Callable[[], object], model: nn.Module) -> int:
    """The bytes saved for backward while `forward` runs: each storage once, parameters and buffers excluded."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    storages: dict[int, int] = {}
    held: list[object] = []  # keeps every storage alive, so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        held.append(forward())
    return sum(storages.values())


def peak_bytes(step: Callable[[], object]) -> int:
    """The most bytes that tensors made during `step` occupy at one time, on any device; what kernels use inside is
    not seen."""
    with _LiveBytes() as live:
        step()
    return live.peak


class _LiveBytes(TorchDispatchMode):
    """Counts the storages that operations make, from when they appear until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self.seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            if id(storage) in given or storage in self.seen:
                continue
            self.seen.add(storage)
            size = storage.nbytes()
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._free, size)
        return out

    def _free(self, size: int) -> None:
        self.now -= size
