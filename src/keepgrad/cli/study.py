"""Answer the paper's design questions (which mask, ratio, layers, attention) for your model, in a report."""

from __future__ import annotations

import argparse
from pathlib import Path

from .. import flags, models
from ..data import digits
from ..errors import ConfigError
from ..study.config import StudyConfig
from .train import continued, new_folder

__all__ = ["add_arguments", "run"]

# Settings if no model and no data are given: a small ViT, trained on digits for a short time first.
DEFAULT = {name: digits.SETTINGS[name] for name in ("model", "model_kwargs", "crop_pct", "batch_size")}
DEFAULT |= {"prepare": 800, "train": 30, "seeds": 2, "lr": 3e-3, "draws": 3, "rounds": 3, "workers": 0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help="a model of timm")
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings in YAML; flags override them")
    flags.add_arguments(parser, StudyConfig)


def run(args: argparse.Namespace) -> None:
    models.timm()
    from ..study.run import study

    file = {} if args.config is None else flags.read_yaml(args.config)
    given = flags.given(args, StudyConfig)
    before = continued({**file, **given})
    is_bare = not before and {**file, **given}.keys().isdisjoint({"model", "data", "checkpoint"})
    config = flags.make(StudyConfig, DEFAULT if is_bare else before, file, given)
    if config.model is None and config.checkpoint is None:
        raise ConfigError("give a model of timm, e.g. keepgrad study vit_small_patch16_224 --data images/")
    if config.data is None and not (is_bare or before):
        raise ConfigError("data: give images, a folder or tar with one folder per class")
    output = Path(config.output or new_folder("study"))
    print(study(config, output).to_text())
    print(f"\nreport: {output / 'report.html'}")
