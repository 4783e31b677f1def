"""The table that says, for each type of module, which stages of the engine it becomes.

Types are named by their import path, so no library has to be imported. A position-wise module whose type is not in the
table becomes an opaque stage: backward runs the whole module again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._torch import acts_by_itself, has_hooks
from ..ops.branch import Branch, Hooked
from ..ops.dropout import Drop, OpaqueWithDropout
from ..ops.lora import Lora
from ..ops.stages import GlobalResponseNorm, Linear, Noise, Opaque, Parallel, Pointwise
from ..ops.stages import gelu as gelu_stage
from ..ops.stages import layer_norm as layer_norm_stage
from ..ops.stages import rms_norm as rms_norm_stage
from .items import LinearOf, Ref, Step, Unsupported, path_of

__all__ = [
    *("HAS_HOOKS", "SCALES", "STEPS", "drop_path", "gate", "global_response_norm", "is_plain", "layer_norm"),
    *("one_step", "opaque", "out_width", "read", "reads", "rms_norm", "rows_of_map", "side_by_side", "steps_for"),
    *("steps_inside", "steps_of", "width_of"),
]


HAS_HOOKS = "{} has hooks, which expect to see every position once"


def is_plain(module: nn.Module, but_hooks: bool = False) -> bool:
    """True if a call runs just the forward of the class: no hooks, and no other forward set but by keepgrad.

    With `but_hooks`, hooks are allowed.
    """
    return (but_hooks or not has_hooks(module)) and (
        "forward" not in vars(module) or (_is_patched(module) and vars(module)["forward"].previous is None)
    )


def _is_patched(module: nn.Module) -> bool:
    """True if keepgrad has replaced the module's forward."""
    return getattr(vars(module).get("forward"), "is_of_keepgrad", False)


def read(module: nn.Module, name: str) -> Ref:
    """A function that reads a tensor of a module: from its dictionary of parameters, or else as an attribute."""
    parameters: dict[str, Any] = module._parameters
    return partial(parameters.__getitem__ if name in parameters else partial(getattr, module), name)


def reads(module: nn.Module, *names: str) -> tuple[Ref, ...]:
    """Functions that read these tensors of a module. Tensors that are None are left out."""
    return tuple(read(module, name) for name in names if getattr(module, name, None) is not None)


Build = Callable[[Any], list[Step]]
STEPS: dict[str, Build] = {}
"""Maps the import path of a class to a function that returns the steps of such a module."""

SCALES = {"timm.layers.layer_scale.LayerScale": "gamma", "timm.layers.layer_scale.LayerScale2d": "gamma"}
"""Maps the import path of a class whose modules multiply by a vector to the name of that vector."""


def steps_for(*paths: str) -> Callable[[Build], Build]:
    """Register a function that returns the steps of modules of the classes with these import paths."""

    def add(build: Build) -> Build:
        STEPS.update(dict.fromkeys(paths, build))
        return build

    return add


def steps_of(module: Any) -> list[Step]:
    """The steps of a position-wise module.

    Raises:
        Unsupported: if the module mixes positions, or cannot be run again in backward.
    """
    if isinstance(module, Step):
        return [module]
    if isinstance(module, LinearOf):
        has_bias = module.bias() is not None
        refs = (module.weight, module.bias) if has_bias else (module.weight,)
        if acts_by_itself(module.weight()):
            return [Step(Opaque(F.linear, out_features=module.weight().shape[0]), refs)]  # type: ignore[arg-type]
        return [Step(Linear(has_bias), refs)]  # type: ignore[arg-type]
    return [hooked(module)] if has_hooks(module) else steps_inside(module)


def steps_inside(module: nn.Module) -> list[Step]:
    """The steps of a module's forward. Hooks on the module itself are ignored."""
    if is_plain(module, but_hooks=True):
        build = STEPS.get(path_of(module))
        if build is not None:
            return build(module)
        if path_of(module) in SCALES:
            return [Step(Pointwise(torch.mul), (partial(getattr, module, SCALES[path_of(module)]),))]
    return [opaque(module, draws=True, but_hooks=True)]


def hooked(module: nn.Module) -> Step:
    """The step for a module with hooks. The module is called, so they run; only its forward is the engine's."""
    name = type(module).__name__
    steps = steps_inside(module)
    if torch.compiler.is_compiling():
        raise Unsupported(HAS_HOOKS.format(name))
    is_hooked = any(isinstance(step.stage, Hooked) for step in steps)
    chains: dict[Any, Any] = {}

    def call(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        module.forward = forward
        try:
            return module(x)
        finally:
            del module.forward

    stage = Hooked(name, call, lambda: Branch([step.bind() for step in steps], chains=chains, is_hooked=is_hooked))
    return Step(stage, tuple(ref for step in steps for ref in step.refs))


@steps_for("torch.nn.modules.linear.Identity")
def _identity(module: Any) -> list[Step]:
    return []


@steps_for("torch.nn.modules.container.Sequential")
def _sequential(module: Any) -> list[Step]:
    return [step for child in module for step in steps_of(child)]


@steps_for("torch.nn.modules.dropout.Dropout")
def _dropout(module: Any) -> list[Step]:
    return [Step(Noise(own_forward(module), per_sample=False))] if module.training and module.p > 0 else []


@steps_for("torch.nn.modules.activation.GELU")
def _gelu(module: Any) -> list[Step]:
    return [Step(gelu_stage(module.approximate)[0])]


@steps_for("torch.nn.modules.linear.Linear")
def _linear(module: Any) -> list[Step]:
    if acts_by_itself(module.weight):
        _check_gradient(module)
        return [opaque(module)]
    return [Step(Linear(module.bias is not None), reads(module, "weight", "bias"))]


def _check_gradient(module: nn.Linear) -> None:
    """Raise Unsupported if no gradient reaches the input through the layer's quantised weight."""
    device = module.weight.device
    if device.type == "meta":
        return
    x = torch.ones(1, 1, module.in_features, dtype=module.weight.dtype, device=device, requires_grad=True)
    with torch.enable_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        out = module.forward(x)
        passes = out.requires_grad and torch.autograd.grad(out.sum(), x, allow_unused=True)[0] is not None
    if not passes:
        raise Unsupported(f"Linear with a weight of {type(module.weight).__name__} passes no gradient on")


@steps_for("torch.nn.modules.conv.Conv2d")
def _conv(module: Any) -> list[Step]:
    """A 1x1 convolution is a linear layer."""
    if module.kernel_size != (1, 1) or module.stride != (1, 1) or module.groups != 1 or module.padding != (0, 0):
        raise Unsupported("Conv2d works over positions or samples")
    return [Step(Linear(module.bias is not None), (lambda: module.weight.flatten(1), *reads(module, "bias")))]


@steps_for("torch.nn.modules.normalization.LayerNorm")
def layer_norm(module: Any) -> list[Step]:
    """A norm over channels. Also for modules that expect channels first: in rows the channels are always last."""
    shape = tuple(module.normalized_shape)
    return [Step(layer_norm_stage(shape, module.weight, module.bias, module.eps)[0], reads(module, "weight", "bias"))]


@steps_for("torch.nn.modules.normalization.RMSNorm")
def rms_norm(module: Any) -> list[Step]:
    shape = tuple(module.normalized_shape)
    return [Step(rms_norm_stage(shape, module.weight, module.eps)[0], reads(module, "weight"))]


def own_forward(module: nn.Module) -> Callable[..., Tensor]:
    """The forward of the module's class, bound to the module. Calling it runs no hooks."""
    return partial(type(module).forward, module)


def drop_path(module: Any) -> list[Step]:
    """Stochastic depth: one random number per sample."""
    probability = module.p if hasattr(module, "p") else module.drop_prob
    return [Step(Noise(own_forward(module), per_sample=True))] if module.training and probability else []


def gate(act: nn.Module, act_first: bool) -> Step:
    """Splits the channels into two halves, applies the activation to one of them, and multiplies the two.

    `act_first` says that the activation is applied to the first half.
    """
    stage, refs = opaque(act)
    if refs or not isinstance(stage, Pointwise):
        raise Unsupported(f"{type(act).__name__} has parameters, in a gate")
    activate = stage.fn

    def fn(x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return activate(a) * b if act_first else a * activate(b)

    return Step(Pointwise(fn, stage.reads_signs))


def side_by_side(*layers: nn.Module) -> Step:
    """Layers that read the same input. Their outputs are concatenated along the channels."""
    steps = [one_step(layer) for layer in layers]
    widths = tuple(out_width(step) for step in steps)
    refs = tuple(ref for step in steps for ref in step.refs)
    return Step(Parallel(tuple(s.stage for s in steps), widths, tuple(len(s.refs) for s in steps)), refs)


def rows_of_map(module: nn.Module) -> Step:
    """Makes a module that works on maps `[batch, channels, height, width]` work on rows.

    The module must be position-wise and have no matrices (an activation or a norm, for example).
    """
    stage, refs = opaque(module)
    assert isinstance(stage, Pointwise)
    fn = stage.fn

    def on_rows(x: Tensor, *tensors: Tensor) -> Tensor:
        return fn(x.transpose(1, 2).unsqueeze(-1), *tensors).squeeze(-1).transpose(1, 2)

    return Step(Pointwise(on_rows, stage.reads_signs), refs)


def global_response_norm(module: Any) -> Step:
    """The step for a global response norm with `weight`, `bias` and `eps`, such as timm's."""
    return Step(GlobalResponseNorm(module.eps), reads(module, "weight", "bias"))


QUANTISED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")
"""Packages of modules that compute with integers, through which no gradient flows."""
DROPOUT = "torch.nn.modules.dropout.Dropout"
RANDOM = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU)
SMOOTH = (nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid, nn.Softplus, nn.Tanh)
"""Activations whose derivative does not jump at zero."""
OVER_POSITIONS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.GroupNorm, nn.MultiheadAttention),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.Conv1d, nn.Conv2d, nn.Conv3d),
)


def _refuse(module: nn.Module, draws: bool, but_hooks: bool) -> list[nn.Module]:
    """Raise Unsupported if the module mixes positions or cannot be run again in backward. Returns its dropouts."""
    drops: list[nn.Module] = []
    for inner in module.modules():
        kind = type(inner).__name__
        if has_hooks(inner) and not (but_hooks and inner is module):
            raise Unsupported(HAS_HOOKS.format(kind))
        if getattr(inner, "inplace", False):
            raise Unsupported(f"{kind} works in place; build it with inplace=False")
        if type(inner).__module__.startswith(QUANTISED):
            raise Unsupported(f"{kind} is quantised, for inference alone")
        if isinstance(inner, OVER_POSITIONS):
            raise Unsupported(f"{kind} works over positions or samples")
        if isinstance(inner, RANDOM) and inner.training and getattr(inner, "p", 1) > 0:
            if not draws or path_of(inner) != DROPOUT or not is_plain(inner) or torch.compiler.is_compiling():
                raise Unsupported(f"{kind} draws random numbers inside a module that keepgrad does not know")
            drops.append(inner)
    return drops


def opaque(module: nn.Module, draws: bool = False, but_hooks: bool = False) -> Step:
    """The step for any position-wise module that is not in the table. Backward runs the module again.

    A module with a matrix or a dropout becomes an opaque stage, any other a pointwise one (a custom activation or norm,
    for example), which counts as cheap. `draws` allows dropouts inside the module. `but_hooks` allows hooks on the
    module itself, if it has no parameters and no dropouts, so that its forward can be called without them.

    Raises:
        Unsupported: if the module mixes positions, or cannot be run again in backward.
    """
    drops = _refuse(module, draws, but_hooks)
    named = dict(module.named_parameters())
    if not named and not drops:  # such a module is never a site, so its forward is its own
        return Step(Pointwise(module.forward, reads_signs=not isinstance(module, SMOOTH)))
    if has_hooks(module):
        raise Unsupported(HAS_HOOKS.format(type(module).__name__))  # the module is called, so hooks would run again
    names = tuple(named)

    def fn(x: Tensor, *tensors: Tensor) -> Tensor:
        given = dict(zip(names, tensors, strict=True))
        if not _is_patched(module):
            return torch.func.functional_call(module, given, (x,))
        patch: Any = module.forward
        patch.is_aside = True  # the patched forward must not start the engine again
        try:
            return torch.func.functional_call(module, given, (x,))
        finally:
            patch.is_aside = False

    refs = tuple(_parameter(module, name) for name in names)
    if drops:
        how = tuple(Drop(own_forward(one), one.p) for one in drops)  # type: ignore[arg-type]
        out_features = getattr(module, "out_features", None)
        return Step(OpaqueWithDropout(fn, out_features=out_features, modules=tuple(drops), drops=how), refs)
    if all(t.dim() < 2 for t in named.values()):
        return Step(Pointwise(fn), refs)
    return Step(Opaque(fn, out_features=getattr(module, "out_features", None)), refs)


def _parameter(module: nn.Module, name: str) -> Ref:
    """A function that reads the parameter of that name."""
    path, _, last = name.rpartition(".")
    return read(module.get_submodule(path), last)


def one_step(layer: Any) -> Step:
    steps = steps_of(layer)
    for step in steps:
        if isinstance(step.stage, Hooked):
            raise Unsupported(HAS_HOOKS.format(step.stage.name))
    if len(steps) != 1:
        raise Unsupported(f"{type(layer).__name__} is not a linear layer")
    return steps[0]


def out_width(step: Step) -> int:
    """The number of output channels of a linear layer, or of an opaque stage in its place."""
    stage = step.stage.base if isinstance(step.stage, Lora) else step.stage
    if isinstance(stage, Linear):
        return step.refs[0]().shape[0]
    if not isinstance(stage, Opaque):
        raise Unsupported(f"a projection to q, k or v is a {type(stage).__name__}, and no linear layer")
    if stage.out_features is not None:
        return stage.out_features
    tensors = [torch.empty(ref().shape, dtype=ref().dtype, device="meta") for ref in step.refs]
    x = torch.empty(1, 1, width_of([step]) or 1, dtype=tensors[0].dtype, device="meta")
    try:
        return stage.fn(x, *tensors).shape[-1]
    except Exception as error:
        raise Unsupported(f"a projection to q, k or v does not tell how many channels it makes: {error}") from None


def width_of(steps: Sequence[Step]) -> int | None:
    """The number of input channels: those that the first matrix reads or, with no matrix, the length of a vector."""
    matrices = [
        step for step in steps if isinstance(step.stage, (Linear, Lora, Parallel, Opaque, Hooked)) and step.refs
    ]
    for step in matrices or steps:
        for ref in step.refs:
            shape = ref().shape
            if len(shape) == (2 if matrices else 1):
                return shape[-1]
    return None
