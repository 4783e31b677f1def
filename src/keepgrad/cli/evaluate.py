"""Accuracy of a trained model on images: weights of keepgrad train, or a model of timm with weights of its own."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from .. import models
from ..errors import ConfigError
from ..report import Table
from .numbers import from_zero, positive

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, metavar="WEIGHTS", help="best.safetensors of a run, or a run's folder")
    parser.add_argument("--data", required=True, help="images: a folder with val/, or of classes, or a tar")
    parser.add_argument("--dataset", default="", help="a kind of timm's create_dataset; --data is its root")
    parser.add_argument("--model", help="a model of timm, where the weights do not say what they are for")
    parser.add_argument("--batch-size", type=positive, default=64, help="(default: 64)")
    parser.add_argument("--workers", type=from_zero, default=4, help="processes that load data (default: 4)")
    parser.add_argument("--cpu", action="store_true", help="use no accelerator")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> None:
    from timm.data import resolve_model_data_config

    from ..data.images import kind_of, open_images, part_of
    from ..train.classify import evaluate, open_weights
    from ..train.config import RunFlags
    from ..train.loop import accelerator_for

    path = args.checkpoint / "best.safetensors" if args.checkpoint.is_dir() else args.checkpoint
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file; give weights, or the folder of a run")
    root = args.data if kind_of(args.dataset) else str(part_of(args.data, "val") or args.data)
    source = open_images(root, args.dataset, "validation")
    accelerator = accelerator_for(RunFlags(cpu=args.cpu))
    if args.model is None:
        model, about = open_weights(path)
        data_config = about["data_config"]
        if list(map(str, source.classes)) != about["classes"]:
            raise ConfigError(
                f"{path} is for {len(about['classes'])} classes, and {args.data} has {len(source.classes)}, or others; "
                "give images of the classes it was trained on"
            )
    else:
        model = models.create(args.model, num_classes=len(source.classes))
        models.load_weights(model, path)
        data_config = resolve_model_data_config(model)
        models.check_takes(model, data_config["input_size"])
    model = model.to(accelerator.device).eval()
    start = time.perf_counter()
    found = evaluate(model, source, data_config, args.batch_size, args.workers, accelerator)
    seconds = time.perf_counter() - start
    if not accelerator.is_main_process:
        return
    print(source.found, file=sys.stderr if args.json else sys.stdout)
    if args.json:
        values = {"images": found.count, "top1": found.top1, "top5": found.top5, "loss": found.loss}
        print(json.dumps({**values, "images_per_second": found.count / seconds}, indent=2))
        return
    rows = [
        (
            f"{found.top1:.2%}",
            f"{found.top5:.2%}",
            f"{found.loss:.4f}",
            f"{found.count}",
            f"{found.count / seconds:.0f}",
        )
    ]
    print(Table(str(path), ("top-1", "top-5", "loss", "images", "images/s"), rows).to_text())
