"""A branch of a block: stages in a row, at most one of which is attention.

Attention is one chain with everything around it where its backward is reduced or redone. It is redone with
save="input", and where values are stored in 8 bits: its backward is never taken at values that do not belong together.
Where it is neither (every position kept and save="heavy") or cannot be (dropout of the attention matrix, a projection
that is no plain linear layer), the attention itself is left to autograd and its fused kernel, and the chains before and
after it run in the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ..sampling import Kept
from .attention import Core, SelfAttention
from .chain import run, run_stages
from .stages import Linear, Link, Parallel, Tensors

__all__ = ["BoundAttention", "Branch"]


@dataclass(frozen=True)
class BoundAttention:
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
        if not isinstance(self.projection[0], (Linear, Parallel)):
            return True
        if method == "head" and (self.core.heads != self.core.kv_heads or self.core.out_parts):
            return True  # heads share a key, or a norm of their outputs
        return reduced and method != "qkv" and not self.cuttable

    def link(self, method: str, heads: Tensor | None) -> Link:
        """It as a stage of a chain."""
        stage, tensors = self.projection
        assert isinstance(stage, (Linear, Parallel))
        picked = () if heads is None else (heads,)
        counts = (len(tensors), len(self.tensors))
        return SelfAttention(method, stage, self.core, counts), (*tensors, *self.tensors, *picked)

    def attend(self, qkv: Tensor) -> Tensor:
        """Attention of the projection's output, under plain autograd."""
        return self.core(qkv.split(self.core.sections, -1), self.tensors, dropout=self.dropout)


@dataclass(frozen=True)
class Branch:
    """The stages of a branch with their tensors; `attention` lies between `before` and `after`.

    `memory` is kept by whoever builds the same branch in every step: what follows from the stages alone.
    """

    before: Sequence[Link]
    attention: BoundAttention | None = None
    after: Sequence[Link] = ()
    memory: dict[Any, Any] | None = None

    def _specs(self, part: Any) -> dict[Any, Any] | None:
        return None if self.memory is None else self.memory.setdefault(part, {})

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
        """All positions forward, the kept slots or heads backward; the residual is added. `noise` is that of `run`."""
        attention = self.attention
        if attention is None:
            return run(self.before, x, kept, save, residual, noise, self._specs(None))
        reduced = kept is not None or heads is not None
        if attention.is_whole(reduced, method, save, noise is not None):
            links = [*self.before, attention.projection]
            out = attention.attend(run(links, x, kept, save, None, noise, self._specs("before")))
            return run(self.after, out, kept, save, residual, noise, self._specs("after"))
        method = method if reduced else "qkv"
        link = attention.link(method, heads)
        specs = self._specs((method, id(attention.core)))
        return run([*self.before, link, *self.after], x, kept, save, residual, noise, specs)

    def plain(self, x: Tensor) -> Tensor:
        """The branch under ordinary autograd."""
        if self.attention is None:
            return run_stages(self.before, x)
        out = self.attention.attend(run_stages([*self.before, self.attention.projection], x))
        return run_stages(self.after, out)

    def on_meta(self) -> Branch:
        """The same branch with tensors that have no data and all need gradients."""

        def bare(link: Link) -> Link:
            return link[0], _bare(link[1])

        attention = self.attention
        if attention is not None:
            attention = replace(attention, projection=bare(attention.projection), tensors=_bare(attention.tensors))
        return Branch([bare(link) for link in self.before], attention, [bare(link) for link in self.after])


def _bare(tensors: Tensors) -> Tensors:
    return tuple(t.new_empty(t.shape, device="meta").requires_grad_(t.is_floating_point()) for t in tensors)
