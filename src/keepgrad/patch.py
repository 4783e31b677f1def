"""apply, plan, exact, remove: the only file that touches a user's modules.

A patched block has an attribute `forward` of its own, a `_BlockForward`, which runs its branches in the engine while
training and the class's own forward otherwise. The model itself gets a `_RootForward`, which marks where a training
step begins and ends. Nothing else changes: no class, no module, no parameter, no buffer. Both are plain picklable
objects, and copies of a model get copies of them.

Masks are drawn once a step and shared by all sites. The number they derive from is read off torch's CPU random
stream at the first site and the stream is put back, so dropout and drop path draw what they would draw without
keepgrad; when the step's forward ends the stream moves on by one number. So the masks are reproduced
by whatever reproduces torch's random state. Where sites run outside the model's own forward (`forward_features`, a
recomputed checkpoint), a site that comes a second time begins a new draw, of the random state and a count.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .adapters import Block, Unsupported
from .config import KeepConfig
from .errors import AlreadyAppliedError, MapTooSmallError, NotAppliedError
from .ops.branch import AttentionBranch
from .plan import Plan, Site, config_from, make_plan
from .sampling import Grid, Kept, hashed, sample, slot_count

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
    shared = _Shared(config.seed)
    for block, sites in entries:
        block.module.forward = _BlockForward(block, sites, shared)
        embed = block.patch_embed
        if embed is not None and not isinstance(vars(embed).get("forward"), _EmbedForward):
            embed.forward = _EmbedForward(embed, shared)
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


def masks_drawn(model: nn.Module) -> dict[Grid, Tensor]:
    """The positions that the last step kept, for each size of feature map; the prefix is left out."""
    patch = vars(model).get("forward")
    draw = patch.shared.draw if isinstance(patch, _Patch) else None
    found = {} if draw is None else {key[1]: kept for key, kept in draw.kept.items() if kept is not None}
    return {grid: kept.picked[grid.prefix :] - grid.prefix for grid, kept in found.items()}


class _Patch:
    """A `forward` that keepgrad put on a module. `previous` is one that was there before, if not the class's own."""

    def __init__(self, module: nn.Module, shared: _Shared) -> None:
        self.module = module
        self.shared = shared
        self.previous: Callable[..., Any] | None = vars(module).get("forward")

    def own(self, *args: Any, **kwargs: Any) -> Any:
        if self.previous is not None:
            return self.previous(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)


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
        self.heads: dict[tuple[int, int], Tensor] = {}
        self.seen: set[tuple[int, str]] = set()


class _Shared:
    """What the patches of one model share: the draw of the current step, and whether `exact` is on."""

    def __init__(self, seed: int | None) -> None:
        self.exact = False
        self.draw: _Draw | None = None
        self.in_root = False
        self.redraws = 0
        # A tensor, so that torch.compile does not take its value for a constant.
        self.counter = None if seed is None else torch.tensor(seed)

    def begin(self) -> None:
        self.draw = None
        self.in_root = True
        self.redraws = 0

    def end(self) -> None:
        self.in_root = False
        if self.draw is not None and self.counter is None and not torch.compiler.is_compiling():
            torch.randint(2, ())

    def draw_for(self, site: Site, device: torch.device) -> _Draw:
        """The draw of the current step; a new one where the site has already been part of it."""
        key = (site.index, site.kind)
        draw = self.draw
        if draw is None or key in draw.seen:
            draw = self.draw = _Draw(self._step_seed(device, again=draw is not None or not self.in_root))
        draw.seen.add(key)
        return draw

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

    def kept(self, site: Site, batch: int, grid: Grid, device: torch.device) -> Kept | None:
        """The slots of a site."""
        draw = self.draw_for(site, device)
        key = (batch, grid, site.keep_ratio, site.mask, site.reduce)
        if key not in draw.kept:
            try:
                draw.kept[key] = sample(draw.step_seed, batch, grid, site.keep_ratio, site.mask, site.reduce)
            except MapTooSmallError as error:
                raise MapTooSmallError(f"{site.name} ({site.kind}): {error}") from None
        return draw.kept[key]

    def heads(self, site: Site, heads: int, device: torch.device) -> Tensor:
        """The kept heads of a site, a random subset."""
        draw = self.draw_for(site, device)
        key = (heads, slot_count(heads, site.keep_ratio))
        if key not in draw.heads:
            draw.heads[key] = hashed(draw.step_seed, 3, heads).argsort()[: key[1]]
        return draw.heads[key]


class _RootForward(_Patch):
    """Marks the beginning and the end of a step."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.shared.begin()
        try:
            return self.own(*args, **kwargs)
        finally:
            self.shared.end()


class _EmbedForward(_Patch):
    """Notes the height and width of the patches, for the blocks behind it, where an embedding gives them as a map."""

    grid: tuple[int, int] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        patches = self.own(*args, **kwargs)
        self.grid = (patches.shape[1], patches.shape[2]) if patches.ndim == 4 else None
        return patches


class _BlockForward(_Patch):
    """The forward of a block whose branches are sites."""

    def __init__(self, block: Block, sites: list[Site], shared: _Shared) -> None:
        super().__init__(block.module, shared)
        self.block = block
        self.sites = {site.kind: site for site in sites}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.shared.exact or not self.module.training or not torch.is_grad_enabled():
            return self.own(*args, **kwargs)
        return self.block.adapter.forward(self.block, self._run, *args, **kwargs)

    def _run(
        self,
        kind: str,
        x: Tensor,
        grid: tuple[int, int],
        prefix: int,
        own: Callable[[Tensor], Tensor],
        residual: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        site = self.sites.get(kind)
        if site is None:
            return own(x)
        try:
            branch = self.block.adapter.branch(self.module, kind, **options)
        except Unsupported as why:
            # The block was changed after `apply` into something that has no site.
            if not torch.compiler.is_compiling():
                warnings.warn(f"keepgrad: {site.name} ({kind}) now runs with full backprop: {why}", stacklevel=2)
            return own(x)
        kept = heads = None
        if site.keep_ratio < 1:
            if isinstance(branch, AttentionBranch) and site.method == "head":
                heads = self.shared.heads(site, branch.heads, x.device)
            else:
                kept = self.shared.kept(site, x.shape[0], Grid(*grid, prefix, site.cell), x.device)
        if isinstance(branch, AttentionBranch):
            return branch.run(x, kept, site.save, residual, site.method, heads)
        return branch.run(x, kept, site.save, residual)
