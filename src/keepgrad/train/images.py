"""Images with labels, from a folder, a tar or whatever timm reads, and as an epoch sees them."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from ..errors import ConfigError, InputError
from .order import Unreadable, loaded, mixed_seed, seeded

__all__ = ["Source", "held_out", "loader", "mode_of", "open_images", "part_of", "some_of"]

HELD_OUT = 0.1
PARTS = {"train": ("train", "training"), "val": ("val", "valid", "validation", "eval", "evaluation", "test")}


class Source(Protocol):
    """Images that can be asked for by number."""

    @property
    def classes(self) -> Sequence[str]: ...

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """What to call an image in a message."""

    def read(self, index: int) -> tuple[Any, int]:
        """An image of PIL and its label. Raises OSError."""


class _TimmSource:
    """A dataset of timm's `create_dataset`."""

    def __init__(self, dataset: Any, root: str) -> None:
        self.dataset, self.root = dataset, root
        reader = getattr(dataset, "reader", None)
        names = getattr(reader, "class_to_idx", None) or getattr(reader, "class_name_to_idx", None)
        self.classes: Sequence[str] = sorted(names, key=names.get) if names else getattr(dataset, "classes", ())
        self.by_reader = reader is not None

    def __len__(self) -> int:
        return len(self.dataset)

    def name(self, index: int) -> str:
        if not self.by_reader:
            return f"image {index} of {self.root}"
        return f"{self.root}: {self.dataset.filename(index)}"

    def read(self, index: int) -> tuple[Any, int]:
        from PIL import Image

        if not self.by_reader:
            return self.dataset[index]
        # Not dataset[index], which takes another image where one cannot be read.
        found, label = self.dataset.reader[index]
        if isinstance(found, Image.Image):
            return found, label
        with found, Image.open(found) as image:
            image.load()
            return image, label


class _Some:
    """A part of a source."""

    def __init__(self, source: Source, indices: Sequence[int]) -> None:
        self.source, self.indices, self.classes = source, indices, source.classes

    def __len__(self) -> int:
        return len(self.indices)

    def name(self, index: int) -> str:
        return self.source.name(self.indices[index])

    def read(self, index: int) -> tuple[Any, int]:
        return self.source.read(self.indices[index])


def some_of(source: Source, indices: Sequence[int]) -> Source:
    return _Some(source, indices)


def held_out(source: Source) -> tuple[Source, Source]:
    """A source without a tenth of its images, and that tenth; always the same one."""
    order = torch.randperm(len(source), generator=torch.Generator().manual_seed(0)).tolist()
    count = max(1, round(len(source) * HELD_OUT))
    return _Some(source, sorted(order[count:])), _Some(source, sorted(order[:count]))


def open_images(root: str, kind: str = "", split: str = "train") -> Source:
    """The images of a folder, a tar, or another kind that timm's `create_dataset` knows.

    Raises:
        InputError: if there are none, fewer than two classes, or a class without images.
    """
    from timm.data import create_dataset

    if not kind and not Path(root).exists():
        raise InputError(f"{root}: there is no such folder or file; give images with one folder per class")
    try:
        dataset = create_dataset(kind, root=root, split=split, search_split=False)
    except (AssertionError, RuntimeError, OSError, ValueError, ImportError, tarfile.TarError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{kind or 'images'} at {root}: {reason[:300]}; give a folder or tar of images") from None
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise InputError(f"{kind} is a stream, which cannot be resumed; give a dataset that can be read by number")
    source = _TimmSource(dataset, root)
    if source.by_reader and source.classes:
        _check_folders(dataset.reader, source)
    return source


def _check_folders(reader: Any, source: _TimmSource) -> None:
    if len(source.classes) < 2:
        raise InputError(
            f"{source.root} has {len(source.classes)} classes; put the images into two or more folders, one per class"
        )
    root = Path(getattr(reader, "root", ""))
    if root.is_dir():
        # timm takes only folders with images for classes, so that an empty one would renumber the others.
        filled = {Path(path).relative_to(root).parts[0] for path, _ in reader.samples}
        empty = sorted(p.name for p in root.iterdir() if p.is_dir() and p.name not in filled and p.name[0] != ".")
        if empty:
            raise InputError(f"{root / empty[0]} is a class folder without images; put some there, or take it away")


def part_of(root: str, part: str) -> Path | None:
    """The folder of "train" or "val" in a folder that has one, by the names it usually has."""
    return next((folder for name in PARTS[part] if (folder := Path(root) / name).is_dir()), None)


class _Augmented(Dataset):
    """The images of a source through a transform. Number `epoch * len + index` is an image as that epoch sees it."""

    def __init__(self, source: Source, transform: Callable[[Any], Tensor], mode: str, seed: int) -> None:
        self.source, self.transform, self.mode, self.seed = source, transform, mode, seed

    def __getitem__(self, number: int) -> tuple[Tensor, int] | Unreadable:
        epoch, index = divmod(number, len(self.source))
        try:
            image, label = self.source.read(index)
            image = image.convert(self.mode)
        except Exception as error:  # PIL raises many kinds
            return Unreadable(self.source.name(index), str(error) or type(error).__name__)
        try:
            with seeded(mixed_seed(self.seed, epoch, index)):
                return self.transform(image), label
        except Exception as error:  # and so do its operations
            reason = str(error) or type(error).__name__
            remedy = "mend it, take it away or change the augmentation"
            return Unreadable(self.source.name(index), reason, "cannot be augmented", remedy)


def _collated(samples: list[Any]) -> Any:
    return next((sample for sample in samples if isinstance(sample, Unreadable)), None) or default_collate(samples)


def loader(
    source: Source, transform: Callable[[Any], Tensor], mode: str, seed: int, batches: list[list[int]], workers: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Images and labels of the batches; see `loaded`."""
    return loaded(_Augmented(source, transform, mode, seed), batches, workers, _collated)


def mode_of(channels: int) -> str:
    """The mode of PIL for images of so many channels."""
    modes = {1: "L", 3: "RGB", 4: "RGBA"}
    if channels not in modes:
        raise ConfigError(f"the model takes {channels} channels; images have 1, 3 or 4")
    return modes[channels]
