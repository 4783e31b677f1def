"""Video: which mask and which settings agree best with exact gradients and train best, and what large models save.

    python benchmarks/video.py masks      # minutes; trains the model of examples/video.py and measures on it
    python benchmarks/video.py settings   # minutes; trains it with each setting
    python benchmarks/video.py memory     # a few minutes

`masks` trains two VideoMAEs on moving digits with full backprop, one with 8x4x4 patches and one with 4x8x8, and prints
the cosine of the whole gradient with the exact one, all blocks reduced, for masks, tiles and reductions. Tiles are
frames x rows x columns. `settings` trains the model of the example with each of several settings, and prints the
accuracy of every seed, the cosine of its gradient on a model that was trained with full backprop, and saved bytes.
`memory` has a VideoMAE-B and a Swin3D-T with random weights on clips of 16 frames of 224 pixels: saved is what autograd
keeps for backward, counted in a forward pass; peak is that of a training step, estimated.
"""

from __future__ import annotations

import argparse
import platform
import runpy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchvision
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import keepgrad
from keepgrad import sampling, walks
from keepgrad.adapters import find_blocks
from keepgrad.memory import saved_bytes

RATIOS = (0.5, 0.25, 0.125)
REDUCTIONS = ("drop", "fold", "pool")
MODELS = {"8x4x4 patches": (16, 4), "4x8x8 patches": (8, 2)}  # frames, pixels a patch
TUBES = ((1, 1), (1, 2), (2, 1), (2, 2), (4, 1))

PAPER = {"keep_ratio": 0.25, "reduce": "drop", "mask": "frame"}

MEMORY: dict[str, dict | None] = {
    "full backprop": None,
    "checkpointing": None,
    "the paper: drop whole frames, 0.25": PAPER,
    "exact": {"preset": "exact"},
    "accurate (default)": {},
    "0.5": {"keep_ratio": 0.5},
    "0.25": {"keep_ratio": 0.25},
    "0.125": {"keep_ratio": 0.125},
    "small, full": {"preset": "small", "store": "full"},
    "accurate, int8": {"store": "int8"},
    "0.25, int8": {"keep_ratio": 0.25, "store": "int8"},
    "small": {"preset": "small"},
}

TRAINED: dict[str, dict | None] = {
    "full backprop": None,
    "the paper: drop whole frames, 0.25": PAPER,
    "0.25": {"keep_ratio": 0.25},
    "0.25, drop": {"keep_ratio": 0.25, "reduce": "drop"},
    "0.25, careful": {"keep_ratio": 0.25, "schedule": "careful"},
    "0.25, query": {"keep_ratio": 0.25, "attention": "query"},
    "attention 1, MLP 0.25": {"keep_ratio": {"attention": 1.0, "mlp": 0.25}},
    "accurate (default)": {},
    "attention 1, MLP 0.25, int8": {"keep_ratio": {"attention": 1.0, "mlp": 0.25}, "store": "int8"},
    "accurate, int8": {"store": "int8"},
    "small": {"preset": "small"},
}


def example() -> dict[str, Any]:
    return runpy.run_path(str(Path(__file__).parents[1] / "examples" / "video.py"))


def trained(steps: int, frames: int, patch: int) -> tuple[nn.Module, list]:
    """A model that was trained with full backprop, and held-out clips."""
    video = example()
    model = video["make"](0, frames, patch)
    video["train"](model, video["Clips"](held_out=False, seed=0, frames=frames), steps)
    held_out = video["Clips"](held_out=True, seed=0, frames=frames)
    return model, [held_out.batch(video["BATCH"]) for _ in range(4)]


def masks(steps: int) -> None:
    loss_of = example()["loss_of"]
    for title, (frames, patch) in MODELS.items():
        model, batches = trained(steps, frames, patch)
        print(f"\n{title}, {steps} steps\n")
        print(f"| ratio | mask | {' | '.join(REDUCTIONS)} |")
        print(f"| {' | '.join(['---'] * (2 + len(REDUCTIONS)))} |")
        for ratio in RATIOS:
            for mask, name in candidates(round(1 / ratio), frames // 2):
                options = {"keep_ratio": ratio, "mask": mask}
                found = [agreement(model, batches, loss_of, reduce=reduce, **options) for reduce in REDUCTIONS]
                print(f"| {ratio:g} | {name} | {' | '.join(f'{one:.3f}' for one in found)} |", flush=True)


def candidates(group: int, frames: int) -> Iterator[tuple[str, str]]:
    """Masks with their names; while one is used, the grid has the tiles that its name says."""
    before, grouping = walks.TUBE, sampling._grouping
    for deep, tall in TUBES:
        wide = group // (deep * tall)
        if wide and deep <= frames:
            walks.TUBE = (deep, tall)
            yield "grid", f"grid {deep}x{tall}x{wide}"
    walks.TUBE = before
    if group > 2:  # of two, the picked one alternates
        sampling._grouping = partial(same_member, grouping)
        yield "grid", f"grid 2x2x{group // 4}, the same member in all frames"
        sampling._grouping = grouping
    yield "random", "random"
    if group <= frames:
        yield "frame", "frame"


def same_member(grouping: Any, seed: int, tables: Any, shape: Any, mask: str) -> tuple[Tensor, Tensor]:
    """Groups as they are, of which the picked member is the same in all frames."""
    order, _ = grouping(seed, tables, shape, mask)
    phase = sampling._hashed_numbers(seed, 2, 3)[0]
    return order, order.index_select(0, tables.starts + phase % tables.sizes)


def settings(steps: int, seeds: int) -> None:
    video = example()
    exact, batches = trained(steps, video["FRAMES"], 4)
    given, _ = video["Clips"](held_out=False, seed=0).batch(video["BATCH"])
    full = saved_bytes(lambda: exact(given), exact)
    print(f"\n4x4x4 patches, {steps} steps, {seeds} seeds\n")
    print("| setting | saved | cosine | accuracy | mean |\n| --- | --- | --- | --- | --- |")
    for name, options in TRAINED.items():
        accuracies = []
        for seed in range(seeds):
            model = video["make"](seed)
            if options is not None:
                keepgrad.apply(model, **options)
            video["train"](model, video["Clips"](held_out=False, seed=seed), steps)
            accuracies.append(video["accuracy"](model, 2048))
        saved = saved_bytes(lambda model=model: model.train()(given), model)
        cosine = 1.0 if options is None else agreement(exact, batches, video["loss_of"], **options)
        shown = " ".join(f"{one:.1%}" for one in accuracies)
        print(f"| {name} | {saved / full:.2f}x | {cosine:.3f} | {shown} | {sum(accuracies) / seeds:.1%} |", flush=True)


def agreement(model: nn.Module, batches: list, loss_fn: Any, **options: Any) -> float:
    keepgrad.apply(model.train(), seed=0, **options)
    try:
        return keepgrad.fidelity(model, batches, loss_fn, draws=4).whole.cosine
    finally:
        keepgrad.remove(model)


def memory(batch: int) -> None:
    torch.manual_seed(0)
    clips = torch.randn(batch, 16, 3, 224, 224)
    config = transformers.VideoMAEConfig(num_labels=400)
    models = {
        "VideoMAE-B": (partial(transformers.VideoMAEForVideoClassification, config), clips),
        "Swin3D-T": (torchvision.models.video.swin3d_t, clips.transpose(1, 2).contiguous()),
    }
    for title, (make, given) in models.items():
        print(f"\n{title}, batch {batch}, 16 frames of 224 pixels, float32, AdamW\n")
        print("| setting | saved, MB | saved | peak, MB | peak |\n| --- | --- | --- | --- | --- |")
        model, full = make().train(), []
        for setting, options in MEMORY.items():
            with as_set(model, setting, options):
                found = [saved_bytes(partial(model, given), model), keepgrad.estimate(model, given).total]
            full = full or found
            shown = [f"{one / 2**20:.0f} | {one / whole:.2f}x" for one, whole in zip(found, full, strict=True)]
            print(f"| {setting} | {' | '.join(shown)} |", flush=True)


@contextmanager
def as_set(model: nn.Module, setting: str, options: dict | None) -> Iterator[None]:
    """The model as a setting has it. Checkpointing is of every block."""
    blocks: list[nn.Module] = []
    if options is not None:
        keepgrad.apply(model, **options)
    elif setting == "checkpointing":
        blocks = [block.module for block in find_blocks(model) if block.outer is None]
        for block in blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    yield
    if options is not None:
        keepgrad.remove(model)
    for block in blocks:
        del block.forward


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["masks", "settings", "memory"])
    parser.add_argument("--steps", type=int, default=300, help="training steps of a model (default: 300)")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each setting (default: 2)")
    parser.add_argument("--batch", type=int, default=2, help="clips a step whose memory is estimated (default: 2)")
    args = parser.parse_args()
    versions = {one.__name__: one.__version__ for one in (torch, torchvision, transformers)}
    print(", ".join(f"{name} {version}" for name, version in versions.items()), f"({platform.machine()} CPU)")
    if args.what == "memory":
        memory(args.batch)
    elif args.what == "settings":
        settings(args.steps, args.seeds)
    else:
        masks(args.steps)


if __name__ == "__main__":
    main()
