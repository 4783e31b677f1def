"""The slow, obvious reference for reduced branches: dense matrices and plain autograd.

A branch is a list of pieces. The exact forward runs every piece on all positions. The reduced graph runs them on
slots, and wherever the engine would have saved a value, the value of the exact forward takes its place while the
gradient stays that of the graph (`graft`). The result has the value of the exact forward and the gradient of the
reduced one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Matrices", "Piece", "attend", "graft", "matrices", "reduced_branch"]


def graft(value: Tensor, graph: Tensor) -> Tensor:
    """The value of one tensor with the gradient of another."""
    return value.detach() + graph - graph.detach()


@dataclass(frozen=True)
class Matrices:
    """A mask and a reduction, written out. `value` and `grad` are `[slots, positions]`, `place` the other way round.

    Slots take their value from `value @ x` and hand their gradient back through `grad`; the gradient of the output
    reaches the slots through `place`, which puts slots where positions were.
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
    """The matrices for groups of positions of which one each is picked; the first `prefix` are always kept."""
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
    """A piece of a branch: on all positions, on slots (the same unless given), and whether its output is saved."""

    full: Callable[[Tensor], Tensor]
    saved: bool = False
    slots: Callable[[Tensor], Tensor] | None = None


def reduced_branch(pieces: Sequence[Piece], x: Tensor, reduction: Matrices) -> Tensor:
    """The branch, without its residual."""
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
