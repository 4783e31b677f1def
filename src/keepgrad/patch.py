"""apply, plan, exact, remove: the only file that touches a user's modules.

A patched block has an attribute `forward` of its own, a `_BlockForward`, which runs its branches in the engine while
training and the class's own forward otherwise. The model itself gets a `_RootForward`, which marks where a training
step begins and ends, and the layer that cuts images into patches an `_EmbedForward`, which notes how many there are
each way. Nothing else changes: no class, no module, no parameter, no buffer. All are plain picklable objects, and
copies of a model get copies of them.

Masks are drawn once a step and shared by all sites. The number they derive from is read off torch's CPU random
stream at the first site and the stream is put back, so dropout and drop path draw what they would draw without
keepgrad; when the step's forward ends the stream moves on by one number. So the masks are reproduced
by whatever reproduces torch's random state. Where sites run outside the model's own forward (`forward_features`, a
recomputed checkpoint), a site that comes a second time begins a new draw, of the random state and a count.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ._torch import has_hooks, tree_leaves
from .adapters import Block, Unsupported
from .adapters.items import Attention, path_of
from .adapters.position_wise import NotRows
from .adapters.program import Program
from .adapters.registry import PATCHES
from .config import KeepConfig
from .errors import AlreadyAppliedError, MapTooSmallError, NotAppliedError
from .ops.outside import Outside
from .ops.store import SHIFTS, dither
from .padding import real_positions, sample_padded
from .plan import Plan, Site, config_from, make_plan
from .sampling import Kept, Layout, hashed, sample, slot_count

__all__ = ["apply", "exact", "plan", "remove"]


def plan(model: nn.Module, config: KeepConfig | None = None, **options: Any) -> Plan:
    """What `apply` would do, without touching the model.

    Args:
        model: the model.
        config: a KeepConfig; or give its fields as keywords.
        **options: the fields of KeepConfig.

    Raises:
        ConfigError: if a setting is wrong, or does not fit the model.
        NoSiteError: if the model has no branch that keepgrad can reduce.
    """
    return make_plan(model, config_from(config, options))[0]


def apply(model: nn.Module, config: KeepConfig | None = None, **options: Any) -> Plan:
    """Train `model` with kept gradients from now on, in place; the plan that is in force.

    Takes the arguments of `plan` and raises its errors; besides them, AlreadyAppliedError if the model is patched.
    After an error the model is as it was.
    """
    if next(_patches(model), None) is not None:
        raise AlreadyAppliedError(
            f"this {type(model).__name__} is already patched; call keepgrad.remove(model) before applying anew"
        )
    config = config_from(config, options)
    result, entries = make_plan(model, config)
    shared = _Shared(config.seed, result.packs_the_rest)
    for block, sites in entries:
        block.module.forward = _BlockForward(block, sites, shared)
        shared.waiting[block.name] = None
        if block.embed is not None:
            embed = model.get_submodule(block.embed)
            if not isinstance(vars(embed).get("forward"), _EmbedForward):
                embed.forward = _EmbedForward(embed, shared, block.embed)
    model.forward = _RootForward(model, shared)
    return result


def remove(model: nn.Module) -> None:
    """Take keepgrad off the model, which is then as it was before `apply`.

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
    """Full backprop with the model's own code, as long as the context lasts.

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


def block_names(model: nn.Module) -> list[str]:
    """The names of the blocks that are patched; none if the model is plain."""
    patched = {id(module) for module, patch in _patches(model) if isinstance(patch, _BlockForward)}
    return [name for name, module in model.named_modules() if id(module) in patched]


@contextmanager
def draws_set_aside(model: nn.Module, seed: int | None = None) -> Iterator[None]:
    """Masks drawn in this context, from `seed` if given, leave no trace in the model. Does nothing to a plain one."""
    shared = {id(patch.shared): patch.shared for _, patch in _patches(model)}.values()
    before = [dict(vars(state)) for state in shared]
    for state in shared:
        state.draw = None
        if seed is not None or state.counter is not None:
            state.counter = torch.tensor(seed or 0)
    try:
        yield
    finally:
        for state, fields in zip(shared, before, strict=True):
            vars(state).update(fields)


def masks_drawn(model: nn.Module) -> dict[Layout, Tensor]:
    """The positions that the last step kept, for each size of feature map; the prefix is left out."""
    patch = vars(model).get("forward")
    draw = patch.shared.draw if isinstance(patch, _Patch) else None
    found = {} if draw is None else {key[1]: kept for key, kept in draw.kept.items() if kept is not None}
    return {layout: kept.picked[layout.prefix :] - layout.prefix for layout, kept in found.items()}


class _Patch:
    """A `forward` that keepgrad put on a module. `previous` is one that was there before, if not the class's own."""

    is_of_keepgrad = True
    is_aside = False
    """True while the engine itself runs the module."""

    def __init__(self, module: nn.Module, shared: _Shared) -> None:
        self.module = module
        self.shared = shared
        self.previous: Callable[..., Any] | None = vars(module).get("forward")

    def own(self, *args: Any, **kwargs: Any) -> Any:
        if self.previous is not None:
            return self.previous(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the forward in whose place it is: transformers reads which arguments a model takes."""
        return inspect.signature(self.previous or MethodType(type(self.module).forward, self.module))


def _patches(model: nn.Module) -> Iterator[tuple[nn.Module, _Patch]]:
    for module in model.modules():
        patch = vars(module).get("forward")
        if isinstance(patch, _Patch):
            yield module, patch


class _Draw:
    """The masks of one step: the number they derive from, and those drawn so far."""

    def __init__(self, step_seed: Tensor) -> None:
        self.step_seed = step_seed
        self.kept: dict[tuple[Any, ...], Kept | None] = {}
        self.real: dict[int, tuple[Tensor, Tensor]] = {}  # masks of scores, and which positions are not padding
        self.heads: dict[tuple[int, int], Tensor] = {}
        self.noise: dict[torch.device, Tensor] = {}
        self.seen: set[tuple[str, str]] = set()


class _Shared:
    """What the patches of one model share: the draw of the current step, and whether `exact` is on."""

    def __init__(self, seed: int | None, packs_the_rest: bool) -> None:
        self.packs_the_rest = packs_the_rest
        self.exact = False
        self.draw: _Draw | None = None
        self.in_root = False
        self.redraws = 0
        self.grids: dict[str, tuple[int, ...]] = {}  # the shapes of the patches, by the layer that makes them
        self.waiting: dict[str, None] = {}  # the blocks that have not run in training yet
        # A tensor, so that torch.compile does not take its value for a constant.
        self.counter = None if seed is None else torch.tensor(seed)

    def begin(self) -> None:
        self.draw = None
        self.in_root = True
        self.redraws = 0
        self.grids = {}

    def end(self, is_step: bool) -> None:
        self.in_root = False
        if torch.compiler.is_compiling():
            return
        if self.draw is not None and self.counter is None:
            torch.randint(2, ())
        if self.waiting and is_step:
            names, self.waiting = list(self.waiting), {}
            warnings.warn(
                f"keepgrad: {len(names)} patched blocks did not run in this training step (e.g. {names[0]}): "
                "the model does not use them, or calls their parts by itself, so nothing is saved there",
                stacklevel=3,
            )

    def draw_for(self, site: Site, device: torch.device) -> _Draw:
        """The draw of the current step; a new one where the site has already been part of it."""
        key = (site.name, site.kind)
        draw = self.draw
        if draw is None or key in draw.seen:
            draw = self._new_draw(device)
        draw.seen.add(key)
        return draw

    def _new_draw(self, device: torch.device) -> _Draw:
        again = self.draw is not None or not self.in_root
        self.draw = _Draw(self._step_seed(device, again))
        return self.draw

    def _step_seed(self, device: torch.device, again: bool) -> Tensor:
        if self.counter is not None:
            seed = self.counter.clone()
            self.counter.add_(1)
            return seed.to(device)
        if torch.compiler.is_compiling():
            return torch.randint(2**62, (), device=device)
        state = torch.get_rng_state()
        seed = torch.randint(2**62, ())
        torch.set_rng_state(state)
        if again:
            self.redraws += 1
            seed = seed + self.redraws
        return seed.to(device)

    def kept(self, draw: _Draw, site: Site, batch: int, layout: Layout, mask: Tensor | None = None) -> Kept | None:
        """The slots of a site. `mask` is that of the attention scores, where it may tell what is padding."""
        if mask is not None:
            return self._kept_of_padded(draw, site, batch, layout, mask)
        key = (batch, layout, site.keep_ratio, site.mask, site.reduce)
        if key not in draw.kept:
            try:
                draw.kept[key] = sample(draw.step_seed, batch, layout, site.keep_ratio, site.mask, site.reduce)
            except MapTooSmallError as error:
                raise MapTooSmallError(f"{site.name} ({site.kind}): {error}") from None
        return draw.kept[key]

    def _kept_of_padded(self, draw: _Draw, site: Site, batch: int, layout: Layout, mask: Tensor) -> Kept | None:
        """The slots of sequences with padding; those of layers that are given the same mask are the same."""
        if id(mask) not in draw.real:
            draw.real[id(mask)] = (mask, real_positions(mask).expand(batch, -1))  # held, so that no other has its id
        key = (batch, layout, site.keep_ratio, site.mask, site.reduce, id(mask))
        if key not in draw.kept:
            real = draw.real[id(mask)][1]
            draw.kept[key] = sample_padded(draw.step_seed, real, site.keep_ratio, site.mask, site.reduce)
        return draw.kept[key]

    def heads(self, draw: _Draw, site: Site, heads: int) -> Tensor:
        """The kept heads of a site, a random subset."""
        key = (heads, slot_count(heads, site.keep_ratio))
        if key not in draw.heads:
            draw.heads[key] = hashed(draw.step_seed, 3, heads).argsort()[: key[1]]
        return draw.heads[key]

    def noise(self, device: torch.device, draw: _Draw | None = None) -> Tensor:
        """The random numbers to round with in this step."""
        draw = draw or self.draw or self._new_draw(device)
        if device not in draw.noise:
            draw.noise[device] = dither(draw.step_seed.to(device))
        return draw.noise[device]


class _RootForward(_Patch):
    """Marks the beginning and the end of a step."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.shared.begin()
        is_step = self.module.training and torch.is_grad_enabled() and not self.shared.exact
        finished = False
        try:
            with self._rest(args, kwargs) if is_step else nullcontext():
                out = self.own(*args, **kwargs)
            finished = True
            return out
        finally:
            self.shared.end(is_step and finished)

    def _rest(self, args: Any, kwargs: Any) -> AbstractContextManager:
        """Packs what is saved outside of sites. torch.compile saves there what it saves anyway."""
        if not self.shared.packs_the_rest or torch.compiler.is_compiling():
            return nullcontext()
        given = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        return Outside(self.module.parameters(), [*self.module.buffers(), *given], self.shared.noise)


class _EmbedForward(_Patch):
    """Notes how many patches there are each way, for the blocks after it."""

    def __init__(self, module: nn.Module, shared: _Shared, name: str) -> None:
        super().__init__(module, shared)
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        maps = self.own(*args, **kwargs)
        read = PATCHES.get(path_of(self.module))
        self.shared.grids[self.name] = tuple(maps.shape[2:]) if read is None else read(self.module, maps)
        return maps


class _BlockForward(_Patch):
    """The forward of a block whose branches are sites."""

    def __init__(self, block: Block, sites: list[Site], shared: _Shared) -> None:
        super().__init__(block.module, shared)
        self.block = block
        self.sites = {site.kind: site for site in sites}
        self.programs = {kind: block.programs[kind] for kind in self.sites}
        self.watch: _Watch | None = _Watch(block.module)
        # torch.compile cannot trace a module that is called as itself inside of its own patch.
        self.stays_plain_compiled = any(
            isinstance(program, Program) and program.is_one_opaque_stage for program in self.programs.values()
        )

    def __getstate__(self) -> dict[str, Any]:
        # Programs hold functions; a copy builds its own.
        return {**vars(self), "programs": {}, "watch": None}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.shared.exact or self.is_aside or not self.module.training or not torch.is_grad_enabled():
            return self.own(*args, **kwargs)
        if torch.compiler.is_compiling():
            if self.stays_plain_compiled:
                return self.own(*args, **kwargs)
        elif self.shared.waiting:
            self.shared.waiting.pop(self.block.name, None)
        programs = self._programs()
        if all(isinstance(program, Unsupported) for program in programs.values()):
            return self.own(*args, **kwargs)
        try:
            return self.block.adapter.forward(self.module, partial(self._run, programs), *args, **kwargs)
        except NotRows:
            return self.own(*args, **kwargs)

    def _programs(self) -> dict[str, Program | Unsupported]:
        """The programs of the sites, built anew if the block has changed since they were built."""
        if torch.compiler.is_compiling():
            return {kind: self._compile(kind) for kind in self.sites}
        if self.watch is None or not self.watch.holds():
            self.programs = {kind: self._compile(kind) for kind in self.sites}
            self.watch = _Watch(self.module)
        return self.programs

    def _compile(self, kind: str) -> Program | Unsupported:
        try:
            return self.block.compile(kind)
        except Unsupported as why:
            if not torch.compiler.is_compiling():
                text = f"keepgrad: {self.block.name} ({kind}) now runs with full backprop: {why}"
                warnings.warn(text, stacklevel=5)
            return why

    def _run(
        self,
        programs: dict[str, Program | Unsupported],
        kind: str,
        x: Tensor,
        residual: Tensor | None = None,
        shape: tuple[int, ...] | None = None,
        **options: Any,
    ) -> Tensor:
        site = self.sites.get(kind)
        program = programs.get(kind)
        if site is None or not isinstance(program, Program):
            return self._call(kind, x, residual, options)
        branch = program.bind(**options)
        kept = heads = noise = None
        packs = site.store == "int8"
        if site.keep_ratio < 1 or packs:
            draw = self.shared.draw_for(site, x.device)
        if packs:
            noise = self.shared.noise(x.device, draw)[site.index * 67 % SHIFTS :]
        if site.keep_ratio < 1:
            if branch.attention is not None and site.method == "head":
                heads = self.shared.heads(draw, site, branch.attention.core.heads)
            else:
                layout = self._layout(x.shape[1], shape or program.layout, site.cell)
                try:
                    kept = self.shared.kept(draw, site, x.shape[0], layout, self._padded(x, options))
                except MapTooSmallError:
                    if site.tier == 1:
                        raise
                    raise NotRows from None
        return branch.run(x, kept, site.save, residual, site.method, heads, noise)

    def _call(self, kind: str, x: Tensor, residual: Tensor | None, options: dict[str, Any]) -> Tensor:
        """The branch by its own modules, one after the other."""
        for item in self.block.adapter.branches(self.module)[kind]:
            x = item(x, **options) if isinstance(item, Attention) else item(x)
        return x if residual is None else residual + x

    def _padded(self, x: Tensor, options: dict[str, Any]) -> Tensor | None:
        """The mask of the scores, if this is text and the mask may say that some of it is padding."""
        mask = options.get("attn_mask")
        if mask is None or not self.block.is_text or mask.dim() != 4 or torch.compiler.is_compiling():
            return None
        return mask if mask.shape[0] in (1, x.shape[0]) and mask.shape[-1] == x.shape[1] else None

    def _layout(self, count: int, shape: tuple[int, ...] | None, cell: int) -> Layout:
        """How `count` positions lie: as `shape` says, or as the patches of the images."""
        if shape is not None and math.prod(shape) == count:
            return Layout(tuple(shape), 0, cell)
        if self.block.is_text:
            return Layout((count,))
        grid, prefix = self.shared.grids.get(self.block.embed or ""), self.block.prefix
        if grid is not None and math.prod(grid) == count:
            return Layout(grid)  # the model adds its class token in a later block (CaiT)
        if prefix is None:
            prefix = -1 if grid is None else count - math.prod(grid)
            if not 0 <= prefix <= MOST_PREFIX:
                return Layout((count,))
        if grid is None or math.prod(grid) != count - prefix:
            grid = _like(grid, count - prefix) or (count - prefix,)
        return Layout(grid, prefix)


MOST_PREFIX = 16
"""More tokens than this before those of the image are something else."""


def _like(grid: tuple[int, ...] | None, count: int) -> tuple[int, ...] | None:
    """Height and width of `count` patches with the aspect of `grid` (patches were left out), a square if that is not
    known; None if there are none."""
    if grid is not None and len(grid) == 1:
        return None
    height, width = (1, 1) if grid is None or len(grid) != 2 else grid
    scale = (count / (height * width)) ** 0.5
    tall, wide = round(height * scale), round(width * scale)
    return (tall, wide) if tall * wide == count else None


class _Watch:
    """All that the programs of a block were built from, besides the tensors; `holds` says whether it is as it was.

    This runs for every block in every step, so it reads the modules' dictionaries directly.
    """

    def __init__(self, block: nn.Module) -> None:
        self.seen = [
            (module, type(module), own, tuple(own["_modules"].values()), _has_forward(module, block), *_facts(own))
            for module in block.modules()
            for own in [module.__dict__]
        ]
        self.hooked = [has_hooks(module) for module, *_ in self.seen]
        self.block = block

    def holds(self) -> bool:
        for number, (module, kind, own, children, has_forward, training, p, drop_prob, absent) in enumerate(self.seen):
            if type(module) is not kind or own["training"] is not training:
                return False
            modules, parameters = own["_modules"], own["_parameters"]
            if (modules or children) and tuple(modules.values()) != children:
                return False
            if "forward" in own and not has_forward and module is not self.block:
                return False
            if has_forward and "forward" not in own:
                return False
            if own.get("p") != p or own.get("drop_prob") != drop_prob:
                return False
            if (parameters or absent) and [value is None for value in parameters.values()] != absent:
                return False
            some = own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"]
            if (some or own["_backward_pre_hooks"] or self.hooked[number]) and has_hooks(module) != self.hooked[number]:
                return False
        return True


def _has_forward(module: nn.Module, block: nn.Module) -> bool:
    return "forward" in module.__dict__ and module is not block


def _facts(own: dict[str, Any]) -> tuple[Any, ...]:
    """What of a module a program depends on, besides its children, hooks and forward."""
    return own["training"], own.get("p"), own.get("drop_prob"), [v is None for v in own["_parameters"].values()]
