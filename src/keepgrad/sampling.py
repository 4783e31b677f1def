"""Which positions are kept, and what becomes of the rest.

A mask is an order of the positions, cut into as many runs as there are slots. The members of a run form a group, and
one of them is picked:

- `grid`: the order follows bands of two rows, column by column, turning at the end of each band, so that neighbours in
  the order are neighbours in the image: runs of 2 are pairs, of 4 are 2x2 tiles, of 8 are 2x4 tiles. Whether bands are
  of rows or of columns and where the runs begin is random, and so is which member is picked, the same in every group.
  Pairs alternate, which makes the paper's checkerboard `(row + col) % 2 == phase` where they tile the map.
- `random`: a random order; the first member of each run is picked.
- `block`: the kept positions are one contiguous piece of the grid order, beginning anywhere.

`reduce` says what of the others. With groups of m (for scaled: of the mean size):

| reduce | gather (activations) | gather_grad (dy)     | give_back (dx)             | multiplicity |
| ---    | ---                  | ---                  | ---                        | ---          |
| drop   | picked               | picked               | to the picked              | 1            |
| scaled | picked               | picked, times m      | to the picked              | 1            |
| fold   | picked               | sum over the group   | to every member, times 1/m | m            |
| pool   | mean over the group  | sum over the group   | to every member, times 1/m | m            |

Shapes: rows are `[batch, positions, channels]`, slots `[batch, slots, channels]`. The number of slots depends on the
keep-ratio and the layout alone, never on the random numbers. Prefix tokens (class, registers) are groups of one.

All randomness of a mask comes from one 64-bit number, hashed with integer tensor operations: the same code
runs in eager mode, under `torch.compile` and on every device, and consumes no random stream.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .errors import InputError, MapTooSmallError

__all__ = ["MASKS", "REDUCTIONS", "Kept", "Layout", "hashed", "kept_indices", "sample", "slot_count"]

MASKS = ("grid", "random", "block")
REDUCTIONS = ("drop", "scaled", "fold", "pool")


class Layout(NamedTuple):
    """How the positions of a feature map lie: `prefix` tokens (class, registers), then the map, row by row.

    `shape` is `(n,)` for a sequence, `(height, width)` for an image, `(frames, height, width)` for a clip. `cell` is
    the side of the square of positions that is kept or dropped as one (see `sample`).
    """

    shape: tuple[int, ...]
    prefix: int = 0
    cell: int = 1

    @property
    def positions(self) -> int:
        """The number of positions, with the prefix."""
        return self.prefix + math.prod(self.shape)

    @property
    def tall_and_wide(self) -> tuple[int, int]:
        """Height and width of one frame; a sequence is one row."""
        return (1, self.shape[0]) if len(self.shape) == 1 else self.shape[-2:]  # type: ignore[return-value]


@dataclass(frozen=True)
class Kept:
    """The kept slots of a batch of feature maps of `positions` positions: how to gather, and how to give back.

    Indices are into the flattened rows `[batch * positions]`, those of slots into `[batch * slots]`: flat rows are
    gathered faster. Group tensors are None for `drop` and `scaled`, which forget the other members.
    """

    reduce: str
    positions: int
    slots: int
    prefix: int
    picked_flat: Tensor  # [batch * slots], the prefix first
    order_flat: Tensor | None = None  # [batch * positions], group after group
    starts_flat: Tensor | None = None  # [batch * slots], where each group begins in order_flat
    slot_of_flat: Tensor | None = None  # [batch * positions], the slot of each position
    size: Tensor | None = None  # [slots]
    is_shared = True
    """Whether all samples share the mask."""

    @property
    def picked(self) -> Tensor:
        """The picked position of each slot."""
        return self.picked_flat[: self.slots]

    def of_first(self, batch: int) -> Kept:
        """The slots of the first `batch` samples, or of any other `batch` of them: all share the mask."""
        if self.order_flat is None:
            return replace(self, picked_flat=self.picked_flat[: batch * self.slots])
        assert self.starts_flat is not None
        assert self.slot_of_flat is not None
        return replace(
            self,
            picked_flat=self.picked_flat[: batch * self.slots],
            order_flat=self.order_flat[: batch * self.positions],
            starts_flat=self.starts_flat[: batch * self.slots],
            slot_of_flat=self.slot_of_flat[: batch * self.positions],
        )

    def _group_sum(self, rows: Tensor) -> Tensor:
        flat = rows.reshape(-1, rows.shape[-1])
        if flat.shape[0] == 0:
            return rows.new_zeros(rows.shape[0], self.slots, rows.shape[-1])
        assert self.order_flat is not None
        sums = F.embedding_bag(self.order_flat, flat, self.starts_flat, mode="sum")
        return sums.view(rows.shape[0], self.slots, rows.shape[-1])

    def _share(self, slots: Tensor) -> Tensor:
        assert self.size is not None
        return slots / self.size.to(slots.dtype).unsqueeze(-1)

    def gather(self, rows: Tensor) -> Tensor:
        """The activations that stand for each slot."""
        if self.reduce == "pool":
            return self._share(self._group_sum(rows))
        return _select(rows, self.picked_flat, self.slots)

    def gather_grad(self, grad: Tensor) -> Tensor:
        """The output gradient of each slot."""
        if self.size is not None:
            return self._group_sum(grad)
        slots = _select(grad, self.picked_flat, self.slots)
        if self.reduce == "scaled":
            slots[:, self.prefix :] *= (self.positions - self.prefix) / (self.slots - self.prefix)
        return slots

    def give_back(self, slots: Tensor, onto: Tensor | None = None) -> Tensor:
        """The input gradient of every position, added to `onto` where given; `onto` itself is not changed."""
        if self.size is not None:
            assert self.slot_of_flat is not None
            grad = _select(self._share(slots), self.slot_of_flat, self.positions)
            return grad if onto is None else grad.add_(onto)
        batch, _, channels = slots.shape
        rows = slots.reshape(-1, channels)
        if onto is None:
            grad = slots.new_zeros(batch, self.positions, channels)
            grad.view(-1, channels).index_copy_(0, self.picked_flat, rows)
            return grad
        flat = onto.reshape(-1, channels).index_add(0, self.picked_flat, rows)
        return flat.view(batch, self.positions, channels)

    def key_bias(self, dtype: torch.dtype) -> Tensor | None:
        """What to add to the attention scores of each slot as a key `[1, slots]`: the logarithm of its multiplicity."""
        if self.size is None:
            return None
        return self.size.to(torch.promote_types(dtype, torch.float32)).log().to(dtype).unsqueeze(0)

    def causal_bias(self, dtype: torch.dtype) -> Tensor:
        """What to add to the scores of slots as keys `[slots, slots]` where no query may see what is after it.

        It is the logarithm of how many members of the key's group are not after the query.
        """
        if self.size is None:
            seen = self.picked.unsqueeze(1) >= self.picked
            return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -torch.inf)
        assert self.slot_of_flat is not None
        members = F.one_hot(self.slot_of_flat[: self.positions], self.slots).cumsum(0)
        return members.index_select(0, self.picked).to(torch.promote_types(dtype, torch.float32)).log().to(dtype)

    @property
    def frame(self) -> tuple[str, int, int, int]:
        """The fields that are no tensors."""
        return (self.reduce, self.positions, self.slots, self.prefix)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The fields that are tensors."""
        return (self.picked_flat, self.order_flat, self.starts_flat, self.slot_of_flat, self.size)


def slot_count(positions: int, keep_ratio: float) -> int:
    """How many of `positions` are kept: the nearest whole number, at least one."""
    return max(1, int(positions * keep_ratio + 0.5))


def kept_indices(layout: Layout, keep_ratio: float, mask: str = "grid", seed: int = 0) -> Tensor:
    """The kept positions of one draw, as a sorted index tensor for `keepgrad.sbp`.

    Raises:
        InputError: if an argument is not one of those `sample` takes, or the map is smaller than a group.
    """
    if mask not in MASKS or not 0 < keep_ratio <= 1:
        raise InputError(f"mask={mask!r}, keep_ratio={keep_ratio!r}: give one of {MASKS} and a number in (0, 1]")
    kept = sample(torch.tensor(seed), 1, layout, keep_ratio, mask, "drop")
    picked = torch.arange(layout.positions) if kept is None else kept.picked
    return picked.sort().values


def sample(step_seed: Tensor, batch: int, layout: Layout, keep_ratio: float, mask: str, reduce: str) -> Kept | None:
    """Draw the slots of one feature map, on the device of `step_seed`; None where everything is kept.

    Args:
        step_seed: one 64-bit integer, without dimensions; the only source of randomness.
        batch: the number of samples; all of them share the mask.
        layout: the positions. With `layout.cell` > 1 and a reduction that forgets (drop, scaled), the mask is drawn on
            the map of cells and enlarged, so that it covers what the same draw keeps at the coarser stage; where
            cells do not tile the map exactly, the mask is drawn on the positions themselves.
        keep_ratio: the share of positions to keep, in (0, 1].
        mask: one of `MASKS`.
        reduce: one of `REDUCTIONS`.

    Raises:
        MapTooSmallError: if the feature map is smaller than one group.
    """
    forgets = reduce in ("drop", "scaled")
    cell, (height, width) = layout.cell, layout.tall_and_wide
    frames = math.prod(layout.shape[:-2])
    if cell > 1 and (not forgets or height % cell or width % cell):
        cell = 1
    height, width = height // cell, width // cell
    count = frames * height * width
    group = int(1 / keep_ratio + 0.5)
    if count < group:
        raise MapTooSmallError(
            f"the mask keeps 1 of every {group} positions, but the feature map has only {height}x{width}; "
            "use a larger input, a larger keep_ratio, or leave this layer out with layers=..."
        )
    slots = slot_count(count, keep_ratio)
    if slots >= count:
        return None
    order, starts, picked = _grouping(step_seed, frames, height, width, slots, mask)
    if cell > 1:
        picked = _enlarge(picked, width, cell)
    prefix = torch.arange(layout.prefix, device=picked.device)
    positions = layout.positions
    picked = torch.cat([prefix, picked + layout.prefix])
    slots = picked.shape[0]
    sample_index = torch.arange(batch, device=picked.device).unsqueeze(1)
    shift = sample_index * positions
    picked_flat = (shift + picked).flatten()
    if forgets:
        return Kept(reduce, positions, slots, layout.prefix, picked_flat)
    order = torch.cat([prefix, order + layout.prefix])
    starts = torch.cat([prefix, starts + layout.prefix])
    size = torch.diff(starts, append=starts.new_full((1,), positions))
    rank = torch.arange(positions, device=order.device)
    slot_in_order = torch.bucketize(rank, starts, right=True) - 1
    slot_of = torch.empty_like(order).scatter_(0, order, slot_in_order)
    order_flat, starts_flat = (shift + order).flatten(), (shift + starts).flatten()
    slot_of_flat = (sample_index * slots + slot_of).flatten()
    return Kept(reduce, positions, slots, layout.prefix, picked_flat, order_flat, starts_flat, slot_of_flat, size)


def _select(rows: Tensor, index: Tensor, count: int) -> Tensor:
    """`count` rows of each sample by their flat index."""
    batch, _, channels = rows.shape
    return rows.reshape(-1, channels).index_select(0, index).view(batch, count, channels)


def hashed(seed: Tensor, salt: int, count: int) -> Tensor:
    """`count` hashed numbers in [0, 2**62), each a function of `seed`, `salt` and its index alone."""
    start = _wrapped((salt << 32) * _STRIDE)  # torch.compile works with whole numbers of any size, which do not wrap
    return _mix(_mix(seed + start + torch.arange(count, device=seed.device) * _STRIDE)) & (2**62 - 1)


_STRIDE = -7046029254386353131


def _wrapped(number: int) -> int:
    """A whole number as 64 bits hold it."""
    return (number + 2**63) % 2**64 - 2**63


def _mix(bits: Tensor) -> Tensor:
    bits = (bits ^ ((bits >> 30) & (2**34 - 1))) * -4658895280553007687
    bits = (bits ^ ((bits >> 27) & (2**37 - 1))) * -7723592293110705685
    return bits ^ ((bits >> 31) & (2**33 - 1))


def _grouping(
    seed: Tensor, frames: int, height: int, width: int, slots: int, mask: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The order of the positions, where each group starts in it, and the picked position of each group.

    Frames follow one another, so groups are neighbours within a frame.
    """
    count = frames * height * width
    rank = torch.arange(count, device=seed.device)
    starts = torch.arange(slots, device=seed.device) * count // slots
    if mask == "random":
        order = hashed(seed, 1, count).argsort()
        return order, starts, order[starts]

    phase, shift, turned = hashed(seed, 2, 3).unbind()
    frame, row, col = rank // (height * width), rank // width % height, rank % width
    curve = torch.where(turned % 2 == 0, _bands(row, col, width), _bands(col, row, height))
    order = (frame * 2 * count + curve).argsort()
    if mask == "block":
        # Member j of group i is the (i + j * slots)-th position of the turned order.
        order = order[(rank + shift) % count]
        group, member = rank % slots, rank // slots
        order = order[(group * count + member).argsort()]
        larger = count % slots
        index = torch.arange(slots, device=seed.device)
        starts = index * (count // slots) + index.clamp(max=larger)
        return order, starts, order[starts]

    # Groups of two sizes begin anywhere, so that every position is as likely to be in a large group. Groups of one
    # size begin at the end of a band, so that they stay tiles.
    order = order[(rank + (shift if count % slots else shift // 2 * 2)) % count]
    size = torch.diff(starts, append=starts.new_full((1,), count))
    first = order[starts]
    alternate = first // width + first % width
    member = (phase + torch.where(size == 2, alternate, 0)) % size
    return order, starts, order[starts + member]


def _bands(row: Tensor, col: Tensor, width: int) -> Tensor:
    """The place of each position in bands of two rows, column by column, every other band backwards."""
    band = row // 2
    along = torch.where(band % 2 == 0, col, width - 1 - col)
    return band * 2 * width + along * 2 + row % 2


def _enlarge(picked: Tensor, width: int, cell: int) -> Tensor:
    """The positions of a map `cell` times as large that lie in the picked cells of a map of the given width."""
    side = torch.arange(cell, device=picked.device)
    row = (picked // width * cell).view(-1, 1, 1) + side.view(1, -1, 1)
    col = (picked % width * cell).view(-1, 1, 1) + side.view(1, 1, -1)
    return (row * (width * cell) + col).flatten()
