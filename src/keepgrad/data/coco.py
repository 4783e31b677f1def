"""Images with boxes and masks in COCO's layout: reading them, and average precision by pycocotools.

A folder has `train2017/`, `val2017/`, `annotations/instances_train2017.json` and `annotations/instances_val2017.json`.
The ending 2017 may be another one, or missing. Annotations are checked before training starts. Entries that cannot be
used are left out and reported: boxes without area, unknown categories or images, unreadable masks, missing files. If a
file turns out not to be an image, the next image takes its place. Crowd annotations are left out of training; in
evaluation they count as COCO defines.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..errors import InputError, KeepgradError
from ..files import text_of
from ..report import brief
from .order import Unreadable, mixed_seed, seeded
from .pixels import converted

__all__ = ["CocoFolder", "Objects", "Problem", "average_precision", "find_split", "to_coco"]

# Maximum length of a polygon's outline, in pixels: pycocotools needs about 120 bytes per pixel of it.
LONGEST = 2_000_000
METRICS = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")


class Problem(NamedTuple):
    """An entry that was left out, and why."""

    file: str
    what: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file}: {self.what}: {self.reason}"


def find_split(root: Path, split: str) -> tuple[Path, Path]:
    """Find the image folder and the annotation file of the split "train" or "val".

    Raises:
        InputError: if one of them is missing.
    """
    found = sorted((root / "annotations").glob(f"instances_{split}*.json"))
    if not found:
        raise InputError(
            f"{root} has no annotations/instances_{split}*.json; give a folder in the layout of COCO: annotations/ and "
            f"one folder of images for each split, e.g. {split}2017/"
        )
    folders = {path: root / path.stem.removeprefix("instances_") for path in found}
    for path, images in folders.items():
        if images.is_dir():
            return images, path
    raise InputError(f"{found[0]} is there, but {folders[found[0]]} is not; put the images of the split there")


class CocoFolder:
    """One split: its usable images with their annotations, and the entries that were left out.

    Raises:
        InputError: if the annotations cannot be read, or none can be used.
    """

    def __init__(self, images: Path, annotations: Path, training: bool) -> None:
        self.folder, self.file = images, annotations
        found = _read(annotations)
        self.categories: dict[int, str] = {}
        for category in found["categories"]:
            if not _is_id(category.get("id")) or not isinstance(category.get("name"), str):
                raise InputError(
                    f"{annotations}: every category needs an id, a whole number of 64 bits, and a name; there is "
                    f"{brief(category)}"
                )
            if category["id"] in self.categories:
                raise InputError(f"{annotations}: two categories have the id {category['id']}; give each its own")
            self.categories[category["id"]] = category["name"]
        self.problems: list[Problem] = []
        self.images: dict[int, dict[str, Any]] = {}
        for image in found["images"]:
            reason = self._image_problem(image)
            if reason:
                self._leave_out(f"image {brief(image.get('id'))} ({brief(image.get('file_name'))})", reason)
            else:
                self.images[image["id"]] = image
        self.annotations: dict[int, list[dict[str, Any]]] = {image: [] for image in self.images}
        known = {image["id"] for image in found["images"] if _is_id(image.get("id"))}
        for annotation in found["annotations"]:
            reason = self._problem(annotation, known)
            if reason:
                self._leave_out(f"annotation {brief(annotation.get('id'))}", reason)
            elif annotation["image_id"] in self.images and not (training and annotation.get("iscrowd")):
                self.annotations[annotation["image_id"]].append(annotation)
        self.ids = [image for image in self.images if self.annotations[image] or not training]
        if not self.ids:
            reason = str(self.problems[0]) if self.problems else "no image has an object"
            raise InputError(f"{annotations} has nothing to {'train' if training else 'evaluate'} on: {reason}")

    def _leave_out(self, what: str, reason: str) -> None:
        self.problems.append(Problem(self.file.name, what, reason))

    def _image_problem(self, image: dict[str, Any]) -> str | None:
        if not {"id", "file_name", "height", "width"} <= image.keys():
            return "it lacks one of id, file_name, height and width"
        if not _is_id(image["id"]):
            return "its id is not a whole number of 64 bits"
        if image["id"] in self.images:
            return "an image before it has the same id"
        size = image["height"], image["width"]
        if not all(_is_number(side) and side > 0 and side == int(side) for side in size):
            return f"its height {size[0]!r} and width {size[1]!r} are not whole numbers above 0"
        if not isinstance(image["file_name"], str):
            return "its file name is not a text"
        if size[0] * size[1] > _most_pixels():
            return f"its {size[0]} x {size[1]} pixels are more than Pillow opens"
        try:
            is_there = (self.folder / image["file_name"]).is_file()
        except (OSError, ValueError):  # the name is too long, or has characters that file names cannot have
            is_there = False
        return None if is_there else f"there is no file {brief(str(self.folder / image['file_name']))}"

    def _problem(self, annotation: dict[str, Any], known: set[Any]) -> str | None:
        if not {"id", "image_id", "category_id", "bbox", "segmentation"} <= annotation.keys():
            return "it lacks one of id, image_id, category_id, bbox and segmentation"
        if not _is_id(annotation["image_id"]) or annotation["image_id"] not in known:
            return f"there is no image {brief(annotation['image_id'])}"
        if not _is_id(annotation["category_id"]) or annotation["category_id"] not in self.categories:
            return f"there is no category {brief(annotation['category_id'])}"
        if annotation.get("iscrowd", 0) not in (0, 1) or not _is_number(annotation.get("area", 0)):
            return "its iscrowd is not 0 or 1, or its area is not a number"
        box = annotation["bbox"]
        if not isinstance(box, list) or len(box) != 4 or not all(_is_number(value) for value in box):
            return f"its box {brief(box)} is not four numbers"
        if not (box[2] > 0 and box[3] > 0):
            return f"its box {box} has no area"
        image = self.images.get(annotation["image_id"])
        return None if image is None else _mask_problem(annotation["segmentation"], image["height"], image["width"])

    def summary(self, most: int = 5) -> str:
        """A few lines that list what was left out; empty if nothing was."""
        if not self.problems:
            return ""
        lines = [f"left out {len(self.problems)} entries of {self.file}:", *(f"  {p}" for p in self.problems[:most])]
        if len(self.problems) > most:
            lines.append(f"  and {len(self.problems) - most} more")
        return "\n".join(lines)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(text_of(path))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read as JSON: {error}") from None
    names = ("images", "annotations", "categories")
    if not isinstance(found, dict) or not all(_is_list_of_dicts(found.get(name)) for name in names):
        raise InputError(f"{path} is not in COCO's form: it needs lists of images, annotations and categories")
    return found


def _is_list_of_dicts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _is_id(value: Any) -> bool:
    return type(value) is int and -(2**63) <= value < 2**63


def _is_number(value: Any) -> bool:
    is_one = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_one and abs(value) <= sys.float_info.max  # false for nan


def _most_pixels() -> float:
    from PIL import Image

    return math.inf if Image.MAX_IMAGE_PIXELS is None else 2 * Image.MAX_IMAGE_PIXELS


def _mask_problem(segmentation: Any, height: int, width: int) -> str | None:
    """Why a mask cannot be used, or None. pycocotools does not check: it uses any amount of memory, or overruns it."""
    if isinstance(segmentation, list):
        if not segmentation:
            return "it has no mask"
        return next(filter(None, (_polygon_problem(polygon, height, width) for polygon in segmentation)), None)
    if not isinstance(segmentation, dict) or not {"size", "counts"} <= segmentation.keys():
        return "its mask is neither polygons nor run lengths with size and counts"
    if segmentation["size"] != [height, width]:
        return f"its mask is of size {brief(segmentation['size'])}, and the image of {[height, width]}"
    if _runs(segmentation["counts"], height * width) is None:
        return f"the run lengths of its mask do not add up to the {height} x {width} pixels of the image"
    return None


def _polygon_problem(polygon: Any, height: int, width: int) -> str | None:
    if not isinstance(polygon, list) or len(polygon) < 6 or not all(map(_is_number, polygon)):
        return "a polygon of its mask is not the numbers of three points or more"
    # Parts outside the image are cut off, but a point more than an image's length outside must be a mistake.
    for values, side in ((polygon[::2], width), (polygon[1::2], height)):
        worst = max(values, key=lambda value: abs(value - side / 2))
        if abs(worst - side / 2) > 1.5 * side:
            return f"a polygon of its mask has a coordinate of {worst:g}, far outside the image of {[height, width]}"
    if len(polygon) * 3 * max(height, width) > LONGEST:
        points = np.array(polygon[: len(polygon) // 2 * 2]).reshape(-1, 2)
        if np.abs(points - np.roll(points, 1, axis=0)).max(axis=1).sum() > LONGEST:
            return f"a polygon of its mask is more than {LONGEST:,} pixels long"
    return None


def _runs(counts: Any, pixels: int) -> list[int] | None:
    """The run lengths of a mask, given as a list or as COCO's compressed text; None unless they add up to `pixels`.

    In the text, a number is a row of characters, each with 5 bits of it, lowest bits first. The code of a character is
    that of "0" plus these 5 bits, plus 32 if more characters follow. The number is signed. From the fourth number on,
    the text has the difference from the run two before.
    """
    if isinstance(counts, str):
        try:
            counts = _unpacked(counts)
        except ValueError:
            return None
    if not isinstance(counts, list) or not all(type(run) is int and run >= 0 for run in counts):
        return None
    return counts if sum(counts) == pixels else None


def _unpacked(text: str) -> list[int]:
    runs: list[int] = []
    value = shift = 0
    for character in text:
        digit = ord(character) - ord("0")
        if not 0 <= digit < 64 or shift > 60:
            raise ValueError(text)
        value |= (digit & 31) << shift
        shift += 5
        if digit & 32:
            continue
        if digit & 16:
            value -= 1 << shift
        runs.append(value + runs[-2] if len(runs) > 2 else value)
        value = shift = 0
    if shift:
        raise ValueError(text)
    return runs


class Objects(Dataset):
    """Images as tensors with values from 0 to 1, with their boxes, labels (from 1 on) and masks.

    Item `epoch * len(self) + index` is image `index` in `epoch`. With `flips`, an image is mirrored with probability
    0.5, by random numbers that depend on the seed, the epoch and the image.
    """

    def __init__(self, source: CocoFolder, flips: bool, seed: int) -> None:
        self.source, self.flips, self.seed = source, flips, seed
        self.said: set[str] = set()
        self.label_of = {category: number + 1 for number, category in enumerate(sorted(source.categories))}

    def __len__(self) -> int:
        return len(self.source.ids)

    def __getitem__(self, number: int) -> tuple[Tensor, dict[str, Tensor]] | Unreadable:
        from torchvision.transforms import v2

        epoch, index = divmod(number, len(self))
        found = self._read_from(index)
        if isinstance(found, Unreadable) or not self.flips:
            return found
        with seeded(mixed_seed(self.seed, epoch, index)):
            return v2.RandomHorizontalFlip()(*found)

    def _read_from(self, index: int) -> tuple[Tensor, dict[str, Tensor]] | Unreadable:
        """The image at `index`, or the first one after it that can be read."""
        for offset in range(len(self)):
            found = self.read(self.source.ids[(index + offset) % len(self)])
            if not isinstance(found, Unreadable):
                return found
            if found.name not in self.said:
                self.said.add(found.name)
                print(f"left out {found.name}: {found.reason}", file=sys.stderr, flush=True)
        return found

    def read(self, image: int) -> tuple[Tensor, dict[str, Tensor]] | Unreadable:
        from PIL import Image
        from torchvision import tv_tensors
        from torchvision.transforms.v2 import functional as V

        path = self.source.folder / self.source.images[image]["file_name"]
        try:
            with Image.open(path) as file:
                pixels = V.to_image(converted(file, "RGB"))
        except Exception as error:  # PIL raises many kinds
            return Unreadable(f"image {image} ({path})", str(error) or type(error).__name__)
        height, width = pixels.shape[-2:]
        boxes, labels, masks = [], [], []
        for annotation in self.source.annotations[image]:
            mask = _mask(annotation["segmentation"], height, width)
            box = _inside(annotation["bbox"], height, width)
            if mask is not None and box is not None:
                boxes.append(box)
                labels.append(self.label_of[annotation["category_id"]])
                masks.append(mask)
        target = {
            "boxes": tv_tensors.BoundingBoxes(
                torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4), format="XYXY", canvas_size=(height, width)
            ),
            "labels": torch.tensor(labels, dtype=torch.int64),
            "masks": tv_tensors.Mask(
                torch.from_numpy(np.stack(masks)) if masks else torch.zeros(0, height, width, dtype=torch.uint8)
            ),
            "image_id": torch.tensor(image),
        }
        return V.to_dtype(pixels, torch.float32, scale=True), target


def _inside(box: Sequence[float], height: int, width: int) -> list[float] | None:
    """The corners of a box, clipped to its image; None if less than a pixel of its width or height is left."""
    left, top, wide, tall = box
    right, bottom = min(left + wide, width), min(top + tall, height)
    left, top = max(left, 0.0), max(top, 0.0)
    return [left, top, right, bottom] if right - left >= 1 and bottom - top >= 1 else None


def _mask(segmentation: Any, height: int, width: int) -> np.ndarray | None:
    """Turn a checked mask into pixels; None if its size is not that of the image."""
    from pycocotools import mask as codes

    if isinstance(segmentation, list):
        return codes.decode(codes.merge(codes.frPyObjects(segmentation, height, width)))
    runs = _runs(segmentation["counts"], height * width)
    if runs is None or segmentation["size"] != [height, width]:
        return None
    values = (np.arange(len(runs)) % 2).astype(np.uint8)
    return np.repeat(values, runs).reshape(width, height).T


def to_coco(image: int, found: dict[str, Tensor], category_of: dict[int, int]) -> list[dict[str, Any]]:
    """Convert the detections of one image to COCO's results format."""
    from pycocotools import mask as codes

    rows = []
    masks = (found["masks"][:, 0] > 0.5).to(torch.uint8).cpu().numpy()
    values = zip(found["boxes"].tolist(), found["scores"].tolist(), found["labels"].tolist(), masks, strict=True)
    for (left, top, right, bottom), score, label, mask in values:
        code = codes.encode(np.asfortranarray(mask))
        rows.append(
            {
                "image_id": image,
                "category_id": category_of[label],
                "bbox": [round(v, 2) for v in (left, top, right - left, bottom - top)],
                "score": round(score, 5),
                "segmentation": {"size": code["size"], "counts": code["counts"].decode()},
            }
        )
    return rows


def average_precision(source: CocoFolder, results: list[dict[str, Any]]) -> dict[str, float]:
    """Average precision over the images of a split: COCO's six numbers for boxes, and the same six for masks."""
    try:
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval
    except ImportError:
        raise KeepgradError("evaluation needs pycocotools: pip install 'keepgrad[detect]'") from None

    with _quiet():
        truth = COCO()
        truth.dataset = {
            "info": {},
            "images": list(source.images.values()),
            "annotations": _numbered(a for own in source.annotations.values() for a in own),
            "categories": [{"id": number, "name": name} for number, name in source.categories.items()],
        }
        truth.createIndex()
        metrics: dict[str, float] = {}
        for kind, name in (("bbox", "box"), ("segm", "mask")):
            values = [0.0] * len(METRICS)
            if results:
                evaluation = COCOeval(truth, truth.loadRes([dict(row) for row in results]), kind)
                evaluation.evaluate()
                evaluation.accumulate()
                evaluation.summarize()
                values = evaluation.stats[: len(METRICS)]
            # pycocotools returns -1 if there is no object of that size.
            metrics |= {
                f"{name}_{key}": math.nan if v < 0 else float(v) for key, v in zip(METRICS, values, strict=True)
            }
    return metrics


def _numbered(annotations: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add the fields that pycocotools needs, and number the annotations from 1 on.

    pycocotools treats annotations with the same id as one, and one with id 0 as never detected.
    """
    return [
        {"iscrowd": 0, "area": own["bbox"][2] * own["bbox"][3], **own, "id": number}
        for number, own in enumerate(annotations, start=1)
    ]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide what pycocotools prints."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield
