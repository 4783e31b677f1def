"""The settings of a training run, each a command-line flag and a line of YAML; and the paper's recipes."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from typing import Any, TypeVar

from ..config import PRESETS, KeepConfig
from ..errors import ConfigError
from ..models import check_architecture
from ..ops.attention import METHODS
from ..sampling import MASKS, REDUCTIONS
from ..schedule import SCHEDULES
from .flags import flag, pairs

R = TypeVar("R", bound="RunFlags")

__all__ = ["DETECTORS", "RECIPES", "DetectConfig", "KeepFlags", "RunFlags", "TrainConfig"]

DETECTORS = ("mask_rcnn", "cascade_mask_rcnn")


def ratio(text: str) -> float | dict[str, float]:
    """`0.5`, or `attention=1,mlp=0.5`."""
    if "=" in text:
        return pairs(text)
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number, and not like attention=1,mlp=0.5") from None


def policy(text: str) -> str | dict[str, str]:
    """`input`, or `attention=input,mlp=heavy`."""
    return pairs(text) if "=" in text else text


@dataclass(frozen=True)
class KeepFlags:
    """What `keepgrad.apply` gets."""

    preset: str | None = flag(None, "keepgrad's preset; with none and no --keep-ratio: accurate", choices=list(PRESETS))
    keep_ratio: float | dict[str, float] | None = flag(
        None, "share of positions kept: 0.5, or attention=1,mlp=0.5", type=ratio, metavar="RATIO"
    )
    mask: str | None = flag(None, "which positions are kept", choices=list(MASKS))
    reduce: str | None = flag(None, "what becomes of the others", choices=list(REDUCTIONS))
    schedule: str | None = flag(None, "the ratio over the blocks", choices=list(SCHEDULES))
    layers: str | None = flag(None, "which blocks: all, 'first 2/3', 'last 2/3', paper", metavar="LAYERS")
    attention: str | None = flag(None, "how attention is reduced", choices=list(METHODS))
    save: str | dict[str, str] | None = flag(
        None, "heavy or input, or attention=input,mlp=heavy", type=policy, metavar="POLICY"
    )
    store: str | dict[str, str] | None = flag(
        None, "full or int8, or attention=full,mlp=int8", type=policy, metavar="STORE"
    )

    def keep_config(self) -> KeepConfig:
        return KeepConfig(**self._given())

    def _given(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(KeepFlags)}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class RunFlags(KeepFlags):
    """What every kind of training has: optimizer, schedule, precision, processes, output."""

    full: bool = flag(False, "full backprop: train without keepgrad", action="store_true")
    epochs: int = flag(100, "passes over the data")
    batch_size: int = flag(64, "samples a process takes at a time", metavar="N")
    accumulate: int = flag(1, "batches an optimizer step is made of", metavar="N")
    global_batch: int | None = flag(
        None, "samples an optimizer step is made of, over all processes; sets --accumulate", type=int, metavar="N"
    )
    opt: str = flag("adamw", "an optimizer of timm", metavar="NAME")
    sched: str = flag(
        "cosine", "the learning rate after warm-up: a cosine, or tenths of it in two steps", choices=["cosine", "steps"]
    )
    lr: float = flag(1e-3, "the highest learning rate")
    min_lr: float = flag(1e-6, "the lowest learning rate")
    weight_decay: float = flag(0.05, "weight decay")
    layer_decay: float | None = flag(None, "factor of the learning rate from a layer to the one below", type=float)
    warmup_epochs: float = flag(5.0, "epochs until the highest learning rate, at most half of all")
    clip_grad: float | None = flag(None, "largest norm of the gradient", type=float, metavar="NORM")
    ema: float | None = flag(None, "decay of a moving average of the weights, e.g. 0.9999", type=float, metavar="DECAY")
    finish: float = flag(0.0, "share of the steps, at the end, with exact gradients under checkpointing")
    amp: str | None = flag(None, "autocast to this type", choices=["bf16", "fp16"])
    channels_last: bool = flag(False, "channels-last memory format")
    compile: bool = flag(False, "torch.compile the model")
    checkpointing: bool = flag(False, "gradient checkpointing of the model's own")
    fsdp: bool = flag(False, "shard weights, gradients and optimizer over the processes (FSDP2)")
    cpu: bool = flag(False, "use no accelerator")
    workers: int = flag(4, "processes that load data; 0: the training process itself", metavar="N")
    seed: int = flag(0, "seed of everything")
    save_every: int | None = flag(None, "save the state every N steps, not only every epoch", type=int, metavar="N")
    output: str | None = flag(None, "folder for results (default: a new one in runs/)", metavar="DIR")
    resume: bool = flag(False, "continue what is in --output; start anew where it is empty", action="store_true")

    def __post_init__(self) -> None:
        self.keep_config()
        if self.full and self._given():
            raise ConfigError(f"full backprop has no use for {', '.join(self._given())}; leave out one of the two")
        least = {"epochs": 1, "batch_size": 1, "accumulate": 1, "workers": 0, "seed": 0}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ConfigError(f"{name}={getattr(self, name)}: give at least {value}")
        for name in ("global_batch", "save_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value}: give at least 1")
        for name in ("lr", "min_lr", "weight_decay", "warmup_epochs"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name}={getattr(self, name)}: give a number from 0")
        for name in ("ema", "layer_decay"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1:
                raise ConfigError(f"{name}={value}: give a number between 0 and 1")
        if self.clip_grad is not None and not self.clip_grad > 0:
            raise ConfigError(f"clip_grad={self.clip_grad}: give a number above 0")
        if not 0 <= self.finish <= 1:
            raise ConfigError(f"finish={self.finish}: give a share of the steps, from 0 to 1")
        if self.finish and self.full:
            raise ConfigError("finish: full backprop is exact from the beginning; leave out one of the two")
        if self.accumulate > 1 and self.global_batch is not None:
            raise ConfigError("give accumulate or global_batch, not both: each follows from the other")
        if self.fsdp and self.ema is not None:
            raise ConfigError(
                "fsdp shards the weights, and ema would need a whole copy of them; leave out one of the two"
            )
        if self.resume and self.output is None:
            raise ConfigError("resume: give the output folder of the run to continue")

    def without_keepgrad(self: R) -> R:
        """The same training with full backprop."""
        off = {field.name: None for field in dataclasses.fields(KeepFlags)}
        return dataclasses.replace(self, **off, full=True, finish=0.0)  # type: ignore[arg-type]

    def accumulation(self, processes: int) -> int:
        """Batches an optimizer step is made of."""
        if self.global_batch is None:
            return self.accumulate
        count, rest = divmod(self.global_batch, self.batch_size * processes)
        if rest or not count:
            raise ConfigError(
                f"global_batch={self.global_batch} is no multiple of {processes} processes x batch_size="
                f"{self.batch_size}; change one of them"
            )
        return count

    def split(self: R, samples: int, processes: int) -> R:
        """The same training in steps of `samples` samples, over another number of processes.

        Raises:
            ConfigError: if the processes cannot have as many samples each.
        """
        share, rest = divmod(samples, processes)
        if rest or not share:
            raise ConfigError(
                f"the run has steps of {samples} samples, which {processes} processes cannot share equally; start "
                f"a number of processes that divides {samples}"
            )
        # As it is, if that goes; else even, for mixup; else the largest.
        sizes = [size for size in range(1, self.batch_size + 1) if share % size == 0]
        size = max(sizes, key=lambda size: (size == self.batch_size, size % 2 == 0, size))
        return dataclasses.replace(self, batch_size=size, accumulate=1, global_batch=samples)


@dataclass(frozen=True)
class TrainConfig(RunFlags):
    """Image classification."""

    data: str | None = flag(None, "images: a folder with train/ and val/, or of classes, or a tar (default: digits)")
    val: str | None = flag(None, "images to evaluate on, where --data has no val/; else a tenth is held out")
    dataset: str = flag("", "a kind of timm's create_dataset, e.g. torch/cifar100 or hfds/NAME; --data is its root")
    model: str | None = flag(None, "a model of timm, e.g. vit_base_patch16_224", metavar="NAME")
    model_kwargs: dict[str, Any] | None = flag(
        None, "arguments of the model, e.g. img_size=32,patch_size=4", type=pairs, metavar="A=B"
    )
    pretrained: str | None = flag(
        None, "begin with timm's weights, or with those in FILE", nargs="?", const="timm", metavar="FILE"
    )
    size: int | None = flag(None, "pixels a side (default: the model's own)", type=int, metavar="PIXELS")
    crop_pct: float | None = flag(
        None, "share of the image that evaluation sees (default: the model's own)", type=float
    )
    drop_path: float = flag(0.0, "largest rate of drop path")
    mixup: float = flag(0.0, "alpha of mixup")
    cutmix: float = flag(0.0, "alpha of cutmix")
    smoothing: float = flag(0.1, "label smoothing")
    auto_augment: str | None = flag(None, "augmentation by timm's rule, e.g. rand-m9-mstd0.5-inc1", metavar="RULE")
    color_jitter: float = flag(0.4, "strength of colour jitter, where there is no --auto-augment")
    erasing: float = flag(0.0, "probability of random erasing")
    aug: bool = flag(True, "augmentation by crops and flips, and what else is set")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size is not None and self.size < 1:
            raise ConfigError(f"size={self.size}: give at least 1 pixel")
        for name in ("drop_path", "smoothing", "erasing"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: give a number from 0 to below 1")
        for name in ("mixup", "cutmix", "color_jitter"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name}={getattr(self, name)}: give a number from 0")
        if (self.mixup or self.cutmix) and self.batch_size % 2:
            raise ConfigError(f"mixup and cutmix take samples in pairs; batch_size={self.batch_size} is odd")
        for name in ("dataset", "val"):
            if getattr(self, name) and self.data is None:
                raise ConfigError(f"{name}={getattr(self, name)} says more of data; give data too")
        if self.model_kwargs is not None:
            check_architecture(self.model_kwargs, "model_kwargs")


@dataclass(frozen=True)
class DetectConfig(RunFlags):
    """Detection and instance segmentation."""

    data: str | None = flag(None, "a folder in the layout of COCO: annotations/, train2017/, val2017/")
    detector: str = flag("mask_rcnn", "what to train", choices=list(DETECTORS))
    backbone: str = flag(
        "convnext_tiny", "a model of timm: a ConvNeXt, another with four stages, a ViT", metavar="NAME"
    )
    backbone_kwargs: dict[str, Any] | None = flag(
        None, "arguments of the backbone, e.g. drop_path_rate=0.4", type=pairs, metavar="A=B"
    )
    pretrained: bool = flag(False, "begin with timm's weights of the backbone")
    sizes: str = flag("480-800", "shorter side of the images, drawn from this range; evaluation takes the last")
    max_size: int = flag(1333, "longest longer side")
    channels: int = flag(256, "channels of the feature pyramid and the mask head")
    head_width: int = flag(1024, "width of the box heads")
    anchor: int = flag(32, "side of the smallest anchors, in pixels")
    rois: int = flag(512, "regions of an image that the heads are trained on")
    pictures: int = flag(8, "evaluated images that are drawn with what was found", metavar="N")
    # What detection is usually trained with.
    epochs: int = flag(12, "passes over the data")
    batch_size: int = flag(2, "images a process takes at a time", metavar="N")
    lr: float = flag(1e-4, "the highest learning rate")
    warmup_epochs: float = flag(0.5, "epochs until the highest learning rate, at most half of all")
    sched: str = flag("steps", "the learning rate after warm-up", choices=["cosine", "steps"])

    def __post_init__(self) -> None:
        super().__post_init__()
        self.side_lengths()
        for name in ("max_size", "channels", "head_width", "anchor", "rois"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: give at least 1")

    def side_lengths(self) -> tuple[int, ...]:
        """The lengths that the shorter side may have."""
        try:
            first, _, last = self.sizes.partition("-")
            low, high = int(first), int(last or first)
        except ValueError:
            low, high = 0, -1
        if not 1 <= low <= high:
            raise ConfigError(f"sizes={self.sizes!r}: give a range of pixels like 480-800, or one number")
        return (*range(low, high, 32), high)


# The published scripts of the paper: ImageNet, 300 epochs. The batch is per GPU; its memory table has these sizes.
_IMAGENET: dict[str, Any] = {
    "epochs": 300,
    "warmup_epochs": 20.0,
    "weight_decay": 0.05,
    "min_lr": 1e-6,
    "mixup": 0.8,
    "cutmix": 1.0,
    "smoothing": 0.1,
    "auto_augment": "rand-m9-mstd0.5-inc1",
    "erasing": 0.25,
    "ema": 0.9999,
    "amp": "fp16",
    "preset": "paper",
}
RECIPES: dict[str, dict[str, Any]] = {
    "vit_tiny": {
        **_IMAGENET,
        **{"model": "vit_tiny_patch16_224", "batch_size": 256, "global_batch": 2048, "lr": 2e-3, "drop_path": 0.0},
    },
    "vit_base": {
        **_IMAGENET,
        **{"model": "vit_base_patch16_224", "batch_size": 64, "global_batch": 4096, "lr": 4e-3, "drop_path": 0.3},
    },
    "convnext_tiny": {
        **_IMAGENET,
        **{"model": "convnext_tiny", "batch_size": 128, "global_batch": 4096, "lr": 4e-3, "drop_path": 0.1},
    },
    "convnext_base": {
        **_IMAGENET,
        **{"model": "convnext_base", "batch_size": 64, "global_batch": 4096, "lr": 4e-3, "drop_path": 0.3},
    },
}
