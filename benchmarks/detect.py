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
from keepgrad.baseline import algorithm1
from keepgrad.report import readable_bytes
from keepgrad.train.detect import Detector, detector

METHODS = {
    "full backprop": lambda model: None,
    "checkpointing": lambda model: model.set_grad_checkpointing(),
    "Algorithm 1, the paper's layers": lambda model: algorithm1(model, keepgrad.KeepConfig(preset="paper")),
    "keepgrad exact": lambda model: keepgrad.apply(model, preset="exact"),
    "keepgrad paper": lambda model: keepgrad.apply(model, preset="paper"),
    "keepgrad accurate (default)": lambda model: keepgrad.apply(model),
    "keepgrad small, full": lambda model: keepgrad.apply(model, preset="small", store="full"),
    "keepgrad small": lambda model: keepgrad.apply(model, preset="small"),
    "keepgrad 0.25, save input": lambda model: keepgrad.apply(model, keep_ratio=0.25, save="input"),
}
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
    METHODS[args.method](model)
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
    report = keepgrad.measure(step, model=model)
    print(json.dumps({**report.to_dict(), "seconds": time.perf_counter() - start, "modules": {}}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--detector", default="mask_rcnn")
    parser.add_argument("--backbone", default="convnext_tiny")
    parser.add_argument("--height", type=int, default=800)
    parser.add_argument("--width", type=int, default=1333)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--method", choices=list(METHODS), help="measure this method alone, and print JSON")
    args = parser.parse_args()
    if args.method:
        one(args)
        return
    console = Console(stderr=True)
    rows: dict[str, dict] = {}
    for name in METHODS:
        with console.status(name):
            done = subprocess.run([sys.executable, *sys.argv, "--method", name], capture_output=True, text=True)
        if done.returncode:
            console.print(f"{name}: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else 'was killed'}")
            continue
        rows[name] = json.loads(done.stdout.splitlines()[-1])
        console.print(f"{name}: {readable_bytes(rows[name]['total'])}")
    print(
        f"{args.detector}, {args.backbone}, {args.batch} images of {args.height}x{args.width}, fp32, AdamW; "
        f"torch {torch.__version__}, {platform.machine()} CPU; the paper at 0.5: "
        f"{PAPER.get((args.detector, args.backbone), 'not measured')}\n"
    )
    print("| method | peak |  | activations | temporary | weights, gradients, optimizer |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, row in rows.items():
        ratio = f"{row['total'] / rows['full backprop']['total']:.2f}x" if "full backprop" in rows else "-"
        fixed = row["parameters"] + row["gradients"] + row["optimizer"]
        parts = (row["total"], ratio, row["activations"], row["temporary"], fixed)
        print("| " + " | ".join([name, *(p if isinstance(p, str) else readable_bytes(p) for p in parts)]) + " |")


if __name__ == "__main__":
    main()
