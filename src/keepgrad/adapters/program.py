"""Turns a branch, a list of modules, into a program: the stages to run, and where to read their tensors.

A program is built once, but its tensors are read again in each step. So it always uses the current weights, also after
they are replaced, sharded or re-parametrised.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import has_hooks
from ..ops.attention import Core, Part, add_dense, rotate, row_norm
from ..ops.branch import BoundAttention, Branch, Hooked
from ..ops.chain import Chain
from ..ops.stages import Linear, Noise, Opaque, Parallel, Pointwise
from .items import Attention, Ref, Scale, Step, Unsupported, path_of
from .modules import HAS_HOOKS, SCALES, is_plain, one_step, out_width, steps_of, width_of

__all__ = ["Program", "compile_branch"]


class Program:
    """The stages of a branch. `bind` reads their tensors.

    `width` is the number of channels of the input, or None if no layer tells it.
    """

    def __init__(self, before: list[Step], attention: _AttentionSteps | None, after: list[Step]) -> None:
        self.before, self.attention, self.after = before, attention, after
        self.width = width_of([*before, attention.projection] if attention else before)
        self.chains: dict[Any, Chain] = {}
        hooked = [step.stage.name for step in (*before, *after) if isinstance(step.stage, Hooked)]
        self.hooked = next(iter(hooked), None)
        """The class name of the first module with hooks, or None."""

    @property
    def has_attention(self) -> bool:
        return self.attention is not None

    @property
    def is_one_opaque_stage(self) -> bool:
        """True if the branch is a single unknown module, which backward runs again as a whole."""
        return len(self.before) == 1 and isinstance(self.before[0].stage, Opaque) and self.attention is None

    @property
    def kinds(self) -> tuple[type, ...]:
        """The types of the stages, without attention."""
        return tuple(type(step.stage) for step in (*self.before, *self.after))

    @property
    def layout(self) -> tuple[int, ...] | None:
        """The shape of the positions, if the attention fixes one (a window, for example)."""
        return None if self.attention is None else self.attention.layout

    def bind(
        self,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        rope: tuple[Tensor, ...] | None = None,
        bias_tensors: Sequence[Tensor] | None = None,
        given: Any = None,
    ) -> Branch:
        """The branch with the current tensors. The arguments are those of this one call of attention.

        `bias_tensors` replace the tensors of the attention's `biases`, for biases that depend on the size of the map.
        `given` is not used here: it is for the module itself, when that is called instead (see `Attention.call`).
        """
        before = [step.bind() for step in self.before]
        if self.attention is None:
            return Branch(before, chains=self.chains, is_hooked=self.hooked is not None)
        attention = self.attention.bind(attn_mask, is_causal, rope, bias_tensors)
        after = [step.bind() for step in self.after]
        return Branch(before, attention, after, self.chains, self.hooked is not None)


class _AttentionSteps:
    """The steps of an `Attention`, and a `Core` for each kind of call, such as with or without a mask."""

    def __init__(self, given: Attention) -> None:
        if given.reason is not None:
            raise Unsupported(given.reason)
        projections = [one_step(layer) for layer in given.project]
        widths = [out_width(step) for step in projections]
        if given.gate is not None:
            projections.append(one_step(given.gate))
            widths.append(out_width(projections[-1]))
        sections = widths
        if len(given.project) < 3:  # q, k and v in one layer, or k and v in the second
            joint = 4 - len(given.project)
            at = len(given.project) - 1
            sections = [*widths[:at], *[widths[at] // joint] * joint, *widths[at + 1 :]]
        if len(projections) == 1:
            self.projection = projections[0]
        else:
            stages = tuple(step.stage for step in projections)
            counts = tuple(len(step.refs) for step in projections)
            refs = tuple(ref for step in projections for ref in step.refs)
            self.projection = Step(Parallel(stages, tuple(widths), counts), refs)
        self.given = given
        self.q_parts = [*_norm_part(given.q_norm), *given.q_parts]
        self.k_parts = [*_norm_part(given.k_norm), *given.k_parts]
        self.out_parts = [] if given.gate is None else _norm_part(given.gate_norm)
        self.before_biases = [ref for _, refs in (*self.q_parts, *self.k_parts) for ref in refs]
        self.bias_refs = [ref for _, refs in given.biases for ref in refs]
        self.after_biases = [ref for _, refs in self.out_parts for ref in refs]
        self.sections = tuple(sections)
        self.layout = given.layout
        self.cores: dict[tuple[bool, ...], Core] = {}

    def bind(
        self,
        attn_mask: Tensor | None,
        is_causal: bool,
        rope: tuple[Tensor, ...] | None,
        bias_tensors: Sequence[Tensor] | None,
    ) -> BoundAttention:
        given = self.given
        bias = None if given.bias is None else given.bias()
        kind = (attn_mask is not None, is_causal, rope is not None, bias is not None)
        core = self.cores.get(kind)
        if core is None:
            core = self.cores[kind] = self._core(*kind)
        tensors = [] if rope is None else list(rope)
        tensors += [ref() for ref in self.before_biases]
        tensors += bias_tensors or [ref() for ref in self.bias_refs]
        tensors += [one for one in (bias, attn_mask) if one is not None]
        tensors += [ref() for ref in self.after_biases]
        return BoundAttention(self.projection.bind(), core, tuple(tensors), given.dropout())

    def _core(self, has_mask: bool, is_causal: bool, has_rope: bool, has_bias: bool) -> Core:
        given = self.given
        return Core(
            heads=given.heads,
            kv_heads=given.kv_heads or given.heads,
            sections=self.sections,
            scale=given.scale,
            causal=is_causal,
            turn=(given.turn or rotate(given.rotate_half)) if has_rope else None,
            q_parts=tuple(part for part, _ in self.q_parts),
            k_parts=tuple(part for part, _ in self.k_parts),
            biases=(*(part for part, _ in given.biases), *[add_dense()] * (has_bias + has_mask)),
            out_parts=tuple(part for part, _ in self.out_parts),
            gate=torch.sigmoid if given.gate is not None else None,
        )


def _norm_part(norm: nn.Module | None) -> list[tuple[Part, Sequence[Ref]]]:
    steps = [] if norm is None else steps_of(norm)
    if not steps:
        return []
    (step,) = steps
    if not isinstance(step.stage, Pointwise) or step.stage.noises:
        raise Unsupported(f"{type(norm).__name__} is not known as a norm inside attention")
    return [(row_norm(step.stage.fn, len(step.refs)), step.refs)]


def compile_branch(items: Sequence[Any]) -> Program:
    """Build the program of a list of modules.

    Raises:
        Unsupported: if one of them mixes positions, or cannot be run again in backward.
    """
    before: list[Step] = []
    after: list[Step] = []
    attention: _AttentionSteps | None = None
    for item in _flat(items):
        steps = before if attention is None else after
        if isinstance(item, Attention):
            if attention is not None:
                raise Unsupported("the branch has two attentions")
            if has_hooks(item.module):
                raise Unsupported(HAS_HOOKS.format(type(item.module).__name__))
            attention = _AttentionSteps(item)
        elif isinstance(item, Scale):
            _add_scale(steps, item)
        else:
            steps += steps_of(item)
    return Program(before, attention, after)


def _flat(items: Sequence[Any]) -> Iterable[Any]:
    """The items one by one. The modules in an attention's `out` follow it, and scale modules become `Scale`."""
    for item in items:
        if isinstance(item, Attention):
            yield item
            out = list(item.out)
            yield from out if item.gate is not None or item.gate_norm is None else [item.gate_norm, *out]
        elif isinstance(item, nn.Module) and path_of(item) in SCALES and is_plain(item):
            yield Scale(partial(getattr, item, SCALES[path_of(item)]))
        else:
            yield item


def _add_scale(steps: list[Step], scale: Scale) -> None:
    """Merge the scale into the linear layer before it, if there is one; otherwise add it as a stage.

    Dropout may lie between the two: it also only multiplies, so the order does not matter.
    """
    if scale.read() is None:
        return
    end = len(steps)
    while end and isinstance(steps[end - 1].stage, Noise):
        end -= 1
    if end:
        stage, refs = steps[end - 1]
        if isinstance(stage, Linear) and not stage.scaled:
            steps[end - 1] = Step(Linear(stage.has_bias, True), (*refs, scale.read))  # type: ignore[arg-type]
            return
    steps.append(Step(Pointwise(torch.mul), (scale.read,)))  # type: ignore[arg-type]
