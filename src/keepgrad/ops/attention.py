"""Self-attention with an exact forward and a backward among the kept rows.

Shapes: the input is `[batch, n, in]`. The projection makes the sections q, k, v (and a gate), side by side in one
tensor `[batch, n, sum of sections]`. The output is `[batch, n, heads * dim]`. k and v may have fewer heads than q.

In forward, every query attends to every key. Backward differentiates attention *among the kept rows*: its softmax runs
over the kept keys, so the probabilities sum to one again. The exact probabilities of the kept keys alone would not,
because the share of the dropped keys would be missing. If a slot stands for m positions, `log m` is added to the scores
of its key. All this is autograd's own backward of `F.scaled_dot_product_attention` on the kept rows. So it works on
every device and backend, costs `keep_ratio ** 2` of the exact backward, and stores no attention matrix.

A `Core` holds what differs between models: what is done to q and k before the product (norms, rotary positions), what
is added to the scores (masks, learned biases), the scale, a gate. Each of these functions is told which positions
and heads its rows belong to (`Places`). So it works on slots as on all rows, and autograd can differentiate it there.

| method | backward of                         | saves (of the input; of q, k, v; of the output)            |
| ---    | ---                                 | ---                                                        |
| qkv    | kept queries, over the kept keys    | kept rows; kept rows; kept rows                            |
| query  | kept queries, over all keys         | all rows; kept rows of q, all of k and v; kept rows        |
| head   | kept heads, at all positions        | all rows; kept heads; all rows                             |

With save="input" q, k and v are redone from the saved input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..sampling import Kept
from .stages import Linear, Parallel, Point, Pull, Stage, Tensors, cast, partial_vjp

__all__ = ["METHODS", "Core", "Part", "Places", "SelfAttention", "add_dense", "rotate", "row_norm"]

METHODS = ("qkv", "query", "head", "off")


class Places(NamedTuple):
    """The positions and heads that some rows belong to. None means all of them, in order.

    `positions` is `[n]`, the same for all samples, or `[batch, n]`.
    """

    positions: Tensor | None = None
    heads: Tensor | None = None

    def pick(self, table: Tensor, dim: int) -> Tensor:
        """The entries of `table` for these positions along `dim`. A size of 1 means one entry for all positions."""
        if self.positions is None or table.shape[dim] == 1:
            return table
        if self.positions.dim() == 2:
            return self._pick_of_each(table, dim)
        return table.index_select(dim, self.positions)

    def _pick_of_each(self, table: Tensor, dim: int) -> Tensor:
        """The entries of `table` if each sample has its own positions.

        The table has up to four dimensions; if it has four, the first one is the batch.
        """
        assert self.positions is not None
        batch, count = self.positions.shape
        table = table.view(*(1,) * (4 - table.dim()), *table.shape)
        table = table.expand(batch, *table.shape[1:])
        shape = [1] * 4
        shape[0], shape[dim] = batch, count
        index = self.positions.view(shape)
        return table.take_along_dim(index, dim)

    def pick_heads(self, table: Tensor, dim: int) -> Tensor:
        """The entries of `table` for these heads along `dim`. A size of 1 means one entry for all heads."""
        if self.heads is None or table.shape[dim] == 1:
            return table
        return table.index_select(dim, self.heads)


class Part(NamedTuple):
    """A function inside attention, and how many tensors it takes after its other arguments."""

    fn: Callable[..., Tensor]
    tensors: int = 0


@dataclass(frozen=True)
class Core:
    """What attention does with q, k and v.

    The tensors of all parts come in this order: turn, q_parts, k_parts, biases, out_parts.

    Attributes:
        heads: the number of heads of q.
        kv_heads: the number of heads of k and v.
        sections: how many channels q, k, v and the gate (if any) have.
        scale: the factor of the scores; None for torch's default.
        causal: whether a query sees only keys at its own and earlier positions.
        turn: a function `(rows, places, *tensors)`, applied with the same tensors to q and to k, after their parts. It
            is for rotary positions.
        q_parts: functions `(rows, places, *tensors)` that are applied to q, `[batch, heads, n, dim]`.
        k_parts: the same for k.
        biases: functions `(q, places of q, places of k, *tensors)`. Each returns a tensor that is added to the scores,
            or a boolean mask that is True where a query may see a key. Both are broadcast to `[batch, heads, n, n]`.
        out_parts: functions `(rows, places, *tensors)` that are applied to the output, `[batch, n, heads * dim]`.
        gate: a function of the gate's rows. The output is multiplied with its result.
    """

    heads: int
    kv_heads: int
    sections: tuple[int, ...]
    scale: float | None = None
    causal: bool = False
    turn: Part | None = None
    q_parts: tuple[Part, ...] = ()
    k_parts: tuple[Part, ...] = ()
    biases: tuple[Part, ...] = ()
    out_parts: tuple[Part, ...] = ()
    gate: Callable[[Tensor], Tensor] | None = None

    def __call__(
        self,
        rows: Sequence[Tensor],
        tensors: Tensors,
        q_at: Places = Places(),  # noqa: B008
        k_at: Places = Places(),  # noqa: B008
        key_bias: Tensor | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """Attention of q, k, v and the gate, given as `rows` `[batch, n, heads * dim]` each.

        `key_bias` is added to the scores. If it is given, it must also contain the causal mask, if there is one.

        Returns:
            Rows `[batch, n, heads * dim]`.
        """
        gate = None if self.gate is None else rows[3]
        q, k, v = self.split_heads(rows, q_at)
        return self._attend_heads(q, k, v, gate, tensors, q_at, k_at, key_bias, dropout)

    def of_joint(
        self,
        qkv: Tensor,
        tensors: Tensors,
        at: Places = Places(),  # noqa: B008
        key_bias: Tensor | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """The same for one tensor `[batch, n, sum of sections]` that holds all sections."""
        q, k, v = self.joint_heads(qkv)
        if self.is_bare:
            return self.join_heads(self.attend(q, k, v, (), key_bias, dropout))
        gate = None if self.gate is None else qkv[..., sum(self.sections[:3]) :]
        return self._attend_heads(q, k, v, gate, tensors, at, at, key_bias, dropout)

    def _attend_heads(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gate: Tensor | None,
        tensors: Tensors,
        q_at: Places,
        k_at: Places,
        key_bias: Tensor | None,
        dropout: float,
    ) -> Tensor:
        given = tensors
        if self.turn is not None:
            turned, given = tensors[: self.turn.tensors], tensors[self.turn.tensors :]
        q, given = _through(self.q_parts, q, q_at, given)
        k, given = _through(self.k_parts, k, k_at, given)
        if self.turn is not None:
            q, k = self.turn.fn(q, q_at, *turned), self.turn.fn(k, k_at, *turned)
        added = []
        for part in self.biases:
            added.append(part.fn(q, q_at, k_at, *given[: part.tensors]))
            given = given[part.tensors :]
        out = self.join_heads(self.attend(q, k, v, added, key_bias, dropout))
        out, _ = _through(self.out_parts, out, q_at, given)
        return out if self.gate is None or gate is None else out * self.gate(gate)

    @property
    def is_bare(self) -> bool:
        """True if there is nothing but scores, softmax and the product with the values: no parts and no gate."""
        return not (self.turn or self.q_parts or self.k_parts or self.biases or self.out_parts or self.gate)

    def joint_heads(self, qkv: Tensor) -> Sequence[Tensor]:
        """q, k and v as `[batch, heads, n, dim]`, from one tensor that holds all sections."""
        sections = self.sections
        if len(sections) == 3 and sections[0] == sections[1] == sections[2] and self.heads == self.kv_heads:
            batch, count, width = qkv.shape
            parts = qkv.view(batch, count, 3, self.heads, width // (3 * self.heads))
            return parts.permute(2, 0, 3, 1, 4).unbind(0)
        return self.split_heads(qkv.split(sections, -1), Places())

    def split_heads(self, rows: Sequence[Tensor], at: Places) -> list[Tensor]:
        """Rows `[batch, n, heads * dim]` of q, k and v as `[batch, heads, n, dim]`."""
        count = None if at.heads is None else len(at.heads)
        numbers = (count or self.heads, count or self.kv_heads, count or self.kv_heads)
        return [
            one.view(*one.shape[:2], number, one.shape[2] // number).transpose(1, 2)
            for one, number in zip(rows, numbers, strict=False)
        ]

    @staticmethod
    def join_heads(out: Tensor) -> Tensor:
        batch, heads, count, dim = out.shape
        return out.transpose(1, 2).reshape(batch, count, heads * dim)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        added: Sequence[Tensor] = (),
        key_bias: Tensor | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """Softmax of the scores plus all tensors in `added`, times the values."""
        if key_bias is not None:
            added = [*added, key_bias]
        elif self.causal and added:
            added = [*added, torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()]
        is_causal = self.causal and not added
        mask = None if not added else added[0] if len(added) == 1 else sum(_added(one, q.dtype) for one in added)
        return attend(q, k, v, mask, dropout, is_causal, self.scale, q.shape[1] != k.shape[1])


def _through(parts: tuple[Part, ...], rows: Tensor, at: Places, tensors: Tensors) -> tuple[Tensor, Tensors]:
    """Apply parts to rows. Returns the rows, and the tensors that the parts did not use."""
    for part in parts:
        rows = part.fn(rows, at, *tensors[: part.tensors])
        tensors = tensors[part.tensors :]
    return rows, tensors


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as numbers to add to the scores: a boolean one becomes 0 where it is True and -inf elsewhere."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else mask


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    dropout: float,
    is_causal: bool,
    scale: float | None,
    grouped: bool,
) -> Tensor:
    """torch's attention, for any dtype of mask. On the meta device it saves what the fused kernels would save."""
    if mask is not None:
        mask = mask.to(q.dtype) if mask.dtype not in (torch.bool, q.dtype) else mask
        mask = mask.view(*(1,) * (4 - mask.dim()), *mask.shape)
    if q.device.type == "meta":
        return _OnMeta.apply(q, k, v, mask)
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal, scale=scale, enable_gqa=grouped)


class _OnMeta(torch.autograd.Function):
    """Attention on the meta device, which saves as much as a fused kernel.

    torch's own runs as matmuls and a softmax there, which would save the attention matrix.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        batch, heads, count, _ = q.shape
        out = q.new_empty(batch, count, heads, v.shape[-1]).transpose(1, 2)
        ctx.save_for_backward(q, k, v, out)
        ctx.mask_shape = None if mask is None or not ctx.needs_input_grad[3] else mask.shape
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        q, k, v, _ = ctx.saved_tensors
        d_mask = None if ctx.mask_shape is None else grad.new_empty(ctx.mask_shape)
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), d_mask


def row_norm(fn: Callable[..., Tensor], tensors: int) -> Part:
    """A part for a norm of each head's channels, or for any other function of each row."""
    return Part(lambda rows, places, *given: fn(rows, *given), tensors)


def rotate(half: bool) -> Part:
    """A part for rotary positions. Tensors: sine and cosine, `[n, dim]`, or with dimensions for batch and heads first.

    Channels are rotated in pairs. With `half`, channel i is paired with channel i + dim / 2; otherwise neighbours are
    paired (0 with 1, 2 with 3).
    """

    def fn(rows: Tensor, places: Places, sin: Tensor, cos: Tensor) -> Tensor:
        sin, cos = places.pick(sin, -2), places.pick(cos, -2)
        if sin.dim() > 2:
            sin, cos = places.pick_heads(sin, -3), places.pick_heads(cos, -3)
        if half:
            first, second = rows.chunk(2, -1)
            turned = torch.cat([-second, first], -1)
        else:
            turned = torch.stack([-rows[..., 1::2], rows[..., ::2]], -1).flatten(-2)
        return (rows * cos + turned * sin).to(rows.dtype)

    return Part(fn, 2)


def add_dense() -> Part:
    """A part that adds a bias or a mask to the scores. Tensors: one, `[n, n]`, or with batch and heads first.

    If its batch is smaller than that of q, it is repeated. For example, it may hold one mask for each window of an
    image, while q holds the windows of several images.
    """

    def fn(q: Tensor, q_at: Places, k_at: Places, bias: Tensor) -> Tensor:
        bias = k_at.pick(q_at.pick(bias, -2), -1)
        if bias.dim() == 4 and bias.shape[0] not in (1, q.shape[0]):
            bias = bias.repeat(q.shape[0] // bias.shape[0], 1, 1, 1)
        return q_at.pick_heads(bias, -3) if bias.dim() > 2 else bias

    return Part(fn, 1)


@dataclass(frozen=True)
class SelfAttention(Stage):
    """The projection to q, k and v and the attention itself, as one stage.

    Tensors: `counts[0]` of the projection, then `counts[1]` of the core. With the `head` method, the last one holds the
    indices of the kept heads.
    """

    method: str
    projection: Stage
    core: Core
    counts: tuple[int, int]
    heavy = True
    casts = True
    makes_new = True
    redoes_output = True

    @property
    def reads_all(self) -> bool:  # type: ignore[override]
        return self.method != "qkv"

    def split_tensors(self, tensors: tuple) -> tuple[tuple, tuple]:
        """The tensors of the projection, and those of the core."""
        first, second = self.counts[0], sum(self.counts)
        return tensors[:first], tensors[first:second]

    def sections(self, qkv: Tensor) -> tuple[Tensor, ...]:
        return qkv.split(self.core.sections, -1)

    def forward(self, x: Tensor, tensors: Tensors, kept: Kept | None, keep_extras: bool) -> tuple[Tensor, Tensors]:
        projection, core = self.split_tensors(tensors)
        qkv, drawn = self.projection.forward(x, projection, kept, False)
        out = self.core.of_joint(qkv, core)
        if not keep_extras:
            return out, drawn
        return out, (*drawn, *self._rows(qkv, tensors, kept))

    @property
    def noises(self) -> int:  # type: ignore[override]
        return self.projection.noises

    def _rows(self, qkv: Tensor, tensors: Tensors, kept: Kept | None) -> Tensors:
        """The part of q, k, v and the gate that backward needs."""
        if self.method == "head":
            return tuple(self._pick_heads(one, tensors[-1]) for one in self.sections(qkv))
        if kept is None:
            return (qkv,)
        if self.method == "qkv":
            return (kept.gather(qkv),)
        q, keys, values, *gate = self.core.sections
        slots = [kept.gather(qkv[..., :q]), *(kept.gather(qkv[..., -one:]) for one in gate)]
        return slots[0], qkv[..., q : q + keys + values].contiguous(), *slots[1:]

    def _pick_heads(self, rows: Tensor, heads: Tensor) -> Tensor:
        return rows.unflatten(-1, (self.core.heads, -1)).index_select(-2, heads).flatten(-2)

    def vjp(self, at: Point) -> tuple[Tensor | None, Pull]:
        drawn, rows = at.extras[: self.noises], at.extras[self.noises :]
        if not rows:
            assert at.x is not None
            qkv = self.projection.redo(at.x, self.split_tensors(at.tensors)[0], drawn)
            rows = (qkv,) if self.method == "qkv" else self._rows(qkv, at.tensors, at.kept)
        if self.method == "head":
            return self._vjp_heads(at, rows)
        if self.method == "query" and at.kept is not None:
            return self._vjp_queries(at, at.kept, rows)
        return self._vjp_rows(at, rows[0], drawn)

    def _vjp_rows(self, at: Point, qkv: Tensor, drawn: Tensors) -> tuple[Tensor, Pull]:
        projection, tensors = self.split_tensors(at.tensors)
        projection_needs, needs = self.split_tensors(at.needs)
        out, pull_core = self.vjp_core(qkv, tensors, needs, at.kept)

        def pull(grad: Tensor) -> tuple[Tensor | None, tuple[Tensor | None, ...]]:
            d_qkv, d_core = pull_core(grad)
            assert d_qkv is not None
            where = Point(at.x, projection, projection_needs, drawn, None, False, at.need_input)
            dx, found = self.projection.vjp(where)[1](d_qkv)
            return dx, (*found, *d_core)

        return out, pull

    def vjp_core(
        self, qkv: Tensor, tensors: Tensors, needs: tuple[bool, ...], kept: Kept | None
    ) -> tuple[Tensor, Pull]:
        """Attention among the slots, and its pull-back to q, k, v and the tensors of the core."""
        if kept is None:
            return self._vjp_core(qkv, tensors, needs, Places(), None)
        key_bias = kept.causal_bias(qkv.dtype) if self.core.causal else kept.key_bias(qkv.dtype)
        return self._vjp_core(qkv, tensors, needs, Places(kept.picked), key_bias)

    def _vjp_core(
        self, qkv: Tensor, tensors: Tensors, needs: tuple[bool, ...], places: Places, key_bias: Tensor | None
    ) -> tuple[Tensor, Pull]:
        if torch.compiler.is_compiling() or not self.core.is_bare:

            def core(qkv: Tensor, *tensors: Tensor) -> Tensor:
                return self.core.of_joint(qkv, tensors, places, key_bias)

            return partial_vjp(core, qkv, tensors, needs)
        # Keep the autograd graph small: each of its nodes costs as much as a small kernel.
        q, k, v = leaves = [t.detach().requires_grad_() for t in self.core.joint_heads(qkv)]
        with torch.enable_grad():
            graph = self.core.attend(q, k, v, key_bias=key_bias)

        def pull(grad: Tensor) -> tuple[Tensor, tuple[Tensor | None, ...]]:
            (grad,) = self.core.split_heads([cast(grad, graph.dtype)], places)
            found = torch.autograd.grad(graph, leaves, grad)
            return torch.cat([self.core.join_heads(one) for one in found], -1), ()

        return self.core.join_heads(graph.detach()), pull

    def _vjp_queries(self, at: Point, kept: Kept, rows: Tensors) -> tuple[Tensor, Pull]:
        tensors, needs = self.split_tensors(at.tensors)[1], self.split_tensors(at.needs)[1]
        key_bias, others, edges = None, len(rows) - 1, _edges(self.core.sections)
        if self.core.causal:
            key_bias = kept.picked.unsqueeze(1) >= torch.arange(kept.positions, device=kept.picked.device)

        def core(q: Tensor, kv: Tensor, *given: Tensor) -> Tensor:
            keys_and_values = kv.split(self.core.sections[1:3], -1)
            gate, own = given[: others - 1], given[others - 1 :]
            return self.core((q, *keys_and_values, *gate), own, Places(kept.picked), Places(), key_bias)

        out, pull_core = partial_vjp(core, rows[0], (*rows[1:], *tensors), ((True,) * others + needs))

        def pull(grad: Tensor) -> tuple[Tensor | None, tuple[Tensor | None, ...]]:
            dq, found = pull_core(grad)
            d_kv: Any = found[0]
            first, last = edges[1][0], edges[2][1]
            if isinstance(self.projection, Linear):  # one matmul for k and v together
                jobs = [_Job(first, last, None, d_kv, False)]
            else:
                parts = zip(edges[1:3], d_kv.split(self.core.sections[1:3], -1), strict=True)
                jobs = [_Job(*edge, None, d, False) for edge, d in parts]
            gates = zip(edges[3:], found[1:others], strict=True)
            jobs = [_Job(*edges[0], None, dq, True), *jobs, *(_Job(*edge, None, d, True) for edge, d in gates)]
            dx, given = self._project_back(at, kept, jobs)
            return dx, (*given, *found[others:])

        return out, pull

    def _vjp_heads(self, at: Point, rows: Tensors) -> tuple[None, Pull]:
        tensors, needs = self.split_tensors(at.tensors)[1], self.split_tensors(at.needs)[1]
        heads, others = at.tensors[-1], len(rows) - 1
        places = Places(heads=heads)

        def core(q: Tensor, *given: Tensor) -> Tensor:
            return self.core((q, *given[:others]), given[others:], places, places)

        _, pull_core = partial_vjp(core, rows[0], (*rows[1:], *tensors), ((True,) * others + needs))

        def pull(grad: Tensor) -> tuple[Tensor | None, tuple[Tensor | None, ...]]:
            dq, found = pull_core(self._pick_heads(grad, heads))
            jobs = []
            for (start, stop), d in zip(_edges(self.core.sections), (dq, *found[:others]), strict=True):
                channels = torch.arange(stop - start, device=grad.device).view(self.core.heads, -1)
                jobs.append(_Job(start, stop, channels.index_select(0, heads).flatten(), d, False))
            dx, given = self._project_back(at, None, jobs)
            return dx, (*given, *found[others:], None)

        return None, pull

    def _project_back(
        self, at: Point, kept: Kept | None, jobs: Sequence[_Job]
    ) -> tuple[Tensor | None, tuple[Tensor | None, ...]]:
        """The backward of the projection; each job is done for some of its output channels."""
        layers = self._layers(*(self.split_tensors(given)[0] for given in (at.tensors, at.needs)))
        x_slots = None if at.x is None or kept is None else kept.gather(at.x)
        pieces: list[list[tuple[Any, tuple[Tensor | None, ...]]]] = [[] for _ in layers]
        sums: dict[bool, Tensor | None] = {True: None, False: None}
        for job in jobs:
            number = next(i for i, layer in enumerate(layers) if layer.start <= job.start < layer.stop)
            layer, shift = layers[number], job.start - layers[number].start
            own = slice(shift, job.stop - layer.start) if job.channels is None else job.channels + shift
            cut = tuple(t[own] for t in layer.tensors)
            x = x_slots if job.is_slots else at.x
            dx, found = layer.stage.backward(x, cut, layer.needs, job.grad, at.need_input)
            pieces[number].append((own, found))
            before = sums[job.is_slots]
            sums[job.is_slots] = dx if before is None or dx is None else before + dx
        grads = [_put_together(layer.tensors, some) for layer, some in zip(layers, pieces, strict=True)]
        dx, slots = sums[False], sums[True]
        if slots is not None:
            assert kept is not None
            dx = kept.give_back(slots, dx)
        return dx, tuple(g for group in grads for g in group)

    def _layers(self, tensors: tuple, needs: tuple) -> list[_Layer]:
        """The linear layers of the projection."""
        if isinstance(self.projection, Linear):
            return [_Layer(self.projection, tensors, needs, 0, sum(self.core.sections))]
        assert isinstance(self.projection, Parallel)
        groups = zip(self.projection.split(tensors), self.projection.split(needs), strict=True)
        stages: Any = self.projection.stages
        edges = _edges(self.projection.widths)
        return [_Layer(stage, *group, *edge) for stage, group, edge in zip(stages, groups, edges, strict=True)]

    def needs_input(self, needs: tuple[bool, ...], redo: bool) -> bool:
        return redo or self.projection.needs_input(self.split_tensors(needs)[0], redo)

    def redoable(self, reduced: bool) -> bool:
        return not reduced and self.method != "head"


def _put_together(
    tensors: Tensors, pieces: Sequence[tuple[Any, tuple[Tensor | None, ...]]]
) -> tuple[Tensor | None, ...]:
    """The gradients of whole tensors, put together from pieces: pairs of some rows and the gradients of these rows.

    If the rows of all pieces are slices, they follow one another and cover the tensor. Otherwise rows that are in no
    piece get zeros.
    """
    whole: list[Tensor | None] = []
    for i, tensor in enumerate(tensors):
        parts = [found[i] for _, found in pieces]
        given = [one for one in parts if one is not None]
        if not given:
            whole.append(None)
        elif all(isinstance(own, slice) for own, _ in pieces):
            whole.append(given[0] if len(given) == 1 else torch.cat(given))
        else:
            grad = given[0].new_zeros(tensor.shape)
            for (own, _), part in zip(pieces, given, strict=True):
                grad[own] = part
            whole.append(grad)
    return tuple(whole)


def _edges(widths: Sequence[int]) -> list[tuple[int, int]]:
    edges, start = [], 0
    for width in widths:
        edges.append((start, start + width))
        start += width
    return edges


class _Job(NamedTuple):
    """Some output channels of the projection and their gradient.

    These are the channels from `start` to `stop`, or only `channels` of them, counted from `start`. `is_slots` says
    that the gradient is for slots and not for all positions.
    """

    start: int
    stop: int
    channels: Tensor | None
    grad: Any
    is_slots: bool


class _Layer(NamedTuple):
    """A linear layer of the projection. It makes the output channels from `start` to `stop`."""

    stage: Linear
    tensors: Tensors
    needs: tuple[bool, ...]
    start: int
    stop: int
