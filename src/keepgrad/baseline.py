"""The paper's Algorithm 1 on a whole model, as in its published code. keepgrad is compared with it.

Algorithm 1 applies a function `f` to kept and dropped positions separately. In a ViT, `f` is the attention itself (kept
positions attend to kept ones, dropped ones to dropped ones) and the MLP after its norm; norms and projections use plain
autograd. In a ConvNeXt, `f` is everything after the depthwise convolution, and also each whole downsampling layer.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from .adapters import Block
from .adapters.position_wise import NotRows
from .config import KeepConfig
from .ops.algorithm1 import put_together
from .ops.branch import BoundAttention
from .ops.chain import run_stages
from .ops.stages import Link, Noise
from .plan import make_plan
from .sampling import Layout, sample

__all__ = ["algorithm1"]


def algorithm1(model: nn.Module, config: KeepConfig) -> None:
    """Put Algorithm 1 on the sites that `apply` would choose with this configuration. It cannot be undone."""
    for block, sites in make_plan(model, config)[1]:
        block.module.forward = _Forward(block, {site.kind: site.keep_ratio for site in sites})


class _Forward:
    is_of_keepgrad, is_aside, previous = True, False, None

    def __init__(self, block: Block, ratios: dict[str, float]) -> None:
        self.block, self.run = block, _Run(block, ratios)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.is_aside or not self.block.module.training:
            return self.own(*args, **kwargs)
        try:
            return self.block.adapter.forward(self.block.module, self.run, *args, **kwargs)
        except NotRows:
            return self.own(*args, **kwargs)

    def own(self, *args: Any, **kwargs: Any) -> Tensor:
        return type(self.block.module).forward(self.block.module, *args, **kwargs)


class _Run:
    """Runs the branches of a block: those that have a ratio with Algorithm 1, the others with plain autograd."""

    def __init__(self, block: Block, ratios: dict[str, float]) -> None:
        self.block, self.ratios, self.kinds = block, ratios, block.kinds

    def __call__(
        self,
        kind: str,
        x: Tensor,
        residual: Tensor | None = None,
        shape: tuple[int, ...] | None = None,
        **options: Any,
    ) -> Tensor:
        branch = self.block.compile(kind).bind(**options)
        if kind not in self.ratios:
            out = branch.plain(x)
            return out if residual is None else residual + out
        split = _split(x.shape[1], shape, self.block.prefix or 0, self.ratios[kind], x.device)
        attention = branch.attention
        if attention is not None:
            fused = all(getattr(module, "fused_attn", True) for module in self.block.module.modules())
            attend = attention.attend if fused else lambda some: _attend_unfused(attention, some)
            rows = run_stages([*branch.before, attention.projection], x)
            out = run_stages(branch.after, put_together(attend, rows, *split))
        else:
            # Noise at the end (such as dropout) is drawn for all rows at once, so it is not part of `f`.
            before = 1 if "attention" in self.block.kinds else 0
            links: list[Link] = list(branch.before)
            end = len(links)
            while isinstance(links[end - 1][0], Noise):
                end -= 1
            inside, outside = links[before:end], links[end:]
            rows = run_stages(links[:before], x)
            out = run_stages(outside, put_together(lambda some: run_stages(inside, some), rows, *split))
        return out if residual is None else residual + out


def _split(
    count: int, shape: tuple[int, ...] | None, prefix: int, keep_ratio: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The kept and the dropped positions. How many there are of each depends only on the ratio."""
    side = math.isqrt(count - prefix)
    square = (side, side) if side * side == count - prefix else (count - prefix,)
    layout = Layout(square, prefix) if shape is None else Layout(tuple(shape))
    positions = torch.arange(count, device=device)
    kept = sample(torch.randint(2**62, (), device=device), 1, layout, keep_ratio, "grid", "drop")
    picked = positions if kept is None else kept.picked
    order = torch.ones_like(positions).index_fill(0, picked, 0).argsort(stable=True)
    return order[: len(picked)], order[len(picked) :]


def _attend_unfused(attention: BoundAttention, qkv: Tensor) -> Tensor:
    """Attention from matmuls and a softmax, without a fused kernel: autograd saves the whole matrix of weights."""
    heads = attention.core.heads
    q, k, v = (rows.unflatten(-1, (heads, -1)).transpose(1, 2) for rows in qkv.split(attention.core.sections, -1))
    weights = (q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(2)
