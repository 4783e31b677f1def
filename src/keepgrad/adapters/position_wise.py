"""Tier 2: a position-wise MLP in an unknown block, and modules that the user declares to be position-wise.

Such a module is a site by itself. Some MLPs are known by their class. All other modules are checked when `apply` is
called, by running them on a small input:

- an MLP found by its structure: the input of each part must be the output of the part before it;
- a declared module: a change at one position must not change the output at another, two runs must give the same
  output, and no buffer may change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._torch import has_hooks
from ..errors import ConfigError
from .items import Step, Unsupported, path_of
from .modules import HAS_HOOKS, gate, side_by_side, steps_for, steps_inside, steps_of
from .program import compile_branch
from .registry import Adapter, RunBranch

__all__ = ["MLPS", "declared_adapter", "position_wise_adapter", "rows_of", "structure"]

MLPS: set[str] = set()
"""Import paths of MLPs that the table knows. They work on rows or, if their layers are convolutions, on maps."""

SEQUENCES = {"torchvision.ops.misc.MLP"}
"""MLPs that inherit the forward of `Sequential`, so they are looked up by their own class instead."""

SMALLEST = 8
"""An MLP whose input has fewer channels than this is left alone: they are coordinates, not features."""


class PositionWise(Adapter):
    """The adapter for a module that is a single branch."""

    tier = 2
    gives_rows = False

    def __init__(self, first: bool = False) -> None:
        self.channels_first = first

    def branches(self, m: Any) -> dict[str, Any]:
        return {"mlp": steps_inside(m)}  # hooks on m still run: keepgrad replaces only its forward

    def forward(self, m: Any, run: RunBranch, x: Tensor, *args: Any, **options: Any) -> Tensor:
        if args or options or not 3 <= x.dim() <= 5:
            raise NotRows
        if not self.channels_first:
            shape = x.shape[1:-1]
            return run("mlp", x.flatten(1, -2), None, None if x.dim() == 3 else shape).unflatten(1, shape)
        shape = x.shape[2:]
        return maps_of(run("mlp", rows_of(x), None, shape), shape)


class NotRows(Exception):  # noqa: N818
    """Raised in a forward if keepgrad cannot handle this call. The module then runs its own forward."""


def rows_of(maps: Tensor) -> Tensor:
    """Maps `[batch, channels, *shape]` as rows. No copy if their memory is channels-last, as after a block."""
    return maps.movedim(1, -1).flatten(1, -2)


def maps_of(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Rows as maps `[batch, channels, *shape]`, in channels-last memory."""
    return rows.unflatten(1, shape).movedim(-1, 1)


ON_ROWS, ON_MAPS = PositionWise(), PositionWise(first=True)


def position_wise_adapter(module: nn.Module) -> Adapter | None:
    """The adapter for a position-wise MLP; None if the module is not one."""
    path = path_of(module)
    if path in MLPS or f"{type(module).__module__}.{type(module).__qualname__}" in SEQUENCES:
        first = next((p for p in module.parameters() if p.dim() > 1), None)
        if first is None or first.shape[1] < SMALLEST:
            return None
        return ON_MAPS if first.dim() == 4 else ON_ROWS
    order = structure(module) if path.startswith("transformers.") else None
    return None if order is None else Structured(order)


class Product(NamedTuple):
    """The gated part of an MLP, `act(gate(x)) * up(x)`. The fields are the names of the modules.

    If `up` is empty, `gate` is one layer that computes both halves; `act_first` says that the activation is applied to
    the first half.
    """

    gate: str
    up: str
    act: str
    act_first: bool = True

    def of(self, m: nn.Module) -> Gated:
        layers = [getattr(m, name) for name in (self.gate, self.up) if name]
        return Gated(layers, getattr(m, self.act), self.act_first)


class Structured(PositionWise):
    """The adapter for an MLP whose parts, and their order, were found by watching it run.

    `order` lists the names of the parts, or is a string that says why they could not be found.
    """

    def __init__(self, order: Sequence[str | Product] | str) -> None:
        super().__init__()
        self.order = order

    def branches(self, m: Any) -> dict[str, Any]:
        if isinstance(self.order, str):
            return {"mlp": self.order}
        return {"mlp": [part.of(m) if isinstance(part, Product) else getattr(m, part) for part in self.order]}


class Gated(nn.Module):
    """Applies the activation to one half of the channels and multiplies it by the other half.

    The layers belong to the model: they are kept in a tuple, so they are not registered here as submodules.
    """

    def __init__(self, layers: Sequence[nn.Module], act: nn.Module, act_first: bool) -> None:
        super().__init__()
        self.parts = (tuple(layers), act, act_first)

    def forward(self, x: Tensor) -> Tensor:
        layers, act, act_first = self.parts
        first, second = torch.cat([layer(x) for layer in layers], -1).chunk(2, -1)
        return act(first) * second if act_first else first * act(second)


@steps_for(f"{__name__}.Gated")
def _gated(module: Any) -> list[Step]:
    layers, act, act_first = module.parts
    return [*(steps_of(layers[0]) if len(layers) == 1 else [side_by_side(*layers)]), gate(act, act_first)]


LINEAR = {
    "torch.nn.modules.linear.Linear": 1,
    "transformers.pytorch_utils.Conv1D": 0,
    "peft.tuners.lora.layer.Linear": 1,
}
"""Maps the import path of a linear layer to the dimension of its weight that is the input."""


def structure(module: nn.Module) -> Sequence[str | Product] | str | None:
    """The parts of an MLP in order: linear, activation, linear; or gate, up, down; with dropouts anywhere.

    The module runs once on a small input. Each part must be called once, with the output of the part before it.
    Returns None if the module is not such an MLP, or a string with the reason if it could not be run.
    """
    parts = dict(module.named_children())
    layers = [name for name, part in parts.items() if path_of(part) in LINEAR]
    rest = [part for name, part in parts.items() if name not in layers]
    acts = [part for part in rest if not isinstance(part, nn.Dropout)]
    if len(layers) not in (2, 3) or len(acts) != 1 or any(True for part in rest for _ in part.parameters()):
        return None
    if list(module.named_parameters(recurse=False)):
        return None
    heard = [part for part in parts.values() if has_hooks(part)]
    if heard:  # running the module would call the user's hooks
        return HAS_HOOKS.format(type(heard[0]).__name__)
    first: Any = parts[layers[0]]
    width = first.weight.shape[LINEAR[path_of(first)]]
    run = _watch(module, parts, width) if width >= SMALLEST else None
    if run is None or sorted(call.name for call in run.calls) != sorted(parts):
        return None
    if len(layers) == 2 and _is_chain(run.calls, run.x, run.out):
        return [call.name for call in run.calls]
    act = next(call for call in run.calls if parts[call.name] is acts[0])
    for product, value in _products([call for call in run.calls if call.name in layers], act, run.x):
        after = [call for call in run.calls if call.name not in product]
        if after and _is_same(after[0].given, value) and _is_chain(after, after[0].given, run.out):
            return [product, *(call.name for call in after)]
    return None


class _Call(NamedTuple):
    """One call of a part of a module: its name, its input and its output."""

    name: str
    given: Tensor
    made: Tensor


class _Watched(NamedTuple):
    x: Tensor
    calls: list[_Call]
    out: Tensor


def _watch(module: nn.Module, parts: Mapping[str, nn.Module], width: int) -> _Watched | None:
    """Run a module on a small input and record the calls of its parts. Returns None if the run fails."""
    like = next(module.parameters())
    x, calls = _small_input(width, like), list[_Call]()

    def note(name: str, part: nn.Module, args: tuple[Any, ...], made: Any) -> None:
        calls.append(_Call(name, args[0], made))

    handles = [part.register_forward_hook(partial(note, name)) for name, part in parts.items()]
    try:
        with torch.no_grad(), torch.random.fork_rng([like.device] if like.is_cuda else []):
            return _Watched(x, calls, module.forward(x))
    except Exception:
        return None
    finally:
        for handle in handles:
            handle.remove()


def _is_chain(calls: Sequence[_Call], start: Tensor, end: Tensor) -> bool:
    """True if the input of each call is the output of the one before it, from `start` to `end`."""
    for call in calls:
        if call.given is not start:
            return False
        start = call.made
    return start is end


def _products(layers: list[_Call], act: _Call, x: Tensor) -> Iterator[tuple[Product, Tensor]]:
    """All gated products that these calls could form, each with its value."""
    first = [layer for layer in layers if layer.given is x]
    for layer in first:
        if layer.made is act.given:
            for up in first:
                if up is not layer:
                    yield Product(layer.name, up.name, act.name), act.made * up.made
        for act_first in (True, False):
            half, other = layer.made.chunk(2, -1)[:: 1 if act_first else -1]
            if half.shape == act.given.shape and not x.is_meta and torch.equal(half, act.given):
                yield Product(layer.name, "", act.name, act_first), act.made * other


def _is_same(given: Tensor, wanted: Tensor) -> bool:
    return given.shape == wanted.shape and (given.is_meta or torch.equal(given, wanted))


def _small_input(width: int, like: Tensor) -> Tensor:
    """Two samples of three positions."""
    values = torch.linspace(-1, 1, 6 * width, dtype=torch.float64).sin().view(2, 3, width)
    return values.to(like.device, like.dtype)


def declared_adapter(module: nn.Module, declared: Mapping[str, Any]) -> Adapter | None:
    """The adapter for a module that the user declared position-wise, itself or by its class; None if not declared.

    Raises:
        ConfigError: if the module is not position-wise.
    """
    for kind, given in declared.items():
        several = given if isinstance(given, (list, tuple, set, nn.ModuleList)) else [given]
        if any(module is one or (isinstance(one, type) and type(module) is one) for one in several):
            if kind != "mlp":
                raise ConfigError(f"modules={{{kind!r}: ...}}: a declared module follows the settings of 'mlp'")
            prove(module)
            return ON_ROWS
    return None


def prove(module: nn.Module) -> None:
    """Raise ConfigError unless the module is position-wise, draws no random numbers and changes no buffer."""
    name = type(module).__name__
    try:
        program = compile_branch(steps_inside(module))
        if any(step.stage.noises for step in program.before):
            raise Unsupported("Dropout draws random numbers inside a module that keepgrad does not know")
    except Unsupported as why:
        raise ConfigError(f"{name} was declared to be position-wise, but cannot be reduced: {why}") from None
    parameter = next(module.parameters(), None)
    width = program.width
    if width is None or parameter is None:
        raise ConfigError(f"{name} was declared to be position-wise, but has no layer that tells its input's channels")
    if parameter.is_meta:
        return
    x = _small_input(width, parameter)
    moved = x.clone()
    moved[:, 1] += 1
    buffers = {key: value.clone() for key, value in module.named_buffers()}
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            before, again, after = (module.forward(rows) for rows in (x, x, moved))
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"{name} was declared to be position-wise, but fails on rows {tuple(x.shape)}: {reason}"
        ) from error
    finally:
        state = dict(module.named_buffers())
        changed = [key for key, value in buffers.items() if not torch.equal(state[key], value)]
        for key in changed:
            state[key].copy_(buffers[key])
    if changed:
        raise ConfigError(
            f"{name} changes its buffer {changed[0]!r} when it runs, so it cannot be done again in backward"
        )
    if not isinstance(before, Tensor) or before.shape[:2] != x.shape[:2]:
        raise ConfigError(f"{name} does not map rows [batch, positions, channels] to rows of as many positions")
    if not torch.equal(before, again):
        raise ConfigError(f"{name} gives another output when it is run again, so it cannot be done again in backward")
    others = [0, 2]
    if not torch.allclose(before[:, others].float(), after[:, others].float(), rtol=1e-4, atol=1e-5):
        raise ConfigError(f"{name} is not position-wise: a change of one position moved the output of others")


def steps_of_mlp(*items: Any) -> list[Step]:
    """The steps of several modules that run one after the other."""
    return [step for item in items for step in ([item] if isinstance(item, Step) else steps_of(item))]
