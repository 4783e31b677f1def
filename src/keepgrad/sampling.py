"""Which positions are kept, and what becomes of the rest.

A mask is an order of the positions, cut into as many runs as there are slots. The members of a run form a group, and
one of them is picked:

- `grid`: the order follows bands of two rows, column by column, turning at the end of each band, so that neighbours in
  the order are neighbours in the image: runs of 2 are pairs, of 4 are 2x2 tiles, of 8 are 2x4 tiles. Whether bands are
  of rows or of columns and where the runs begin is random, and so is which member is picked, the same in every group.
  Pairs alternate, which makes the paper's checkerboard `(row + col) % 2 == phase` where they tile the map.
  In a clip runs span two frames (see `walks`): pairs 2x1x1, then 2x2x1 and 2x2x2 tiles, frames x rows x columns.
  Alternating pairs make the checkerboard `(frame + row + col) % 2 == phase` over space and time. Of larger groups the
  picked member moves on by one from two frames to the next: a pattern that all frames share says less.
- `random`: a random order; the first member of each run is picked.
- `block`: the kept positions are one contiguous piece of the grid order, beginning anywhere.
- `frame`: whole frames of a clip. Groups are runs of frames, of which one is picked, the same in every run, at random.

`reduce` says what of the others. With groups of m (for scaled: of the mean size):

| reduce | gather (activations) | gather_grad (dy)     | give_back (dx)             | multiplicity |
| ---    | ---                  | ---                  | ---                        | ---          |
| drop   | picked               | picked               | to the picked              | 1            |
| scaled | picked               | picked, times m      | to the picked              | 1            |
| fold   | picked               | sum over the group   | to every member, times 1/m | m            |
| pool   | mean over the group  | sum over the group   | to every member, times 1/m | m            |

Shapes: rows are `[batch, positions, channels]`, slots `[batch, slots, channels]`. The number of slots depends on the
keep-ratio and the layout alone, never on the random numbers. Prefix tokens (class, registers) are groups of one.

All randomness of a mask comes from one 64-bit number, hashed, and consumes no random stream. In eager mode the number
is a whole number of Python's, which is known without asking a device; under `torch.compile` it is a tensor. What a draw
needs besides it is the same in every step (`_Tables`) and is made once.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .errors import InputError, MapTooSmallError
from .walks import tube_of, walks, whole_frames

__all__ = [
    *("CLIP_MASKS", "IMAGE_MASKS", "MASKS", "REDUCTIONS", "Kept", "Layout"),
    *("as_tensor", "hashed", "kept_indices", "sample", "slot_count"),
]

IMAGE_MASKS = ("grid", "random", "block")
"""Masks for positions of any kind."""
CLIP_MASKS = ("frame",)
"""Masks for clips alone."""
MASKS = (*IMAGE_MASKS, *CLIP_MASKS)
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


class Kept:
    """The kept slots of a batch of feature maps of `positions` positions: how to gather, and how to give back.

    Indices are into the flattened rows `[batch * positions]`, those of slots into `[batch * slots]`: flat rows are
    gathered faster. Group tensors are None for `drop` and `scaled`, which forget the other members.

    Args:
        reduce: one of `REDUCTIONS`.
        positions: of a feature map, with the prefix.
        slots: of a feature map, with the prefix.
        prefix: the number of prefix tokens.
        picked_flat: `[batch * slots]`, the picked positions, the prefix first.
        order_flat: `[batch * positions]`, group after group.
        starts_flat: `[batch * slots]`, where each group begins in order_flat.
        slot_of_flat: `[batch * positions]`, the slot of each position.
        size: `[slots]`, how many members each group has.
    """

    is_shared = True
    """Whether all samples share the mask."""

    def __init__(
        self,
        reduce: str,
        positions: int,
        slots: int,
        prefix: int,
        picked_flat: Tensor,
        order_flat: Tensor | None = None,
        starts_flat: Tensor | None = None,
        slot_of_flat: Tensor | None = None,
        size: Tensor | None = None,
    ) -> None:
        self.frame = (reduce, positions, slots, prefix)
        """What is no tensor."""
        self.tensors = (picked_flat, order_flat, starts_flat, slot_of_flat, size)
        self.reduce, self.positions, self.slots, self.prefix = self.frame
        self.picked_flat, self.order_flat, self.starts_flat, self.slot_of_flat, self.size = self.tensors
        self.made: dict[Any, Tensor] = {}  # what follows from these for a type; all sites of a step share it

    @property
    def picked(self) -> Tensor:
        """The picked position of each slot."""
        return self.picked_flat[: self.slots]

    def of_first(self, batch: int) -> Kept:
        """The slots of the first `batch` samples, or of any other `batch` of them: all share the mask."""
        counts = (self.slots, self.positions, self.slots, self.positions)
        indices: Any = [None if t is None else t[: batch * n] for t, n in zip(self.tensors, counts, strict=False)]
        part = Kept(*self.frame, *(*indices, self.size))
        part.made = self.made
        return part

    def unscaled(self) -> Kept:
        """The same slots, which take gradients as they are: what follows has scaled them."""
        if self.reduce != "scaled":
            return self
        return Kept("drop", self.positions, self.slots, self.prefix, self.picked_flat)  # it has no groups

    def _group_sum(self, rows: Tensor) -> Tensor:
        batch, _, channels = rows.shape
        flat = rows.reshape(-1, channels)
        if flat.shape[0] == 0:
            return rows.new_zeros(batch, self.slots, channels)
        assert self.order_flat is not None
        assert self.starts_flat is not None
        return torch.embedding_bag(flat, self.order_flat, self.starts_flat)[0].view(batch, self.slots, channels)

    def _share_of_slots(self, dtype: torch.dtype) -> Tensor:
        """One divided by the number of members of each slot, `[slots, 1]`."""
        key = ("slots", dtype)
        if key not in self.made:
            assert self.size is not None
            self.made[key] = self.size.to(dtype).reciprocal().unsqueeze(-1)
        return self.made[key]

    def _share_of_positions(self, dtype: torch.dtype) -> Tensor:
        """The same for the group of each position, `[positions, 1]`."""
        key = ("positions", dtype)
        if key not in self.made:
            assert self.slot_of_flat is not None
            self.made[key] = self._share_of_slots(dtype).index_select(0, self.slot_of_flat[: self.positions])
        return self.made[key]

    def gather(self, rows: Tensor) -> Tensor:
        """The activations that stand for each slot."""
        if self.reduce == "pool":
            return self._group_sum(rows).mul_(self._share_of_slots(rows.dtype))
        return self.pick(rows)

    def pick(self, rows: Tensor) -> Tensor:
        """The rows of the picked positions, whatever the reduction."""
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
            grad = _select(slots, self.slot_of_flat, self.positions)
            if grad.shape[0] == 0:
                return grad
            share = self._share_of_positions(slots.dtype)
            return grad.mul_(share) if onto is None else torch.addcmul(onto, grad, share, out=grad)
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
        key = ("keys", dtype)
        if key not in self.made:
            self.made[key] = self.size.to(torch.promote_types(dtype, torch.float32)).log().to(dtype).unsqueeze(0)
        return self.made[key]

    def causal_bias(self, dtype: torch.dtype) -> Tensor:
        """What to add to the scores of slots as keys `[slots, slots]` where no query may see what is after it.

        It is the logarithm of how many members of the key's group are not after the query.
        """
        key = ("causal", dtype)
        if key not in self.made:
            self.made[key] = self._causal_bias(dtype)
        return self.made[key]

    def _causal_bias(self, dtype: torch.dtype) -> Tensor:
        if self.size is None:
            seen = self.picked.unsqueeze(1) >= self.picked
            return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -torch.inf)
        assert self.slot_of_flat is not None
        members = F.one_hot(self.slot_of_flat[: self.positions], self.slots).cumsum(0)
        return members.index_select(0, self.picked).to(torch.promote_types(dtype, torch.float32)).log().to(dtype)


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
    kept = sample(seed, 1, layout, keep_ratio, mask, "drop")
    picked = torch.arange(layout.positions) if kept is None else kept.picked
    return picked.sort().values


def sample(
    step_seed: int | Tensor,
    batch: int,
    layout: Layout,
    keep_ratio: float,
    mask: str,
    reduce: str,
    device: torch.device | None = None,
    tables: MutableMapping[Any, _Tables] | None = None,
) -> Kept | None:
    """Draw the slots of one feature map; None where everything is kept.

    Args:
        step_seed: one 64-bit number, the only source of randomness: a whole number, or a tensor without dimensions.
        batch: the number of samples; all of them share the mask.
        layout: the positions. With `layout.cell` > 1 and a reduction that forgets (drop, scaled), the mask is drawn on
            the map of cells and enlarged, so that it covers what the same draw keeps at the coarser stage; where
            cells do not tile the map exactly, the mask is drawn on the positions themselves.
        keep_ratio: the share of positions to keep, in (0, 1].
        mask: one of `MASKS`.
        reduce: one of `REDUCTIONS`.
        device: where the indices are needed; by default where `step_seed` is.
        tables: where what is the same in every step is kept from one step to the next.

    Raises:
        MapTooSmallError: if the feature map is smaller than one group.
        InputError: if a mask of frames is asked for, and there are none.
    """
    if isinstance(step_seed, Tensor):
        device = step_seed.device
    if mask in CLIP_MASKS and len(layout.shape) < 3:
        raise InputError(
            f"mask={mask!r} keeps whole frames, but these positions are {'x'.join(map(str, layout.shape))}, without "
            "frames; use mask='grid', or leave this layer out with layers=..."
        )
    forgets = reduce in ("drop", "scaled")
    cell, (height, width) = layout.cell, layout.tall_and_wide
    frames = math.prod(layout.shape[:-2])
    if cell > 1 and (not forgets or height % cell or width % cell):
        cell = 1
    height, width = height // cell, width // cell
    count = frames * height * width
    group = int(min(1 / keep_ratio, 2.0**62) + 0.5)
    of_frames = mask == "frame"
    if (frames if of_frames else count) < group:
        what, has = ("frames", frames) if of_frames else ("positions", f"{height}x{width}")
        raise MapTooSmallError(
            f"the mask keeps 1 of every {group} {what}, but the feature map has only {has}; "
            "use a larger input, a larger keep_ratio, or leave this layer out with layers=..."
        )
    slots = slot_count(frames, keep_ratio) * height * width if of_frames else slot_count(count, keep_ratio)
    if slots >= count:
        return None
    key = (batch, layout, slots, mask, forgets, device)
    found = None if tables is None else tables.get(key)
    if found is None:
        found = _tables(batch, layout.prefix, (frames, height, width), slots, mask, device)
        if tables is not None:
            tables[key] = found
    positions = layout.positions
    order, picked = _grouping(step_seed, found, (frames, height, width), mask)
    if cell > 1:
        picked = _enlarge(picked, width, cell)
    if layout.prefix:
        picked = torch.cat([found.prefix, picked + layout.prefix])
    slots = picked.shape[0]
    picked_flat = (found.samples * positions + picked).view(-1)
    if forgets:
        return Kept(reduce, positions, slots, layout.prefix, picked_flat)
    if layout.prefix:
        order = torch.cat([found.prefix, order + layout.prefix])
    slot_of = torch.empty_like(order).scatter_(0, order, found.slot_in_order)
    order_flat = (found.samples * positions + order).view(-1)
    slot_of_flat = (found.samples * slots + slot_of).view(-1)
    indices = (picked_flat, order_flat, found.starts_flat, slot_of_flat, found.size)
    return Kept(reduce, positions, slots, layout.prefix, *indices)


class _Tables(NamedTuple):
    """What is the same in every draw of a feature map.

    The first four are of the map alone, without the prefix: the ways in which the positions may be ordered, where each
    group starts in an order, how many members it has, and for `block` and `frame` how the order is taken apart
    afterwards.
    The others are for all positions: the prefix, the numbers of the samples as a column, the slot of each place in the
    order, where groups start in that of all samples, and the sizes.
    """

    orders: tuple[Tensor, ...]
    starts: Tensor
    sizes: Tensor
    apart: Tensor | None
    prefix: Tensor
    samples: Tensor
    slot_in_order: Tensor
    starts_flat: Tensor
    size: Tensor


def _tables(
    batch: int, prefix_count: int, shape: tuple[int, int, int], slots: int, mask: str, device: torch.device | None
) -> _Tables:
    frames, height, width = shape
    count = frames * height * width
    rank = torch.arange(count, device=device)
    index = torch.arange(slots, device=device)
    starts, apart = index * count // slots, None
    orders: tuple[Tensor, ...] = ()
    if mask in ("grid", "block"):
        orders = walks(shape, device)
    if mask == "frame":
        orders = (rank,)
        apart, starts = whole_frames(shape, slots // (height * width), device)
    if mask == "block":
        # Member j of group i is the (i + j * slots)-th position of the turned order.
        apart = (rank % slots * count + rank // slots).argsort()
        starts = index * (count // slots) + index.clamp(max=count % slots)
    prefix = torch.arange(prefix_count, device=device)
    samples = torch.arange(batch, device=device).unsqueeze(1)
    all_starts = torch.cat([prefix, starts + prefix_count])
    positions = count + prefix_count
    slot_in_order = torch.bucketize(torch.arange(positions, device=device), all_starts, right=True) - 1
    return _Tables(
        orders,
        starts,
        torch.diff(starts, append=starts.new_full((1,), count)),
        apart,
        prefix,
        samples,
        slot_in_order,
        (samples * positions + all_starts).view(-1),
        torch.diff(all_starts, append=starts.new_full((1,), positions)),
    )


def _select(rows: Tensor, index: Tensor, count: int) -> Tensor:
    """`count` rows of each sample by their flat index."""
    batch, _, channels = rows.shape
    return rows.reshape(-1, channels).index_select(0, index).view(batch, count, channels)


def as_tensor(seed: int | Tensor, device: torch.device) -> Tensor:
    """A seed on a device. A whole number travels as the argument of a kernel, which needs no copy."""
    return seed if isinstance(seed, Tensor) else torch.full((), seed, device=device)


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


def _grouping(seed: int | Tensor, tables: _Tables, shape: tuple[int, int, int], mask: str) -> tuple[Tensor, Tensor]:
    """The order of the positions, in which groups follow one another, and the picked position of each group."""
    starts, sizes = tables.starts, tables.sizes
    frames, height, width = shape
    area, count = height * width, math.prod(shape)
    if mask == "random":
        order = hashed(as_tensor(seed, starts.device), 1, count).argsort()
        return order, order.index_select(0, starts)
    phase: Any
    shift: Any
    if isinstance(seed, Tensor):
        phase, shift, turned = hashed(seed, 2, 3)
        order = torch.where(turned % 2 == 0, tables.orders[0], tables.orders[-1])
    else:
        phase, shift, way = _hashed_numbers(seed, 2, 3)
        order = tables.orders[way % len(tables.orders)]
    # Groups of two sizes begin anywhere, so that every position is as likely to be in a large group. Groups of one
    # size begin at the end of a tube, so that they stay tiles, and frames are never grouped over the ends of a clip.
    one_size = mask != "block" and count % len(starts) == 0
    if mask == "frame":
        shift = 0 if one_size else shift % frames * area
    elif one_size:
        column = math.prod(tube_of(frames))
        shift = shift // column * column
    order = _rolled(order, shift)
    if tables.apart is not None:
        order = order.index_select(0, tables.apart)
    if mask == "block":
        return order, order.index_select(0, starts)
    member = phase % sizes
    pairs = count // len(starts) <= 2
    if mask == "grid" and (pairs or frames > 1):
        first = order.index_select(0, starts)
        member = (phase + first // area // tube_of(frames)[0]) % sizes
        if pairs:  # they alternate
            alternate = first // area + first // width % height + first % width
            member = torch.where(sizes == 2, (phase + alternate) % 2, member)
    return order, order.index_select(0, starts + member)


def _rolled(order: Tensor, shift: Any) -> Tensor:
    """The order, begun `shift` places later."""
    if isinstance(shift, int):
        return order.roll(-(shift % len(order)))
    return order[(torch.arange(len(order), device=order.device) + shift) % len(order)]


def _hashed_numbers(seed: int, salt: int, count: int) -> list[int]:
    """`hashed` of a whole number, as whole numbers: the same bits."""

    def mix(bits: int) -> int:
        bits = (bits ^ (bits >> 30)) * -4658895280553007687 % 2**64
        bits = (bits ^ (bits >> 27)) * -7723592293110705685 % 2**64
        return bits ^ (bits >> 31)

    start = seed + (salt << 32) * _STRIDE
    return [mix(mix((start + i * _STRIDE) % 2**64)) % 2**62 for i in range(count)]


def _enlarge(picked: Tensor, width: int, cell: int) -> Tensor:
    """The positions of a map `cell` times as large that lie in the picked cells of a map of the given width."""
    side = torch.arange(cell, device=picked.device)
    row = (picked // width * cell).view(-1, 1, 1) + side.view(1, -1, 1)
    col = (picked % width * cell).view(-1, 1, 1) + side.view(1, 1, -1)
    return (row * (width * cell) + col).flatten()
