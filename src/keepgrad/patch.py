"""apply, plan, exact, remove: the only file that touches a user's modules.

Patching a module means setting its instance attribute `forward`:

| module             | forward         | what it does                                                                 |
| ---                | ---             | ---                                                                          |
| a block            | `_BlockForward` | in training, runs the branches in the engine; else runs the original forward |
| the model          | `_RootForward`  | marks where a training step begins and ends                                  |
| the patch embedder | `_EmbedForward` | notes how many patches it cuts images into in each direction                 |

Nothing else changes: no class, no module, no parameter, no buffer. All three are plain picklable objects, and a copy of
a model gets copies of them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ._torch import has_compiled_parts, tensors_of, tree_leaves, watcher
from .adapters import Block, Unsupported
from .adapters.items import Attention, path_of
from .adapters.position_wise import NotRows
from .adapters.program import Program
from .adapters.registry import PATCHES
from .adapters.watch import Watch
from .config import KeepConfig
from .draw import Shared
from .errors import (
    AlreadyAppliedError,
    ConfigError,
    InputError,
    KeepgradError,
    MapTooSmallError,
    NotAppliedError,
    UnsupportedByTorchError,
)
from .ops.outside import Outside
from .ops.store import SHIFTS
from .plan import Plan, Site, check_model, config_from, make_plan
from .sampling import Layout

__all__ = ["apply", "exact", "plan", "remove", "set_step"]


def plan(model: nn.Module, config: KeepConfig | None = None, **options: Any) -> Plan:
    """Return the plan that `apply` would follow, without changing the model.

    Args:
        model: the model.
        config: a KeepConfig; or give its fields as keywords.
        **options: the fields of KeepConfig.

    Raises:
        ConfigError: if a setting is wrong, or does not fit the model.
        NoSiteError: if the model has no branch that keepgrad can reduce.
        InputError: if `model` is not an `nn.Module`.
    """
    return make_plan(model, config_from(config, options))[0]


def apply(model: nn.Module, config: KeepConfig | None = None, **options: Any) -> Plan:
    """Patch `model` in place, so that it trains with kept gradients from now on. Returns the plan that it follows.

    Takes the arguments of `plan` and raises the same errors, and AlreadyAppliedError if the model is already patched.
    After an error the model is unchanged.
    """
    if next(_patches(model), None) is not None:
        raise AlreadyAppliedError(
            f"this {type(model).__name__} is already patched; call keepgrad.remove(model) before applying anew"
        )
    if isinstance(model, nn.DataParallel):
        raise ConfigError(
            "nn.DataParallel copies a model in every step, and the copies would run the patches of the first; "
            "use DistributedDataParallel, and give keepgrad.apply the model inside of it"
        )
    config = config_from(config, options)
    result, entries = make_plan(model, config)
    shared = Shared(config.seed, result.packs_the_rest)
    for block, sites in entries:
        block.module.forward = _BlockForward(block, sites, shared)
        shared.waiting[block.name] = None
        if block.embed is not None:
            embed = model.get_submodule(block.embed)
            if not isinstance(vars(embed).get("forward"), _EmbedForward):
                embed.forward = _EmbedForward(embed, shared, block.embed, model)
    model.forward = _RootForward(model, shared)
    return result


def remove(model: nn.Module) -> None:
    """Undo `apply`: the model is then as it was before.

    Raises:
        NotAppliedError: if the model is not patched.
    """
    patches = list(_patches(model))
    if not patches:
        raise NotAppliedError(f"this {type(model).__name__} is not patched; there is nothing to remove")
    for module, patch in patches:
        previous: Any = patch
        while isinstance(previous, _Patch):
            previous = previous.previous
        if previous is None:
            del module.forward
        else:
            module.forward = previous


@contextmanager
def exact(model: nn.Module) -> Iterator[None]:
    """Inside this context, the model runs its own code with full backprop.

    Raises:
        NotAppliedError: if the model is not patched.
    """
    shared = {id(patch.shared): patch.shared for _, patch in _patches(model)}
    if not shared:
        raise NotAppliedError(f"this {type(model).__name__} is not patched; its gradients are exact already")
    before = {key: state.exact for key, state in shared.items()}
    for state in shared.values():
        state.exact = True
    try:
        yield
    finally:
        for key, state in shared.items():
            state.exact = before[key]


def set_step(model: nn.Module, step: int) -> None:
    """Say which training step comes next. If the model has a `seed`, its masks then depend on the seed and this number.

    Call it before every step, and a run that is resumed at some step draws the same masks as a run that was never
    interrupted. Without a `seed`, masks follow torch's random state, and this does nothing.

    Raises:
        NotAppliedError: if the model is not patched.
        InputError: if the step is not a whole number, at least 0.
    """
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise InputError(f"step={step!r}: give a whole number, at least 0")
    shared = {id(patch.shared): patch.shared for _, patch in _patches(model)}
    if not shared:
        raise NotAppliedError(f"this {type(model).__name__} is not patched, so there are no masks to set")
    for state in shared.values():
        state.set_step(step)


def block_names(model: nn.Module) -> list[str]:
    """The names of the patched blocks; an empty list if the model is not patched."""
    patched = {id(module) for module, patch in _patches(model) if isinstance(patch, _BlockForward)}
    return [name for name, module in model.named_modules() if id(module) in patched]


@contextmanager
def draws_set_aside(model: nn.Module, seed: int | None = None) -> Iterator[None]:
    """Masks that are drawn in this context do not change those that the model draws later.

    With `seed`, the masks in the context are drawn from it. On a model that is not patched, this does nothing.
    """
    shared = {id(patch.shared): patch.shared for _, patch in _patches(model)}.values()
    before = [dict(vars(state)) for state in shared]
    for state in shared:
        state.draw, state.tables = None, {}
        if seed is not None or state.counter is not None:
            state.counter = torch.tensor(seed or 0)
    try:
        yield
    finally:
        for state, fields in zip(shared, before, strict=True):
            vars(state).update(fields)


def masks_drawn(model: nn.Module) -> dict[Layout, Tensor]:
    """The positions that the last step kept, by the layout of the feature map. Prefix tokens are left out."""
    patch = vars(model).get("forward")
    draw = patch.shared.draw if isinstance(patch, _Patch) else None
    found = {} if draw is None else {key[1]: kept for key, kept in draw.kept.items() if kept is not None}
    return {layout: kept.picked[layout.prefix :] - layout.prefix for layout, kept in found.items()}


class _Patch:
    """A `forward` that keepgrad put on a module.

    `previous` is the instance's own `forward` from before, which another library may have set; None if it had none.
    """

    is_of_keepgrad = True
    is_aside = False
    """True while the engine itself runs the module."""

    def __init__(self, module: nn.Module, shared: Shared) -> None:
        self.module = module
        self.shared = shared
        self.previous: Callable[..., Any] | None = vars(module).get("forward")
        self.__doc__, self.__module__ = self.__wrapped__.__doc__, self.__wrapped__.__module__

    def own(self, *args: Any, **kwargs: Any) -> Any:
        if self.previous is not None:
            return self.previous(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The forward that this replaces. `inspect` follows it, so a patch has the signature of the original."""
        return self.previous or MethodType(type(self.module).forward, self.module)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in LIKE_A_FUNCTION:
                return getattr(self.__wrapped__, name)
            if name == "__globals__":
                raise UnsupportedByTorchError(
                    "torch.jit.script reads the source of a model's own forward, and would leave keepgrad out; call "
                    "keepgrad.remove(model) before it, or use torch.export or torch.jit.trace in evaluation mode"
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


LIKE_A_FUNCTION = frozenset(
    ("__name__", "__qualname__", "__annotations__", "__code__", "__defaults__", "__kwdefaults__", "__closure__")
)
"""Attributes that a patch takes from the forward it replaces: `inspect` and torch.export know a function by them.

`__func__` is not among them: code that finds it calls it directly, and so would bypass keepgrad (accelerate does).
`__globals__` is not either: torch.jit.script asks for it first, and so gets an error that says what to do.
"""


def _patches(model: nn.Module) -> Iterator[tuple[nn.Module, _Patch]]:
    check_model(model)
    for module in model.modules():
        patch = vars(module).get("forward")
        if isinstance(patch, _Patch):
            yield module, patch


def explain(error: Exception, args: Any, kwargs: Any) -> None:
    """Raise an error that says what to do, if a training forward failed because a torch tool cannot see through it."""
    what = None if isinstance(error, (KeepgradError, Warning)) else watcher((args, kwargs))
    if what is not None:
        raise _cannot_see_through(what) from error


def _cannot_see_through(what: str) -> UnsupportedByTorchError:
    return UnsupportedByTorchError(
        f"{what} cannot see through a patched model in training; use it inside `with keepgrad.exact(model):`, which "
        "runs the model's own code, or in evaluation mode"
    )


class _RootForward(_Patch):
    """Marks the beginning and the end of a step."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.shared.exact or not self.module.training or not torch.is_grad_enabled():
            return self.own(*args, **kwargs)
        self.shared.begin()
        out, finished = None, False
        self._begin_parts(args, kwargs)
        try:
            with self._rest(args, kwargs):
                out = self.own(*args, **kwargs)
            finished = True
            return out
        except Exception as error:
            explain(error, args, kwargs)
            if isinstance(error, RuntimeError):
                self._check_devices(args, kwargs)
            raise
        finally:
            self.shared.end(finished, out)

    def _begin_parts(self, args: Any, kwargs: Any) -> None:
        self.shared.part_seed = None
        if not torch.compiler.is_compiling() and has_compiled_parts(self.module):
            given = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
            x = next(given, None)
            if x is not None:
                self.shared.begin_parts(x)

    def _check_devices(self, args: Any, kwargs: Any) -> None:
        """Raise an error that says why, if the input is on another device than the model.

        nn.DataParallel causes this: its copies of a model share the patch, which runs the original model.
        """
        own = {str(tensor.device) for tensor in self.module.parameters()}
        given = {str(leaf.device) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        if own and not given <= own:
            raise UnsupportedByTorchError(
                f"the model is on {', '.join(sorted(own))} and its input on {', '.join(sorted(given))}; put both on "
                "one device. If this is nn.DataParallel: it does not go with keepgrad, use DistributedDataParallel"
            )

    def _rest(self, args: Any, kwargs: Any) -> AbstractContextManager:
        """Pack what is saved outside of sites. Does nothing if torch.compile decides what is saved."""
        if not self.shared.packs_the_rest or torch.compiler.is_compiling() or has_compiled_parts(self.module):
            return nullcontext()
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        parameters, buffers = tensors_of(self.module)
        return Outside(parameters, buffers + given, self.shared.noise)


class _EmbedForward(_Patch):
    """Notes how many patches there are in each direction (e.g. 14 x 14), for the blocks after it."""

    def __init__(self, module: nn.Module, shared: Shared, name: str, model: nn.Module) -> None:
        super().__init__(module, shared)
        self.name, self.model = name, model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        maps = self.own(*args, **kwargs)
        if not self.model.training:
            return maps
        read = PATCHES.get(path_of(self.module))
        self.shared.grids[self.name] = tuple(maps.shape[2:]) if read is None else read(self.module, maps)
        return maps


class _BlockForward(_Patch):
    """The forward of a block whose branches are sites."""

    def __init__(self, block: Block, sites: list[Site], shared: Shared) -> None:
        super().__init__(block.module, shared)
        self.block = block
        self.sites = {site.kind: site for site in sites}
        self.run: _Run | None = _Run(self, {kind: block.programs[kind] for kind in self.sites})
        self.watch: Watch | None = Watch(block.module)
        # torch.compile cannot trace a patch that calls the patched module itself.
        self.stays_plain_compiled = any(
            isinstance(program, Program) and program.is_one_opaque_stage for program in block.programs.values()
        )

    def __getstate__(self) -> dict[str, Any]:
        # Programs hold functions, which cannot be pickled; a copy builds its own.
        return {**vars(self), "run": None, "watch": None}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        shared = self.shared
        if shared.exact or self.is_aside or not self.module.training or not torch.is_grad_enabled():
            return self.own(*args, **kwargs)
        if torch.compiler.is_compiling():
            if self.stays_plain_compiled:
                return self.own(*args, **kwargs)
            run = self._new_run()
        else:
            if shared.waiting:
                shared.waiting.pop(self.block.name, None)
            if self.run is None or self.watch is None or not self.watch.holds():
                self.run, self.watch = self._new_run(), Watch(self.module)
            run = self.run
        if not run.programs:
            return self.own(*args, **kwargs)
        try:
            return self.block.adapter.forward(self.module, run, *args, **kwargs)
        except NotRows:
            return self.own(*args, **kwargs)
        except Exception as error:
            explain(error, args, kwargs)
            raise

    def _new_run(self) -> _Run:
        """Compile the branches again, from the block as it is now."""
        return _Run(self, {kind: self._compile(kind) for kind in self.sites})

    def _compile(self, kind: str) -> Program | Unsupported:
        try:
            return self.block.compile(kind)
        except torch.fx.proxy.TraceError as error:  # torch.fx replaces weights by proxies
            raise _cannot_see_through("torch.fx") from error
        except Unsupported as why:
            if not torch.compiler.is_compiling():
                text = f"keepgrad: {self.block.name} ({kind}) now runs with full backprop: {why}"
                warnings.warn(text, stacklevel=5)
            return why


class _Run:
    """Runs the branches of a block: those that have a program in the engine, the others module by module."""

    def __init__(self, patch: _BlockForward, programs: Mapping[str, Program | Unsupported]) -> None:
        self.block, self.sites, self.shared = patch.block, patch.sites, patch.shared
        self.kinds = patch.block.kinds
        self.programs = {kind: program for kind, program in programs.items() if isinstance(program, Program)}
        self.layouts: dict[Any, Layout] = {}

    def __call__(
        self,
        kind: str,
        x: Tensor,
        residual: Tensor | None = None,
        shape: tuple[int, ...] | None = None,
        **options: Any,
    ) -> Tensor:
        program = self.programs.get(kind)
        if program is None:
            return self._call(kind, x, residual, options)
        site = self.sites[kind]
        branch = program.bind(**options)
        kept = heads = noise = None
        packs, reduced = site.store == "int8", site.keep_ratio < 1
        if reduced or packs:
            draw = self.shared.draw_for(site, x)
        if packs:
            # Each block takes the noise from another offset. Blocks that are compiled by themselves all take offset 0:
            # with different numbers, torch.compile would compile each block anew.
            noise = self.shared.noise(x, draw)[0 if draw.is_of_part else site.index * 67 % SHIFTS :]
        if reduced and site.method == "head" and branch.attention is not None:
            heads = self.shared.heads(draw, site, branch.attention.core.heads, x.device)
        elif reduced:
            layout = self._layout(x.shape[1], shape or program.layout, site.cell)
            try:
                kept = self.shared.kept(draw, site, x, layout, self._padded(x, options))
            except MapTooSmallError:
                if site.tier == 1:
                    raise
                raise NotRows from None
        return branch.run(x, kept, site.save, residual, site.method, heads, noise)

    def _call(self, kind: str, x: Tensor, residual: Tensor | None, options: dict[str, Any]) -> Tensor:
        """Run the branch with plain autograd: its modules, one after the other."""
        for item in self.block.adapter.branches(self.block.module)[kind]:
            x = item(x, **options) if isinstance(item, Attention) else item(x)
        return x if residual is None else residual + x

    def _padded(self, x: Tensor, options: dict[str, Any]) -> Tensor | None:
        """The attention mask, if the block is of text and the mask may mark padding; else None."""
        mask = options.get("attn_mask")
        if mask is None or not self.block.is_text or mask.dim() != 4 or torch.compiler.is_compiling():
            return None
        return mask if mask.shape[0] in (1, x.shape[0]) and mask.shape[-1] == x.shape[1] else None

    def _layout(self, count: int, shape: tuple[int, ...] | None, cell: int) -> Layout:
        """The layout of `count` positions: from `shape` if given, else from the number of image patches."""
        grid = self.shared.grids.get(self.block.embed or "")
        key = (count, shape, cell, grid)
        layout = self.layouts.get(key)
        if layout is None:
            layout = self.layouts[key] = _layout_of(self.block, *key)
        return layout


def _layout_of(
    block: Block, count: int, shape: tuple[int, ...] | None, cell: int, grid: tuple[int, ...] | None
) -> Layout:
    if shape is not None and 0 <= count - math.prod(shape) <= MOST_PREFIX:
        return Layout(tuple(shape), count - math.prod(shape), cell)
    if block.is_text:
        return Layout((count,))
    if grid is not None and math.prod(grid) == count:
        return Layout(grid)  # the model adds its class token in a later block (CaiT)
    prefix = block.prefix
    if prefix is None:
        prefix = -1 if grid is None else count - math.prod(grid)
        if not 0 <= prefix <= MOST_PREFIX:
            return Layout((count,))
    if grid is None or math.prod(grid) != count - prefix:
        grid = _like(grid, count - prefix) or (count - prefix,)
    return Layout(grid, prefix)


MOST_PREFIX = 16
"""The most prefix tokens (class, registers) there can be. If there are more, they are something else."""


def _like(grid: tuple[int, ...] | None, count: int) -> tuple[int, ...] | None:
    """Height and width of a map of `count` patches, when fewer patches arrive than `grid` has (some were left out).

    The map has the aspect ratio of `grid`, or is a square if `grid` is None. Returns None if no such map has exactly
    `count` patches, or if `grid` is of a clip.
    """
    if grid is not None and len(grid) != 2:
        return None
    height, width = (1, 1) if grid is None else grid
    scale = (count / (height * width)) ** 0.5
    tall, wide = round(height * scale), round(width * scale)
    return (tall, wide) if tall * wide == count else None
