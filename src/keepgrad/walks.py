"""The order in which a grid mask walks over a map: positions that are close in the order are close in the map.

A tube is a band of a few rows in a few frames. A walk goes through one tube after the other, column by column, and
turns round at the end of each tube. Within a column, it goes through the frames first, then through the rows. So the
size of the tube decides which tiles the runs of positions form:

| tube (frames, rows) | runs of 2 | runs of 4 | runs of 8 |
| ---                 | ---       | ---       | ---       |
| (2, 2)              | 2x1x1     | 2x2x1     | 2x2x2     |
| (1, 2)              | 1x2x1     | 1x2x2     | 1x2x4     |
| (2, 1)              | 2x1x1     | 2x1x2     | 2x1x4     |

In an image, which is one frame, the tiles are 2x1, 2x2 and 2x4. `TUBE` is the size that agreed best with exact
gradients (docs/video.md). Shapes are `(frames, height, width)`.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["TUBE", "tube_of", "walks", "whole_frames"]

Shape = tuple[int, int, int]

TUBE = (2, 2)
"""How many frames and rows a tube has."""


def tube_of(frames: int) -> tuple[int, int]:
    """The frames and rows of a tube in a clip of `frames` frames."""
    return min(TUBE[0], frames), TUBE[1]


def walks(shape: Shape, device: torch.device | None) -> tuple[Tensor, Tensor]:
    """The positions in the order of two walks: along the rows, and along the columns."""
    frames, height, width = shape
    place = torch.arange(frames * height * width, device=device)
    frame, row, col = place // (height * width), place // width % height, place % width
    tube = tube_of(frames)
    return _walk(frame, row, col, height, width, tube), _walk(frame, col, row, width, height, tube)


def _walk(frame: Tensor, row: Tensor, col: Tensor, height: int, width: int, tube: tuple[int, int]) -> Tensor:
    deep, tall = tube
    slab, band = frame // deep, row // tall
    bands = -(-height // tall)
    number = slab * bands + torch.where(slab % 2 == 0, band, bands - 1 - band)
    along = torch.where(number % 2 == 0, col, width - 1 - col)
    return ((number * width + along) * (deep * tall) + row % tall * deep + frame % deep).argsort()


def whole_frames(shape: Shape, kept: int, device: torch.device | None) -> tuple[Tensor, Tensor]:
    """Group positions so that `kept` whole frames can be picked. Returns the order, and where each group starts in it.

    A group is the same place in several consecutive frames.
    """
    frames, area = shape[0], shape[1] * shape[2]
    first = torch.arange(kept, device=device) * frames // kept
    size = torch.diff(first, append=first.new_full((1,), frames))
    frame, cell = torch.arange(frames, device=device).unsqueeze(1), torch.arange(area, device=device)
    run = torch.bucketize(frame, first, right=True) - 1
    place = first[run] * area + cell * size[run] + frame - first[run]
    starts = first.unsqueeze(1) * area + cell * size.unsqueeze(1)
    return place.flatten().argsort(), starts.flatten()
