"""What a training step keeps for its backward pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

__all__ = ["saved_bytes"]


def saved_bytes(forward: Callable[[], object], model: nn.Module) -> int:
    """The bytes saved for backward while `forward` runs: each storage once, parameters and buffers excluded."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    storages: dict[int, int] = {}
    held = []  # keeps every storage alive, so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        held.append(forward())  # type: ignore[arg-type]
    return sum(storages.values())
