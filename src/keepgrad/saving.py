"""Count what a branch saves for backward, before it runs, on tensors without data."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .adapters.program import Program
from .ops.branch import Branch
from .ops.store import dither
from .sampling import Layout, sample, slot_count

__all__ = ["saving"]

POSITIONS = (16, 16)
"""The size of the map for counting, if the branch has no layout of its own."""


def saving(program: Program, keep_ratio: float, reduce: str, method: str, save: str, store: str) -> tuple[float, float]:
    """How many values per position a branch saves, with plain autograd and with keepgrad, if no parameter is frozen.

    Bytes are divided by the size of the branch's own dtype, so in a float32 model four packed values count as one.
    Other arguments of a call, such as an attention mask, are not counted.
    """
    branch = program.bind().on_meta()
    attention = branch.attention
    shape = program.layout or POSITIONS
    dtype = next((t.dtype for t in _tensors(branch)), torch.float32)
    x = torch.empty(1, math.prod(shape), program.width or 1, dtype=dtype, device="meta", requires_grad=True)
    kept = heads = None
    noise = dither(0, x) if store == "int8" else None
    if keep_ratio < 1 and attention is not None and method == "head":
        heads = torch.empty(slot_count(attention.core.heads, keep_ratio), dtype=torch.int64, device="meta")
    elif keep_ratio < 1:
        kept = sample(0, 1, Layout(shape), max(keep_ratio, 1 / math.prod(shape)), "random", reduce, x.device)
    plain = _saved_bytes(lambda: branch.plain(x), branch)
    ours = _saved_bytes(lambda: branch.run(x, kept, save, None, method, heads, noise), branch)
    unit = x.shape[1] * x.element_size()
    return plain / unit, ours / unit


def _tensors(branch: Branch) -> list[Tensor]:
    links = [*branch.before, *branch.after]
    tensors = [t for _, given in links for t in given]
    if branch.attention is not None:
        tensors += [*branch.attention.projection[1], *branch.attention.tensors]
    return tensors


def _saved_bytes(run: Callable[[], object], branch: Branch) -> int:
    """The bytes that autograd saves in `run`, without the branch's own tensors and without indices."""
    own = {t.untyped_storage() for t in _tensors(branch)}
    found: set[torch.UntypedStorage] = set()

    def pack(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() or tensor.dtype in (torch.int8, torch.int32):  # integers: packed values
            found.add(tensor.untyped_storage())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    del result
    return sum(storage.nbytes() for storage in found - own)
