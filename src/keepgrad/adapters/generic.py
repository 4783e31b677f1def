"""torch.nn modules as stages. Everything position-wise that is not known here becomes an opaque stage."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .._torch import has_hooks
from ..ops.stages import Link, Opaque, Pointwise, gelu, linear, noise, pointwise
from . import Unsupported

__all__ = ["is_plain", "links_of", "opaque", "weight_and_bias"]

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
RANDOM = (*DROPOUTS, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU)
OVER_POSITIONS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.GroupNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.Conv1d, nn.Conv2d, nn.Conv3d),
)


def is_plain(module: nn.Module, *classes: type[nn.Module]) -> bool:
    """Whether calling the module does just what the forward of one of these classes does: no hooks, no override."""
    own = type(module).forward
    for known in classes:
        if own is known.forward:
            return "forward" not in vars(module) and not has_hooks(module)
    return False


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
        Unsupported: if the module is no function of each row alone, or cannot be done again.
    """
    if is_plain(module, nn.Identity):
        return []
    if is_plain(module, *DROPOUTS):
        return [noise(module)] if module.training and module.p > 0 else []
    if is_plain(module, nn.GELU):
        return [gelu(module.approximate)]
    layer = weight_and_bias(module)
    if layer is not None:
        return [linear(layer)]
    return [opaque(module)]


def _refuse(module: nn.Module) -> None:
    """Raise Unsupported for what is no function of each row alone, or cannot be done again."""
    for inner in module.modules():
        kind = type(inner).__name__
        if has_hooks(inner):
            raise Unsupported(f"{kind} has hooks, which expect to see every position once")
        if getattr(inner, "inplace", False):
            raise Unsupported(f"{kind} works in place; build it with inplace=False")
        if isinstance(inner, OVER_POSITIONS):
            raise Unsupported(f"{kind} works over positions or samples")
        if isinstance(inner, RANDOM) and inner.training and getattr(inner, "p", 1) > 0:
            raise Unsupported(f"{kind} draws random numbers inside a module that keepgrad does not know")


def opaque(module: nn.Module) -> Link:
    """Any position-wise module on rows, redone in backward with whatever it does.

    It counts as heavy if it has a matrix, else as cheap (a custom activation or norm).

    Raises:
        Unsupported: if the module is no function of each row alone, or cannot be done again.
    """
    _refuse(module)
    named = dict(module.named_parameters())
    if not named:
        return pointwise(module.forward)
    names, tensors = tuple(named), tuple(named.values())

    def fn(x: Tensor, *tensors: Tensor) -> Tensor:
        return torch.func.functional_call(module, dict(zip(names, tensors, strict=True)), (x,))

    if all(t.dim() < 2 for t in tensors):
        return Pointwise(fn), tensors
    features = getattr(module, "out_features", None)
    return Opaque(fn, None if features is None else lambda _: features), tensors
