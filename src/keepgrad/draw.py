"""The random draw of a training step: its masks, kept heads and rounding noise, shared by all sites of a model.

All of these are computed from one number, the step seed. Without a `seed`, it comes from torch's random state:

- The first site that runs in a step reads a number from torch's CPU random stream, and then puts the stream back. So
  dropout and drop path draw the same numbers as without keepgrad, in the model and in a larger one around it.
- When the gradients come back, the stream moves on by one number, so that the next step has other masks.
- So whatever restores torch's random state also restores the masks.
- Sites may run outside the model's own forward (`forward_features`, a recomputed checkpoint). There, a site that runs
  a second time begins a new draw, whose number is made from the random state and a count of such draws.

With a `seed`, the step seed is made from the seed, the number of the step (`set_step`) and a count of the draws since
that number was set.
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
"""How far apart the seeds of two steps are. No step has this many draws, so steps never share a seed."""


class Draw:
    """The draw of one step: the number that everything is computed from, and what was drawn so far."""

    def __init__(self, step_seed: int | Tensor, is_of_part: bool = False) -> None:
        self.step_seed = step_seed
        self.is_of_part = is_of_part  # made by a block that is compiled by itself, for its own use
        self.kept: dict[tuple[Any, ...], Kept | None] = {}
        self.real: dict[int, tuple[Tensor, Tensor]] = {}  # attention masks, and which positions are not padding
        self.heads: dict[tuple[Any, ...], Tensor] = {}
        self.noise: dict[torch.device, Tensor] = {}
        self.seen: set[tuple[str, str]] = set()
        self.has_moved = False  # True once torch's random stream has moved on after this draw


class Shared:
    """State that all patches of one model share, such as the draw of the current step and whether `exact` is on."""

    def __init__(self, seed: int | None, packs_the_rest: bool) -> None:
        self.packs_the_rest = packs_the_rest
        self.exact = False
        self.draw: Draw | None = None
        self.tables: dict[Any, Any] = {}  # what is the same in the draws of all steps (see `sample`)
        self.in_root = False
        self.redraws = 0
        self.grids: dict[str, tuple[int, ...]] = {}  # patches in each direction, by the name of their layer
        self.waiting: dict[str, None] = {}  # the blocks that have not run in training yet
        # The step seed for blocks that are compiled by themselves. Each of them computes its masks from it.
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
        """Draw the seed of a step in a model with blocks that are compiled by themselves. `x` is the model's input."""
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
        """The draw of the current step. If this site has already used it, begins a new one. `x` is the site's input."""
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
            return 0  # fake tensors have no data, so any number will do
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
        """The slots of a site. `mask` is the attention mask, if it may mark padding."""
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
        """The slots of sequences with padding. Layers with the same attention mask share their slots."""
        if id(mask) not in draw.real:
            draw.real[id(mask)] = (mask, real_positions(mask).expand(x.shape[0], -1))  # held, so its id stays unique
        key = (x.shape[0], layout, site.keep_ratio, site.mask, site.reduce, id(mask))
        if key not in draw.kept:
            real = draw.real[id(mask)][1]
            seed = as_tensor(draw.step_seed, x.device)
            draw.kept[key] = sample_padded(seed, real, site.keep_ratio, site.mask, site.reduce)
        return draw.kept[key]

    def heads(self, draw: Draw, site: Site, heads: int, device: torch.device) -> Tensor:
        """The kept heads of a site: a random subset of its heads."""
        key = (heads, slot_count(heads, site.keep_ratio), device)
        if key not in draw.heads:
            order = hashed(as_tensor(draw.step_seed, device), 3, heads).argsort()
            draw.heads[key] = order[: key[1]]
        return draw.heads[key]

    def noise(self, x: Tensor, draw: Draw | None = None) -> Tensor:
        """The random numbers for rounding values like `x` in this step."""
        draw = draw or self.draw or self._new_draw(x)
        if x.device not in draw.noise:
            draw.noise[x.device] = dither(draw.step_seed, x)
        return draw.noise[x.device]
