"""The settings of a training run, and the paper's recipes. Each setting is a command-line flag and a YAML key."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, TypeVar

from ..config import KeepConfig
from ..errors import ConfigError
from ..flags import check, flag, pairs
from ..models import LARGEST, architecture
from ..numbers import Numbers
from ..report import brief

R = TypeVar("R", bound="RunFlags")

__all__ = ["DETECTORS", "RECIPES", "DetectConfig", "RunFlags", "TrainConfig"]

DETECTORS = ("mask_rcnn", "cascade_mask_rcnn")
SMALLEST = 32
"""Smallest image side for detection, in pixels. The coarsest feature map has a stride of 32 pixels."""


def arguments(value: Any) -> dict[str, Any]:
    """Parse the arguments of a model, given as a dictionary or as text like `img_size=32,patch_size=4`."""
    return architecture(pairs(value) if isinstance(value, str) else value)


def rule(text: Any) -> str:
    """Check a rule for timm's augmentation, e.g. `rand-m9-mstd0.5`. timm silently ignores parts it does not know."""
    sections = r"(-(mstd|mmax|inc|[mnpwdab])\d{1,3}(\.\d+)?|-t(weights|3aw|3a))*"
    if not isinstance(text, str) or not re.fullmatch(r"(original|originalr|v0|v0r|3a|rand|augmix)" + sections, text):
        raise ValueError("give a rule of timm, e.g. rand-m9-mstd0.5-inc1, original-mstd0.5 or augmix-m5-w4-d2")
    return text


COUNT = Numbers(int, least=1, most=10**9)
RATE = Numbers(float, least=0, below=1)
DECAY = Numbers(float, above=0, below=1)
FROM_0 = Numbers(float, least=0)
SIDE = Numbers(int, least=1, most=LARGEST)
CROP = Numbers(float, least=0.1, most=1)
SEED = Numbers(int, least=0, most=2**64 - 1)


@dataclass(frozen=True)
class RunFlags(KeepConfig):
    """Settings shared by all tasks: keepgrad's own, optimizer, learning rate, precision, processes, output."""

    full: bool = flag(False, "full backprop: train without keepgrad", action="store_true")
    epochs: int = flag(100, "passes over the data", type=COUNT)
    batch_size: int = flag(64, "samples a process takes at a time", type=COUNT, metavar="N")
    accumulate: int = flag(1, "batches an optimizer step is made of", type=COUNT, metavar="N")
    global_batch: int | None = flag(
        None, "samples an optimizer step is made of, over all processes; sets --accumulate", type=COUNT, metavar="N"
    )
    opt: str = flag("adamw", "an optimizer of timm", metavar="NAME")
    sched: str = flag(
        "cosine", "the learning rate after warm-up: a cosine, or tenths of it in two steps", choices=["cosine", "steps"]
    )
    lr: float = flag(1e-3, "the highest learning rate", type=FROM_0)
    min_lr: float = flag(1e-6, "the lowest learning rate", type=FROM_0)
    weight_decay: float = flag(0.05, "weight decay", type=FROM_0)
    layer_decay: float | None = flag(None, "factor of the learning rate from a layer to the one below", type=DECAY)
    warmup_epochs: float = flag(5.0, "epochs until the highest learning rate, at most half of all", type=FROM_0)
    clip_grad: float | None = flag(None, "largest norm of the gradient", type=Numbers(float, above=0), metavar="NORM")
    ema: float | None = flag(None, "decay of a moving average of the weights, e.g. 0.9999", type=DECAY, metavar="DECAY")
    amp: str | None = flag(None, "autocast to this type", choices=["bf16", "fp16"])
    channels_last: bool = flag(False, "channels-last memory format")
    compile: bool = flag(False, "torch.compile the model")
    checkpointing: bool = flag(False, "gradient checkpointing of the model's own")
    fsdp: bool = flag(False, "shard weights, gradients and optimizer over the processes (FSDP2)")
    cpu: bool = flag(False, "use no accelerator")
    workers: int = flag(
        4, "processes that load data; 0: the training process itself", type=Numbers(int, least=0), metavar="N"
    )
    seed: int = flag(0, "seed of everything", type=SEED)
    save_every: int | None = flag(None, "save the state every N steps, not only every epoch", type=COUNT, metavar="N")
    output: str | None = flag(None, "folder for results (default: a new one in runs/)", metavar="DIR")
    resume: bool = flag(False, "continue what is in --output; start anew where it is empty", action="store_true")

    def __post_init__(self) -> None:
        check(self)
        self.keep_config()
        if self.full and self._given():
            raise ConfigError(f"full backprop has no use for {', '.join(self._given())}; leave out one of the two")
        if self.accumulate > 1 and self.global_batch is not None:
            raise ConfigError("give accumulate or global_batch, not both: each follows from the other")
        if self.fsdp and self.ema is not None:
            raise ConfigError(
                "fsdp shards the weights, and ema would need a whole copy of them; leave out one of the two"
            )
        if self.resume and self.output is None:
            raise ConfigError("resume: give the output folder of the run to continue")

    def keep_config(self) -> KeepConfig:
        """The settings to pass to `keepgrad.apply`. They have no seed: masks are drawn from the seed of the run."""
        return KeepConfig(**self._given())

    def _given(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(KeepConfig)}
        return {name: value for name, value in values.items() if value is not None and name != "seed"}

    def without_keepgrad(self: R) -> R:
        """The same settings, but with full backprop."""
        off: dict[str, Any] = dict.fromkeys(self._given())
        return dataclasses.replace(self, **off, full=True)

    def accumulation(self, processes: int) -> int:
        """The number of batches per process in one optimizer step."""
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
        """The same settings for `processes` processes, with `samples` samples per step over all of them.

        Raises:
            ConfigError: if the samples cannot be divided equally among the processes.
        """
        share, rest = divmod(samples, processes)
        if rest or not share:
            raise ConfigError(
                f"the run has steps of {samples} samples, which {processes} processes cannot share equally; start "
                f"a number of processes that divides {samples}"
            )
        # Keep the batch size if possible. Otherwise prefer an even one (mixup needs pairs), then the largest.
        sizes = [size for size in range(1, self.batch_size + 1) if share % size == 0]
        size = max(sizes, key=lambda size: (size == self.batch_size, size % 2 == 0, size))
        return dataclasses.replace(self, batch_size=size, accumulate=1, global_batch=samples)


@dataclass(frozen=True)
class TrainConfig(RunFlags):
    """Settings for image classification."""

    data: str | None = flag(None, "images: a folder with train/ and val/, or of classes, or a tar (default: digits)")
    val: str | None = flag(None, "images to evaluate on, where --data has no val/; else a tenth is held out")
    dataset: str = flag("", "a kind of timm's create_dataset, e.g. torch/cifar100 or hfds/NAME; --data is its root")
    model: str | None = flag(None, "a model of timm, e.g. vit_base_patch16_224", metavar="NAME")
    model_kwargs: dict[str, Any] | None = flag(
        None, "arguments of the model, e.g. img_size=32,patch_size=4", type=arguments, metavar="A=B"
    )
    pretrained: str | None = flag(
        None, "begin with timm's weights, or with those in FILE", nargs="?", const="timm", metavar="FILE"
    )
    size: int | None = flag(None, "pixels a side (default: the model's own)", type=SIDE, metavar="PIXELS")
    crop_pct: float | None = flag(None, "share of the image that evaluation sees (default: the model's own)", type=CROP)
    drop_path: float = flag(0.0, "largest rate of drop path", type=RATE)
    mixup: float = flag(0.0, "alpha of mixup", type=FROM_0)
    cutmix: float = flag(0.0, "alpha of cutmix", type=FROM_0)
    smoothing: float = flag(0.1, "label smoothing", type=RATE)
    auto_augment: str | None = flag(
        None, "augmentation by timm's rule, e.g. rand-m9-mstd0.5-inc1", type=rule, metavar="RULE"
    )
    color_jitter: float = flag(
        0.4, "strength of colour jitter, where there is no --auto-augment", type=Numbers(float, least=0, most=100)
    )
    erasing: float = flag(0.0, "probability of random erasing", type=RATE)
    aug: bool = flag(True, "augmentation by crops and flips, and what else is set")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.mixup or self.cutmix) and self.batch_size % 2:
            raise ConfigError(f"mixup and cutmix take samples in pairs; batch_size={self.batch_size} is odd")
        for name in ("dataset", "val"):
            if getattr(self, name) and self.data is None:
                raise ConfigError(f"{name}={getattr(self, name)} says more of data; give data too")


@dataclass(frozen=True)
class DetectConfig(RunFlags):
    """Settings for detection and instance segmentation."""

    data: str | None = flag(None, "a folder in the layout of COCO: annotations/, train2017/, val2017/")
    detector: str = flag("mask_rcnn", "what to train", choices=list(DETECTORS))
    backbone: str = flag(
        "convnext_tiny", "a model of timm: a ConvNeXt, another with four stages, a ViT", metavar="NAME"
    )
    backbone_kwargs: dict[str, Any] | None = flag(
        None, "arguments of the backbone, e.g. drop_path_rate=0.4", type=arguments, metavar="A=B"
    )
    pretrained: bool = flag(False, "begin with timm's weights of the backbone")
    sizes: str = flag("480-800", "shorter side of the images, drawn from this range; evaluation takes the last")
    max_size: int = flag(1333, "longest longer side", type=Numbers(int, least=SMALLEST, most=LARGEST))
    channels: int = flag(
        256, "channels of the feature pyramid and the mask head", type=Numbers(int, least=1, most=2**14)
    )
    head_width: int = flag(1024, "width of the box heads", type=Numbers(int, least=1, most=2**16))
    anchor: int = flag(32, "side of the smallest anchors, in pixels", type=SIDE)
    rois: int = flag(512, "regions of an image that the heads are trained on", type=Numbers(int, least=1, most=2**16))
    pictures: int = flag(
        8, "evaluated images that are drawn with what was found", type=Numbers(int, least=0), metavar="N"
    )
    # Other defaults than in RunFlags: the usual ones for detection.
    epochs: int = flag(12, "passes over the data", type=COUNT)
    batch_size: int = flag(2, "images a process takes at a time", type=COUNT, metavar="N")
    lr: float = flag(1e-4, "the highest learning rate", type=FROM_0)
    warmup_epochs: float = flag(0.5, "epochs until the highest learning rate, at most half of all", type=FROM_0)
    sched: str = flag("steps", "the learning rate after warm-up", choices=["cosine", "steps"])

    def __post_init__(self) -> None:
        super().__post_init__()
        self.side_lengths()
        if ":" in self.backbone:
            raise ConfigError(f"backbone={self.backbone!r:.80}: give a name of timm, e.g. convnext_tiny")
        if (self.backbone_kwargs or {}).get("in_chans", 3) != 3:
            raise ConfigError("backbone_kwargs: images of detection have 3 channels; leave out in_chans")

    def side_lengths(self) -> tuple[int, ...]:
        """The lengths that the shorter side may have, in pixels, e.g. 480, 512, ..., 800."""
        try:
            first, _, last = self.sizes.partition("-")
            low, high = int(first), int(last or first)
        except ValueError:
            low, high = 0, -1
        if not SMALLEST <= low <= high <= LARGEST:
            raise ConfigError(
                f"sizes={brief(self.sizes)}: give a range of pixels like 480-800, or one number, from {SMALLEST} to "
                f"{LARGEST}"
            )
        return (*range(low, high, 32), high)


# From the paper's published scripts: ImageNet, 300 epochs. Batch sizes are per GPU, as in the paper's memory table.
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
