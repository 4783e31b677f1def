"""The versions of keepgrad, torch and the other installed libraries."""

from __future__ import annotations

import platform
from importlib import metadata

from .. import __version__

__all__ = ["LIBRARIES", "versions"]

LIBRARIES = ("torch", "timm", "torchvision", "transformers", "accelerate", "peft", "torchao", "lightning")


def versions(*names: str) -> str:
    """The versions of the named libraries; without names, of keepgrad, Python and all installed `LIBRARIES`."""
    found = {} if names else {"keepgrad": __version__, "Python": platform.python_version()}
    for name in names or LIBRARIES:
        try:
            found[name] = metadata.version(name)  # looked up, not imported
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(f"{name} {version}" for name, version in found.items())
