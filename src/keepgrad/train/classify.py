"""The image classification task: timm's models, data and augmentation, and accuracy, for the training loop."""

from __future__ import annotations

import itertools
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import models
from ..data import digits
from ..data.images import Source, held_out, kind_of, loader, mode_of, open_images, part_of
from ..data.order import Batches, seeded
from ..errors import ConfigError, InputError, KeepgradError, reason_of
from ..report import brief
from .config import TrainConfig
from .loop.state import read_weights
from .loop.stop import each

__all__ = ["Classification", "Metrics", "evaluate", "open_weights", "train_sources"]

Batch = tuple[Tensor, Tensor]


class Classification:
    """Trains a timm model on images with labels. Implements `loop.Task`."""

    goal = "top1"
    shown: tuple[str, ...] = ("val_loss", "top1", "top5")

    def __init__(self, config: TrainConfig, accelerator: Any) -> None:
        self.config, self.accelerator = config, accelerator
        self.source, self.val = train_sources(config)
        if accelerator.is_main_process:
            for source in (self.source, self.val):
                print(source.found, end="\n" if source.found else "")
        self.options = _model_options(config, self.source)
        if config.model is None:
            raise ConfigError("model: give a model of timm, e.g. vit_small_patch16_224 or convnext_tiny")
        torch.manual_seed(config.seed)
        self.model = _create(config, self.options)
        self.data_config = _data_config(self.model, config, self.options)
        self.classes = list(map(str, self.source.classes)) or list(map(str, range(self.options["num_classes"])))
        models.check_takes(self.model, self.data_config["input_size"])
        self.transform = _transform(
            self.data_config,
            is_training=True,
            no_aug=not config.aug,
            color_jitter=config.color_jitter,
            auto_augment=config.auto_augment,
            re_prob=config.erasing,
            re_mode="pixel",
        )
        self.mixup = _mixup(config, self.options["num_classes"])
        place = {"process": accelerator.process_index, "processes": accelerator.num_processes}
        self.order = Batches(len(self.source), config.batch_size, config.seed, True, **place)

    def batches_per_epoch(self) -> int:
        return len(self.order)

    def batches(self, epoch: int, start: int) -> Generator[Batch]:
        numbers = self.order.of(epoch, start)
        mode = mode_of(self.data_config["input_size"][0])
        for batch in loader(self.source, self.transform, mode, self.config.seed, numbers, self.config.workers):
            yield self._placed(batch)

    def _placed(self, batch: Batch) -> Batch:
        images, labels = (t.to(self.accelerator.device, non_blocking=True) for t in batch)
        if self.config.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        return images, labels

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        images, labels = batch
        if self.mixup is not None:
            # Mixup works in place, so it gets a copy. Its labels are class probabilities, already smoothed.
            images, labels = self.mixup(images.clone(), labels)
            return F.cross_entropy(model(images), labels)
        return F.cross_entropy(model(images), labels, label_smoothing=self.config.smoothing)

    def sample(self, count: int = 256) -> Batch:
        """Up to `count` training images with their labels: enough that the time of a step can be measured."""
        images, labels = zip(*itertools.islice(self.batches(0, 0), -(-count // self.config.batch_size)), strict=True)
        return torch.cat(images)[:count], torch.cat(labels)[:count]

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        found = evaluate(
            model, self.val, self.data_config, self.config.batch_size, self.config.workers, self.accelerator
        )
        return {"val_loss": found.loss, "top1": found.top1, "top5": found.top5}

    def about(self) -> dict[str, Any]:
        return {
            "num_classes": len(self.classes),
            "model": self.config.model,
            "size": self.config.size,
            "model_kwargs": self.options,
            "data_config": {key: _plain(value) for key, value in self.data_config.items()},
            "classes": self.classes,
            "images": len(self.source),
        }

    def write(self, output: Path) -> None:
        """Write nothing: the loop writes all files that classification needs."""


class Metrics:
    """Mean loss and accuracy over the evaluated images. The arguments are sums over these images."""

    def __init__(self, count: float, loss: float, first: float, fifth: float) -> None:
        self.count, self.loss, self.top1, self.top5 = int(count), loss / count, first / count, fifth / count


@torch.no_grad()
def evaluate(
    model: nn.Module, source: Source, data_config: dict[str, Any], batch_size: int, workers: int, accelerator: Any
) -> Metrics:
    """Loss and accuracy over all images. Every image counts once, with any number of processes."""
    place = {"process": accelerator.process_index, "processes": accelerator.num_processes}
    order = Batches(len(source), batch_size, 0, False, **place)
    transform = _transform(data_config, is_training=False)
    mode = mode_of(data_config["input_size"][0])
    sums = torch.zeros(4, dtype=torch.float64)
    for number, (images, labels) in enumerate(each(loader(source, transform, mode, 0, order.of(0), workers))):
        output = model(images.to(accelerator.device, non_blocking=True)).float().cpu()
        counts = order.is_first(number, len(labels))
        output, labels = output[counts], labels[counts]
        ranks = output.topk(min(5, output.shape[1])).indices == labels.unsqueeze(1)
        loss = F.cross_entropy(output, labels, reduction="sum")
        sums += torch.stack([counts.sum(), loss, ranks[:, :1].sum(), ranks.sum()]).double()
    if accelerator.num_processes > 1:
        sums = accelerator.reduce(sums.to(accelerator.device))
    return Metrics(*sums.tolist())


def train_sources(config: TrainConfig) -> tuple[Source, Source]:
    """Return the images to train on and the images to evaluate on.

    Raises:
        InputError: if images cannot be read, or the two have different classes.
    """
    if config.data is None:
        return digits.sources()
    if kind_of(config.dataset):
        train = open_images(config.data, config.dataset, "train")
        val = open_images(config.val or config.data, config.dataset, "validation")
    else:
        folder = part_of(config.val or config.data, "val") or (Path(config.val) if config.val else None)
        if folder is not None and part_of(config.data, "train") is None and config.val is None:
            raise InputError(f"{config.data} has {folder.name}/ but no train/; put the training images there")
        train = open_images(str(part_of(config.data, "train") or config.data))
        if folder is None:
            return held_out(train)
        val = open_images(str(folder))
    if list(train.classes) != list(val.classes):
        differing = sorted(set(map(str, train.classes)) ^ set(map(str, val.classes)))
        raise InputError(
            f"training has {len(train.classes)} classes and evaluation {len(val.classes)}; only one of them has "
            f"{', '.join(differing[:5])}; give both the same class folders"
        )
    return train, val


def open_weights(path: Path) -> tuple[nn.Module, dict[str, Any]]:
    """Load weights that `train` wrote. Returns the model, and the description of the model stored with the weights.

    Raises:
        ConfigError: if the file does not describe its model, or its weights do not fit that model.
    """
    weights, about = read_weights(path)
    if "model_kwargs" not in about:
        raise ConfigError(f"{path} does not say what model it is for; it was not written by keepgrad train")
    model = models.create(about["model"], size=about["size"], **about["model_kwargs"])
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise ConfigError(f"{path} does not have the weights of the model it names: {reason_of(error)}") from None
    models.check_takes(model, about["data_config"]["input_size"])
    return model.eval(), about


def _model_options(config: TrainConfig, source: Source) -> dict[str, Any]:
    """The keyword arguments to create the model with."""
    options = dict(config.model_kwargs or {})
    if source.classes:
        given = options.setdefault("num_classes", len(source.classes))
        if given < len(source.classes):
            raise ConfigError(f"model_kwargs has num_classes={given}, but the data has {len(source.classes)} classes")
    elif "num_classes" not in options:
        raise ConfigError("the data does not say how many classes it has; give model_kwargs num_classes=...")
    if config.drop_path:
        options["drop_path_rate"] = config.drop_path
    return options


def _create(config: TrainConfig, options: dict[str, Any]) -> nn.Module:
    assert config.model is not None
    if config.pretrained is None:
        return models.create(config.model, size=config.size, **options)
    if config.pretrained != "timm":
        path = Path(config.pretrained)
        if not path.is_file():
            raise ConfigError(f"pretrained={config.pretrained}: there is no such file")
        # timm skips the classifier if the number of classes differs, and resizes weights that depend on the image size.
        # timm's own weights for this model may need a custom loader; the weights in this file do not.
        overlay = {"file": str(path), "num_classes": _classes_in(path, config, options), "custom_load": False}
        return models.create(config.model, size=config.size, pretrained=True, pretrained_cfg_overlay=overlay, **options)
    return models.create(config.model, size=config.size, pretrained=True, **options)


def _classes_in(path: Path, config: TrainConfig, options: dict[str, Any]) -> int:
    """The number of classes of the classifier whose weights are in the file."""
    from timm.models import load_state_dict

    with torch.device("meta"):
        bare: Any = models.create(config.model or "", **{**options, "num_classes": 2})
    head = bare.pretrained_cfg.get("classifier", "head")
    head = head if isinstance(head, str) else head[0]
    try:
        weights = load_state_dict(str(path), weights_only=True)
        for name, value in weights.items():
            if not isinstance(name, str) or not isinstance(value, Tensor) or value.is_complex():
                raise ValueError(f"{brief(name)} is {brief(value)}, no tensor of real numbers")
            if not bool(torch.isfinite(value).all()):
                raise ValueError(f"{name} has values that are no finite numbers")
    except Exception as error:
        raise ConfigError(f"pretrained={path} cannot be read as weights: {reason_of(error)}") from None
    found = weights.get(f"{head}.weight")
    return found.shape[0] if found is not None and found.dim() else options["num_classes"]


def _data_config(model: nn.Module, config: TrainConfig, options: dict[str, Any]) -> dict[str, Any]:
    """How to prepare images for a model: size, crop and normalisation."""
    from timm.data import resolve_data_config

    channels = options.get("in_chans", 3)
    size = config.size or options.get("img_size")
    own = models.size_of(model, None)
    sides = own[1:] if not size else tuple(size) if isinstance(size, list) else (size, size)
    given: dict[str, Any] = {"input_size": (channels, *sides)}
    if config.crop_pct is not None:
        given["crop_pct"] = config.crop_pct
    if channels != 3:
        given |= {"mean": [0.5] * channels, "std": [0.25] * channels}
    return resolve_data_config(given, model=model)


def _mixup(config: TrainConfig, classes: int) -> Any:
    if not (config.mixup or config.cutmix):
        return None
    from timm.data import Mixup

    return Mixup(config.mixup, config.cutmix, label_smoothing=config.smoothing, num_classes=classes)


def _transform(data_config: dict[str, Any], **options: Any) -> Any:
    """Create a timm transform, and try it on one blank image.

    Raises:
        ConfigError: if the transform cannot be created, or fails on the image.
    """
    from PIL import Image
    from timm.data import create_transform

    channels, height, width = data_config["input_size"]
    try:
        transform = create_transform(**data_config, **options)
        _keep_a_bit(transform)
        with seeded(0):
            transform(Image.new(mode_of(channels), (width, height)))
    except KeepgradError:
        raise
    except Exception as error:  # timm and Pillow raise many kinds
        given = ", ".join(f"{name}={value!s:.40}" for name, value in {**data_config, **options}.items())
        raise ConfigError(f"images cannot be prepared with {given}: {reason_of(error)}") from None
    return transform


def _keep_a_bit(transform: Any) -> None:
    """Make posterize keep at least one bit. timm may ask for 0 bits, which Pillow refuses from version 13 on."""
    from timm.data.auto_augment import posterize

    for part in transform.transforms:
        for operation in itertools.chain(getattr(part, "ops", ()), *getattr(part, "policy", ())):
            if getattr(operation, "aug_fn", None) is posterize:
                operation.aug_fn = _posterize


def _posterize(image: Any, bits: int, **options: Any) -> Any:
    from timm.data.auto_augment import posterize

    return posterize(image, max(1, bits), **options)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
