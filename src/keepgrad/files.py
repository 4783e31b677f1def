"""Files that are written whole or not at all, in folders that one process has at a time."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from .errors import FileError, KeepgradError

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

__all__ = ["locked", "make_folder", "text_of", "written_whole"]


def text_of(path: Path) -> str:
    """The text of a file.

    Raises:
        OSError: if it cannot be read, or is no plain file: a FIFO would make the reader wait for ever.
        ValueError: if it is no text.
    """
    if path.exists() and not path.is_file():
        raise OSError("it is not a plain file")
    return path.read_text()


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A path to write to, whose file takes the place of `path` at the end.

    Raises:
        FileError: if it could not be written; what was at `path` before is still there.
    """
    if not path.name:
        raise FileError(f"{path} is a folder; give the name of a file")
    partial = path.with_name(f".{path.stem}.partial{path.suffix}")
    try:
        yield partial
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except KeepgradError:
        _forget(partial)
        raise
    except Exception as error:  # each library has an exception of its own for a full disk
        _forget(partial)
        reason = " ".join(str(error).split()) or type(error).__name__
        raise FileError(f"cannot write {path}: {reason[:300]}; is there space, and may you write there?") from error
    except BaseException:
        _forget(partial)
        raise


def _forget(partial: Path) -> None:
    with suppress(OSError):  # on a read-only file system also a file that is not there cannot be taken away
        partial.unlink(missing_ok=True)


def make_folder(path: Path) -> None:
    """Raises FileError if it cannot be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FileError(f"cannot make the folder {path}: {reason}; give another one") from None


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """A folder for this process alone, as long as the block runs; it is made if need be.

    The lock is the operating system's, on a file `.lock`: it goes with the process that has it, however that ends, and
    children do not inherit it. Where the system has no such locks (Windows), there is none.

    Raises:
        FileError: if another process has it, or the folder cannot be written.
    """
    make_folder(folder)
    path = folder / ".lock"
    try:
        file = path.open("a+")
    except OSError as error:
        raise FileError(f"cannot write {path}: {error.strerror}; may you write there?") from None
    with file:
        _lock(file, folder)
        with suppress(OSError):  # it only serves the message of others
            file.truncate(0)
            file.write(f"process {os.getpid()} on {platform.node()}")
            file.flush()
        yield


def _lock(file: IO[str], folder: Path) -> None:
    if fcntl is None:
        return
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        owner = file.read(200) or "another process"
        raise FileError(f"{folder} is in use by {owner}; wait for its end, or give another --output") from None
    except OSError as error:
        raise FileError(f"{folder} cannot be locked: {error.strerror}; give a folder elsewhere") from None
