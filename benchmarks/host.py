"""What a training step costs the host: the time of Python and of launching operations, on tensors too small to matter.

    python benchmarks/host.py [--rounds 15] [--markdown]
    python benchmarks/host.py --compile [--model ViT]      # against the plain model compiled
    python benchmarks/host.py --profile "keepgrad 0.5" [--model ViT]      # the functions in which it is spent

On an accelerator the host launches kernels ahead of the device; where it falls behind, the device waits. One thread,
tiny models of timm: a ViT of 12 blocks and a ConvNeXt of 18. All methods take turns; "time" is the median relative to
the plain model in eager mode, "kernels" the number of operations that a block launches, forward and backward, without
views, taken as the difference between models of two depths.
"""

from __future__ import annotations

import argparse
import cProfile
import platform
import pstats
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from keepgrad.methods import METHODS
from keepgrad.report import Table
from keepgrad.timing import seconds_in_turns

Make = Callable[[int], nn.Module]

MODELS: dict[str, tuple[Make, int, int]] = {
    "ViT": (
        lambda depth: timm.models.VisionTransformer(
            img_size=32, patch_size=8, embed_dim=32, depth=depth, num_heads=2, num_classes=4
        ),
        12,
        32,
    ),
    "ConvNeXt": (
        lambda depth: timm.models.ConvNeXt(depths=(0, depth, 0, 0), dims=(16, 16, 16, 16), num_classes=4),
        18,
        64,
    ),
}
NAMES = ("exact", "accurate (default)", "small, full", "small", "0.5", "balanced", "exact, int8", "accurate, int8")
CHOSEN = ("full backprop", *(f"keepgrad {name}" for name in NAMES), "checkpointing")
COMPILED = tuple(name for name in CHOSEN if name != "checkpointing" and "small" not in name)

ON = ExitStack()  # keeps methods on their models


def built(make: Make, depth: int, method: str) -> nn.Module:
    torch.manual_seed(0)
    model = make(depth).train()
    ON.enter_context(METHODS[method].put_on(model))
    return model


def step(model: nn.Module, x: Tensor) -> None:
    model.zero_grad()
    model(x).sum().backward()


aten = torch.ops.aten
NO_KERNELS = {aten.empty, aten.empty_strided, aten.empty_like, aten.detach, aten._unsafe_view, aten.promote_types}
"""Operations that launch nothing, although their result is no view by their signature."""


class Kernels(TorchDispatchMode):
    """Counts operations whose result is not a view of an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returns = func._schema.returns
        is_view = bool(returns) and all(one.alias_info is not None and not one.alias_info.is_write for one in returns)
        self.count += not is_view and func.overloadpacket not in NO_KERNELS
        return func(*args, **(kwargs or {}))


def kernels_a_block(make: Make, method: str, x: Tensor) -> float:
    counts = []
    for depth in (4, 8):
        model = built(make, depth, method)
        step(model, x)
        with Kernels() as found:
            step(model, x)
        counts.append(found.count)
    return (counts[1] - counts[0]) / 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), help="this model only")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--profile", choices=CHOSEN, metavar="METHOD", help="where the time of this method goes")
    parser.add_argument("--compile", action="store_true", help="compile every model as a whole, the plain one too")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    args = parser.parse_args()
    torch.set_num_threads(1)
    chosen = {name: value for name, value in MODELS.items() if args.model in (None, name)}
    if args.profile:
        make, depth, size = next(iter(chosen.values()))
        model, x = built(make, depth, args.profile), torch.randn(2, 3, size, size)
        for _ in range(5):
            step(model, x)
        profiler = cProfile.Profile()
        profiler.enable()
        for _ in range(20):
            step(model, x)
        profiler.disable()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(30)
        return
    methods = COMPILED if args.compile else CHOSEN
    rows = {name: [name] for name in methods}
    for make, depth, size in chosen.values():
        x = torch.randn(2, 3, size, size)
        models: dict[str, Any] = {name: built(make, depth, name) for name in methods}
        if args.compile:
            models = {name: torch.compile(model) for name, model in models.items()}
        steps = {name: lambda m=m, x=x: [step(m, x) for _ in range(3)] for name, m in models.items()}
        seconds = seconds_in_turns(steps, args.rounds)
        for name in methods:
            rows[name].append(f"{seconds[name] / seconds['full backprop']:.2f}x")
            if not args.compile:
                rows[name].append(f"{kernels_a_block(make, name, x):g}")
        rows["full backprop"][-1 if args.compile else -2] += (
            f" ({1e3 * seconds['full backprop'] / 3 / depth:.2f} ms a block)"
        )
    columns = [(f"{name}, compiled",) if args.compile else (f"{name}, time", "kernels") for name in chosen]
    head = ("method", *(cell for cells in columns for cell in cells))
    title = f"torch {torch.__version__}, timm {timm.__version__}, {platform.machine()} CPU, 1 thread"
    table = Table(title, head, [tuple(row) for row in rows.values()])
    print(table.to_markdown() if args.markdown else table.to_text())


if __name__ == "__main__":
    main()
