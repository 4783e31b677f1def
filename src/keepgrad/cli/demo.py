"""Train a small ViT on handwritten digits, with full backprop and with keepgrad, side by side.

The digits are those bundled with scikit-learn: 1,797 images of 8x8 pixels, cut into 16 patches.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import KeepgradError
from ..fidelity import fidelity
from ..memory import saved_bytes
from ..patch import apply, block_names, remove

__all__ = ["add_arguments", "run"]

BATCH = 32
MEASURED = 256


@dataclass
class Outcome:
    """What came of one setting."""

    name: str
    model: nn.Module
    accuracy: float
    cosine: float
    saved: int
    step_seconds: float = 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--epochs", type=int, default=24, help="epochs of each training run (default: 24)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and data order (default: 0)")


def run(args: argparse.Namespace) -> None:
    if args.epochs < 1:
        raise KeepgradError(f"--epochs {args.epochs}: train for at least one epoch")
    try:
        import timm
        from rich.console import Console
        from rich.progress import Progress
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise KeepgradError(f"{error}; the demo needs more packages: pip install 'keepgrad[demo]'") from None

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    labels = torch.tensor(digits.target)
    torch.manual_seed(args.seed)
    order = torch.randperm(len(images))
    test, train = order[:360], order[360:]
    model = timm.models.VisionTransformer(
        img_size=8,
        patch_size=2,
        in_chans=1,
        embed_dim=64,
        depth=4,
        num_heads=4,
        num_classes=10,
        class_token=False,
        global_pool="avg",
    )
    console = Console()
    console.print(f"ViT of {sum(p.numel() for p in model.parameters()):,} parameters, 16 tokens, {len(train)} digits\n")
    with Progress(console=console, transient=True) as progress:
        outcomes = []
        kept = copy.deepcopy(model)
        apply(kept, preset="accurate")
        for name, trained in (("full backprop", model), ("keepgrad accurate", kept)):
            task = progress.add_task(name, total=args.epochs * (len(train) // BATCH))
            _train(trained, images[train], labels[train], args, lambda task=task: progress.advance(task))
            outcomes.append(_measure(name, trained, images, labels, train[:MEASURED], test))
        small = copy.deepcopy(kept)  # the gradients of "accurate" in less memory, so the same training
        remove(small)
        apply(small, preset="small")
        outcomes.append(_measure("keepgrad small", small, images, labels, train[:MEASURED], test))
        task = progress.add_task("timing", total=12)
        _time(outcomes, images[train[:MEASURED]], labels[train[:MEASURED]], lambda: progress.advance(task))
    console.print(_table(outcomes))
    console.print(
        f"saved: for the backward pass of {MEASURED} images. step: forward and backward\n"
        "of these, median of 12, interleaved. cosine: with the exact gradient of the\n"
        "trained model, mean of 8 masks. small: gradients, and so training, as in accurate."
    )


def _train(model: nn.Module, images: Tensor, labels: Tensor, args: argparse.Namespace, advance) -> None:
    torch.manual_seed(args.seed)
    steps = args.epochs * (len(images) // BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps)
    for _ in range(args.epochs):
        order = torch.randperm(len(images))
        for batch in order[: steps // args.epochs * BATCH].split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
            schedule.step()
            advance()


def _measure(name: str, model: nn.Module, images: Tensor, labels: Tensor, batch: Tensor, test: Tensor) -> Outcome:
    model.eval()
    with torch.no_grad():
        accuracy = float((model(images[test]).argmax(1) == labels[test]).float().mean())
    model.train()
    saved = saved_bytes(lambda: model(images[batch]), model)
    cosine = 1.0
    if block_names(model):
        cosine = fidelity(model, (images[batch], labels[batch]), F.cross_entropy, draws=8).whole.cosine
    return Outcome(name, model, accuracy, cosine, saved)


def _time(outcomes: list[Outcome], images: Tensor, labels: Tensor, advance) -> None:
    seconds: dict[str, list[float]] = {outcome.name: [] for outcome in outcomes}
    for _ in range(12):
        for outcome in outcomes:
            outcome.model.zero_grad()
            start = time.perf_counter()
            F.cross_entropy(outcome.model(images), labels).backward()
            seconds[outcome.name].append(time.perf_counter() - start)
        advance()
    for outcome in outcomes:
        outcome.step_seconds = statistics.median(seconds[outcome.name])


def _table(outcomes: list[Outcome]):
    from rich.table import Table

    plain = outcomes[0]
    table = Table()
    for column in ("", "accuracy", "saved", "step", "cosine"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for outcome in outcomes:
        table.add_row(
            outcome.name,
            f"{outcome.accuracy:.1%}",
            f"{outcome.saved / 2**20:.1f} MiB  {outcome.saved / plain.saved:.2f}x",
            f"{outcome.step_seconds * 1e3:.0f} ms  {outcome.step_seconds / plain.step_seconds:.2f}x",
            f"{outcome.cosine:.3f}",
        )
    return table
