"""The command line. Each command has its own file, which is imported only when the command is used."""

from __future__ import annotations

import argparse
import ast
import importlib
import pkgutil
import sys
from collections.abc import Sequence
from typing import Any

from ..errors import KeepgradError, StoppedElsewhereError, StoppedError
from .version import versions

__all__ = ["main", "parser_of"]

COMMANDS = {
    "train": "train",
    "eval": "evaluate",
    "detect": "detect",
    "study": "study",
    "bench": "bench",
    "estimate": "estimate",
    "fidelity": "fidelity",
    "models": "models",
}
"""The file of each command. The first line of its docstring is the help text of the command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code. An error prints one line that says what to do, with exit code 2."""
    given = list(sys.argv[1:] if argv is None else argv)
    args = parser_of(next((word for word in given if word in COMMANDS), None)).parse_args(given)
    try:
        _module(args.command).run(args)
    except KeepgradError as error:
        if not isinstance(error, StoppedElsewhereError):
            print(f"keepgrad {args.command}: {error}", file=sys.stderr, flush=True)
        return 130 if isinstance(error, StoppedError) else 2
    except ModuleNotFoundError as error:
        print(f"keepgrad {args.command}: {error}; it needs more packages: pip install 'keepgrad[all]'", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"keepgrad {args.command}: interrupted", file=sys.stderr)
        return 130
    return 0


def parser_of(command: str | None) -> argparse.ArgumentParser:
    """The parser of all commands. Only `command` gets its arguments, so that no other command is imported."""
    parser = argparse.ArgumentParser(
        prog="keepgrad", description="Train PyTorch models in less memory and less time by stochastic backpropagation."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the versions of keepgrad and its libraries")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, file in COMMANDS.items():
        source = pkgutil.get_data(__name__, f"{file}.py") or b""
        summary = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
        own = commands.add_parser(name, help=summary, description=summary)
        if name == command:
            _module(name).add_arguments(own)
    return parser


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(versions())
        parser.exit()


def _module(command: str) -> Any:
    return importlib.import_module(f".{COMMANDS[command]}", __name__)
