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
    """One branch of one block, with its settings. `plain` and `saved` assume that no parameter is frozen.

    - `tier`: 1 for a whole branch of a known block, 2 for an MLP inside a block that keepgrad does not know.
    - `plain`: how many values per position full backprop saves in this branch.
    - `saved`: how many keepgrad saves. A value stored in 8 bits counts as a quarter of a float32 value.
    - `cell`: in a model with several resolutions, a square of `cell` x `cell` positions is kept or dropped as one.
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

    `text_preset` is the preset of blocks whose positions are words, if it differs from `preset`. `packs_the_rest` is
    True if what the model saves outside of sites is stored in 8 bits too. `skipped` has the branches that keepgrad
    leaves alone, each with the reason.
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
    """Make the plan; also returns each block with its sites.

    Raises:
        NoSiteError: if the model has no branch that keepgrad can reduce.
        ConfigError: if a setting does not fit the model.
        InputError: if `model` is not an `nn.Module`.
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
    """Raise ConfigError if `modules` names a class or module that the model does not have."""
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
    """Raise ConfigError if the user gave an option that this model cannot use."""
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
    """Raise ConfigError if the user set `attention`, but this model can only reduce the projections before it."""
    programs = [p for block in found for kind, p in block.programs.items() if kind == "attention"]
    ready = [program for program in programs if isinstance(program, Program)]
    asked = "attention" in settings.given and settings.attention != "off"
    if asked and ready and not any(program.has_attention for program in ready):
        raise ConfigError(f"{model} has no attention to reduce by {settings.attention!r}; leave that option out")


def _check_frames(settings: Settings, chosen: list[Block], model: str) -> None:
    """Raise ConfigError if a mask for clips is asked for, and a chosen block has no frames."""
    still = [block.name for block in chosen if not block.has_frames]
    if settings.mask in CLIP_MASKS and still:
        raise ConfigError(
            f"mask={settings.mask!r} keeps whole frames of clips, but {still[0] or 'the model'} of {model} has no "
            "frames; use mask='grid', or choose the blocks of a video model with layers=..."
        )


def _chosen(found: list[Block], settings: Settings) -> list[Block]:
    """The blocks that `layers` chooses."""
    names = {block.index: block.name for block in reversed(found) if block.outer is None and not block.is_inner}
    if settings.layers == "paper":
        indices = {index for trunk in _trunks(found).values() for index in paper_layers(trunk)}
    else:
        indices = set(choose(settings.layers, [names[index] for index in sorted(names)]))
    return [block for block in found if block.index in indices]


def _trunks(found: list[Block]) -> dict[str, dict[int, int]]:
    """For each trunk of the model: a dictionary from the index of a block to its stage."""
    trunks: dict[str, dict[int, int]] = {}
    for block in found:
        if not block.is_inner:
            trunks.setdefault(block.trunk, {})[block.index] = block.stage
    return trunks


def _ratios(
    settings: Settings, kinds: set[str], found: list[Block], chosen: list[Block]
) -> dict[str, dict[int, float]]:
    """The keep-ratio of each chosen block, by the kind of branch and the index of the block."""
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
    """Make a site. `counted` caches the saved values of equal branches, so that they are counted once."""
    program = block.programs[kind]
    if isinstance(program, Unsupported):
        raise program
    method, save, store = "", settings.save_of(kind), settings.store_of(kind)
    reduce = settings.reduce
    if program.has_attention:
        method = settings.attention
        if reduce == "scaled" or method == "head":
            # The softmax already normalises attention over the kept positions, so scaling again would be wrong; and
            # heads have no neighbours to fold or pool with.
            reduce = "drop"
    if program.layout is not None:
        cell = 1  # a mask inside windows does not match the masks of other stages
    like = (type(block.module), kind, program.layout, program.kinds, *(p.shape for p in block.module.parameters()))
    key = (like, ratio, reduce, method, save, store)
    if key not in counted:
        counted[key] = saving(program, ratio, reduce, method, save, store)
    plain, saved = counted[key]
    tier = block.adapter.tier
    how = (ratio, settings.mask, reduce, method, save, store)
    return Site(block.name, kind, block.index, tier, *how, cell, plain, saved)


def check_model(model: object) -> None:
    """Raise InputError if `model` is not an `nn.Module`."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}; give a torch.nn.Module")


def config_from(config: KeepConfig | None, options: dict[str, Any]) -> KeepConfig:
    """Return `config`, or make a KeepConfig from keywords. Raises ConfigError if both are given."""
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
