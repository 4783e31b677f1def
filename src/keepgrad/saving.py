"""What a branch saves for backward, known before it runs: counted on tensors without data."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .adapters.program import Program
from .ops.branch import Branch
from .sampling import Layout, sample, slot_count

__all__ = ["saving"]

POSITIONS = (16, 16)
"""The map on which a branch is counted, where its attention does not have one of its own."""


def saving(program: Program, keep_ratio: float, reduce: str, method: str, save: str) -> tuple[float, float]:
    """How many values for each position plain autograd and keepgrad save for a branch, with nothing frozen.

    Where the branch has more to say, such as a mask that is given to each call, it is not counted.
    """
    branch = program.bind().on_meta()
    attention = branch.attention
    shape = program.layout or POSITIONS
    dtype = next((t.dtype for t in _tensors(branch)), torch.float32)
    x = torch.empty(1, math.prod(shape), program.width or 1, dtype=dtype, device="meta", requires_grad=True)
    kept = heads = None
    if keep_ratio < 1 and attention is not None and method == "head":
        heads = torch.empty(slot_count(attention.core.heads, keep_ratio), dtype=torch.int64, device="meta")
    elif keep_ratio < 1:
        seed = torch.empty((), dtype=torch.int64, device="meta")
        kept = sample(seed, 1, Layout(shape), max(keep_ratio, 1 / math.prod(shape)), "random", reduce)
    plain = _saved_values(lambda: branch.plain(x), branch)
    ours = _saved_values(lambda: branch.run(x, kept, save, None, method, heads), branch)
    return plain / x.shape[1], ours / x.shape[1]


def _tensors(branch: Branch) -> list[Tensor]:
    links = [*branch.before, *branch.after]
    tensors = [t for _, given in links for t in given]
    if branch.attention is not None:
        tensors += [*branch.attention.projection[1], *branch.attention.tensors]
    return tensors


def _saved_values(run: Callable[[], object], branch: Branch) -> int:
    """How many floating-point numbers autograd holds after `run`, without the branch's own tensors."""
    own = {t.untyped_storage() for t in _tensors(branch)}
    found: dict[torch.UntypedStorage, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            found[tensor.untyped_storage()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    del result
    return sum(storage.nbytes() // t.element_size() for storage, t in found.items() if storage not in own)
