"""Measure a training step with every method, on this machine, for a given model and precision.

| column        | what                                                                                                |
| ---           | ---                                                                                                 |
| saved         | bytes that autograd saves for backward, without parameters                                          |
| peak          | the most bytes that a step adds, by torch's allocator: with gradients, without weights              |
| time          | median time of a step relative to full backprop; in brackets the quartiles of the ratio in a round  |
| images/s      | samples, or tokens, per second at the median time                                                   |
| cosine        | between the whole gradient and the exact one, for these weights and inputs                          |

All methods share one set of weights, so that many of them fit on a device at once. In every round, each method runs one
step, in a random order; the clock starts and stops when the device is idle. The first round is a warm-up. If a method
runs out of memory or fails, its row says why, and the other methods go on.

Saved-tensor hooks do not see the tensors that selective checkpointing and offloading save, so these two have no
"saved". On the CPU, offloading copies within the same memory and gains nothing.
"""

from __future__ import annotations

import copy
import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._torch import tree_leaves, tree_map_only
from .calling import call
from .errors import InputError, NoSiteError, reason_of
from .memory import AMP, allocated_peak, peak_bytes, saved_bytes
from .methods import FULL, Forward, Method, kept
from .report import Report, Table, figures, readable_bytes

__all__ = ["Bench", "Check", "Row", "Task", "bench", "check"]

FORWARD = {None: 1e-4, "bf16": 2e-2, "fp16": 5e-3}
BACKWARD = {None: 1e-3, "bf16": 5e-2, "fp16": 2e-2}
"""How much outputs and gradients may differ, by the precision of autocast: norm of the difference / norm of the wanted.

The same operations run in another order, so they round differently. A mistake would cause a far larger difference.
"""


@dataclass
class Row:
    """The measurements of one method. A value is None if it could not be measured; `problem` says why."""

    name: str
    saved: int | None = None
    peak: int | None = None
    cosine: float | None = None
    seconds: list[float] = field(default_factory=list)
    problem: str = ""


@dataclass(frozen=True)
class Check:
    """One check before measuring: what is compared, by how much it differs (`error`), and how much it may (`limit`)."""

    what: str
    error: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.error <= self.limit  # also False for NaN

    def __str__(self) -> str:
        verdict = "ok" if self.passed else "FAILED"
        return f"check: {self.what}: {verdict} (relative error {self.error:.1e}, at most {self.limit:.0e})"


@dataclass
class Bench(Report):
    """What was measured so far. `samples` is how many images or tokens a step has; `unit` says which of the two."""

    title: str
    samples: int
    unit: str
    rows: list[Row]
    checks: list[Check] = field(default_factory=list)
    interrupted: bool = False

    @property
    def base(self) -> Row:
        """The row that others are compared with: full backprop, or if it does not fit, the first method that does."""
        measured = [row for row in self.rows if not row.problem]
        return (measured or self.rows)[0]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "against": self.base.name}

    def ratios(self, row: Row) -> list[float]:
        """For each round, the time divided by that of the base in the same round."""
        return [own / base for own, base in zip(row.seconds, self.base.seconds, strict=False)]

    def tables(self) -> list[Table]:
        rows = [self._cells(row) for row in self.rows if not row.problem]
        head = ("method", "saved", "", "peak", "", "time", f"{self.unit}/s", "cosine")
        failed: dict[str, list[str]] = {}
        for row in self.rows:
            if row.problem:
                failed.setdefault(row.problem, []).append(row.name)
        note = "\n".join(f"left out: {', '.join(names)}: {problem}" for problem, names in failed.items())
        return [Table(self.title, head, rows, note)]

    def _cells(self, row: Row) -> tuple[str, ...]:
        cells = [row.name]
        for name in ("saved", "peak"):
            own, base = getattr(row, name), getattr(self.base, name)
            cells.append("-" if own is None else readable_bytes(own))
            cells.append("-" if own is None or not base else f"{own / base:.2f}x")
        if len(row.seconds) > 1:
            low, _, high = statistics.quantiles(self.ratios(row), n=4)
            median = statistics.median(row.seconds)
            cells.append(f"{median / statistics.median(self.base.seconds):.2f}x ({low:.2f}-{high:.2f})")
            cells.append(f"{self.samples / median:.3g}")
        else:
            cells += ["-", "-"]
        return (*cells, "-" if row.cosine is None else f"{row.cosine:.3f}")

    def plot(self) -> Any:
        """Peak memory against time, with a point for each method. Lower left is better."""
        figure = figures().Figure(figsize=(8, 5), layout="constrained")
        axes = figure.subplots()
        drawn: list[tuple[float, float]] = []
        for row in self.rows:
            if row.problem or not (row.seconds and row.peak and self.base.peak):
                continue
            peak = row.peak / self.base.peak
            seconds = statistics.median(row.seconds) / statistics.median(self.base.seconds)
            ours, packed = row.name.startswith("keepgrad"), "int8" in row.name or row.name == "keepgrad small"
            axes.plot(peak, seconds, "o", color=("C2" if packed else "C0") if ours else "0.5")
            name = row.name.removeprefix("keepgrad ")
            overlaps = any(abs(math.log(peak / x)) < 0.1 and abs(seconds - y) < 0.03 for x, y in drawn)
            axes.annotate(name, (peak, seconds), (5, -10 if overlaps else 3), textcoords="offset points", fontsize=7)
            drawn.append((peak, seconds))
        axes.axhline(1, color="0.8", linewidth=0.8, zorder=0)
        axes.axvline(1, color="0.8", linewidth=0.8, zorder=0)
        against = f"against {self.base.name}"
        axes.set(xscale="log", xlabel=f"peak memory of a training step, {against}", ylabel=f"its time, {against}")
        ticks = (0.1, 0.2, 0.3, 0.5, 0.7, 1)
        axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
        axes.minorticks_off()
        axes.set_xlim(right=2)
        axes.set_title(f"{self.title.partition(';')[0]} (grey: others, blue: keepgrad, green: in 8 bits)", fontsize=9)
        return figure


@dataclass(frozen=True)
class Task:
    """A training step: a model on its device, its inputs, and the precision.

    Args:
        model: a model in training mode that is not patched.
        given: the input of the model: a tensor, or a dictionary of its arguments by name.
        amp: "bf16" or "fp16" for autocast.
        compiled: True if every method runs under torch.compile.
    """

    model: nn.Module
    given: Any
    amp: str | None = None
    compiled: bool = False

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def backend(self) -> Any:
        """torch's module for the device, such as torch.cuda; None for the CPU."""
        return None if self.device.type == "cpu" else torch.get_device_module(self.device)

    def of(self, samples: int) -> Task:
        """The same step with only the first `samples` samples."""
        return replace(self, given=tree_map_only(Tensor, lambda tensor: tensor[:samples], self.given))

    @contextmanager
    def put_on(self, method: Method) -> Iterator[Forward]:
        """Put a method on a copy of the model that shares its parameters and buffers. Yields the function to call."""
        shared = {id(tensor): tensor for tensor in (*self.model.parameters(), *self.model.buffers())}
        with method.put_on(copy.deepcopy(self.model, shared)) as forward:
            yield torch.compile(forward) if self.compiled and not method.is_compiled else forward

    def output(self, forward: Forward) -> Any:
        with torch.autocast(self.device.type, AMP[self.amp], enabled=self.amp is not None):
            return call(forward, self.given)

    def step(self, forward: Forward) -> None:
        loss = loss_of(self.output(forward), self.given)
        (loss * 1024 if self.amp == "fp16" else loss).backward()  # so that small gradients do not become zero

    def gradient(self, forward: Forward) -> list[Tensor | None]:
        """The gradient of each parameter, in CPU memory."""
        self.model.zero_grad()
        torch.manual_seed(0)  # the same dropout for all methods
        self.step(forward)
        found = [None if p.grad is None else p.grad.cpu() for p in self.model.parameters()]
        self.model.zero_grad()
        return found

    def wait(self) -> None:
        if self.backend is not None:
            self.backend.synchronize(self.device)

    def seconds(self, forward: Forward) -> float:
        self.model.zero_grad()
        self.wait()
        start = time.perf_counter()
        self.step(forward)
        self.wait()
        return time.perf_counter() - start

    def peak(self, forward: Forward) -> int:
        """The most bytes that a step allocates on top of what was allocated before, as the allocator counts them."""
        self.model.zero_grad()
        backend = self.backend
        if backend is None:
            return allocated_peak(lambda: self.step(forward))
        if not hasattr(backend, "max_memory_allocated"):  # e.g. on Apple's devices
            return peak_bytes(lambda: self.step(forward))
        self.wait()
        before = backend.memory_allocated(self.device)
        backend.reset_peak_memory_stats(self.device)
        self.step(forward)
        self.wait()
        return backend.max_memory_allocated(self.device) - before

    def free(self) -> None:
        """Free what a failed step has left in memory."""
        self.model.zero_grad()
        gc.collect()
        if self.backend is not None:
            self.backend.empty_cache()


def loss_of(out: Any, given: Any) -> Tensor:
    """A loss for any model: cross-entropy of classes or of next tokens, or else the mean square of the first output."""
    leaves = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not leaves:
        raise InputError("the model's output has no tensor with a gradient; take a model with trainable parameters")
    found = getattr(out, "logits", leaves[0]).float()
    ids = given.get("input_ids") if isinstance(given, dict) else None
    if ids is not None and found.shape[:-1] == ids.shape and hasattr(out, "logits"):
        return F.cross_entropy(found[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    if found.dim() == 2 and ids is None:
        return F.cross_entropy(found, torch.arange(len(found), device=found.device) % found.shape[1])
    return found.square().mean()


def check(task: Task, samples: int = 2) -> list[Check]:
    """Check on a few samples that keepgrad computes the right values on this device and in this precision.

    The outputs must be those of the plain model. If everything is kept, the gradients must be those of autograd. For a
    model without any block that keepgrad knows, only the outputs are checked.
    """
    few = task.of(samples)

    def found(method: Method) -> tuple[list[Tensor], list[Tensor | None]]:
        with few.put_on(method) as forward:
            torch.manual_seed(0)
            out = [leaf.detach() for leaf in tree_leaves(few.output(forward)) if isinstance(leaf, Tensor)]
            return [leaf for leaf in out if leaf.is_floating_point()], few.gradient(forward)

    out, gradient = found(FULL)
    checks = []
    for what, method in (("default", kept()), ("with everything kept", kept(preset="exact"))):
        try:
            own_out, own_gradient = found(method)
        except NoSiteError:
            own_out, _ = found(kept(store="int8"))
            return [Check("forward pass, stored in 8 bits", _difference(own_out, out), FORWARD[task.amp])]
        checks.append(Check(f"forward pass, {what}", _difference(own_out, out), FORWARD[task.amp]))
    error = _difference(own_gradient, gradient)
    return [*checks, Check("gradients with everything kept against autograd", error, BACKWARD[task.amp])]


def _difference(found: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> float:
    """The norm of the difference, divided by the norm of `wanted`."""
    pairs = [(a, b) for a, b in zip(found, wanted, strict=True) if a is not None and b is not None]
    if any((a is None) != (b is None) for a, b in zip(found, wanted, strict=True)):
        return math.nan
    wrong = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
    return math.sqrt(wrong / sum(float(b.double().square().sum()) for _, b in pairs))


def _cosine(found: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> float:
    pairs = [(a.double(), b.double()) for a, b in zip(found, wanted, strict=True) if a is not None and b is not None]
    dot, own, other = (sum(float((x * y).sum()) for x, y in some) for some in _products(pairs))
    return dot / math.sqrt(own * other)


def _products(pairs: list[tuple[Tensor, Tensor]]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    yield pairs
    yield [(a, a) for a, _ in pairs]
    yield [(b, b) for _, b in pairs]


def bench(
    task: Task, methods: Sequence[Method], rounds: int, title: str, advance: Callable[[str], None] = lambda what: None
) -> Bench:
    """Measure a training step with every method, full backprop first.

    Args:
        task: the step.
        methods: the methods to compare.
        rounds: how many steps of each method are timed.
        title: the title of the table.
        advance: shows progress. It is called `len(methods) + rounds + 1` times, with the name of what is done next.

    Returns:
        The measurements. After Ctrl-C, those that were made until then, with `interrupted` set.
    """
    ids = task.given.get("input_ids") if isinstance(task.given, dict) else None
    samples = next(leaf for leaf in tree_leaves(task.given) if isinstance(leaf, Tensor)) if ids is None else ids
    found = Bench(title, len(samples) if ids is None else ids.numel(), "images" if ids is None else "tokens", [])
    forwards: dict[str, Forward] = {}
    exact: list[Tensor | None] | None = None

    def facts(method: Method, row: Row) -> None:
        nonlocal exact
        forward = stack.enter_context(task.put_on(method))
        gradient = task.gradient(forward)
        if exact is None and method.is_exact:
            exact = gradient
        row.cosine = None if exact is None else _cosine(gradient, exact)
        if method.saves_openly:
            row.saved = saved_bytes(lambda: task.output(forward), task.model)
        row.peak = task.peak(forward)
        forwards[method.name] = forward

    with ExitStack() as stack:
        if task.compiled or any(method.is_compiled for method in methods):
            # The copies of the model share their code, and dynamo would stop compiling it after a few of them.
            stack.enter_context(torch._dynamo.config.patch(recompile_limit=64 * len(methods)))
        try:
            for method in methods:
                advance(method.name)
                row = Row(method.name)
                _attempt(row, task, partial(facts, method, row))
                found.rows.append(row)
            rows = {row.name: row for row in found.rows}
            for number in range(rounds + 1):
                advance(f"round {number} of {rounds}" if number else "warm-up")
                for name, forward in random.Random(number).sample(list(forwards.items()), len(forwards)):
                    seconds = _attempt(rows[name], task, partial(task.seconds, forward))
                    if seconds is None:
                        del forwards[name]
                    elif number:
                        rows[name].seconds.append(seconds)
        except KeyboardInterrupt:
            found.interrupted = True
    task.free()
    return found


def _attempt(row: Row, task: Task, what: Callable[[], Any]) -> Any:
    """Call a function and return its result. If it fails, write the reason into the row and return None."""
    try:
        return what()
    except torch.OutOfMemoryError:
        row.problem = "out of memory"
    except Exception as error:  # methods, models and compilers raise errors of any kind
        is_memory = "can't allocate memory" in str(error)  # the message of the CPU's allocator
        row.problem = "out of memory" if is_memory else reason_of(error)
    task.free()  # not inside `except`: there, the traceback still holds the tensors of the step
    return None
