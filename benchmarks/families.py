"""A training step of models of every family: what `keepgrad bench` measures, for a few methods.

    python benchmarks/families.py [--only swin_small_patch4_window7_224 ...] [--batch-size 8] [--rounds 7] [--markdown]

Models are the examples of `keepgrad models` and those named here, with random weights, built from their configurations.
A model without sites has the methods that reduce nothing.
"""

from __future__ import annotations

import argparse
import os
import platform

import torch

from keepgrad.bench import Task, bench
from keepgrad.catalogue import EXAMPLES, Example
from keepgrad.methods import FULL, kept
from keepgrad.report import progress

MORE = (
    Example("Swin", "swin_small_patch4_window7_224"),
    Example("EVA-02", "eva02_base_patch14_224"),
    Example("ResNet (no site)", "resnet50"),
    Example("EfficientNet (no site)", "efficientnet_b0"),
    Example("CLIP, vision", "transformers:CLIPVisionModel patch_size=16"),
)
DEFAULT = (
    "swin_small_patch4_window7_224",
    "eva02_small_patch14_224",
    "transformers:Dinov2Model",
    "transformers:CLIPVisionModel patch_size=16",
)
METHODS = (
    FULL,
    kept(),
    kept(keep_ratio=0.5),
    kept(preset="small", store="full"),
    kept(preset="small"),
    kept(preset="exact", store="int8"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", default=DEFAULT, metavar="MODEL", help="names as `keepgrad models` has them"
    )
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    args = parser.parse_args()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    known = {example.model: example for example in (*EXAMPLES, *MORE)}
    unknown = [name for name in args.only if name not in known]
    if unknown:
        parser.error(f"--only: {unknown[0]!r} is not one of {', '.join(known)}")
    for name in args.only:
        torch.manual_seed(0)
        model = known[name].build("cpu").train()
        task = Task(model, known[name].inputs(model, args.batch_size))
        with progress(len(METHODS) + args.rounds + 1) as advance:
            found = bench(
                task, METHODS, args.rounds, f"{name}, batch {args.batch_size}; {platform.machine()} CPU", advance
            )
        for table in found.tables():
            print(table.to_markdown() if args.markdown else table.to_text(), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
