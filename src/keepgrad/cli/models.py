"""Models by name, for every command."""

from __future__ import annotations

import argparse
import contextlib
import difflib
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError, KeepgradError

__all__ = ["create", "positive", "size_of", "timm"]


def timm() -> Any:
    try:
        import timm
    except ImportError:
        raise KeepgradError("models by name come from timm: pip install 'keepgrad[timm]'") from None
    return timm


def create(name: str, *, size: int | None = None, device: str | None = None, **options: Any) -> nn.Module:
    """A model of timm by its name, for images of `size` pixels a side; on the meta device it takes no memory.

    Raises:
        ConfigError: if there is no such model; names the nearest ones.
    """
    known = timm().list_models()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(near)}?" if near else "see timm.list_models()"
        raise ConfigError(f"timm has no model {name!r}; {hint}")
    with torch.device(device or "cpu"):
        if size is not None:
            with contextlib.suppress(TypeError):  # a model for any size has no such option
                return timm().create_model(name, img_size=size, **options).train()
        return timm().create_model(name, **options).train()


def size_of(model: Any, given: int | None) -> tuple[int, int, int]:
    """Channels, height and width of the model's input; `given` pixels a side, where it takes other sizes."""
    channels, height, width = model.pretrained_cfg.get("input_size", (3, 224, 224))
    return (channels, height, width) if given is None else (channels, given, given)


def positive(text: str) -> int:
    """An argument that is a whole number from 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return value
