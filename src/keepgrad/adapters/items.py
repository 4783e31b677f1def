"""What a branch is a list of: the user's own modules, and descriptions of what is no module of its own."""

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
    """A branch that cannot be reduced; the message is the reason."""


Ref = Callable[[], Tensor]
"""Reads a tensor as it is now."""


class Step(NamedTuple):
    """A stage, and where its tensors are read."""

    stage: Stage
    refs: tuple[Ref, ...] = ()

    def bind(self) -> tuple[Stage, tuple[Tensor, ...]]:
        return self.stage, tuple([ref() for ref in self.refs])


class Scale(NamedTuple):
    """An item of a branch: a product with a vector of channels; `read` returns it, or None for no scale."""

    read: Callable[[], Tensor | None]

    def __call__(self, x: Tensor) -> Tensor:
        scale = self.read()
        return x if scale is None else x * scale


class LinearOf(NamedTuple):
    """An item of a branch: a linear layer whose weight `[out, in]` and bias are read by functions."""

    weight: Callable[[], Tensor]
    bias: Callable[[], Tensor | None] = lambda: None

    def __call__(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight(), self.bias())


@dataclass(frozen=True)
class Attention:
    """An item of a branch: self-attention, described by its parts.

    Args:
        module: the module itself, which is called as it is where nothing is reduced.
        project: the layers to q, k and v: a joint one, one for q and one for k and v, or one each.
        heads: the number of heads of q.
        out: what follows inside the module, in order: norm, projection, dropout.
        kv_heads: the number of heads of k and v, if another.
        q_norm: a module that norms each head of q.
        k_norm: a module that norms each head of k.
        scale: the factor of the scores; None for `dim ** -0.5`.
        bias: returns what is added to the scores, `[heads or 1, n, n]`. It gets its gradient.
        rotate_half: how rotary positions pair channels, if the model has them (see `ops.attention.rotate`).
        turn: a function for rotary positions that are other ones, of the tensors that a call gives as `rope`.
        q_parts: more functions of q (see `ops.attention.Core`), each with where to read its tensors.
        k_parts: the same for k.
        biases: the same for what is added to the scores.
        gate: a layer on the input whose sigmoid the output is multiplied with.
        gate_norm: a norm of the output before the gate.
        dropout: a function that returns the probability with which entries of the attention matrix are dropped now.
        layout: the shape of the positions, where the module knows it (a window).
        call: what to call instead of the module, with the options that the block's forward gives to `run`.
        reason: why it cannot be reduced, if so; it is then called as it is, and nothing else has to be described.
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
"""What a branch is a list of."""


WRAPPERS = {"transformers.modeling_layers"}
"""Where functions are defined that wrap the forward of a class, and of each subclass, for checkpointing."""


def path_of(module: nn.Module) -> str:
    """The import path of the class whose forward this module runs."""
    forward: Any = unwrapped(type(module).forward)
    return f"{forward.__module__}.{forward.__qualname__.removesuffix('.forward')}"


def unwrapped(forward: Any) -> Any:
    """The forward that a class's author wrote."""
    while getattr(forward, "__globals__", {}).get("__name__") in WRAPPERS and hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    return forward


Describe = Callable[[Any], Attention]
ATTENTIONS: dict[str, Describe] = {}
"""From the import path of a class to a function that describes its attention."""


def attention(module: Any) -> Attention:
    """The description of an attention module."""
    describe = ATTENTIONS.get(path_of(module))
    if describe is None or "forward" in vars(module):
        why = f"{type(module).__name__} is not an attention that keepgrad knows, or has a forward of its own"
        return Attention(module, reason=why)
    return describe(module)


def describes(*paths: str) -> Callable[[Describe], Describe]:
    """Add a function to the table, for the attentions with these import paths."""

    def add(describe: Describe) -> Describe:
        ATTENTIONS.update(dict.fromkeys(paths, describe))
        return describe

    return add
