"""The saved state that `--resume` continues from, and weight files for use elsewhere.

`state.pt` holds the whole state of a run in one file, so its parts always belong to the same step. `best.safetensors`
and `last.safetensors` hold only weights, under the model's own parameter names, so timm can load them without keepgrad.
Their metadata describes the model. A file is either written completely or not changed at all, and reading one never
runs code from it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ... import models
from ...errors import ConfigError, FileError
from ...files import written_whole
from ...numbers import Numbers
from ...report import brief

__all__ = ["State", "optimizer_state_of", "read_weights", "restore", "weights_of", "write_weights"]

_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
KEY = "keepgrad"
MARK = b"keepgrad sha256 "
DIGEST = 32


@dataclass
class State:
    """The state of a run between two steps."""

    step: int = 0
    model: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    scaler: dict[str, Any] | None = None
    ema: dict[str, Any] | None = None
    history: list[dict[str, float]] = field(default_factory=list)  # one row per finished epoch
    running: dict[str, float] = field(default_factory=dict)  # sums over the current epoch
    about: dict[str, Any] = field(default_factory=dict)  # values that must not change when the run is resumed
    samples: int | None = None  # samples per step, over all processes

    def write(self, path: Path) -> None:
        """Write the state to a file. Raises FileError if that fails; the previous file is then unchanged."""
        with written_whole(path) as partial:
            torch.save(vars(self), partial)
            digest = _digest(partial, partial.stat().st_size)
            with partial.open("ab") as file:
                file.write(MARK + digest)

    @classmethod
    def read(cls, path: Path, mapped: bool = False) -> State:
        """Read a state. With `mapped`, tensors are memory-mapped and the checksum is not checked.

        Raises:
            FileError: if the file is not the state of a run, or is damaged.
        """
        try:
            if not mapped:
                _check(path)
            return cls(**torch.load(path, map_location="cpu", weights_only=True, mmap=mapped))
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise FileError(f"{path} is not a state that can be resumed: {reason[:200]}") from None


def _check(path: Path) -> None:
    """Check a file against the checksum at its end, which covers everything before it."""
    size = path.stat().st_size - len(MARK) - DIGEST
    with path.open("rb") as file:
        file.seek(max(0, size))
        end = file.read()
    if size < 0 or not end.startswith(MARK):
        raise ValueError("its end is missing")
    if _digest(path, size) != end[len(MARK) :]:
        raise ValueError("its content is not what was written; is the disk failing?")


def _digest(path: Path, size: int) -> bytes:
    """The SHA-256 checksum of the first `size` bytes of a file."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while size:
            part = file.read(min(size, 2**22))
            if not part:
                break
            found.update(part)
            size -= len(part)
    return found.digest()


def weights_of(model: nn.Module) -> dict[str, Any]:
    """The full (unsharded) weights on the CPU. All processes must call this; only the first gets the weights."""
    return get_model_state_dict(model, options=_WHOLE)


def optimizer_state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Like `weights_of`, for the optimizer state. Its keys are the names of the weights."""
    return get_optimizer_state_dict(model, optimizer, options=_WHOLE)


def restore(model: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> None:
    """Load weights and optimizer state into a model, sharded or not. All processes must call this with the state.

    `model` must not be wrapped in DDP: DDP renames the weights, and torch then does not find them in every process.

    Raises:
        FileError: if the state lacks a weight, has an extra one, or has one of another shape.
    """
    options = StateDictOptions(full_state_dict=True)
    own = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    for name in sorted(own.keys() | state.model.keys()):
        given = tuple(state.model[name].shape) if name in state.model else None
        if own.get(name) != given:
            raise FileError(f"the state has {name} of shape {given}, and the model of {own.get(name)}; it cannot go on")
    set_model_state_dict(model, state.model, options=options)
    set_optimizer_state_dict(model, optimizer, state.optimizer, options=options)


def write_weights(path: Path, weights: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write weights to a safetensors file. `about` describes the model and goes into the metadata."""
    from safetensors.torch import save_file

    # Copy each tensor: safetensors refuses tensors that share memory.
    own = {name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in weights.items()}
    with written_whole(path) as partial:
        save_file(own, partial, metadata={"format": "pt", KEY: json.dumps(dict(about))})


def read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read weights, and the description that `write_weights` stored with them. It is empty if the file has none.

    Raises:
        FileError: if the file cannot be read, or its description is not in keepgrad's form.
        ConfigError: if the description cannot be used, e.g. has model arguments other than those of an architecture.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get(KEY, "null"))
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        raise FileError(f"{path} cannot be read as safetensors: {error}") from None
    if about is None:
        return weights, {}
    if not isinstance(about, dict):
        raise FileError(f"{path}: what it says of its weights is not in keepgrad's form")
    if "model_kwargs" in about:
        _check_about(about, path)
    return weights, about


def _check_about(about: dict[str, Any], path: Path) -> None:
    """Check the description of a model before it is used: the file may come from anyone.

    It must not make timm open other files, and wrong values must be reported here, not fail later without a reason.
    """
    if not isinstance(about.get("model"), str) or ":" in about["model"]:
        raise ConfigError(f"{path} is for the model {brief(about.get('model'))}, which is no name of timm")
    classes, images = about.get("classes"), about.get("data_config")
    try:
        about["model_kwargs"] = models.architecture(about["model_kwargs"])
        about["size"] = None if about.get("size") is None else models.ARCHITECTURE["img_size"](about["size"])
        if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
            raise ValueError("it does not name its classes")
        if not isinstance(images, dict) or not all(map(_is_plain, images.values())) or not _is_shape(images):
            raise ValueError("it does not say what its images are like")
    except ValueError as error:
        raise ConfigError(f"what {path} says of its weights cannot be used: {error}") from None


def _is_plain(value: Any) -> bool:
    values = value if isinstance(value, list) else [value]
    return all(isinstance(one, (int, float, str, type(None))) for one in values)


def _is_shape(images: dict[str, Any]) -> bool:
    shape = images.get("input_size")
    side = Numbers(int, least=1, most=models.LARGEST)
    return isinstance(shape, list) and len(shape) == 3 and shape == [side(one) for one in shape]
