"""The slow, obvious reference for whole models: the model's own code, reduced from outside.

The model runs twice, unpatched, under plain autograd. The first run notes the exact values at the ends of every branch
and around its linear layers. In the second, hooks at the entrance of a branch put the slot of each group in the place
of its picked position, the softmax of attention sees kept keys only (a key that stands for m positions counts m times),
and hooks at the exit of the branch lay the result out over the positions. Wherever the engine would have saved a value,
the exact one takes its place while the gradient stays that of the graph. Rotary positions, biases and windows need no
word: kept rows stay where they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from conftest import draw, groups_of
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from keepgrad import Layout
from keepgrad.ops.oracle import Matrices, graft, matrices
from keepgrad.padding import PaddedKept, sample_padded
from keepgrad.sampling import hashed, slot_count


@dataclass
class Branch:
    """Where a branch of a block begins and ends, by the names of modules in the block ("" is the block itself).

    `form` is that of the entrance's input (see `FORMS`), `exit_form` that of the exit's output, if another. `layout` is
    that of the positions, or a function of the input's shape. `last` are the names of the linear layers whose output
    the engine does not save, and `out` that of what follows the attention, a linear layer or a norm. `query` is the
    name of the layer that makes q; for a joint one of q, k and v it is that. `gate` is the name of a layer that makes a
    gate for the output.
    """

    entrance: str
    exit: str
    layout: Layout | Callable[[torch.Size], Layout]
    form: str = "nlc"
    last: tuple[str, ...] = ()
    out: str = ""
    query: str = ""
    gate: str = ""
    heads: int = 0
    exit_form: str = ""
    functional: bool = False  # entrance and exit are linear layers whose weights are read, and which are not called
    real: Tensor | None = None  # [batch, positions], which are not padding


@dataclass
class _Run:
    """What is known of a branch while it runs."""

    spec: Branch
    site: object
    module: nn.Module
    reduction: Matrices | None = None
    pick: Tensor | None = None  # [slots, positions], where each slot stands, or with padding one for each sample
    positions: int = 0
    exact: list = field(default_factory=list)  # of the first run, in the order in which the second asks for it

    def weight(self, name: str) -> Tensor | None:
        module = self.module.get_submodule(name)
        return getattr(module, "weight", getattr(module, "in_proj_weight", None)) if name else None

    def has_weight(self, weight: Tensor, name: str) -> bool:
        """Whether `weight` is that of the module `name`, or a view of it."""
        own = self.weight(name)
        return own is not None and weight.data_ptr() == own.data_ptr()

    def form(self, value: Tensor) -> str:
        """The form of a value inside of the branch."""
        return self.spec.form if value.dim() > 3 or self.spec.form in ("lnc", "4 frames last") else "nlc"


JOINT = ("qkv", "query_key_value", "self_attention", "self_attn", "c_attn")
"""How the names of layers end that make q, k and v together."""


def _turned(x: Tensor, sizes: tuple[int, int]) -> Tensor:
    """Rows after a class token, taken as a table of these sizes, column by column."""
    return torch.cat([x[:, :1], x[:, 1:].unflatten(1, sizes).transpose(1, 2).flatten(1, 2)], 1)


FORMS = {
    "nlc": (lambda x: x, lambda rows, shape: rows),
    "lnc": (lambda x: x.transpose(0, 1), lambda rows, shape: rows.transpose(0, 1)),
    "nhwc": (lambda x: x.flatten(1, -2), lambda rows, shape: rows.unflatten(1, shape[1:-1])),  # of clips: "nthwc"
    "nchw": (lambda x: x.flatten(2).mT, lambda rows, shape: rows.mT.unflatten(2, shape[2:])),
    # Windows and the positions in each: as samples and positions, or both as positions, window by window or not.
    "windows": (lambda x: x.flatten(0, 1), lambda rows, shape: rows.unflatten(0, shape[:2])),
    "turned": (
        lambda x: x.transpose(1, 2).flatten(1, 2),
        lambda rows, shape: rows.unflatten(1, (shape[2], shape[1])).transpose(1, 2),
    ),
    # A class token, and for each place its four frames.
    "4 frames last": (lambda x: _turned(x, (-1, 4)), lambda rows, shape: _turned(rows, (4, -1))),
}
"""How values become rows `[batch, positions, channels]`, and rows values of a shape."""


def _rows(x: Tensor, form: str) -> Tensor:
    return FORMS[form][0](x)


def _like(rows: Tensor, x: Tensor, form: str) -> Tensor:
    return FORMS[form][1](rows, x.shape)


def padded_matrices(kept: PaddedKept, real: Tensor, reduce: str) -> tuple[Matrices, Tensor]:
    """The matrices of each sample of a padded batch, and where its slots stand. Slots that stand for nothing come last,
    as rows of zeros."""
    count, found, picks = real.shape[1], [], []
    for number, (one, picked) in enumerate(zip(real, kept.picked.tolist(), strict=True)):
        slots = kept.slot_of_flat.view_as(real)[number] - number * kept.slots
        groups = {slot: (slots.eq(slot) & one).nonzero().flatten().tolist() for slot in range(kept.slots)}
        live = [slot for slot in groups if one[picked[slot]]]
        assert all(picked[slot] in groups[slot] for slot in live)
        assert sorted(position for group in groups.values() for position in group) == one.nonzero().flatten().tolist()
        own = matrices([groups[slot] for slot in live], [picked[slot] for slot in live], count, reduce)
        if reduce == "scaled":  # of the positions that are real
            own = matrices([groups[slot] for slot in live], [picked[slot] for slot in live], count, "drop")
            own = replace(own, place=own.place * (int(one.sum()) / len(live)))
        dead = kept.slots - len(live)
        found.append((*(F.pad(m, (0, 0, 0, dead)) for m in (own.value, own.grad)), F.pad(own.place, (0, dead))))
        picks.append(F.pad(F.one_hot(torch.tensor([picked[slot] for slot in live]), count).double(), (0, 0, 0, dead)))
        found[-1] += (F.pad(own.size, (0, dead)),)
    return Matrices(*(torch.stack(some) for some in zip(*found, strict=True))), torch.stack(picks)


class _Reduced(TorchFunctionMode):
    """Changes what torch's functions do inside of the branch that runs at present."""

    def __init__(self, runs: list[_Run], seed: int, save: str, first: bool) -> None:
        super().__init__()
        self.first, self.seed, self.save = first, seed, save
        self.now: list[_Run] = []
        self.hooks = []
        self.functional = [run for run in runs if run.spec.functional]
        for run in runs:
            if run.spec.functional:
                continue
            entrance, exit_ = (run.module.get_submodule(name) for name in (run.spec.entrance, run.spec.exit))
            self.hooks.append(entrance.register_forward_pre_hook(lambda m, args, run=run: self.enter(run, args)))
            self.hooks.append(exit_.register_forward_hook(lambda m, args, out, run=run: self.leave(run, out)))
            out = run.module.get_submodule(run.spec.out)
            if run.spec.out and not isinstance(out, nn.Linear) and not hasattr(out, "nf"):  # nor a Conv1D
                hook = out.register_forward_pre_hook(lambda m, args, run=run: (self.attended(run, args[0]),))
                self.hooks.append(hook)

    def enter(self, run: _Run, args: tuple) -> tuple | None:
        x, form, site = args[0], run.spec.form, run.site
        self.now.append(run)
        rows = _rows(x, form)
        layout = run.spec.layout if isinstance(run.spec.layout, Layout) else run.spec.layout(x.shape)
        run.positions = rows.shape[1]
        assert layout.positions == run.positions, (site.name, site.kind, layout, x.shape)
        how = (site.keep_ratio, site.mask, site.reduce)
        if site.keep_ratio == 1:
            kept = None
        elif run.spec.real is None:
            kept = draw(self.seed, layout._replace(cell=site.cell), *how)
        else:
            kept = sample_padded(torch.tensor(self.seed), run.spec.real, *how)
        if self.first or kept is None:
            return None
        if run.spec.real is None:
            run.reduction = matrices(groups_of(kept), kept.picked.tolist(), run.positions, site.reduce, layout.prefix)
            run.pick = F.one_hot(kept.picked, run.positions).double()
        else:
            run.reduction, run.pick = padded_matrices(kept, run.spec.real, site.reduce)
        if site.method in ("query", "head"):
            return None
        return (_like(self.slots_in_place(run, rows), x, form), *args[1:])

    def leave(self, run: _Run, out):
        value = out[0] if isinstance(out, tuple) else out
        form = run.spec.exit_form or run.spec.form
        form = form if form != "nlc" or value.dim() == 3 else "nhwc"
        if not self.now or self.now[-1] is not run:
            return None  # the module is the exit of another branch too
        self.now.pop()
        if self.first:
            run.exact.append(value.detach().clone())  # the model may add to it in place
            return None
        exact = run.exact.pop(0)
        if run.site.keep_ratio == 1 or run.site.method == "head":
            return None
        picked = run.pick @ _rows(value, form)
        placed = _like(graft(_rows(exact, form), run.reduction.place @ picked), value, form)
        return (placed, *out[1:]) if isinstance(out, tuple) else placed

    @staticmethod
    def slots_in_place(run: _Run, rows: Tensor) -> Tensor:
        """Rows in which each picked position has its slot. The others do not count; they stay as they are."""
        kept = run.pick.sum(-2).unsqueeze(-1)
        return run.pick.mT @ run.reduction.slots(rows) + rows.detach() * (1 - kept)

    def saved(self, run: _Run, value: Tensor) -> Tensor:
        """A value in which the exact one of the first run stands for each slot."""
        rows = _rows(value, run.form(value))
        if self.first:
            run.exact.append(rows.detach())
            return value
        exact, kept = run.exact.pop(0), run.pick.sum(-2).unsqueeze(-1)
        slots = run.pick.mT @ (run.reduction.value @ exact)
        return graft(_like(slots + exact * (1 - kept), value, run.form(value)), value)

    def key_bias(self, run: _Run, scores: int) -> Tensor | None:
        """What is added to the scores of every key."""
        site = run.site
        if self.first or site.keep_ratio == 1 or site.method != "qkv" or scores != run.positions:
            return None
        bias = (run.pick.mT @ run.reduction.size.unsqueeze(-1)).squeeze(-1).log()
        if run.spec.form == "4 frames last":
            bias = _like(bias.view(1, -1, 1), bias, run.spec.form).flatten()
        return bias if bias.dim() == 1 else bias[:, None, None]

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        run = self.now[-1] if self.now else None
        if func is F.linear and self.functional:
            return self.functional_linear(*args, **kwargs)
        if run is None:
            return func(*args, **kwargs)
        if func is F.linear:
            return self.linear(run, *args, **kwargs)
        if func is torch.addmm:  # transformers' Conv1D, on rows of all samples
            bias, x, weight = args
            return self.linear(run, x.unflatten(0, (-1, run.positions)), weight.t(), bias).flatten(0, 1)
        if func in (F.softmax, torch.softmax, Tensor.softmax):
            bias = self.key_bias(run, args[0].shape[-1])
            # A query that is not kept may see no kept key: its row must not become a NaN.
            bias = None if bias is None else bias.clamp(min=-1e30)
            return func(args[0] if bias is None else args[0] + bias, *args[1:], **kwargs)
        if func is F.scaled_dot_product_attention:
            q, k, v, *rest = args
            names = ("attn_mask", "dropout_p", "is_causal", "scale")
            kwargs = {**dict(zip(names, rest, strict=False)), **kwargs}
            bias = self.key_bias(run, k.shape[-2])
            if bias is not None:
                mask = kwargs.get("attn_mask")
                if kwargs.pop("is_causal", False):  # as many members of a key's group count as are not after the query
                    members = run.reduction.place @ run.pick
                    mask, bias = (torch.ones_like(members).tril() @ members).log(), torch.zeros_like(bias)
                if mask is not None and mask.dtype == torch.bool:
                    mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
                bias = bias.view(*(1,) * (q.dim() - 1), -1) if bias.dim() == 1 else bias
                kwargs["attn_mask"] = bias if mask is None else mask + bias
            return func(q, k, v, **kwargs)
        if func is F.multi_head_attention_forward:
            return self.multi_head_attention(run, *args, **kwargs)
        if func in (Tensor.norm, torch.linalg.vector_norm):
            return self.norm(run, func, *args, **kwargs)
        return func(*args, **kwargs)

    def multi_head_attention(self, run: _Run, x: Tensor, *args, attn_mask, key_padding_mask, is_causal, **kwargs):
        """torch's function for `nn.MultiheadAttention`, in steps that can be seen; `x` is `[n, batch, channels]`."""
        _, _, _, heads, weight, bias, _, _, _, _, out_weight, out_bias = args
        rows_first = run.spec.form == "nlc"
        qkv = self.linear(run, x.transpose(0, 1) if rows_first else x, weight, bias)
        qkv = qkv if rows_first else qkv.transpose(0, 1)
        q, k, v = (one.unflatten(-1, (heads, -1)).transpose(1, 2) for one in qkv.chunk(3, -1))
        causal = is_causal and key_padding_mask is None
        mask = None if causal or attn_mask is None else attn_mask
        if mask is not None and mask.dim() == 3:
            mask = mask.unflatten(0, (-1, heads))
        if key_padding_mask is not None:
            mask = key_padding_mask[:, None, None] + (0 if mask is None else mask)
        with self.seen():
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        out = out.transpose(1, 2).flatten(2)
        out = self.linear(run, out if rows_first else out.transpose(0, 1), out_weight, out_bias)
        return (out.transpose(0, 1) if rows_first else out), None

    def norm(self, run: _Run, func: Callable[..., Tensor], x: Tensor, *args, **kwargs) -> Tensor:
        """The norms over positions of a global response norm: exact, with the gradient of the slots' norms."""
        exact = func(x, *args, **kwargs)
        if run.site.keep_ratio == 1:
            return exact
        if self.first:
            run.exact.append(exact.detach())
            return exact
        exact, slots = run.exact.pop(0), run.pick @ _rows(x, run.form(x))
        squares = (run.reduction.size[:, None] * slots.square()).sum(1).view_as(exact)
        return graft(exact.square(), squares).sqrt()

    @contextmanager
    def seen(self) -> Iterator[None]:
        """Inside of `__torch_function__`, functions are not seen by it; in this context they are."""
        super().__enter__()
        try:
            yield
        finally:
            super().__exit__(None, None, None)

    def functional_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """A linear layer that may be the entrance or the exit of a branch."""
        begins = next((run for run in self.functional if run.has_weight(weight, run.spec.entrance)), None)
        if begins is not None:
            changed = self.enter(begins, (x,))
            x = x if changed is None else changed[0]
        if not self.now:
            return F.linear(x, weight, bias)
        run = self.now[-1]
        out = self.linear(run, x, weight, bias)
        if run.spec.functional and run.has_weight(weight, run.spec.exit):
            changed = self.leave(run, out)
            out = out if changed is None else changed
        return out

    def linear(self, run: _Run, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        spec, site = run.spec, run.site
        reduced = site.keep_ratio < 1
        if spec.out and run.has_weight(weight, spec.out) and reduced:
            return F.linear(self.attended(run, x), weight, bias)
        if site.method == "query" and not self.first and run.has_weight(weight, spec.gate):
            return F.linear(self.slots_in_place(run, x), weight, bias)
        if site.method == "query" and not self.first and run.has_weight(weight, spec.query):
            width = weight.shape[0] // 3 if spec.query.endswith(JOINT) else weight.shape[0]
            slots = _like(self.slots_in_place(run, _rows(x, run.form(x))), x, run.form(x))
            q = F.linear(slots, weight[:width], None if bias is None else bias[:width])
            rest = F.linear(x, weight[width:], None if bias is None else bias[width:])
            return torch.cat([q, rest], -1)
        out = F.linear(x, weight, bias)
        is_last = any(run.has_weight(weight, name) for name in spec.last)
        if self.save == "heavy" and not is_last and reduced and site.method in ("", "qkv"):
            out = self.saved(run, out)
        return out

    def attended(self, run: _Run, x: Tensor) -> Tensor:
        """The output of the attention as the engine has it."""
        if run.site.keep_ratio == 1:
            return x
        x = self.saved(run, x)
        if run.site.method == "head" and not self.first:
            x = torch.where(self.live_heads(run, x), x, x.detach())
        return x

    def live_heads(self, run: _Run, x: Tensor) -> Tensor:
        heads = run.spec.heads
        chosen = hashed(torch.tensor(self.seed), 3, heads).argsort()[: slot_count(heads, run.site.keep_ratio)]
        live = torch.zeros(heads, dtype=torch.bool)
        live[chosen] = True
        return live.repeat_interleave(x.shape[-1] // heads)

    def __exit__(self, *error):
        super().__exit__(*error)
        for hook in self.hooks:
            hook.remove()


def reduced_model(model: nn.Module, forward: Callable[[], Tensor], specs: dict[str, dict], sites, seed: int, save: str):
    """The output of `forward`, which runs the model, with reduced gradients.

    `specs` has the branches by block class, or functions of the block to them.
    """
    modules = dict(model.named_modules())
    runs = []
    for site in sites:
        module = modules[site.name]
        spec = specs[type(module).__name__][site.kind]
        runs.append(_Run(spec if isinstance(spec, Branch) else spec(module), site, module))
    with torch.no_grad(), _Reduced(runs, seed, save, first=True):
        forward()
    with _Reduced(runs, seed, save, first=False):
        out = forward()
    assert not any(run.exact for run in runs)
    return out
