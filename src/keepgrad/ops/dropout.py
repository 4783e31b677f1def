"""Dropout inside a stage. It saves one bit for each value, zero if the value was dropped, to drop the same in backward.

The user's own module draws the noise, in the shape that it is given, so the random numbers are those of the plain
model. A slot uses the noise of its picked position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import InputError
from ..sampling import Kept
from .stages import Opaque, Point, Pull, Tensors, partial_vjp

__all__ = ["Drop", "OpaqueWithDropout"]


@dataclass(frozen=True)
class Drop:
    """Dropout with probability `p`. `draw` is the forward of its module, which returns the noise for ones."""

    draw: Callable[[Tensor], Tensor]
    p: float

    def apply(self, x: Tensor, kept: Kept | None) -> tuple[Tensor, Tensor]:
        """Drop values of all rows. Returns the rows, and the bits to save."""
        noise = self.draw(torch.ones_like(x))
        live = noise != 0
        return x * noise, _bits(live if kept is None else kept.pick(live))

    def again(self, x: Tensor, bits: Tensor) -> Tensor:
        """Drop the same values of slots, or of their gradient, as the saved bits say."""
        shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
        live = bits.unsqueeze(-1).bitwise_right_shift(shifts).bitwise_and_(1).flatten(-2)[..., : x.shape[-1]]
        noise = live.to(x.dtype)
        return x * (noise.div_(1 - self.p) if self.p < 1 else noise)


def _bits(live: Tensor) -> Tensor:
    """Booleans `[..., n]`, packed eight to a byte."""
    shifts = torch.arange(8, dtype=torch.uint8, device=live.device)
    eights = F.pad(live.to(torch.uint8), (0, -live.shape[-1] % 8)).unflatten(-1, (-1, 8))
    return eights.bitwise_left_shift(shifts).sum(-1, dtype=torch.uint8)


@dataclass(frozen=True)
class OpaqueWithDropout(Opaque):
    """Any position-wise module with dropouts inside. It must call each of them at most once, on rows.

    `modules` are the dropouts. While `fn` runs, their forward is replaced: in the forward pass by one that records what
    is drawn, in backward by one that drops the same values again.
    """

    modules: tuple[Any, ...] = ()
    drops: tuple[Drop, ...] = ()

    @property
    def noises(self) -> int:  # type: ignore[override]
        return len(self.drops)

    def forward(self, x: Tensor, tensors: Tensors, kept: Kept | None, keep_extras: bool) -> tuple[Tensor, Tensors]:
        drawn: dict[int, Tensor] = {}

        def note(number: int, rows: Tensor) -> Tensor:
            if number in drawn or rows.dim() != 3:
                raise InputError(
                    "a module that keepgrad does not know calls a dropout twice, or not on rows; "
                    "leave its layer out with layers=..."
                )
            out, drawn[number] = self.drops[number].apply(rows, kept)
            return out

        with _in_place_of(self.modules, note):
            out = self.fn(x, *tensors)
        unused = x.new_empty(0, dtype=torch.uint8)
        return out, tuple(drawn.get(number, unused) for number in range(self.noises))

    def redo(self, x: Tensor, tensors: Tensors, drawn: Tensors) -> Tensor:
        with _in_place_of(self.modules, lambda number, rows: self.drops[number].again(rows, drawn[number])):
            return self.fn(x, *tensors)

    def vjp(self, at: Point) -> tuple[Tensor | None, Pull]:
        assert at.x is not None
        return partial_vjp(lambda x, *tensors: self.redo(x, tensors, at.extras), at.x, at.tensors, at.needs)


@contextmanager
def _in_place_of(modules: Sequence[Any], forward: Callable[[int, Tensor], Tensor]) -> Iterator[None]:
    """While this context is on, each module calls `forward` with its number in the list and its input."""
    for number, module in enumerate(modules):
        module.forward = partial(forward, number)
    try:
        yield
    finally:
        for module in modules:
            del module.forward
