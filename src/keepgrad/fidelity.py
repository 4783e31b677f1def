"""How well kept gradients agree with exact ones: `fidelity` of one setting, `compare` of several.

Below, g is the exact gradient and g_k the gradient with draw k of the masks. Means are over all draws and batches.

| figure     | what it says                                    | definition                                          |
| ---        | ---                                             | ---                                                 |
| cosine     | in one step: how well the direction agrees      | mean of cos(g_k, g)                                 |
| norm_ratio | in one step: how well the length agrees         | mean of norm(g_k) / norm(g)                         |
| bias       | over many steps: the error that remains         | cos(mean g_k, mean g)                               |
| spread     | over many steps: the error that averages out    | rms of norm(g_k - mean of its batch) / rms norm(g)  |
| adam       | over many steps: how well Adam's update agrees  | cos(u_k, u), where u = mean(g) / sqrt(mean(g^2))    |

Adam gives small components the same weight as large ones. Bias hurts training more than spread of the same size. The
exact gradient comes from the model's own code with the same batch, parameters, dropout and drop path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ._torch import tree_leaves
from .calling import call, in_training
from .config import KeepConfig
from .errors import AlreadyAppliedError, ConfigError, InputError, NotAppliedError
from .memory import saved_bytes
from .patch import apply, block_names, draws_set_aside, exact, remove
from .plan import config_from
from .report import Report, Table, figures, readable_bytes

__all__ = ["Agreement", "Comparison", "FidelityReport", "Setting", "compare", "cost", "fidelity"]

Loss = Callable[..., Tensor]


@dataclass(frozen=True)
class Agreement:
    """How well the gradients of a group of parameters agree. NaN where the exact or the kept gradient is zero."""

    name: str
    size: int
    cosine: float
    norm_ratio: float
    bias: float
    spread: float
    adam: float

    def cells(self) -> tuple[str, ...]:
        figures = (self.cosine, self.norm_ratio, self.bias, self.spread, self.adam)
        return (self.name, *("-" if math.isnan(value) else f"{value:.4f}" for value in figures))


@dataclass(frozen=True)
class FidelityReport(Report):
    """Agreement with exact gradients: for all parameters together, for each layer and for each parameter."""

    whole: Agreement
    layers: tuple[Agreement, ...]
    parameters: tuple[Agreement, ...]
    draws: int
    batches: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def tables(self) -> list[Table]:
        head = ("layer", "cosine", "norm ratio", "bias", "spread", "adam")
        rows = [layer.cells() for layer in (*self.layers, self.whole)]
        title = f"Agreement with exact gradients; draws of the masks: {self.draws}, batches: {self.batches}"
        note = "bias: cosine of the mean gradient; spread: what averages out; adam: cosine of Adam's update"
        return [Table(title, head, rows, note)]

    def plot(self) -> Any:
        """Two panels over the layers: cosine, bias and adam above; norm ratio and spread below."""
        figure = figures().Figure(figsize=(max(6.0, 0.45 * len(self.layers) + 3), 5.5), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True)
        names = [layer.name for layer in self.layers]
        for figure_of, style in (("cosine", "o-"), ("bias", "s--"), ("adam", "^:")):
            above.plot(names, [getattr(layer, figure_of) for layer in self.layers], style, label=figure_of)
        above.set(ylabel="cosine", title=f"agreement with exact gradients; whole: {self.whole.cosine:.4f}")
        above.legend()
        above.grid(alpha=0.3)
        below.plot(names, [layer.norm_ratio for layer in self.layers], "o-", label="norm ratio")
        below.plot(names, [layer.spread for layer in self.layers], "x--", label="spread")
        below.axhline(1, color="grey", linewidth=0.8)
        below.set(ylabel="ratio")
        below.legend()
        below.grid(alpha=0.3)
        below.tick_params(axis="x", rotation=60)
        return figure


def fidelity(model: nn.Module, batch: Any, loss_fn: Loss, draws: int = 8) -> FidelityReport:
    """Compare the gradients of a patched model with exact ones.

    Parameters, gradients, buffers, random state and training mode stay as they were.

    Args:
        model: a model that `apply` patched.
        batch: `(inputs, targets)`, or a list of such pairs.
        loss_fn: takes the model's output and the targets, returns the loss, e.g. `torch.nn.functional.cross_entropy`.
        draws: how many times masks are drawn for each batch.

    Raises:
        NotAppliedError: if the model is not patched.
        InputError: if the batch or the number of draws is wrong, or all parameters are frozen.
    """
    if not block_names(model):
        raise NotAppliedError(
            f"this {type(model).__name__} is not patched, so its gradients are exact; "
            "call keepgrad.apply(model, ...) first, or keepgrad.compare(model, batch, loss_fn, configs)"
        )
    batches = _batches(batch)
    if isinstance(draws, bool) or not isinstance(draws, int) or draws < 1:
        raise InputError(f"draws={draws!r}: give a whole number, at least 1")
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not named:
        raise InputError("all parameters are frozen, so there is no gradient to compare")
    sums = {name: _Sums.zeros(p) for name, p in named.items()}
    with _undisturbed(model) as rewind:
        for number, (inputs, targets) in enumerate(batches):
            rewind()
            with exact(model):
                wanted = _gradient(model, inputs, targets, loss_fn, named)
            for draw in range(draws):
                rewind()
                with draws_set_aside(model, seed=number * draws + draw):
                    kept = _gradient(model, inputs, targets, loss_fn, named)
                for name, total in sums.items():
                    total.add_draw(kept[name], wanted[name])
            for total in sums.values():
                total.end_batch(draws)
    return _report(model, named, sums, draws, len(batches))


@dataclass(frozen=True)
class Setting:
    """One of the compared settings.

    `front` is True on the Pareto front: no other setting is at least as good in all of cosine, bytes and FLOPs.
    """

    name: str
    cosine: float
    norm_ratio: float
    bias: float
    spread: float
    adam: float
    bytes: int
    flops: int
    front: bool


@dataclass(frozen=True)
class Comparison(Report):
    """The settings, best cosine first. `full_bytes` and `full_flops` are the figures of full backprop."""

    settings: tuple[Setting, ...]
    full_bytes: int
    full_flops: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def tables(self) -> list[Table]:
        head = ("setting", "cosine", "norm ratio", "bias", "spread", "adam", "saved", "", "FLOPs", "front")
        rows = [
            (
                s.name,
                *(f"{value:.4f}" for value in (s.cosine, s.norm_ratio, s.bias, s.spread, s.adam)),
                readable_bytes(s.bytes),
                f"{s.bytes / self.full_bytes:.2f}x",
                f"{s.flops / self.full_flops:.2f}x",
                "*" if s.front else "",
            )
            for s in self.settings
        ]
        note = (
            "saved: bytes kept for backward; x: against full backprop; "
            "*: no other setting is at least as good in all of cosine, bytes and FLOPs"
        )
        return [Table("Settings by agreement with exact gradients", head, rows, note)]

    def plot(self) -> Any:
        """Cosine against saved bytes. Settings on the Pareto front are filled circles."""
        figure = figures().Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.subplots()
        for s in self.settings:
            axes.scatter(s.bytes / self.full_bytes, s.cosine, color="C0", facecolors="C0" if s.front else "none")
            axes.annotate(s.name, (s.bytes / self.full_bytes, s.cosine), (4, 4), textcoords="offset points", size=8)
        axes.set(xlabel="saved for backward, against full backprop", ylabel="cosine with the exact gradient")
        axes.grid(alpha=0.3)
        return figure


def compare(
    model: nn.Module,
    batch: Any,
    loss_fn: Loss,
    configs: Sequence[KeepConfig | Mapping[str, Any] | str],
    draws: int = 8,
) -> Comparison:
    """Rank settings by their agreement with exact gradients, the bytes they save for backward and their FLOPs.

    Args:
        model: a model that is not patched. Each setting is applied and removed again.
        batch: as for `fidelity`.
        loss_fn: as for `fidelity`.
        configs: KeepConfigs, dictionaries of their fields, or names of presets.
        draws: as for `fidelity`.

    Raises:
        AlreadyAppliedError: if the model is patched.
        ConfigError: if a setting is wrong, or the list is empty.
        InputError: if the batch does not fit.
    """
    if block_names(model):
        raise AlreadyAppliedError("compare applies its settings itself; call keepgrad.remove(model) first")
    if isinstance(configs, (str, Mapping, KeepConfig)) or not configs:
        raise ConfigError("configs: give a list with at least one KeepConfig, dictionary of options or preset")
    (inputs, targets), *_ = _batches(batch)
    wanted = [_config(given) for given in configs]
    full_bytes, full_flops = cost(model, inputs, targets, loss_fn)
    found = []
    for config in wanted:
        apply(model, config)
        try:
            whole = fidelity(model, batch, loss_fn, draws).whole
            size, flops = cost(model, inputs, targets, loss_fn)
        finally:
            remove(model)
        figures = asdict(whole) | {"name": _describe(config), "bytes": size, "flops": flops, "front": False}
        figures.pop("size")
        found.append(figures)
    for one in found:
        one["front"] = not any(_dominates(other, one) for other in found)
    found.sort(key=lambda one: (-one["cosine"], one["bytes"], one["flops"]))
    return Comparison(tuple(Setting(**one) for one in found), full_bytes, full_flops)


@dataclass
class _Sums:
    """Sums over draws and batches, from which the figures of one parameter are computed."""

    size: int
    dots: list[float]  # <g_k, g>
    kept_squares: list[float]  # |g_k|^2
    squares: list[float]  # |g|^2, for each draw
    batch_mean: Tensor  # sum of g_k over the draws of the current batch
    kept_mean: Tensor  # sum of g_k
    mean: Tensor  # sum of g
    kept_second: Tensor  # sum of g_k^2
    second: Tensor  # sum of g^2
    scatter: float = 0.0  # sum of |g_k - mean of its batch|^2

    @classmethod
    def zeros(cls, parameter: Tensor) -> _Sums:
        a, b, c, d, e = (torch.zeros_like(parameter, dtype=torch.float64) for _ in range(5))
        return cls(parameter.numel(), [], [], [], a, b, c, d, e)

    def add_draw(self, kept: Tensor, wanted: Tensor) -> None:
        self.dots.append(float((kept * wanted).sum()))
        self.kept_squares.append(float(kept.square().sum()))
        self.squares.append(float(wanted.square().sum()))
        self.batch_mean += kept
        self.kept_second += kept.square()
        self.mean += wanted
        self.second += wanted.square()

    def end_batch(self, draws: int) -> None:
        """Add the scatter of this batch's n draws around their mean: the sum of |g_k|^2, minus |sum of g_k|^2 / n."""
        around = sum(self.kept_squares[-draws:]) - float(self.batch_mean.square().sum()) / draws
        self.scatter += max(0.0, around)
        self.kept_mean += self.batch_mean
        self.batch_mean.zero_()


def _agreement(name: str, parts: list[_Sums]) -> Agreement:
    def ratio(above: float, below: float) -> float:
        return above / below if below > 0 else math.nan

    def total(of: Callable[[_Sums], float]) -> float:
        return sum(map(of, parts))

    count = len(parts[0].dots)
    cosines, norms = [], []
    for k in range(count):
        dot = sum(s.dots[k] for s in parts)
        kept, wanted = sum(s.kept_squares[k] for s in parts), sum(s.squares[k] for s in parts)
        cosines.append(ratio(dot, math.sqrt(kept * wanted)))
        norms.append(ratio(math.sqrt(kept), math.sqrt(wanted)))
    bias = ratio(
        total(lambda s: float((s.kept_mean * s.mean).sum())),
        math.sqrt(total(lambda s: float(s.kept_mean.square().sum())) * total(lambda s: float(s.mean.square().sum()))),
    )
    updates = [(_update(s.kept_mean, s.kept_second, count), _update(s.mean, s.second, count)) for s in parts]
    adam = ratio(
        sum(float((a * b).sum()) for a, b in updates),
        math.sqrt(sum(float(a.square().sum()) for a, _ in updates) * sum(float(b.square().sum()) for _, b in updates)),
    )
    spread = math.sqrt(ratio(total(lambda s: s.scatter), total(lambda s: sum(s.squares))))
    mean_cosine, mean_norm = sum(cosines) / count, sum(norms) / count
    return Agreement(name, sum(s.size for s in parts), mean_cosine, mean_norm, bias, spread, adam)


def _update(mean: Tensor, second: Tensor, count: int) -> Tensor:
    """Adam's update, from the sums of gradients and of their squares. It is zero for elements without a gradient."""
    mean, root = mean / count, (second / count).sqrt()
    return torch.where(root > 0, mean / root.clamp_min(torch.finfo(root.dtype).tiny), 0)


def _report(
    model: nn.Module, named: dict[str, nn.Parameter], sums: dict[str, _Sums], draws: int, batches: int
) -> FidelityReport:
    blocks = block_names(model)
    groups: dict[str, list[_Sums]] = {}
    for name, total in sums.items():
        inside = [block for block in blocks if name.startswith(f"{block}.")]
        layer = max(inside, key=len) if inside else name.rpartition(".")[0] or name
        groups.setdefault(layer, []).append(total)
    return FidelityReport(
        whole=_agreement("whole", list(sums.values())),
        layers=tuple(_agreement(name, parts) for name, parts in groups.items()),
        parameters=tuple(_agreement(name, [total]) for name, total in sums.items()),
        draws=draws,
        batches=batches,
    )


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Run the model in training mode, and restore its buffers, mode and random state at the end.

    Yields a function that restores buffers and random state at once.
    """
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = sorted({t.device.index for t in model.parameters() if t.device.type == "cuda"})
    with ExitStack() as stack:
        stack.enter_context(in_training(model))
        stack.enter_context(torch.enable_grad())
        cpu_state = torch.get_rng_state()
        gpu_states = [torch.cuda.get_rng_state(device) for device in devices]

        def rewind() -> None:
            torch.set_rng_state(cpu_state)
            for device, state in zip(devices, gpu_states, strict=True):
                torch.cuda.set_rng_state(state, device)
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)

        try:
            yield rewind
        finally:
            rewind()


def _gradient(
    model: nn.Module, inputs: Any, targets: Any, loss_fn: Loss, named: dict[str, nn.Parameter]
) -> dict[str, Tensor]:
    """The gradients by parameter name, in float64. Zero for a parameter that the loss does not depend on."""
    loss = loss_fn(call(model, inputs), targets)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise InputError(f"loss_fn returned {type(loss).__name__}; it has to return a tensor with one number")
    if not bool(torch.isfinite(loss.detach())):
        raise InputError(f"the loss is {float(loss.detach())}; give a batch with a finite loss")
    grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True, materialize_grads=True)
    return {name: grad.detach().double() for name, grad in zip(named, grads, strict=True)}


def _batches(batch: Any) -> list[tuple[Any, Any]]:
    """Turn a batch, or a list of batches, into a list of pairs of inputs and targets."""
    pairs = [batch] if _is_pair(batch) else batch
    if not isinstance(pairs, (list, tuple)) or not pairs or not all(_is_pair(pair) for pair in pairs):
        raise InputError("batch: give a pair (inputs, targets), or a list of such pairs")
    return [(inputs, targets) for inputs, targets in pairs]


def _is_pair(batch: Any) -> bool:
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        return False
    inputs, targets = batch
    # A list of two pairs is two batches, not one pair.
    return not (isinstance(batch, list) and _is_pair(inputs) and _is_pair(targets)) and any(
        isinstance(leaf, Tensor) for leaf in tree_leaves(inputs)
    )


def cost(model: nn.Module, inputs: Any, targets: Any, loss_fn: Loss) -> tuple[int, int]:
    """Bytes saved for backward, and FLOPs of forward and backward."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with _undisturbed(model), draws_set_aside(model, seed=0):
        size = saved_bytes(lambda: loss_fn(call(model, inputs), targets), model)
        with FlopCounterMode(display=False) as counter:
            _gradient(model, inputs, targets, loss_fn, named)
    return size, counter.get_total_flops()


def _config(given: KeepConfig | Mapping[str, Any] | str) -> KeepConfig:
    if isinstance(given, str):
        return KeepConfig(preset=given)
    return config_from(None, dict(given)) if isinstance(given, Mapping) else config_from(given, {})


def _describe(config: KeepConfig) -> str:
    values = {name: value for name, value in vars(config).items() if value is not None}
    if set(values) == {"preset"}:
        return str(config.preset)
    return ", ".join(f"{name} {value}" for name, value in values.items()) or "accurate"


def _dominates(a: dict[str, Any], b: dict[str, Any]) -> bool:
    ours, theirs = (-a["cosine"], a["bytes"], a["flops"]), (-b["cosine"], b["bytes"], b["flops"])
    return all(x <= y for x, y in zip(ours, theirs, strict=True)) and ours != theirs
