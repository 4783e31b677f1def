"""The random draw of a training step: its masks, kept heads and rounding noise, shared by all sites of a model.

The number from which they derive is read off torch's CPU random stream at the first site and the stream is put back, so
dropout and drop path draw what they would draw without keepgrad, in the model and in what it is a part of; when the
gradients come back, the stream moves on by one number. So the masks are reproduced by whatever reproduces torch's
random state. Where sites run outside the model's own forward (`forward_features`, a recomputed checkpoint), a site that
comes a second time begins a new draw, of the random state and a count.

With a seed, masks derive from the seed, the number of the step (`set_step`) and a count of the draws since it was set.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from ._torch import is_fake, tree_leaves
from .errors import InputError
from .ops.store import dither
from .padding import real_positions, sample_padded
from .plan import Site
from .sampling import Kept, Layout, as_tensor, hashed, sample, slot_count

__all__ = ["Draw", "Shared"]

DRAWS = 2**20
"""More draws than a step has: so far apart are the numbers that the draws of two steps derive from."""


class Draw:
    """The draw of one step: the number that all of it derives from, and what was drawn so far."""

    def __init__(self, step_seed: int | Tensor, is_of_part: bool = False) -> None:
        self.step_seed = step_seed
        self.is_of_part = is_of_part  # made by a block that is compiled by itself, for its own use
        self.kept: dict[tuple[Any, ...], Kept | None] = {}
        self.real: dict[int, tuple[Tensor, Tensor]] = {}  # masks of scores, and which positions are not padding
        self.heads: dict[tuple[Any, ...], Tensor] = {}
        self.noise: dict[torch.device, Tensor] = {}
        self.seen: set[tuple[str, str]] = set()
        self.has_moved = False  # torch's random stream, on from the number this was made of


class Shared:
    """What the patches of one model share: the draw of the current step, and whether `exact` is on."""

    def __init__(self, seed: int | None, packs_the_rest: bool) -> None:
        self.packs_the_rest = packs_the_rest
        self.exact = False
        self.draw: Draw | None = None
        self.tables: dict[Any, Any] = {}  # what is the same in the draws of all steps (see `sample`)
        self.in_root = False
        self.redraws = 0
        self.grids: dict[str, tuple[int, ...]] = {}  # the shapes of the patches, by the layer that makes them
        self.waiting: dict[str, None] = {}  # the blocks that have not run in training yet
        # The number of the step for blocks that are compiled by themselves, each of which derives its masks from it.
        self.part_seed: Tensor | None = None
        self.seed = seed
        # A tensor, so that torch.compile does not take its value for a constant.
        self.counter = None if seed is None else torch.tensor(seed)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "tables": {}, "draw": None, "part_seed": None}

    def begin(self) -> None:
        self.draw = None
        self.in_root = True
        self.redraws = 0
        self.grids = {}

    def begin_parts(self, x: Tensor) -> None:
        """The step has blocks that are compiled by themselves; `x` is its input."""
        self.part_seed = as_tensor(self._new_draw(x).step_seed, x.device)
        self.waiting = {}  # compiled blocks do not say that they ran

    def set_step(self, step: int) -> None:
        if self.seed is not None and self.counter is not None:
            self.counter.fill_((self.seed + step * DRAWS + 2**63) % 2**64 - 2**63)

    def end(self, finished: bool, out: Any) -> None:
        self.in_root = False
        if torch.compiler.is_compiling():
            return
        draw = self.draw
        if draw is not None and self.counter is None:

            def move_on(grad: Tensor) -> None:
                if not draw.has_moved:
                    draw.has_moved = True
                    torch.randint(2, ())

            for leaf in (out,) if isinstance(out, Tensor) else tree_leaves(out):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(move_on)
        if self.waiting and finished:
            names, self.waiting = list(self.waiting), {}
            warnings.warn(
                f"keepgrad: {len(names)} patched blocks did not run in this training step (e.g. {names[0]}): "
                "the model does not use them, or calls their parts by itself, so nothing is saved there",
                stacklevel=3,
            )

    def draw_for(self, site: Site, x: Tensor) -> Draw:
        """The draw of the current step; a new one where the site, whose input is `x`, has already been part of it."""
        if self.part_seed is not None and torch.compiler.is_compiling():
            return Draw(self.part_seed, is_of_part=True)
        draw = self.draw
        key = (site.name, site.kind)
        if draw is None or key in draw.seen:
            draw = self._new_draw(x)
        draw.seen.add(key)
        return draw

    def _new_draw(self, x: Tensor) -> Draw:
        again = self.draw is not None or not self.in_root
        self.draw = Draw(self._step_seed(x, again))
        return self.draw

    def _step_seed(self, x: Tensor, again: bool) -> int | Tensor:
        if torch.compiler.is_compiling():
            if self.counter is None:
                return torch.randint(2**62, (), device=x.device)
            counted = self.counter.clone()
            self.counter.add_(1)
            return counted.to(x.device)
        if is_fake(x):
            return 0  # there are no numbers
        if self.counter is not None:
            seed = int(self.counter)
            self.counter.add_(1)
            return seed
        state = torch.get_rng_state()
        seed = int(torch.randint(2**62, ()))
        torch.set_rng_state(state)
        if again:
            self.redraws += 1
            seed += self.redraws
        return seed

    def kept(self, draw: Draw, site: Site, x: Tensor, layout: Layout, mask: Tensor | None = None) -> Kept | None:
        """The slots of a site. `mask` is that of the attention scores, where it may tell what is padding."""
        if mask is not None:
            return self._kept_of_padded(draw, site, x, layout, mask)
        key = (x.shape[0], layout, site.keep_ratio, site.mask, site.reduce, x.device)
        if key not in draw.kept:
            tables = None if torch.compiler.is_compiling() else self.tables
            try:
                draw.kept[key] = sample(draw.step_seed, *key, tables)
            except InputError as error:
                raise type(error)(f"{site.name} ({site.kind}): {error}") from None
        return draw.kept[key]

    def _kept_of_padded(self, draw: Draw, site: Site, x: Tensor, layout: Layout, mask: Tensor) -> Kept | None:
        """The slots of sequences with padding; those of layers that are given the same mask are the same."""
        if id(mask) not in draw.real:
            draw.real[id(mask)] = (mask, real_positions(mask).expand(x.shape[0], -1))  # held: no other has its id
        key = (x.shape[0], layout, site.keep_ratio, site.mask, site.reduce, id(mask))
        if key not in draw.kept:
            real = draw.real[id(mask)][1]
            seed = as_tensor(draw.step_seed, x.device)
            draw.kept[key] = sample_padded(seed, real, site.keep_ratio, site.mask, site.reduce)
        return draw.kept[key]

    def heads(self, draw: Draw, site: Site, heads: int, device: torch.device) -> Tensor:
        """The kept heads of a site, a random subset."""
        key = (heads, slot_count(heads, site.keep_ratio), device)
        if key not in draw.heads:
            order = hashed(as_tensor(draw.step_seed, device), 3, heads).argsort()
            draw.heads[key] = order[: key[1]]
        return draw.heads[key]

    def noise(self, x: Tensor, draw: Draw | None = None) -> Tensor:
        """The random numbers to round values like `x` with in this step."""
        draw = draw or self.draw or self._new_draw(x)
        if x.device not in draw.noise:
            draw.noise[x.device] = dither(draw.step_seed, x)
        return draw.noise[x.device]
