"""The detection and instance segmentation task that the loop trains, on data in COCO's layout."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...data.coco import CocoFolder, Objects, average_precision, find_split, to_coco
from ...data.order import Batches, Unreadable, loaded
from ...errors import ConfigError, InputError
from ...files import make_folder, written_whole
from ..config import DetectConfig
from ..loop.stop import each
from .detectors import detector

__all__ = ["Detection"]

Batch = tuple[list[Tensor], list[dict[str, Tensor]]]


class Detection:
    """Trains a detector on images with boxes and masks. Implements `loop.Task`."""

    goal = "box_ap"
    shown: tuple[str, ...] = ("box_ap", "box_ap50", "mask_ap", "mask_ap50")

    def __init__(self, config: DetectConfig, accelerator: Any) -> None:
        if config.data is None:
            raise ConfigError("data: give a folder in the layout of COCO, or --demo")
        self.config, self.accelerator = config, accelerator
        root = Path(config.data)
        self.source = CocoFolder(*find_split(root, "train"), training=True)
        self.val = CocoFolder(*find_split(root, "val"), training=False)
        if self.source.categories != self.val.categories:
            raise InputError(f"{self.source.file} and {self.val.file} have different categories; they must be the same")
        if accelerator.is_main_process:
            for split in (self.source, self.val):
                print(split.summary(), end="\n" if split.problems else "")
        torch.manual_seed(config.seed)
        self.options = {
            "sizes": list(config.side_lengths()),
            **{name: getattr(config, name) for name in ("max_size", "channels", "anchor", "rois")},
            "width": config.head_width,
        }
        more = {**(config.backbone_kwargs or {}), "pretrained": config.pretrained}
        self.model: nn.Module = detector(
            config.detector, config.backbone, len(self.source.categories), backbone_options=more, **self.options
        )
        self.category_of = {label: number for number, label in Objects(self.val, False, 0).label_of.items()}
        self.place = {"process": accelerator.process_index, "processes": accelerator.num_processes}
        self.order = Batches(len(self.source.ids), config.batch_size, config.seed, True, **self.place)
        self.results: list[dict[str, Any]] = []

    def batches_per_epoch(self) -> int:
        return len(self.order)

    def batches(self, epoch: int, start: int) -> Generator[Batch]:
        objects = Objects(self.source, True, self.config.seed)
        for batch in loaded(objects, self.order.of(epoch, start), self.config.workers, _listed):
            yield self._placed(batch)

    def _placed(self, batch: Batch) -> Batch:
        device = self.accelerator.device
        images, targets = batch
        return [image.to(device) for image in images], [{k: v.to(device) for k, v in t.items()} for t in targets]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return torch.stack(list(model(*batch).values())).sum()

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        from accelerate.utils import gather_object

        order = Batches(len(self.val.ids), self.config.batch_size, 0, False, **self.place)
        found: dict[int, list[dict[str, Any]]] = {}
        objects = Objects(self.val, False, 0)
        batches = each(loaded(objects, order.of(0), self.config.workers, _listed))
        for images, targets in map(self._placed, batches):
            for target, one in zip(targets, model(images), strict=True):
                image = int(target["image_id"])
                found[image] = to_coco(image, one, self.category_of)
        # An image may occur twice: repeated so that all processes have as many, or in place of an unreadable one.
        merged = dict(gather_object(list(found.items())))
        self.results = [row for image in sorted(merged) for row in merged[image]]
        return average_precision(self.val, self.results)

    def sample(self) -> Batch:
        return next(iter(self.batches(0, 0)))

    def about(self) -> dict[str, Any]:
        return {
            "num_classes": len(self.source.categories),
            "detector": self.config.detector,
            "backbone": self.config.backbone,
            "backbone_kwargs": self.config.backbone_kwargs,
            "detector_kwargs": self.options,
            "categories": [[number, name] for number, name in sorted(self.source.categories.items())],
            "images": len(self.source.ids),
        }

    def write(self, output: Path) -> None:
        """Write all predictions in COCO's results format, and pictures of some."""
        with written_whole(output / "predictions.json") as partial:
            partial.write_text(json.dumps(self.results))
        folder = output / "pictures"
        make_folder(folder)
        objects = Objects(self.val, False, 0)
        for image in self.val.ids[: self.config.pictures]:
            self._draw(objects, image, folder / f"{image}.png")

    def _draw(self, objects: Objects, image: int, path: Path, least: float = 0.5) -> None:
        from pycocotools import mask as codes
        from torchvision.transforms.v2.functional import to_dtype, to_pil_image
        from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

        read = objects.read(image)
        if isinstance(read, Unreadable):
            return
        pixels = to_dtype(read[0], torch.uint8, scale=True)
        rows = [row for row in self.results if row["image_id"] == image and row["score"] >= least]
        if rows:
            colours = [PALETTE[row["category_id"] % len(PALETTE)] for row in rows]
            masks = torch.stack([torch.from_numpy(codes.decode(row["segmentation"])).bool() for row in rows])
            pixels = draw_segmentation_masks(pixels, masks, 0.45, colours)
            corners = torch.tensor([[x, y, x + w, y + h] for x, y, w, h in (row["bbox"] for row in rows)])
            names = [f"{self.val.categories[row['category_id']]} {row['score']:.2f}" for row in rows]
            pixels = draw_bounding_boxes(pixels, corners, names, colours, width=2)
        with written_whole(path) as partial:
            to_pil_image(pixels).save(partial)


PALETTE = ("#e41a1c", "#377eb8", "#4daf4a", "#984ea3", "#ff7f00", "#a65628", "#f781bf", "#17becf")


def _listed(samples: list[Any]) -> Any:
    """Collate samples into a list of images and a list of targets. Their sizes differ, so they cannot be stacked."""
    broken = next((sample for sample in samples if isinstance(sample, Unreadable)), None)
    return broken or tuple(map(list, zip(*samples, strict=True)))
