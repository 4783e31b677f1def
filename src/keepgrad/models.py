"""Models by name, for every command: timm's, torchvision's (`torchvision:NAME`) and transformers'
(`hf:NAME_OR_FOLDER`).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .errors import ConfigError, KeepgradError

__all__ = ["ARCHITECTURE", "batch_for", "check_architecture", "create", "load_weights", "size_of", "timm"]

LONGEST = 512
"""How many tokens a text has by default, where the model takes more."""

FRAMES = 16
"""How many frames a clip has, where the model does not say."""


ARCHITECTURE = {
    *("act_layer", "class_token", "conv_mlp", "depth", "depths", "dims", "drop_path_rate", "drop_rate"),
    *("dynamic_img_size", "embed_dim", "global_pool", "img_size", "in_chans", "init_values", "kernel_sizes"),
    *("ls_init_value", "mlp_ratio", "norm_layer", "num_classes", "num_heads", "patch_size", "pos_embed", "qk_norm"),
    *("qkv_bias", "reg_tokens", "stem_type", "use_grn", "window_size"),
}
"""Arguments of timm's models that a file of weights may choose: they say what is built, and open no file and no URL."""


def check_architecture(options: Any, where: str) -> None:
    """Raises ConfigError if there is another argument than those of `ARCHITECTURE`, or a value that is not plain."""
    if not isinstance(options, dict):
        raise ConfigError(f"{where} has {options!r:.80} for arguments of the model; give names and values")
    for name, value in options.items():
        if name not in ARCHITECTURE:
            known = ", ".join(sorted(ARCHITECTURE))
            raise ConfigError(f"{where} has the argument {name!r:.80} of the model; only these are taken: {known}")
        for one in value if isinstance(value, list) else [value]:
            if not isinstance(one, (int, float, str, type(None))):
                raise ConfigError(f"{where} has {name}={value!r:.80}; give a number, a text, or a list of them")


def timm() -> Any:
    try:
        import timm
    except ImportError:
        raise KeepgradError("models by name come from timm: pip install 'keepgrad[timm]'") from None
    return timm


def create(name: str, *, size: int | None = None, device: str | None = None, **options: Any) -> nn.Module:
    """A model by its name, for images of `size` pixels a side; on the meta device it takes no memory.

    Raises:
        ConfigError: if there is no such model (names the nearest ones), or it does not take the options.
    """
    library, colon, own_name = name.partition(":")
    makers: dict[str, Callable[..., nn.Module]] = {"torchvision": _torchvision, "hf": _transformers}
    if colon and library not in makers:
        raise ConfigError(f"{name!r}: a model is a name of timm, torchvision:NAME, or hf:NAME_OR_FOLDER")
    make = makers[library] if colon else _timm
    if not colon:
        own_name = name
    size_option = "image_size" if colon else "img_size"
    attempts = [options] if size is None else [{size_option: size, **options}, options]
    for number, attempt in enumerate(attempts):
        try:
            with torch.device(device or "cpu"):
                return make(own_name, **attempt).train()
        except (TypeError, AssertionError, RuntimeError, ValueError) as error:
            if isinstance(error, KeepgradError):
                raise
            if number + 1 < len(attempts) and isinstance(error, TypeError):
                continue  # a model for any size has no such option
            reason = " ".join(str(error).split()) or type(error).__name__
            given = ", ".join(f"{key}={value}" for key, value in attempt.items())
            raise ConfigError(f"{name} cannot be made with {given or 'its defaults'}: {reason[:300]}") from None
    raise AssertionError


def _check_known(name: str, known: list[str], where: str) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(near)}?" if near else f"see {where}.list_models()"
        raise ConfigError(f"{where.partition('.')[0]} has no model {name!r}; {hint}")


def _timm(name: str, **options: Any) -> nn.Module:
    _check_known(name.partition(".")[0], timm().list_models(), "timm")
    return timm().create_model(name, **options)


def _torchvision(name: str, **options: Any) -> nn.Module:
    try:
        from torchvision import models
    except ImportError:
        raise KeepgradError("models of torchvision need it: pip install 'keepgrad[torchvision]'") from None
    _check_known(name, models.list_models(), "torchvision.models")
    return models.get_model(name, weights=None, **options)


def _transformers(name: str, **options: Any) -> nn.Module:
    """The architecture that a configuration names, without weights."""
    try:
        import transformers
    except ImportError:
        raise KeepgradError("models of transformers need it: pip install 'keepgrad[transformers]'") from None
    try:
        config = transformers.AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"hf:{name}: give a folder with a config.json, or the name of a model on the hub: {reason}"
        ) from None
    size = options.pop("image_size", None)
    if size is not None:
        part = getattr(config, "vision_config", config)
        if not hasattr(part, "image_size"):
            raise ConfigError(f"hf:{name} takes no images; leave out the size")
        part.image_size = size
    for key, value in options.items():
        setattr(config, key, value)
    chosen = next((getattr(transformers, kind, None) for kind in config.architectures or []), None)
    return transformers.AutoModel.from_config(config) if chosen is None else chosen(config)


def frames_of(model: nn.Module) -> int | None:
    """How many frames the clips have that a video model is given; None for other models."""
    if not any(isinstance(module, nn.Conv3d) for module in model.modules()):
        return None
    config = getattr(model, "config", None)
    return getattr(config, "num_frames", getattr(config, "frames_per_clip", FRAMES))


def size_of(model: Any, given: int | None) -> tuple[int, int, int]:
    """Channels, height and width of an image model's input; `given` pixels a side, where it takes other sizes."""
    if hasattr(model, "pretrained_cfg"):
        channels, height, width = model.pretrained_cfg.get("input_size", (3, 224, 224))
    else:
        config = getattr(model, "config", None)
        part = getattr(config, "vision_config", config)
        channels = getattr(part, "num_channels", 3)
        own = getattr(part, "image_size", None) or getattr(part, "crop_size", None)  # V-JEPA calls it so
        side: Any = own or getattr(model, "image_size", 224)
        height, width = (side, side) if isinstance(side, int) else side
    return (channels, height, width) if given is None else (channels, given, given)


def batch_for(model: Any, batch: int, size: int | None = None, length: int | None = None) -> Any:
    """What a training step of the model is given, without data: the shape of images or clips, or the arguments of
    transformers' models.

    Args:
        model: the model.
        batch: the number of samples.
        size: pixels a side.
        length: tokens a text.
    """
    config = getattr(model, "config", None)
    frames = frames_of(model)
    if not hasattr(model, "main_input_name") or config is None:
        channels, *sides = size_of(model, size)
        return (batch, channels, *sides) if frames is None else (batch, channels, frames, *sides)
    if frames is not None and model.main_input_name in ("pixel_values", "pixel_values_videos"):
        return {model.main_input_name: torch.empty(batch, frames, *size_of(model, size), device="meta")}
    given: dict[str, Tensor] = {}
    text = getattr(config, "text_config", config)
    if model.main_input_name == "input_ids" or hasattr(config, "text_config"):
        most = getattr(text, "max_position_embeddings", LONGEST)
        count = length or min(most, LONGEST)
        given["input_ids"] = torch.zeros(batch, count, dtype=torch.int64, device="meta")
    if model.main_input_name == "pixel_values" or hasattr(config, "vision_config"):
        given["pixel_values"] = torch.empty(batch, *size_of(model, size), device="meta")
    if not given:
        raise ConfigError(f"{type(model).__name__} takes {model.main_input_name}, neither images nor text")
    return given


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a checkpoint without running code from it.

    Raises:
        ConfigError: if the file is not there, or does not fit the model.
    """
    from timm.models import load_checkpoint

    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file")
    try:
        load_checkpoint(model, str(path), weights_only=True)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{path} does not load into the model: {reason[:300]}") from None
