"""Video: which mask agrees best with exact gradients, and what a VideoMAE-B saves.

    python benchmarks/video.py masks    # a few minutes; trains the model of examples/video.py and measures on it
    python benchmarks/video.py memory   # a few minutes

`masks` trains two VideoMAEs on moving digits with full backprop, one with 8x4x4 patches and one with 4x8x8, and prints
the cosine of the whole gradient with the exact one, all blocks reduced, for masks, tiles and reductions. Tiles are
frames x rows x columns. `memory` has a VideoMAE-B with random weights on clips of 16 frames of 224 pixels: saved is
what autograd keeps for backward, counted in a forward pass; peak is that of a training step, estimated.
"""

from __future__ import annotations

import argparse
import platform
import runpy
from collections.abc import Iterator
from pathlib import Path

import torch
import torchvision
import transformers
from torch import nn

import keepgrad
from keepgrad import walks
from keepgrad.memory import saved_bytes
from keepgrad.methods import CHECKPOINTING, FULL, kept
from keepgrad.report import Table

RATIOS = (0.5, 0.25, 0.125)
REDUCTIONS = ("drop", "scaled", "fold", "pool")
MODELS = {"8x4x4 patches": (16, 4), "4x8x8 patches": (8, 2)}  # frames, pixels a patch
TUBES = ((1, 1), (1, 2), (2, 1), (2, 2), (4, 1))

PAPER = kept(keep_ratio=0.25, reduce="drop", mask="frame")
METHODS = (
    *(FULL, CHECKPOINTING, PAPER, kept(preset="exact"), kept(preset="accurate")),
    *(kept(keep_ratio=ratio) for ratio in RATIOS),
    *(kept(preset="small", store="full"), kept(preset="accurate", store="int8")),
    *(kept(keep_ratio=0.25, store="int8"), kept(preset="small")),
)


def masks(steps: int) -> None:
    example = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "video.py"))
    for title, (frames, patch) in MODELS.items():
        model = example["make"](0, frames, patch)
        example["train"](model, example["Clips"](held_out=False, seed=0, frames=frames), steps)
        held_out = example["Clips"](held_out=True, seed=0, frames=frames)
        batches = [held_out.batch(example["BATCH"]) for _ in range(4)]
        rows = []
        for ratio in RATIOS:
            for mask, name in candidates(round(1 / ratio), frames // 2):
                found = [agreement(model, batches, example["loss_of"], ratio, mask, reduce) for reduce in REDUCTIONS]
                rows.append((f"{ratio:g}", name, *(f"{one:.3f}" for one in found)))
        print(Table(f"\n{title}, {steps} steps", ("ratio", "mask", *REDUCTIONS), rows).to_markdown(), flush=True)


def candidates(group: int, frames: int) -> Iterator[tuple[str, str]]:
    """Masks with their names; while one is used, the grid has the tiles that its name says."""
    before = walks.TUBE
    for deep, tall in TUBES:
        wide = group // (deep * tall)
        if wide and deep <= frames:
            walks.TUBE = (deep, tall)
            yield "grid", f"grid {deep}x{tall}x{wide}"
    walks.TUBE = before
    yield "random", "random"
    if group <= frames:
        yield "frame", "frame"


def agreement(model: nn.Module, batches: list, loss_fn, ratio: float, mask: str, reduce: str) -> float:
    keepgrad.apply(model, keep_ratio=ratio, mask=mask, reduce=reduce, seed=0)
    try:
        return keepgrad.fidelity(model, batches, loss_fn, draws=4).whole.cosine
    finally:
        keepgrad.remove(model)


def memory(batch: int) -> None:
    torch.manual_seed(0)
    model = transformers.VideoMAEForVideoClassification(transformers.VideoMAEConfig(num_labels=400)).train()
    clips = torch.randn(batch, 16, 3, 224, 224)
    print(f"\nVideoMAE-B, batch {batch}, 16 frames of 224 pixels, float32, AdamW\n")
    rows: list[tuple[str, ...]] = []
    full: list[int] = []
    for method in METHODS:
        with method.put_on(model):
            found = [saved_bytes(lambda: model(clips), model), keepgrad.estimate(model, clips).total]
        full = full or found
        pairs = [(f"{one / 2**20:.0f}", f"{one / whole:.2f}x") for one, whole in zip(found, full, strict=True)]
        rows.append((method.name, *pairs[0], *pairs[1]))
    print(Table("", ("method", "saved, MB", "saved", "peak, MB", "peak"), rows).to_markdown())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["masks", "memory"])
    parser.add_argument("--steps", type=int, default=300, help="training steps before masks are measured")
    parser.add_argument("--batch", type=int, default=2, help="clips a step whose memory is estimated")
    args = parser.parse_args()
    versions = {one.__name__: one.__version__ for one in (torch, torchvision, transformers)}
    print(", ".join(f"{name} {version}" for name, version in versions.items()), f"({platform.machine()} CPU)")
    masks(args.steps) if args.what == "masks" else memory(args.batch)


if __name__ == "__main__":
    main()
