"""The table from a module's type to the stages of the engine, and programs made from lists of modules.

A branch is a list of the user's own modules, in the order in which they run. `compile_branch` turns it into a `Program`:
the stages, and where to read their tensors. A program is built once; its tensors are read anew in each step, so weights
that are replaced, sharded or re-parametrised are seen as they are.

Types are named by their import path, so no library is imported to know its modules. A module whose type is not in the
table, but that works on each position alone, becomes an opaque stage, which is redone in backward as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._torch import has_hooks
from ..ops.attention import Core, Part, add_dense, rotate, row_norm
from ..ops.branch import BoundAttention, Branch
from ..ops.stages import GlobalResponseNorm, Linear, Noise, Opaque, Parallel, Pointwise, Stage
from ..ops.stages import gelu as gelu_stage
from ..ops.stages import layer_norm as layer_norm_stage
from ..ops.stages import rms_norm as rms_norm_stage

__all__ = [
    *("Attention", "Item", "LinearOf", "Program", "Scale", "Step", "Unsupported", "compile_branch", "path_of"),
    *("attention", "describes", "reads", "steps_for", "steps_of"),
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
        return self.stage, tuple(ref() for ref in self.refs)


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
        q_norm: a module that norms each head of q. `k_norm` likewise.
        scale: the factor of the scores; None for `dim ** -0.5`.
        bias: returns what is added to the scores, `[heads or 1, n, n]`. It gets its gradient.
        rotate_half: how rotary positions pair channels, if the model has them (see `ops.attention.rotate`).
        q_parts, k_parts, biases: more functions inside (see `ops.attention.Core`), each with where to read its tensors.
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


class Program:
    """A branch as stages. `bind` reads its tensors.

    `width` is the number of channels of its input, None if no layer tells it.
    """

    def __init__(self, before: list[Step], attention: _AttentionSteps | None, after: list[Step]) -> None:
        self.before, self.attention, self.after = before, attention, after
        self.width = _width([*before, attention.projection] if attention else before)

    @property
    def has_attention(self) -> bool:
        return self.attention is not None

    @property
    def is_one_opaque_stage(self) -> bool:
        """True if the branch is a single module that is redone as it is."""
        return len(self.before) == 1 and isinstance(self.before[0].stage, Opaque) and self.attention is None

    @property
    def layout(self) -> tuple[int, ...] | None:
        """The shape of the positions, where the attention has one of its own."""
        return None if self.attention is None else self.attention.layout

    def bind(
        self,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        rope: tuple[Tensor, Tensor] | None = None,
        bias_tensors: Sequence[Tensor] | None = None,
        given: Any = None,
    ) -> Branch:
        """The branch with its tensors as they are now; the arguments are what this call of attention adds to it.

        `bias_tensors` take the place of those of the attention's `biases`, where they depend on the size of the map.
        `given` is for the module itself, where it runs instead (see `Attention.call`).
        """
        before = [step.bind() for step in self.before]
        if self.attention is None:
            return Branch(before)
        attention = self.attention.bind(attn_mask, is_causal, rope, bias_tensors)
        return Branch(before, attention, [step.bind() for step in self.after])


class _AttentionSteps:
    """The steps of an `Attention`, and a core for every kind of call."""

    def __init__(self, given: Attention) -> None:
        if given.reason is not None:
            raise Unsupported(given.reason)
        projections = [_one_step(layer) for layer in given.project]
        widths = [_out_width(step) for step in projections]
        if given.gate is not None:
            projections.append(_one_step(given.gate))
            widths.append(_out_width(projections[-1]))
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
        self.sections = tuple(sections)
        self.layout = given.layout
        self.cores: dict[tuple[bool, ...], Core] = {}

    def bind(
        self,
        attn_mask: Tensor | None,
        is_causal: bool,
        rope: tuple[Tensor, Tensor] | None,
        bias_tensors: Sequence[Tensor] | None,
    ) -> BoundAttention:
        given = self.given
        bias = None if given.bias is None else given.bias()
        kind = (attn_mask is not None, is_causal, rope is not None, bias is not None)
        core = self.cores.get(kind)
        if core is None:
            core = self.cores[kind] = self._core(*kind)
        turned = () if rope is None else rope
        tensors = (
            *turned,
            *(ref() for _, refs in self.q_parts for ref in refs),
            *(ref() for _, refs in self.k_parts for ref in refs),
            *(bias_tensors or (ref() for _, refs in given.biases for ref in refs)),
            *(one for one in (bias, attn_mask) if one is not None),
            *(ref() for _, refs in self.out_parts for ref in refs),
        )
        return BoundAttention(self.projection.bind(), core, tensors, given.dropout())

    def _core(self, has_mask: bool, is_causal: bool, has_rope: bool, has_bias: bool) -> Core:
        given = self.given
        return Core(
            heads=given.heads,
            kv_heads=given.kv_heads or given.heads,
            sections=self.sections,
            scale=given.scale,
            causal=is_causal,
            turn=rotate(given.rotate_half) if has_rope else None,
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
    if not isinstance(step.stage, Pointwise):
        raise Unsupported(f"{type(norm).__name__} is not known as a norm inside attention")
    return [(row_norm(step.stage.fn, len(step.refs)), step.refs)]


def _one_step(layer: Any) -> Step:
    steps = steps_of(layer)
    if len(steps) != 1:
        raise Unsupported(f"{type(layer).__name__} is not a linear layer")
    return steps[0]


def _out_width(step: Step) -> int:
    """The number of channels that a linear layer, or an opaque stage in its place, makes."""
    if isinstance(step.stage, Linear):
        return step.refs[0]().shape[0]
    assert isinstance(step.stage, Opaque)
    if step.stage.out_features is not None:
        return step.stage.out_features
    tensors = [torch.empty_like(ref(), device="meta") for ref in step.refs]
    x = torch.empty(1, 1, _width([step]) or 1, dtype=tensors[0].dtype, device="meta")
    try:
        return step.stage.fn(x, *tensors).shape[-1]
    except Exception as error:
        raise Unsupported(f"a projection to q, k or v does not tell how many channels it makes: {error}") from None


def _width(steps: Sequence[Step]) -> int | None:
    """The number of channels of the first of the steps: what its first matrix reads, or its first vector has."""
    matrices = [step for step in steps if isinstance(step.stage, (Linear, Parallel, Opaque)) and step.refs]
    for step in matrices or steps:
        for ref in step.refs:
            shape = ref().shape
            if len(shape) == (2 if matrices else 1):
                return shape[-1]
    return None


def compile_branch(items: Sequence[Any]) -> Program:
    """The program of a list of modules.

    Raises:
        Unsupported: if one of them is no function of each row alone, or cannot be done again.
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
                raise Unsupported(f"{type(item.module).__name__} has hooks, which expect to see every position once")
            attention = _AttentionSteps(item)
        elif isinstance(item, Scale):
            _add_scale(steps, item)
        else:
            steps += steps_of(item)
    return Program(before, attention, after)


def _flat(items: Sequence[Any]) -> Iterable[Any]:
    """The items, with what an attention has behind it, and scales laid open."""
    for item in items:
        if isinstance(item, Attention):
            yield item
            out = list(item.out)
            yield from out if item.gate is not None or item.gate_norm is None else [item.gate_norm, *out]
        elif isinstance(item, nn.Module) and path_of(item) in SCALES and _is_plain(item):
            yield Scale(partial(getattr, item, SCALES[path_of(item)]))
        else:
            yield item


def _add_scale(steps: list[Step], scale: Scale) -> None:
    """The scale joins the linear layer before it. Dropout may lie between the two, but both are products."""
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


def _is_plain(module: nn.Module) -> bool:
    """Whether calling the module does just what its class's forward does: no hooks, no override but keepgrad's own."""
    return not has_hooks(module) and (
        "forward" not in vars(module) or (_is_patched(module) and vars(module)["forward"].previous is None)
    )


def _is_patched(module: nn.Module) -> bool:
    """Whether the module has a forward of keepgrad's."""
    return getattr(vars(module).get("forward"), "is_of_keepgrad", False)


def reads(module: nn.Module, *names: str) -> tuple[Ref, ...]:
    """Where to read these tensors of a module, without those that are None."""
    return tuple(partial(getattr, module, name) for name in names if getattr(module, name, None) is not None)


Build = Callable[[Any], list[Step]]
STEPS: dict[str, Build] = {}
"""From the import path of a class to a function that gives the steps of its modules."""

SCALES = {"timm.layers.layer_scale.LayerScale": "gamma", "timm.layers.layer_scale.LayerScale2d": "gamma"}
"""Modules that multiply with a vector, and the name of that vector."""


def steps_for(*paths: str) -> Callable[[Build], Build]:
    """Add a function to the table, for the classes with these import paths."""

    def add(build: Build) -> Build:
        STEPS.update(dict.fromkeys(paths, build))
        return build

    return add


def steps_of(module: Any) -> list[Step]:
    """A position-wise module as steps.

    Raises:
        Unsupported: if the module is no function of each row alone, or cannot be done again.
    """
    if isinstance(module, Step):
        return [module]
    if isinstance(module, LinearOf):
        has_bias = module.bias() is not None
        refs = (module.weight, module.bias) if has_bias else (module.weight,)
        return [Step(Linear(has_bias), refs)]  # type: ignore[arg-type]
    if _is_plain(module):
        build = STEPS.get(path_of(module))
        if build is not None:
            return build(module)
    return [opaque(module)]


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


@steps_for("torch.nn.modules.linear.Identity")
def _identity(module: Any) -> list[Step]:
    return []


@steps_for("torch.nn.modules.container.Sequential")
def _sequential(module: Any) -> list[Step]:
    return [step for child in module for step in steps_of(child)]


@steps_for("torch.nn.modules.dropout.Dropout")
def _dropout(module: Any) -> list[Step]:
    return [Step(Noise(module, per_sample=False))] if module.training and module.p > 0 else []


@steps_for("torch.nn.modules.activation.GELU")
def _gelu(module: Any) -> list[Step]:
    return [Step(gelu_stage(module.approximate)[0])]


@steps_for("torch.nn.modules.linear.Linear")
def _linear(module: Any) -> list[Step]:
    return [Step(Linear(module.bias is not None), reads(module, "weight", "bias"))]


@steps_for("torch.nn.modules.conv.Conv2d")
def _conv(module: Any) -> list[Step]:
    """A 1x1 convolution is a linear layer."""
    if module.kernel_size != (1, 1) or module.stride != (1, 1) or module.groups != 1 or module.padding != (0, 0):
        raise Unsupported("Conv2d works over positions or samples")
    return [Step(Linear(module.bias is not None), (lambda: module.weight.flatten(1), *reads(module, "bias")))]


@steps_for("torch.nn.modules.normalization.LayerNorm")
def layer_norm(module: Any) -> list[Step]:
    """A norm of the channels, wherever the module looks for them: on rows they are last."""
    shape = tuple(module.normalized_shape)
    return [Step(layer_norm_stage(shape, module.weight, module.bias, module.eps)[0], reads(module, "weight", "bias"))]


@steps_for("torch.nn.modules.normalization.RMSNorm")
def rms_norm(module: Any) -> list[Step]:
    shape = tuple(module.normalized_shape)
    return [Step(rms_norm_stage(shape, module.weight, module.eps)[0], reads(module, "weight"))]


def drop_path(module: Any) -> list[Step]:
    """Noise that is drawn once a sample."""
    probability = module.p if hasattr(module, "p") else module.drop_prob
    return [Step(Noise(module, per_sample=True))] if module.training and probability else []


def gate(act: nn.Module, act_first: bool) -> Step:
    """Two halves of the channels, one of them through the activation, multiplied."""
    stage, refs = opaque(act)
    if refs or not isinstance(stage, Pointwise):
        raise Unsupported(f"{type(act).__name__} has parameters, in a gate")
    activate = stage.fn

    def fn(x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return activate(a) * b if act_first else a * activate(b)

    return Step(Pointwise(fn))


def side_by_side(*layers: nn.Module) -> Step:
    """Layers on the same input, their outputs side by side."""
    steps = [_one_step(layer) for layer in layers]
    widths = tuple(_out_width(step) for step in steps)
    refs = tuple(ref for step in steps for ref in step.refs)
    return Step(Parallel(tuple(s.stage for s in steps), widths, tuple(len(s.refs) for s in steps)), refs)


def rows_of_map(module: nn.Module) -> Step:
    """A position-wise module without matrices for maps `[batch, channels, height, width]`, on rows."""
    stage, refs = opaque(module)
    assert isinstance(stage, Pointwise)
    fn = stage.fn

    def on_rows(x: Tensor, *tensors: Tensor) -> Tensor:
        return fn(x.transpose(1, 2).unsqueeze(-1), *tensors).squeeze(-1).transpose(1, 2)

    return Step(Pointwise(on_rows), refs)


def global_response_norm(module: Any) -> Step:
    """timm's and its like, with a weight and a bias for each channel."""
    return Step(GlobalResponseNorm(module.eps), reads(module, "weight", "bias"))


RANDOM = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU)
OVER_POSITIONS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.GroupNorm, nn.MultiheadAttention),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.Conv1d, nn.Conv2d, nn.Conv3d),
)


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


def opaque(module: nn.Module) -> Step:
    """Any position-wise module on rows, redone in backward with whatever it does.

    It counts as heavy if it has a matrix, else as cheap (a custom activation or norm).

    Raises:
        Unsupported: if the module is no function of each row alone, or cannot be done again.
    """
    _refuse(module)
    named = dict(module.named_parameters())
    if not named:  # it is no site
        return Step(Pointwise(module.forward))
    names = tuple(named)

    def fn(x: Tensor, *tensors: Tensor) -> Tensor:
        given = dict(zip(names, tensors, strict=True))
        if not _is_patched(module):
            return torch.func.functional_call(module, given, (x,))
        patch: Any = module.forward
        patch.is_aside = True  # a site must not run inside of itself
        try:
            return torch.func.functional_call(module, given, (x,))
        finally:
            patch.is_aside = False

    refs = tuple(partial(_parameter, module, name) for name in names)
    if all(t.dim() < 2 for t in named.values()):
        return Step(Pointwise(fn), refs)
    return Step(Opaque(fn, getattr(module, "out_features", None)), refs)


def _parameter(module: nn.Module, name: str) -> Tensor:
    """The parameter of that name as it is now."""
    path, _, last = name.rpartition(".")
    return getattr(module.get_submodule(path), last)
