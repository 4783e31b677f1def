"""The families for clips."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from oracle_model import Branch
from torch import Tensor, nn

from keepgrad import Layout

from .family import Family, images
from .transformers import NEW, NORMS, OLD, SIZES, hidden, layer
from .transformers import model as transformers_model


def clips(frames: int, size: int, dtype: torch.dtype, channels_first: bool = False) -> Tensor:
    """Two clips `[2, frames, 3, size, size]`, or with channels before frames."""
    found = images(size, dtype, batch=2 * frames).unflatten(0, (2, frames))
    return found.transpose(1, 2).contiguous() if channels_first else found


def swin() -> nn.Module:
    from torchvision.models.video.swin_transformer import SwinTransformer3d

    sizes = {"patch_size": [2, 4, 4], "embed_dim": 24, "depths": [2], "num_heads": [3], "window_size": [2, 4, 4]}
    return SwinTransformer3d(**sizes, num_classes=5, stochastic_depth_prob=0.0)


def of_clip(shape: torch.Size) -> Layout:
    """The layout of a map `[batch, frames, height, width, channels]`."""
    return Layout(tuple(shape[1:4]))


SWIN = {
    "ShiftedWindowAttention3d": {
        "attention": Branch(
            *("qkv", "proj", Layout((2, 4, 4))), last=("proj",), out="proj", query="qkv", heads=3, functional=True
        )
    },
    "SwinTransformerBlock": {"mlp": Branch("norm2", "stochastic_depth", of_clip, "nhwc", last=("mlp.3",))},
}


def mvit(version: int) -> nn.Module:
    """2 x 4 x 4 positions and a class token; the second block makes them 2 x 2 x 2, and wider."""
    from torchvision.models.video.mvit import MSBlockConfig, MViT

    near, apart = [1, 1, 1], [1, 2, 2]
    first = MSBlockConfig(2, 16, 16 if version == 2 else 24, [3, 3, 3], [3, 3, 3], near, apart)
    last = MSBlockConfig(2, first.output_channels, 24, [3, 3, 3], [3, 3, 3], apart, near)
    new = version == 2
    kinds = dict.fromkeys(("residual_pool", "residual_with_cls_embed", "rel_pos_embed", "proj_after_attn"), new)
    return MViT((16, 16), 4, [first, last], **kinds, dropout=0.0, num_classes=5)


def of_mvit(shape: torch.Size) -> Layout:
    return {33: Layout((2, 4, 4), 1), 9: Layout((2, 2, 2), 1)}[shape[1]]


def mvit_mlp(block: nn.Module) -> Branch:
    return Branch("norm2", "mlp", of_mvit, last=("mlp.3",) if block.project is None else ("mlp.3", "project"))


MVIT = {
    "MultiscaleBlock": {
        "attention": Branch("norm1", "attn.qkv", of_mvit, last=("attn.qkv",)),
        "mlp": mvit_mlp,
    }
}


class FromExact(nn.Module):
    """A projection of the norm's output, from the input that the norm was given itself: no branch has it."""

    def __init__(self, project: nn.Linear, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.project, self.norms = project, (norm,)
        self.weight, self.given = project.weight, None

    def forward(self, x: Tensor) -> Tensor:
        (norm,) = self.norms
        x = F.layer_norm(self.given, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
        return F.linear(x, self.project.weight, self.project.bias)


@contextmanager
def exact_projections(model: nn.Module) -> Iterator[None]:
    """MViT's projections of the residual, which share the norm of a branch, apart from that branch."""
    blocks = [block for block in model.blocks if block.project is not None]
    hooks = []
    for block in blocks:
        norm = block.norm1 if block.proj_after_attn else block.norm2
        block.project = FromExact(block.project, norm)

        def note(module: nn.Module, args: tuple, project: FromExact = block.project) -> None:
            project.given = args[0]

        hooks.append(norm.register_forward_pre_hook(note))
    yield
    for block, hook in zip(blocks, hooks, strict=True):
        block.project = block.project.project
        hook.remove()


CLIP = Layout((2, 4, 4))
VIDEO = {**SIZES, "image_size": 32, "num_frames": 4}
VIDEOMAE, TUBES = {**VIDEO, "patch_size": 8, "tubelet_size": 2}, {**VIDEO, "tubelet_size": [2, 8, 8]}
VIDEOMAE_LAYER = layer(CLIP, NORMS, OLD, "attention.output.dropout output.dropout", "output.dense")
VIVIT_LAYER = layer(Layout((2, 4, 4), 1), NORMS, NEW, "dropout dropout", "mlp.fc2")
VJEPA2 = {
    **{"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "mlp_ratio": 2, "crop_size": 32},
    **{"patch_size": 8, "frames_per_clip": 4, "tubelet_size": 2, "pred_hidden_size": 24, "pred_num_hidden_layers": 1},
    **{"pred_num_attention_heads": 3, "pred_num_mask_tokens": 1, "drop_path_rate": 0.0},
}


def of_vjepa2(shape: torch.Size) -> Layout:
    """The predictor is given the positions of the context and those that it is to predict, as one sequence."""
    return CLIP if shape[1] == 32 else Layout((shape[1],))


VJEPA2_LAYER = layer(
    *(of_vjepa2, "norm1 norm2", ("attention.query", "attention.proj"), "attention mlp", "mlp.fc2"),
)


def vjepa2_inputs(dtype: torch.dtype) -> dict[str, object]:
    """For the predictor, 20 positions of the context, others for each clip, and 12 to predict."""
    order = torch.stack([torch.arange(32).roll(4 * number) for number in range(2)])
    return {
        "pixel_values_videos": clips(4, 32, dtype),
        "context_mask": [order[:, :20].contiguous()],
        "target_mask": [order[:, 20:30].contiguous()],
    }


def predicted(out) -> Tensor:
    return torch.cat([out.last_hidden_state, out.predictor_output.last_hidden_state], 1)


TIMESFORMER = {**VIDEO, "patch_size": 8}
OLD_JOINT = ("attention.attention.qkv", "attention.output.dense")


def timesformer_layer(block: Layout, form: str) -> dict[str, Branch]:
    """The branches of a layer; the positions of its MLP are those of the clip."""
    found = layer(block, NORMS, OLD_JOINT, "attention.output.dropout output.dropout", "output.dense")
    return {"attention": found["attention"], "mlp": replace(found["mlp"], layout=Layout((4, 4, 4), 1), form=form)}


TIMESFORMER_LAYER = timesformer_layer(Layout((4, 4), 1), "4 frames last")
OVER_TIME = Branch(
    *("", "", Layout((4, 1, 1))), last=("output.dense",), out="output.dense", query="attention.qkv", heads=3
)
JOINT_LAYER = timesformer_layer(Layout((4, 4, 4), 1), "4 frames last")
JOINT_LAYER["attention"] = replace(JOINT_LAYER["attention"], form="4 frames last")

FAMILIES: dict[str, Family] = {}
if find_spec("torchvision") is not None:
    # 3 x 5 x 5 patches, which are padded to 4 x 8 x 8.
    FAMILIES["torchvision Swin3D"] = Family(swin, partial(clips, 6, 20, channels_first=True), SWIN)
    for version in (1, 2):
        FAMILIES[f"torchvision MViT {version}"] = Family(
            partial(mvit, version),
            partial(clips, 4, 16, channels_first=True),
            MVIT,
            methods=(),
            apart=exact_projections,
            limit=0.45,
        )
if find_spec("transformers") is not None:
    FAMILIES["HF VideoMAE"] = Family(
        partial(transformers_model, "VideoMAEModel", **VIDEOMAE),
        partial(clips, 4, 32),
        {"VideoMAELayer": VIDEOMAE_LAYER},
        output=hidden,
    )
    FAMILIES["HF ViViT"] = Family(
        partial(transformers_model, "VivitModel", **TUBES),
        partial(clips, 4, 32),
        {"VivitLayer": VIVIT_LAYER},
        output=hidden,
    )
    FAMILIES["HF V-JEPA 2"] = Family(
        partial(transformers_model, "VJEPA2Model", **VJEPA2),
        vjepa2_inputs,
        {"VJEPA2Layer": VJEPA2_LAYER},
        output=predicted,
    )
    FAMILIES["HF TimeSformer"] = Family(
        partial(transformers_model, "TimesformerModel", **TIMESFORMER),
        partial(clips, 4, 32),
        {"TimesformerLayer": TIMESFORMER_LAYER, "TimeSformerAttention": {"attention": OVER_TIME}},
        output=hidden,
    )
    FAMILIES["HF TimeSformer, joint"] = Family(
        partial(transformers_model, "TimesformerModel", **TIMESFORMER, attention_type="joint_space_time"),
        partial(clips, 4, 32),
        {"TimesformerLayer": JOINT_LAYER},
        output=hidden,
    )
