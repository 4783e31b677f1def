"""Finds the blocks of a model: their order, their resolution, and the layer that makes their tokens."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from .._torch import is_wrapper
from .items import Unsupported, path_of
from .modules import HAS_HOOKS
from .position_wise import declared_adapter, position_wise_adapter
from .program import Program, compile_branch
from .registry import PATCHES, REGISTRY, Adapter

__all__ = ["Block", "find_blocks"]


@dataclass
class Block:
    """A module that holds sites.

    `outer` is the block around this one, if any. `index` is the number of the block in the model; a block
    inside another has the index of the outer one, and a downsampling layer that of the block after it. `trunk` is the
    common start of the names of a row of blocks, such as "blocks.". `stage` numbers the resolutions of a trunk from
    the finest, 0, and `stride` is how many times coarser than the finest this block's resolution is. `embed` is the
    name of the layer that cuts images into patches, and `prefix` the number of tokens before those of the patches (the
    class token, for example); both are None if not known. `is_text` is True if the input is text, `has_frames` if it
    is video.
    """

    name: str
    module: nn.Module
    adapter: Adapter
    outer: Block | None = None
    programs: dict[str, Program | Unsupported] = field(default_factory=dict)
    index: int = 0
    trunk: str = ""
    stage: int = 0
    embed: str | None = None
    prefix: int | None = None
    is_text: bool = False
    has_frames: bool = False

    def __getstate__(self) -> dict[str, Any]:
        # Programs hold functions, so they are left out of a copy. Whoever uses the copy compiles them again.
        return {**vars(self), "programs": dict.fromkeys(self.programs)}

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(self.programs)

    @property
    def stride(self) -> int:
        return 2**self.stage

    @property
    def width(self) -> int | None:
        widths = [p.width for p in self.programs.values() if isinstance(p, Program)]
        return next((width for width in widths if width is not None), None)

    @property
    def is_inner(self) -> bool:
        """True for a downsampling layer, which takes the index of the block after it."""
        return self.kinds == ("downsample",)

    def compile(self, kind: str) -> Program:
        """Build the program of a branch from the block's current state. Raises Unsupported if it cannot be reduced."""
        _refuse_wrappers(self.module)
        items = self.adapter.branches(self.module)[kind]
        if isinstance(items, str):
            raise Unsupported(items)
        program = compile_branch(items)
        if program.hooked and not self.adapter.gives_rows:
            raise Unsupported(HAS_HOOKS.format(program.hooked))
        return program


def _refuse_wrappers(block: nn.Module) -> None:
    """Raise Unsupported if a part of the block is wrapped for checkpointing. The block then runs its own forward.

    Known blocks inside this one are skipped, wrapped or not: they are checked by themselves.
    """
    for name, child in block.named_children():
        wraps = is_wrapper(child)
        inner = child._modules["_checkpoint_wrapped_module"] if wraps else child
        if inner is None or path_of(inner) in REGISTRY:
            continue
        if wraps:
            raise Unsupported(f"its {name} is wrapped by {type(child).__name__}; wrap the whole block instead")
        _refuse_wrappers(inner)


def find_blocks(model: nn.Module, declared: Mapping[str, Any] | None = None) -> list[Block]:
    """All blocks of the model, in the order of its modules, with their programs.

    Args:
        model: the model.
        declared: classes or modules that the user declares to be position-wise. The keys are the kind of branch whose
            settings they follow, such as "mlp".
    """
    blocks: list[Block] = []
    known: list[tuple[str, Block]] = []  # each block, with the prefix of the names inside it
    names = {id(module): name for name, module in model.named_modules()}
    for name, module in model.named_modules():
        outer = next((block for start, block in reversed(known) if name.startswith(start)), None)
        if outer is not None and outer.adapter.tier == 2:
            continue  # the module is part of a site
        adapter = declared_adapter(module, declared or {}) or REGISTRY.get(path_of(module))
        if adapter is None and outer is None and (not name or re.search(r"\d", name)):
            adapter = position_wise_adapter(module)  # only in numbered blocks: a head has few positions
        if adapter is None:
            continue
        for part in adapter.modules(module):
            block = _block(names[id(part)], part, adapter, outer)
            blocks.append(block)
            known.append((f"{block.name}." if block.name else "", block))
            if not block.is_inner:
                outer = outer or block
    _number(blocks)
    _set_stages(blocks)
    _set_tokens(model, blocks)
    return blocks


def _block(name: str, module: nn.Module, adapter: Adapter, outer: Block | None) -> Block:
    """Make a block, with a program for each branch, or the reason why the branch cannot be reduced."""
    block = Block(name, module, adapter, outer)
    try:
        branches = adapter.branches(module)
        if not adapter.covers(module):
            raise Unsupported("it has parameters that belong to no branch")
    except (AttributeError, TypeError, ValueError) as error:
        block.programs = {"mlp": Unsupported(f"{_named(module)} is not built as expected: {error}")}
        return block
    except Unsupported as why:
        block.programs = {"mlp": Unsupported(f"{_named(module)}: {why}")}
        return block
    for kind in branches:
        try:
            block.programs[kind] = block.compile(kind)
        except Unsupported as why:
            block.programs[kind] = why
    return block


def _named(module: nn.Module) -> str:
    """The name of the module's class and library, with the library's version."""
    library = type(module).__module__.partition(".")[0]
    version = getattr(sys.modules.get(library) or import_module(library), "__version__", None)
    return f"{type(module).__qualname__} of {library}" + (f" {version}" if version else "")


def _number(blocks: list[Block]) -> None:
    """Number the blocks. One inside another takes the outer one's number, a downsampling layer that of the next."""
    number = 0
    waiting: list[Block] = []
    for block in blocks:
        if block.is_inner:
            waiting.append(block)
            continue
        if block.outer is not None:
            block.index = block.outer.index
            continue
        for earlier in waiting:
            earlier.index = number
        waiting = []
        block.index = number
        number += 1
    for block in waiting:
        block.index = max(0, number - 1)


def _set_stages(blocks: list[Block]) -> None:
    """Set the trunk and the stage of each block.

    A trunk is all blocks whose names are the same up to the first digit. Inside it, blocks with the same number of
    channels form a stage: networks have more channels at a lower resolution.
    """
    trunks: dict[str, list[Block]] = {}
    for block in blocks:
        block.trunk = re.split(r"\d", block.name, maxsplit=1)[0]
        trunks.setdefault(block.trunk, []).append(block)
    for trunk in trunks.values():
        following: int | None = None
        widths: dict[int, int] = {}
        for block in reversed(trunk):  # a downsampling layer has the resolution of the block after it
            following = following if block.is_inner else block.width or following
            widths[id(block)] = following or 0
        order = sorted(set(widths.values()))
        for block in trunk:
            block.stage = order.index(widths[id(block)])


def _set_tokens(model: nn.Module, blocks: list[Block]) -> None:
    """Find for each block the layer that cuts images into patches, and the number of prefix tokens.

    The search goes outward through the modules around the block. The first of them with a patch layer gives `embed`; if
    one with an `nn.Embedding` comes first, the block is for text. `_prefix` reads the number of prefix tokens.
    """
    inside = tuple(f"{block.name}." for block in blocks)
    modules = dict(model.named_modules())
    outside = {name: m for name, m in modules.items() if not f"{name}.".startswith(inside)}
    embeds = [name for name, m in outside.items() if _makes_patches(m)]
    words = [name for name, m in outside.items() if isinstance(m, nn.Embedding)]
    for block in blocks:
        block.has_frames = block.adapter.has_frames
        around = block.name
        while around and not block.is_text:
            around = around.rpartition(".")[0]
            start = f"{around}." if around else ""
            if block.prefix is None:
                block.prefix = _prefix(modules[around])
            if block.embed is None:
                block.embed = next((name for name in embeds if name.startswith(start)), None)
                block.is_text = block.embed is None and any(name.startswith(start) for name in words)
        if block.embed is not None and isinstance(modules[block.embed], nn.Conv3d):
            block.has_frames = True


def _prefix(module: nn.Module) -> int | None:
    """How many tokens a model puts before those of the image; None if that cannot be read from it."""
    count = getattr(module, "num_prefix_tokens", None)
    if count is None:
        own = dict(module.named_parameters(recurse=False))
        tokens = [p for name, p in own.items() if name.startswith(("cls_token", "class_token"))]
        count = next((token.shape[1] for token in tokens if token.dim() == 3), None)
    if count is None and isinstance(embeddings := getattr(module, "embeddings", None), nn.Module):
        sizes = {name: getattr(embeddings, name, None) for name in TOKENS}
        return sum(p.shape[1] for p in sizes.values() if isinstance(p, Tensor) and p.dim() == 3) or None
    return count


TOKENS = ("cls_token", "distillation_token", "register_tokens")
"""The parameters of transformers' embeddings that become tokens before the patches."""


def _makes_patches(module: nn.Module) -> bool:
    if path_of(module) in PATCHES:
        return True
    if not isinstance(module, (nn.Conv2d, nn.Conv3d)):
        return False
    size, step = module.kernel_size, module.stride
    return size == step and max(size) > 1
