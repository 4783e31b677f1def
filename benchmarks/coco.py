"""Training a detector on a piece of COCO, with full backprop and with keepgrad: does the loss fall alike?

    python benchmarks/coco.py --data coco200 [--steps 300] [--output docs/coco.csv]
    python benchmarks/coco.py --show docs/coco.csv      # the table as Markdown, and the curves beside the file

Mask R-CNN on a ConvNeXt-Atto from scratch at 256 pixels, AdamW, the same batches and the same first weights for every
setting. Layer scale begins at 1, so that the branches count from the first step. A setting's losses are written when
its run is over, and settings that are there are skipped. Average precision of boxes and masks is that of the last step,
on the validation images; a few hundred steps from random weights teach a detector next to nothing, so it only shows
that evaluation runs on real masks.
"""

from __future__ import annotations

import argparse
import csv
import platform
import statistics
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.progress import Progress

from keepgrad.files import written_whole
from keepgrad.methods import FULL, Method, kept
from keepgrad.report import Table, figures
from keepgrad.train.config import DetectConfig
from keepgrad.train.detect import Batch, Detection
from keepgrad.train.loop import accelerator_for

METHODS = {method.name: method for method in (FULL, kept(), kept(preset="paper"))}
COLUMNS = ("method", "step", "loss", "box_ap50", "mask_ap50", "versions")
SMOOTH = 25  # steps that a point of the curve is the mean of


def batches(task: Detection) -> Iterator[Batch]:
    epoch = 0
    while True:
        yield from task.batches(epoch, 0)
        epoch += 1


def run(method: Method, config: DetectConfig, steps: int, advance: object) -> tuple[list[float], dict]:
    task = Detection(config, accelerator_for(config))
    model = task.model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=config.weight_decay)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=steps // 10)
    losses = []
    with method.put_on(model):
        for number, batch in zip(range(steps), batches(task), strict=False):
            torch.manual_seed(number)
            loss = task.loss(model, batch)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            advance()
    return losses, task.evaluate(model.eval())


def read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def show(path: Path) -> None:
    """Print a result file as Markdown, and draw its curves."""
    rows = read(path)
    figure = figures().Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    print(*dict.fromkeys(row["versions"] for row in rows), sep="; ")
    table = []
    for name in METHODS:
        own = [row for row in rows if row["method"] == name]
        losses = [float(row["loss"]) for row in own]
        if not losses:
            continue
        means = [statistics.mean(losses[n - SMOOTH : n]) for n in range(SMOOTH, len(losses) + 1)]
        axes.plot(range(SMOOTH, len(losses) + 1), means, label=name)
        box, mask = (float(own[-1][key]) for key in ("box_ap50", "mask_ap50"))
        table.append((name, f"{means[0]:.3f}", f"{means[-1]:.3f}", f"{box:.2%}", f"{mask:.2%}"))
    head = ("method", f"loss, first {SMOOTH} steps", f"last {SMOOTH} steps", "box AP50", "mask AP50")
    print(Table("", head, table).to_markdown())
    axes.set(xlabel="step", ylabel=f"loss, mean of {SMOOTH} steps")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path.with_suffix(".png"), dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--data", help="a folder in the layout of COCO")
    task.add_argument("--show", type=Path, metavar="CSV", help="print a result file, and draw it, instead")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--output", type=Path, default=Path("coco.csv"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    if args.show:
        show(args.show)
        return
    torch.set_num_threads(args.threads)
    config = DetectConfig(
        data=args.data,
        backbone="convnext_atto",
        backbone_kwargs={"ls_init_value": 1.0},
        sizes="256",
        max_size=384,
        channels=128,
        head_width=512,
        anchor=16,
        rois=128,
        lr=2e-4,
        workers=0,
    )
    versions = f"torch {torch.__version__}, {platform.machine()} CPU, {args.threads} threads"
    with Progress() as progress:
        for name, method in METHODS.items():
            rows = read(args.output)
            if any(row["method"] == name for row in rows):
                continue
            bar = progress.add_task(name, total=args.steps)
            losses, metrics = run(method, config, args.steps, lambda bar=bar: progress.advance(bar))
            for step, loss in enumerate(losses, 1):
                last = step == len(losses)
                precision = [round(metrics[key], 5) if last else "" for key in ("box_ap50", "mask_ap50")]
                rows.append(dict(zip(COLUMNS, (name, step, round(loss, 4), *precision, versions), strict=True)))
            with written_whole(args.output) as partial, partial.open("w", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS)
                writer.writeheader()
                writer.writerows(rows)
    show(args.output)


if __name__ == "__main__":
    main()
