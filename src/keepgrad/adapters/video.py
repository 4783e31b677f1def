"""Families for clips whose layers are not those of images: torchvision's Swin3D and MViT, transformers' V-JEPA 2.

transformers' VideoMAE and ViViT are layers of a ViT (`transformers.py`), the blocks of Swin3D those of Swin
(`torchvision.py`). Positions are `(frames, height, width)`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from ..ops.attention import Part, Places, add_dense
from .items import Attention, Unsupported, path_of
from .modules import is_plain
from .registry import Adapter, RunBranch, adapts
from .timm_windows import probe
from .torchvision import MODELS, SwinAttention
from .transformers import VJEPA2, EncoderLayer, attention, classes


@adapts(f"{MODELS}video.swin_transformer.ShiftedWindowAttention3d")
class Swin3dAttention(SwinAttention):
    """A window is never larger than the map, and the bias is that of the window."""

    has_frames = True

    def scores(self, m: Any) -> dict[str, Any]:
        return {"biases": [(add_dense(), [partial(m.get_relative_position_bias, m.window_size)])]}

    def window(self, m: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(map(min, m.window_size, shape))

    def options(self, m: Any, size: tuple[int, ...]) -> dict[str, Any]:
        return {"bias_tensors": [m.get_relative_position_bias(list(size))]}


@adapts(f"{MODELS}video.mvit.MultiscaleBlock")
class MultiscaleBlock(Adapter):
    """MViT's attention pools its positions between its projections, so the softmax, the pooling and the layer after it
    stay with autograd. The norm and the projection to q, k and v before it are one branch, the MLP the other.
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
        # A wrapper, as of checkpointing, has the attention's attributes, but not its forward.
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
    """An attention module whose projection to q, k and v has been done already; all else is the module's own."""

    def __init__(self, module: nn.Module, qkv: Tensor) -> None:
        self.module = module
        self.qkv = lambda x: qkv

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


@adapts(*classes(VJEPA2, "Layer"))
class Vjepa2Layer(EncoderLayer):
    """With rotary positions of frames, rows and columns; a mask says which positions the rows are of."""

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
        if mask is not None:  # [batch, heads, n], the same for all heads; as [batch, 1, 1, n], as masks are
            numbers = [one[:, :1].unsqueeze(1) for one in numbers]
        return {"attn_mask": None, "rope": tuple(numbers), "given": {"position_mask": mask}}
