"""What storing in 8 bits does to gradients, on small models trained on real images.

    python benchmarks/store.py --data cifar10-train.tar [--steps 300] [--markdown]

Trains a small ViT, ConvNeXt and ResNet (batch norm, ReLU, no site) with full backprop. Then, for each setting, the
gradient with `store="int8"` is compared with that of the same setting stored in full, with the same masks: the cosine
of the whole, that of the worst layer (weights and bias as one), and that of the mean over the draws, which shows what
is missing always. Besides keepgrad's own rounding there are others to compare with: to the nearest step, and 4 bits in
groups of 32 (packed here into bytes all the same; "saved" is what 4 bits would be).
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import platform
from collections.abc import Iterator
from typing import Any
from unittest import mock

import timm
import torch
import torch.nn.functional as F
from rich.progress import track
from timm.data import create_dataset
from torch import Tensor, nn
from torchvision.transforms import v2

import keepgrad
from keepgrad.memory import saved_bytes
from keepgrad.ops import store
from keepgrad.report import Table

MODELS = {
    "ViT": lambda: timm.models.VisionTransformer(
        img_size=32, patch_size=4, embed_dim=128, depth=6, num_heads=4, num_classes=10
    ),
    "ConvNeXt": lambda: timm.models.ConvNeXt(
        depths=(1, 2, 4, 1), dims=(32, 64, 96, 192), patch_size=1, num_classes=10, ls_init_value=1.0
    ),
    "ResNet": lambda: timm.models.resnet.ResNet(
        timm.models.resnet.BasicBlock, (1, 1, 1, 1), num_classes=10, channels=(32, 64, 128, 256)
    ),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "exact": {"preset": "exact"},
    "accurate": {"preset": "accurate"},
    "0.5": {"keep_ratio": 0.5},
}
DRAWS = 8


@contextlib.contextmanager
def nearest() -> Iterator[None]:
    halves = lambda seed, like: torch.full_like(dither(seed, like), 0.5)  # noqa: E731
    dither = store.dither
    with mock.patch("keepgrad.draw.dither", halves):
        yield


@contextlib.contextmanager
def four_bits() -> Iterator[None]:
    with mock.patch.object(store, "GROUP", 32), mock.patch.object(store, "LEVELS", 7):
        yield


ROUNDINGS = {"int8": contextlib.nullcontext, "int8, to the nearest": nearest, "int4": four_bits}


def gradients(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """The gradient of each layer."""
    model.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    layers: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        layers.setdefault(name.rpartition(".")[0], []).append(parameter.grad.flatten().double())
    return {name: torch.cat(some) for name, some in layers.items()}


def cosine(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return float(torch.cosine_similarity(torch.cat(list(a.values())), torch.cat(list(b.values())), dim=0))


def draws(model: nn.Module, options: dict[str, Any], batch: tuple[Tensor, Tensor]) -> list[dict[str, Tensor]]:
    twin = copy.deepcopy(model)
    keepgrad.apply(twin, seed=0, **options)
    return [gradients(twin, *batch) for _ in range(DRAWS)]


def total(some: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: sum(one[name] for one in some) for name in some[0]}


def measure(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Iterator[tuple[str, ...]]:
    plain = saved_bytes(lambda: model(batch[0]), model)
    has_sites = not isinstance(model, timm.models.ResNet)
    for setting, options in SETTINGS.items() if has_sites else [("exact", {"preset": "exact"})]:
        wanted = draws(model, options, batch) if has_sites else [gradients(model, *batch)] * DRAWS
        for rounding, context in ROUNDINGS.items():
            with context():
                found = draws(model, {**options, "store": "int8"}, batch)
            twin = copy.deepcopy(model)
            keepgrad.apply(twin, store="int8", **options)
            saved = saved_bytes(lambda m=twin: m(batch[0]), twin) / plain
            worst = {n: min(cosine({n: a[n]}, {n: b[n]}) for a, b in zip(found, wanted, strict=True)) for n in found[0]}
            layer = min(worst, key=worst.__getitem__)
            yield (
                f"{setting}, {rounding}",
                f"{saved * (0.5625 / 1.03125 if rounding == 'int4' else 1):.3f}x",
                f"{sum(cosine(a, b) for a, b in zip(found, wanted, strict=True)) / DRAWS:.6f}",
                f"{worst[layer]:.5f} ({layer})",
                f"{cosine(total(found), total(wanted)):.6f}",
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="a folder or tar of images, one folder per class")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    args = parser.parse_args()
    torch.manual_seed(0)
    scaled = [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5], [0.25])]
    dataset = create_dataset("", root=args.data, transform=v2.Compose([v2.RandomHorizontalFlip(), *scaled]))
    head = ("setting", "saved", "cosine", "worst layer", "cosine of the mean")
    print(f"torch {torch.__version__}, timm {timm.__version__}, {platform.machine()} CPU")
    for title, make in MODELS.items():
        torch.manual_seed(0)
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.05)
        loader = torch.utils.data.DataLoader(dataset, args.batch_size, shuffle=True, drop_last=True)
        for _, batch in zip(track(range(args.steps), description=title), loader, strict=False):
            optimizer.zero_grad()
            F.cross_entropy(model(batch[0]), batch[1]).backward()
            optimizer.step()
        rows = list(measure(model, batch))
        table = Table(f"\n{title}, after {args.steps} steps", head, rows)
        print(table.to_markdown() if args.markdown else table.to_text())


if __name__ == "__main__":
    main()
