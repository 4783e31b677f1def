"""A branch of a block: a chain of stages, or attention with the chains before and after it.

Attention is one chain with everything around it where its backward is reduced or redone. Where it is neither (every
position kept and save="heavy") or cannot be (dropout of the attention matrix, an attention mask, a projection that is
no plain linear layer), the attention itself is left to autograd and its fused kernel, and the chains before and after
it run in the engine.

`width` is the number of channels of the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from ..sampling import Kept
from .attention import self_attention
from .chain import run, run_stages, saved_width
from .stages import Linear, Link, Stage

__all__ = ["AttentionBranch", "Branch"]


@dataclass(frozen=True)
class Branch:
    """A position-wise branch."""

    links: Sequence[Link]
    width: int

    def run(self, x: Tensor, kept: Kept | None, save: str, residual: Tensor | None) -> Tensor:
        """All positions forward, the kept slots backward; the residual is added."""
        return run(self.links, x, kept, save, residual)

    def saved_width(self, keep_ratio: float, save: str) -> tuple[float, float]:
        """Channels a position that plain autograd and keepgrad save."""
        return saved_width(_stages(self.links), self.width, keep_ratio, save)


@dataclass(frozen=True)
class AttentionBranch:
    """Self-attention, with chains before and after it."""

    before: Sequence[Link]
    heads: int
    projection: Link
    after: Sequence[Link]
    width: int
    q_norm: Link | None = None
    k_norm: Link | None = None
    dropout: float = 0.0
    attn_mask: Tensor | None = None
    is_causal: bool = False

    def _stage(self, method: str, kept_heads: Tensor | None = None) -> Link:
        return self_attention(self.heads, self.projection, self.q_norm, self.k_norm, method, kept_heads)

    def _is_whole(self, reduced: bool, save: str) -> bool:
        """Whether the attention itself is left to autograd."""
        if not isinstance(self.projection[0], Linear):
            return True
        if self.dropout > 0 or self.attn_mask is not None or self.is_causal:
            return True
        return not reduced and save == "heavy"

    def run(
        self,
        x: Tensor,
        kept: Kept | None,
        save: str,
        residual: Tensor | None,
        method: str,
        kept_heads: Tensor | None,
    ) -> Tensor:
        """All positions forward, the kept slots or heads backward; the residual is added."""
        reduced = kept is not None or kept_heads is not None
        if self._is_whole(reduced, save):
            out = self.attend(run([*self.before, self.projection], x, kept, save))
            return run(self.after, out, kept, save, residual)
        stage = self._stage(method if reduced else "qkv", kept_heads)
        return run([*self.before, stage, *self.after], x, kept, save, residual)

    def attend(self, qkv: Tensor) -> Tensor:
        """Attention under plain autograd."""
        out = F.scaled_dot_product_attention(*self.heads_of(qkv), self.attn_mask, self.dropout, self.is_causal)
        return out.transpose(1, 2).flatten(2)

    def heads_of(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v with their norms, each `[batch, heads, n, dim]`."""
        q, k, v = (part.transpose(1, 2) for part in qkv.unflatten(-1, (3, self.heads, -1)).unbind(2))
        q = q if self.q_norm is None else run_stages([self.q_norm], q)
        k = k if self.k_norm is None else run_stages([self.k_norm], k)
        return q, k, v

    def saved_width(self, keep_ratio: float, save: str, method: str) -> tuple[float, float]:
        """Channels a position that plain autograd and keepgrad save."""
        before, after = _stages(self.before), _stages(self.after)
        if not self._is_whole(keep_ratio < 1, save):
            stage = self._stage(method if keep_ratio < 1 else "qkv")[0]
            return saved_width([*before, stage, *after], self.width, keep_ratio, save)
        plain, ours = saved_width([*before, self.projection[0]], self.width, keep_ratio, save)
        out = self.projection[0].width(self.width) // 3
        core = (3 if self.q_norm is None else 5) * out
        plain_after, ours_after = saved_width(after, out, keep_ratio, save)
        # Attention saves its output, and with every position kept that is also what the chain behind it saves.
        shared = out if keep_ratio == 1 else 0
        return plain + core + plain_after, ours + core + out + ours_after - shared


def _stages(links: Sequence[Link]) -> list[Stage]:
    return [stage for stage, _ in links]
