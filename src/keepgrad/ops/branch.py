"""A branch of a block: a sequence of stages, at most one of which is attention.

The attention and all stages around it form one chain if the backward of the attention is reduced or if the attention
is redone in backward. It is redone with save="input", and also if saved values are stored in 8 bits: q, k, v and the
output must belong together, and they would not if each were rounded separately.

In two cases the attention itself is left to autograd and its fused kernel, and the stages before and after it run in
the engine as two chains:
- Nothing is reduced or redone: every position is kept, with save="heavy".
- The engine cannot do it. For example, the attention matrix has dropout, or the method differentiates only some output
  channels of the projection and the projection is not made of plain linear layers.

A module with hooks is called as a module, so that its hooks run as in the plain model. Its forward is then a branch of
its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..sampling import Kept
from .attention import Core, SelfAttention
from .chain import Chain, run_stages
from .stages import Linear, Link, Parallel, Stage, Tensors

__all__ = ["BoundAttention", "Branch", "Hooked"]


@dataclass(frozen=True)
class Hooked(Stage):
    """A module with hooks.

    `call(forward, x)` calls the module, with its forward replaced by `forward` during the call. `bind` makes the branch
    of the module's own stages and tensors; it is called after the module's pre-forward hooks have run.
    """

    name: str
    call: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]
    bind: Callable[[], Branch]


class BoundAttention(NamedTuple):
    """The attention of a branch.

    `projection` makes q, k and v from the input. `core` is what is done with them, and `tensors` are the core's
    tensors. `dropout` is the dropout probability of the attention matrix.
    """

    projection: Link
    core: Core
    tensors: Tensors
    dropout: float = 0.0

    @property
    def cuttable(self) -> bool:
        """True if the projection can be differentiated for some of its output channels only."""
        stage = self.projection[0]
        inner = stage.stages if isinstance(stage, Parallel) else (stage,)
        return all(isinstance(one, Linear) for one in inner)

    def is_whole(self, reduced: bool, method: str, save: str, packs: bool) -> bool:
        """True if the attention itself is left to autograd (see the module docstring)."""
        if self.dropout > 0 or (not reduced and save == "heavy" and not packs):
            return True
        if method == "head" and (self.core.heads != self.core.kv_heads or self.core.out_parts):
            return True  # several heads use the same key, or one norm over their outputs
        return reduced and method != "qkv" and not self.cuttable

    def stage(self, method: str) -> SelfAttention:
        """The attention as one stage. Its tensors: the projection's, the core's, and the kept heads if given."""
        stage, tensors = self.projection
        return SelfAttention(method, stage, self.core, (len(tensors), len(self.tensors)))

    def attend(self, qkv: Tensor) -> Tensor:
        """Run the attention on the projection's output, under plain autograd."""
        # The backward of `split` joins the gradients in one kernel; that of `unbind` takes two.
        return self.core(qkv.split(self.core.sections, -1), self.tensors, dropout=self.dropout)


class Branch(NamedTuple):
    """The stages of a branch with their tensors; `attention` lies between `before` and `after`.

    `chains` caches the chains made from the stages. A caller that builds the same branch in every step keeps this dict
    and passes it again. `is_hooked` is True if some stages are `Hooked`; the branch then runs in pieces, cut at them.
    """

    before: Sequence[Link]
    attention: BoundAttention | None = None
    after: Sequence[Link] = ()
    chains: dict[Any, Chain] | None = None
    is_hooked: bool = False

    def run(
        self,
        x: Tensor,
        kept: Kept | None,
        save: str,
        residual: Tensor | None = None,
        method: str = "qkv",
        heads: Tensor | None = None,
        noise: Tensor | None = None,
    ) -> Tensor:
        """Run forward on all positions and backward on the kept slots or heads, and add the residual.

        `noise` is that of `Chain.run`.
        """
        if self.is_hooked:
            return self._run_pieces(x, kept, save, residual, method, heads, noise)
        attention = self.attention
        if attention is None:
            return self._chain("all", self.before).run(x, _tensors(self.before), kept, save, residual, noise)
        reduced = kept is not None or heads is not None
        if attention.is_whole(reduced, method, save, noise is not None):
            links = [*self.before, attention.projection]
            qkv = self._chain("before", links).run(x, _tensors(links), kept, save, None, noise)
            out = attention.attend(qkv)
            return self._chain("after", self.after).run(out, _tensors(self.after), kept, save, residual, noise)
        method = method if reduced else "qkv"
        given = (*attention.projection[1], *attention.tensors) + (() if heads is None else (heads,))
        key = (method, id(attention.core))
        chain = None if self.chains is None else self.chains.get(key)
        if chain is None:
            chain = self._chain(key, [*self.before, (attention.stage(method), given), *self.after])
        tensors = [*_tensors(self.before), *given, *_tensors(self.after)]
        return chain.run(x, tensors, kept, save, residual, noise)

    def _run_pieces(
        self,
        x: Tensor,
        kept: Kept | None,
        save: str,
        residual: Tensor | None,
        method: str,
        heads: Tensor | None,
        noise: Tensor | None,
    ) -> Tensor:
        """Run one piece after the other.

        Between two pieces, the gradient of each slot is given back to its positions and gathered again, which leaves it
        unchanged. Only the last piece may scale it (reduce="scaled"), or it would be scaled several times. With a
        method other than "qkv" every position gets a gradient from the attention, so pieces before it keep all.
        """
        pieces = self._pieces()
        attends = [number for number, piece in enumerate(pieces) if isinstance(piece, Branch) and piece.attention]
        for number, piece in enumerate(pieces):
            is_last = number == len(pieces) - 1
            own = kept if kept is None or is_last else kept.unscaled()
            if method != "qkv" and attends and number < attends[0]:
                own = None
            added = residual if is_last else None
            if isinstance(piece, Branch):
                x = piece.run(x, own, save, added, method, heads, noise)
                continue

            def forward(rows: Tensor, piece: Hooked = piece, own: Kept | None = own) -> Tensor:
                return piece.bind().run(rows, own, save, None, method, None, noise)

            x = piece.call(forward, x)
            x = x if added is None else added + x
        return x

    def _pieces(self) -> list[Branch | Hooked]:
        """The branch cut into pieces: each `Hooked` stage is a piece, and so is each run of stages between them."""
        found: list[Branch | Hooked] = []
        links: list[Link] = []
        attention = None
        before: list[Link] = []

        def cut() -> None:
            nonlocal links, before, attention
            if links or attention is not None:
                chains = None if self.chains is None else self.chains.setdefault(("piece", len(found)), {})  # type: ignore[arg-type]
                whole = (links,) if attention is None else (before, attention, links)
                found.append(Branch(*whole)._replace(chains=chains))  # type: ignore[arg-type]
            links, before, attention = [], [], None

        for side in (self.before, self.after):
            if side is self.after and self.attention is not None:
                before, links, attention = links, [], self.attention
            for link in side:
                if isinstance(link[0], Hooked):
                    cut()
                    found.append(link[0])
                else:
                    links.append(link)
        cut()
        return found

    def flat(self) -> Branch:
        """The same branch without hooks: each `Hooked` stage is replaced by the stages of its module."""
        if not self.is_hooked:
            return self

        def inside(links: Sequence[Link]) -> list[Link]:
            parts = [link[0].bind().flat().before if isinstance(link[0], Hooked) else [link] for link in links]
            return [link for part in parts for link in part]

        return Branch(inside(self.before), self.attention, inside(self.after))

    def _chain(self, key: Any, links: Sequence[Link]) -> Chain:
        """The chain of these links, made once and then taken from `chains`."""
        chain = None if self.chains is None else self.chains.get(key)
        if chain is None:
            chain = Chain([stage for stage, _ in links], [len(tensors) for _, tensors in links])
            if self.chains is not None:
                self.chains[key] = chain
        return chain

    def plain(self, x: Tensor) -> Tensor:
        """Run the branch under ordinary autograd."""
        if self.attention is None:
            return run_stages(self.before, x)
        out = self.attention.attend(run_stages([*self.before, self.attention.projection], x))
        return run_stages(self.after, out)

    def on_meta(self) -> Branch:
        """The same branch without hooks, and with tensors on the meta device.

        All floating-point tensors need gradients.
        """
        if self.is_hooked:
            return self.flat().on_meta()

        def bare(link: Link) -> Link:
            return link[0], _bare(link[1])

        attention = self.attention
        if attention is not None:
            attention = attention._replace(projection=bare(attention.projection), tensors=_bare(attention.tensors))
        return Branch([bare(link) for link in self.before], attention, [bare(link) for link in self.after])


def _tensors(links: Sequence[Link]) -> list[Tensor]:
    return [t for _, tensors in links for t in tensors]


def _bare(tensors: Tensors) -> Tensors:
    made = (torch.empty(t.shape, dtype=t.dtype, device="meta") for t in tensors)
    return tuple(t.requires_grad_(t.is_floating_point()) for t in made)
