"""The model families that keepgrad knows, each with an example model.

The rows of the catalogue are not written by hand: each example is built, and its row is what `find_blocks` finds in it.
Saved bytes are measured on the example with random weights.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from . import models
from .adapters import find_blocks
from .adapters.program import Program
from .calling import call
from .errors import NoSiteError
from .memory import saved_bytes
from .patch import apply, plan

__all__ = ["EXAMPLES", "Example", "Row", "count_timm", "rows"]


@dataclass(frozen=True)
class Example:
    """A family and one model of it.

    `model` is a name for `models.create`, or a class of transformers. Such a class is built from its defaults and the
    numbers that follow its name, e.g. `patch_size=16`. `modules` names the files of timm that define the family.
    """

    family: str
    model: str
    modules: tuple[str, ...] = ()

    @property
    def library(self) -> str:
        return self.model.partition(":")[0] if ":" in self.model else "timm"

    def build(self, device: str) -> nn.Module:
        library, _, name = self.model.partition(":")
        with torch.device(device):
            if library == "torch":
                layer = nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True, dropout=0.0)
                return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
            if library == "transformers":
                import transformers

                name, *given = name.split()
                kind = getattr(transformers, name)
                numbers = {key: int(value) for key, _, value in (one.partition("=") for one in given)}
                config = kind.config_class(**numbers)
                if hasattr(config, "use_cache"):
                    config.use_cache = False  # as in training
                return kind(config).train()
        return models.create(self.model, device=device)

    def inputs(self, model: nn.Module, batch: int = 2) -> Any:
        """Random inputs for the model: images, clips, or texts of 77 tokens."""
        if self.library == "torch":
            return torch.randn(batch, 64, 256)
        return models.inputs_for(model, batch, length=77)


SMALL_LLAMA = "hidden_size=1024 intermediate_size=2816 num_hidden_layers=4 num_key_value_heads=8"
"""A small setting: with its defaults, a language model is too large to be measured on every machine."""

SMALL_VJEPA = "frames_per_clip=16 crop_size=224 hidden_size=384 num_attention_heads=6 num_hidden_layers=6"
"""A small setting: by default, V-JEPA takes 64 frames."""

EXAMPLES = (
    Example("ViT, DeiT", "vit_small_patch16_224", ("vision_transformer", "deit")),
    Example("EVA-02", "eva02_small_patch14_224", ("eva",)),
    Example("DINOv3", "vit_small_patch16_dinov3", ()),
    Example("BEiT", "beit_base_patch16_224", ("beit",)),
    Example("ViT, relative positions", "vit_relpos_small_patch16_224", ("vision_transformer_relpos",)),
    Example("NaFlexVit", "naflexvit_base_patch16_gap", ("naflexvit",)),
    Example("SAM", "samvit_base_patch16_224", ("vision_transformer_sam",)),
    Example("CaiT", "cait_xxs24_224", ("cait",)),
    Example("MLP-Mixer, ResMLP", "mixer_s32_224", ("mlp_mixer",)),
    Example("Swin", "swin_tiny_patch4_window7_224", ("swin_transformer",)),
    Example("Swin V2", "swinv2_tiny_window8_256", ("swin_transformer_v2",)),
    Example("ConvNeXt", "convnext_tiny", ("convnext",)),
    Example("ConvNeXt V2", "convnextv2_tiny", ()),
    Example("XCiT (tier 2)", "xcit_tiny_12_p16_224", ("xcit",)),
    Example("ViT", "torchvision:vit_b_16"),
    Example("ConvNeXt", "torchvision:convnext_tiny"),
    Example("Swin", "torchvision:swin_t"),
    Example("Swin V2", "torchvision:swin_v2_t"),
    Example("MaxVit", "torchvision:maxvit_t"),
    Example("Swin3D", "torchvision:swin3d_t"),
    Example("MViT", "torchvision:mvit_v2_s"),
    Example("ViT, DeiT", "transformers:ViTModel"),
    Example("BEiT", "transformers:BeitModel"),
    Example("DINOv2", "transformers:Dinov2Model"),
    Example("DINOv3", "transformers:DINOv3ViTModel"),
    Example("CLIP, vision", "transformers:CLIPVisionModel"),
    Example("CLIP, text", "transformers:CLIPTextModel"),
    Example("SigLIP, vision", "transformers:SiglipVisionModel"),
    Example("VideoMAE", "transformers:VideoMAEModel"),
    Example("ViViT", "transformers:VivitModel num_frames=16"),
    Example("TimeSformer", "transformers:TimesformerModel"),
    Example("V-JEPA 2", f"transformers:VJEPA2Model {SMALL_VJEPA} pred_num_hidden_layers=2"),
    Example("Llama", f"transformers:LlamaModel {SMALL_LLAMA}"),
    Example("Mistral", f"transformers:MistralModel {SMALL_LLAMA}"),
    Example("Qwen 3", f"transformers:Qwen3Model {SMALL_LLAMA}"),
    Example("Gemma 3", f"transformers:Gemma3TextModel {SMALL_LLAMA}"),
    Example("GPT-2", "transformers:GPT2Model attn_pdrop=0 resid_pdrop=0 embd_pdrop=0"),
    Example("Swin", "transformers:SwinModel"),
    Example("ConvNeXt", "transformers:ConvNextModel"),
    Example("ConvNeXt V2", "transformers:ConvNextV2Model"),
    Example("TransformerEncoderLayer", "torch:TransformerEncoderLayer"),
)


@dataclass(frozen=True)
class Row:
    """What keepgrad finds in an example. `saved`: bytes at keep_ratio 0.5 / bytes of full backprop, if measured."""

    example: Example
    classes: tuple[str, ...]
    tier: int
    branches: tuple[str, ...]
    sites: int
    left_alone: tuple[str, ...]
    architectures: int | None
    saved: float | None = None


def rows(measure: bool = False) -> Iterator[Row]:
    """The rows for the libraries that are installed. With `measure`, also measures saved bytes, which takes minutes."""
    for example in EXAMPLES:
        if importlib.util.find_spec(example.library) is not None:
            yield _row(example, measure)


def _row(example: Example, measure: bool) -> Row:
    model = example.build("meta")
    blocks = find_blocks(model)
    found = [(block, kind) for block in blocks for kind, p in block.programs.items() if isinstance(p, Program)]
    sites = plan(model, keep_ratio=0.5)
    architectures = None
    if example.modules:
        architectures = sum(len(models.timm().list_models(module=name)) for name in example.modules)
    return Row(
        example,
        tuple(dict.fromkeys(type(block.module).__name__ for block, _ in found)),
        min(site.tier for site in sites.sites),
        tuple(kind for kind in ("attention", "mlp", "downsample") if any(kind == one for _, one in found)),
        len(sites.sites),
        tuple(dict.fromkeys(reason for _, reason in sites.skipped)),
        architectures,
        measured(example) if measure else None,
    )


def measured(example: Example) -> float:
    """Bytes saved with keep_ratio 0.5 on all blocks, divided by the bytes that full backprop saves."""
    torch.manual_seed(0)
    model = example.build("cpu").train()
    given = example.inputs(model)
    full = saved_bytes(lambda: call(model, given), model)
    apply(model, keep_ratio=0.5)
    return saved_bytes(lambda: call(model, given), model) / full


def count_timm() -> dict[str, int]:
    """How many architectures of timm have sites, by their best tier. Builds every architecture, which takes minutes."""
    found = {"tier 1": 0, "tier 2": 0, "none": 0}
    for name in models.timm().list_models():
        model = models.create(name, device="meta")
        try:
            tier = min(site.tier for site in plan(model, keep_ratio=0.5).sites)
            found[f"tier {tier}"] += 1
        except NoSiteError:
            found["none"] += 1
    return found
