"""Models by name, for every command."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError, KeepgradError

__all__ = ["create", "load_weights", "size_of", "timm"]


def timm() -> Any:
    try:
        import timm
    except ImportError:
        raise KeepgradError("models by name come from timm: pip install 'keepgrad[timm]'") from None
    return timm


def create(name: str, *, size: int | None = None, device: str | None = None, **options: Any) -> nn.Module:
    """A model of timm by its name, for images of `size` pixels a side; on the meta device it takes no memory.

    Raises:
        ConfigError: if there is no such model (names the nearest ones), or it does not take the options.
    """
    known = timm().list_models()
    if name.partition(".")[0] not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(near)}?" if near else "see timm.list_models()"
        raise ConfigError(f"timm has no model {name!r}; {hint}")
    attempts = [options] if size is None else [{"img_size": size, **options}, options]
    for number, attempt in enumerate(attempts):
        try:
            with torch.device(device or "cpu"):
                return timm().create_model(name, **attempt).train()
        except (TypeError, AssertionError, RuntimeError, ValueError) as error:
            if number + 1 < len(attempts) and isinstance(error, TypeError):
                continue  # a model for any size has no such option
            reason = " ".join(str(error).split()) or type(error).__name__
            given = ", ".join(f"{key}={value}" for key, value in attempt.items())
            raise ConfigError(f"{name} cannot be made with {given or 'its defaults'}: {reason[:300]}") from None
    raise AssertionError


def size_of(model: Any, given: int | None) -> tuple[int, int, int]:
    """Channels, height and width of the model's input; `given` pixels a side, where it takes other sizes."""
    channels, height, width = model.pretrained_cfg.get("input_size", (3, 224, 224))
    return (channels, height, width) if given is None else (channels, given, given)


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
