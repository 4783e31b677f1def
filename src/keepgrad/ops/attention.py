"""Self-attention: exact forward, and a backward renormalised over what is kept.

Shapes: input `[batch, n, in]`, projected to `q, k, v` side by side `[batch, n, 3 * heads * dim]`, output
`[batch, n, heads * dim]`.

Forward attends to everything. Backward differentiates attention *among the kept rows*: softmax over the kept keys,
not the exact probabilities with terms left out, because then the probability mass of the dropped keys would be missing.
A slot that stands for m positions gets `log m` added to its scores as a key. It costs `keep_ratio ** 2` of the
exact backward and stores no attention matrix: it is autograd's own backward of
`F.scaled_dot_product_attention` on the kept rows, on every device and backend.

| method | backward of                         | saves (of the input; of q, k, v; of the output)            |
| ---    | ---                                 | ---                                                        |
| qkv    | kept queries, over the kept keys    | kept rows; kept rows; kept rows                            |
| query  | kept queries, over all keys         | all rows; kept rows of q, all of k and v; kept rows        |
| head   | kept heads, at all positions        | all rows; kept heads; all rows                             |

With save="input" q, k and v are redone from the saved input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..sampling import Kept
from .stages import Linear, Link, Point, Pull, Stage, Tensors, partial_vjp

__all__ = ["METHODS", "SelfAttention", "self_attention"]

METHODS = ("qkv", "query", "head", "off")


@dataclass(frozen=True)
class SelfAttention(Stage):
    """The projection to q, k and v and the attention itself, as one stage.

    Tensors: those of `projection`, those of `q_norm`, those of `k_norm`, and for the `head` method the indices of the
    kept heads.
    """

    heads: int
    method: str
    projection: Linear
    q_norm: Callable[..., Tensor] | None = None
    k_norm: Callable[..., Tensor] | None = None
    counts: tuple[int, int, int] = (1, 0, 0)  # of tensors: projection, q_norm, k_norm
    heavy = True
    casts = True
    makes_new = True

    @property
    def reads_all(self) -> bool:  # type: ignore[override]
        return self.method != "qkv"

    def core(self, qkv: tuple[Tensor, ...], norms: Tensors, key_bias: Tensor | None = None) -> Tensor:
        """Attention of q, k, v, each `[batch, n, heads, dim]`, to `[batch, n, heads * dim]`."""
        q, k, v = (rows.transpose(1, 2) for rows in qkv)
        q_count = self.counts[1]
        if self.q_norm:
            q = self.q_norm(q, *norms[:q_count])
        if self.k_norm:
            k = self.k_norm(k, *norms[q_count:])
        mask = None if key_bias is None else key_bias.expand(1, 1, 1, -1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)

    def split_heads(self, qkv: Tensor) -> tuple[Tensor, ...]:
        return qkv.unflatten(-1, (3, self.heads, -1)).unbind(2)

    def split_tensors(self, tensors: tuple) -> tuple[tuple, tuple]:
        """Those of the projection, and those of the two norms."""
        first, second = self.counts[0], sum(self.counts)
        return tensors[:first], tensors[first:second]

    def forward(self, x: Tensor, tensors: Tensors, kept: Kept | None, keep_extras: bool) -> tuple[Tensor, Tensors]:
        projection, norms = self.split_tensors(tensors)
        qkv = self.projection.apply(x, projection)
        out = self.core(self.split_heads(qkv), norms)
        if not keep_extras:
            return out, ()
        return out, self._rows(qkv, tensors, kept)

    def _rows(self, qkv: Tensor, tensors: Tensors, kept: Kept | None) -> Tensors:
        """What backward needs of q, k and v."""
        if self.method == "head":
            return (qkv.unflatten(-1, (3, self.heads, -1)).index_select(3, tensors[-1]),)
        if kept is None:
            return (qkv,)
        if self.method == "qkv":
            return (kept.gather(qkv),)
        width = qkv.shape[-1] // 3
        return kept.gather(qkv[..., :width]), qkv[..., width:].contiguous()

    def vjp(self, at: Point) -> tuple[Tensor | None, Pull]:
        extras = at.extras
        if not extras:
            assert at.x is not None
            qkv = self.projection.apply(at.x, self.split_tensors(at.tensors)[0])
            extras = (qkv,) if self.method == "qkv" else self._rows(qkv, at.tensors, at.kept)
        if self.method == "head":
            return self._vjp_heads(at, *extras)
        if self.method == "query" and at.kept is not None:
            return self._vjp_queries(at, at.kept, *extras)
        return self._vjp_rows(at, *extras)

    def _vjp_rows(self, at: Point, qkv: Tensor) -> tuple[Tensor, Pull]:
        projection, norms = self.split_tensors(at.tensors)
        projection_needs, norm_needs = self.split_tensors(at.needs)
        key_bias = None if at.kept is None else at.kept.key_bias(qkv.dtype)

        def core(qkv: Tensor, *norms: Tensor) -> Tensor:
            return self.core(self.split_heads(qkv), norms, key_bias)

        out, pull_core = partial_vjp(core, qkv, norms, norm_needs)

        def pull(grad: Tensor) -> tuple[Tensor | None, tuple[Tensor | None, ...]]:
            d_qkv, d_norms = pull_core(grad)
            assert d_qkv is not None
            dx, found = self.projection.backward(at.x, projection, projection_needs, d_qkv, at.need_input)
            return dx, (*found, *d_norms)

        return out, pull

    def _vjp_queries(self, at: Point, kept: Kept, q: Tensor, kv: Tensor) -> tuple[Tensor, Pull]:
        norms, norm_needs = self.split_tensors(at.tensors)[1], self.split_tensors(at.needs)[1]

        def core(q: Tensor, kv: Tensor, *norms: Tensor) -> Tensor:
            k, v = kv.unflatten(-1, (2, self.heads, -1)).unbind(2)
            return self.core((q.unflatten(-1, (self.heads, -1)), k, v), norms)

        out, pull_core = partial_vjp(core, q, (kv, *norms), (True, *norm_needs))

        def pull(grad: Tensor) -> tuple[Tensor | None, tuple[Tensor | None, ...]]:
            dq, (dkv, *d_norms) = pull_core(grad)
            assert dq is not None
            assert dkv is not None
            queries, others = slice(0, dq.shape[-1]), slice(dq.shape[-1], None)
            dx_q, found_q = self._project_back(at, queries, None if at.x is None else kept.gather(at.x), dq)
            dx, found_kv = self._project_back(at, others, at.x, dkv)
            if dx_q is not None:
                dx = kept.give_back(dx_q, dx)
            pairs = zip(found_q, found_kv, strict=True)
            found = (None if a is None or b is None else torch.cat([a, b]) for a, b in pairs)
            return dx, (*found, *d_norms)

        return out, pull

    def _vjp_heads(self, at: Point, qkv: Tensor) -> tuple[None, Pull]:
        norms, norm_needs = self.split_tensors(at.tensors)[1], self.split_tensors(at.needs)[1]
        heads = at.tensors[-1]

        def core(qkv: Tensor, *norms: Tensor) -> Tensor:
            return self.core(qkv.unbind(2), norms)

        _, pull_core = partial_vjp(core, qkv, norms, norm_needs)

        def pull(grad: Tensor) -> tuple[Tensor | None, tuple[Tensor | None, ...]]:
            grad = grad.unflatten(-1, (self.heads, -1)).index_select(2, heads).flatten(2)
            d_qkv, d_norms = pull_core(grad)
            assert d_qkv is not None
            width = sum(self.projection.outs)
            part = torch.arange(width, device=grad.device).view(3, self.heads, -1).index_select(1, heads).flatten()
            dx, found = self._project_back(at, part, at.x, d_qkv.flatten(2))
            full = (None if g is None else g.new_zeros(width, *g.shape[1:]).index_copy(0, part, g) for g in found)
            return dx, (*full, *d_norms, None)

        return None, pull

    def _project_back(
        self, at: Point, part: slice | Tensor, x: Tensor | None, grad: Tensor
    ) -> tuple[Tensor | None, tuple[Tensor | None, ...]]:
        """The backward of some output channels of the projection, at input rows `x`."""
        given = tuple(t[part] for t in self.split_tensors(at.tensors)[0])
        layer = Linear((grad.shape[-1],), self.projection.biases)
        return layer.backward(x, given, self.split_tensors(at.needs)[0], grad, at.need_input)

    def needs_input(self, needs: tuple[bool, ...], redo: bool) -> bool:
        return redo or self.projection.needs_input(self.split_tensors(needs)[0], redo)

    @property
    def writes_all(self) -> bool:  # type: ignore[override]
        return self.method == "head"

    def redoable(self, reduced: bool) -> bool:
        return not reduced and self.method != "head"

    def width(self, width: int) -> int:
        return sum(self.projection.outs) // 3

    def saved_width(self, width: int) -> int:
        normed = 2 * self.width(width) if self.q_norm else 0
        return width + sum(self.projection.outs) + normed

    def extra_width(self, width: int, keep_ratio: float) -> float:
        share = (keep_ratio + 2) / 3 if self.method == "query" else keep_ratio
        return sum(self.projection.outs) * share


def self_attention(
    heads: int,
    projection: Link,
    q_norm: Link | None = None,
    k_norm: Link | None = None,
    method: str = "qkv",
    kept_heads: Tensor | None = None,
) -> Link:
    """A `SelfAttention` stage from its projection (to q, k, v), its norms of q and k, and its drop method."""
    stage, tensors = projection
    assert isinstance(stage, Linear)
    norms = [(None, ()) if norm is None else (norm[0].fn, norm[1]) for norm in (q_norm, k_norm)]  # type: ignore[attr-defined]
    counts = (len(tensors), len(norms[0][1]), len(norms[1][1]))
    whole = SelfAttention(heads, method, stage, norms[0][0], norms[1][0], counts)
    picked = () if kept_heads is None else (kept_heads,)
    return whole, (*tensors, *norms[0][1], *norms[1][1], *picked)
