"""torch.nn modules as stages. Everything position-wise that is not known here becomes an opaque stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.stages import Link, Opaque, Pointwise, linear, noise, pointwise
from . import Unsupported

__all__ = ["callable_of", "is_plain", "links_of", "opaque", "weight_and_bias"]

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def is_plain(module: nn.Module, *classes: type[nn.Module]) -> bool:
    """Whether calling the module does just what the forward of one of these classes does: no hooks, no override."""
    if "forward" in vars(module) or not any(type(module).forward is known.forward for known in classes):
        return False
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return not any(hooks)


def weight_and_bias(module: Any) -> tuple[Tensor, Tensor | None] | None:
    """Weight `[out, in]` and bias of a linear layer or of a 1x1 convolution; None for every other module."""
    if is_plain(module, nn.Linear):
        return module.weight, module.bias
    if is_plain(module, nn.Conv2d):
        pointwise = module.kernel_size == (1, 1) and module.stride == (1, 1) and module.groups == 1
        if pointwise and module.padding == (0, 0):
            return module.weight.flatten(1), module.bias
    return None


def links_of(module: Any) -> list[Link]:
    """A position-wise module as stages.

    Raises:
        Unsupported: if the module draws random numbers in a way that cannot be redone.
    """
    if is_plain(module, nn.Identity):
        return []
    if is_plain(module, *DROPOUTS):
        return [noise(module)] if module.training and module.p > 0 else []
    layer = weight_and_bias(module)
    if layer is not None:
        return [linear(layer)]
    if getattr(module, "inplace", False):
        raise Unsupported(f"{type(module).__name__} works in place; build it with inplace=False")
    for inner in module.modules():
        if isinstance(inner, DROPOUTS) and inner.training and inner.p > 0:
            raise Unsupported(f"{type(module).__name__} draws dropout inside a module that keepgrad does not know")
    return [opaque(module)]


def callable_of(module: nn.Module) -> Callable[..., Tensor]:
    """The module as a function: its bare forward if calling it does nothing else."""
    return module.forward if is_plain(module, type(module)) else module


def opaque(module: nn.Module) -> Link:
    """Any position-wise module on rows, redone in backward with its hooks and whatever else it does.

    It counts as heavy if it has a matrix, else as cheap (a custom activation or norm).
    """
    named = dict(module.named_parameters())
    if not named:
        return pointwise(callable_of(module))
    names, tensors = tuple(named), tuple(named.values())

    def fn(x: Tensor, *tensors: Tensor) -> Tensor:
        return torch.func.functional_call(module, dict(zip(names, tensors, strict=True)), (x,))

    if all(t.dim() < 2 for t in tensors):
        return Pointwise(fn), tensors
    features = getattr(module, "out_features", None)
    return Opaque(fn, None if features is None else lambda _: features), tensors
