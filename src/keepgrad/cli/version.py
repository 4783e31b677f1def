"""The versions of keepgrad, of torch and of the libraries that are installed."""

from __future__ import annotations

import platform
from importlib import metadata

from .. import __version__

__all__ = ["LIBRARIES", "versions"]

LIBRARIES = ("torch", "timm", "torchvision", "transformers", "accelerate", "peft", "torchao", "lightning")


def versions(*names: str) -> str:
    """The versions of these libraries; with none named, of keepgrad, Python and all that are installed."""
    found = {} if names else {"keepgrad": __version__, "Python": platform.python_version()}
    for name in names or LIBRARIES:
        try:
            found[name] = metadata.version(name)  # looked up, not imported
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(f"{name} {version}" for name, version in found.items())
