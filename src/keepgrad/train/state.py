"""What `--resume` continues from, and weights for others.

`state.pt` holds all of a run in one file, so that its parts cannot belong to different steps. `best.safetensors` and
`last.safetensors` are plain weights under the model's own names, which timm loads without keepgrad; their metadata say
what model they are for. All are written whole or not at all, and are read without running code from them.
"""

from __future__ import annotations

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

from ..errors import FileError
from ..files import written_whole

__all__ = ["State", "optimizer_state_of", "read_weights", "restore", "weights_of", "write_weights"]

_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
KEY = "keepgrad"


@dataclass
class State:
    """A run between two steps."""

    step: int = 0
    model: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    scaler: dict[str, Any] | None = None
    ema: dict[str, Any] | None = None
    history: list[dict[str, float]] = field(default_factory=list)  # a row for each epoch that is over
    running: dict[str, float] = field(default_factory=dict)  # sums over the epoch that is not
    about: dict[str, Any] = field(default_factory=dict)  # what must be the same in a run that continues this one
    samples: int | None = None  # that a step takes, over all processes

    def write(self, path: Path) -> None:
        """Raises FileError; the state from before is then still there."""
        with written_whole(path) as partial:
            torch.save(vars(self), partial)

    @classmethod
    def read(cls, path: Path, mapped: bool = False) -> State:
        """Raises FileError if this is no state of a run. With `mapped`, tensors are not read before they are used."""
        try:
            return cls(**torch.load(path, map_location="cpu", weights_only=True, mmap=mapped))
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise FileError(f"{path} is not a state that can be resumed: {reason[:200]}") from None


def weights_of(model: nn.Module) -> dict[str, Any]:
    """The weights, whole and on the CPU, in the first process; to be called in all of them."""
    return get_model_state_dict(model, options=_WHOLE)


def optimizer_state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The same of the optimizer's state, by the names of the weights."""
    return get_optimizer_state_dict(model, optimizer, options=_WHOLE)


def restore(model: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> None:
    """Put weights and optimizer state back, whole or sharded; to be called in all processes, each with the state.

    The model is the bare one: under the names that DDP gives to weights, torch does not find them in every process.
    """
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, state.model, options=options)
    set_optimizer_state_dict(model, optimizer, state.optimizer, options=options)


def write_weights(path: Path, weights: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Weights in safetensors, with what they are for in its metadata."""
    from safetensors.torch import save_file

    # A copy of each: safetensors refuses tensors that share memory.
    own = {name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in weights.items()}
    with written_whole(path) as partial:
        save_file(own, partial, metadata={"format": "pt", KEY: json.dumps(dict(about))})


def read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights, and what `write_weights` wrote of them.

    Raises:
        FileError: if the file cannot be read, or is not of keepgrad.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get(KEY, "null"))
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        raise FileError(f"{path} cannot be read as safetensors: {error}") from None
    return weights, about or {}
