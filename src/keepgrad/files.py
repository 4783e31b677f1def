"""Write files whole or not at all, and lock folders so that only one process uses them at a time."""

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
        OSError: if it cannot be read, or is not a regular file: reading a FIFO could wait forever.
        ValueError: if it is not text.
    """
    if path.exists() and not path.is_file():
        raise OSError("it is not a plain file")
    return path.read_text()


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to. At the end, that file replaces the one at `path`.

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
    except Exception as error:  # each library raises its own exception for a full disk
        _forget(partial)
        reason = " ".join(str(error).split()) or type(error).__name__
        raise FileError(f"cannot write {path}: {reason[:300]}; is there space, and may you write there?") from error
    except BaseException:
        _forget(partial)
        raise


def _forget(partial: Path) -> None:
    with suppress(OSError):  # on a read-only file system, removing a missing file fails too
        partial.unlink(missing_ok=True)


def make_folder(path: Path) -> None:
    """Make a folder. Raises FileError if that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FileError(f"cannot make the folder {path}: {reason}; give another one") from None


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder, so that no other process uses it inside this context. Makes the folder if it does not exist.

    This is a lock of the operating system on a file `.lock`. It ends with the process that holds it, even if that
    crashes, and child processes do not inherit it. On Windows, which has no such locks, nothing is locked.

    Raises:
        FileError: if another process holds the lock, or the folder cannot be written.
    """
    make_folder(folder)
    path = folder / ".lock"
    try:
        file = path.open("a+")
    except OSError as error:
        raise FileError(f"cannot write {path}: {error.strerror}; may you write there?") from None
    with file:
        _lock(file, folder)
        with suppress(OSError):  # it is only used in the error message of other processes
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
