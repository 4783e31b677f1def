"""Adapters for timm's models with attention in windows: Swin and Swin V2.

The attention module counts as a block of its own. Its input is `[batch * windows, positions, channels]`. The Swin block
around it cuts the map into windows with timm's code, and has one branch, the MLP.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.attention import Part, Places
from .items import Attention, LinearOf, Unsupported
from .registry import Adapter, RunBranch, adapts

__all__ = ["cosine", "probe"]

SWIN, SWIN_V2 = "timm.models.swin_transformer.", "timm.models.swin_transformer_v2."


def probe(m: Any, *names: str) -> None:
    """Raise AttributeError unless the block has these attributes, which the forward of its adapter uses."""
    for name in names:
        getattr(m, name)


class WindowAttention(Adapter):
    """Attention among the positions of each window. Subclasses define the branch.

    A mask has the shape `[windows, n, n]`, for the windows of one image. The engine repeats it for each image.
    """

    def forward(self, m: Any, run: RunBranch, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return run("attention", x, None, m.window_size, attn_mask=None if mask is None else mask.unsqueeze(1))


@adapts(f"{SWIN}WindowAttention")
class SwinAttention(WindowAttention):
    def branches(self, m: Any) -> dict[str, Any]:
        attention = Attention(
            m,
            project=[m.qkv],
            heads=m.num_heads,
            scale=m.scale,
            bias=m._get_rel_pos_bias,
            dropout=lambda: m.attn_drop.p if m.training else 0.0,
            out=[m.proj, m.proj_drop],
            layout=m.window_size,
        )
        return {"attention": [attention]}


@adapts(f"{SWIN_V2}WindowAttention")
class SwinV2Attention(WindowAttention):
    """Scores are cosines times a learned scale. A small network computes the bias from the relative position."""

    def branches(self, m: Any) -> dict[str, Any]:
        if m.qkv_bias_separate:
            raise Unsupported("qkv_bias_separate is not supported")
        has_bias = m.q_bias is not None
        qkv = LinearOf(lambda: m.qkv.weight, lambda: torch.cat((m.q_bias, m.k_bias, m.v_bias)) if has_bias else None)

        def bias() -> Tensor:
            table = m.cpb_mlp(m.relative_coords_table).view(-1, m.num_heads)
            area = math.prod(m.window_size)
            return 16 * torch.sigmoid(table[m.relative_position_index.view(-1)].view(area, area, -1).permute(2, 0, 1))

        attention = Attention(
            m,
            project=[qkv],
            heads=m.num_heads,
            **cosine(m),
            bias=bias,
            dropout=lambda: m.attn_drop.p if m.training else 0.0,
            out=[m.proj, m.proj_drop],
            layout=m.window_size,
        )
        return {"attention": [attention]}


def cosine(m: Any) -> dict[str, Any]:
    """The scores of Swin V2: cosines times a scale. `m.logit_scale`, `[heads, 1, 1]`, is its log, at most log 100."""

    def q_part(q: Tensor, places: Places, scale: Tensor) -> Tensor:
        return (_unit(q) * places.pick_heads(scale, 0)).to(q.dtype)

    def k_part(k: Tensor, places: Places) -> Tensor:
        return _unit(k)

    return {
        "scale": 1.0,
        "q_parts": [(Part(q_part, 1), [lambda: m.logit_scale.clamp(max=math.log(100)).exp()])],
        "k_parts": [(Part(k_part), [])],
    }


def _unit(rows: Tensor) -> Tensor:
    """Rows scaled to length 1. A row of zeros, as in padding, gets no gradient.

    torch would multiply the incoming gradient of such a row by 1e12. In the model that gradient is zero; but a slot can
    stand for padding together with other positions, and then it is not.
    """
    return F.normalize(torch.where((rows != 0).any(-1, keepdim=True), rows, rows.detach()), dim=-1)


@adapts(f"{SWIN}SwinTransformerBlock")
class SwinBlock(Adapter):
    gives_rows = False

    def branches(self, m: Any) -> dict[str, Any]:
        probe(m, "norm1", "_attn", "drop_path1")
        return {"mlp": [m.norm2, m.mlp, m.drop_path2]}

    def forward(self, m: Any, run: RunBranch, x: Tensor) -> Tensor:
        x = x + m.drop_path1(m._attn(m.norm1(x)))
        rows = x.flatten(1, 2)
        return run("mlp", rows, rows, x.shape[1:3]).view(x.shape)


@adapts(f"{SWIN_V2}SwinTransformerV2Block")
class SwinV2Block(Adapter):
    """The norms come after the attention and the MLP."""

    gives_rows = False

    def branches(self, m: Any) -> dict[str, Any]:
        probe(m, "norm1", "_attn", "drop_path1")
        return {"mlp": [m.mlp, m.norm2, m.drop_path2]}

    def forward(self, m: Any, run: RunBranch, x: Tensor) -> Tensor:
        x = x + m.drop_path1(m.norm1(m._attn(x)))
        rows = x.flatten(1, 2)
        return run("mlp", rows, rows, x.shape[1:3]).view(x.shape)
