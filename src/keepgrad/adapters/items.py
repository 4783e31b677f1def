"""The items of a branch: the user's own modules, and descriptions of steps that are not modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..ops.attention import Part
from ..ops.stages import Stage

__all__ = [
    *("Attention", "Item", "LinearOf", "Ref", "Scale", "Step", "Unsupported"),
    *("attention", "describes", "path_of", "unwrapped"),
]


class Unsupported(Exception):  # noqa: N818
    """Raised for a branch that cannot be reduced. The message says why."""


Ref = Callable[[], Tensor]
"""A function that returns the current value of a tensor, such as a weight."""


class Step(NamedTuple):
    """A stage of the engine, and functions that read the tensors it needs."""

    stage: Stage
    refs: tuple[Ref, ...] = ()

    def bind(self) -> tuple[Stage, tuple[Tensor, ...]]:
        return self.stage, tuple([ref() for ref in self.refs])


class Scale(NamedTuple):
    """An item of a branch: multiplies each channel by a factor. `read` returns the factors, or None for no scale."""

    read: Callable[[], Tensor | None]

    def __call__(self, x: Tensor) -> Tensor:
        scale = self.read()
        return x if scale is None else x * scale


class LinearOf(NamedTuple):
    """An item of a branch: a linear layer, given by functions that return its weight `[out, in]` and its bias."""

    weight: Callable[[], Tensor]
    bias: Callable[[], Tensor | None] = lambda: None

    def __call__(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight(), self.bias())


@dataclass(frozen=True)
class Attention:
    """An item of a branch: self-attention, described by its parts.

    Args:
        module: the module itself. It is called unchanged when nothing is reduced.
        project: the layers that make q, k and v: one for all three, or one for q and one for k and v, or three.
        heads: the number of heads of q.
        out: the modules after the attention product, in order: norm, projection, dropout.
        kv_heads: the number of heads of k and v, if it differs from `heads`.
        q_norm: a module that normalizes each head of q.
        k_norm: a module that normalizes each head of k.
        scale: the factor of the scores; None for `dim ** -0.5`.
        bias: returns a tensor `[heads or 1, n, n]` that is added to the scores. Gradients flow to it.
        rotate_half: how rotary embeddings pair the channels, if the model has them (see `ops.attention.rotate`).
        turn: a function for another kind of rotary embedding. It is given the tensors that a call passes as `rope`.
        q_parts: further functions applied to q (see `ops.attention.Core`), each with functions that read its tensors.
        k_parts: the same for k.
        biases: the same for terms that are added to the scores.
        gate: a layer on the input. The output is multiplied by the sigmoid of what it returns.
        gate_norm: a norm of the output before the gate.
        dropout: a function that returns the current probability of dropping an entry of the attention matrix.
        layout: the shape of the positions, if the module knows it (for example, the size of its window).
        call: a function to call instead of the module, with the options that the block's forward passes to `run`.
        reason: why the attention cannot be reduced, or None. If given, the module is called unchanged and no other
            field is needed.
    """

    module: nn.Module
    project: Sequence[Any] = ()
    heads: int = 0
    out: Sequence[Any] = ()
    kv_heads: int | None = None
    q_norm: nn.Module | None = None
    k_norm: nn.Module | None = None
    scale: float | None = None
    bias: Callable[[], Tensor | None] | None = None
    rotate_half: bool = False
    turn: Part | None = None
    q_parts: Sequence[tuple[Part, Sequence[Ref]]] = ()
    k_parts: Sequence[tuple[Part, Sequence[Ref]]] = ()
    biases: Sequence[tuple[Part, Sequence[Ref]]] = ()
    gate: nn.Module | None = None
    gate_norm: nn.Module | None = None
    dropout: Callable[[], float] = lambda: 0.0
    layout: tuple[int, ...] | None = None
    call: Callable[..., Any] | None = None
    reason: str | None = None

    def __call__(self, x: Tensor, **options: Any) -> Tensor:
        return (self.call or self.module)(x, **options)


Item = nn.Module | Scale | LinearOf | Attention
"""A branch is a list of these."""


WRAPPERS = {"transformers.modeling_layers"}
"""Modules whose functions wrap the forward of a class, and of each of its subclasses, for checkpointing."""


def path_of(module: nn.Module) -> str:
    """The import path of the class whose forward this module runs."""
    forward: Any = unwrapped(type(module).forward)
    return f"{forward.__module__}.{forward.__qualname__.removesuffix('.forward')}"


def unwrapped(forward: Any) -> Any:
    """The forward as the author of the class wrote it, without the wrappers around it."""
    while getattr(forward, "__globals__", {}).get("__name__") in WRAPPERS and hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    return forward


Describe = Callable[[Any], Attention]
ATTENTIONS: dict[str, Describe] = {}
"""Maps the import path of an attention class to a function that describes such a module."""


def attention(module: Any) -> Attention:
    """Describes an attention module. If keepgrad does not know it, the description has a `reason`."""
    describe = ATTENTIONS.get(path_of(module))
    if describe is None or "forward" in vars(module):
        why = f"{type(module).__name__} is not an attention that keepgrad knows, or has a forward of its own"
        return Attention(module, reason=why)
    return describe(module)


def describes(*paths: str) -> Callable[[Describe], Describe]:
    """Register a function that describes the attention classes with these import paths."""

    def add(describe: Describe) -> Describe:
        ATTENTIONS.update(dict.fromkeys(paths, describe))
        return describe

    return add
