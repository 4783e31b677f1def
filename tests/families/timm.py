"""timm's families."""

from __future__ import annotations

from functools import partial

import timm
from oracle_model import Branch
from torch import nn

from keepgrad import Layout

from .family import Family, images, tokens


def timm_model(name: str, **options) -> nn.Module:
    return timm.create_model(name, num_classes=5, **options)


def vit_specs(layout: Layout, heads: int) -> dict[str, dict[str, Branch]]:
    """Those of a block with timm's names."""
    attention = Branch(
        "norm1", "drop_path1", layout, last=("attn.proj",), out="attn.proj", query="attn.qkv", heads=heads
    )
    return {"Block": {"attention": attention, "mlp": Branch("norm2", "drop_path2", layout, last=("mlp.fc2",))}}


SMALL_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}

FAMILIES: dict[str, Family] = {
    "timm ViT": Family(
        partial(timm_model, "vit_tiny_patch16_224", **SMALL_VIT, init_values=0.5, qk_norm=True),
        partial(images, 32),
        vit_specs(tokens(4, 1), 3),
    ),
}
