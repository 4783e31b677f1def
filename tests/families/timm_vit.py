"""timm's relatives of the ViT."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from oracle_model import Branch
from timm.layers import Attention, Mlp
from timm.models.beit import Beit
from timm.models.cait import Cait
from timm.models.eva import Eva
from timm.models.mlp_mixer import Affine, MlpMixer, ResBlock
from timm.models.naflexvit import NaFlexVit, NaFlexVitCfg
from timm.models.vision_transformer import (
    DiffParallelScalingBlock,
    ParallelScalingBlock,
    ParallelThingsBlock,
    ResPostBlock,
    VisionTransformer,
)
from timm.models.vision_transformer_relpos import ResPostRelPosBlock, VisionTransformerRelPos
from timm.models.vision_transformer_sam import VisionTransformerSAM
from torch import Tensor, nn

from keepgrad import Layout

from .family import Family, images, tokens

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}
WIDE = {**SMALL, "embed_dim": 32, "num_heads": 4}

Specs = dict[str, dict[str, Branch]]

with warnings.catch_warnings():
    # torch warns once, for any model, that autocast leaves the weights of an RmsNorm as they are.
    warnings.simplefilter("ignore")
    F.rms_norm(torch.ones(1, 1, dtype=torch.bfloat16), (1,), torch.ones(1))


def branches(
    block: str,
    layout: Layout,
    heads: int,
    out: str = "attn.proj",
    query: str = "attn.qkv",
    gate: str = "",
    post_norm: bool = False,
) -> Specs:
    """Those of a block with timm's names. What a linear layer gives is saved where a norm follows it."""
    first = ("attn", "mlp") if post_norm else ("norm1", "norm2")
    last = ((), ()) if post_norm else (("attn.proj",), ("mlp.fc2",))
    attend = Branch(first[0], "drop_path1", layout, last=last[0], out=out, query=query, gate=gate, heads=heads)
    return {block: {"attention": attend, "mlp": Branch(first[1], "drop_path2", layout, last=last[1])}}


def channels_only(block: str, layout: Layout, last: str) -> Specs:
    return {block: {"mlp": Branch("norm2", "drop_path", layout, last=(last,))}}


class Gated(Attention):
    """timm's attention as only other models build it."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options, gated=True)


def patches(dtype: torch.dtype) -> dict[str, Tensor]:
    """16 patches of two images, 2x8 and 5x3; the last of the second is padding."""
    coordinates = torch.zeros(2, 16, 2, dtype=torch.long)
    for number, (height, width) in enumerate([(2, 8), (5, 3)]):
        places = [(y, x) for y in range(height) for x in range(width)]
        coordinates[number, : len(places)] = torch.tensor(places)
    valid = torch.arange(16) < torch.tensor([[16], [15]])
    data = images(16, dtype).view(2, 16, 48)
    return {"x": data, "patch_coord": coordinates, "patch_valid": valid}


def pictures(dtype: torch.dtype) -> Tensor:
    return images(16, dtype)[..., :12]


def naflex(**options) -> nn.Module:
    sizes = {"patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4, "init_values": 0.5}
    return NaFlexVit(NaFlexVitCfg(**{**sizes, "pos_embed_grid_size": (4, 4), **options}), num_classes=5)


def without_position_dropout(model: nn.Module) -> nn.Module:
    """The oracle draws nothing at random; RelPosMlp does."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def relative(**options) -> nn.Module:
    return without_position_dropout(VisionTransformerRelPos(**{**SMALL, **options}))


def mixer(**options) -> nn.Module:
    return MlpMixer(5, 32, 3, 8, num_blocks=2, embed_dim=24, **options)


def cait() -> nn.Module:
    return Cait(32, 8, 3, 5, embed_dim=24, depth=2, num_heads=3, depth_token_only=1, init_values=0.5)


class Difference(nn.Module):
    """What differential attention does with the outputs of its two attentions."""

    def __init__(self, m: nn.Module) -> None:
        super().__init__()
        self.parts = (m,)

    def forward(self, x: Tensor) -> Tensor:
        (m,) = self.parts
        pairs = x.unflatten(-1, (m.num_heads, 2, -1))
        out = m.sub_norm(pairs[..., 0, :] - m._compute_lambda() * pairs[..., 1, :])
        return (out * (1 - m.lambda_init)).flatten(2)


class Doubled(nn.Module):
    """Differential attention as one attention of twice the heads."""

    def __init__(self, m: nn.Module, qkv: nn.Module, proj: nn.Module) -> None:
        super().__init__()
        self.qkv, self.difference, self.proj = qkv, Difference(m), proj
        self.q_norm, self.k_norm, self.heads = m.q_norm, m.k_norm, m.num_heads

    def forward(self, x: Tensor, **options) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, 2, -1)) for part in self.qkv(x).chunk(3, -1))
        v = v.flatten(-2).unsqueeze(-2).expand(*v.shape[:-1], -1)
        q, k, v = (part.flatten(2, 3).transpose(1, 2) for part in (self.q_norm(q), self.k_norm(k), v))
        out = F.scaled_dot_product_attention(q, k, v, **options)
        return self.proj(self.difference(out.transpose(1, 2).flatten(2)))


class Apart(nn.Module):
    """A block of parallel branches as the attention and the MLP that it is made of, on the same parameters."""

    def __init__(self, block: ParallelScalingBlock | DiffParallelScalingBlock) -> None:
        super().__init__()
        hidden, width = block.in_split[:2]
        self.norm1, self.norm2 = nn.Sequential(block.in_norm), nn.Sequential(block.in_norm)
        self.ls1, self.ls2 = nn.Sequential(block.ls), nn.Sequential(block.ls)
        self.attn, self.mlp = Attention(width, block.num_heads), Mlp(width, hidden)
        self.attn.q_norm, self.attn.k_norm = block.q_norm, block.k_norm
        weight, bias = block.in_proj.weight, block.in_proj.bias
        own, joint = block.mlp_bias, block.out_proj
        _set(self.mlp.fc1, weight[:hidden], own if bias is None else bias[:hidden])
        _set(self.attn.qkv, weight[hidden:], None if bias is None else bias[hidden:])
        if joint is None:
            self.attn.proj, self.mlp.fc2 = block.attn_out_proj, block.mlp_out_proj
        else:
            _set(self.attn.proj, joint.weight[:, :width], joint.bias)
            _set(self.mlp.fc2, joint.weight[:, width:], None)
        if isinstance(block, DiffParallelScalingBlock):
            self.attn = Doubled(block, self.attn.qkv, self.attn.proj)

    def forward(self, x: Tensor, **options) -> Tensor:
        return x + (self.ls1(self.attn(self.norm1(x), **options)) + self.ls2(self.mlp(self.norm2(x))))


def _set(layer: nn.Linear, weight: Tensor, bias: Tensor | None) -> None:
    """Make the layer use these tensors, which need not be parameters."""
    del layer.weight, layer.bias
    layer.weight, layer.bias = weight, bias


@contextmanager
def doubled(model: nn.Module) -> Iterator[None]:
    attentions = [block.attn for block in model.blocks]
    for block, m in zip(model.blocks, attentions, strict=True):
        block.attn = Doubled(m, m.qkv, m.proj)
    yield
    for block, m in zip(model.blocks, attentions, strict=True):
        block.attn = m


@contextmanager
def apart(model: nn.Module) -> Iterator[None]:
    blocks = list(model.blocks)
    model.blocks = nn.Sequential(*(Apart(block) for block in blocks))
    yield
    model.blocks = nn.Sequential(*blocks)


def sam(**options) -> nn.Module:
    sizes = {"img_size": 40, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}
    extra = {"global_attn_indexes": (1,), "neck_chans": 16, "init_values": 0.5}
    return VisionTransformerSAM(**{**sizes, **extra, **options})


def sam_specs(side: int) -> Specs:
    def layout(shape: torch.Size) -> Layout:
        return Layout(tuple(shape[1:3]))

    attend = Branch("", "", layout, "nhwc", last=("proj",), out="proj", query="qkv", heads=3)
    mlp = Branch("norm2", "drop_path2", Layout((side, side)), last=("mlp.fc2",))
    return {"Attention": {"attention": attend}, "Block": {"mlp": mlp}}


def things(layout: Layout) -> Specs:
    attend = Branch("", "", layout, last=("attn.proj",), out="attn.proj", query="attn.qkv", heads=3)
    return {"Sequential": {"attention": attend, "mlp": Branch("", "", layout, last=("mlp.fc2",))}}


def apart_specs(layout: Layout, out: str = "attn.proj", heads: int = 3) -> Specs:
    attend = Branch("norm1", "ls1", layout, last=("attn.proj",), out=out, query="attn.qkv", heads=heads)
    return {"Apart": {"attention": attend, "mlp": Branch("norm2", "ls2", layout, last=("mlp.fc2",))}}


SCALING = {**SMALL, "block_fn": ParallelScalingBlock, "init_values": 0.5, "qk_norm": True}
FUSED = partial(ParallelScalingBlock, fuse_out_proj=True)
ROPE = {**WIDE, "use_rot_pos_emb": True, "use_abs_pos_emb": False}
GROUPED = {"attn_type": "rope", "qkv_fused": False, "num_kv_heads": 2}
MIXED = {"attn_type": "rope", "rope_type": "mixed", "qk_norm": True}
NAFLEX_ROPE = {"rope_type": "axial", "pos_embed": "none", "class_token": True, "global_pool": "token"}

SQUARE, CLASS = tokens(4, 0), tokens(4, 1)
image, rows = partial(images, 32), Layout((16,))

FAMILIES: dict[str, Family] = {
    "timm EVA": Family(partial(Eva, **SMALL, init_values=0.5), image, branches("EvaBlock", CLASS, 3)),
    "timm EVA-02": Family(
        partial(Eva, **ROPE, qkv_fused=False, swiglu_mlp=True, scale_mlp=True, scale_attn_inner=True),
        image,
        branches("EvaBlock", CLASS, 4, out="attn.norm", query="attn.q_proj"),
    ),
    "timm EVA post-norm": Family(
        partial(Eva, **ROPE, use_post_norm=True, swiglu_mlp=True),
        image,
        branches("EvaBlockPostNorm", CLASS, 4, post_norm=True),
    ),
    "timm DINOv3": Family(
        partial(Eva, **ROPE, rope_type="dinov3", rope_rotate_half=True, num_reg_tokens=2, init_values=0.5),
        image,
        branches("EvaBlock", tokens(4, 3), 4),
    ),
    "timm RoPE mixed": Family(
        partial(Eva, **ROPE, **MIXED), image, branches("EvaBlock", CLASS, 4), since="timm 1.0.31"
    ),
    "timm grouped heads": Family(
        partial(Eva, **ROPE, **GROUPED),
        image,
        branches("EvaBlock", CLASS, 4, query="attn.q_proj"),
        ("qkv", "query"),
        since="timm 1.0.30",
    ),
    "timm BEiT": Family(
        partial(Beit, **SMALL, init_values=0.5, use_rel_pos_bias=True, qkv_bias=True),
        image,
        branches("Block", CLASS, 3),
    ),
    "timm BEiT shared": Family(
        partial(Beit, **SMALL, use_rel_pos_bias=True, use_shared_rel_pos_bias=True, swiglu_mlp=True),
        image,
        branches("Block", CLASS, 3),
    ),
    "timm relative": Family(
        partial(relative, rel_pos_type="bias", class_token=True, global_pool="token", init_values=0.5),
        image,
        branches("RelPosBlock", CLASS, 3),
    ),
    "timm relative shared": Family(
        partial(relative, rel_pos_type="mlp", shared_rel_pos=True, block_fn=ResPostRelPosBlock),
        image,
        branches("ResPostRelPosBlock", SQUARE, 3, post_norm=True),
    ),
    "timm ViT post-norm": Family(
        partial(VisionTransformer, **SMALL, block_fn=ResPostBlock),
        image,
        branches("ResPostBlock", CLASS, 3, post_norm=True),
    ),
    "timm ViT gated": Family(
        partial(VisionTransformer, **SMALL, attn_layer=Gated),
        image,
        branches("Block", CLASS, 3, gate="attn.gate"),
        since="timm 1.0.28",
    ),
    "timm ViT gated and normed": Family(
        partial(VisionTransformer, **SMALL, attn_layer=Gated, scale_attn_norm=True),
        image,
        branches("Block", CLASS, 3, gate="attn.gate"),
        ("qkv", "query"),
        since="timm 1.0.28",
    ),
    "timm parallel scaling": Family(partial(VisionTransformer, **SCALING), image, apart_specs(CLASS), apart=apart),
    "timm parallel scaling fused": Family(
        partial(VisionTransformer, **{**SCALING, "block_fn": FUSED, "qkv_bias": False}),
        image,
        apart_specs(CLASS),
        apart=apart,
    ),
    "timm parallel differential": Family(
        partial(VisionTransformer, **{**SCALING, "block_fn": DiffParallelScalingBlock}),
        image,
        apart_specs(CLASS, "attn.difference", 6),
        apart=apart,
    ),
    "timm ViT differential": Family(
        partial(VisionTransformer, **SMALL, attn_layer="diff", qk_norm=True),
        image,
        branches("Block", CLASS, 6, out="attn.difference"),
        apart=doubled,
    ),
    "timm parallel things": Family(
        partial(VisionTransformer, **SMALL, block_fn=ParallelThingsBlock, init_values=0.5), image, things(CLASS)
    ),
    "timm NaFlexVit images": Family(partial(naflex, global_pool="avg"), pictures, branches("Block", Layout((4, 3)), 4)),
    "timm NaFlexVit": Family(partial(naflex, global_pool="avg"), patches, branches("Block", rows, 4)),
    "timm NaFlexVit rope": Family(partial(naflex, **NAFLEX_ROPE), patches, branches("EvaBlock", Layout((16,), 1), 4)),
    "timm NaFlexVit mixed": Family(
        partial(naflex, **{**NAFLEX_ROPE, "rope_type": "mixed", "use_key_only_attn_mask": True, "attn_gated": True}),
        patches,
        branches("EvaBlock", Layout((16,), 1), 4, gate="attn.gate"),
        since="timm 1.0.31",
    ),
    "timm CaiT": Family(cait, image, channels_only("LayerScaleBlock", SQUARE, "mlp.fc2"), ()),
    "timm Mixer": Family(mixer, image, channels_only("MixerBlock", SQUARE, "mlp_channels.fc2"), ()),
    "timm ResMLP": Family(
        partial(mixer, block_layer=ResBlock, norm_layer=Affine, mlp_ratio=4),
        image,
        channels_only("ResBlock", SQUARE, "mlp_channels.fc2"),
        (),
    ),
    "timm SAM": Family(partial(sam, use_rel_pos=True, window_size=3), partial(images, 40), sam_specs(5)),
    "timm SAM rope": Family(
        partial(sam, use_rope=True, window_size=3, embed_dim=36), partial(images, 40), sam_specs(5)
    ),
}
