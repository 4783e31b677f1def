"""The slow, obvious reference for whole models: the model's own code, reduced from outside.

The model runs twice, unpatched, under plain autograd. The first run notes the exact values at the ends of every branch and
around its linear layers. In the second, hooks at the entrance of a branch put the slot of each group in the place of its
picked position, the softmax of attention sees kept keys only (a key that stands for m positions counts m times), and
hooks at the exit of the branch lay the result out over the positions. Wherever the engine would have saved a value,
the exact one takes its place while the gradient stays that of the graph. Rotary positions, biases and windows need no word:
kept rows stay where they were.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from conftest import draw, groups_of
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from keepgrad import Layout
from keepgrad.ops.oracle import Matrices, graft, matrices
from keepgrad.sampling import hashed, slot_count


@dataclass
class Branch:
    """Where a branch of a block begins and ends, by the names of modules in the block ("" is the block itself).

    `form` is that of the entrance's input: rows "nlc", maps "nhwc" or "nchw". `layout` is that of the positions, or a function of
    the input's shape. `last` are the names of the linear layers whose output the engine does not save, and `out` that of
    the layer after the attention. `query` are the names of the layers that make q; for a joint one of q, k and v it is that.
    """

    entrance: str
    exit: str
    layout: Layout | Callable[[torch.Size], Layout]
    form: str = "nlc"
    last: tuple[str, ...] = ()
    out: str = ""
    query: str = ""
    heads: int = 0


@dataclass
class _Run:
    """What is known of a branch while it runs."""

    spec: Branch
    site: object
    module: nn.Module
    reduction: Matrices | None = None
    pick: Tensor | None = None  # [slots, positions], where each slot stands
    positions: int = 0
    exact: list = field(default_factory=list)  # of the first run, in the order in which the second asks for it

    def weight(self, name: str) -> Tensor | None:
        return getattr(self.module.get_submodule(name), "weight", None) if name else None


def _rows(x: Tensor, form: str) -> Tensor:
    return {"nlc": lambda: x, "nhwc": lambda: x.flatten(1, 2), "nchw": lambda: x.flatten(2).transpose(1, 2)}[form]()


def _like(rows: Tensor, x: Tensor, form: str) -> Tensor:
    if form == "nchw":
        return rows.transpose(1, 2).unflatten(2, x.shape[2:])
    return rows if form == "nlc" else rows.unflatten(1, x.shape[1:3])


class _Reduced(TorchFunctionMode):
    """Changes what torch's functions do inside of the branch that runs at present."""

    def __init__(self, runs: list[_Run], seed: int, save: str, first: bool) -> None:
        super().__init__()
        self.first, self.seed, self.save = first, seed, save
        self.now: list[_Run] = []
        self.hooks = []
        for run in runs:
            entrance, exit_ = (run.module.get_submodule(name) for name in (run.spec.entrance, run.spec.exit))
            self.hooks.append(entrance.register_forward_pre_hook(lambda m, args, run=run: self.enter(run, args)))
            self.hooks.append(exit_.register_forward_hook(lambda m, args, out, run=run: self.leave(run, out)))

    def enter(self, run: _Run, args: tuple) -> tuple | None:
        x, form, site = args[0], run.spec.form, run.site
        self.now.append(run)
        rows = _rows(x, form)
        layout = run.spec.layout if isinstance(run.spec.layout, Layout) else run.spec.layout(x.shape)
        run.positions = rows.shape[1]
        assert layout.positions == run.positions, (site.name, site.kind, layout, x.shape)
        kept = draw(self.seed, layout._replace(cell=site.cell), site.keep_ratio, site.mask, site.reduce)
        if self.first or kept is None:
            return None
        run.reduction = matrices(groups_of(kept), kept.picked.tolist(), run.positions, site.reduce, layout.prefix)
        run.pick = F.one_hot(kept.picked, run.positions).double()
        if site.method in ("query", "head"):
            return None
        return (_like(self.slots_in_place(run, rows), x, form), *args[1:])

    def leave(self, run: _Run, out):
        value = out[0] if isinstance(out, tuple) else out
        form = run.spec.form if run.spec.form != "nlc" or value.dim() == 3 else "nhwc"
        if self.now and self.now[-1] is run:
            self.now.pop()
        if self.first:
            run.exact.append(value.detach())
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
        kept = run.pick.sum(0).unsqueeze(-1)
        return run.pick.t() @ run.reduction.slots(rows) + rows.detach() * (1 - kept)

    def saved(self, run: _Run, value: Tensor) -> Tensor:
        """A value in which the exact one of the first run stands for each slot."""
        rows = _rows(value, run.spec.form if value.dim() == 4 else "nlc")
        if self.first:
            run.exact.append(rows.detach())
            return value
        exact, kept = run.exact.pop(0), run.pick.sum(0).unsqueeze(-1)
        slots = run.pick.t() @ (run.reduction.value @ exact)
        return graft((slots + exact * (1 - kept)).view_as(value), value)

    def key_bias(self, run: _Run, scores: int) -> Tensor | None:
        """What is added to the scores of every key."""
        site = run.site
        if self.first or site.keep_ratio == 1 or site.method != "qkv" or scores != run.positions:
            return None
        return (run.pick.t() @ run.reduction.size).log()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        run = self.now[-1] if self.now else None
        if run is None:
            return func(*args, **kwargs)
        if func is F.linear:
            return self.linear(run, *args, **kwargs)
        if func in (F.softmax, torch.softmax, Tensor.softmax):
            bias = self.key_bias(run, args[0].shape[-1])
            return func(args[0] if bias is None else args[0] + bias, *args[1:], **kwargs)
        if func is F.scaled_dot_product_attention:
            q, k, v, *rest = args
            names = ("attn_mask", "dropout_p", "is_causal", "scale")
            kwargs = {**dict(zip(names, rest, strict=False)), **kwargs}
            bias = self.key_bias(run, k.shape[-2])
            if bias is not None:
                mask = kwargs.get("attn_mask")
                if kwargs.pop("is_causal", False):
                    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
                if mask is not None and mask.dtype == torch.bool:
                    mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
                kwargs["attn_mask"] = bias.expand(1, 1, 1, -1) if mask is None else mask + bias
            return func(q, k, v, **kwargs)
        return func(*args, **kwargs)

    def linear(self, run: _Run, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        spec, site = run.spec, run.site
        reduced = site.keep_ratio < 1
        if spec.out and weight is run.weight(spec.out) and reduced:
            x = self.saved(run, x)
            if site.method == "head" and not self.first:
                x = torch.where(self.live_heads(run, x), x, x.detach())
            return F.linear(x, weight, bias)
        if site.method == "query" and not self.first and weight is run.weight(spec.query):
            width = weight.shape[0] // 3 if spec.query.endswith(("qkv", "query_key_value")) else weight.shape[0]
            slots = self.slots_in_place(run, x)
            q = F.linear(slots, weight[:width], None if bias is None else bias[:width])
            rest = F.linear(x, weight[width:], None if bias is None else bias[width:])
            return torch.cat([q, rest], -1)
        out = F.linear(x, weight, bias)
        is_last = any(weight is run.weight(name) for name in spec.last)
        if self.save == "heavy" and not is_last and reduced and site.method in ("", "qkv"):
            out = self.saved(run, out)
        return out

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
    """The output of `forward`, which runs the model, with reduced gradients. `specs` has the branches by block class."""
    modules = dict(model.named_modules())
    runs = []
    for site in sites:
        module = modules[site.name]
        runs.append(_Run(specs[type(module).__name__][site.kind], site, module))
    with torch.no_grad(), _Reduced(runs, seed, save, first=True):
        forward()
    with _Reduced(runs, seed, save, first=False):
        out = forward()
    assert not any(run.exact for run in runs)
    return out
