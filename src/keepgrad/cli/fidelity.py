"""How well kept gradients agree with exact ones, layer by layer, on your model and images."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import flags, models
from ..config import KeepConfig
from ..errors import InputError
from ..fidelity import fidelity
from ..patch import apply
from .numbers import pixels, positive, seed

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a model of timm, e.g. vit_base_patch16_224")
    parser.add_argument("--data", required=True, help="a folder or tar of images, one folder per class")
    parser.add_argument("--checkpoint", type=Path, help="weights to load (a state_dict); default: random ones")
    parser.add_argument("--size", type=pixels, help="pixels a side (default: the model's own)")
    parser.add_argument("--batch-size", type=positive, default=16, help="images a batch (default: 16)")
    parser.add_argument("--batches", type=positive, default=1, help="(default: 1)")
    parser.add_argument("--draws", type=positive, default=4, help="draws of the masks a batch (default: 4)")
    parser.add_argument("--seed", type=seed, default=0, help="(default: 0)")
    flags.add_arguments(parser, KeepConfig, without=("seed",))
    parser.add_argument("--output", default="fidelity.png", help="the picture (default: fidelity.png)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    models.timm()
    from ..data.images import open_images, part_of

    source = open_images(str(part_of(args.data, "train") or args.data))
    model = models.create(args.model, size=args.size, num_classes=len(source.classes))
    if args.checkpoint is not None:
        models.load_weights(model, args.checkpoint)
    models.check_takes(model, models.size_of(model, args.size))
    print(source.found, file=sys.stderr if args.json else sys.stdout)
    batches = _batches(source, model, args)
    options = flags.given(args, KeepConfig)
    del options["seed"]  # --seed seeds everything here, masks included
    apply(model, **options)
    report = fidelity(model, batches, F.cross_entropy, args.draws)
    print(report.to_json() if args.json else report)
    report.save_plot(args.output)
    if not args.json:
        print(f"\npicture: {args.output}")


def _batches(source: Any, model: Any, args: argparse.Namespace) -> list[tuple[Tensor, Tensor]]:
    from timm.data import create_transform, resolve_model_data_config

    from ..data.images import loader, mode_of

    config = {**resolve_model_data_config(model), "input_size": models.size_of(model, args.size)}
    wanted = args.batch_size * args.batches
    if len(source) < wanted:
        raise InputError(
            f"--data {args.data} has {len(source)} images, but {args.batches} batches of {args.batch_size} need "
            f"{wanted}; lower --batch-size or --batches"
        )
    order = torch.randperm(len(source))[:wanted].view(args.batches, args.batch_size).tolist()
    mode = mode_of(config["input_size"][0])
    return list(loader(source, create_transform(**config, is_training=False), mode, args.seed, order, workers=0))
