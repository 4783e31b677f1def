"""Autocast as CUDA does it, on any device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .._torch import tree_map_only

__all__ = ["AMP", "CudaRules"]

AMP = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16}

# Operations that CUDA's autocast runs in float32, from torch's documentation. That of the CPU leaves most alone.
FLOAT32_ON_CUDA = {
    *("binary_cross_entropy_with_logits", "cross_entropy", "huber_loss", "kl_div", "l1_loss", "mse_loss"),
    *("nll_loss", "smooth_l1_loss", "group_norm", "layer_norm", "norm", "normalize", "softmax", "log_softmax"),
    *("softplus", "cumprod", "cumsum", "prod", "sum", "exp", "log", "pow", "reciprocal", "rsqrt"),
}


class CudaRules(TorchFunctionMode):
    """Makes autocast on another device run the same operations in float32 as CUDA's autocast."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in FLOAT32_ON_CUDA and torch.is_autocast_enabled(self.device):
            args, kwargs = tree_map_only(Tensor, _widened, (args, kwargs))
        return func(*args, **kwargs)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
