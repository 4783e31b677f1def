"""Site and Plan: what keepgrad does to a model, decided before the model is touched."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from .adapters import Block, Unsupported, find_blocks
from .adapters.program import Program
from .config import KeepConfig, Settings, check_number
from .errors import ConfigError, InputError, NoSiteError
from .report import aligned
from .sampling import CLIP_MASKS
from .saving import saving
from .schedule import careful, choose, paper_layers, ratios

__all__ = ["Plan", "Site", "check_model", "config_from", "make_plan"]


@dataclass(frozen=True)
class Site:
    """One branch of one block.

    `tier` is 1 for a whole branch of a known block, 2 for an MLP inside of a block that is not known. `plain` is how
    many values for each position full backprop saves in this branch, `saved` how many keepgrad saves, with nothing
    frozen; a value that is stored in 8 bits counts as a quarter of one in float32.
    `cell` is the side of the squares of positions that are kept or dropped together, in a model of several resolutions.
    """

    name: str
    kind: str
    index: int
    tier: int
    keep_ratio: float
    mask: str
    reduce: str
    method: str
    save: str
    store: str
    cell: int
    plain: float
    saved: float


@dataclass(frozen=True)
class Plan:
    """All sites of a model with their settings. `print(plan)` shows it; `to_dict` and `to_json` are for machines.

    `text_preset` is that of the blocks whose positions are words, where it is another. `packs_the_rest` says that what
    the model saves outside of sites is stored in 8 bits too.
    """

    model: str
    preset: str | None
    sites: tuple[Site, ...]
    packs_the_rest: bool = False
    skipped: tuple[tuple[str, str], ...] = ()
    text_preset: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        head = f"keepgrad plan for {self.model}" + (f", preset {self.preset!r}" if self.preset else "")
        head += f", {self.text_preset!r} for text" if self.text_preset else ""
        rest = ["the rest of the model: nothing reduced, saved values stored in 8 bits"] if self.packs_the_rest else []
        if not self.sites:
            return "\n".join([f"keepgrad plan for {self.model}", *rest])
        rows = [("site", "branch", "tier", "keep", "mask", "reduce", "attention", "save", "store", "saved")]
        for site in self.sites:
            share = f"{site.saved / site.plain:.2f}x" if site.plain else "-"
            ratio = f"{site.keep_ratio:.4g}"
            what = (site.name, site.kind, str(site.tier))
            rows.append((*what, ratio, site.mask, site.reduce, site.method or "-", site.save, site.store, share))
        plain, saved = sum(s.plain for s in self.sites), sum(s.saved for s in self.sites)
        foot = f"{len(self.sites)} sites; saved in these branches: {saved / plain:.2f}x"
        left = [f"left alone: {name}: {reason}" for name, reason in self.skipped]
        return "\n".join([head, *aligned(rows), foot, *rest, *left])


def make_plan(model: nn.Module, config: KeepConfig) -> tuple[Plan, list[tuple[Block, list[Site]]]]:
    """The plan, and the blocks with their sites.

    Raises:
        NoSiteError: if the model has no branch that keepgrad can reduce.
        ConfigError: if a setting does not fit the model.
        InputError: if it is no model.
    """
    check_model(model)
    settings = config.settings()
    found = find_blocks(model, settings.modules)
    of_text = config.settings(text=True)
    if found and all(block.is_text for block in found):
        settings = of_text
    kinds = {kind for block in found for kind in block.kinds}
    _check_declared(settings, found, type(model).__name__)
    if not found and settings.reduces_nothing:
        return Plan(type(model).__name__, None, (), True), []
    if not found:
        raise NoSiteError(
            f"{type(model).__name__} has no block that keepgrad knows. "
            "`keepgrad models` lists those it knows; store='int8' alone, which reduces nothing, saves memory in any "
            "model. Declare a position-wise class of your own with "
            "modules={'mlp': MyMlp}, or a whole block with @keepgrad.adapts"
        )
    _check_used(settings, kinds, type(model).__name__)
    _check_method(settings, found, type(model).__name__)
    kinds -= {kind for kind, on in _switches(settings).items() if not on}
    if not kinds:
        raise ConfigError("attention='off' and mlp=False leave no branch to reduce; turn one of them on")

    chosen = _chosen(found, settings)
    _check_frames(settings, chosen, type(model).__name__)
    ratio_of = {
        False: _ratios(settings, kinds, found, chosen),
        True: _ratios(of_text, kinds, found, chosen),
    }
    coarsest = max(block.stride for block in chosen)
    entries: list[tuple[Block, list[Site]]] = []
    counted: dict[Any, tuple[float, float]] = {}
    skipped: list[tuple[str, str]] = []
    for block in chosen:
        sites = []
        for kind in block.kinds:
            if kind not in kinds:
                continue
            try:
                ratio, own = ratio_of[block.is_text][kind][block.index], of_text if block.is_text else settings
                sites.append(_site(block, kind, ratio, own, max(1, coarsest // block.stride), counted))
            except Unsupported as why:
                skipped.append((f"{block.name}.{kind}", str(why)))
        if sites:
            entries.append((block, sites))
    if not entries:
        name, reason = skipped[0]
        raise NoSiteError(f"no branch of {type(model).__name__} can be reduced. {name}: {reason}")
    sites = [site for _, group in entries for site in group]
    name, rest = type(model).__name__, settings.packs_the_rest
    other = any(block.is_text for block, _ in entries) and of_text.preset != settings.preset
    text_preset = of_text.preset if other else None
    return Plan(name, settings.preset, tuple(sites), rest, tuple(skipped), text_preset), entries


def _check_declared(settings: Settings, found: list[Block], model: str) -> None:
    """A declared class or module that the model does not have is an error."""
    for given in (settings.modules or {}).values():
        for one in given if isinstance(given, (list, tuple, set, nn.ModuleList)) else [given]:
            if not any(block.module is one or type(block.module) is one for block in found):
                name = getattr(one, "__name__", type(one).__name__)
                raise ConfigError(
                    f"modules names {name}, which is not in {model}, or is a part of a block that is known"
                )


def _switches(settings: Settings) -> dict[str, bool]:
    return {"attention": settings.attention != "off", "mlp": settings.mlp, "downsample": settings.downsample}


def _check_used(settings: Settings, kinds: set[str], model: str) -> None:
    """An option that this model cannot use is an error, if the user gave it."""
    asked = {
        "attention": "attention" in settings.given and settings.attention != "off",
        "downsample": "downsample" in settings.given and settings.downsample,
    }
    switches = _switches(settings)
    for option in ("keep_ratio", "save", "store"):
        value = getattr(settings, option)
        if option in settings.given and isinstance(value, Mapping):
            asked["attention"] |= "attention" in value
            off = [kind for kind in value if not switches[kind]]
            if off:
                raise ConfigError(f"{option} sets {off[0]!r}, which is switched off; leave one of the two out")
    for kind, is_asked in asked.items():
        if is_asked and kind not in kinds:
            raise ConfigError(f"{model} has no {kind} branch to set; leave that option out")


def _check_method(settings: Settings, found: list[Block], model: str) -> None:
    """A way to reduce attention is an error where only the projections before it are reduced."""
    programs = [p for block in found for kind, p in block.programs.items() if kind == "attention"]
    ready = [program for program in programs if isinstance(program, Program)]
    asked = "attention" in settings.given and settings.attention != "off"
    if asked and ready and not any(program.has_attention for program in ready):
        raise ConfigError(f"{model} has no attention to reduce by {settings.attention!r}; leave that option out")


def _check_frames(settings: Settings, chosen: list[Block], model: str) -> None:
    """A mask for clips is an error where there are none."""
    still = [block.name for block in chosen if not block.has_frames]
    if settings.mask in CLIP_MASKS and still:
        raise ConfigError(
            f"mask={settings.mask!r} keeps whole frames of clips, but {still[0] or 'the model'} of {model} has no "
            "frames; use mask='grid', or choose the blocks of a video model with layers=..."
        )


def _chosen(found: list[Block], settings: Settings) -> list[Block]:
    """The blocks that take part."""
    names = {block.index: block.name for block in reversed(found) if block.outer is None and not block.is_inner}
    if settings.layers == "paper":
        indices = {index for trunk in _trunks(found).values() for index in paper_layers(trunk)}
    else:
        indices = set(choose(settings.layers, [names[index] for index in sorted(names)]))
    return [block for block in found if block.index in indices]


def _trunks(found: list[Block]) -> dict[str, dict[int, int]]:
    """For each trunk of the model, the stage of each of its blocks by the block's index."""
    trunks: dict[str, dict[int, int]] = {}
    for block in found:
        if not block.is_inner:
            trunks.setdefault(block.trunk, {})[block.index] = block.stage
    return trunks


def _ratios(
    settings: Settings, kinds: set[str], found: list[Block], chosen: list[Block]
) -> dict[str, dict[int, float]]:
    """The keep-ratio of every kind of branch in every chosen block."""
    indices = sorted({block.index for block in chosen})
    place = {index: (trunk, index) for trunk in _trunks(found).values() for index in trunk}
    table = {}
    for kind in kinds:
        ratio = settings.ratio_of(kind)
        values = ratios(ratio, settings.schedule, len(indices))
        if settings.schedule == "careful" and isinstance(ratio, (int, float)):
            values = [careful(ratio, *place[index]) for index in indices]
        table[kind] = {index: check_number(value) for index, value in zip(indices, values, strict=True)}
    return table


def _site(
    block: Block, kind: str, ratio: float, settings: Settings, cell: int, counted: dict[Any, tuple[float, float]]
) -> Site:
    """A site. `counted` has what was found out about equal branches of the model."""
    program = block.programs[kind]
    if isinstance(program, Unsupported):
        raise program
    method, save, store = "", settings.save_of(kind), settings.store_of(kind)
    reduce = settings.reduce
    if program.has_attention:
        method = settings.attention
        if reduce == "scaled" or method == "head":
            # Attention is renormalised over what is kept, which leaves no scale to put right; heads have no neighbours.
            reduce = "drop"
    if program.layout is not None:
        cell = 1  # masks of windows do not nest with those of other stages
    like = (type(block.module), kind, program.layout, program.kinds, *(p.shape for p in block.module.parameters()))
    key = (like, ratio, reduce, method, save, store)
    if key not in counted:
        counted[key] = saving(program, ratio, reduce, method, save, store)
    plain, saved = counted[key]
    tier = block.adapter.tier
    how = (ratio, settings.mask, reduce, method, save, store)
    return Site(block.name, kind, block.index, tier, *how, cell, plain, saved)


def check_model(model: object) -> None:
    """Raise InputError for what is no model."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}; give a torch.nn.Module")


def config_from(config: KeepConfig | None, options: dict[str, Any]) -> KeepConfig:
    """A configuration from a KeepConfig or from keywords, not both."""
    if config is None:
        try:
            return KeepConfig(**options)
        except TypeError as error:
            known = ", ".join(KeepConfig.__dataclass_fields__)
            raise ConfigError(f"{error}; the options are {known}") from None
    if not isinstance(config, KeepConfig):
        raise ConfigError(f"config is a {type(config).__name__}; give a keepgrad.KeepConfig or keywords")
    if options:
        raise ConfigError(f"give either a KeepConfig or keywords ({', '.join(options)}), not both")
    return config
