"""A small synthetic dataset in COCO's layout for trying out detection: coloured shapes on noise."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from ..files import written_whole

__all__ = ["SETTINGS", "make_shapes"]

SIZE = 128
KINDS = ("disc", "square", "triangle")

SETTINGS: dict[str, Any] = {
    **{"backbone": "convnext_atto", "backbone_kwargs": {"ls_init_value": 0.1}, "sizes": str(SIZE), "max_size": SIZE},
    **{"channels": 64, "head_width": 256, "anchor": 16, "rois": 32},
    **{
        "epochs": 4,
        "batch_size": 4,
        "lr": 2e-3,
        "warmup_epochs": 0.5,
        "sched": "cosine",
        "clip_grad": 5.0,
        "workers": 2,
    },
}


def make_shapes(root: Path, train: int = 480, val: int = 48) -> Path:
    """Write the dataset to the folder `root`, and return the folder. The dataset is always the same."""
    generator = np.random.default_rng(0)
    for split, count in (("train2017", train), ("val2017", val)):
        (root / split).mkdir(parents=True, exist_ok=True)
        (root / "annotations").mkdir(exist_ok=True)
        images: list[dict[str, Any]] = []
        annotations: list[dict[str, Any]] = []
        for number in range(1, count + 1):
            name = f"{number:06d}.png"
            found = _draw(generator, root / split / name)
            images.append({"id": number, "file_name": name, "height": SIZE, "width": SIZE})
            for one in found:
                annotations.append({"id": len(annotations) + 1, "image_id": number, "iscrowd": 0, **one})
        categories = [{"id": number + 1, "name": kind} for number, kind in enumerate(KINDS)]
        whole = {"images": images, "annotations": annotations, "categories": categories}
        with written_whole(root / "annotations" / f"instances_{split}.json") as partial:
            partial.write_text(json.dumps(whole))
    return root


def _draw(generator: np.random.Generator, path: Path) -> list[dict[str, Any]]:
    """Draw one image with one to four shapes that do not overlap. Returns their annotations."""
    from PIL import Image, ImageDraw

    background = generator.integers(60, 140, 3) + generator.normal(0, 12, (SIZE, SIZE, 3))
    image = Image.fromarray(background.clip(0, 255).astype(np.uint8))
    pen = ImageDraw.Draw(image)
    found: list[dict[str, Any]] = []
    taken: list[tuple[float, float, float]] = []
    for _ in range(generator.integers(1, 5)):
        radius = float(generator.uniform(10, 26))
        x, y = generator.uniform(radius, SIZE - radius, 2).tolist()
        if any(math.hypot(x - a, y - b) < radius + c for a, b, c in taken):
            continue
        taken.append((x, y, radius))
        kind = int(generator.integers(len(KINDS)))
        corners = (24, 4, 3)[kind]
        turn = float(generator.uniform(0, 2 * math.pi))
        angles = [turn + 2 * math.pi * n / corners for n in range(corners)]
        points = [(x + radius * math.cos(a), y + radius * math.sin(a)) for a in angles]
        colour = tuple(int(v) for v in generator.integers(0, 256, 3))
        pen.polygon(points, fill=colour)
        xs, ys = zip(*points, strict=True)
        box = [min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)]
        area = 0.5 * corners * radius**2 * math.sin(2 * math.pi / corners)
        outline = [round(v, 2) for point in points for v in point]
        found.append({"category_id": kind + 1, "bbox": box, "area": area, "segmentation": [outline]})
    with written_whole(path) as partial:
        image.save(partial)
    return found
