"""A branch of a block: stages in a row, at most one of which is attention.

Attention is one chain with everything around it where its backward is reduced or redone. It is redone with
save="input", and where values are stored in 8 bits: its backward is never taken at values that do not belong together.
Where it is neither (every position kept and save="heavy") or cannot be (dropout of the attention matrix, a method that
cuts a projection which is no plain linear layer), the attention itself is left to autograd and its fused kernel, and
the chains before and after it run in the engine.

A module with hooks is called as itself, so that they run as in the plain model; its forward is then a branch too.
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
    """A module with hooks, which is called as itself: `call(forward, x)` calls it with another forward for the moment.

    `bind` reads the tensors of what it is made of, when its hooks before the forward have run.
    """

    name: str
    call: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]
    bind: Callable[[], Branch]


class BoundAttention(NamedTuple):
    """The attention of a branch: the projection to q, k and v as a link, what is done with them, and its tensors."""

    projection: Link
    core: Core
    tensors: Tensors
    dropout: float = 0.0

    @property
    def cuttable(self) -> bool:
        """Whether some output channels of the projection can be differentiated without the others."""
        stage = self.projection[0]
        inner = stage.stages if isinstance(stage, Parallel) else (stage,)
        return all(isinstance(one, Linear) for one in inner)

    def is_whole(self, reduced: bool, method: str, save: str, packs: bool) -> bool:
        """Whether the attention itself is left to autograd."""
        if self.dropout > 0 or (not reduced and save == "heavy" and not packs):
            return True
        if method == "head" and (self.core.heads != self.core.kv_heads or self.core.out_parts):
            return True  # heads share a key, or a norm of their outputs
        return reduced and method != "qkv" and not self.cuttable

    def stage(self, method: str) -> SelfAttention:
        """It as a stage of a chain, whose tensors are those of the projection, its own, and the heads if given."""
        stage, tensors = self.projection
        return SelfAttention(method, stage, self.core, (len(tensors), len(self.tensors)))

    def attend(self, qkv: Tensor) -> Tensor:
        """Attention of the projection's output, under plain autograd."""
        # Autograd puts the gradients of what was split together in one kernel, those of what was unbound in two.
        return self.core(qkv.split(self.core.sections, -1), self.tensors, dropout=self.dropout)


class Branch(NamedTuple):
    """The stages of a branch with their tensors; `attention` lies between `before` and `after`.

    `chains` is kept by whoever builds the same branch in every step: the chains that were made of its stages.
    `is_hooked` says that some stages are `Hooked`; what lies between them runs in pieces.
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
        """All positions forward, the kept slots or heads backward; the residual is added. `noise` is `Chain`'s."""
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
        """One piece after the other. A slot's gradient goes to its positions and comes back as it was at each end of
        one; only the last may scale it, and before attention whose keys are all kept every position has one."""
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
        """The branch, cut where modules have hooks."""
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
        """The same without hooks."""
        if not self.is_hooked:
            return self

        def inside(links: Sequence[Link]) -> list[Link]:
            parts = [link[0].bind().flat().before if isinstance(link[0], Hooked) else [link] for link in links]
            return [link for part in parts for link in part]

        return Branch(inside(self.before), self.attention, inside(self.after))

    def _chain(self, key: Any, links: Sequence[Link]) -> Chain:
        """The chain of some links, made once."""
        chain = None if self.chains is None else self.chains.get(key)
        if chain is None:
            chain = Chain([stage for stage, _ in links], [len(tensors) for _, tensors in links])
            if self.chains is not None:
                self.chains[key] = chain
        return chain

    def plain(self, x: Tensor) -> Tensor:
        """The branch under ordinary autograd."""
        if self.attention is None:
            return run_stages(self.before, x)
        out = self.attention.attend(run_stages([*self.before, self.attention.projection], x))
        return run_stages(self.after, out)

    def on_meta(self) -> Branch:
        """The same branch with tensors that have no data and all need gradients, and without hooks."""
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
