"""A branch of a block: a chain of stages, or attention with the chains before and after it.

Attention is one chain with everything around it where its backward is reduced or redone. Where it is neither (every
position kept and save="heavy"; method "off"; dropout of the attention matrix, an attention mask), the attention itself
is left to autograd and its fused kernel, and the chains before and after it run in the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
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

    def run(
        self,
        x: Tensor,
        kept: Kept | None,
        save: str,
        residual: Tensor | None,
        method: str = "off",
        kept_heads: Tensor | None = None,
    ) -> Tensor:
        """All positions forward, the kept slots backward; the residual is added."""
        return run(self.links, x, kept, save, residual)

    def saved_width(self, keep_ratio: float, save: str, method: str = "off") -> tuple[float, float]:
        """Channels a position that plain autograd and keepgrad save."""
        return saved_width(_stages(self.links), _input_width(self.links), keep_ratio, save)


def _stages(links: Sequence[Link]) -> list[Stage]:
    return [stage for stage, _ in links]


def _input_width(links: Sequence[Link]) -> int:
    """The channels of the input, read off the first matrix: what comes before it is as wide."""
    return next(t.shape[1] for _, tensors in links for t in tensors if t.dim() == 2)


@dataclass(frozen=True)
class AttentionBranch(Branch):
    """Chains before and after self-attention; `links` is empty."""

    before: Sequence[Link]
    heads: int
    projection: Link
    after: Sequence[Link]
    q_norm: Link | None = None
    k_norm: Link | None = None
    dropout: float = 0.0
    attn_mask: Tensor | None = None
    is_causal: bool = False

    def _stage(self, method: str, kept_heads: Tensor | None = None) -> Link:
        return self_attention(self.heads, self.projection, self.q_norm, self.k_norm, method, kept_heads)

    def _is_whole(self, reduced: bool, save: str, method: str) -> bool:
        """Whether the attention itself is left to autograd."""
        if not isinstance(self.projection[0], Linear) or method == "off":
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
        method: str = "off",
        kept_heads: Tensor | None = None,
    ) -> Tensor:
        if not self._is_whole(kept is not None or kept_heads is not None, save, method):
            if kept is None and kept_heads is None:
                method = "qkv"
            links = [*self.before, self._stage(method, kept_heads), *self.after]
            return run(links, x, kept, save, residual)
        out = self._attend(run([*self.before, self.projection], x, kept, save))
        return run(self.after, out, kept, save, residual)

    def _attend(self, qkv: Tensor) -> Tensor:
        """Attention under plain autograd."""
        q, k, v = (part.transpose(1, 2) for part in qkv.unflatten(-1, (3, self.heads, -1)).unbind(2))
        if self.q_norm is not None:
            q = run_stages([self.q_norm], q)
        if self.k_norm is not None:
            k = run_stages([self.k_norm], k)
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=self.attn_mask, dropout_p=self.dropout, is_causal=self.is_causal
        )
        return out.transpose(1, 2).flatten(2)

    def saved_width(self, keep_ratio: float, save: str, method: str = "off") -> tuple[float, float]:
        width = _input_width([self.projection])
        before, after = _stages(self.before), _stages(self.after)
        if not self._is_whole(keep_ratio < 1, save, method):
            return saved_width([*before, self._stage(method)[0], *after], width, keep_ratio, save)
        plain, ours = saved_width([*before, self.projection[0]], width, keep_ratio, save)
        out = self.projection[0].width(width) // 3
        core = (3 if self.q_norm is None else 5) * out
        plain_after, ours_after = saved_width(after, out, keep_ratio, save)
        # Attention saves its output, and with every position kept that is also what the chain behind it saves.
        shared = out if keep_ratio == 1 else 0
        return plain + core + plain_after, ours + core + out + ours_after - shared
