"""Adapters for torch's own transformer layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.stages import Noise
from .items import Attention, LinearOf, Step, Unsupported, attention, describes
from .modules import steps_for, steps_of
from .position_wise import NotRows
from .registry import Adapter, RunBranch, adapts

__all__ = ["Arranged", "after_attention"]


@describes("torch.nn.modules.activation.MultiheadAttention")
def _multihead_attention(m: Any) -> Attention:
    """Self-attention: q, k and v are computed from the same input."""
    if m.bias_k is not None or m.add_zero_attn or not m._qkv_same_embed_dim:
        raise Unsupported("MultiheadAttention has keys of its own (add_bias_kv, add_zero_attn), or kdim or vdim")

    def call(x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        count = x.shape[1]
        if is_causal:
            attn_mask = nn.Transformer.generate_square_subsequent_mask(count, x.device, x.dtype)
        elif attn_mask is not None:
            attn_mask = attn_mask.expand(x.shape[0], m.num_heads, count, count).flatten(0, 1)
        x = x if m.batch_first else x.transpose(0, 1)
        out, _ = m(x, x, x, attn_mask=attn_mask, is_causal=is_causal, need_weights=False)
        return out if m.batch_first else out.transpose(0, 1)

    return Attention(
        m,
        project=[LinearOf(lambda: m.in_proj_weight, lambda: m.in_proj_bias)],
        heads=m.num_heads,
        dropout=lambda: m.dropout if m.training else 0.0,
        # The module reads the weight of this layer but does not call the layer.
        out=[LinearOf(lambda: m.out_proj.weight, lambda: m.out_proj.bias)],
        call=call,
    )


def after_attention(m: nn.MultiheadAttention, dropout: nn.Module) -> Arranged:
    """The dropout after an `nn.MultiheadAttention`, arranged so that it draws the same noise as in the model."""
    if m.batch_first:
        return Arranged(dropout, positions_first_in_memory, lambda x: x)
    return Arranged(dropout, positions_first, positions_first)


class Arranged(nn.Module):
    """A dropout of a model that orders its values differently from rows. The noise is drawn in the model's order.

    `there` brings rows into the model's order, `back` does the opposite. The dropout belongs to the model: it is kept
    in a tuple, so it is not registered here as a submodule.
    """

    def __init__(self, dropout: Any, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.parts = (dropout, there, back)

    def forward(self, x: Tensor) -> Tensor:
        dropout, there, back = self.parts
        return back(dropout(there(x)))


@steps_for(f"{__name__}.Arranged")
def _arranged(module: Any) -> list[Step]:
    steps = steps_of(module.parts[0])
    return [Step(Noise(module, per_sample=False)) if isinstance(step.stage, Noise) else step for step in steps]


def positions_first(x: Tensor) -> Tensor:
    """Rows `[batch, n, channels]` as `[n, batch, channels]`, or the other way round."""
    return x.transpose(0, 1).contiguous()


def positions_first_in_memory(x: Tensor) -> Tensor:
    """The same rows, stored in memory as `[n, batch, channels]`, as `nn.MultiheadAttention` returns them."""
    return positions_first(x).transpose(0, 1)


class Function(nn.Module):
    """Makes a module of an activation function."""

    def __init__(self, fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x)


@adapts("torch.nn.modules.transformer.TransformerEncoderLayer")
class EncoderLayer(Adapter):
    """Its norms come before the branches, or after each residual sum.

    A norm after the sum is not part of a branch, so it is left to autograd.
    """

    gives_rows = False  # positions may come first

    def branches(self, m: Any) -> dict[str, Any]:
        kind, own = type(m), nn.TransformerEncoderLayer
        if kind._sa_block is not own._sa_block or kind._ff_block is not own._ff_block:
            raise Unsupported("it has an attention or an MLP of its own (_sa_block, _ff_block)")
        act = nn.GELU() if m.activation is F.gelu else m.activation
        act = act if isinstance(act, nn.Module) else Function(act)
        drops = [m.dropout, m.dropout2]
        if not m.self_attn.batch_first:
            drops = [Arranged(one, positions_first, positions_first) for one in drops]
        before = ([m.norm1], [m.norm2]) if m.norm_first else ([], [])
        return {
            "attention": [*before[0], attention(m.self_attn), after_attention(m.self_attn, m.dropout1)],
            "mlp": [*before[1], m.linear1, act, drops[0], m.linear2, drops[1]],
        }

    def forward(
        self,
        m: Any,
        run: RunBranch,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        if src.is_nested or src.dim() != 3 or (is_causal and src_mask is None):
            raise NotRows
        if is_causal and src_key_padding_mask is None:
            options: dict[str, Any] = {"is_causal": True}
        else:
            options = {"attn_mask": _added(src, src_mask, src_key_padding_mask, m.self_attn.num_heads)}
        x = src if m.self_attn.batch_first else src.transpose(0, 1)
        x = run("attention", x, x, **options)
        x = x if m.norm_first else m.norm1(x)
        x = run("mlp", x, x)
        x = x if m.norm_first else m.norm2(x)
        return x if m.self_attn.batch_first else x.transpose(0, 1)


def _added(x: Tensor, mask: Tensor | None, padding: Tensor | None, heads: int) -> Tensor | None:
    """The masks of a layer as one tensor to add to the scores. It broadcasts to `[batch, heads, n, n]`."""
    found = None
    if mask is not None:
        found = _as_numbers(mask if mask.dim() == 2 else mask.unflatten(0, (-1, heads)), x.dtype)
    if padding is not None:
        keys = _as_numbers(padding, x.dtype)[:, None, None]
        found = keys if found is None else found + keys
    return found


def _as_numbers(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn a boolean mask into one to add to the scores: -inf where it is True, 0 elsewhere.

    A mask of numbers is returned as it is.
    """
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -torch.inf) if mask.dtype == torch.bool else mask
