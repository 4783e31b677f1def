"""The settings of a study. Each is a command-line flag and a YAML key."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import KeepConfig
from ..errors import ConfigError
from ..flags import check, flag
from ..numbers import Numbers
from ..train.config import COUNT, CROP, FROM_0, SEED, SIDE, TrainConfig, arguments

__all__ = ["StudyConfig"]

STEPS = Numbers(int, least=0, most=10**9)


@dataclass(frozen=True)
class StudyConfig(KeepConfig):
    """What to study, and how thoroughly. Options of `keepgrad.apply` given here are studied as one more setting."""

    model: str | None = None
    data: str | None = flag(
        None, "images: a folder or tar, one folder per class (with no model: digits)", metavar="PATH"
    )
    val: str | None = flag(None, "images to evaluate on, where --data has no val/; else a tenth is held out")
    checkpoint: str | None = flag(None, "weights to study; those of keepgrad train name their model", metavar="FILE")
    model_kwargs: dict[str, Any] | None = flag(
        None, "arguments of the model, e.g. img_size=32,patch_size=4", type=arguments, metavar="A=B"
    )
    size: int | None = flag(None, "pixels a side (default: the model's own)", type=SIDE, metavar="PIXELS")
    crop_pct: float | None = flag(None, "share of the image that is seen (default: the model's own)", type=CROP)
    batch_size: int = flag(32, "images a batch", type=COUNT, metavar="N")
    batches: int = flag(2, "batches whose gradients are compared", type=COUNT, metavar="N")
    draws: int = flag(4, "draws of the masks for each batch", type=COUNT, metavar="N")
    rounds: int = flag(5, "steps that are timed, in turns with full backprop", type=COUNT, metavar="N")
    prepare: int = flag(
        0, "steps of full backprop before the study, for weights that mean something", type=STEPS, metavar="STEPS"
    )
    train: int = flag(
        0,
        "steps of a short training with every setting, from the weights that are studied",
        type=STEPS,
        metavar="STEPS",
    )
    seeds: int = flag(3, "such trainings of each setting", type=COUNT, metavar="N")
    lr: float = flag(5e-4, "highest learning rate of these steps", type=FROM_0)
    workers: int = flag(4, "processes that load images; 0: the study itself", type=STEPS, metavar="N")
    cpu: bool = flag(False, "use no accelerator")
    seed: int = flag(0, "seed of everything", type=SEED)
    output: str | None = flag(None, "folder for the report (default: a new one in runs/)", metavar="DIR")
    resume: bool = flag(False, "continue the study in --output; start anew where it is empty", action="store_true")

    def __post_init__(self) -> None:
        check(self)
        self.setting()
        if self.checkpoint is not None and not Path(self.checkpoint).is_file():
            raise ConfigError(f"checkpoint={self.checkpoint}: there is no such file")
        if self.resume and self.output is None:
            raise ConfigError("resume: give the output folder of the study to continue")

    def setting(self) -> dict[str, Any]:
        """The options for `keepgrad.apply` that the user gave; empty if there are none."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(KeepConfig)}
        given = {name: value for name, value in values.items() if value is not None and name != "seed"}
        KeepConfig(**given)
        return given

    def training(self) -> TrainConfig:
        """The settings that `train` would have for the same model and data."""
        same = {name: getattr(self, name) for name in ("model", "data", "val", "model_kwargs", "size", "crop_pct")}
        own = {name: getattr(self, name) for name in ("batch_size", "lr", "workers", "seed", "cpu")}
        return TrainConfig(**same, **own, pretrained=self.checkpoint, aug=False, smoothing=0.0)
