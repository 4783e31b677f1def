"""Adapters for timm's variants of the ViT.

They have rotary or relative positions, norms after the branches, or parallel branches. MLP-Mixer and SAM are here too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._torch import has_hooks
from ..ops.attention import Part, Places
from ..ops.stages import Pointwise
from .items import Attention, LinearOf, Scale, Step, Unsupported, attention, describes, path_of
from .modules import reads, steps_for, steps_of
from .position_wise import NotRows
from .program import compile_branch
from .registry import PATCHES, Adapter, RunBranch, adapts
from .timm import VisionTransformerBlock

VIT = "timm.models.vision_transformer."

# The images of a batch may have grids of different shapes. If the shape is not known, patches count as one long row.
PATCHES["timm.models.naflexvit.NaFlexEmbeds"] = lambda m, out: out[1] or (out[0].shape[1] - m.num_prefix_tokens,)


def dropout_of(m: Any) -> Callable[[], float]:
    """A function that returns the current dropout probability of an attention."""
    return lambda: m.attn_drop.p if m.training else 0.0


def plain_linear(layer: Any) -> Any:
    """Returns the layer, whose weight is then used without calling it. Raises Unsupported if a call would do more."""
    if path_of(layer) != "torch.nn.modules.linear.Linear" or "forward" in vars(layer) or has_hooks(layer):
        raise Unsupported(f"{type(layer).__name__} is not a plain linear layer, or has hooks")
    return layer


def projections(m: Any) -> list[Any]:
    """The layers that make q, k and v: three, or a joint one. Its biases may be separate parameters."""
    if m.qkv is None:
        return [m.q_proj, m.k_proj, m.v_proj]
    if getattr(m, "q_bias", None) is None:
        return [m.qkv]
    layer = plain_linear(m.qkv) if m.qkv_bias_separate else m.qkv
    return [LinearOf(lambda: layer.weight, lambda: torch.cat((m.q_bias, m.k_bias, m.v_bias)))]


@describes("timm.models.eva.EvaAttention", "timm.layers.attention.AttentionRope")
def _rotary(m: Any) -> Attention:
    def call(x: Tensor, rope: tuple[Tensor, Tensor] | None = None, **options: Any) -> Tensor:
        return m(x, rope=None if rope is None else torch.cat(rope, -1)[..., m.num_prefix_tokens :, :], **options)

    return Attention(
        m,
        project=projections(m),
        heads=m.num_heads,
        kv_heads=getattr(m, "num_kv_heads", None),
        q_norm=m.q_norm,
        k_norm=m.k_norm,
        rotate_half=getattr(m, "rotate_half", False),
        gate=getattr(m, "gate", None),
        gate_norm=m.norm,
        dropout=dropout_of(m),
        out=[m.proj, m.proj_drop],
        call=call,
    )


def sin_and_cos(rope: Tensor | None, prefix: int = 0) -> tuple[Tensor, Tensor] | None:
    """Splits timm's rotary embedding into sines and cosines. The first `prefix` positions are not rotated."""
    if rope is None:
        return None
    sin, cos = rope.chunk(2, -1)
    if prefix == 0:
        return sin, cos
    return F.pad(sin, (0, 0, prefix, 0)), F.pad(cos, (0, 0, prefix, 0), value=1.0)


@adapts("timm.models.eva.EvaBlock")
class EvaBlock(Adapter):
    """EVA, EVA-02, DINOv3, Perception Encoder, NaFlexVit with rotary embeddings."""

    def branches(self, m: Any) -> dict[str, Any]:
        return {
            "attention": [m.norm1, attention(m.attn), Scale(lambda: m.gamma_1), m.drop_path1],
            "mlp": [m.norm2, m.mlp, Scale(lambda: m.gamma_2), m.drop_path2],
        }

    def forward(
        self,
        m: Any,
        run: RunBranch,
        x: Tensor,
        rope: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        turned = sin_and_cos(rope, m.attn.num_prefix_tokens)
        x = run("attention", x, x, rope=turned, attn_mask=attn_mask, is_causal=is_causal)
        return run("mlp", x, x)


class PostNorm(Adapter):
    """A block with a norm after each branch instead of before it."""

    def branches(self, m: Any) -> dict[str, Any]:
        return {
            "attention": [attention(m.attn), m.norm1, m.drop_path1],
            "mlp": [m.mlp, m.norm2, m.drop_path2],
        }


@adapts("timm.models.eva.EvaBlockPostNorm")
class EvaBlockPostNorm(PostNorm):
    """The largest EVA-02 CLIP model."""

    forward = EvaBlock.forward


adapts(f"{VIT}ResPostBlock")(PostNorm)


@describes("timm.models.beit.Attention")
def _beit(m: Any) -> Attention:
    has_table = m.relative_position_bias_table is not None
    return Attention(
        m,
        project=projections(m),
        heads=m.num_heads,
        bias=m._get_rel_pos_bias if has_table else None,
        dropout=dropout_of(m),
        out=[m.proj, m.proj_drop],
        call=lambda x, attn_mask: m(x, shared_rel_pos_bias=attn_mask),
    )


@adapts("timm.models.beit.Block")
class BeitBlock(Adapter):
    """BEiT, BEiT v2. If all blocks share a bias, the model passes it in the call. It is handled like a mask, and gets
    its gradient.
    """

    branches = EvaBlock.branches

    def forward(self, m: Any, run: RunBranch, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        x = run("attention", x, x, attn_mask=shared_rel_pos_bias)
        return run("mlp", x, x)


@describes("timm.models.vision_transformer_relpos.RelPosAttention")
def _relative(m: Any) -> Attention:
    return Attention(
        m,
        project=[m.qkv],
        heads=m.num_heads,
        q_norm=m.q_norm,
        k_norm=m.k_norm,
        bias=None if m.rel_pos is None else m.rel_pos.get_bias,
        dropout=dropout_of(m),
        out=[m.proj, m.proj_drop],
        call=lambda x, attn_mask: m(x, shared_rel_pos=attn_mask),
    )


def with_shared_positions(
    self: Adapter, m: Any, run: RunBranch, x: Tensor, shared_rel_pos: Tensor | None = None
) -> Tensor:
    """A forward with a bias that all blocks share. A block with a bias of its own ignores the shared one."""
    x = run("attention", x, x, attn_mask=shared_rel_pos if m.attn.rel_pos is None else None)
    return run("mlp", x, x)


@adapts("timm.models.vision_transformer_relpos.RelPosBlock")
class RelPosBlock(VisionTransformerBlock):
    """ViTs with relative positions."""

    forward = with_shared_positions


@adapts("timm.models.vision_transformer_relpos.ResPostRelPosBlock")
class ResPostRelPosBlock(PostNorm):
    """ViTs with relative positions and norms after the branches."""

    forward = with_shared_positions


def channels_of(layer: Any, start: int, stop: int) -> LinearOf:
    """A linear layer that computes only the output channels `start` to `stop` of another."""
    return LinearOf(lambda: layer.weight[start:stop], lambda: None if layer.bias is None else layer.bias[start:stop])


@adapts(f"{VIT}ParallelScalingBlock")
class ParallelScalingBlock(Adapter):
    """Attention and MLP in parallel. They share the norm and the first layer, and in some models the last layer."""

    gives_rows = False

    def attend(self, m: Any, layer: Any, project: list[LinearOf], out: list[Any]) -> Attention:
        return Attention(
            layer,
            project=project,
            heads=m.num_heads,
            q_norm=m.q_norm,
            k_norm=m.k_norm,
            dropout=dropout_of(m),
            out=out,
        )

    def branches(self, m: Any) -> dict[str, Any]:
        layer = plain_linear(m.in_proj)
        width = m.in_split[1]
        first, *project = (channels_of(layer, *edge) for edge in pairwise([0, *accumulate(m.in_split)]))
        if m.mlp_bias is not None:
            first = LinearOf(first.weight, lambda: m.mlp_bias)
        if m.out_proj is None:
            lasts = [m.attn_out_proj, m.mlp_out_proj]
        else:
            joint = plain_linear(m.out_proj)
            lasts = [
                LinearOf(lambda: joint.weight[:, :width], lambda: joint.bias),
                LinearOf(lambda: joint.weight[:, width:]),
            ]
        core = self.attend(m, layer, project, lasts[:1])
        return {
            "attention": [m.in_norm, replace(core, call=by_its_stages(core)), m.ls],
            "mlp": [m.in_norm, first, m.mlp_act, m.mlp_drop, lasts[1], m.ls],
        }

    def forward(
        self, m: Any, run: RunBranch, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        attended = run("attention", x, None, attn_mask=attn_mask, is_causal=is_causal)
        return x + m.drop_path(run("mlp", x, attended))


def by_its_stages(given: Attention) -> Callable[..., Tensor]:
    """A function to call for an attention that is not a module of its own: it runs the stages of its description."""

    def call(x: Tensor, **options: Any) -> Tensor:
        try:
            return compile_branch([given]).bind(**options).plain(x)
        except Unsupported:
            raise NotRows from None

    return call


DROPS_TWICE = "differential attention drops entries of its two matrices one after the other"


def differential(m: Any, layer: Any, project: Sequence[LinearOf], out: list[Any]) -> Attention:
    """Differential attention: the difference of two attentions that share their values.

    It is described as one attention with twice the heads, in which each head of v occurs twice.
    """
    query, key, value = project

    def twice(rows: Tensor | None) -> Any:
        return None if rows is None else rows.unflatten(0, (m.num_heads, -1)).repeat_interleave(2, 0).flatten(0, 1)

    return Attention(
        layer,
        project=[query, key, LinearOf(lambda: twice(value.weight()), lambda: twice(value.bias()))],
        heads=2 * m.num_heads,
        q_norm=m.q_norm,
        k_norm=m.k_norm,
        out=[difference(m), *out],
    )


def difference(m: Any) -> Step:
    """For each pair of heads, subtracts a multiple of the second output from the first, and normalizes the result."""
    ((norm, refs),) = steps_of(m.sub_norm)
    if not isinstance(norm, Pointwise):
        raise Unsupported(f"{type(m.sub_norm).__name__} is not known")

    def fn(x: Tensor, share: Tensor, *tensors: Tensor) -> Tensor:
        first, second = x.unflatten(-1, (m.num_heads, 2, -1)).unbind(-2)
        return (norm.fn(first - share.type_as(x) * second, *tensors) * (1 - m.lambda_init)).flatten(-2)

    return Step(Pointwise(fn), (m._compute_lambda, *refs))


@adapts(f"{VIT}DiffParallelScalingBlock")
class DiffParallelScalingBlock(ParallelScalingBlock):
    """A `ParallelScalingBlock` with differential attention."""

    def attend(self, m: Any, layer: Any, project: list[LinearOf], out: list[Any]) -> Attention:
        if m.attn_drop_p > 0:
            raise Unsupported(DROPS_TWICE)
        return differential(m, layer, project, out)


@describes("timm.layers.diff_attention.DiffAttention")
def _differential(m: Any) -> Attention:
    if m.attn_drop_p > 0:
        return Attention(m, reason=DROPS_TWICE)
    layer = plain_linear(m.qkv)
    width = layer.out_features // 3
    project = [channels_of(layer, i * width, (i + 1) * width) for i in range(3)]
    return replace(differential(m, layer, project, [m.norm, m.proj, m.proj_drop]), module=m)


@adapts(f"{VIT}ParallelThingsBlock")
class ParallelThingsBlock(Adapter):
    """Several attentions in parallel, then several MLPs. Each is a `Sequential`; the block adds up their outputs."""

    def modules(self, m: Any) -> Sequence[nn.Module]:
        return [*m.attns, *m.ffns]

    def branches(self, m: Any) -> dict[str, Any]:
        if hasattr(m, "attn"):
            return {"attention": [m.norm, attention(m.attn), m.ls, m.drop_path]}
        return {"mlp": [m.norm, m.mlp, m.ls, m.drop_path]}

    def forward(self, m: Any, run: RunBranch, x: Tensor) -> Tensor:
        return run("attention" if hasattr(m, "attn") else "mlp", x)


@adapts("timm.models.cait.LayerScaleBlock")
class CaitBlock(Adapter):
    """CaiT."""

    def branches(self, m: Any) -> dict[str, Any]:
        talking = Attention(
            m.attn, reason="talking heads mix the attention matrices, which fused attention does not have"
        )
        return {
            "attention": [m.norm1, talking, Scale(lambda: m.gamma_1), m.drop_path],
            "mlp": [m.norm2, m.mlp, Scale(lambda: m.gamma_2), m.drop_path],
        }


@adapts("timm.models.cait.LayerScaleBlockClassAttn")
class CaitClassBlock(Adapter):
    """CaiT's last blocks."""

    def branches(self, m: Any) -> dict[str, Any]:
        raise Unsupported("class attention gives one position a sample, which leaves nothing to drop")


@adapts("timm.models.mlp_mixer.MixerBlock")
class MixerBlock(Adapter):
    """MLP-Mixer. The MLP that mixes positions is left to autograd."""

    def branches(self, m: Any) -> dict[str, Any]:
        return {"mlp": [m.norm2, m.mlp_channels, m.drop_path]}

    def forward(self, m: Any, run: RunBranch, x: Tensor) -> Tensor:
        x = x + m.drop_path(m.mlp_tokens(m.norm1(x).transpose(1, 2)).transpose(1, 2))
        return run("mlp", x, x)


@adapts("timm.models.mlp_mixer.ResBlock")
class ResMlpBlock(Adapter):
    """ResMLP. The layer that mixes positions is left to autograd."""

    def branches(self, m: Any) -> dict[str, Any]:
        return {"mlp": [m.norm2, m.mlp_channels, Scale(lambda: m.ls2), m.drop_path]}

    def forward(self, m: Any, run: RunBranch, x: Tensor) -> Tensor:
        x = x + m.drop_path(m.ls1 * m.linear_tokens(m.norm1(x).transpose(1, 2)).transpose(1, 2))
        return run("mlp", x, x)


@steps_for("timm.models.mlp_mixer.Affine")
def _affine(module: Any) -> list[Step]:
    return [Step(Pointwise(lambda x, alpha, beta: torch.addcmul(beta, alpha, x)), reads(module, "alpha", "beta"))]


@adapts("timm.models.vision_transformer_sam.Attention")
class SamAttention(Adapter):
    """SAM's attention, on maps or windows `[batch, height, width, channels]`."""

    gives_rows = False

    def branches(self, m: Any) -> dict[str, Any]:
        tables = tables_of(m)
        attend = Attention(
            m,
            project=[m.qkv],
            heads=m.num_heads,
            q_norm=m.q_norm,
            k_norm=m.k_norm,
            biases=[(Part(rows_and_columns, 2), [table.read for table in tables])] if tables else [],
            layout=tuple(table.side for table in tables) or None,
            dropout=dropout_of(m),
            out=[m.proj, m.proj_drop],
        )
        return {"attention": [attend]}

    def forward(self, m: Any, run: RunBranch, x: Tensor) -> Tensor:
        shape, tables = x.shape[1:3], tables_of(m)
        options: dict[str, Any] = {}
        if tables:
            options["bias_tensors"] = [table.read(side) for table, side in zip(tables, shape, strict=True)]
        elif m.rope is not None:
            options["rope"] = sin_and_cos(m.rope.get_embed())
        return run("attention", x.flatten(1, 2), None, shape, **options).unflatten(1, shape)


class Table(NamedTuple):
    """One row of `entries` for each distance along a side of a map.

    A table of length `len` fits a side of `(len + 1) / 2` positions. For any other side it is interpolated.
    """

    entries: Tensor

    @property
    def side(self) -> int:
        return (self.entries.shape[0] + 1) // 2

    def read(self, side: int | None = None) -> Tensor:
        """The entry for each pair of places along a side, `[side, side, channels]`."""
        from timm.models.vision_transformer_sam import get_rel_pos

        return get_rel_pos(side or self.side, side or self.side, self.entries)


def tables_of(m: Any) -> list[Table]:
    """The tables for vertical and horizontal distances; empty if the attention has none."""
    return [Table(m.rel_pos_h), Table(m.rel_pos_w)] if m.use_rel_pos else []


def rows_and_columns(q: Tensor, q_at: Places, k_at: Places, tall: Tensor, wide: Tensor) -> Tensor:
    """The sum of a bias for the vertical and one for the horizontal distance, each q times an entry of its table."""
    width = wide.shape[0]
    every = torch.arange(tall.shape[0] * width, device=q.device)
    here, there = (every if places.positions is None else places.positions for places in (q_at, k_at))
    down = torch.einsum("bhsc,skc->bhsk", q, tall.index_select(0, here // width))
    across = torch.einsum("bhsc,skc->bhsk", q, wide.index_select(0, here % width))
    if k_at.positions is None:
        return (down.unsqueeze(-1) + across.unsqueeze(-2)).flatten(-2)
    return down.index_select(-1, there // width) + across.index_select(-1, there % width)


@adapts("timm.models.vision_transformer_sam.Block")
class SamBlock(Adapter):
    """SAM. Its attention counts as a block of its own; this block calls it on the windows."""

    gives_rows = False

    def branches(self, m: Any) -> dict[str, Any]:
        return {"mlp": [m.norm2, m.mlp, m.ls2, m.drop_path2]}

    def forward(self, m: Any, run: RunBranch, x: Tensor) -> Tensor:
        from timm.models.vision_transformer_sam import window_partition, window_unpartition

        (height, width), size, attended = x.shape[1:3], m.window_size, m.norm1(x)
        if size > 0:
            attended, padded = window_partition(attended, size)
        attended = m.drop_path1(m.ls1(m.attn(attended)))
        if size > 0:
            attended = window_unpartition(attended, size, (height, width), padded)
        rows = (x + attended).flatten(1, 2)
        return run("mlp", rows, rows, (height, width)).unflatten(1, (height, width))
