"""timm's families with windows, and those with convolutions."""

from __future__ import annotations

from functools import partial

from oracle_model import Branch

from keepgrad import Layout

from .family import Family, images
from .timm import timm_model


def of_map(shape) -> Layout:
    """The layout of a map `[batch, height, width, channels]`."""
    return Layout(tuple(shape[1:3]))


def windows(side: int, heads: int, *others: str) -> dict[str, Branch]:
    """The attention of a module that is called with windows. `others` are more layers in it."""
    names = {"last": ("proj", *others), "out": "proj", "query": "qkv"}
    return {"attention": Branch("", "", Layout((side, side)), **names, heads=heads)}


def mlp_of_rows(entrance: str, last: tuple[str, ...], side: int) -> dict[str, Branch]:
    return {"mlp": Branch(entrance, "drop_path2", Layout((side, side)), last=last)}


CONVNEXT = {"depths": (1, 1, 2, 1), "dims": (8, 12, 16, 20), "ls_init_value": 0.5}
CONVNEXT_SPECS = {
    "ConvNeXtBlock": {"mlp": Branch("norm", "drop_path", of_map, "nhwc", exit_form="nchw", last=("mlp.fc2",))}
}
SWIN = {
    "img_size": 32,
    "patch_size": 4,
    "embed_dim": 24,
    "depths": (2,),
    "num_heads": (3,),
    "window_size": 4,
    "drop_path_rate": 0.0,
}

FAMILIES: dict[str, Family] = {
    "timm ConvNeXt": Family(
        partial(timm_model, "convnext_tiny", **CONVNEXT), partial(images, 64), CONVNEXT_SPECS, methods=()
    ),
    "timm ConvNeXt V2": Family(
        partial(timm_model, "convnextv2_tiny", **{**CONVNEXT, "ls_init_value": None}),
        partial(images, 64),
        CONVNEXT_SPECS,
        methods=(),
    ),
    "timm Swin": Family(
        partial(timm_model, "swin_tiny_patch4_window7_224", **SWIN),
        partial(images, 32),
        {"WindowAttention": windows(4, 3), "SwinTransformerBlock": mlp_of_rows("norm2", ("mlp.fc2",), 8)},
    ),
    "timm Swin V2": Family(
        partial(timm_model, "swinv2_tiny_window8_256", **SWIN),
        partial(images, 32),
        {
            "WindowAttention": windows(4, 3, "cpb_mlp.0", "cpb_mlp.2"),
            "SwinTransformerV2Block": mlp_of_rows("mlp", (), 8),
        },
    ),
}
