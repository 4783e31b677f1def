"""RMS norms as language models compute them: in float32, whatever the dtype of the rows.

    y = w x r,   r = (mean of x^2 over the channels + eps) ^ -1/2
    dx = r (g - x r^2 mean(g x)),   dw = sum of dy x r over the rows,   with g = w dy

`w` is the weight, or with `one_more` the weight plus one (Gemma). Some models cast back to the dtype of the rows before
they multiply with the weight (Llama), others afterwards (Gemma). `casts_first` says which, so that the forward equals
the model's own. It is a cheap stage: nothing is saved besides its input, and `r` is redone in backward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .stages import Link, Point, Pointwise, Pull, cast

__all__ = ["RmsNorm", "weighted_rms_norm"]


@dataclass(frozen=True)
class RmsNorm(Pointwise):
    """An RMS norm with a weight. Its backward is written out because autograd's takes a dozen passes over the rows."""

    eps: float = 1e-6
    one_more: bool = False
    makes_new = True

    def vjp(self, at: Point) -> tuple[Tensor | None, Pull]:
        assert at.x is not None
        (weight,), x = at.tensors, at.x
        rows = cast(x, torch.float32)
        root = _root(rows, self.eps)

        def pull(grad: Tensor) -> tuple[Tensor | None, tuple[Tensor | None, ...]]:
            normed = rows * root
            dy = cast(grad, torch.float32)
            d_weight = cast((dy * normed).flatten(0, -2).sum(0), weight.dtype) if at.needs[0] else None
            if not at.need_input:
                return None, (d_weight,)
            factor = cast(weight, torch.float32)
            inner = dy * (1 + factor if self.one_more else factor)
            along = (inner * normed).mean(-1, keepdim=True)
            return cast(inner.sub_(normed.mul_(along)).mul_(root), x.dtype), (d_weight,)

        return self.fn(x, weight) if at.need_output else None, pull


def weighted_rms_norm(weight: Tensor, eps: float, one_more: bool = False, casts_first: bool = True) -> Link:
    """An `RmsNorm` stage for a weight `[channels]`."""

    def fn(x: Tensor, weight: Tensor) -> Tensor:
        rows = cast(x, torch.float32)
        normed = rows * _root(rows, eps)
        if casts_first:
            return (1 + weight if one_more else weight) * cast(normed, x.dtype)
        factor = cast(weight, torch.float32)
        return cast(normed * (1 + factor if one_more else factor), x.dtype)

    return RmsNorm(fn, eps=eps, one_more=one_more), (weight,)


def _root(rows: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps)
