"""Mask R-CNN and Cascade Mask R-CNN, built from torchvision's parts on a timm backbone.

The backbone has four stages. The features of each go through their own norm into a feature pyramid. A plain ViT has
only one resolution: its last features are resized to four resolutions, as in the simple feature pyramid of ViTDet.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from timm.layers import LayerNorm2d
from timm.models import is_model_in_modules
from torch import Tensor, nn
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.rpn import RPNHead
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

from ... import models
from ..._torch import tree_map_only
from ...errors import ConfigError
from ..config import DETECTORS
from .cascade import CascadeHeads

__all__ = ["Backbone", "Detector", "detector"]

MULTI_SCALE = tuple(range(480, 801, 32))
POOLED = 7  # side of the feature map that the box heads get for a region


class Backbone(nn.Module):
    """A timm model with a feature pyramid: four maps of `out_channels` channels, strides 4 to 32, and a pooled one."""

    def __init__(self, name: str, channels: int = 256, **options: Any) -> None:
        super().__init__()
        is_plain_vit = is_model_in_modules(name, ("vision_transformer", "deit"))
        more: dict[str, Any] = {"dynamic_img_size": True, "out_indices": [-1]} if is_plain_vit else {}
        if is_model_in_modules(name, ("swin_transformer", "swin_transformer_v2")):
            more = {"strict_img_size": False}
        body: Any = models.create(name, features_only=True, **{**more, **options})
        widths: list[int] = body.feature_info.channels()
        self.body = body
        self.scales = None
        if is_plain_vit:
            self.scales = _simple_pyramid(widths[-1])
            widths = widths * 4
        if len(widths) != 4:
            raise ConfigError(f"{name} has features of {len(widths)} resolutions; a detector needs four")
        self.norms = nn.ModuleList(LayerNorm2d(width) for width in widths)
        self.pyramid = FeaturePyramidNetwork(widths, channels, LastLevelMaxPool())
        self.out_channels = channels
        self.channels_last = str(getattr(body, "output_fmt", "")).endswith("NHWC")

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        maps = self.body(images)
        if self.channels_last:
            maps = [own.permute(0, 3, 1, 2) for own in maps]
        if self.scales is not None:
            maps = [scale(maps[-1]) for scale in self.scales]
        normed = (norm(own) for norm, own in zip(self.norms, maps, strict=True))
        return self.pyramid(OrderedDict((str(number), own) for number, own in enumerate(normed)))


class Detector(MaskRCNN):
    """torchvision's Mask R-CNN, with the methods that training calls for checkpointing and for layer decay."""

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        for module in self.backbone.body.modules():
            if hasattr(module, "grad_checkpointing"):
                module.grad_checkpointing = enable
        # The stages already checkpoint their blocks, so the container of the stages must not do it again.
        if hasattr(self.backbone.body, "grad_checkpointing"):
            self.backbone.body.grad_checkpointing = False

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Patterns that assign parameters to layers, in order. Everything after the backbone is the last layer."""
        body = r"^backbone\.body\."
        stages = [
            (body + r"(?:stages|layers)_(\d+)\.downsample", (0,)),
            (body + r"(?:stages|layers)_(\d+)\.blocks\.(\d+)", None),
        ]
        stem = body + r"(?:stem|patch_embed|model\.(?:patch_embed|pos_embed|cls_token))"
        return {"stem": stem, "blocks": [*stages, (body + r"model\.blocks\.(\d+)", None)]}


def detector(
    kind: str,
    backbone: str,
    classes: int,
    *,
    sizes: Sequence[int] = MULTI_SCALE,
    max_size: int = 1333,
    channels: int = 256,
    width: int = 1024,
    anchor: int = 32,
    rois: int = 512,
    backbone_options: dict[str, Any] | None = None,
) -> Detector:
    """A detector for `classes` classes, the background not counted.

    Args:
        kind: one of `DETECTORS`.
        backbone: a timm model: any ConvNeXt or Swin, any other with four stages, or a ViT.
        classes: the number of classes.
        sizes: lengths of the shorter side. Training takes one at random, evaluation the last.
        max_size: the maximum length of the longer side.
        channels: number of channels of the feature pyramid and the mask head.
        width: number of features in the box heads.
        anchor: side of the smallest anchors, in pixels. It doubles from level to level.
        rois: number of regions per image that the heads are trained on.
        backbone_options: keyword arguments to create the backbone with.

    Raises:
        ConfigError: if there is no such detector or backbone.
    """
    if kind not in DETECTORS:
        raise ConfigError(f"detector {kind!r} is not known; use one of {', '.join(DETECTORS)}")
    body = Backbone(backbone, channels, **(backbone_options or {}))
    model = Detector(
        body,
        min_size=tuple(sizes),
        max_size=max_size,
        rpn_anchor_generator=AnchorGenerator(tuple((anchor * 2**n,) for n in range(5)), ((0.5, 1.0, 2.0),) * 5),
        box_head=TwoMLPHead(channels * POOLED**2, width),
        box_predictor=FastRCNNPredictor(width, classes + 1),
        box_batch_size_per_image=rois,
        mask_head=MaskRCNNHeads(channels, (channels,) * 4, 1),
        mask_predictor=MaskRCNNPredictor(channels, channels, classes + 1),
    )
    if kind == "cascade_mask_rcnn":
        model.roi_heads = CascadeHeads(model.roi_heads, channels, classes + 1, width)
    for module in model.modules():
        if isinstance(module, (RPNHead, FastRCNNPredictor)):
            module.register_forward_hook(_in_full_precision)
    return model


def _in_full_precision(module: nn.Module, inputs: Any, output: Any) -> Any:
    """Convert box offsets to float32. Boxes get the dtype of the offsets, and bf16 lacks most integers above 256."""
    return tree_map_only(Tensor, lambda t: t.float() if t.dtype.itemsize < 4 else t, output)


def _simple_pyramid(width: int) -> nn.ModuleList:
    """Layers that turn a feature map of stride 16 into maps of strides 4, 8, 16 and 32."""
    twice = nn.Sequential(
        nn.ConvTranspose2d(width, width, 2, 2), LayerNorm2d(width), nn.GELU(), nn.ConvTranspose2d(width, width, 2, 2)
    )
    return nn.ModuleList([twice, nn.ConvTranspose2d(width, width, 2, 2), nn.Identity(), nn.MaxPool2d(2)])
