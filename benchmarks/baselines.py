"""What keepgrad is compared with: the paper's Algorithm 1, checkpointing, and dropping samples."""

from __future__ import annotations

import types

import torch
import torch.nn.functional as F
from timm.models.convnext import ConvNeXtBlock
from timm.models.vision_transformer import Block
from torch import Tensor, nn

import keepgrad


def algorithm1(model: nn.Module, keep_ratio: float = 0.5, last: float = 1.0) -> None:
    """Algorithm 1 on the branches of the last share of the blocks, as the paper's code does it.

    In a ViT, `f` is the attention itself (kept rows among kept rows, the others among the others) and the MLP; norms
    and projections stay with autograd. In a ConvNeXt, `f` is all that follows the depthwise convolution.
    """
    blocks = [module for module in model.modules() if isinstance(module, Block | ConvNeXtBlock)]
    for block in blocks[len(blocks) - round(len(blocks) * last) :]:
        forward = _vit_block if isinstance(block, Block) else _convnext_block
        block.keep_ratio = keep_ratio
        block.forward = types.MethodType(forward, block)


def _kept(height: int, width: int, prefix: int, keep_ratio: float) -> Tensor:
    seed = int(torch.randint(2**31, ()))
    return keepgrad.kept_indices(keepgrad.Grid(height, width, prefix), keep_ratio, "grid", seed)


def _vit_block(self: nn.Module, x: Tensor) -> Tensor:
    attn = self.attn
    side = int((x.shape[1] - 1) ** 0.5)
    kept = _kept(side, side, 1, self.keep_ratio)

    def attend(qkv: Tensor) -> Tensor:
        q, k, v = qkv.unflatten(-1, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    out = keepgrad.sbp(attend, attn.qkv(self.norm1(x)), kept)
    x = x + self.drop_path1(self.ls1(attn.proj(out)))
    return x + self.drop_path2(self.ls2(keepgrad.sbp(self.mlp, self.norm2(x), kept)))


def _convnext_block(self: nn.Module, x: Tensor) -> Tensor:
    mixed = self.conv_dw(x).permute(0, 2, 3, 1)
    height, width = mixed.shape[1:3]

    def rest(rows: Tensor) -> Tensor:
        return self.mlp(self.norm(rows)) * self.gamma

    rows = keepgrad.sbp(rest, mixed.flatten(1, 2), _kept(height, width, 0, self.keep_ratio))
    return x + self.drop_path(rows.unflatten(1, (height, width)).permute(0, 3, 1, 2))


class SomeSamples(nn.Module):
    """The trivial baseline: all samples forward, gradients from a share of them only."""

    def __init__(self, model: nn.Module, share: float) -> None:
        super().__init__()
        self.model, self.share = model, share

    def forward(self, x: Tensor) -> Tensor:
        order = torch.randperm(len(x))
        count = int(len(x) * self.share)
        with torch.no_grad():
            dropped = self.model(x[order[count:]])
        out = torch.cat([self.model(x[order[:count]]), dropped])
        return out[order.argsort()]
