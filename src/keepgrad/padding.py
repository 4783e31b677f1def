"""Slots of sequences with padding: padding is never kept.

The samples of a batch have padding at different places. So each sample has its own groups, made of its real positions,
that is, those that are not padding. All samples have the number of slots that `sample` would give them. So a sample
with few real positions keeps a larger share of them. If it has fewer real positions than slots, the slots that are left
over are dead: they stand for no position, and no gradient goes through them. Padding belongs to no group: it gets no
gradient from the branch, and adds nothing to the gradients of its weights.

The attention mask says which positions are padding: those that no query may see.

Masks and reductions work as in `sampling`, on the real positions in their order. Groups are runs of this order. Their
ends are moved by a random fraction of a position, so that no position is picked more often than others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .sampling import Kept, hashed, slot_count

__all__ = ["PaddedKept", "real_positions", "sample_padded"]


def real_positions(mask: Tensor) -> Tensor:
    """Which positions are not padding, `[batch, n]`.

    `mask` is the attention mask `[batch, heads, n, n]`: either True where a key may be seen, or numbers that are added
    to the scores.
    """
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return seen.flatten(1, 2).any(1)


class PaddedKept(Kept):
    """The slots of a batch of sequences, where each sample has its own mask.

    `live` is True for slots that stand for a position. `slot_of_flat` has the slot of each position, an index into
    `[batch * slots + 1]`; padding has the last index.
    """

    is_shared = False

    def __init__(
        self, reduce: str, positions: int, picked: Tensor, slot_of: Tensor, size: Tensor, live: Tensor, times: Tensor
    ) -> None:
        super().__init__(reduce, positions, live.shape[1], 0, picked, None, None, slot_of, size)
        self.live = live  # [batch, slots]
        self.times = times  # [batch, slots, 1], the factor of gradients

    @property
    def picked(self) -> Tensor:
        """The picked position of each slot `[batch, slots]`."""
        shift = torch.arange(len(self.live), device=self.live.device).unsqueeze(1) * self.positions
        return self.picked_flat.view_as(self.live) - shift

    @property
    def folds(self) -> bool:
        return self.reduce in ("fold", "pool")

    def unscaled(self) -> PaddedKept:
        if self.reduce != "scaled":
            return self
        picked, _, _, slot_of, size = self.tensors
        times = self.live.unsqueeze(-1).to(self.times.dtype)
        return PaddedKept("drop", self.positions, picked, slot_of, size, self.live, times)  # type: ignore[arg-type]

    def gather(self, rows: Tensor) -> Tensor:
        if self.reduce == "pool":
            return self._sum(rows) / self._members(rows.dtype)
        return self._picked(rows)

    def gather_grad(self, grad: Tensor) -> Tensor:
        return self._sum(grad) if self.folds else self._picked(grad) * self.times.to(grad.dtype)

    def give_back(self, slots: Tensor, onto: Tensor | None = None) -> Tensor:
        channels = slots.shape[-1]
        if self.folds:
            assert self.slot_of_flat is not None
            flat = (slots / self._members(slots.dtype)).view(-1, channels)
            rows = torch.cat([flat, flat.new_zeros(1, channels)]).index_select(0, self.slot_of_flat)
        else:
            rows = slots.new_zeros(len(slots) * self.positions, channels)
            rows = rows.index_copy_(0, self.picked_flat, (slots * self.live.unsqueeze(-1)).flatten(0, 1))
        rows = rows.view(len(slots), self.positions, channels)
        return rows if onto is None else rows.add_(onto)

    def key_bias(self, dtype: torch.dtype) -> Tensor | None:
        """Like `Kept.key_bias`, but of shape `[batch, 1, 1, slots]`."""
        if not self.folds:
            return None
        assert self.size is not None
        size = self.size.clamp(min=1).to(torch.promote_types(dtype, torch.float32))
        return size.log().to(dtype)[:, None, None]

    def causal_bias(self, dtype: torch.dtype) -> Tensor:
        raise NotImplementedError("padding is known by a mask, which takes care of causality")

    def _picked(self, rows: Tensor) -> Tensor:
        flat = rows.reshape(-1, rows.shape[-1]).index_select(0, self.picked_flat)
        return flat.view(*self.live.shape, rows.shape[-1])

    def _sum(self, rows: Tensor) -> Tensor:
        """The sum over each group."""
        assert self.slot_of_flat is not None
        channels = rows.shape[-1]
        sums = rows.new_zeros(self.live.numel() + 1, channels)
        sums.index_add_(0, self.slot_of_flat, rows.reshape(-1, channels))
        return sums[:-1].view(*self.live.shape, channels)

    def _members(self, dtype: torch.dtype) -> Tensor:
        assert self.size is not None
        return self.size.clamp(min=1).to(dtype).unsqueeze(-1)


def sample_padded(step_seed: Tensor, real: Tensor, keep_ratio: float, mask: str, reduce: str) -> PaddedKept | None:
    """Draw the slots of a batch of sequences. Returns None if everything is kept.

    Args:
        step_seed: one 64-bit integer, the only source of randomness.
        real: which positions are not padding, `[batch, n]`.
        keep_ratio, mask, reduce: as in `sampling.sample`.
    """
    batch, count = real.shape
    slots = slot_count(count, keep_ratio)
    if slots >= count:
        return None
    long = real.sum(1, keepdim=True)  # how many positions are real
    phase, shift = hashed(step_seed, 2, 2).unbind()
    rank = torch.arange(count, device=real.device).expand(batch, count)
    first = torch.arange(slots, device=real.device).expand(batch, slots)
    # First the real positions, in their own or a random order, then padding.
    key = hashed(step_seed, 1, count) >> 1 if mask == "random" else rank
    order = torch.where(real, key, key + 2**61).argsort(1)
    many = long.clamp(min=slots)  # at least one position for each slot; takes padding if there are too few
    if mask == "block":
        turned = (rank - shift % many) % many
        slot_at = turned % slots
        chosen = (first + shift % many) % many
    else:
        starts = torch.where(first > 0, (first * many + shift % slots) // slots, 0)
        size = torch.cat([starts[:, 1:], many], 1) - starts
        slot_at = torch.searchsorted(starts.contiguous(), rank.contiguous(), right=True) - 1
        chosen = starts + phase % size
    picked = order.gather(1, chosen)
    live = real.gather(1, picked)
    own = torch.arange(batch, device=real.device).unsqueeze(1)
    nowhere = torch.full_like(slot_at, batch * slots)
    in_order = torch.where(rank < long, slot_at + own * slots, nowhere)
    slot_of = torch.empty_like(order).scatter_(1, order, in_order)
    size = torch.zeros(batch * slots + 1, dtype=torch.int64, device=real.device)
    size = size.index_add_(0, slot_of.flatten(), torch.ones_like(slot_of.flatten()))[:-1].view(batch, slots)
    times = live.unsqueeze(-1).float()
    if reduce == "scaled":
        times = times * (long / long.clamp(min=1, max=slots)).unsqueeze(-1)
    picked_flat = (picked + own * count).flatten()
    return PaddedKept(reduce, count, picked_flat, slot_of.flatten(), size, live, times)
