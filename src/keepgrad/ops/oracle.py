"""A slow, obvious reference for reduced branches, made of dense matrices and plain autograd.

A branch is a list of pieces. The exact forward runs every piece on all positions. The reduced graph runs them on
slots. Wherever the engine would save a value, the graph uses the value of the exact forward but keeps its own gradient
(`graft`). The result has the value of the exact forward and the gradient of the reduced graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Matrices", "Piece", "attend", "graft", "matrices", "reduced_branch"]


def graft(value: Tensor, graph: Tensor) -> Tensor:
    """A tensor with the value of `value`, whose gradient goes to `graph`."""
    return value.detach() + graph - graph.detach()


@dataclass(frozen=True)
class Matrices:
    """A mask and a reduction as matrices.

    Attributes:
        value: `[slots, positions]`. The values of the slots are `value @ x`.
        grad: `[slots, positions]`. The gradient of the slots goes back to `x` as that of `grad @ x`.
        place: `[positions, slots]`. The output is `place @ slots`, through which its gradient reaches the slots.
        size: `[slots]`, how many positions each slot stands for (1 for drop and scaled).
    """

    value: Tensor
    grad: Tensor
    place: Tensor
    size: Tensor

    def slots(self, rows: Tensor) -> Tensor:
        """The slots of `rows`."""
        return graft(self.value @ rows, self.grad @ rows)


def matrices(
    groups: Sequence[Sequence[int]], picked: Sequence[int], positions: int, reduce: str, prefix: int = 0
) -> Matrices:
    """The matrices of a reduction.

    Each slot has a group of positions, one of which is picked. The first `prefix` positions are always kept.
    """
    count = len(groups)
    pick = torch.zeros(count, positions, dtype=torch.float64)
    member = torch.zeros(count, positions, dtype=torch.float64)
    for slot, (group, chosen) in enumerate(zip(groups, picked, strict=True)):
        pick[slot, chosen] = 1
        for position in group:
            member[slot, position] = 1
    size = member.sum(1)
    mean = member / size[:, None]
    ones = torch.ones(count, dtype=torch.float64)
    if reduce == "drop":
        return Matrices(pick, pick, pick.t(), ones)
    if reduce == "scaled":
        times = torch.ones(count, dtype=torch.float64)
        times[prefix:] = (positions - prefix) / (count - prefix)
        return Matrices(pick, pick, pick.t() * times, ones)
    if reduce == "fold":
        return Matrices(pick, mean, member.t(), size)
    if reduce == "pool":
        return Matrices(mean, mean, member.t(), size)
    raise ValueError(reduce)


@dataclass(frozen=True)
class Piece:
    """A piece of a branch.

    `full` is its function on all positions, `slots` its function on slots (None for the same one). `saved` says whether
    the engine saves its output.
    """

    full: Callable[[Tensor], Tensor]
    saved: bool = False
    slots: Callable[[Tensor], Tensor] | None = None


def reduced_branch(pieces: Sequence[Piece], x: Tensor, reduction: Matrices) -> Tensor:
    """Run the branch, without its residual."""
    value, graph = x.detach(), reduction.slots(x)
    for piece in pieces:
        value = piece.full(value).detach()
        graph = (piece.slots or piece.full)(graph)
        if piece.saved:
            graph = graft(reduction.value @ value, graph)
    return graft(value, reduction.place @ graph)


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int, size: Tensor | None = None) -> Tensor:
    """Softmax attention of rows `[batch, n, heads * dim]`; a key that stands for m positions counts m times."""
    q, k, v = (rows.unflatten(-1, (heads, -1)).transpose(1, 2) for rows in (q, k, v))
    weight = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).exp()
    if size is not None:
        weight = weight * size
    weight = weight / weight.sum(-1, keepdim=True)
    return (weight @ v).transpose(1, 2).flatten(2)
