"""A training step of models of every family: saved bytes, peak and time of keepgrad against full backprop.

    python benchmarks/families.py [--only swin_small_patch4_window7_224 ...] [--batch-size 8] [--rounds 7] [--markdown]

Models are the examples of `keepgrad models` and those named here, with random weights, built from their configurations.
For each model the methods take turns in one run; "time" is the median over the rounds, relative to that of full
backprop. A model without sites has the methods that reduce nothing.
"""

from __future__ import annotations

import argparse
import copy
import platform
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

import keepgrad
from keepgrad._torch import tree_leaves
from keepgrad.calling import call
from keepgrad.catalogue import EXAMPLES, Example
from keepgrad.memory import peak_bytes, saved_bytes
from keepgrad.report import Table
from keepgrad.timing import seconds_in_turns

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
METHODS: dict[str, dict[str, Any]] = {
    "default": {},
    "0.5": {"keep_ratio": 0.5},
    "small, full": {"preset": "small", "store": "full"},
    "small": {"preset": "small"},
    "int8, nothing reduced": {"preset": "exact", "store": "int8"},
}


def step(model: nn.Module, given: Any) -> None:
    out = call(model, given)
    own = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.requires_grad]
    own[0].square().mean().backward()


def grown(given: Any, batch: int) -> Any:
    """The same inputs for `batch` samples."""
    if isinstance(given, dict):
        return {name: grown(value, batch) for name, value in given.items()}
    return given[:1].expand(batch, *given.shape[1:]).contiguous()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", default=DEFAULT, metavar="MODEL", help="names as `keepgrad models` has them"
    )
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    args = parser.parse_args()
    known = {example.model: example for example in (*EXAMPLES, *MORE)}
    unknown = [name for name in args.only if name not in known]
    if unknown:
        parser.error(f"--only: {unknown[0]!r} is not one of {', '.join(known)}")
    rows = []
    for name in args.only:
        rows += measured(known[name], args.batch_size, args.rounds)
        Console(stderr=True).print(rows[-1])
    head = ("model", "method", "sites", "saved", "peak", "time")
    title = (
        f"batch {args.batch_size}, fp32, {args.rounds} rounds; torch {torch.__version__}, {platform.machine()} CPU, "
        f"{torch.get_num_threads()} threads"
    )
    if args.markdown:
        print(f"{title}\n")
        for cells in (head, ("---",) * len(head), *rows):
            print("| " + " | ".join(cells) + " |")
    else:
        print(Table(title, head, rows).to_text())


def measured(example: Example, batch: int, rounds: int) -> list[tuple[str, ...]]:
    torch.manual_seed(0)
    base = example.build("cpu").train()
    given = grown(example.inputs(base), batch)
    models, facts = {"full backprop": base}, {}
    for name, options in METHODS.items():
        model = copy.deepcopy(base)
        try:
            facts[name] = len(keepgrad.apply(model, **options).sites)
        except keepgrad.NoSiteError:
            continue
        models[name] = model
    saved = {name: saved_bytes(lambda m=m: call(m, given), m) for name, m in models.items()}
    peaks = {name: peak_bytes(lambda m=m: step(m, given)) for name, m in models.items()}
    seconds = seconds_in_turns(
        {name: lambda m=m: (m.zero_grad(), step(m, given)) for name, m in models.items()}, rounds
    )
    full = "full backprop"
    return [
        (
            example.model,
            name,
            str(facts.get(name, "-")),
            f"{saved[name] / saved[full]:.2f}x",
            f"{peaks[name] / peaks[full]:.2f}x",
            f"{seconds[name] / seconds[full]:.2f}x",
        )
        for name in models
    ]


if __name__ == "__main__":
    main()
