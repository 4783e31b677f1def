"""The command line: one file per command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ..errors import KeepgradError, StoppedElsewhereError, StoppedError
from . import bench, detect, estimate, evaluate, fidelity, models, study, train

__all__ = ["main"]

COMMANDS = {
    "train": train,
    "eval": evaluate,
    "detect": detect,
    "study": study,
    "bench": bench,
    "estimate": estimate,
    "fidelity": fidelity,
    "models": models,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code. Errors are one line with the remedy, and exit code 2."""
    parser = argparse.ArgumentParser(
        prog="keepgrad", description="Train PyTorch models in less memory and less time by stochastic backpropagation."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        summary = (module.__doc__ or "").strip().splitlines()[0]
        module.add_arguments(commands.add_parser(name, help=summary, description=summary))
    args = parser.parse_args(argv)
    try:
        COMMANDS[args.command].run(args)
    except KeepgradError as error:
        if not isinstance(error, StoppedElsewhereError):
            print(f"keepgrad {args.command}: {error}", file=sys.stderr, flush=True)
        return 130 if isinstance(error, StoppedError) else 2
    except KeyboardInterrupt:
        print(f"keepgrad {args.command}: interrupted", file=sys.stderr)
        return 130
    return 0
