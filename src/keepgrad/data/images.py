"""Images with labels from a folder, a tar file or a dataset that timm reads, and their batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from ..errors import ConfigError, InputError
from .folder import EXTENSIONS, ImageFolder
from .order import Unreadable, loaded, mixed_seed, seeded
from .pixels import converted

__all__ = ["Source", "held_out", "kind_of", "loader", "mode_of", "open_images", "part_of", "some_of"]

HELD_OUT = 0.1
BY_NUMBER, STREAMS = ("torch", "hfds"), ("hfids", "tfds", "wds")
PARTS = {"train": ("train", "training"), "val": ("val", "valid", "validation", "eval", "evaluation", "test")}


class Source(Protocol):
    """A collection of images, each read by its number."""

    @property
    def classes(self) -> Sequence[str]: ...

    @property
    def found(self) -> str:
        """One line that says how many images there are and what was left out; empty if there is nothing to say."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """The name of an image, for messages."""

    def read(self, index: int) -> tuple[Any, int]:
        """Read a PIL image and its label. Raises OSError."""


class _TimmSource:
    """A dataset made by timm's `create_dataset`."""

    def __init__(self, dataset: Any, root: str) -> None:
        self.dataset, self.root = dataset, root
        reader = getattr(dataset, "reader", None)
        names = getattr(reader, "class_to_idx", None) or getattr(reader, "class_name_to_idx", None)
        self.classes: Sequence[str] = sorted(names, key=names.get) if names else getattr(dataset, "classes", ())
        self.by_reader = reader is not None

    @property
    def found(self) -> str:
        return f"{self.root}: {len(self)} images" + (f" of {len(self.classes)} classes" if self.classes else "")

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
        # Not dataset[index]: if an image cannot be read, that returns another one.
        found, label = self.dataset.reader[index]
        if isinstance(found, Image.Image):
            return found, label
        with found, Image.open(found) as image:
            image.load()
            return image, label


class _Some:
    """Some of the images of a source."""

    def __init__(self, source: Source, indices: Sequence[int], found: str = "") -> None:
        self.source, self.indices, self.classes, self.found = source, indices, source.classes, found

    def __len__(self) -> int:
        return len(self.indices)

    def name(self, index: int) -> str:
        return self.source.name(self.indices[index])

    def read(self, index: int) -> tuple[Any, int]:
        return self.source.read(self.indices[index])


def some_of(source: Source, indices: Sequence[int]) -> Source:
    return _Some(source, indices)


def held_out(source: Source) -> tuple[Source, Source]:
    """Split a source into nine tenths for training and one tenth for evaluation. The split is always the same."""
    order = torch.randperm(len(source), generator=torch.Generator().manual_seed(0)).tolist()
    count = max(1, round(len(source) * HELD_OUT))
    found = f"{source.found}; {count} of them are held out for evaluation"
    return _Some(source, sorted(order[count:]), found), _Some(source, sorted(order[:count]))


def open_images(root: str, kind: str = "", split: str = "train") -> Source:
    """Open the images in a folder, a tar file, or a dataset of another kind that timm's `create_dataset` knows.

    Raises:
        ConfigError: if there is no such kind.
        InputError: if there are no images, fewer than two classes, or a class without images.
    """
    from timm.data import create_dataset

    kind = kind_of(kind)
    if not kind:
        path = Path(root)
        if not path.exists():
            raise InputError(f"{root}: there is no such folder or file; give images with one folder per class")
        if path.is_dir():
            return ImageFolder(root)
        if path.suffix != ".tar" or not path.is_file():
            raise InputError(f"{root} is neither a folder nor a .tar; give images with one folder per class")
    try:
        with _known_extensions():
            dataset = create_dataset(kind, root=root, split=split, search_split=False)
    except Exception as error:  # each library raises its own kinds
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{kind or 'images'} at {root}: {reason[:300]}; give a folder or tar of images") from None
    source = _TimmSource(dataset, root)
    if not kind:
        _check_tar(dataset.reader, source)
    return source


def kind_of(dataset: str) -> str:
    """Check a dataset name for timm's `create_dataset`, e.g. torch/cifar100. Returns "" for folders and tar files.

    Raises:
        ConfigError: if the kind is not known (timm would take the name for a folder), or is a stream.
    """
    library, _, name = dataset.partition("/")
    if not dataset or dataset.lower() in ("torch/folder", "torch/image_folder"):
        return ""
    if library.lower() in STREAMS:
        raise ConfigError(f"dataset={dataset} is a stream, which cannot be resumed; give torch/NAME or hfds/NAME")
    if library.lower() not in BY_NUMBER or not name.strip("/"):
        raise ConfigError(
            f"dataset={dataset} is not known; give torch/NAME, e.g. torch/cifar100, or hfds/NAME, or leave it out for "
            "a folder or a tar"
        )
    return dataset


@contextmanager
def _known_extensions() -> Iterator[None]:
    """Make timm accept the same file extensions as `ImageFolder`."""
    from timm.data.readers.img_extensions import get_img_extensions, set_img_extensions

    before = get_img_extensions()
    set_img_extensions(EXTENSIONS)
    try:
        yield
    finally:
        set_img_extensions(before)


def _check_tar(reader: Any, source: _TimmSource) -> None:
    """Check the class folders of a tar file.

    timm takes the folder that an image is in as its class, and ignores the folders above. So two folders of the same
    name would become one class.
    """
    folders: dict[str, set[str]] = {}
    for sample, target in zip(reader.samples, reader.targets, strict=True):
        member, _, inner = sample
        above = "" if inner is None else inner.name
        folders.setdefault(source.classes[target], set()).add(str(Path(above) / Path(member.path).parent))
    if "" in folders:
        raise InputError(f"{source.root} has images beside its class folders; put them into folders, or take them out")
    if len(folders) < 2:
        raise InputError(f"{source.root} has {len(folders)} classes; put the images into two or more folders")
    for name, own in folders.items():
        if len(own) > 1:
            first, second = sorted(own)[:2]
            raise InputError(
                f"{source.root} has two folders for the class {name}, {first} and {second}; the folder that an image "
                "is in is its class: put all images of a class into one"
            )


def part_of(root: str, part: str) -> Path | None:
    """The folder for "train" or "val" within `root`, under one of its usual names; None if there is none."""
    return next((folder for name in PARTS[part] if (folder := Path(root) / name).is_dir()), None)


class _Augmented(Dataset):
    """The transformed images of a source. Item `epoch * len(source) + index` is image `index` in `epoch`."""

    def __init__(self, source: Source, transform: Callable[[Any], Tensor], mode: str, seed: int) -> None:
        self.source, self.transform, self.mode, self.seed = source, transform, mode, seed

    def __getitem__(self, number: int) -> tuple[Tensor, int] | Unreadable:
        epoch, index = divmod(number, len(self.source))
        try:
            image, label = self.source.read(index)
            image = converted(image, self.mode)
        except Exception as error:  # PIL raises many kinds
            return Unreadable(self.source.name(index), str(error) or type(error).__name__)
        try:
            with seeded(mixed_seed(self.seed, epoch, index)):
                return self.transform(image), label
        except Exception as error:  # and so do the operations of a transform
            reason = str(error) or type(error).__name__
            remedy = "mend it, take it away or change the augmentation"
            return Unreadable(self.source.name(index), reason, "cannot be augmented", remedy)


def _collated(samples: list[Any]) -> Any:
    return next((sample for sample in samples if isinstance(sample, Unreadable)), None) or default_collate(samples)


def loader(
    source: Source, transform: Callable[[Any], Tensor], mode: str, seed: int, batches: list[list[int]], workers: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the images and labels of each batch; see `loaded`."""
    return loaded(_Augmented(source, transform, mode, seed), batches, workers, _collated)


def mode_of(channels: int) -> str:
    """The PIL mode for images with this number of channels."""
    modes = {1: "L", 3: "RGB", 4: "RGBA"}
    if channels not in modes:
        raise ConfigError(f"the model takes {channels} channels; images have 1, 3 or 4")
    return modes[channels]
