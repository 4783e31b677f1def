"""Peak memory of a real training step of a detector, method by method, beside the paper's Table 2.

    python benchmarks/detect.py [--detector mask_rcnn] [--backbone convnext_tiny] [--height 800] [--width 1333]

A real step, because what a detector computes depends on its data: forward, backward and AdamW, in fp32, on random
images with random objects. Each method runs in a process of its own, one after another; the peak is what the allocator
of torch had out at most, by `keepgrad.measure`, weights, gradients and optimizer included. It is a later step of a run:
AdamW has its state.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time

import torch
from rich.console import Console
from torch import Tensor

import keepgrad
from keepgrad.methods import METHODS
from keepgrad.report import Table, readable_bytes
from keepgrad.train.detect import Detector, detector

NAMES = ("exact", "paper", "accurate (default)", "small, full", "small", "0.25, save input")
CHOSEN = ("full backprop", "checkpointing", "Algorithm 1, the paper's layers", *(f"keepgrad {name}" for name in NAMES))
PAPER = {  # without SBP and at 0.5, GB a GPU with 2 images, and the two ratios' quotient
    ("mask_rcnn", "convnext_tiny"): "8.6 / 5.9 GB, 0.69x",
    ("cascade_mask_rcnn", "convnext_base"): "17.4 / 12.5 GB, 0.72x",
}


def target(height: int, width: int, objects: int = 8) -> dict[str, Tensor]:
    corner = torch.rand(objects, 2) * torch.tensor([width * 0.6, height * 0.6])
    size = torch.rand(objects, 2) * torch.tensor([width * 0.35, height * 0.35]) + 16
    boxes = torch.cat([corner, corner + size], dim=1)
    masks = torch.zeros(objects, height, width, dtype=torch.uint8)
    for mask, (left, top, right, bottom) in zip(masks, boxes.long().tolist(), strict=True):
        mask[top:bottom, left:right] = 1
    return {"boxes": boxes, "labels": torch.randint(1, 81, (objects,)), "masks": masks}


def one(args: argparse.Namespace) -> None:
    """Measure one method, and print its report as JSON."""
    torch.manual_seed(0)
    model: Detector = detector(args.detector, args.backbone, 80, sizes=(args.height,), max_size=args.width).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # AdamW has its state from the first step on
    optimizer.zero_grad()
    images = [torch.rand(3, args.height, args.width) for _ in range(args.batch)]
    targets = [target(args.height, args.width) for _ in images]

    def step() -> None:
        optimizer.zero_grad()
        sum(model(images, targets).values()).backward()
        optimizer.step()

    start = time.perf_counter()
    with METHODS[args.method].put_on(model):
        report = keepgrad.measure(step, model=model)
    print(json.dumps({**report.to_dict(), "seconds": time.perf_counter() - start, "modules": {}}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--detector", default="mask_rcnn")
    parser.add_argument("--backbone", default="convnext_tiny")
    parser.add_argument("--height", type=int, default=800)
    parser.add_argument("--width", type=int, default=1333)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--method", choices=CHOSEN, help="measure this method alone, and print JSON")
    args = parser.parse_args()
    if args.method:
        one(args)
        return
    console = Console(stderr=True)
    rows: dict[str, dict] = {}
    for name in CHOSEN:
        with console.status(name):
            done = subprocess.run([sys.executable, *sys.argv, "--method", name], capture_output=True, text=True)
        if done.returncode:
            console.print(f"{name}: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else 'was killed'}")
            continue
        rows[name] = json.loads(done.stdout.splitlines()[-1])
        console.print(f"{name}: {readable_bytes(rows[name]['total'])}")
    title = (
        f"{args.detector}, {args.backbone}, {args.batch} images of {args.height}x{args.width}, fp32, AdamW; "
        f"torch {torch.__version__}, {platform.machine()} CPU; the paper at 0.5: "
        f"{PAPER.get((args.detector, args.backbone), 'not measured')}"
    )
    cells = []
    for name, row in rows.items():
        ratio = f"{row['total'] / rows['full backprop']['total']:.2f}x" if "full backprop" in rows else "-"
        fixed = row["parameters"] + row["gradients"] + row["optimizer"]
        parts = (readable_bytes(size) for size in (row["activations"], row["temporary"], fixed))
        cells.append((name, readable_bytes(row["total"]), ratio, *parts))
    head = ("method", "peak", "", "activations", "temporary", "weights, gradients, optimizer")
    print(Table(title, head, cells).to_markdown())


if __name__ == "__main__":
    main()
