"""Convert PIL images to 8 bits and to the channels that a model takes."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["converted"]

WIDE = 2**16 - 1
"""The largest value of 16 bits."""


def converted(image: Any, mode: str) -> Any:
    """Convert an image to another mode. 16-bit grey values are scaled to 8 bits; PIL would clip them at 255.

    Raises:
        ValueError: if the range of its values is unknown, or larger than 16 bits.
    """
    from PIL import Image

    if image.mode == "F":
        raise ValueError("its values are floating-point numbers of no known range; save it with 8 or 16 bits")
    if image.mode.startswith("I"):
        values = np.asarray(image)
        if values.min() < 0 or values.max() > WIDE:
            raise ValueError(f"its values go from {values.min()} to {values.max()}; save it with 8 or 16 bits")
        image = Image.fromarray((values / (WIDE / 255)).round().astype(np.uint8))
    return image.convert(mode)
