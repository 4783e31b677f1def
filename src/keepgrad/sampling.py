"""Which positions are kept, and what happens to the dropped ones.

A mask puts the positions into an order and cuts this order into as many runs as there are slots. The positions of one
run form a group, and one member of each group is picked. The masks differ in the order and in the pick:

- `grid`: neighbours in the order are neighbours in the image. The order goes through bands of two rows, column by
  column, and turns round at the end of each band. So runs of 2 are pairs, runs of 4 are 2x2 tiles, runs of 8 are 2x4
  tiles. Three things are random: whether the bands are of rows or of columns, where the runs begin, and which member is
  picked, the same one in every group. Pairs are an exception: the picked member alternates from pair to pair. Where the
  pairs tile the map, this gives the paper's checkerboard `(row + col) % 2 == phase`.
  In a clip, runs span two frames (see `walks`). Written as frames x rows x columns, pairs are 2x1x1, and larger groups
  are 2x2x1 and 2x2x2 tiles. Alternating pairs give the checkerboard `(frame + row + col) % 2 == phase` over space and
  time. In larger groups, every two frames pick the next member: a pattern that is the same in all frames says less.
- `random`: the order is random; the first member of each run is picked.
- `block`: the kept positions are one contiguous piece of the grid order, which begins at a random place.
- `frame`: keeps whole frames of a clip. A group is a run of frames. One frame of each run is picked at random, the same
  one in every run.

`reduce` says what happens to the other members of a group. `m` is the size of the group (for scaled, the mean size):

| reduce | gather (activations) | gather_grad (dy)     | give_back (dx)             | multiplicity |
| ---    | ---                  | ---                  | ---                        | ---          |
| drop   | picked               | picked               | to the picked              | 1            |
| scaled | picked               | picked, times m      | to the picked              | 1            |
| fold   | picked               | sum over the group   | to every member, times 1/m | m            |
| pool   | mean over the group  | sum over the group   | to every member, times 1/m | m            |

Shapes: rows are `[batch, positions, channels]`, slots are `[batch, slots, channels]`. The number of slots depends only
on the keep-ratio and the layout, not on the random numbers. Each prefix token (class, registers) is a group of its own.

All random numbers of a mask are hashes of one 64-bit number, so drawing a mask takes nothing from torch's random
streams. In eager mode this number is a Python int, which is known without waiting for a device; under `torch.compile`
it is a tensor. Everything else that a draw needs is the same in every step and is made once (`_Tables`).
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
"""Masks for any model: images, clips or text."""
CLIP_MASKS = ("frame",)
"""Masks for clips only."""
MASKS = (*IMAGE_MASKS, *CLIP_MASKS)
REDUCTIONS = ("drop", "scaled", "fold", "pool")


class Layout(NamedTuple):
    """How the positions of a feature map are arranged: `prefix` tokens (class, registers), then the map, row by row.

    `shape` is `(n,)` for a sequence, `(height, width)` for an image, `(frames, height, width)` for a clip. A
    square of `cell` x `cell` positions is kept or dropped as one (see `sample`).
    """

    shape: tuple[int, ...]
    prefix: int = 0
    cell: int = 1

    @property
    def positions(self) -> int:
        """The number of positions, including the prefix."""
        return self.prefix + math.prod(self.shape)

    @property
    def tall_and_wide(self) -> tuple[int, int]:
        """Height and width of one frame; a sequence is one row."""
        return (1, self.shape[0]) if len(self.shape) == 1 else self.shape[-2:]  # type: ignore[return-value]


class Kept:
    """The slots of a batch of feature maps: how to gather values into slots, and how to give gradients back.

    Indices of positions are into the flattened rows `[batch * positions]`, indices of slots into `[batch * slots]`,
    because gathering flat rows is faster. The last four tensors describe the groups. They are None for `drop` and
    `scaled`, which use only the picked member of a group.

    Args:
        reduce: one of `REDUCTIONS`.
        positions: how many positions a feature map has, including the prefix.
        slots: how many slots a feature map has, including the prefix.
        prefix: the number of prefix tokens.
        picked_flat: `[batch * slots]`, the picked positions, the prefix first.
        order_flat: `[batch * positions]`, the positions, group after group.
        starts_flat: `[batch * slots]`, where each group begins in order_flat.
        slot_of_flat: `[batch * positions]`, the slot of each position.
        size: `[slots]`, how many members each group has.
    """

    is_shared = True
    """True if all samples share the mask."""

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
        """The arguments that are not tensors."""
        self.tensors = (picked_flat, order_flat, starts_flat, slot_of_flat, size)
        self.reduce, self.positions, self.slots, self.prefix = self.frame
        self.picked_flat, self.order_flat, self.starts_flat, self.slot_of_flat, self.size = self.tensors
        self.made: dict[Any, Tensor] = {}  # computed from these for a dtype; all sites of a step share it

    @property
    def picked(self) -> Tensor:
        """The picked position of each slot."""
        return self.picked_flat[: self.slots]

    def of_first(self, batch: int) -> Kept:
        """The slots of the first `batch` samples. They fit any `batch` samples, because all samples share the mask."""
        counts = (self.slots, self.positions, self.slots, self.positions)
        indices: Any = [None if t is None else t[: batch * n] for t, n in zip(self.tensors, counts, strict=False)]
        part = Kept(*self.frame, *(*indices, self.size))
        part.made = self.made
        return part

    def unscaled(self) -> Kept:
        """The same slots, but `scaled` does not scale gradients: a later operation has already scaled them."""
        if self.reduce != "scaled":
            return self
        return Kept("drop", self.positions, self.slots, self.prefix, self.picked_flat)  # `scaled` has no groups

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
        """One divided by the number of members of each position's group, `[positions, 1]`."""
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
        """The input gradient of every position. If `onto` is given, returns the sum of both; `onto` is not changed."""
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
        """What to add to the attention scores of each key slot, `[1, slots]`: the logarithm of its multiplicity.

        A slot that stands for m positions then has the weight of m equal keys in the softmax.
        """
        if self.size is None:
            return None
        key = ("keys", dtype)
        if key not in self.made:
            self.made[key] = self.size.to(torch.promote_types(dtype, torch.float32)).log().to(dtype).unsqueeze(0)
        return self.made[key]

    def causal_bias(self, dtype: torch.dtype) -> Tensor:
        """What to add to the attention scores `[query slots, key slots]` of causal attention.

        In causal attention, no query may see a later position. So this is the logarithm of how many members of the
        key's group are not after the query.
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
        InputError: if `sample` does not take an argument, or the map is smaller than a group.
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
    """Draw the slots of a batch of feature maps. Returns None if everything is kept.

    Args:
        step_seed: one 64-bit number, the only source of randomness: an int, or a tensor without dimensions.
        batch: the number of samples; all of them share the mask.
        layout: how the positions are arranged. With `layout.cell` > 1 and reduce "drop" or "scaled", the mask is drawn
            on the coarser map of cells and then enlarged. So the stages of a model keep the same areas of the image.
            If cells do not tile the map exactly, the mask is drawn on the positions themselves.
        keep_ratio: the share of positions to keep, in (0, 1].
        mask: one of `MASKS`.
        reduce: one of `REDUCTIONS`.
        device: where the indices are needed. If `step_seed` is a tensor, its device is used instead.
        tables: a cache from step to step, for what is the same in every step.

    Raises:
        MapTooSmallError: if the feature map is smaller than one group.
        InputError: if the mask is "frame", and the positions have no frames.
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

    | field         | map only | what                                                                           |
    | ---           | ---      | ---                                                                            |
    | orders        | yes      | the possible orders of the positions                                           |
    | starts        | yes      | where each group starts in an order                                            |
    | sizes         | yes      | how many members each group has                                                |
    | apart         | yes      | for `block` and `frame`: how the order is rearranged after it was shifted      |
    | prefix        | no       | the prefix positions                                                           |
    | samples       | no       | the numbers of the samples, as a column                                        |
    | slot_in_order | no       | the slot of each place in the order                                            |
    | starts_flat   | no       | where each group starts in the order of all samples                            |
    | size          | no       | how many members each group has                                                |

    "map only" fields leave the prefix out.
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
        # Member j of group i is the (i + j * slots)-th position of the shifted order.
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
    """Select `count` rows of each sample by their flat indices."""
    batch, _, channels = rows.shape
    return rows.reshape(-1, channels).index_select(0, index).view(batch, count, channels)


def as_tensor(seed: int | Tensor, device: torch.device) -> Tensor:
    """A seed as a tensor on a device. An int is passed as a kernel argument, so nothing is copied to the device."""
    return seed if isinstance(seed, Tensor) else torch.full((), seed, device=device)


def hashed(seed: Tensor, salt: int, count: int) -> Tensor:
    """`count` hashed numbers in [0, 2**62). Each depends only on `seed`, `salt` and its index."""
    start = _wrapped((salt << 32) * _STRIDE)  # torch.compile computes with Python ints, which do not wrap
    return _mix(_mix(seed + start + torch.arange(count, device=seed.device) * _STRIDE)) & (2**62 - 1)


_STRIDE = -7046029254386353131


def _wrapped(number: int) -> int:
    """An int wrapped to signed 64 bits."""
    return (number + 2**63) % 2**64 - 2**63


def _mix(bits: Tensor) -> Tensor:
    bits = (bits ^ ((bits >> 30) & (2**34 - 1))) * -4658895280553007687
    bits = (bits ^ ((bits >> 27) & (2**37 - 1))) * -7723592293110705685
    return bits ^ ((bits >> 31) & (2**33 - 1))


def _grouping(seed: int | Tensor, tables: _Tables, shape: tuple[int, int, int], mask: str) -> tuple[Tensor, Tensor]:
    """The order of the positions, group after group, and the picked position of each group."""
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
    # If groups have two sizes, they begin anywhere, so that every position is equally likely to be in a large group. If
    # they have one size, the order is shifted by whole columns of a tube only, so that groups stay tiles, and whole
    # frames are not shifted at all, so that no group joins the last frames of a clip with the first.
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
        if pairs:  # the picked member alternates
            alternate = first // area + first // width % height + first % width
            member = torch.where(sizes == 2, (phase + alternate) % 2, member)
    return order, order.index_select(0, starts + member)


def _rolled(order: Tensor, shift: Any) -> Tensor:
    """The order, rotated so that it begins `shift` places later."""
    if isinstance(shift, int):
        return order.roll(-(shift % len(order)))
    return order[(torch.arange(len(order), device=order.device) + shift) % len(order)]


def _hashed_numbers(seed: int, salt: int, count: int) -> list[int]:
    """The same numbers as `hashed`, computed with Python ints."""

    def mix(bits: int) -> int:
        bits = (bits ^ (bits >> 30)) * -4658895280553007687 % 2**64
        bits = (bits ^ (bits >> 27)) * -7723592293110705685 % 2**64
        return bits ^ (bits >> 31)

    start = seed + (salt << 32) * _STRIDE
    return [mix(mix((start + i * _STRIDE) % 2**64)) % 2**62 for i in range(count)]


def _enlarge(picked: Tensor, width: int, cell: int) -> Tensor:
    """The positions of the fine map that lie in the picked cells. `width` is how many cells a row has."""
    side = torch.arange(cell, device=picked.device)
    row = (picked // width * cell).view(-1, 1, 1) + side.view(1, -1, 1)
    col = (picked % width * cell).view(-1, 1, 1) + side.view(1, 1, -1)
    return (row * (width * cell) + col).flatten()
