"""How well kept gradients agree with exact ones, layer by layer, on your model and images."""

from __future__ import annotations

import argparse
import itertools
import tarfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import PRESETS
from ..errors import ConfigError, InputError
from ..fidelity import fidelity
from ..ops.attention import METHODS
from ..patch import apply
from ..sampling import MASKS, REDUCTIONS
from . import models

__all__ = ["add_arguments", "run"]

OPTIONS = ("preset", "keep_ratio", "mask", "reduce", "attention")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a model of timm, e.g. vit_base_patch16_224")
    parser.add_argument("--data", required=True, help="a folder or tar of images, one folder per class")
    parser.add_argument("--checkpoint", type=Path, help="weights to load (a state_dict); default: random ones")
    parser.add_argument("--size", type=models.positive, help="pixels a side (default: the model's own)")
    parser.add_argument("--batch-size", type=models.positive, default=16, help="images a batch (default: 16)")
    parser.add_argument("--batches", type=models.positive, default=1, help="(default: 1)")
    parser.add_argument("--draws", type=models.positive, default=4, help="draws of the masks a batch (default: 4)")
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    parser.add_argument("--preset", choices=list(PRESETS))
    parser.add_argument("--keep-ratio", type=float)
    parser.add_argument("--mask", choices=MASKS)
    parser.add_argument("--reduce", choices=REDUCTIONS)
    parser.add_argument("--attention", choices=METHODS)
    parser.add_argument("--output", default="fidelity.png", help="the picture (default: fidelity.png)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    dataset, classes = _dataset(args.data)
    model = models.create(args.model, size=args.size, num_classes=classes)
    if args.checkpoint is not None:
        _load(model, args.checkpoint)
    batches = _batches(dataset, model, args)
    apply(model, **{name: getattr(args, name) for name in OPTIONS if getattr(args, name) is not None})
    report = fidelity(model, batches, F.cross_entropy, args.draws)
    print(report.to_json() if args.json else report)
    report.save_plot(args.output)
    if not args.json:
        print(f"\npicture: {args.output}")


def _dataset(root: str) -> tuple[Any, int]:
    models.timm()
    from timm.data import create_dataset

    if not Path(root).exists():
        raise InputError(f"--data {root}: there is no such folder or file; give images with one folder per class")
    try:
        dataset = create_dataset("", root=root)
        names = getattr(dataset.reader, "class_to_idx", None) or getattr(dataset.reader, "class_name_to_idx", {})
    except (AssertionError, RuntimeError, OSError, ValueError, tarfile.TarError) as error:
        raise InputError(f"--data {root}: {error}; give a folder or tar of images with one folder per class") from None
    if len(names) < 2:
        raise InputError(
            f"--data {root} has {len(names)} classes; put the images into two or more folders, one per class"
        )
    return dataset, len(names)


def _batches(dataset: Any, model: Any, args: argparse.Namespace) -> list[tuple[Tensor, Tensor]]:
    from PIL import Image
    from timm.data import create_transform, resolve_model_data_config

    config = {**resolve_model_data_config(model), "input_size": models.size_of(model, args.size)}
    transform = create_transform(**config, is_training=False)
    wanted = args.batch_size * args.batches
    if len(dataset) < wanted:
        raise InputError(
            f"--data {args.data} has {len(dataset)} images, but {args.batches} batches of {args.batch_size} need "
            f"{wanted}; lower --batch-size or --batches"
        )
    order = torch.randperm(len(dataset))[:wanted].tolist()
    pairs = []
    for index in order:
        # Not dataset[index], which takes another image where one cannot be read.
        file, label = dataset.reader[index]
        try:
            pairs.append((transform(Image.open(file).convert("RGB")), label))
        except OSError as error:
            raise InputError(f"{dataset.filename(index)} cannot be read as an image: {error}") from None
    found = []
    for start in range(0, wanted, args.batch_size):
        images, labels = zip(*itertools.islice(pairs, start, start + args.batch_size), strict=True)
        found.append((torch.stack(images), torch.tensor(labels)))
    return found


def _load(model: nn.Module, path: Path) -> None:
    from timm.models import load_checkpoint

    if not path.is_file():
        raise ConfigError(f"--checkpoint {path}: there is no such file")
    try:
        load_checkpoint(model, str(path), weights_only=True)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"--checkpoint {path} does not load into the model: {reason[:300]}") from None
