"""A training step, method by method: bytes saved for backward, peak, FLOPs, time, and the cosine with exact gradients.

    python benchmarks/step.py [--model vit_small_patch16_224] [--batch-size 16] [--rounds 9] [--markdown] [--plot FILE]
    python benchmarks/step.py --profile "keepgrad 0.5"     # where the time of one method goes

All methods take turns in one run, in a new order each round. "time" is the median over the rounds, relative to that of
full backprop; in brackets, the quartiles of the ratio within a round. "saved" is what
autograd keeps for backward, without parameters. "peak" is the most that torch's allocator hands out during the step,
gradients of the parameters included. "cosine" is with the exact gradient, at initialisation on smooth random images:
it ranks the methods, `quality.py` measures them on trained models and real images.

Selective checkpointing keeps the results of matmuls, convolutions and attention and redoes the rest. Offloading copies
all that is saved to the CPU's memory; where that is the device too, as here, nothing is gained, and its time is that
of a copy within memory, not over a bus. What these two keep is not seen as saved, so they have a peak only.
"""

from __future__ import annotations

import argparse
import copy
import functools
import platform
import random
import statistics
import time
from collections.abc import Callable

import timm
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import keepgrad
from keepgrad.baseline import algorithm1
from keepgrad.memory import allocated_peak, saved_bytes
from keepgrad.report import figures

UNSEEN = ("selective checkpointing", "offloading")

Change = Callable[[nn.Module], nn.Module | None]


def patched(**options: object) -> Change:
    return lambda model: keepgrad.apply(model, **options) and None


def the_paper(**options: object) -> Change:
    return lambda model: algorithm1(model, keepgrad.KeepConfig(**options))


def budgeted(model: nn.Module) -> nn.Module:
    """torch.compile with the partitioner told to keep half of the activations."""
    import torch._functorch.config as config

    def forward(x: Tensor) -> Tensor:
        with config.patch(activation_memory_budget=0.5):
            return compiled(x)

    compiled = torch.compile(model)
    model.compiled_forward = forward
    return model


def selective(model: nn.Module) -> None:
    """Each block checkpointed, but for the results of what is expensive to redo."""
    aten = torch.ops.aten
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    heavy = [aten.mm.default, aten.addmm.default, aten.convolution.default, attention]
    contexts = functools.partial(create_selective_checkpoint_contexts, heavy)
    for name in dict.fromkeys(site.name for site in keepgrad.plan(model, preset="exact").sites):
        block = model.get_submodule(name)
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)


class Offloaded(nn.Module):
    """Whatever autograd saves is copied to the CPU's memory."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return self.model(x)


class SomeSamples(nn.Module):
    """The trivial baseline: all samples forward, gradients from a share of them only."""

    def __init__(self, model: nn.Module, share: float) -> None:
        super().__init__()
        self.model, self.share = model, share

    def forward(self, x: Tensor) -> Tensor:
        order = torch.randperm(len(x))
        count = int(len(x) * self.share)
        with torch.no_grad():
            dropped = self.model(x[order[count:]])
        out = torch.cat([self.model(x[order[:count]]), dropped])
        return out[order.argsort()]


def methods(model: str) -> dict[str, Change]:
    """Every method by its name in the table; each changes a copy of the model."""
    rows: dict[str, Change] = {
        "full backprop": lambda model: None,
        "checkpointing": lambda model: model.set_grad_checkpointing(),
        "selective checkpointing": selective,
        "torch.compile, memory budget 0.5": budgeted,
        "offloading": Offloaded,
        "Algorithm 1, 0.5 all blocks": the_paper(keep_ratio=0.5),
        "Algorithm 1, 0.25 all blocks": the_paper(keep_ratio=0.25),
        "Algorithm 1, the paper's layers": the_paper(preset="paper"),
        "half of the samples": lambda model: SomeSamples(model, 0.5),
    }
    if "vit" in model:
        rows["keepgrad attention 1, mlp 0.25"] = patched(keep_ratio={"attention": 1.0, "mlp": 0.25})
        rows["keepgrad balanced"] = patched(preset="balanced")
    for preset in ("exact", "accurate", "small", "paper"):
        rows[f"keepgrad {preset}"] = patched(preset=preset)
    rows["keepgrad small, full"] = patched(preset="small", store="full")
    for ratio in (0.5, 0.25):
        rows[f"keepgrad {ratio}"] = patched(keep_ratio=ratio)
    for preset in ("exact", "accurate"):
        rows[f"keepgrad {preset}, int8"] = patched(preset=preset, store="int8")
    rows["keepgrad 0.5, int8"] = patched(keep_ratio=0.5, store="int8")
    rows["keepgrad 0.5, save input"] = patched(keep_ratio=0.5, save="input")
    return rows


def forward(model: nn.Module, x: Tensor) -> Tensor:
    return getattr(model, "compiled_forward", model)(x)


def step(model: nn.Module, x: Tensor, labels: Tensor) -> None:
    F.cross_entropy(forward(model, x), labels).backward()


def gradient(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    model.zero_grad()
    step(model, x, labels)
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def flops(model: nn.Module, x: Tensor, labels: Tensor) -> int:
    with FlopCounterMode(display=False) as counter:
        step(model, x, labels)
    return counter.get_total_flops()


def smooth_images(batch: int, size: int) -> Tensor:
    return F.interpolate(torch.randn(batch, 3, 7, 7), size=(size, size), mode="bicubic")


def draw(path: str, title: str, points: dict[str, tuple[float, float]]) -> None:
    """The peak of memory against time; lower left is better."""
    figure = figures().Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, (peak, seconds) in points.items():
        ours, packed = name.startswith("keepgrad"), "int8" in name or name == "keepgrad small"
        axes.plot(peak, seconds, "o", color=("C2" if packed else "C0") if ours else "0.5")
        axes.annotate(name.removeprefix("keepgrad "), (peak, seconds), (5, 3), textcoords="offset points", fontsize=7)
    axes.axhline(1, color="0.8", linewidth=0.8, zorder=0)
    axes.axvline(1, color="0.8", linewidth=0.8, zorder=0)
    axes.set(
        xscale="log", xlabel="peak memory of a training step, against full backprop", ylabel="time of a training step"
    )
    ticks = (0.1, 0.2, 0.3, 0.5, 0.7, 1)
    axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(right=2)
    axes.set_title(title.partition(";")[0] + " (grey: others, blue: keepgrad, green: keepgrad int8)", fontsize=9)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_small_patch16_224", help="a ViT or ConvNeXt of timm")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="+", metavar="METHOD", help="these methods only, beside full backprop")
    parser.add_argument("--profile", metavar="METHOD", help="print where the time of this method goes instead")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--plot", metavar="FILE", help="draw peak memory against time, a point for each method")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error("--rounds: give at least 2")
    torch.manual_seed(0)
    random.seed(0)
    base = timm.create_model(args.model).train()
    x = smooth_images(args.batch_size, args.size)
    labels = torch.randint(1000, (args.batch_size,))
    table = methods(args.model)
    if args.profile:
        model = copy.deepcopy(base)
        model = table[args.profile](model) or model
        step(model, x, labels)
        with profile(activities=[ProfilerActivity.CPU]) as found:
            step(model, x, labels)
        print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=20, max_name_column_width=50))
        return
    names = [n for n in table if not args.only or n in args.only or n == "full backprop"]
    console = Console(stderr=args.markdown)
    models, seconds, facts = {}, {name: [] for name in names}, {}
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=len(names))
        for name in names:
            model = copy.deepcopy(base)
            model = models[name] = table[name](model) or model
            grad = gradient(model, x, labels)
            exact = grad if name == "full backprop" else exact  # noqa: F821
            model.zero_grad()
            compiled = hasattr(model, "compiled_forward")
            saved = None if name in UNSEEN else saved_bytes(lambda m=model: forward(m, x), model)
            peak = allocated_peak(lambda m=model: step(m, x, labels))
            model.zero_grad()
            # The counter is a dispatch mode, which compiled code does not pass through.
            count = None if compiled else flops(model, x, labels)
            facts[name] = saved, peak, count, float(torch.cosine_similarity(grad.double(), exact.double(), dim=0))
            progress.advance(task)
        task = progress.add_task("timing", total=args.rounds)
        for _ in range(args.rounds):
            for name, model in random.sample(list(models.items()), len(models)):
                model.zero_grad()
                start = time.perf_counter()
                step(model, x, labels)
                seconds[name].append(time.perf_counter() - start)
            progress.advance(task)
    plain = facts["full backprop"]
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    rows = []
    for name in names:
        pairs = zip(seconds[name], seconds["full backprop"], strict=True)
        low, _, high = statistics.quantiles([own / full for own, full in pairs], n=4)
        saved, peak, count, cosine = facts[name]
        rows.append(
            (
                name,
                "-" if saved is None else f"{saved / 2**20:.0f} MiB",
                "-" if saved is None else f"{saved / plain[0]:.2f}x",
                f"{peak / plain[1]:.2f}x",
                "-" if count is None else f"{count / plain[2]:.2f}x",
                f"{medians[name] / medians['full backprop']:.2f}x ({low:.2f}-{high:.2f})",
                f"{cosine:.3f}",
            )
        )
    head = ("method", "saved", "", "peak", "FLOPs", "time", "cosine")
    title = (
        f"{args.model}, batch {args.batch_size}, {args.size} px, fp32, {args.rounds} rounds; full backprop: "
        f"{medians['full backprop']:.2f} s, {plain[2] / 1e9:.0f} GFLOP; torch {torch.__version__}, "
        f"timm {timm.__version__}, {platform.machine()} CPU, {torch.get_num_threads()} threads"
    )
    if args.plot:
        draw(args.plot, title, {n: (facts[n][1] / plain[1], medians[n] / medians["full backprop"]) for n in names})
    if args.markdown:
        print(f"{title}\n")
        for cells in (head, ("---",) * len(head), *rows):
            print("| " + " | ".join(cells) + " |")
        return
    shown = Table(title=title)
    for column in head:
        shown.add_column(column, justify="left" if column == "method" else "right")
    for row in rows:
        shown.add_row(*row)
    console.print(shown)


if __name__ == "__main__":
    main()
