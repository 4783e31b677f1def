"""timm's VisionTransformer and ConvNeXt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from timm import layers as tl
from timm.layers import activations as ta
from timm.models import convnext as tc
from timm.models import vision_transformer as tv
from torch import Tensor, nn

from ..ops.branch import AttentionBranch, Branch
from ..ops.stages import Linear, Link, Pointwise, gelu, layer_norm, linear, noise, pointwise, rms_norm
from . import Adapter, Block, RunBranch, Unsupported, generic

__all__ = ["ADAPTERS"]

LAYER_NORMS = (nn.LayerNorm, tl.LayerNorm, tl.LayerNorm2d)


def _norm(module: Any) -> list[Link]:
    """A norm over channels, on rows. The two-dimensional kinds only differ in where they look for the channels."""
    if not getattr(module, "_fast_norm", False):
        if generic.is_plain(module, *LAYER_NORMS):
            return [layer_norm(tuple(module.normalized_shape), module.weight, module.bias, module.eps)]
        if generic.is_plain(module, tl.RmsNorm, tl.RmsNorm2d):
            return [rms_norm(tuple(module.normalized_shape), module.weight, module.eps)]
    if generic.is_plain(module, tl.LayerNorm2d, tl.RmsNorm2d, tl.SimpleNorm2d, tl.LayerNorm2dFp32):
        return [_rows_of_map(module)]
    return generic.links_of(module)


def _rows_of_map(module: Any) -> Link:
    """A position-wise module for maps `[batch, channels, height, width]`, on rows."""
    stage, tensors = generic.opaque(module)
    assert isinstance(stage, Pointwise)
    fn = stage.fn

    def on_rows(x: Tensor, *tensors: Tensor) -> Tensor:
        return fn(x.transpose(1, 2).unsqueeze(-1), *tensors).squeeze(-1).transpose(1, 2)

    return Pointwise(on_rows), tensors


def _tail(last: list[Link], dropout: nn.Module, scale: Tensor | None, drop_path: nn.Module) -> list[Link]:
    """The last layer of a branch with dropout, layer scale and drop path behind it.

    The scale joins the linear layer before it. Dropout lies between the two, but both are products.
    """
    if scale is not None:
        if len(last) == 1 and isinstance(last[0][0], Linear):
            weight, *bias = last[0][1]
            last = [linear((weight, bias[0] if bias else None), scale=scale)]
        else:
            last = [*last, pointwise(torch.mul, scale)]
    return [*last, *generic.links_of(dropout), *_drop_path(drop_path)]


def _drop_path(module: Any) -> list[Link]:
    if generic.is_plain(module, nn.Identity):
        return []
    if not generic.is_plain(module, tl.DropPath):
        raise Unsupported(f"{type(module).__name__} is not timm's DropPath")
    return [noise(module, per_sample=True)] if module.training and module.drop_prob else []


def _scale(module: Any) -> Tensor | None:
    if generic.is_plain(module, nn.Identity):
        return None
    if not generic.is_plain(module, tl.LayerScale):
        raise Unsupported(f"{type(module).__name__} is not timm's LayerScale")
    return module.gamma


def _gate(act: nn.Module, act_first: bool) -> Pointwise:
    """Two halves of the channels, one of them through the activation, multiplied."""
    stage, tensors = generic.opaque(act)
    if tensors or not isinstance(stage, Pointwise):
        raise Unsupported(f"{type(act).__name__} has parameters, in a gate")
    activate = stage.fn

    def fn(x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return activate(a) * b if act_first else a * activate(b)

    return Pointwise(fn, lambda width: width // 2)


def _mlp(mlp: Any) -> tuple[list[Link], list[Link], nn.Module]:
    """An MLP up to its last layer, that layer, and the dropout behind it."""
    if generic.is_plain(mlp, tl.Mlp):
        hidden = [*generic.links_of(mlp.fc1), *_activation(mlp.act)]
    elif generic.is_plain(mlp, tl.GluMlp):
        hidden = [*generic.links_of(mlp.fc1), (_gate(mlp.act, not mlp.gate_last), ())]
    elif generic.is_plain(mlp, tl.SwiGLU):
        pair = generic.weight_and_bias(mlp.fc1_g), generic.weight_and_bias(mlp.fc1_x)
        if pair[0] is None or pair[1] is None:
            raise Unsupported("the two input layers of SwiGLU are not plain linear layers")
        hidden = [linear(pair[0], pair[1]), (_gate(mlp.act, True), ())]
    elif isinstance(mlp, tl.GlobalResponseNormMlp):
        raise Unsupported("global response norm (ConvNeXt V2) mixes positions, so it cannot be reduced to some of them")
    else:
        raise Unsupported(f"{type(mlp).__name__} is not known to be position-wise, or has hooks")
    hidden += [*generic.links_of(mlp.drop1), *_norm(mlp.norm)]
    return hidden, generic.links_of(mlp.fc2), mlp.drop2


def _activation(module: Any) -> list[Link]:
    if generic.is_plain(module, ta.GELU):
        return [gelu("none")]
    if generic.is_plain(module, ta.GELUTanh):
        return [gelu("tanh")]
    return generic.links_of(module)


class VisionTransformerBlock(Adapter):
    """`timm.models.vision_transformer.Block`: ViT, DeiT and their kin."""

    @staticmethod
    def find(model: nn.Module) -> list[Block]:
        # Blocks alone have no prefix tokens, unless the model they are part of is known to have some.
        bare = type(model) in (tv.Block, nn.Sequential)
        tokens: dict[nn.Module, tuple[Any, int]] = {
            block: (owner.patch_embed, owner.num_prefix_tokens)
            for owner in model.modules()
            if isinstance(owner, tv.VisionTransformer)
            for block in owner.blocks
        }
        found = []
        for name, module in model.named_modules():
            if type(module).forward is tv.Block.forward and (bare or module in tokens):
                patch_embed, prefix = tokens.get(module, (None, 0))
                block = Block(name, module, VisionTransformerBlock, ("attention", "mlp"))
                block.patch_embed, block.prefix = patch_embed, prefix
                found.append(block)
        return found

    @staticmethod
    def branch(module: Any, kind: str, **options: Any) -> Branch | AttentionBranch:
        if kind == "mlp":
            hidden, last, dropout = _mlp(module.mlp)
            tail = _tail(last, dropout, _scale(module.ls2), module.drop_path2)
            return Branch([*_norm(module.norm2), *hidden, *tail], module.attn.proj.out_features)
        attn = module.attn
        if not generic.is_plain(attn, tl.Attention):
            raise Unsupported(f"{type(attn).__name__} is not timm's Attention, or has hooks")
        if getattr(attn, "gate", None) is not None:
            raise Unsupported("gated attention has a second path from its input")
        (projection,) = generic.links_of(attn.qkv)
        tail = _tail(generic.links_of(attn.proj), attn.proj_drop, _scale(module.ls1), module.drop_path1)
        q_norm, k_norm = (next(iter(_norm(norm)), None) for norm in (attn.q_norm, attn.k_norm))
        return AttentionBranch(
            before=_norm(module.norm1),
            heads=attn.num_heads,
            width=attn.proj.out_features,
            projection=projection,
            after=[*(_norm(attn.norm) if hasattr(attn, "norm") else []), *tail],
            q_norm=q_norm,
            k_norm=k_norm,
            dropout=attn.attn_drop.p if attn.training else 0.0,
            **options,
        )

    @staticmethod
    def forward(
        block: Block, run: RunBranch, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        module: Any = block.module
        grid, prefix = VisionTransformerBlock._grid(block.patch_embed, x.shape[1] - block.prefix), block.prefix
        options = {"attn_mask": attn_mask, "is_causal": is_causal}

        def attention(x: Tensor) -> Tensor:
            return x + module.drop_path1(module.ls1(module.attn(module.norm1(x), **options)))

        def mlp(x: Tensor) -> Tensor:
            return x + module.drop_path2(module.ls2(module.mlp(module.norm2(x))))

        x = run("attention", x, grid, prefix, attention, residual=x, **options)
        return run("mlp", x, grid, prefix, mlp, residual=x)

    @staticmethod
    def _grid(patch_embed: Any, count: int) -> tuple[int, int]:
        """Height and width of the patches.

        Those that `apply` has seen leave the embedding (images of any size), or the model's own. Where their number is
        another (patch dropout), a grid of the same aspect is taken if there is one, else a single row.
        """
        if patch_embed is not None:
            height, width = getattr(patch_embed.forward, "grid", None) or patch_embed.grid_size
            scale = (count / (height * width)) ** 0.5
            tall, wide = round(height * scale), round(width * scale)
            if tall * wide == count:
                return tall, wide
        return 1, count

    @staticmethod
    def paper_layers(blocks: Sequence[Block]) -> set[int]:
        """The last two thirds: 8 of 12."""
        count = len(blocks)
        return set(range(count - round(count * 2 / 3), count))


def _rows(maps: Tensor) -> Tensor:
    """Maps `[batch, channels, height, width]` as rows; a view where they are channels-last, as behind a block."""
    return maps.permute(0, 2, 3, 1).flatten(1, 2)


class ConvNeXtBlock(Adapter):
    """`timm.models.convnext.ConvNeXtBlock` and the downsampling layers between stages.

    The depthwise convolution mixes positions and stays with autograd; the branch is what follows it.
    """

    @staticmethod
    def find(model: nn.Module) -> list[Block]:
        found: list[Block] = []
        index, stage, stride, parent = 0, -1, 1, None
        for name, module in model.named_modules():
            if isinstance(module, tc.ConvNeXtStage):
                if name.rpartition(".")[0] != parent:  # the stages of another model
                    stage, stride, parent = -1, 1, name.rpartition(".")[0]
                stage += 1
                if isinstance(module.downsample, nn.Sequential):
                    conv: Any = module.downsample[1]
                    stride *= conv.stride[0] if stage else 1
                    if len(module.blocks):
                        found.append(
                            Block(
                                f"{name}.downsample" if name else "downsample",
                                module.downsample,
                                ConvNeXtDownsample,
                                ("downsample",),
                                index,
                                stage,
                                stride,
                            )
                        )
            elif type(module).forward is tc.ConvNeXtBlock.forward:
                found.append(Block(name, module, ConvNeXtBlock, ("mlp",), index, max(stage, 0), stride))
                index += 1
        return found

    @staticmethod
    def branch(module: Any, kind: str, **options: Any) -> Branch:
        hidden, last, dropout = _mlp(module.mlp)
        tail = _tail(last, dropout, module.gamma, module.drop_path)
        return Branch([*_norm(module.norm), *hidden, *tail], module.conv_dw.out_channels)

    @staticmethod
    def forward(block: Block, run: RunBranch, x: Tensor) -> Tensor:
        module: Any = block.module
        mixed, shortcut = module.conv_dw(x), module.shortcut(x)
        height, width = mixed.shape[2:]

        def own(rows: Tensor) -> Tensor:
            maps = rows.unflatten(1, (height, width))
            if module.use_conv_mlp:
                maps = module.mlp(module.norm(maps.permute(0, 3, 1, 2))).permute(0, 2, 3, 1)
            else:
                maps = module.mlp(module.norm(maps))
            if module.gamma is not None:
                maps = maps * module.gamma
            return module.drop_path(maps).flatten(1, 2) + _rows(shortcut)

        rows = run("mlp", _rows(mixed), (height, width), 0, own, residual=_rows(shortcut))
        return rows.unflatten(1, (height, width)).permute(0, 3, 1, 2)

    @staticmethod
    def paper_layers(blocks: Sequence[Block]) -> set[int]:
        """All but the last stage; of the last but one, 6 of 9 or 21 of 27 blocks, two thirds of any other number."""
        stages = sorted({block.stage for block in blocks})
        covered = set()
        for stage in stages[:-1] or stages:
            inside = sorted(block.index for block in blocks if block.stage == stage)
            count = len(inside)
            if stage == stages[-2:][0] and len(stages) > 1:
                count = {9: 6, 27: 21}.get(count, round(count * 2 / 3))
            covered.update(inside[:count])
        return covered


class ConvNeXtDownsample(ConvNeXtBlock):
    """A norm and a convolution over patches that do not overlap: position-wise in the patches."""

    @staticmethod
    def find(model: nn.Module) -> list[Block]:
        return []

    @staticmethod
    def branch(module: Any, kind: str, **options: Any) -> Branch:
        norm, conv = module
        if not (generic.is_plain(conv, nn.Conv2d) and conv.kernel_size == conv.stride and conv.groups == 1):
            raise Unsupported("the patches of the downsampling convolution overlap, or it has hooks")
        if conv.padding != (0, 0) or conv.dilation != (1, 1):
            raise Unsupported("the downsampling convolution is padded or dilated")
        ((stage, tensors),) = _norm(norm)
        if not isinstance(stage, Pointwise):
            raise Unsupported(f"{type(norm).__name__} is not known")
        fn, channels = stage.fn, conv.in_channels

        def per_pixel(x: Tensor, *tensors: Tensor) -> Tensor:
            return fn(x.unflatten(-1, (-1, channels)).flatten(1, 2), *tensors).view(x.shape)

        weight = conv.weight.permute(0, 2, 3, 1).flatten(1)
        return Branch([(Pointwise(per_pixel), tensors), linear((weight, conv.bias))], weight.shape[1])

    @staticmethod
    def forward(block: Block, run: RunBranch, x: Tensor) -> Tensor:
        module: Any = block.module
        (tall, wide), channels = module[1].stride, x.shape[1]
        height, width = x.shape[2] // tall, x.shape[3] // wide

        def own(rows: Tensor) -> Tensor:
            maps = rows.view(-1, height, width, tall, wide, channels).permute(0, 5, 1, 3, 2, 4)
            return module(maps.flatten(4, 5).flatten(2, 3)).permute(0, 2, 3, 1).flatten(1, 2)

        pixels = x[:, :, : height * tall, : width * wide].permute(0, 2, 3, 1)
        patches = pixels.unflatten(2, (width, wide)).unflatten(1, (height, tall)).transpose(2, 3)
        rows = run("downsample", patches.flatten(3).flatten(1, 2), (height, width), 0, own)
        return rows.unflatten(1, (height, width)).permute(0, 3, 1, 2)


ADAPTERS: list[type[Adapter]] = [VisionTransformerBlock, ConvNeXtBlock]
