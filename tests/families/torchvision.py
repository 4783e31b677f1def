"""torchvision's families."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec

from oracle_model import Branch
from torch import nn

from keepgrad import Layout

from .family import Family, images, tokens
from .timm_windows import of_map


def model(file: str, name: str, **options) -> nn.Module:
    from torchvision import models

    return getattr(getattr(models, file), name)(num_classes=5, **options)


def convnext() -> nn.Module:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    return ConvNeXt([CNBlockConfig(12, 16, 1), CNBlockConfig(16, None, 2)], num_classes=5, layer_scale=0.5)


def swin(version: int) -> nn.Module:
    from torchvision.models import swin_transformer as swin

    block, merge = (
        (swin.SwinTransformerBlock, swin.PatchMerging),
        (swin.SwinTransformerBlockV2, swin.PatchMergingV2),
    )[version - 1]
    sizes = {"patch_size": [4, 4], "embed_dim": 24, "depths": [2], "num_heads": [3], "window_size": [4, 4]}
    return swin.SwinTransformer(**sizes, num_classes=5, stochastic_depth_prob=0.0, block=block, downsample_layer=merge)


def swin_specs(version: int) -> dict[str, dict[str, Branch]]:
    names = {"out": "proj", "query": "qkv", "functional": True}
    attention = Branch("qkv", "proj", Layout((4, 4)), last=("proj",), **names, heads=3)
    end = "" if version == 1 else "V2"
    entrance, last = ("norm2", ("mlp.3",)) if version == 1 else ("mlp", ())
    return {
        f"ShiftedWindowAttention{end}": {"attention": attention},
        f"SwinTransformerBlock{end}": {"mlp": Branch(entrance, "stochastic_depth", of_map, "nhwc", last=last)},
    }


def maxvit() -> nn.Module:
    """Two layers on 8 x 8 positions, each of windows and of a grid, and a stem with batch norms."""
    return model(
        *("maxvit", "MaxVit"),
        **{
            "input_size": (32, 32),
            "stem_channels": 8,
            "partition_size": 4,
            "block_channels": [24],
            "block_layers": [1],
        },
        **{"head_dim": 8, "stochastic_depth_prob": 0.0},
    )


VIT = {"image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 3, "hidden_dim": 24, "mlp_dim": 48}
VIT_SPECS = {
    "EncoderBlock": {
        "attention": Branch(
            *("ln_1", "dropout", tokens(4, 1)),
            last=("self_attention.out_proj",),
            out="self_attention.out_proj",
            query="self_attention",
            heads=3,
        ),
        "mlp": Branch("ln_2", "mlp", tokens(4, 1), last=("mlp.3",)),
    }
}
CONVNEXT_SPECS = {
    "CNBlock": {"mlp": Branch("block.2", "stochastic_depth", of_map, "nhwc", exit_form="nchw", last=("block.5",))}
}


def maxvit_mlp(layer: nn.Module) -> Branch:
    """Rows are in the order of windows of neighbours."""
    form, layout = ("turned", Layout((32, 2))) if layer.partition_type == "grid" else ("nhwc", Layout((16, 4)))
    return Branch("mlp_layer.0", "stochastic_dropout", layout, form, last=("mlp_layer.3",))


MAXVIT_NAMES = {"out": "attn_layer.1.merge", "query": "attn_layer.1.to_qkv", "last": ("attn_layer.1.merge",)}
MAXVIT_SPECS = {
    "PartitionAttentionLayer": {
        "attention": Branch("attn_layer.0", "attn_layer.2", Layout((4, 4)), "windows", **MAXVIT_NAMES, heads=3),
        "mlp": maxvit_mlp,
    }
}

FAMILIES: dict[str, Family] = {}
if find_spec("torchvision") is not None:
    FAMILIES = {
        "torchvision ViT": Family(
            partial(model, "vision_transformer", "VisionTransformer", **VIT), partial(images, 32), VIT_SPECS
        ),
        "torchvision ConvNeXt": Family(convnext, partial(images, 64), CONVNEXT_SPECS, methods=()),
        # 9 x 9 patches, which are padded to 12 x 12.
        "torchvision Swin": Family(partial(swin, 1), partial(images, 36), swin_specs(1)),
        "torchvision Swin V2": Family(partial(swin, 2), partial(images, 32), swin_specs(2)),
        # Its convolutions stay with autograd.
        "torchvision MaxViT": Family(maxvit, partial(images, 32), MAXVIT_SPECS),
    }
