"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import FileError, KeepgradError

__all__ = ["make_folder", "written_whole"]


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A path to write to, whose file takes the place of `path` at the end.

    Raises:
        FileError: if it could not be written; what was at `path` before is still there.
    """
    partial = path.with_name(f".{path.stem}.partial{path.suffix}")
    try:
        yield partial
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except KeepgradError:
        partial.unlink(missing_ok=True)
        raise
    except Exception as error:  # each library has an exception of its own for a full disk
        partial.unlink(missing_ok=True)
        reason = " ".join(str(error).split()) or type(error).__name__
        raise FileError(f"cannot write {path}: {reason[:300]}; is there space, and may you write there?") from error
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def make_folder(path: Path) -> None:
    """Raises FileError if it cannot be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"cannot make the folder {path}: {error.strerror}; give another one") from None
