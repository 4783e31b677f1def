"""Tier 2: a position-wise MLP in a block that is not known, and modules that the user declares to be position-wise.

Such a module is a site at its own boundary. What is found by its structure, and what is declared, is proved when
`apply` is called: on a small input, its stages must give what the module gives; and for a module that is taken as it is,
a change of one position may move no other, two runs must agree, and no buffer may change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from .modules import STEPS, Program, Step, Unsupported, compile_branch, gate, path_of, side_by_side, steps_of
from .registry import Adapter, RunBranch

__all__ = ["MLPS", "MLPS_2D", "declared_adapter", "position_wise_adapter", "rows_of", "structure"]

MLPS: set[str] = {"torchvision.ops.misc.MLP"}
"""Import paths of MLPs on rows `[batch, ..., channels]`, whose stages are in the table."""

MLPS_2D: set[str] = set()
"""The same for maps `[batch, channels, height, width]`."""

SMALLEST = 8
"""Fewer channels than this are coordinates, not features."""


class PositionWise(Adapter):
    """A module that is one branch."""

    tier = 2

    def __init__(self, first: bool = False) -> None:
        self.channels_first = first

    def branches(self, m: Any) -> dict[str, Any]:
        return {"mlp": [m]}

    def forward(self, m: Any, run: RunBranch, x: Tensor, *args: Any, **options: Any) -> Tensor:
        if args or options or not 3 <= x.dim() <= 5:
            raise NotRows
        if not self.channels_first:
            shape = x.shape[1:-1]
            return run("mlp", x.flatten(1, -2), None, None if x.dim() == 3 else shape).unflatten(1, shape)
        shape = x.shape[2:]
        return maps_of(run("mlp", rows_of(x), None, shape), shape)


class Structured(PositionWise):
    """A module whose stages were found by its structure."""

    def branches(self, m: Any) -> dict[str, Any]:
        return {"mlp": structure(m) or [m]}


class NotRows(Exception):  # noqa: N818
    """The input of a module has no positions; the module runs by itself."""


def rows_of(maps: Tensor) -> Tensor:
    """Maps `[batch, channels, *shape]` as rows; a view where they are channels-last, as after a block."""
    return maps.movedim(1, -1).flatten(1, -2)


def maps_of(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Rows as maps `[batch, channels, *shape]`, in channels-last memory."""
    return rows.unflatten(1, shape).movedim(-1, 1)


ON_ROWS, ON_MAPS, BY_STRUCTURE = PositionWise(), PositionWise(first=True), Structured()


def position_wise_adapter(module: nn.Module) -> Adapter | None:
    """The adapter for a position-wise MLP that stands by itself; None if the module is none."""
    path = path_of(module)
    if path in MLPS:
        first = next((p for p in module.parameters() if p.dim() > 1), None)
        if first is None or first.shape[1] < SMALLEST:
            return None
        return ON_MAPS if first.dim() == 4 else ON_ROWS
    if path.startswith("transformers.") and structure(module) is not None:
        return BY_STRUCTURE
    return None


def structure(module: nn.Module) -> list[Any] | None:
    """The modules of an MLP in the order in which they run: linear, activation, linear; or gate, up, down.

    None if the module is something else, or does not give what these modules give.
    """
    children = dict(module.named_children())
    layers = {name: m for name, m in children.items() if _is_linear(m)}
    rest = [m for name, m in children.items() if name not in layers]
    acts = [m for m in rest if not isinstance(m, nn.Dropout) and not any(True for _ in m.parameters())]
    drops = [m for m in rest if isinstance(m, nn.Dropout)]
    if len(acts) != 1 or len(acts) + len(drops) != len(rest) or list(module.named_parameters(recurse=False)):
        return None
    first: list[Any]
    if len(layers) == 2:
        up, down = layers.values()
        first = [up, *acts]
    elif {"gate_proj", "up_proj", "down_proj"} == set(layers):
        down = layers["down_proj"]
        first = [Gated(layers["gate_proj"], layers["up_proj"], acts[0])]
    else:
        return None
    for items in ([*first, down, *drops], [*first, *drops, down]):
        if _agree(module, items):
            return items
        if not drops:
            break
    return None


class Gated(nn.Module):
    """An activated layer times another, on the same input. It owns nothing of the model it describes."""

    def __init__(self, gate: nn.Module, up: nn.Module, act: nn.Module) -> None:
        super().__init__()
        self.layers = (gate, up, act)

    def forward(self, x: Tensor) -> Tensor:
        first, second, act = self.layers
        return act(first(x)) * second(x)


def _gated(module: Any) -> list[Step]:
    first, second, act = module.layers
    return [side_by_side(first, second), gate(act, True)]


STEPS[f"{__name__}.Gated"] = _gated


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def _agree(module: nn.Module, items: list[Any]) -> bool:
    """Whether the program of `items` gives what the module gives, on a small input."""
    try:
        program = compile_branch(items)
    except Unsupported:
        return False
    return program.width is not None and program.width >= SMALLEST and _same(module, program)


def _same(module: nn.Module, program: Program) -> bool:
    parameter = next(module.parameters())
    if parameter.is_meta:
        return True  # nothing can be computed there, now or later
    x = _small_input(program.width or 0, parameter)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        own = module(x)
        torch.manual_seed(0)
        found = program.bind().plain(x)
    return own.shape == found.shape and torch.allclose(own.float(), found.float(), rtol=1e-2, atol=1e-3)


def _small_input(width: int, like: Tensor) -> Tensor:
    """Two samples of three positions."""
    values = torch.linspace(-1, 1, 6 * width, dtype=torch.float64).sin().view(2, 3, width)
    return values.to(like.device, like.dtype)


def declared_adapter(module: nn.Module, declared: Mapping[str, Any]) -> Adapter | None:
    """The adapter for a module that the user declared, by its class or itself, to be position-wise.

    Raises:
        ConfigError: if it is not.
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
    """Raise ConfigError unless the module is a function of each position alone, without state or chance."""
    name = type(module).__name__
    try:
        width = compile_branch([module]).width
    except Unsupported as why:
        raise ConfigError(f"{name} was declared to be position-wise, but cannot be reduced: {why}") from None
    parameter = next(module.parameters(), None)
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
            before, again, after = module(x), module(x), module(moved)
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
    """The steps of several modules in a row."""
    return [step for item in items for step in ([item] if isinstance(item, Step) else steps_of(item))]
