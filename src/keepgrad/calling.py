"""Call a model with any kind of arguments, and run it in training mode for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["call", "in_training"]


def call(model: Callable[..., Any], inputs: Any) -> Any:
    """The model's output for a tensor, for a tuple or list of arguments, or for a dictionary of them."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


@contextmanager
def in_training(model: nn.Module) -> Iterator[None]:
    """Inside this context, the model is in training mode. At the end, a model from evaluation gets its modes back."""
    if model.training:
        yield
        return
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
