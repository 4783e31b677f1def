"""A folder of images. Each folder in it is a class; images may be at any depth of a class folder.

Entries that are not used are counted and reported: files next to the class folders, files of other kinds, hidden files,
entries that are neither a file nor a folder (reading a FIFO would wait forever), and links to a folder above them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import InputError

__all__ = ["EXTENSIONS", "ImageFolder"]

EXTENSIONS = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")

BESIDE = "beside the class folders"
HIDDEN = "hidden"
LOOP = "links back to a folder above"
NEITHER = "neither files nor folders"
NO_IMAGE = "not of a known kind"


class ImageFolder:
    """The images of a folder, numbered in the order of their names. Implements `images.Source`.

    Raises:
        InputError: if there are fewer than two classes, a class without images, or a folder that cannot be listed.
    """

    def __init__(self, root: str) -> None:
        from timm.utils.misc import natural_key

        self.root = root
        self.left_out: dict[str, list[str]] = {}
        names = {path: name for name, path in self._files()}
        self.classes = sorted(set(names.values()), key=natural_key)
        if len(self.classes) < 2:
            raise InputError(
                f"{root} has {len(self.classes)} classes; put the images into two or more folders, one per class"
                f"{self._left_out_text()}"
            )
        label_of = {name: number for number, name in enumerate(self.classes)}
        self.samples = [(path, label_of[names[path]]) for path in sorted(names, key=natural_key)]

    def __len__(self) -> int:
        return len(self.samples)

    def name(self, index: int) -> str:
        return f"{self.root}: {os.path.relpath(self.samples[index][0], self.root)}"

    def read(self, index: int) -> tuple[Any, int]:
        from PIL import Image

        path, label = self.samples[index]
        with Image.open(path) as image:
            image.load()
            return image, label

    @property
    def found(self) -> str:
        return f"{self.root}: {len(self)} images of {len(self.classes)} classes{self._left_out_text()}"

    def _left_out_text(self) -> str:
        parts = [f"{len(names)} {reason} ({_some(names)})" for reason, names in sorted(self.left_out.items())]
        return f"; left out: {', '.join(parts)}" if parts else ""

    def _files(self) -> Iterator[tuple[str, str]]:
        """The class and the path of every image."""
        root = Path(self.root)
        for entry in self._entries(root, (_identity(root),)):
            if not entry.is_dir():
                self._leave_out(BESIDE, entry.path)
                continue
            count = 0
            for path in self._images(Path(entry.path), (_identity(root),)):
                count += 1
                yield entry.name, path
            if not count:
                # Skipping the empty class would change the numbers of the other classes.
                raise InputError(f"{entry.path} is a class folder without images; put some there, or take it away")

    def _images(self, folder: Path, above: tuple[Any, ...]) -> Iterator[str]:
        """The images in a class folder and in all folders below it. `above` identifies the folders above it."""
        waiting = [(folder, above)]
        while waiting:
            folder, above = waiting.pop()
            above = (*above, _identity(folder))
            for entry in self._entries(folder, above):
                if entry.is_dir():
                    waiting.append((Path(entry.path), above))
                elif Path(entry.name).suffix.lower() not in EXTENSIONS:
                    self._leave_out(NO_IMAGE, entry.path)
                else:
                    yield entry.path

    def _entries(self, folder: Path, above: tuple[Any, ...]) -> Iterator[os.DirEntry[str]]:
        """The files and folders in a folder, except hidden ones and links to a folder in `above`."""
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            raise InputError(f"{folder} cannot be listed: {error.strerror}; may you read it?") from None
        for entry in entries:
            if entry.name.startswith("."):
                self._leave_out(HIDDEN, entry.path)
            elif _is(entry, "dir"):
                if _identity(Path(entry.path)) in above:
                    self._leave_out(LOOP, entry.path)
                else:
                    yield entry
            elif _is(entry, "file"):
                yield entry
            else:
                self._leave_out(NEITHER, entry.path)

    def _leave_out(self, reason: str, path: str) -> None:
        self.left_out.setdefault(reason, []).append(os.path.relpath(path, self.root))


def _is(entry: os.DirEntry[str], kind: str) -> bool:
    try:
        return entry.is_dir() if kind == "dir" else entry.is_file()
    except OSError:  # e.g. a link to itself
        return False


def _identity(folder: Path) -> tuple[int, int]:
    """A value that is the same for a folder and for a link to it."""
    found = folder.stat()
    return found.st_dev, found.st_ino


def _some(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")
