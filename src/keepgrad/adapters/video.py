"""Adapters for video models with layers of their own: torchvision's Swin3D and MViT, transformers' V-JEPA 2 and
TimeSformer.

Other video layers are the same as those for images: transformers' VideoMAE and ViViT use ViT layers
(`transformers.py`), and the blocks of Swin3D are those of Swin (`torchvision.py`). The shape of the positions is
`(frames, height, width)`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.attention import Part, Places, add_dense
from .items import Attention, Unsupported, path_of
from .modules import is_plain
from .registry import Adapter, RunBranch, adapts
from .timm_windows import probe
from .torchvision import MODELS, SwinAttention
from .transformers import TIMESFORMER, VJEPA2, EncoderLayer, arguments, attention, check_call, classes


@adapts(f"{MODELS}video.swin_transformer.ShiftedWindowAttention3d")
class Swin3dAttention(SwinAttention):
    """A window is never larger than the map. The bias depends on the actual size of the window."""

    has_frames = True

    def scores(self, m: Any) -> dict[str, Any]:
        return {"biases": [(add_dense(), [partial(m.get_relative_position_bias, m.window_size)])]}

    def window(self, m: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(map(min, m.window_size, shape))

    def options(self, m: Any, size: tuple[int, ...]) -> dict[str, Any]:
        return {"bias_tensors": [m.get_relative_position_bias(list(size))]}


@adapts(f"{MODELS}video.mvit.MultiscaleBlock")
class MultiscaleBlock(Adapter):
    """MViT. Its attention pools positions after it computes q, k and v, so not all of it can be a branch.

    The norm and the projection to q, k and v are one branch, and the MLP is the other. The pooling, the softmax and the
    layer after it are left to autograd.
    """

    has_frames = True

    def modules(self, m: Any) -> list[nn.Module]:
        return [m, m.attn]

    def branches(self, m: Any) -> dict[str, Any]:
        if hasattr(m, "pool_q"):
            return {"attention": "it pools positions; only the projection to q, k and v and the MLP are reduced"}
        probe(m, "pool_skip", "proj_after_attn", "project")
        if m.needs_transposal:
            raise Unsupported("its norms are batch norms, which work over positions")
        # A wrapper, for example for checkpointing, has the attention's attributes but another forward.
        if not is_plain(m.attn) or path_of(m.attn) != f"{MODELS}video.mvit.MultiscaleAttention":
            raise Unsupported("its attention has hooks, or a forward of its own")
        return {"attention": [m.norm1, m.attn.qkv], "mlp": [m.norm2, m.mlp, m.stochastic_depth]}

    def forward(self, m: Any, run: RunBranch, x: Tensor, thw: tuple[int, int, int]) -> tuple[Tensor, Any]:
        qkv = run("attention", x, None, thw)
        out, pooled = type(m.attn).forward(Projected(m.attn, qkv), x, thw)
        skip = x if m.project is None or not m.proj_after_attn else m.project(m.norm1(x))
        skip = skip if m.pool_skip is None else m.pool_skip(skip, thw)[0]
        x = skip + m.stochastic_depth(out)
        residual = x if m.project is None or m.proj_after_attn else m.project(m.norm2(x))
        return run("mlp", x, residual, pooled), pooled


class Projected:
    """Stands in for an attention module. Its `qkv` returns a given result; all other attributes are the module's."""

    def __init__(self, module: nn.Module, qkv: Tensor) -> None:
        self.module = module
        self.qkv = lambda x: qkv

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


@adapts(*classes(VJEPA2, "Layer"))
class Vjepa2Layer(EncoderLayer):
    """V-JEPA 2, with rotary embeddings for frames, rows and columns. `position_mask` gives the position of each row."""

    known = ("position_mask",)

    def attention(self, m: Any) -> Attention:
        inner = m.attention

        def turn(rows: Tensor, places: Places, *numbers: Tensor) -> Tensor:
            picked = [places.pick(one, -1) for one in numbers]
            return inner.apply_rotary_embeddings(rows, [one.squeeze(2) if one.dim() == 4 else one for one in picked])

        return attention(m, inner, turn=Part(turn, 3))

    def layer(self, m: Any, run: RunBranch, *args: Any, **kwargs: Any) -> Any:
        return super().layer(m, run, *args, **kwargs), None

    def options(self, m: Any, attn: Any, x: Tensor, given: dict[str, Any]) -> dict[str, Any]:
        mask = given.get("position_mask")
        numbers = attn.get_position_ids(x, masks=mask)
        if mask is not None:  # [batch, heads, n], equal for all heads, becomes [batch, 1, 1, n], like a mask
            numbers = [one[:, :1].unsqueeze(1) for one in numbers]
        return {"attn_mask": None, "rope": tuple(numbers), "given": {"position_mask": mask}}


@adapts(*classes(TIMESFORMER, "Layer"))
class TimesformerLayer(EncoderLayer):
    """TimeSformer: attention over the frames at each place, then over the places of each frame, then the MLP.

    The attention over frames is a block of its own; the norm before it and the layer after it are not part of that
    block. Each place is a sample there, so its mask is over `(frames,)`. In the attention over places each frame is a
    sample, so its mask is over `(height, width)`.
    """

    has_frames = True

    def modules(self, m: Any) -> list[nn.Module]:
        return [m, m.temporal_attention] if m.attention_type == "divided_space_time" else [m]

    def branches(self, m: Any) -> dict[str, Any]:
        return super().branches(m) if hasattr(m, "intermediate") else {"attention": [attention(m, m)]}

    def covers(self, m: Any) -> bool:
        return {name.removeprefix("temporal_") for name, _ in m.named_children()} <= PARTS

    def layer(self, m: Any, run: RunBranch, *args: Any, **kwargs: Any) -> Any:
        given = arguments(m, args, kwargs)
        x = given.pop("hidden_states")
        check_call(m, given, ())
        if not hasattr(m, "intermediate"):
            return (run("attention", x, None, (x.shape[1], 1, 1), given={}),)
        if m.attention_type == "space_only":
            return super().layer(m, run, x)
        frames, wide = m.config.num_frames, m.config.image_size // m.config.patch_size
        token, rows = x[:, :1], x[:, 1:].unflatten(1, (-1, frames))  # [batch, places, frames, channels]
        places = rows.shape[1]
        # Dropout must draw its noise in the model's order. So if there is dropout, rows keep that order, as a sequence.
        has_dropout = any(one.p > 0 for one in (m.intermediate.dropout, m.output.dropout, m.attention.output.dropout))
        shape = (places * frames,) if has_dropout else (frames, places // wide, wide)

        def laid(rows: Tensor) -> Tensor:
            return rows if has_dropout else rows.transpose(1, 2)

        if m.attention_type == "joint_space_time":
            x = torch.cat([token, laid(rows).flatten(1, 2)], 1)
            x = run("attention", x, x, shape, given={})
        else:
            attended = m.drop_path(m.temporal_attention(m.temporal_layernorm(rows.flatten(0, 1)))[0])
            rows = (rows + m.temporal_dense(attended.unflatten(0, (-1, places)))).transpose(1, 2)
            maps = torch.cat([token.unsqueeze(1).expand(-1, frames, -1, -1), rows], 2).flatten(0, 1)
            out = run("attention", maps, None, (places // wide, wide), given={}).unflatten(0, (-1, frames))
            rows = (rows + out[:, :, 1:]).transpose(1, 2)
            x = torch.cat([token + out[:, :, 0].mean(1, True), laid(rows).flatten(1, 2)], 1)
        x = run("mlp", x, x, shape)
        if not has_dropout:
            rows = x[:, 1:].unflatten(1, (frames, places)).transpose(1, 2)
            x = torch.cat([x[:, :1], rows.flatten(1, 2)], 1)
        return (x,)


PARTS = {
    *("layernorm_before", "layernorm_after", "layernorm", "attention", "intermediate", "output", "drop_path", "dense")
}
"""The names of the parts of a TimeSformer layer (without "temporal_"), and of the parts of its attention."""
