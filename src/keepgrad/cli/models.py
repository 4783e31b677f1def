"""The models keepgrad knows: their classes, tiers and branches, for the libraries that are installed."""

from __future__ import annotations

import argparse
import importlib.util
import json
from dataclasses import asdict

from ..adapters.registry import REGISTRY
from ..catalogue import Row, count_timm, rows
from ..report import Table

__all__ = ["add_arguments", "run", "to_markdown"]

HEAD = ("family", "example", "classes", "tier", "branches", "architectures")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--measure", action="store_true", help="measure what 0.5 on all blocks saves (minutes)")
    parser.add_argument("--markdown", action="store_true", help="print the table of docs/models.md, measured")
    parser.add_argument(
        "--count", action="store_true", help="count the architectures of timm that have sites (minutes)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> None:
    if args.count:
        found = count_timm()
        total = sum(found.values())
        print(json.dumps(found) if args.json else f"of {total} architectures of timm: {found}")
        return
    result = list(rows(measure=args.measure or args.markdown))
    if args.json:
        print(json.dumps([asdict(row) for row in result], indent=2))
    elif args.markdown:
        print(to_markdown(result))
    else:
        head = (*HEAD, "saved at 0.5") if args.measure else HEAD
        note = "\n".join(f"{library}: {', '.join(classes)}" for library, classes in registered().items())
        note = f"All blocks that are known, by the libraries that are installed:\n{note}"
        print(Table("Models keepgrad knows", head, [cells(row) for row in result], note).to_text())


def registered() -> dict[str, list[str]]:
    """The names of all registered classes, by library."""
    found: dict[str, list[str]] = {}
    for path in REGISTRY:
        library, name = path.partition(".")[0], path.rpartition(".")[2]
        if importlib.util.find_spec(library) is not None and name not in found.setdefault(library, []):
            found[library].append(name)
    return found


def cells(row: Row) -> tuple[str, ...]:
    """The cells of a row as text. The last cell (saved bytes) is left out if it was not measured."""
    what = (row.example.family, row.example.model, ", ".join(row.classes), str(row.tier), ", ".join(row.branches))
    count = "-" if row.architectures is None else str(row.architectures)
    return (*what, count) if row.saved is None else (*what, count, f"{row.saved:.2f}x")


def to_markdown(result: list[Row]) -> str:
    """The table for docs/models.md."""
    names = "\n".join(
        f"- {library}: {', '.join(f'`{name}`' for name in classes)}" for library, classes in registered().items()
    )
    note = f"All blocks that are known:\n\n{names}"
    return Table("", (*HEAD, "saved at 0.5"), [cells(row) for row in result], note).to_markdown()
