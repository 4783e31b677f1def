"""Make models by name, for every command: of timm (`NAME`), torchvision (`torchvision:NAME`) and transformers
(`hf:NAME_OR_FOLDER`).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .adapters.items import path_of
from .adapters.registry import REGISTRY
from .errors import ConfigError, KeepgradError, reason_of
from .numbers import Numbers

__all__ = [
    "ARCHITECTURE",
    "LARGEST",
    "architecture",
    "batch_for",
    "check_takes",
    "create",
    "inputs_for",
    "load_weights",
    "size_of",
    "timm",
]

LONGEST = 512
"""How many tokens a text has by default, if the model takes more."""

FRAMES = 16
"""How many frames a clip has, if the model does not say."""


LARGEST = 8192
"""The most pixels per side. Such an image takes 800 MB in float32; a larger number is probably a typing error."""


def _text(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ValueError("give a text")
    return value


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("give true or false")
    return value


def _initial(value: Any) -> float | None:
    return None if value is None else Numbers(float, least=0)(value)


ARCHITECTURE: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("act_layer", "global_pool", "norm_layer", "pos_embed", "stem_type"), _text),
    **dict.fromkeys(("class_token", "conv_mlp", "dynamic_img_size", "qk_norm", "qkv_bias", "use_grn"), _truth),
    **dict.fromkeys(("dims", "embed_dim", "in_chans", "num_classes", "num_heads"), Numbers(int, least=1, most=2**24)),
    **dict.fromkeys(("kernel_sizes", "patch_size", "window_size"), Numbers(int, least=1, most=LARGEST)),
    **dict.fromkeys(("depth", "depths", "reg_tokens"), Numbers(int, least=0, most=10_000)),
    **dict.fromkeys(("drop_path_rate", "drop_rate"), Numbers(float, least=0, below=1)),
    **dict.fromkeys(("init_values", "ls_init_value"), _initial),
    "img_size": Numbers(int, least=1, most=LARGEST),
    "mlp_ratio": Numbers(float, above=0, most=1000),
}
"""Arguments of timm's models that a flag or a file of weights may set, and which values each may have.

They only describe the architecture: none of them opens a file or a URL.
"""


SEVERAL = {
    *("depths", "dims", "embed_dim", "img_size", "kernel_sizes", "mlp_ratio", "num_heads"),
    *("patch_size", "window_size"),
}
"""Arguments that may be a list: one value for each stage, or one for height and one for width."""


def architecture(options: Any) -> dict[str, Any]:
    """Check the arguments of a model against `ARCHITECTURE`, and return them.

    Raises:
        ValueError: if an argument is not in `ARCHITECTURE`, or has the wrong kind of value.
    """
    if not isinstance(options, dict):
        raise ValueError("give names and values of the model's arguments, e.g. img_size=32,patch_size=4")
    found = {}
    for name, value in options.items():
        if name not in ARCHITECTURE:
            known = ", ".join(sorted(ARCHITECTURE))
            raise ValueError(f"{name!r:.80} is no argument of a model that can be chosen; these are: {known}")
        kind = ARCHITECTURE[name]
        try:
            if isinstance(value, list) and name not in SEVERAL:
                raise ValueError("give one value, not a list")
            found[name] = [kind(one) for one in value] if isinstance(value, list) else kind(value)
        except ValueError as error:
            raise ValueError(f"{name}={value!r:.80}: {error}") from None
    return found


def timm() -> Any:
    try:
        import timm
    except ImportError:
        raise KeepgradError("models by name come from timm: pip install 'keepgrad[timm]'") from None
    return timm


def create(name: str, *, size: int | None = None, device: str | None = None, **options: Any) -> nn.Module:
    """Make a model by its name, for images of `size` x `size` pixels. On the meta device it takes no memory.

    Raises:
        ConfigError: if there is no such model (the message names the nearest ones), or it does not take the options.
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
        except KeepgradError:
            raise
        except Exception as error:  # libraries raise many kinds of errors for arguments that they do not check
            if number + 1 < len(attempts) and isinstance(error, TypeError):
                continue  # a model that takes any image size has no such option
            given = ", ".join(f"{key}={value!s:.200}" for key, value in attempt.items())
            raise ConfigError(f"{name} cannot be made with {given or 'its defaults'}: {reason_of(error)}") from None
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
    """Build the architecture of a configuration of transformers, without pretrained weights."""
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
    """How many frames a clip has as input of a video model; None for other models."""
    if not any(isinstance(module, nn.Conv3d) or _is_of_clips(module) for module in model.modules()):
        return None
    config = getattr(model, "config", None)
    return getattr(config, "num_frames", getattr(config, "frames_per_clip", FRAMES))


def _is_of_clips(module: nn.Module) -> bool:
    adapter = REGISTRY.get(path_of(module))
    return adapter is not None and adapter.has_frames


def size_of(model: Any, given: int | None) -> tuple[int, int, int]:
    """Channels, height and width of an image model's input. If `given`, height and width are that."""
    if hasattr(model, "pretrained_cfg"):
        channels, height, width = model.pretrained_cfg.get("input_size", (3, 224, 224))
    else:
        config = getattr(model, "config", None)
        part = getattr(config, "vision_config", config)
        channels = getattr(part, "num_channels", 3)
        own = getattr(part, "image_size", None) or getattr(part, "crop_size", None)  # the name in V-JEPA
        side: Any = own or getattr(model, "image_size", 224)
        height, width = (side, side) if isinstance(side, int) else side
    return (channels, height, width) if given is None else (channels, given, given)


def check_takes(model: nn.Module, shape: tuple[int, int, int]) -> None:
    """Run one image without gradients, to find out before training whether the model takes such images.

    Args:
        model: an image classifier, on the CPU.
        shape: channels, height and width of its images.

    Raises:
        ConfigError: if the model fails, or does not return one row per image.
    """
    sizes = " x ".join(map(str, shape))
    was_training = model.training
    try:
        with torch.no_grad():
            found = model.eval()(torch.zeros(1, *shape))
    except Exception as error:  # models raise errors of any kind
        raise ConfigError(f"{type(model).__name__} takes no images of {sizes}: {reason_of(error)}") from None
    finally:
        model.train(was_training)
    if not isinstance(found, Tensor) or found.dim() != 2 or not found.numel():
        given = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ConfigError(
            f"{type(model).__name__} gives {given} for an image of {sizes}; training needs one value per class: change "
            "its arguments"
        )


def batch_for(model: Any, batch: int, size: int | None = None, length: int | None = None) -> Any:
    """Describe the input of a training step, without data.

    Returns the shape of images or clips, or the arguments of a model of transformers.

    Args:
        model: the model.
        batch: the number of samples.
        size: pixels per side of an image.
        length: tokens per text.
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


def inputs_for(model: Any, batch: int, size: int | None = None, length: int | None = None, device: Any = None) -> Any:
    """Random inputs of a training step, as `batch_for` describes them: smooth images or clips, or random tokens."""
    given = batch_for(model, batch, size, length)
    if isinstance(given, tuple):
        return _smooth(given, device)
    text = getattr(getattr(model, "config", None), "text_config", getattr(model, "config", None))
    words = getattr(text, "vocab_size", 2)
    return {
        name: _smooth(tuple(t.shape), device) if t.is_floating_point() else torch.randint(words, t.shape, device=device)
        for name, t in given.items()
    }


def _smooth(shape: tuple[int, ...], device: Any) -> Tensor:
    """Random images whose neighbouring pixels are alike, as in real images."""
    *leading, height, width = shape
    coarse = torch.randn(math.prod(leading), 1, 7, 7, device=device)
    return F.interpolate(coarse, size=(height, width), mode="bicubic").view(shape)


def load_weights(model: nn.Module, path: Path) -> None:
    """Load weights from a checkpoint, without running any code that is in it.

    Raises:
        ConfigError: if the file does not exist, or does not fit the model.
    """
    from timm.models import load_checkpoint

    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file")
    try:
        load_checkpoint(model, str(path), weights_only=True)
    except Exception as error:
        raise ConfigError(f"{path} does not load into the model: {reason_of(error)}") from None
