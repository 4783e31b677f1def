"""Train a small video model on moving digits, with full backprop and with keepgrad, and print both side by side.

    python examples/video.py            # about 80 seconds on two free cores
    python examples/video.py --steps 3 --seeds 1  # to see that it runs

A clip is one of scikit-learn's digits that moves over the middle of a field of 16x16 pixels for 8 frames, up, down,
left or right. It begins anywhere on its way and comes back on the other side when it leaves. The model has to tell the
digit and the direction, 40 classes; no single frame tells the direction. Clips are made anew in every step; digits that
are held out are never trained on. The model is a VideoMAE of 3 layers from its configuration, with 4x4x4 patches. Needs
transformers and scikit-learn.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from transformers import VideoMAEConfig, VideoMAEForVideoClassification

import keepgrad
from keepgrad.memory import saved_bytes

FRAMES, SIDE, BATCH, TEST, LEARNING_RATE = 8, 16, 32, 360, 3e-3
DIRECTIONS = ((-1, 0), (1, 0), (0, -1), (0, 1))

SETTINGS: dict[str, dict | None] = {
    "full backprop": None,
    "the paper: drop whole frames, 0.25": {"keep_ratio": 0.25, "reduce": "drop", "mask": "frame"},
    "keepgrad, 0.25": {"keep_ratio": 0.25},
    "keepgrad, default": {},
    "keepgrad, default, int8": {"store": "int8"},
}


class Clips:
    """Moving digits, to train on or held out. The same seed gives the same clips."""

    def __init__(self, held_out: bool, seed: int, frames: int = FRAMES) -> None:
        found = load_digits()
        order = torch.randperm(len(found.images), generator=torch.Generator().manual_seed(0))
        chosen = order[:TEST] if held_out else order[TEST:]
        images = torch.tensor(found.images, dtype=torch.float32)[chosen] / 4
        self.fields = F.pad(images, ((SIDE - 8) // 2,) * 4)
        self.digits = torch.tensor(found.target)[chosen]
        self.generator, self.frames = torch.Generator().manual_seed(seed), frames

    def batch(self, count: int) -> tuple[Tensor, Tensor]:
        """Clips `[count, frames, 1, side, side]` and their classes."""
        which = torch.randint(len(self.fields), (count,), generator=self.generator)
        ways = torch.randint(len(DIRECTIONS), (count,), generator=self.generator)
        starts = torch.randint(SIDE, (count,), generator=self.generator)
        clips = torch.empty(count, self.frames, 1, SIDE, SIDE)
        for clip, field, way, start in zip(clips, self.fields[which], ways.tolist(), starts.tolist(), strict=True):
            down, right = DIRECTIONS[way]
            for frame, image in enumerate(clip, start):
                image[0] = field.roll((frame * down, frame * right), (0, 1))
        return clips, ways * 10 + self.digits[which]


def make(seed: int, frames: int = FRAMES, patch: int = 4) -> nn.Module:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 384}
    shape = {"image_size": SIDE, "patch_size": patch, "num_frames": frames, "tubelet_size": 2, "num_channels": 1}
    config = VideoMAEConfig(**sizes, **shape, num_labels=10 * len(DIRECTIONS), initializer_range=0.1)
    return VideoMAEForVideoClassification(config).train()


def loss_of(out: object, classes: Tensor) -> Tensor:
    return F.cross_entropy(out.logits, classes)  # type: ignore[attr-defined]


def train(model: nn.Module, clips: Clips, steps: int) -> float:
    """Train the model; the seconds that it took, without making the clips."""
    seconds = 0.0
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps + 1, pct_start=0.1)
    for _ in range(steps):
        given, classes = clips.batch(BATCH)
        start = time.perf_counter()
        loss_of(model(given), classes).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        seconds += time.perf_counter() - start
    return seconds


@torch.no_grad()
def accuracy(model: nn.Module, count: int) -> float:
    """The share of so many held-out clips whose digit and direction the model tells."""
    given, classes = Clips(held_out=True, seed=0).batch(count)
    model.eval()
    right = torch.cat([model(some).logits.argmax(1) for some in given.split(128)]) == classes
    return right.float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="training steps a run (default: 200)")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each setting (default: 2)")
    parser.add_argument("--held-out", type=int, default=1024, help="clips for the accuracy (default: 1024)")
    args = parser.parse_args()
    given, _ = Clips(held_out=False, seed=0).batch(BATCH)
    full_seconds = full_bytes = 0.0
    print(f"{'setting':36} {'accuracy':>16} {'time':>6} {'saved':>6}")
    for name, options in SETTINGS.items():
        found, seconds, saved = [], 0.0, 0
        for seed in range(args.seeds):
            model = make(seed)
            if options is not None:
                keepgrad.apply(model, **options)
            saved = saved_bytes(lambda model=model: model(given), model)
            seconds += train(model, Clips(held_out=False, seed=seed), args.steps)
            found.append(accuracy(model, args.held_out))
        full_seconds, full_bytes = full_seconds or seconds, full_bytes or saved
        shown = " ".join(f"{one:.1%}" for one in found)
        print(f"{name:36} {shown:>16} {seconds / full_seconds:5.2f}x {saved / full_bytes:5.2f}x", flush=True)


if __name__ == "__main__":
    main()
