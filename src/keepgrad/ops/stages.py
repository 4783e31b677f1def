"""The position-wise stages of a branch: what each computes, saves and redoes.

Shapes: a stage maps rows `[batch, positions, in]` to rows `[batch, positions, out]`. Forward runs on all positions,
`vjp` on the slots of a `Kept` only.

| stage     | heavy | saves besides its output        | backward                                           |
| ---       | ---   | ---                             | ---                                                |
| Pointwise | no    | -                               | autograd's, of its forward redone                  |
| Gelu      | no    | -                               | its kernel; overwrites the gradient it is given    |
| LayerNorm | no    | -                               | its kernel, with mean and deviation redone         |
| Opaque    | yes   | -                               | the same; for modules keepgrad does not know       |
| Linear    | yes   | -                               | two matmuls; needs its input, not its output       |
| Noise     | no    | the noise (dropout, drop path)  | a product with the noise                           |

A `Linear` takes the LayerScale behind it along, because the scale's gradient then needs no saved output: with
`y = s * (W x + b)` and `M = dy^T x`, `dW = s M`, `ds = rowsum(W * M) + b * sum(dy)`.

Stages hold no tensors. Parameters travel beside them, as inputs of the autograd.Function, so frozen ones cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..sampling import Kept

__all__ = [
    *("Link", "Point", "Pull", "Stage", "Gelu", "LayerNorm", "Linear", "Noise", "Opaque", "Pointwise"),
    *("cast", "gelu", "layer_norm", "linear", "noise", "pointwise", "rms_norm"),
]

Tensors = tuple[Tensor, ...]
Pull = Callable[[Tensor], tuple[Tensor | None, tuple[Tensor | None, ...]]]
"""From the gradient of a stage's output slots to that of its input slots and of its tensors."""


@dataclass(frozen=True)
class Point:
    """Where a stage is differentiated: the slots of its input, its tensors, and what is wanted.

    `x` is None where neither the stage nor one redone behind it reads it.
    """

    x: Tensor | None
    tensors: Tensors
    needs: tuple[bool, ...]
    extras: Tensors
    kept: Kept | None
    need_output: bool
    need_input: bool


@dataclass(frozen=True)
class Stage:
    """One step of a branch. Subclasses say how it runs forward on all rows and backward on slots."""

    heavy = False
    """Whether redoing this stage in backward costs about as much as its backward itself."""
    reads_all = False
    """Whether backward needs the input of every position, not of the slots alone."""
    writes_all = False
    """Whether what follows is not reduced to slots either."""
    makes_new = False
    """Whether its output and its input gradient are surely new tensors, which the next stage may overwrite."""
    casts = False
    """Whether autocast has it read its input in lower precision."""
    overwrites = False
    """Whether `overwrite` may take the place of `forward`, and whether `vjp` overwrites the gradient it is given."""

    def overwrite(self, x: Tensor) -> Tensor:
        """The output for all rows, in the place of the input."""
        raise NotImplementedError

    def forward(self, x: Tensor, tensors: Tensors, kept: Kept | None, keep_extras: bool) -> tuple[Tensor, Tensors]:
        """The output for all rows, and what to save for `vjp` besides inputs and outputs (if `keep_extras`)."""
        raise NotImplementedError

    def vjp(self, at: Point) -> tuple[Tensor | None, Pull]:
        """The output slots, if needed, and the pull-back."""
        raise NotImplementedError

    def needs_input(self, needs: tuple[bool, ...], redo: bool) -> bool:
        """Whether `vjp` reads its input; `redo` says that extras are not saved."""
        return True

    def redoable(self, reduced: bool) -> bool:
        """Whether the output slots follow from the input slots."""
        return True

    def width(self, width: int) -> int:
        """The number of output channels for an input of `width` channels."""
        return width

    def saved_width(self, width: int) -> int:
        """How many channels a position plain autograd saves for this stage, its output not counted."""
        return width

    def extra_width(self, width: int, keep_ratio: float) -> float:
        """How many channels a position `forward` returns as extras."""
        return 0.0


Link = tuple[Stage, Tensors]
"""A stage and its tensors."""


@dataclass(frozen=True)
class Pointwise(Stage):
    """A cheap function of each row: a norm, an activation, a gate."""

    fn: Callable[..., Tensor]
    out_width: Callable[[int], int] | None = field(default=None)

    def forward(self, x: Tensor, tensors: Tensors, kept: Kept | None, keep_extras: bool) -> tuple[Tensor, Tensors]:
        return self.fn(x, *tensors), ()

    def vjp(self, at: Point) -> tuple[Tensor | None, Pull]:
        assert at.x is not None
        return partial_vjp(self.fn, at.x, at.tensors, at.needs)

    def width(self, width: int) -> int:
        return self.out_width(width) if self.out_width else width


@dataclass(frozen=True)
class Gelu(Pointwise):
    """GELU, with the backward kernel called directly: a graph of one node costs more than the node on small maps."""

    approximate: str = "none"
    makes_new = True
    overwrites = True

    def overwrite(self, x: Tensor) -> Tensor:
        return torch.ops.aten.gelu_(x, approximate=self.approximate)

    def vjp(self, at: Point) -> tuple[Tensor | None, Pull]:
        x = at.x
        assert x is not None

        def pull(grad: Tensor) -> tuple[Tensor, tuple[Tensor | None, ...]]:
            grad = cast(grad, x.dtype)
            torch.ops.aten.gelu_backward.grad_input(grad, x, approximate=self.approximate, grad_input=grad)
            return grad, ()

        return self.fn(x) if at.need_output else None, pull


@dataclass(frozen=True)
class LayerNorm(Pointwise):
    """Layer norm with weight and bias, its backward kernel called directly like that of `Gelu`."""

    shape: tuple[int, ...] = ()
    eps: float = 1e-5
    makes_new = True

    def vjp(self, at: Point) -> tuple[Tensor | None, Pull]:
        assert at.x is not None
        x, tensors = at.x, at.tensors
        dtypes = (x.dtype, *(t.dtype for t in tensors))
        if torch.is_autocast_enabled(x.device.type):
            x, tensors = cast(x, torch.float32), tuple(cast(t, torch.float32) for t in tensors)
        if any(t.dtype != x.dtype for t in tensors):
            return super().vjp(at)
        weight, bias = tensors
        out, mean, rstd = torch.native_layer_norm(x, self.shape, weight, bias, self.eps)
        mask = [at.need_input, *at.needs]

        def pull(grad: Tensor) -> tuple[Tensor | None, tuple[Tensor | None, ...]]:
            grad = cast(grad, x.dtype)
            found = torch.ops.aten.native_layer_norm_backward(grad, x, self.shape, mean, rstd, weight, bias, mask)
            wanted = zip(found, dtypes, mask, strict=True)
            dx, *rest = (cast(g, dtype) if need else None for g, dtype, need in wanted)
            return dx, tuple(rest)

        return out, pull


@dataclass(frozen=True)
class Opaque(Pointwise):
    """Any position-wise module; its output is saved because it may be expensive to redo."""

    heavy = True


def partial_vjp(fn: Callable[..., Tensor], x: Tensor, tensors: Tensors, needs: tuple[bool, ...]) -> tuple[Tensor, Pull]:
    """`fn(x, *tensors)` and its pull-back to `x` and to those tensors that need a gradient."""

    def of_moving(x: Tensor, *moving: Tensor) -> Tensor:
        rest = iter(moving)
        return fn(x, *(next(rest) if need else t for t, need in zip(tensors, needs, strict=True)))

    moving = (x, *(t for t, need in zip(tensors, needs, strict=True) if need))
    if torch.compiler.is_compiling():
        out, pull_back, *_ = torch.func.vjp(of_moving, *moving)
    else:
        # torch.func refuses to run under saved-tensor hooks (offloading); plain autograd does not.
        moving = tuple(t.detach().requires_grad_() for t in moving)
        with torch.enable_grad():
            graph = of_moving(*moving)
        out = graph.detach()

        def pull_back(grad: Tensor) -> tuple[Tensor, ...]:
            return torch.autograd.grad(graph, moving, grad, allow_unused=True, materialize_grads=True)

    def pull(grad: Tensor) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        dx, *rest = pull_back(cast(grad, out.dtype))
        found = iter(rest)
        return dx, tuple(next(found) if need else None for need in needs)

    return out, pull


@dataclass(frozen=True)
class Linear(Stage):
    """One or several linear layers on the same input, their outputs side by side; optionally times a scale.

    Tensors: each weight, followed by its bias where `biases` says so; the scale last if `scaled`.
    """

    outs: tuple[int, ...]
    biases: tuple[bool, ...]
    scaled: bool = False
    heavy = True
    casts = True
    makes_new = True

    def layers(self, tensors: tuple[Any, ...]) -> list[tuple[Any, Any]]:
        """`tensors` (or anything in the same order) as pairs of weight and bias."""
        rest = iter(tensors)
        return [(next(rest), next(rest) if has_bias else None) for has_bias in self.biases]

    def forward(self, x: Tensor, tensors: Tensors, kept: Kept | None, keep_extras: bool) -> tuple[Tensor, Tensors]:
        return self.apply(x, tensors), ()

    def apply(self, x: Tensor, tensors: Tensors) -> Tensor:
        outs = [F.linear(x, weight, bias) for weight, bias in self.layers(tensors)]
        out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=-1)
        if not self.scaled:
            return out
        scale = tensors[-1]
        # Autograd would need the product's other factor; the engine does not.
        in_place = not torch.is_grad_enabled() and out.dtype == scale.dtype
        return out.mul_(scale) if in_place else out * scale

    def vjp(self, at: Point) -> tuple[Tensor | None, Pull]:
        out = None
        if at.need_output:
            assert at.x is not None
            out = self.apply(at.x, at.tensors)
        # Handed over, not shared: backward frees it half-way, before it makes a gradient of the same size.
        held, tensors, needs, need_input = [at.x], at.tensors, at.needs, at.need_input
        return out, lambda grad: self.backward(held.pop(), tensors, needs, grad, need_input)

    def backward(
        self, x: Tensor | None, tensors: Tensors, needs: tuple[bool, ...], grad: Tensor, need_input: bool
    ) -> tuple[Tensor | None, tuple[Tensor | None, ...]]:
        """The gradients of the input and of the tensors, at input rows `x` (None if no weight needs one)."""
        device = grad.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensors[0].dtype
        grad = cast(grad, dtype)
        rows = None if x is None else cast(x, dtype).flatten(0, -2)
        scale, scale_needs = (tensors[-1], needs[-1]) if self.scaled else (None, False)
        layers = self.layers(tensors)
        grads = (grad,) if len(self.outs) == 1 else grad.split(self.outs, -1)
        found: list[Tensor | None] = []
        for (weight, bias), (weight_needs, bias_needs), dy in zip(layers, self.layers(needs), grads, strict=True):
            dy = dy.flatten(0, -2)
            outer: Any = dy.t() @ rows if weight_needs or scale_needs else None
            total: Any = dy.sum(0) if bias_needs or (scale_needs and bias is not None) else None
            if scale is None:
                found.append(cast(outer, weight.dtype) if weight_needs else None)
                if bias is not None:
                    found.append(cast(total, bias.dtype) if bias_needs else None)
                continue
            found.append(cast(outer * scale.unsqueeze(1), weight.dtype) if weight_needs else None)
            if bias is not None:
                found.append(cast(total * scale, bias.dtype) if bias_needs else None)
            shift = 0 if bias is None or total is None else bias * total
            found.append(cast((weight * outer).sum(1) + shift, scale.dtype) if scale_needs else None)
        del x, rows
        dx: Tensor | None = None
        if need_input:
            for (weight, _), dy in zip(layers, grads, strict=True):
                scaled = weight if scale is None else weight * scale.unsqueeze(1)
                part = dy @ cast(scaled, dtype)
                dx = part if dx is None else dx + part
        return dx, tuple(found)

    def needs_input(self, needs: tuple[bool, ...], redo: bool) -> bool:
        weights = any(weight for weight, _ in self.layers(needs))
        return weights or (self.scaled and needs[-1])

    def width(self, width: int) -> int:
        return sum(self.outs)

    def saved_width(self, width: int) -> int:
        # The scale is a product of its own under autograd, and saves the other factor.
        return width + (sum(self.outs) if self.scaled else 0)


@dataclass(frozen=True)
class Noise(Stage):
    """Dropout or drop path: a product with noise that `module` draws when given ones.

    The noise is drawn in the shape the module itself would use, so the random stream is that of the plain model.
    """

    module: nn.Module
    per_sample: bool
    makes_new = True

    def forward(self, x: Tensor, tensors: Tensors, kept: Kept | None, keep_extras: bool) -> tuple[Tensor, Tensors]:
        ones = x.new_ones(x.shape[0], *(1,) * (x.dim() - 1)) if self.per_sample else torch.ones_like(x)
        noise = self.module(ones)
        out = x * noise
        if not keep_extras:
            return out, ()
        return out, (noise if self.per_sample or kept is None else kept.gather(noise),)

    def vjp(self, at: Point) -> tuple[Tensor | None, Pull]:
        (noise,) = at.extras
        out = None
        if at.need_output:
            assert at.x is not None
            out = at.x * noise
        return out, lambda grad: (grad * noise, ())

    def needs_input(self, needs: tuple[bool, ...], redo: bool) -> bool:
        return False

    def saved_width(self, width: int) -> int:
        return 0 if self.per_sample else width

    def extra_width(self, width: int, keep_ratio: float) -> float:
        return self.saved_width(width) * keep_ratio


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor.to(dtype)`; asking first is cheaper than a conversion that does nothing."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def linear(*layers: tuple[Tensor, Tensor | None], scale: Tensor | None = None) -> Link:
    """A `Linear` stage for weights `[out, in]` with their biases, and a scale `[out]` for the output of one."""
    tensors: list[Tensor] = []
    for weight, bias in layers:
        tensors += [weight] if bias is None else [weight, bias]
    outs = tuple(weight.shape[0] for weight, _ in layers)
    biases = tuple(bias is not None for _, bias in layers)
    assert scale is None or len(layers) == 1
    return Linear(outs, biases, scale is not None), (*tensors, *(() if scale is None else (scale,)))


def pointwise(fn: Callable[..., Tensor], *tensors: Tensor | None) -> Link:
    """A `Pointwise` stage for `fn(x, *tensors)`, where tensors that are None stay None."""
    if all(t is not None for t in tensors):
        return Pointwise(fn), tuple(t for t in tensors if t is not None)
    present = tuple(t is not None for t in tensors)

    def with_gaps(x: Tensor, *given: Tensor) -> Tensor:
        rest = iter(given)
        return fn(x, *(next(rest) if is_there else None for is_there in present))

    return Pointwise(with_gaps), tuple(t for t in tensors if t is not None)


def layer_norm(shape: tuple[int, ...], weight: Tensor | None, bias: Tensor | None, eps: float) -> Link:
    """A norm over the channels `shape`."""
    fn = _Norm(F.layer_norm, shape, eps)
    if weight is None or bias is None:
        return pointwise(fn, weight, bias)
    return LayerNorm(fn, None, shape, eps), (weight, bias)


def rms_norm(shape: tuple[int, ...], weight: Tensor | None, eps: float | None) -> Link:
    """A norm over the channels `shape`, without mean and bias."""
    return pointwise(_Norm(F.rms_norm, shape, eps), weight)


@dataclass(frozen=True)
class _Norm:
    fn: Callable[..., Tensor]
    shape: tuple[int, ...]
    eps: float | None

    def __call__(self, x: Tensor, *affine: Tensor | None) -> Tensor:
        return self.fn(x, self.shape, *affine, self.eps)


def gelu(approximate: str) -> Link:
    """A `Gelu` stage."""
    return Gelu(partial(F.gelu, approximate=approximate), None, approximate), ()


def noise(module: nn.Module, per_sample: bool = False) -> Link:
    """A `Noise` stage for a dropout (or, `per_sample`, drop path) module."""
    return Noise(module, per_sample), ()
