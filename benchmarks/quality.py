"""How well kept gradients agree with exact ones, on small models trained on real images.

    python benchmarks/quality.py --data cifar10-train.tar [--steps 50 400] [--output quality.csv]
    python benchmarks/quality.py --show quality.csv

Trains a small ViT (class token), a small ViT (average pooling) and a small ConvNeXt with full backprop. At each of
`--steps` it measures, for every setting: the cosine with the exact gradient of the same batch and the ratio of the
norms, mean over draws of the masks; the cosine of the mean over the draws (what is missing always); and the bytes
saved for backward. The last rows are the trivial baseline: the gradient of only a share of the samples. Results are
appended to the output as they come, and what is there already is skipped.
"""

from __future__ import annotations

import argparse
import copy
import csv
import platform
from collections.abc import Iterator
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from rich.progress import track
from timm.data import create_dataset
from torchvision.transforms import v2

import keepgrad
from keepgrad.memory import saved_bytes
from keepgrad.report import Table

VIT = {"img_size": 32, "patch_size": 4, "embed_dim": 128, "depth": 6, "num_heads": 4, "num_classes": 10}
MODELS = {
    "ViT, class token": lambda: timm.models.VisionTransformer(**VIT),
    "ConvNeXt": lambda: timm.models.ConvNeXt(
        depths=(1, 2, 4, 1), dims=(24, 48, 96, 192), patch_size=1, num_classes=10, ls_init_value=1.0
    ),
    "ViT, average pooling": lambda: timm.models.VisionTransformer(**VIT, class_token=False, global_pool="avg"),
}


COLUMNS = ("model", "step", "setting", "cosine", "norm_ratio", "cosine_of_mean", "bytes")


def settings(attention: bool) -> dict[str, dict]:
    """Every setting that is compared, by the name it has in the table."""
    rows: dict[str, dict] = {name: {"preset": name} for name in ("paper", "accurate")}
    for ratio in (0.5, 0.25, 0.125):
        for reduce in ("drop", "scaled", "fold", "pool") if ratio > 0.2 else ("fold", "pool"):
            rows[f"{reduce} {ratio}"] = {"keep_ratio": ratio, "reduce": reduce}
            if attention:
                both = {"attention": 1.0, "mlp": ratio}
                rows[f"attention 1, mlp {reduce} {ratio}"] = {"keep_ratio": both, "reduce": reduce}
    for mask in ("random", "block"):
        rows[f"drop 0.5, {mask}"] = {"keep_ratio": 0.5, "reduce": "drop", "mask": mask}
    if attention:
        for method in ("query", "head"):
            rows[f"drop 0.5, {method}"] = {"keep_ratio": 0.5, "reduce": "drop", "attention": method}
    else:
        rows["drop 0.5, downsample"] = {"keep_ratio": 0.5, "reduce": "drop", "downsample": True}
        rows["pool 0.5, downsample"] = {"keep_ratio": 0.5, "reduce": "pool", "downsample": True}
    return rows


def gradient(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()]).double()


def compare(grads: list[torch.Tensor], exact: torch.Tensor) -> tuple[float, float, float]:
    """Mean cosine, mean norm ratio, and cosine of the mean gradient."""
    cosines = torch.stack([torch.cosine_similarity(g, exact, dim=0) for g in grads])
    norms = torch.stack([g.norm() / exact.norm() for g in grads])
    return float(cosines.mean()), float(norms.mean()), float(torch.cosine_similarity(sum(grads), exact, dim=0))


def measure(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor, draws: int) -> list[tuple]:
    exact = gradient(model, images, labels)
    plain = saved_bytes(lambda: model(images), model)
    attention = isinstance(model, timm.models.VisionTransformer)
    rows = []
    for name, options in settings(attention).items():
        twin = copy.deepcopy(model)
        keepgrad.apply(twin, **options)
        grads = [gradient(twin, images, labels) for _ in range(draws)]
        rows.append((name, *compare(grads, exact), saved_bytes(lambda m=twin: m(images), twin) / plain))
    for share in (0.5, 0.25):
        grads = []
        for _ in range(draws):
            some = torch.randperm(len(images))[: int(len(images) * share)]
            grads.append(gradient(model, images[some], labels[some]))
        rows.append((f"samples {share}", *compare(grads, exact), share))
    return rows


def append(path: Path, rows: list[tuple]) -> None:
    with path.open("a", newline="") as file:
        csv.writer(file).writerows(rows)


def finished(path: Path) -> set[tuple[str, str]]:
    """The models and steps that a result file has."""
    with path.open(newline="") as file:
        return {(row[0], row[1]) for row in csv.reader(file)}


def show(path: Path) -> None:
    """Print a result file as Markdown."""
    with path.open(newline="") as file:
        first, *rows = csv.reader(file)
    print(first[-1])
    head = ("setting", "cosine", "norm ratio", "cosine of the mean", "bytes")
    for title, step in dict.fromkeys((row[0], row[1]) for row in rows):
        own = [(row[2], *(f"{float(v):.3f}" for v in row[3:])) for row in rows if row[:2] == [title, step]]
        print(Table(f"\n{title}, step {step}", head, own).to_markdown())


def endless(loader: torch.utils.data.DataLoader) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    while True:
        yield from loader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--data", help="a folder or tar of images, one folder per class")
    task.add_argument("--show", type=Path, metavar="CSV", help="print a result file as Markdown instead")
    parser.add_argument("--steps", type=int, nargs="+", default=[50, 400])
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--draws", type=int, default=4)
    parser.add_argument("--output", type=Path, default=Path("quality.csv"))
    args = parser.parse_args()
    if args.show:
        show(args.show)
        return
    torch.manual_seed(0)
    scaled = [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5], [0.25])]
    dataset = create_dataset("", root=args.data, transform=v2.Compose([v2.RandomHorizontalFlip(), *scaled]))
    loader = torch.utils.data.DataLoader(dataset, args.batch_size, shuffle=True, drop_last=True)
    threads = torch.get_num_threads()
    versions = f"torch {torch.__version__}, timm {timm.__version__}, {platform.machine()} CPU, {threads} threads"
    if not args.output.exists():
        append(args.output, [(*COLUMNS, versions)])
    for title, make in MODELS.items():
        if all((title, str(step)) in finished(args.output) for step in args.steps):
            continue
        torch.manual_seed(0)
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.05)
        batches = endless(loader)
        for step in track(range(1, max(args.steps) + 1), description=title):
            images, labels = next(batches)
            if step in args.steps and (title, str(step)) not in finished(args.output):
                append(args.output, [(title, step, *row) for row in measure(model, images, labels, args.draws)])
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
    show(args.output)


if __name__ == "__main__":
    main()
