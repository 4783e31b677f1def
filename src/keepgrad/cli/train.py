"""Train an image classifier of timm with keepgrad; with no data, digits with and without it side by side.

To use several processes: torchrun --nproc-per-node 8 -m keepgrad train ..., or accelerate launch -m keepgrad train ...
"""

from __future__ import annotations

import argparse
from datetime import datetime
from pathlib import Path
from typing import Any

from .. import flags
from ..data import digits
from ..errors import ConfigError
from ..train.config import RECIPES, TrainConfig

__all__ = ["add_arguments", "new_folder", "run"]

# Settings that remove another one from earlier layers, unless they have the value that means off.
# For example, `full` in the flags removes the `preset` of a recipe.
INSTEAD_OF: dict[str, tuple[str, Any]] = {"full": ("preset", False), "accumulate": ("global_batch", 1)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings in YAML; flags override them")
    parser.add_argument("--recipe", choices=list(RECIPES), help="the paper's settings for ImageNet; all else overrides")
    flags.add_arguments(parser, TrainConfig)


def run(args: argparse.Namespace) -> None:
    from ..train.classify import Classification
    from ..train.loop import Trainer, accelerator_for, fitted
    from ..train.loop.side_by_side import side_by_side

    config = _config(args)
    if config.data is None:
        output = Path(config.output or new_folder("digits"))
        print(side_by_side(config, output, Classification, {"accuracy": "top1"}).to_text())
        print(f"\nresults: {output}")
        return
    accelerator = accelerator_for(config)
    config = fitted(config, accelerator)
    trainer = Trainer(Classification(config, accelerator), config, accelerator)
    if accelerator.is_main_process and trainer.plan is not None:
        sites, left = trainer.plan.sites, trainer.plan.skipped
        print(f"keepgrad: {len(sites)} branches of {config.model}" + (f", {len(left)} left alone" if left else ""))
    outcome = trainer.run(config.model or "training")
    if accelerator.is_main_process:
        top1, best = outcome.history[-1]["top1"], outcome.best
        print(f"top-1 {top1:.2%} after {config.epochs} epochs, best {best['top1']:.2%} in epoch {best['epoch']:.0f}")
        print(f"results: {outcome.output}")


def new_folder(name: str) -> str:
    """The path for a new folder of results, with the current time in its name."""
    return datetime.now().strftime(f"runs/{name}-%Y%m%d-%H%M%S")


def continued(given: dict[str, Any]) -> dict[str, Any]:
    """The settings of the run to be resumed; empty if there is no such run.

    Raises:
        ConfigError: if the folder has files, but no config.yaml with the settings.
    """
    folder = Path(str(given.get("output")))
    if not given.get("resume") or not folder.is_dir():
        return {}
    path = folder / "config.yaml"
    if path.exists():
        return flags.read_yaml(path, whole=True)
    there = next((entry.name for entry in sorted(folder.iterdir()) if not entry.name.startswith(".")), None)
    if there is not None:
        raise ConfigError(
            f"{folder} has {there} but no config.yaml, so the settings of the run are not known; put that file there, "
            "or begin anew in another --output"
        )
    return {}


def _config(args: argparse.Namespace) -> TrainConfig:
    """Combine the settings. Flags override the file, then come the recipe, the run to be resumed and the defaults."""
    given = flags.given(args, TrainConfig)
    file: dict[str, Any] = {} if args.config is None else flags.read_yaml(args.config)
    file = {str(key).replace("-", "_"): value for key, value in file.items()}
    name = args.recipe or file.get("recipe")
    file.pop("recipe", None)
    if name is not None and name not in list(RECIPES):
        raise ConfigError(f"recipe {name!r:.80} is not known; use one of {', '.join(RECIPES)}")
    recipe = RECIPES[name] if name else {}
    before = continued({**file, **given})
    if not (before or recipe) and {**file, **given}.get("data") is None:
        before = digits.SETTINGS
    layers: list[dict[str, Any]] = []
    for layer in (before, recipe, file, given):
        gone = {other for key, (other, off) in INSTEAD_OF.items() if layer.get(key, off) is not off}
        layers = [{k: v for k, v in lower.items() if k not in gone} for lower in layers]
        layers.append(layer)
    return flags.make(TrainConfig, *layers)
