"""A linear layer with low-rank adapters (LoRA): `y = W x + b + sum over adapters of s B A drop(x)`.

The backward of the frozen W needs no input. That of A needs `drop(x)`, and that of B needs `A drop(x)`, which is cheap
to redo. So two things are saved: the input, once for all layers that read it, and one bit per value for the dropout.
If A is frozen too, saving `A drop(x)` for B alone would need less memory; that is not done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from ..sampling import Kept
from .dropout import Drop
from .stages import Linear, Point, Pull, Stage, Tensors, cast

__all__ = ["Lora", "LowRank"]


class LowRank(NamedTuple):
    """An adapter: its scaling s, whether B has a bias, and its dropout, if any."""

    scaling: float
    has_bias: bool
    drop: Drop | None


@dataclass(frozen=True)
class Lora(Stage):
    """A base layer with low-rank adapters.

    Tensors: `count` of the base, then for each adapter A `[r, in]`, B `[out, r]` and the bias of B, if any.
    """

    base: Stage
    count: int
    adapters: tuple[LowRank, ...]
    heavy = True
    casts = True
    makes_new = True

    @property
    def noises(self) -> int:  # type: ignore[override]
        return sum(adapter.drop is not None for adapter in self.adapters)

    def split(self, tensors: Sequence[Any]) -> list[Any]:
        """Split `tensors`, or a list with one entry per tensor: those of the base, then those of each adapter."""
        groups, start = [tuple(tensors[: self.count])], self.count
        for adapter in self.adapters:
            end = start + 2 + adapter.has_bias
            groups.append(tuple(tensors[start:end]))
            start = end
        return groups

    def forward(self, x: Tensor, tensors: Tensors, kept: Kept | None, keep_extras: bool) -> tuple[Tensor, Tensors]:
        drawn: list[Tensor] = []

        def drop(one: Drop, rows: Tensor) -> Tensor:
            rows, bits = one.apply(rows, kept)
            drawn.append(bits)
            return rows

        base, *groups = self.split(tensors)
        out = self.base.forward(x, base, None, False)[0]
        return self._add(out, x, groups, drop), tuple(drawn)

    def redo(self, x: Tensor, tensors: Tensors, drawn: Tensors) -> Tensor:
        rest = iter(drawn)
        base, *groups = self.split(tensors)
        out = self.base.redo(x, base, ())
        return self._add(out, x, groups, lambda one, rows: one.again(rows, next(rest)))

    def _add(self, out: Tensor, x: Tensor, groups: list[Any], drop: Any) -> Tensor:
        """Add the adapters' outputs to that of the base, `out`, in the order and precision of PEFT's own forward."""
        dtype = out.dtype
        for adapter, (down, *up) in zip(self.adapters, groups, strict=True):
            rows = cast(x, down.dtype)
            if adapter.drop is not None:
                rows = drop(adapter.drop, rows)
            out = out + F.linear(F.linear(rows, down), *up).mul_(adapter.scaling)
        return cast(out, dtype)

    def vjp(self, at: Point) -> tuple[Tensor | None, Pull]:
        out = None
        if at.need_output:
            assert at.x is not None
            out = self.redo(at.x, at.tensors, at.extras)

        def pull(grad: Tensor) -> tuple[Tensor | None, tuple[Tensor | None, ...]]:
            (base, *groups), (base_needs, *needs) = self.split(at.tensors), self.split(at.needs)
            where = at._replace(tensors=base, needs=base_needs, extras=(), need_output=False)
            dx, found = self.base.vjp(where)[1](grad)
            rest = iter(at.extras)
            for adapter, tensors, own in zip(self.adapters, groups, needs, strict=True):
                bits = None if adapter.drop is None else next(rest)
                if not (at.need_input or any(own)):
                    found += (None,) * len(own)
                    continue
                part, more = _backward(adapter, at.x, tensors, own, grad, at.need_input, bits)
                dx = part if dx is None or part is None else dx + cast(part, dx.dtype)
                found += more
            return dx, found

        return out, pull

    def needs_input(self, needs: tuple[bool, ...], redo: bool) -> bool:
        base, *groups = self.split(needs)
        return self.base.needs_input(base, redo) or any(any(own[:2]) for own in groups)


def _backward(
    adapter: LowRank,
    x: Tensor | None,
    tensors: Tensors,
    needs: tuple[bool, ...],
    grad: Tensor,
    need_input: bool,
    bits: Tensor | None,
) -> tuple[Tensor | None, tuple[Tensor | None, ...]]:
    """The gradients of the input slots `x` and of an adapter's tensors."""
    (down, *up), (down_needs, *up_needs), s = tensors, needs, adapter.scaling
    rows = inner = None
    if down_needs or up_needs[0]:
        assert x is not None
        rows = cast(x, down.dtype)
        if adapter.drop is not None:
            assert bits is not None
            rows = adapter.drop.again(rows, bits)
        if up_needs[0]:
            inner = F.linear(rows, down).mul_(s)
    through = need_input or down_needs
    layer = Linear(adapter.has_bias)
    d_inner, (d_up, *d_bias) = layer.backward(inner, tuple(up), tuple(up_needs), grad, through)
    found = (d_up, *(None if d is None else d.mul_(s) for d in d_bias))
    if d_inner is None:
        return None, (None, *found)
    dx, d_down = Linear(False).backward(rows, (down,), (down_needs,), d_inner.mul_(s), need_input)
    if dx is not None and adapter.drop is not None:
        assert bits is not None
        dx = adapter.drop.again(dx, bits)
    return dx, (*d_down, *found)
