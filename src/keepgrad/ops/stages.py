"""The position-wise stages of a branch: what each computes, saves and redoes.

A position-wise stage treats each position on its own, like a linear layer. It maps rows `[batch, positions, in]` to
rows `[batch, positions, out]`. Forward runs on all positions, `vjp` only on the slots of a `Kept`.

| stage     | heavy | saves besides its output         | backward                                             |
| ---       | ---   | ---                              | ---                                                  |
| Pointwise | no    | -                                | redoes its forward under autograd                    |
| Gelu      | no    | -                                | torch's kernel; overwrites the gradient it is given  |
| LayerNorm | no    | -                                | torch's kernel, with mean and deviation redone       |
| Opaque    | yes   | -                                | as Pointwise; for modules keepgrad does not know     |
| Linear    | yes   | -                                | two matmuls; needs its input, not its output         |
| Lora      | yes   | one bit per value of its dropout | as Linear, plus the adapters (see lora.py)           |
| Parallel  | yes   | -                                | each of its stages; their input gradients are added  |
| GRN       | no    | a norm per channel and sample    | written out                                          |
| Noise     | no    | the noise (dropout, drop path)   | multiplies with the noise                            |

If a LayerScale follows a linear layer, one `Linear` stage does both, because then the gradient of the scale needs no
saved output: with `y = s * (W x + b)` and `M = dy^T x`, `dW = s M` and `ds = rowsum(W * M) + b * sum(dy)`.

Stages hold no tensors. Parameters are passed separately, as inputs of the autograd.Function, so that frozen ones cost
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..sampling import Kept

__all__ = [
    *("Link", "Point", "Pull", "Stage", "Gelu", "GlobalResponseNorm", "LayerNorm", "Linear", "Noise", "Opaque"),
    *(
        "Parallel",
        "Pointwise",
        "autocast_dtype",
        "cast",
        "gelu",
        "layer_norm",
        "linear",
        "noise",
        "parallel",
        "pointwise",
        "rms_norm",
    ),
]

Tensors = tuple[Tensor, ...]
gelu_backward = torch.ops.aten.gelu_backward.grad_input
layer_norm_backward = torch.ops.aten.native_layer_norm_backward.default
Pull = Callable[[Tensor], tuple[Tensor | None, tuple[Tensor | None, ...]]]
"""The pull-back of a stage: from the gradient of its output slots to those of its input slots and of its tensors."""


class Point(NamedTuple):
    """What `Stage.vjp` is given: where the stage is differentiated, and which results are needed.

    Attributes:
        x: the slots of the stage's input; None if neither this stage nor one redone after it reads them.
        tensors: the tensors of the stage.
        needs: for each of the tensors, whether it needs a gradient.
        extras: what forward saved for this stage besides inputs and outputs.
        kept: the slots; None if every position is kept.
        need_output: whether the output slots are needed.
        need_input: whether the gradient of the input is needed.
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
    """One step of a branch. Subclasses define how it runs forward on all rows and backward on slots."""

    heavy = False
    """Whether redoing this stage in backward costs about as much as its backward itself."""
    reads_all = False
    """Whether backward needs the input at every position, not only at the slots."""
    makes_new = False
    """Whether its output and its input gradient are always new tensors, which the next stage may overwrite."""
    casts = False
    """Whether autocast casts its input to lower precision."""
    redoes_output = False
    """Whether `vjp` always computes the output slots, even if they are not asked for."""
    reads_signs = False
    """Whether its derivative jumps at zero, like that of a ReLU."""
    noises = 0
    """How many random tensors it draws, such as dropout masks. They are the first of its extras, and always saved."""
    exact_extras = False
    """Whether its extras must be saved exactly, not in 8 bits."""
    overwrites = False
    """Whether `overwrite` may replace `forward`, and `vjp` overwrites the gradient it is given."""

    def overwrite(self, x: Tensor) -> Tensor:
        """The output for all rows, written over the input."""
        raise NotImplementedError

    def forward(self, x: Tensor, tensors: Tensors, kept: Kept | None, keep_extras: bool) -> tuple[Tensor, Tensors]:
        """The output for all rows, and what to save for `vjp` besides inputs and outputs (if `keep_extras`)."""
        raise NotImplementedError

    def redo(self, x: Tensor, tensors: Tensors, drawn: Tensors) -> Tensor:
        """Compute the output slots again. `drawn` are the random tensors that forward drew."""
        return self.forward(x, tensors, None, False)[0]

    def vjp(self, at: Point) -> tuple[Tensor | None, Pull]:
        """The output slots (None if not needed), and the pull-back."""
        raise NotImplementedError

    def needs_input(self, needs: tuple[bool, ...], redo: bool) -> bool:
        """Whether `vjp` reads the input of the stage. `redo` is True if extras are not saved."""
        return True

    def redoable(self, reduced: bool) -> bool:
        """Whether the output slots can be computed from the input slots."""
        return True


Link = tuple[Stage, Tensors]
"""A stage and its tensors."""


@dataclass(frozen=True)
class Pointwise(Stage):
    """A cheap function of each row: a norm, an activation, a gate."""

    fn: Callable[..., Tensor]
    reads_signs: bool = False

    def forward(self, x: Tensor, tensors: Tensors, kept: Kept | None, keep_extras: bool) -> tuple[Tensor, Tensors]:
        return self.fn(x, *tensors), ()

    def vjp(self, at: Point) -> tuple[Tensor | None, Pull]:
        assert at.x is not None
        return partial_vjp(self.fn, at.x, at.tensors, at.needs)


@dataclass(frozen=True)
class Gelu(Pointwise):
    """GELU. It calls the backward kernel directly: on small inputs, an autograd graph costs more than the kernel."""

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
            gelu_backward(grad, x, approximate=self.approximate, grad_input=grad)
            return grad, ()

        return self.fn(x) if at.need_output else None, pull


@dataclass(frozen=True)
class LayerNorm(Pointwise):
    """Layer norm with weight and bias. Like `Gelu`, it calls the backward kernel directly."""

    shape: tuple[int, ...] = ()
    eps: float = 1e-5
    makes_new = True

    def vjp(self, at: Point) -> tuple[Tensor | None, Pull]:
        x, tensors, needs, _, _, _, need_input = at
        assert x is not None
        given = (x, *tensors)
        if autocast_dtype(x) is not None:
            x, *tensors = (cast(t, torch.float32) for t in given)  # type: ignore[assignment]
        weight, bias = tensors
        if weight.dtype != x.dtype or bias.dtype != x.dtype:
            return super().vjp(at)
        out, mean, rstd = torch.native_layer_norm(x, self.shape, weight, bias, self.eps)
        mask = [need_input, *needs]

        def pull(grad: Tensor) -> tuple[Tensor | None, tuple[Tensor | None, ...]]:
            grad = cast(grad, x.dtype)
            found = layer_norm_backward(grad, x, self.shape, mean, rstd, weight, bias, mask)
            dx, *rest = [None if g is None else cast(g, t.dtype) for g, t in zip(found, given, strict=True)]
            return dx, tuple(rest)

        return out, pull


@dataclass(frozen=True)
class Opaque(Pointwise):
    """Any position-wise module. Its output is saved because it may be expensive to redo."""

    out_features: int | None = None
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
    """A linear layer, whose output may be multiplied with a scale.

    Tensors: the weight `[out, in]`, the bias `[out]` if `has_bias`, the scale `[out]` if `scaled`.
    """

    has_bias: bool
    scaled: bool = False
    heavy = True
    casts = True
    makes_new = True

    def forward(self, x: Tensor, tensors: Tensors, kept: Kept | None, keep_extras: bool) -> tuple[Tensor, Tensors]:
        if not self.scaled:
            return F.linear(x, *tensors), ()
        *layer, scale = tensors
        out = F.linear(x, *layer)
        # In place only without autograd, which would need the unscaled output; the engine does not.
        in_place = not torch.is_grad_enabled() and out.dtype == scale.dtype
        return out.mul_(scale) if in_place else out * scale, ()

    def vjp(self, at: Point) -> tuple[Tensor | None, Pull]:
        x, tensors, needs, _, _, need_output, need_input = at
        out = None
        if need_output:
            assert x is not None
            out = self.forward(x, tensors, None, False)[0]
        # `pop` hands over the reference, so that backward can free `x` before it makes a gradient of the same size.
        held = [x]
        return out, lambda grad: self.backward(held.pop(), tensors, needs, grad, need_input)

    def backward(
        self, x: Tensor | None, tensors: Tensors, needs: tuple[bool, ...], grad: Tensor, need_input: bool
    ) -> tuple[Tensor | None, tuple[Tensor | None, ...]]:
        """The gradients of the input and of the tensors. `x` may be None if `needs_input` is False."""
        weight = tensors[0]
        dtype = autocast_dtype(grad) or weight.dtype
        dy = cast(grad, dtype).reshape(-1, grad.shape[-1])
        found: tuple[Tensor | None, ...]
        if self.scaled:
            found, weight = self.backward_scaled(x, tensors, needs, dy)
        else:
            d_weight = None
            if needs[0]:
                assert x is not None
                d_weight = cast(dy.t().mm(cast(x, dtype).reshape(-1, x.shape[-1])), weight.dtype)
            found = (d_weight,)
            if self.has_bias:
                found = (d_weight, cast(dy.sum(0), tensors[1].dtype) if needs[1] else None)
        del x
        dx = dy.mm(cast(weight, dtype)).view(*grad.shape[:-1], weight.shape[1]) if need_input else None
        return dx, found

    def backward_scaled(
        self, x: Tensor | None, tensors: Tensors, needs: tuple[bool, ...], dy: Tensor
    ) -> tuple[tuple[Tensor | None, ...], Tensor]:
        """The gradients of weight, bias and scale, and the weight times the scale."""
        weight, bias, scale = tensors if self.has_bias else (tensors[0], None, tensors[1])
        scale_needs, column = needs[-1], scale.unsqueeze(1)
        outer: Any = None
        if needs[0] or scale_needs:
            assert x is not None
            outer = dy.t().mm(cast(x, dy.dtype).reshape(-1, x.shape[-1]))
        found = [cast(outer * column, weight.dtype) if needs[0] else None]
        shift: Any = 0
        if bias is not None:
            total = dy.sum(0) if needs[1] or scale_needs else dy
            found.append(cast(total * scale, bias.dtype) if needs[1] else None)
            shift = bias * total if scale_needs else 0
        found.append(cast((weight * outer).sum(1) + shift, scale.dtype) if scale_needs else None)
        return tuple(found), weight * column

    def needs_input(self, needs: tuple[bool, ...], redo: bool) -> bool:
        return needs[0] or (self.scaled and needs[-1])


@dataclass(frozen=True)
class Parallel(Stage):
    """Several stages that read the same input. Their outputs are concatenated along the channels.

    Tensors: those of each stage in turn; `counts` says how many each has, `widths` how many channels each makes.
    """

    stages: tuple[Stage, ...]
    widths: tuple[int, ...]
    counts: tuple[int, ...]
    heavy = True
    casts = True
    makes_new = True

    def split(self, tensors: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Split `tensors`, or a list with one entry per tensor, into one group per stage."""
        rest = iter(tensors)
        return [tuple(next(rest) for _ in range(count)) for count in self.counts]

    @property
    def noises(self) -> int:  # type: ignore[override]
        return sum(stage.noises for stage in self.stages)

    def split_drawn(self, drawn: Tensors) -> list[Tensors]:
        """Split the random tensors into one group per stage."""
        rest = iter(drawn)
        return [tuple(next(rest) for _ in range(stage.noises)) for stage in self.stages]

    def forward(self, x: Tensor, tensors: Tensors, kept: Kept | None, keep_extras: bool) -> tuple[Tensor, Tensors]:
        groups = zip(self.stages, self.split(tensors), strict=True)
        made = [stage.forward(x, group, kept, False) for stage, group in groups]
        return torch.cat([out for out, _ in made], dim=-1), tuple(one for _, drawn in made for one in drawn)

    def redo(self, x: Tensor, tensors: Tensors, drawn: Tensors) -> Tensor:
        groups = zip(self.stages, self.split(tensors), self.split_drawn(drawn), strict=True)
        return torch.cat([stage.redo(x, group, own) for stage, group, own in groups], dim=-1)

    def vjp(self, at: Point) -> tuple[Tensor | None, Pull]:
        groups = zip(
            self.stages, self.split(at.tensors), self.split(at.needs), self.split_drawn(at.extras), strict=True
        )
        pairs = [
            stage.vjp(at._replace(tensors=group, needs=needs, extras=drawn)) for stage, group, needs, drawn in groups
        ]
        out = torch.cat([part for part, _ in pairs if part is not None], dim=-1) if at.need_output else None

        def pull(grad: Tensor) -> tuple[Tensor | None, tuple[Tensor | None, ...]]:
            dx: Tensor | None = None
            found: list[Tensor | None] = []
            for (_, one), dy in zip(pairs, grad.split(self.widths, -1), strict=True):
                part, more = one(dy)
                found += more
                if part is not None:
                    dx = part if dx is None else dx + part
            return dx, tuple(found)

        return out, pull

    def needs_input(self, needs: tuple[bool, ...], redo: bool) -> bool:
        groups = zip(self.stages, self.split(needs), strict=True)
        return any(stage.needs_input(group, redo) for stage, group in groups)


@dataclass(frozen=True)
class GlobalResponseNorm(Stage):
    """The global response norm of ConvNeXt V2: `x + bias + weight * x * n`.

    Here `n = g / (mean over channels of g + eps)`, and `g` is the norm of each channel over all positions.

    Forward computes `g` exactly, from all positions, and saves it: one row per sample. In backward, the gradient of `g`
    is summed over the slots and passed on to the slots only, as if `g ** 2` were the sum of `m * x ** 2` over the
    slots, where a slot stands for m positions. Tensors: weight and bias.
    """

    eps: float
    makes_new = True
    exact_extras = True

    def forward(self, x: Tensor, tensors: Tensors, kept: Kept | None, keep_extras: bool) -> tuple[Tensor, Tensors]:
        weight, bias = tensors
        size = torch.linalg.vector_norm(x, dim=1, keepdim=True)
        return self._apply(x, size, weight, bias), (size,) if keep_extras else ()

    def _apply(self, x: Tensor, size: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return x + torch.addcmul(bias, weight, x * self._share(size))

    def _share(self, size: Tensor) -> Tensor:
        return size / (size.mean(dim=-1, keepdim=True) + self.eps)

    def vjp(self, at: Point) -> tuple[Tensor | None, Pull]:
        assert at.x is not None
        x, (size,), (weight, bias) = at.x, at.extras, at.tensors
        many = None if at.kept is None else at.kept.size
        share, pull_share = partial_vjp(self._share, size, (), ())

        def pull(grad: Tensor) -> tuple[Tensor | None, tuple[Tensor | None, ...]]:
            scaled = grad * x
            d_weight = cast((scaled * share).sum((0, 1)), weight.dtype) if at.needs[0] else None
            d_bias = cast(grad.sum((0, 1)), bias.dtype) if at.needs[1] else None
            d_size, _ = pull_share((scaled * weight).sum(1, keepdim=True))
            assert d_size is not None
            # The gradient of a channel that is zero everywhere is zero, as torch defines it for a norm.
            through = x * torch.where(size == 0, 0, d_size / size)
            if many is not None:
                through = through * many.to(x.dtype).unsqueeze(-1)
            return grad * (1 + weight * share) + through, (d_weight, d_bias)

        return self._apply(x, size, weight, bias) if at.need_output else None, pull


@dataclass(frozen=True)
class Noise(Stage):
    """Dropout or drop path: multiplies the rows with noise.

    The noise is what `module` returns for ones. It is drawn in the shape that the module itself would use, so the
    random numbers are those of the plain model. `per_sample` means one number for each sample, as drop path draws them.
    """

    module: Callable[[Tensor], Tensor]
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


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """The dtype to which autocast casts on the device of this tensor; None if autocast is off there."""
    device = tensor.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor.to(dtype)`. Comparing the types first is cheaper than a conversion that does nothing."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def linear(weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None) -> Link:
    """A `Linear` stage for a weight `[out, in]`, its bias, and a scale `[out]` for its output."""
    tensors = tuple(t for t in (weight, bias, scale) if t is not None)
    return Linear(bias is not None, scale is not None), tensors


def parallel(links: Sequence[Link], widths: Sequence[int]) -> Link:
    """A `Parallel` stage for stages whose outputs have `widths` channels."""
    stages, tensors = zip(*links, strict=True)
    return Parallel(stages, tuple(widths), tuple(map(len, tensors))), tuple(t for group in tensors for t in group)


def pointwise(fn: Callable[..., Tensor], *tensors: Tensor | None) -> Link:
    """A `Pointwise` stage for `fn(x, *tensors)`. Tensors may be None; `fn` then gets None in that place."""
    if all(t is not None for t in tensors):
        return Pointwise(fn), tuple(t for t in tensors if t is not None)
    present = tuple(t is not None for t in tensors)

    def with_gaps(x: Tensor, *given: Tensor) -> Tensor:
        rest = iter(given)
        return fn(x, *(next(rest) if is_there else None for is_there in present))

    return Pointwise(with_gaps), tuple(t for t in tensors if t is not None)


def layer_norm(shape: tuple[int, ...], weight: Tensor | None, bias: Tensor | None, eps: float) -> Link:
    """A stage for a layer norm over the last dimensions, which have this shape."""
    fn = _Norm(F.layer_norm, shape, eps)
    if weight is None or bias is None:
        return pointwise(fn, weight, bias)
    return LayerNorm(fn, shape=shape, eps=eps), (weight, bias)


def rms_norm(shape: tuple[int, ...], weight: Tensor | None, eps: float | None) -> Link:
    """A stage for an RMS norm over the last dimensions, which have this shape. It has no mean and no bias."""
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
    return Gelu(partial(F.gelu, approximate=approximate), approximate=approximate), ()


def noise(module: Callable[[Tensor], Tensor], per_sample: bool = False) -> Link:
    """A `Noise` stage for a dropout module, or with `per_sample` for a drop path module."""
    return Noise(module, per_sample), ()
