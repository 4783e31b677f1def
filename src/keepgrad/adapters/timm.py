"""Adapters for timm: ViT and ConvNeXt, and the norms and MLPs that many of its models share."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..ops.stages import Linear, Pointwise
from ..ops.stages import gelu as gelu_stage
from .items import Attention, LinearOf, Scale, Step, Unsupported, attention, describes
from .modules import (
    STEPS,
    drop_path,
    gate,
    global_response_norm,
    layer_norm,
    rms_norm,
    rows_of_map,
    side_by_side,
    steps_for,
    steps_of,
)
from .position_wise import MLPS, maps_of, rows_of, steps_of_mlp
from .registry import Adapter, RunBranch, adapts

NORMS, MLP = "timm.layers.norm.", "timm.layers.mlp."

STEPS["timm.layers.drop.DropPath"] = drop_path
STEPS["timm.layers.activations.GELU"] = lambda module: [Step(gelu_stage("none")[0])]
STEPS["timm.layers.activations.GELUTanh"] = lambda module: [Step(gelu_stage("tanh")[0])]
MLPS.update(f"{MLP}{name}" for name in ("Mlp", "GluMlp", "SwiGLU", "ConvMlp"))


@steps_for(f"{NORMS}LayerNorm", f"{NORMS}LayerNorm2d", f"{NORMS}RmsNorm", f"{NORMS}RmsNorm2d")
def _norm(module: Any) -> list[Step]:
    """The 2d versions differ only in which dimension holds the channels."""
    if getattr(module, "_fast_norm", False):
        return [rows_of_map(module)]
    return rms_norm(module) if "Rms" in type(module).__name__ else layer_norm(module)


@steps_for(f"{NORMS}SimpleNorm2d", f"{NORMS}LayerNorm2dFp32", f"{NORMS}RmsNorm2dFp32", f"{NORMS}SimpleNorm2dFp32")
def _norm_of_map(module: Any) -> list[Step]:
    return [rows_of_map(module)]


@steps_for(f"{MLP}Mlp")
def _mlp(mlp: Any) -> list[Step]:
    return steps_of_mlp(mlp.fc1, mlp.act, mlp.drop1, mlp.norm, mlp.fc2, mlp.drop2)


@steps_for(f"{MLP}ConvMlp")
def _conv_mlp(mlp: Any) -> list[Step]:
    return steps_of_mlp(mlp.fc1, mlp.norm, mlp.act, mlp.drop, mlp.fc2)


@steps_for(f"{MLP}GluMlp")
def _glu_mlp(mlp: Any) -> list[Step]:
    return steps_of_mlp(mlp.fc1, gate(mlp.act, not mlp.gate_last), mlp.drop1, mlp.norm, mlp.fc2, mlp.drop2)


@steps_for(f"{MLP}SwiGLU")
def _swiglu(mlp: Any) -> list[Step]:
    hidden = side_by_side(mlp.fc1_g, mlp.fc1_x)
    return steps_of_mlp(hidden, gate(mlp.act, True), mlp.drop1, mlp.norm, mlp.fc2, mlp.drop2)


@steps_for(f"{MLP}GlobalResponseNormMlp")
def _response_mlp(mlp: Any) -> list[Step]:
    return steps_of_mlp(mlp.fc1, mlp.act, mlp.drop1, global_response_norm(mlp.grn), mlp.fc2, mlp.drop2)


@describes("timm.layers.attention.Attention")
def _attention(m: Any) -> Attention:
    return Attention(
        m,
        project=[m.qkv],
        heads=m.num_heads,
        q_norm=m.q_norm,
        k_norm=m.k_norm,
        gate=getattr(m, "gate", None),
        gate_norm=getattr(m, "norm", None),
        dropout=lambda: m.attn_drop.p if m.training else 0.0,
        out=[m.proj, m.proj_drop],
    )


@adapts("timm.models.vision_transformer.Block")
class VisionTransformerBlock(Adapter):
    """ViT, DeiT and others with the same block."""

    def branches(self, m: Any) -> dict[str, Any]:
        return {
            "attention": [m.norm1, attention(m.attn), m.ls1, m.drop_path1],
            "mlp": [m.norm2, m.mlp, m.ls2, m.drop_path2],
        }


@adapts("timm.models.convnext.ConvNeXtBlock")
class ConvNeXtBlock(Adapter):
    """ConvNeXt and ConvNeXt V2. The depthwise convolution mixes positions, so it is left to autograd."""

    gives_rows = False

    def branches(self, m: Any) -> dict[str, Any]:
        return {"mlp": [m.norm, m.mlp, Scale(lambda: m.gamma), m.drop_path]}

    def forward(self, m: Any, run: RunBranch, x: Tensor) -> Tensor:
        mixed = m.conv_dw(x)
        shape = mixed.shape[2:]
        return maps_of(run("mlp", rows_of(mixed), rows_of(m.shortcut(x)), shape), shape)


@adapts("timm.models.convnext.ConvNeXtStage")
class ConvNeXtDownsample(Adapter):
    """A norm and a convolution whose patches do not overlap. If each patch is one position, it is position-wise."""

    gives_rows = False

    def modules(self, m: Any) -> list[nn.Module]:
        return [m.downsample] if isinstance(m.downsample, nn.Sequential) and len(m.blocks) else []

    def branches(self, m: Any) -> dict[str, Any]:
        return {"downsample": [Patches(*m)]}

    def forward(self, m: Any, run: RunBranch, x: Tensor) -> Tensor:
        (tall, wide), (height, width) = m[1].stride, x.shape[2:]
        shape = (height // tall, width // wide)
        pixels = x[:, :, : shape[0] * tall, : shape[1] * wide].permute(0, 2, 3, 1)
        patches = pixels.unflatten(2, (shape[1], wide)).unflatten(1, (shape[0], tall)).transpose(2, 3)
        return maps_of(run("downsample", patches.flatten(3).flatten(1, 2), None, shape), shape)


class Patches(nn.Module):
    """A norm and a convolution, applied to rows that are flattened patches.

    Both belong to the model: they are kept in a tuple, so they are not registered here as submodules.
    """

    parts: tuple[Any, Any]

    def __init__(self, norm: nn.Module, conv: nn.Module) -> None:
        super().__init__()
        self.parts = (norm, conv)

    def forward(self, x: Tensor) -> Tensor:
        norm, conv = self.parts
        tall, wide = conv.stride
        maps = x.flatten(0, 1).view(-1, tall, wide, conv.in_channels).permute(0, 3, 1, 2)
        return conv(norm(maps)).flatten(1).view(*x.shape[:2], -1)


@steps_for(f"{__name__}.Patches")
def _patches(module: Any) -> list[Step]:
    norm, conv = module.parts
    is_conv = type(conv).forward is nn.Conv2d.forward and "forward" not in vars(conv)
    if not is_conv or conv.kernel_size != conv.stride or conv.groups != 1:
        raise Unsupported("the patches of the downsampling convolution overlap, or it has hooks")
    if conv.padding != (0, 0) or conv.dilation != (1, 1):
        raise Unsupported("the downsampling convolution is padded or dilated")
    ((stage, refs),) = steps_of(norm)
    if not isinstance(stage, Pointwise):
        raise Unsupported(f"{type(norm).__name__} is not known")
    fn, channels = stage.fn, conv.in_channels

    def per_pixel(x: Tensor, *tensors: Tensor) -> Tensor:
        return fn(x.unflatten(-1, (-1, channels)).flatten(1, 2), *tensors).view(x.shape)

    weight = LinearOf(lambda: conv.weight.permute(0, 2, 3, 1).flatten(1), lambda: conv.bias)
    (linear,) = steps_of(weight)
    assert isinstance(linear.stage, Linear)
    return [Step(Pointwise(per_pixel), refs), linear]
