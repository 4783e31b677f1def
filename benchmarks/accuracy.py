"""Accuracy of small models trained from scratch, setting by setting: what the saved memory and time cost.

    python benchmarks/accuracy.py --data cifar10-train.tar --test cifar10-test.tar [--output docs/accuracy.csv]
    python benchmarks/accuracy.py --show docs/accuracy.csv      # the table, as Markdown

A small ViT (64 tokens, width 64, 4 blocks) and a small ConvNeXt (16x16 to 4x4 positions, 5 blocks), 8 epochs of 20,000
images in batches of 128 with flips and shifts, AdamW, warm-up and cosine. A row is appended when a run is finished, and
rows that are there are skipped, so it can be stopped and taken up again. Runs come seed by seed.

top1 is on the whole test set, after the last epoch. time is that of a training step against full backprop, median over
pairs of steps taken in turns just before the run; saved is what autograd keeps for backward, against full backprop.
"finish" trains the last tenth of the steps with exact gradients. "equal time" trains for as many more steps as the
setting is faster, by the median of its time in the file so far; a setting that is not faster is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import csv
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from rich.progress import Progress
from timm.data import create_dataset
from torch import Tensor, nn
from torchvision.transforms import v2

import keepgrad
from keepgrad.memory import saved_bytes

COLUMNS = ("model", "setting", "seed", "top1", "loss", "time", "saved", "steps", "versions")
IMAGES, EPOCHS, BATCH, LEARNING_RATE = 20_000, 8, 128, 1e-3
STEPS = EPOCHS * (IMAGES // BATCH)
PAIRS = 8
"""Seeds of a setting and of the same stored in 8 bits: their difference is small, a single run's noise is not."""

TWINS = {
    "exact, int8": "full backprop",
    "accurate, int8": "accurate (default)",
    "small": "accurate (default)",
}
"""Settings stored in 8 bits, and those with the same gradients stored in full."""

MODELS: dict[str, Callable[[], nn.Module]] = {
    "ViT": lambda: timm.models.VisionTransformer(
        img_size=32, patch_size=4, embed_dim=64, depth=4, num_heads=2, num_classes=10
    ),
    "ConvNeXt": lambda: timm.models.ConvNeXt(
        depths=(0, 1, 3, 1), dims=(16, 32, 64, 128), patch_size=1, num_classes=10, ls_init_value=0.1
    ),
}


@dataclass(frozen=True)
class Setting:
    """What `apply` gets (None: full backprop), how many seeds, the exact share at the end, and equal time or not."""

    options: dict | None
    seeds: int = 2
    finish: float = 0.0
    equal_time: bool = False
    later: bool = False  # than all others, of every seed


def settings(model: str) -> dict[str, Setting]:
    """Every setting by its name in the table. A ConvNeXt has no attention: its preset balanced is accurate too."""
    half = {reduce: {"keep_ratio": 0.5, "reduce": reduce} for reduce in ("fold", "drop", "scaled", "pool")}
    accurate = {"preset": "accurate"}
    rows = {"full backprop": Setting(None, PAIRS), "paper": Setting({"preset": "paper"}, 3)}
    rows["accurate (default)"] = Setting(accurate, PAIRS)
    rows["exact, int8"] = Setting({"preset": "exact", "store": "int8"}, PAIRS)
    rows["accurate, int8"] = Setting({**accurate, "store": "int8"}, PAIRS)
    rows["small"] = Setting({"preset": "small"}, 3)
    if model == "ViT":
        rows["balanced"] = Setting({"preset": "balanced"})
        rows["MLP fold 0.5"] = Setting({"keep_ratio": {"mlp": 0.5}})
        rows["MLP pool 0.5"] = Setting({"keep_ratio": {"mlp": 0.5}, "reduce": "pool"}, 1)
        rows["fold 0.5, queries"] = Setting({"keep_ratio": 0.5, "attention": "query"})
        rows["fold 0.5, careful"] = Setting({"keep_ratio": 0.5, "schedule": "careful"}, 3)
    rows |= {f"{reduce} 0.5": Setting(options) for reduce, options in half.items()}
    rows["fold 0.25"] = Setting({"keep_ratio": 0.25})
    rows["accurate, equal time"] = Setting(accurate, equal_time=True, later=True)
    if model == "ViT":
        rows["balanced, equal time"] = Setting({"preset": "balanced"}, equal_time=True, later=True)
    rows["accurate, finish 0.1"] = Setting(accurate, finish=0.1, later=True)
    if model == "ViT":
        rows["small, full"] = Setting({"preset": "small", "store": "full"}, 1, later=True)
    else:
        rows["fold 0.5, finish 0.1"] = Setting(half["fold"], 1, finish=0.1, later=True)
    return rows


def load(path: str, count: int | None) -> tuple[Tensor, Tensor]:
    """Images as bytes, and labels: all of them, or a fixed random choice."""
    dataset = create_dataset("", root=path, transform=v2.PILToTensor())
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0))[:count].tolist()
    images, labels = zip(*(dataset[i] for i in order), strict=True)
    return torch.stack(images), torch.tensor(labels)


def scaled(images: Tensor) -> Tensor:
    return (images.float() / 255 - 0.5) / 0.25


def augmented(images: Tensor) -> Tensor:
    """Flips and shifts of up to 4 pixels, of each image its own."""
    count, _, height, width = images.shape
    padded = F.pad(images, (4, 4, 4, 4))
    top, left = torch.randint(9, (2, count, 1, 1))
    columns = torch.where(torch.rand(count, 1, 1) < 0.5, torch.arange(width), torch.arange(width).flip(0)) + left
    rows = torch.arange(height).view(1, -1, 1) + top
    index = torch.arange(count).view(-1, 1, 1)
    return padded[index, :, rows, columns].permute(0, 3, 1, 2)


def step(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    return loss.item()


def cost(make: Callable[[], nn.Module], options: dict | None, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Time and bytes of a training step, against full backprop."""
    plain = make()
    own = copy.deepcopy(plain)
    if options is not None:
        keepgrad.apply(own, **options)
    ratios = []
    for turn in range(22):
        seconds = {}
        for model in (plain, own) if turn % 2 else (own, plain):
            start = time.perf_counter()
            step(model, images, labels)
            seconds[model] = time.perf_counter() - start
        ratios.append(seconds[own] / seconds[plain])
    saved = [saved_bytes(lambda m=m: m(images), m) for m in (own, plain)]
    return statistics.median(ratios[2:]), saved[0] / saved[1]


def train(model: nn.Module, data: tuple[Tensor, Tensor], steps: int, finish: float, advance: Callable) -> float:
    """Train the model; the mean loss of the last tenth."""
    images, labels = data
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.05)
    warm_up = steps // 10
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda n: min((n + 1) / warm_up, 0.5 * (1 + math.cos(math.pi * max(0, n - warm_up) / (steps - warm_up)))),
    )
    losses = []
    batches = endless(len(images))
    for number in range(steps):
        batch = next(batches)
        exact = finish and number >= steps * (1 - finish)
        with keepgrad.exact(model) if exact else contextlib.nullcontext():
            losses.append(step(model, scaled(augmented(images[batch])), labels[batch]))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        advance()
    return statistics.mean(losses[-steps // 10 :])


def endless(count: int) -> Iterator[Tensor]:
    while True:
        yield from torch.randperm(count)[: count // BATCH * BATCH].split(BATCH)


@torch.no_grad()
def accuracy(model: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    model.eval()
    pairs = zip(data[0].split(500), data[1].split(500), strict=True)
    return sum(int((model(scaled(images)).argmax(1) == labels).sum()) for images, labels in pairs) / len(data[1])


def read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def append(path: Path, row: dict) -> None:
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def steps_of(setting: Setting, rows: list[dict[str, str]], model: str) -> int | None:
    """How many steps a setting trains; None where it cannot be said yet, or the setting is not faster."""
    if not setting.equal_time:
        return STEPS
    same = [n for n, other in settings(model).items() if other.options == setting.options and not other.equal_time]
    times = [float(row["time"]) for row in rows if row["model"] == model and row["setting"] in same]
    ratio = statistics.median(times) if times else 1.0
    return round(STEPS / ratio) if ratio < 0.99 else None


def show(path: Path) -> None:
    """Print a result file as Markdown."""
    rows = read(path)
    print(*dict.fromkeys(row["versions"] for row in rows), sep="; ")
    for model in MODELS:
        own = [row for row in rows if row["model"] == model]
        plain = {row["seed"]: float(row["top1"]) for row in own if row["setting"] == "full backprop"}
        print(f"\n{model}\n\n| setting | top-1, % | of seeds | against full backprop | time | saved | steps |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for name in settings(model):
            some = [row for row in own if row["setting"] == name]
            if not some:
                continue
            tops = [100 * float(row["top1"]) for row in some]
            spread = f" ({min(tops):.1f} to {max(tops):.1f})" if len(tops) > 1 else ""
            pairs = [100 * (float(row["top1"]) - plain[row["seed"]]) for row in some if row["seed"] in plain]
            against = f"{statistics.mean(pairs):+.2f}" if pairs else "-"
            ratio, saved = (statistics.median(float(row[key]) for row in some) for key in ("time", "saved"))
            steps = round(statistics.mean(int(row["steps"]) for row in some))
            cells = (name, f"{statistics.mean(tops):.2f}{spread}", len(tops), against, f"{ratio:.2f}x", f"{saved:.2f}x")
            print("| " + " | ".join(map(str, (*cells, steps))) + " |")
        print(
            "\n| stored in 8 bits | against | pairs | top-1, points | standard error |\n| --- | --- | --- | --- | --- |"
        )
        for name, twin in TWINS.items():
            whole = {row["seed"]: float(row["top1"]) for row in own if row["setting"] == twin}
            some = [row for row in own if row["setting"] == name and row["seed"] in whole]
            pairs = [100 * (float(row["top1"]) - whole[row["seed"]]) for row in some]
            if len(pairs) > 1:
                error = statistics.stdev(pairs) / len(pairs) ** 0.5
                print(f"| {name} | {twin} | {len(pairs)} | {statistics.mean(pairs):+.2f} | {error:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--data", help="training images: a folder or tar, one folder per class")
    task.add_argument("--show", type=Path, metavar="CSV", help="print a result file as Markdown instead")
    parser.add_argument("--test", help="test images, in the same form")
    parser.add_argument("--output", type=Path, default=Path("accuracy.csv"))
    parser.add_argument("--only", nargs="+", default=list(MODELS), choices=list(MODELS), metavar="MODEL")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    if args.show:
        show(args.show)
        return
    if not args.test:
        parser.error("--data needs --test, images to measure the accuracy on")
    torch.set_num_threads(args.threads)
    train_data, test_data = load(args.data, IMAGES), load(args.test, None)
    versions = f"torch {torch.__version__}, timm {timm.__version__}, {platform.machine()} CPU, {args.threads} threads"
    runs = [(seed, model, name) for seed in range(PAIRS) for model in args.only for name in settings(model)]
    runs.sort(key=lambda run: settings(run[1])[run[2]].later)
    with Progress() as progress:
        for seed, model_name, name in runs:
            setting, rows = settings(model_name)[name], read(args.output)
            done = {(row["model"], row["setting"], row["seed"]) for row in rows}
            steps = steps_of(setting, rows, model_name)
            if seed >= setting.seeds or steps is None or (model_name, name, str(seed)) in done:
                continue
            torch.manual_seed(seed)
            batch = scaled(train_data[0][:BATCH]), train_data[1][:BATCH]
            ratio, saved = cost(MODELS[model_name], setting.options, *batch)
            torch.manual_seed(seed)
            model = MODELS[model_name]()
            if setting.options is not None:
                keepgrad.apply(model, **setting.options)
            task = progress.add_task(f"{model_name}, {name}, seed {seed}", total=steps)
            loss = train(model, train_data, steps, setting.finish, lambda task=task: progress.advance(task))
            top1 = accuracy(model, test_data)
            found = (model_name, name, seed, top1, round(loss, 4), round(ratio, 3), round(saved, 3), steps, versions)
            append(args.output, dict(zip(COLUMNS, found, strict=True)))
    show(args.output)


if __name__ == "__main__":
    main()
