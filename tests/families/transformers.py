"""transformers' families."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import torch
from oracle_model import Branch
from torch import Tensor, nn

from keepgrad import Layout

from .family import Family, images, tokens
from .timm import SMALL_VIT, vit_specs
from .timm_windows import of_map

SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 48}
VIT = {**SIZES, "image_size": 32, "patch_size": 8, "num_labels": 5}


def model(name: str, attention: str | None = None, **options) -> nn.Module:
    import transformers

    kind = getattr(transformers, name)
    return kind._from_config(kind.config_class(**options), attn_implementation=attention)


def hidden(out) -> Tensor:
    return out.last_hidden_state


def logits(out) -> Tensor:
    return out.logits


def layer(
    layout: Layout | Callable[[torch.Size], Layout], norms: str, attention: tuple[str, str], ends: str, last: str
) -> dict[str, Branch]:
    """The branches of a layer: its norms, the layers before and after the attention, where both branches end, and the
    MLP's last layer."""
    (first, second), (leave, end), (query, out) = norms.split(), ends.split(), attention
    return {
        "attention": Branch(first, leave, layout, last=(out,), out=out, query=query, heads=3),
        "mlp": Branch(second, end, layout, last=(last,)),
    }


NORMS, NEW = "layernorm_before layernorm_after", ("attention.q_proj", "attention.o_proj")
OLD = ("attention.attention.query", "attention.output.dense")
VIT_LAYER = layer(tokens(4, 1), NORMS, NEW, "dropout dropout", "mlp.fc2")
BEIT_LAYER = layer(tokens(4, 1), NORMS, NEW, "drop_path drop_path", "mlp.fc2")
DATA2VEC_LAYER = layer(tokens(4, 1), NORMS, OLD, "drop_path drop_path", "output.dense")


def dino_layer(prefix: int, last: str = "mlp.fc2") -> dict[str, Branch]:
    return layer(tokens(4, prefix), "norm1 norm2", NEW, "layer_scale1 layer_scale2", last)


def padded(branches: dict[str, Branch], side: str) -> dict[str, Branch]:
    return {kind: replace(branch, real=REAL[side]) for kind, branch in branches.items()}


def clip_layer(prefix: int) -> dict[str, Branch]:
    """Of images of 4 x 4 patches, or of 16 words: where the number does not tell which, there is no class token."""

    def layout(shape: torch.Size) -> Layout:
        return tokens(4, prefix) if shape[1] == 16 + prefix else Layout((16,))

    attention = ("self_attn.q_proj", "self_attn.out_proj")
    return layer(layout, "layer_norm1 layer_norm2", attention, "self_attn mlp", "mlp.fc2")


REAL = {side: torch.ones(2, 16, dtype=torch.bool) for side in ("right", "left")}
"""Which words are not padding."""
REAL["right"][0, 11:] = REAL["right"][1, 5:] = REAL["left"][0, :5] = False


def words(dtype: torch.dtype, padded: str = "") -> dict[str, Tensor]:
    """Sixteen words, which are no image of four by four patches; `padded` on the right or on the left."""
    found = {"input_ids": torch.randint(3, 40, (2, 16), generator=torch.Generator().manual_seed(1))}
    return {**found, "attention_mask": REAL[padded].long()} if padded else found


def words_and_images(dtype: torch.dtype) -> dict[str, Tensor]:
    return {**words(dtype), "pixel_values": images(32, dtype)}


def both(out) -> Tensor:
    return torch.cat([out.text_embeds, out.image_embeds])


WINDOWS = {
    "SwinAttention": {
        "attention": Branch("", "", Layout((4, 4)), last=("o_proj",), out="o_proj", query="q_proj", heads=3)
    },
    "SwinLayer": {"mlp": Branch("layernorm_after", "dropout", Layout((8, 8)), last=("mlp.fc2",))},
}


def convnext_layer(norm: str, last: str) -> dict[str, Branch]:
    return {"mlp": Branch(norm, "drop_path", of_map, "nhwc", exit_form="nchw", last=(last,))}


TEXT = {**SIZES, "vocab_size": 40, "max_position_embeddings": 16, "eos_token_id": 39, "bos_token_id": 1}
BEIT = {**VIT, "use_relative_position_bias": True, "layer_scale_init_value": 0.5, "drop_path_rate": 0.0}
SWIN = {
    **{"image_size": 32, "patch_size": 4, "embed_dim": 24, "depths": [2], "num_heads": [3], "window_size": 4},
    **{"drop_path_rate": 0.0, "num_labels": 5},
}
CONVNEXT = {"hidden_sizes": [12, 16], "depths": [1, 2], "layer_scale_init_value": 0.5}
STAGES = {**CONVNEXT, "num_stages": 2, "num_labels": 5}


def clip_model() -> nn.Module:
    import transformers

    config = transformers.CLIPConfig(text_config=TEXT, vision_config=VIT, projection_dim=8)
    return transformers.CLIPModel._from_config(config, attn_implementation="sdpa")


def timm_wrapper() -> nn.Module:
    import transformers

    config = transformers.TimmWrapperConfig(architecture="vit_tiny_patch16_224", model_args=SMALL_VIT)
    return transformers.TimmWrapperModel(config)


def of_images(name: str, specs: dict[str, dict[str, Branch]], options: dict, output=hidden, **more) -> Family:
    """A family of a model that is given images of 32 x 32 pixels."""
    methods = () if all("attention" not in branches for branches in specs.values()) else ("qkv", "query", "head")
    return Family(partial(model, name, **options), partial(images, 32), specs, methods, output, **more)


FAMILIES: dict[str, Family] = {}
if find_spec("transformers") is not None:
    FAMILIES = {
        "HF ViT": of_images("ViTForImageClassification", {"ViTLayer": VIT_LAYER}, VIT, logits),
        "HF BEiT": of_images("BeitForImageClassification", {"BeitLayer": BEIT_LAYER}, BEIT, logits),
        "HF Data2Vec": of_images("Data2VecVisionModel", {"Data2VecVisionLayer": DATA2VEC_LAYER}, BEIT),
        "HF DINOv2": of_images("Dinov2Model", {"Dinov2Layer": dino_layer(1)}, {**VIT, "attention": "eager"}),
        "HF DINOv2 with registers": of_images(
            "Dinov2WithRegistersModel",
            {"Dinov2WithRegistersLayer": dino_layer(3, "mlp.down_proj")},
            {**VIT, "use_swiglu_ffn": True, "num_register_tokens": 2},
        ),
        "HF DINOv3": of_images(
            "DINOv3ViTModel",
            {"DINOv3ViTLayer": dino_layer(3, "mlp.down_proj")},
            {**VIT, "use_gated_mlp": True, "num_register_tokens": 2, "pos_embed_rescale": None},
        ),
        "HF CLIP": Family(clip_model, words_and_images, {"CLIPEncoderLayer": clip_layer(1)}, output=both),
        "HF CLIP text": Family(
            partial(model, "CLIPTextModel", **TEXT),
            partial(words, padded="right"),
            {"CLIPEncoderLayer": padded(clip_layer(1), "right")},
            output=hidden,
        ),
        "HF SigLIP": of_images("SiglipVisionModel", {"SiglipEncoderLayer": clip_layer(0)}, VIT),
        "HF Swin": of_images("SwinForImageClassification", WINDOWS, SWIN, logits),
        "HF ConvNeXt": of_images(
            "ConvNextForImageClassification", {"ConvNextLayer": convnext_layer("layernorm", "pwconv2")}, STAGES, logits
        ),
        "HF ConvNeXt V2": of_images(
            *("ConvNextV2ForImageClassification", {"ConvNextV2Layer": convnext_layer("layernorm", "pwconv2")}),
            *(STAGES, logits),
        ),
        "HF DINOv3 ConvNeXt": of_images(
            "DINOv3ConvNextModel", {"DINOv3ConvNextLayer": convnext_layer("layer_norm", "pointwise_conv2")}, CONVNEXT
        ),
        "HF timm": Family(timm_wrapper, partial(images, 32), vit_specs(tokens(4, 1), 3), output=hidden),
    }
