"""Adapters for torchvision's models."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .items import Attention, LinearOf, Scale, Unsupported, attention, describes
from .modules import STEPS, drop_path
from .position_wise import maps_of, rows_of
from .registry import Adapter, RunBranch, adapts
from .timm_windows import cosine, probe
from .torch_nn import Arranged, after_attention

MODELS = "torchvision.models."

STEPS["torchvision.ops.stochastic_depth.StochasticDepth"] = drop_path


@adapts(f"{MODELS}vision_transformer.EncoderBlock")
class VisionTransformerBlock(Adapter):
    def branches(self, m: Any) -> dict[str, Any]:
        after = after_attention(m.self_attention, m.dropout)
        return {"attention": [m.ln_1, attention(m.self_attention), after], "mlp": [m.ln_2, m.mlp]}


@adapts(f"{MODELS}convnext.CNBlock")
class ConvNeXtBlock(Adapter):
    """The depthwise convolution mixes positions, so it is left to autograd."""

    gives_rows = False

    def branches(self, m: Any) -> dict[str, Any]:
        _, to_rows, *inner, to_maps = m.block  # the first is the depthwise convolution
        if list(to_rows.dims) != [0, 2, 3, 1] or list(to_maps.dims) != [0, 3, 1, 2]:
            raise Unsupported("its layers are not those of ConvNeXt")
        return {"mlp": [*inner, Scale(lambda: m.layer_scale.flatten()), m.stochastic_depth]}

    def forward(self, m: Any, run: RunBranch, x: Tensor) -> Tensor:
        mixed = m.block[0](x)
        shape = mixed.shape[2:]
        return maps_of(run("mlp", rows_of(mixed), rows_of(x), shape), shape)


@adapts(f"{MODELS}swin_transformer.ShiftedWindowAttention")
class SwinAttention(Adapter):
    """The module cuts its map into windows itself. The branch is the attention inside the windows.

    The module does not call its linear layers, it only reads their weights.
    """

    gives_rows = False

    def branches(self, m: Any) -> dict[str, Any]:
        attention = Attention(
            m,
            project=[LinearOf(lambda: m.qkv.weight, lambda: self.qkv_bias(m))],
            heads=m.num_heads,
            dropout=lambda: m.attention_dropout if m.training else 0.0,
            out=[LinearOf(lambda: m.proj.weight, lambda: m.proj.bias), nn.Dropout(m.dropout).train(m.training)],
            layout=tuple(m.window_size),
            **self.scores(m),
        )
        return {"attention": [attention]}

    def qkv_bias(self, m: Any) -> Tensor | None:
        return m.qkv.bias

    def scores(self, m: Any) -> dict[str, Any]:
        """The fields of `Attention` that describe how the scores are computed."""
        return {"bias": m.get_relative_position_bias}

    def window(self, m: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The size of the windows of a map of this shape."""
        return tuple(m.window_size)

    def options(self, m: Any, size: tuple[int, ...]) -> dict[str, Any]:
        """Further arguments for `run`, besides the mask."""
        return {}

    def forward(self, m: Any, run: RunBranch, x: Tensor) -> Tensor:
        shape = x.shape[1:-1]
        size, dims = self.window(m, shape), tuple(range(1, x.dim() - 1))
        missing = [-side % window for side, window in zip(shape, size, strict=True)]
        x = F.pad(x, (0, 0, *(n for more in reversed(missing) for n in (0, more))))
        sides = zip(size, x.shape[1:-1], m.shift_size, strict=True)
        shift = [0 if window >= side else by for window, side, by in sides]
        mask = None
        if any(shift):
            x = x.roll([-by for by in shift], dims)
            mask = _shift_mask(x, size, shift)
        windows = _windows(x, size)
        rows = windows.flatten(0, len(dims)).flatten(1, -2)
        out = run("attention", rows, None, size, attn_mask=mask, **self.options(m, size))
        x = _joined(out.view(windows.shape)).view(x.shape)
        if any(shift):
            x = x.roll(shift, dims)
        return x[(slice(None), *(slice(side) for side in shape))].contiguous()


def _windows(x: Tensor, size: tuple[int, ...]) -> Tensor:
    """Cut maps `[batch, *sides, channels]` into windows: `[batch, *number of windows per side, *size, channels]`."""
    for dim, side in reversed(list(enumerate(size, 1))):
        x = x.unflatten(dim, (-1, side))
    count = 2 * len(size)
    return x.permute(0, *range(1, count, 2), *range(2, count + 1, 2), count + 1)


def _joined(windows: Tensor) -> Tensor:
    """The inverse of `_windows`: puts the values back into the order of the map."""
    ways = (windows.dim() - 2) // 2
    pairs = [dim for way in range(1, ways + 1) for dim in (way, way + ways)]
    return windows.permute(0, *pairs, -1).contiguous()


def _shift_mask(x: Tensor, size: tuple[int, ...], shift: list[int]) -> Tensor:
    """A mask `[windows, 1, n, n]` to add to the scores. It separates positions that only the shift made neighbours."""
    regions = torch.zeros((), device=x.device)
    for side, window, by in zip(x.shape[1:-1], size, shift, strict=True):
        region = torch.zeros(side, device=x.device)
        region[-window:] = 1
        region[-by:] = 2
        regions = 3 * regions.unsqueeze(-1) + region
    of_windows = _windows(regions[None, ..., None], size).reshape(-1, math.prod(size))
    apart = of_windows.unsqueeze(1) != of_windows.unsqueeze(2)
    return (apart.to(x.dtype) * -100.0).unsqueeze(1)


@adapts(f"{MODELS}swin_transformer.ShiftedWindowAttentionV2")
class SwinV2Attention(SwinAttention):
    """Scores are cosines times a learned scale, and k has no bias."""

    def qkv_bias(self, m: Any) -> Tensor | None:
        if m.qkv.bias is None:
            return None
        q, k, v = m.qkv.bias.chunk(3)
        return torch.cat((q, torch.zeros_like(k), v))

    def scores(self, m: Any) -> dict[str, Any]:
        return {**super().scores(m), **cosine(m)}


@adapts(f"{MODELS}swin_transformer.SwinTransformerBlock")
class SwinBlock(Adapter):
    gives_rows = False

    def branches(self, m: Any) -> dict[str, Any]:
        probe(m, "norm1", "attn")
        return {"mlp": [m.norm2, m.mlp, m.stochastic_depth]}

    def forward(self, m: Any, run: RunBranch, x: Tensor) -> Tensor:
        x = x + m.stochastic_depth(m.attn(m.norm1(x)))
        rows = x.flatten(1, -2)
        return run("mlp", rows, rows, x.shape[1:-1]).view(x.shape)


@adapts(f"{MODELS}swin_transformer.SwinTransformerBlockV2")
class SwinV2Block(Adapter):
    """The norms come after the attention and the MLP."""

    gives_rows = False

    def branches(self, m: Any) -> dict[str, Any]:
        probe(m, "norm1", "attn")
        return {"mlp": [m.mlp, m.norm2, m.stochastic_depth]}

    def forward(self, m: Any, run: RunBranch, x: Tensor) -> Tensor:
        x = x + m.stochastic_depth(m.norm1(m.attn(x)))
        rows = x.flatten(1, -2)
        return run("mlp", rows, rows, x.shape[1:-1]).view(x.shape)


@describes(f"{MODELS}maxvit.RelativePositionalMultiHeadAttention")
def _relative_attention(m: Any) -> Attention:
    return Attention(
        m,
        project=[m.to_qkv],
        heads=m.n_heads,
        scale=m.scale_factor,
        bias=m.get_relative_positional_bias,
        out=[m.merge],
        layout=(m.size, m.size),
        call=lambda rows: m(rows.unsqueeze(1)).squeeze(1),
    )


@adapts(f"{MODELS}maxvit.PartitionAttentionLayer")
class MaxVitLayer(Adapter):
    """Attention in windows, or among the positions of a grid. The model's own modules do the partition."""

    gives_rows = False

    def branches(self, m: Any) -> dict[str, Any]:
        probe(m, "partition_op", "partition_swap", "departition_swap", "departition_op", "grid_size", "p")
        norm, inner, dropout = m.attn_layer
        *layers, last = m.mlp_layer
        if m.partition_type == "grid":  # the MLP gets its rows in another order
            area = m.p**2
            last = Arranged(last, lambda x: x.unflatten(1, (-1, area)).transpose(1, 2).contiguous(), _swapped)
        return {
            "attention": [norm, attention(inner), dropout],
            "mlp": [*layers, last, m.stochastic_dropout],
        }

    def forward(self, m: Any, run: RunBranch, x: Tensor) -> Tensor:
        height, width = (side // m.p for side in m.grid_size)
        x = m.partition_swap(m.partition_op(x, m.p))
        out = run("attention", x.flatten(0, 1), None)
        x = x + m.stochastic_dropout(out.view(x.shape))
        # The MLP comes after the swap, so that neighbours among the rows are neighbours in the image.
        x = m.departition_swap(x)
        rows = x.flatten(1, 2)
        x = run("mlp", rows, rows, (x.shape[1] * m.p, m.p)).view(x.shape)
        return m.departition_op(x, m.p, height, width)


def _swapped(x: Tensor) -> Tensor:
    """Reorder `[batch, places in a cell, cells, channels]` into rows, one cell after the other."""
    return x.transpose(1, 2).flatten(1, 2)
