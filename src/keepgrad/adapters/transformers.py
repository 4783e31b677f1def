"""Hugging Face transformers: its encoders of images and of text, from 4.50 on.

The layers have kept their class names over the versions, but their parts have been renamed: `query` in
`attention.attention` became `q_proj` in `attention`, and `intermediate` and `output` became `mlp`. So each part is
looked up by all of its names. A layer that takes `output_attentions` returns a tuple, any other returns a tensor.

"eager", "sdpa" and "flash_attention" all compute the same attention, so one description serves them. If a call asks for
more than the output (attention weights, for example), or passes an argument that is not known here, the layer runs its
own code.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._torch import has_hooks
from ..ops.stages import GlobalResponseNorm, Linear
from ..ops.stages import gelu as gelu_stage
from .items import Attention, LinearOf, Scale, Step, Unsupported, path_of, unwrapped
from .modules import SCALES, STEPS, drop_path, gate, layer_norm, opaque, reads, side_by_side, steps_for
from .position_wise import NotRows, maps_of, rows_of, steps_of_mlp
from .registry import Adapter, RunBranch, adapts, parameters_of


def classes(models: Mapping[str, str], *ends: str) -> list[str]:
    """The import paths of classes. `models` maps a model's folder to the start of its class names, `ends` complete it.

    For example, `classes({"vit": "ViT"}, "Layer")` is `["transformers.models.vit.modeling_vit.ViTLayer"]`.
    """
    paths = []
    for folder, start in models.items():
        folder, _, file = folder.partition("/")
        paths += [f"transformers.models.{folder}.modeling_{file or folder}.{start}{end}" for end in ends]
    return paths


VIT = {
    **{"vit": "ViT", "deit": "DeiT", "vit_mae": "ViTMAE", "vit_msn": "ViTMSN", "ijepa": "IJepa", "vivit": "Vivit"},
    **{"audio_spectrogram_transformer": "AST", "videomae": "VideoMAE", "yolos": "Yolos", "dpt": "DPTViT"},
    **{"dinov2": "Dinov2", "dinov2_with_registers": "Dinov2WithRegisters"},
}
BEIT = {"beit": "Beit", "data2vec/data2vec_vision": "Data2VecVision"}
DINOV3 = {"dinov3_vit": "DINOv3ViT"}
VJEPA2 = {"vjepa2": "VJEPA2"}
TIMESFORMER = {"timesformer": "Timesformer"}
CLIP = {
    **{"clip": "CLIP", "altclip": "AltCLIP", "clipseg": "CLIPSeg", "metaclip_2": "MetaClip2", "x_clip": "XCLIP"},
    **{"owlvit": "OwlViT", "owlv2": "Owlv2"},
}
CHINESE_CLIP = {"chinese_clip": "ChineseCLIPVision"}
SIGLIP = {
    **{"siglip": "Siglip", "siglip2": "Siglip2", "idefics2": "Idefics2", "idefics3": "Idefics3", "smolvlm": "SmolVLM"},
    **{"git": "GitVision", "kosmos2": "Kosmos2Vision"},
}
SWIN = {"swin": "Swin", "donut/donut_swin": "DonutSwin", "clap": "ClapAudio"}
CONVNEXT = {"convnext": "ConvNext", "convnextv2": "ConvNextV2", "dinov3_convnext": "DINOv3ConvNext"}

EVERY = {**VIT, **BEIT, **DINOV3, **VJEPA2, **TIMESFORMER, **CLIP, **CHINESE_CLIP, **SIGLIP, **SWIN, **CONVNEXT}
SCALES.update(dict.fromkeys(classes(EVERY, "LayerScale"), "lambda1"))
STEPS.update(dict.fromkeys(classes(EVERY, "DropPath"), drop_path))
OTHER_NAMES = {"dinov3_vit": "Dinov3ViT", "dinov3_convnext": "Dinov3Convnext", "timesformer": "TimeSformer"}
STEPS.update(dict.fromkeys(classes(OTHER_NAMES, "DropPath"), drop_path))
STEPS.update(dict.fromkeys(classes(CONVNEXT, "LayerNorm"), layer_norm))


def one_of(m: Any, *names: str) -> Any:
    """The first of these attributes that the module has."""
    for name in names:
        if hasattr(m, name):
            return getattr(m, name)
    raise AttributeError(f"{type(m).__name__} has none of {', '.join(names)}")


@steps_for("transformers.activations.GELUActivation")
def _gelu(m: Any) -> list[Step]:
    return [Step(gelu_stage("none")[0])] if m.act is F.gelu else [opaque(m)]


@steps_for("transformers.activations.GELUTanh", "transformers.activations.PytorchGELUTanh")
def _gelu_tanh(m: Any) -> list[Step]:
    is_kernel = isinstance(getattr(m, "act", None), partial) or not hasattr(m, "act")
    return [Step(gelu_stage("tanh")[0])] if is_kernel else [opaque(m)]


@steps_for("transformers.pytorch_utils.Conv1D")
def _conv1d(m: Any) -> list[Step]:
    """A linear layer whose weight is `[in, out]`."""
    return [Step(Linear(True), (lambda: m.weight.t(), *reads(m, "bias")))]


@steps_for(*classes(EVERY, "MLP", "VisionMLP", "GatedMLP", "SwiGLUFFN"))
def _mlp(m: Any) -> list[Step]:
    if hasattr(m, "gate_proj"):
        return steps_of_mlp(side_by_side(m.gate_proj, m.up_proj), gate(m.act_fn, True), m.down_proj)
    if hasattr(m, "weights_in"):
        return steps_of_mlp(m.weights_in, gate(nn.SiLU(), True), m.weights_out)
    act = one_of(m, "activation_fn", "activation", "act_fn")
    return steps_of_mlp(one_of(m, "fc1", "up_proj"), act, one_of(m, "fc2", "down_proj"))


def mlp(m: Any) -> list[Any]:
    """The MLP of a layer, without the residual. In version 4 it was two modules, `intermediate` and `output`."""
    if hasattr(m, "mlp"):
        return [m.mlp]
    first, second = m.intermediate, m.output
    check_own(m, first, second)
    drop = [first.dropout] if hasattr(first, "dropout") else []  # Vivit has one there too
    return [first.dense, first.intermediate_act_fn, *drop, second.dense, second.dropout]


def inner_of(m: Any) -> Any:
    """The module that makes q, k and v: the attention itself, or in version 4 a module inside it."""
    return m.attention if hasattr(m, "attention") else getattr(m, "self", m)


def attention(layer: nn.Module, m: Any, **more: Any) -> Attention:
    """Describes `m`, the attention module of a layer. `more` are further fields of `Attention`."""
    inner = inner_of(m)
    check_own(layer, *([m] if inner is m else [m, inner, m.output]), called=m)
    drop = one_of(inner, "attention_dropout", "dropout_prob", "dropout", "attn_drop")
    if isinstance(drop, nn.Dropout) and "Sdpa" in type(inner).__name__:  # sdpa does not call the dropout module
        drop = inner.config.attention_probs_dropout_prob
    names = (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value"))
    project = [inner.qkv] if hasattr(inner, "qkv") else [one_of(inner, *some) for some in names]
    if hasattr(inner, "q_bias"):  # VideoMAE reads the weights of these layers and does not call them
        biases = (lambda: inner.q_bias, lambda: None, lambda: inner.v_bias)
        project = [LinearOf(partial(getattr, one, "weight"), bias) for one, bias in zip(project, biases, strict=True)]
    return Attention(
        m,
        project=project,
        heads=one_of(inner, "num_attention_heads", "num_heads"),
        scale=getattr(inner, "scaling", getattr(inner, "scale", None)),
        dropout=lambda: (drop.p if isinstance(drop, nn.Dropout) else drop) if inner.training else 0.0,
        rotate_half=True,
        out=[one_of(m, "o_proj", "out_proj", "proj")] if inner is m else [m.output.dense, m.output.dropout],
        call=lambda x, given, **options: first_of(m(x, **given)),
        **more,
    )


def first_of(out: Any) -> Tensor:
    """The output of a module that may return a tuple: its first element."""
    return out[0] if isinstance(out, tuple) else out


def check_own(layer: nn.Module, *parts: nn.Module, called: nn.Module | None = None) -> None:
    """Raise Unsupported if a part of a layer has hooks, a replaced forward, or a class from another file.

    The part `called` may have hooks: it is the one that is called when nothing is reduced.
    """
    for part in parts:
        if (part is not called and has_hooks(part)) or not is_own(vars(part).get("forward")):
            raise Unsupported(f"{type(part).__name__} has hooks, or a forward of its own")
        if file_of(part) != file_of(layer):
            raise Unsupported(f"{type(part).__name__} is not the attention or MLP of {type(layer).__name__}")


def file_of(module: nn.Module) -> str:
    """The import path of the file that defines a module's forward."""
    return path_of(module).rpartition(".")[0]


def is_own(forward: Any) -> bool:
    """True if a module's attribute `forward`, or None for no such attribute, does the same as the class's forward."""
    if getattr(forward, "is_of_keepgrad", False):
        forward = forward.previous
    # To record outputs, transformers before 5.2 sets this attribute; afterwards it leaves the class's method there.
    return forward is None or isinstance(forward, MethodType) or is_recorder(forward)


def is_recorder(forward: Any) -> bool:
    """True if transformers (before 5.2) set this forward on a module, to record its output in one call."""
    return getattr(forward, "__globals__", {}).get("__name__") == "transformers.utils.generic"


def is_recorded(*parts: nn.Module) -> bool:
    """True if the current call of the model asks for the attention weights of these modules."""
    if any(is_recorder(vars(part).get("forward")) for part in parts):
        return True
    capturing = sys.modules.get("transformers.utils.output_capturing")
    if capturing is None or (torch.compiler.is_compiling() and not capturing._active_collector.compiling):
        return False
    return any("attentions" in key for key in capturing._active_collector.get() or ())


PARAMETERS: dict[type, tuple[str, ...]] = {}
"""A cache: the names of the arguments of each class's forward."""


def arguments(m: nn.Module, args: Iterable[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names."""
    return {**dict(zip(names_of(m), args, strict=False)), **kwargs}


def names_of(m: nn.Module) -> tuple[str, ...]:
    if type(m) not in PARAMETERS:
        PARAMETERS[type(m)] = tuple(inspect.signature(type(m).forward).parameters)[1:]
    return PARAMETERS[type(m)]


IMPLEMENTATIONS = (None, "eager", "sdpa", "flash_attention_2", "flash_attention_3")
WITHOUT_EFFECT = ("output_hidden_states", "return_dict", "use_cache", "num_items_in_batch", "return_loss")
"""Arguments that models pass on to their layers, but that the layers do not use."""


def check_call(m: Any, given: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise NotRows if a call of an attention uses arguments, or an implementation, that are not known here."""
    inner = inner_of(m)
    asked = [name for name, value in given.items() if value is not None and value is not False]
    if any(name not in known and name not in WITHOUT_EFFECT for name in asked) or is_recorded(m, inner):
        raise NotRows
    if getattr(getattr(inner, "config", None), "_attn_implementation", None) not in IMPLEMENTATIONS:
        raise NotRows


class Layer(Adapter):
    """A layer of transformers. Subclasses define `layer`, its forward. `known` lists the arguments they understand."""

    known: tuple[str, ...] = ()

    def forward(self, m: Any, run: RunBranch, *args: Any, **kwargs: Any) -> Any:
        # Since 5.23 the forward of the class does the checkpointing. This forward replaces it, so it has to do it too.
        if (
            m.training
            and getattr(m, "gradient_checkpointing", False)
            and unwrapped(type(m).forward) is not type(m).forward
        ):
            return m._gradient_checkpointing_func(partial(self.layer, m, run, **kwargs), *args)
        return self.layer(m, run, *args, **kwargs)

    def layer(self, m: Any, run: RunBranch, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


@adapts(*classes({**VIT, **CHINESE_CLIP}, "Layer"), *classes(SIGLIP, "EncoderLayer"))
class EncoderLayer(Layer):
    """Attention and an MLP, each with a norm before it."""

    known: tuple[str, ...] = ("attention_mask", "causal_attention_mask")

    def branches(self, m: Any) -> dict[str, Any]:
        return {
            "attention": [
                one_of(m, "layernorm_before", "norm1", "layer_norm1"),
                self.attention(m),
                *self.behind(m, 1),
            ],
            "mlp": [one_of(m, "layernorm_after", "norm2", "layer_norm2"), *mlp(m), *self.behind(m, 2)],
        }

    def attention(self, m: Any) -> Attention:
        return attention(m, one_of(m, "attention", "self_attn"))

    def behind(self, m: Any, number: int) -> list[Any]:
        """The items after the attention (number 1) or the MLP (number 2), before the residual is added."""
        found = [getattr(m, name) for name in ("dropout", f"layer_scale{number}") if hasattr(m, name)]
        scale = f"lambda_{number}"
        if isinstance(getattr(m, scale, None), Tensor):
            found.append(Scale(partial(getattr, m, scale)))
        return [*found, m.drop_path] if hasattr(m, "drop_path") else found

    def covers(self, m: Any) -> bool:
        """True if every parameter and every dropout of the layer is known. A later version may add some."""
        biases = [part for name, part in m.named_modules() if name.endswith("position_bias")]
        inside = {id(p) for part in biases for p in part.parameters()}
        for item in (item for items in self.branches(m).values() for item in items):
            parts: tuple[Any, ...] = (item,)
            if isinstance(item, Attention):
                parts = (*item.project, *item.out)
                inside.add(id(getattr(inner_of(item.module), "dropout", None)))
            inside |= {id(part) for part in parts} | {id(p) for part in parts for p in parameters_of(part)}
        own = [part for part in m.modules() if file_of(part) == file_of(m)]
        drops = [child for part in own for child in part.children() if isinstance(child, nn.Dropout)]
        return all(id(one) in inside for one in (*m.parameters(), *drops))

    def layer(self, m: Any, run: RunBranch, *args: Any, **kwargs: Any) -> Any:
        given = arguments(m, args, kwargs)
        x = given.pop("hidden_states")
        if x.dim() != 3:
            raise NotRows
        attn = one_of(m, "attention", "self_attn")
        check_call(attn, given, self.known)
        options = self.options(m, attn, x, given)
        x = run("attention", x, x, **options)
        x = run("mlp", x, x, attn_mask=options["attn_mask"])
        return (x,) if "output_attentions" in names_of(m) else x

    def options(self, m: Any, attn: Any, x: Tensor, given: dict[str, Any]) -> dict[str, Any]:
        """Turn the arguments of a call of the layer into those of `Program.bind`."""
        masks = [given.get("attention_mask"), given.get("causal_attention_mask")]
        return {"attn_mask": added(masks), "given": given}


def added(masks: Iterable[Any]) -> Tensor | None:
    """The sum of the masks and biases that are not None, each `[batch, heads, n, n]`; None if all are None."""
    there = [mask for mask in masks if mask is not None]
    if any(not isinstance(mask, Tensor) or mask.dim() != 4 for mask in there):
        raise NotRows
    return sum(there[1:], there[0]) if there else None


@adapts(*classes(CLIP, "EncoderLayer"))
class ClipLayer(EncoderLayer):
    """CLIP's layer, for images or text. Text is causal, which a call says with a mask or with `is_causal`."""

    known = (*EncoderLayer.known, "is_causal")

    def options(self, m: Any, attn: Any, x: Tensor, given: dict[str, Any]) -> dict[str, Any]:
        options = super().options(m, attn, x, given)
        flag = bool(given.get("is_causal")) and attn.config._attn_implementation not in (None, "eager")
        return {**options, "is_causal": flag and options["attn_mask"] is None}


@adapts(*classes(BEIT, "Layer"))
class BeitLayer(EncoderLayer):
    """BEiT's layer, with a learned bias for each relative position, owned by the layer or shared by the model."""

    known = ("attention_mask", "relative_position_bias", "interpolate_pos_encoding", "resolution")

    def options(self, m: Any, attn: Any, x: Tensor, given: dict[str, Any]) -> dict[str, Any]:
        inner = inner_of(attn)
        owner = m if inner is attn else inner
        module, bias = getattr(owner, "relative_position_bias", None), None
        if module is not None:
            size = getattr(m, "patch_size", None) or inner.config.patch_size
            window = tuple(side // size for side in given["resolution"])
            bias = module(window, given.get("interpolate_pos_encoding", False), dim_size=x.shape[1])
        mask = added([bias, one_mask(given)])
        if owner is m:
            names = ("interpolate_pos_encoding", "resolution")
            given = {**{k: v for k, v in given.items() if k not in names}, "attention_mask": mask}
        return {"attn_mask": mask, "given": given}


def one_mask(given: Mapping[str, Any]) -> Any:
    """The mask of a call. In version 4 this argument was named `relative_position_bias`."""
    return given.get("attention_mask", given.get("relative_position_bias"))


@adapts(*classes(DINOV3, "Layer"))
class Dinov3Layer(EncoderLayer):
    """DINOv3's layer, with rotary embeddings for the patches. The tokens before them are not rotated."""

    known = ("attention_mask", "position_embeddings")

    def options(self, m: Any, attn: Any, x: Tensor, given: dict[str, Any]) -> dict[str, Any]:
        cos, sin = given["position_embeddings"]
        before = (0, 0, x.shape[1] - sin.shape[-2], 0)
        return {**super().options(m, attn, x, given), "rope": (F.pad(sin, before), F.pad(cos, before, value=1.0))}


@adapts(*classes(SWIN, "Attention"))
class WindowAttention(Adapter):
    """Attention among the positions of each window, on rows `[batch * windows, positions, channels]`.

    A mask has the shape `[windows, n, n]`, for the windows of one image. The engine repeats it for each image.
    """

    def branches(self, m: Any) -> dict[str, Any]:
        inner = inner_of(m)
        owner = one_of(inner, "relative_position_bias") if inner is m else inner
        area = owner.window_size[0] * owner.window_size[1]

        def bias() -> Tensor:
            table = owner.relative_position_bias_table[owner.relative_position_index.view(-1)]
            return table.view(area, area, -1).permute(2, 0, 1)

        return {"attention": [attention(m, m, bias=bias, layout=tuple(owner.window_size))]}

    def forward(self, m: Any, run: RunBranch, *args: Any, **kwargs: Any) -> Any:
        given = arguments(m, args, kwargs)
        x, mask = given.pop("hidden_states"), given.get("attention_mask")
        check_call(m, given, ("attention_mask",))
        x = run("attention", x, attn_mask=None if mask is None else mask.unsqueeze(1), given=given)
        return (x,) if "output_attentions" in names_of(m) else (x, None)


@adapts(*classes(SWIN, "Layer"))
class WindowLayer(Layer):
    """Swin's layer. The library's own functions cut the map into windows; the attention in them is another block."""

    def branches(self, m: Any) -> dict[str, Any]:
        return {"mlp": [m.layernorm_after, *mlp(m), *([m.dropout] if hasattr(m, "dropout") else [])]}

    def layer(self, m: Any, run: RunBranch, *args: Any, **kwargs: Any) -> Any:
        given = arguments(m, args, kwargs)
        x, (height, width) = given.pop("hidden_states"), given.pop("input_dimensions")
        always = given.pop("always_partition", False)
        check_call(m.attention, given, ())
        if not always:
            m.set_shift_and_window_size((height, width))
        x = x + m.drop_path(self.attend(m, m.layernorm_before(x).unflatten(1, (height, width))).flatten(1, 2))
        x = run("mlp", x, x, (height, width))
        return (x,) if "output_attentions" in names_of(m) else (x, None)

    def attend(self, m: Any, x: Tensor) -> Tensor:
        """Attention in the windows of a map `[batch, height, width, channels]`."""
        (height, width), size, shift = x.shape[1:3], m.window_size, m.shift_size
        library = unwrapped(type(m).forward).__globals__
        x = m.maybe_pad(x, height, width)[0]
        tall, wide = x.shape[1:3]
        mask = m.get_attn_mask(tall, wide, dtype=x.dtype, device=x.device)
        x = x.roll((-shift, -shift), (1, 2)) if shift > 0 else x
        x = m.attention(library["window_partition"](x, size).flatten(1, 2), mask)[0]
        x = m.dropout(x) if hasattr(m, "dropout") else x
        x = library["window_reverse"](x.unflatten(1, (size, size)), size, tall, wide)
        x = x.roll((shift, shift), (1, 2)) if shift > 0 else x
        return x[:, :height, :width]


@steps_for(*classes(CONVNEXT, "GRN"))
def _response_norm(m: Any) -> list[Step]:
    return [Step(GlobalResponseNorm(1e-6), (lambda: m.weight.flatten(), lambda: m.bias.flatten()))]


@adapts(*classes(CONVNEXT, "Layer"))
class ConvNextLayer(Adapter):
    """The depthwise convolution mixes positions, so it is left to autograd."""

    gives_rows = False

    def branches(self, m: Any) -> dict[str, Any]:
        act = one_of(m, "act", "activation_fn")
        norm = [m.grn] if hasattr(m, "grn") else []
        scale = [Scale(partial(one_of, m, "layer_scale_parameter", "gamma"))] if not norm else []
        return {
            "mlp": [
                *(one_of(m, "layernorm", "layer_norm"), one_of(m, "pwconv1", "pointwise_conv1"), act, *norm),
                *(one_of(m, "pwconv2", "pointwise_conv2"), *scale, m.drop_path),
            ]
        }

    def forward(self, m: Any, run: RunBranch, x: Tensor) -> Tensor:
        mixed = one_of(m, "dwconv", "depthwise_conv")(x)
        shape = mixed.shape[2:]
        return maps_of(run("mlp", rows_of(mixed), rows_of(x), shape), shape)
