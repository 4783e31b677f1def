"""Find the bytes of an optimizer's state by running one of its steps on a small parameter."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .._torch import tree_leaves
from ..errors import ConfigError

__all__ = ["OPTIMIZERS", "state_bytes"]

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer] | None] = {
    "none": None,
    "sgd": torch.optim.SGD,
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
}


def state_bytes(
    model: nn.Module, optimizer: str | Callable[..., torch.optim.Optimizer], size_of: Callable[[Tensor], int]
) -> int:
    """The bytes of the optimizer's state for the model, found by running one step on small parameters.

    `size_of` returns how many bytes of a parameter the optimizer works on.
    """
    make = OPTIMIZERS.get(optimizer, optimizer) if isinstance(optimizer, str) else optimizer
    if make is not None and not callable(make):
        raise ConfigError(
            f"optimizer={make!r} is not known; use one of {', '.join(OPTIMIZERS)}, or a function from parameters "
            "to an optimizer, e.g. lambda params: torch.optim.AdamW(params, amsgrad=True)"
        )
    if make is None:
        return 0
    per_element: dict[torch.dtype, tuple[float, int]] = {}
    total = 0.0
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.dtype not in per_element:
            per_element[parameter.dtype] = _state_of(make, parameter.dtype)
        each, constant = per_element[parameter.dtype]
        total += size_of(parameter) / parameter.element_size() * each + constant
    return int(total)


def _state_of(make: Callable[..., torch.optim.Optimizer], dtype: torch.dtype) -> tuple[float, int]:
    """Bytes of state per element of a parameter, and constant bytes per parameter, such as a step counter."""
    probe = nn.Parameter(torch.zeros(64, 64, dtype=dtype))
    probe.grad = torch.ones_like(probe)
    made = make([probe])
    made.step()
    states = [leaf for leaf in tree_leaves(dict(made.state.get(probe, {}))) if isinstance(leaf, Tensor)]
    each = sum(leaf.nbytes for leaf in states if leaf.dim()) / probe.numel()
    return each, sum(leaf.nbytes for leaf in states if not leaf.dim())
