"""How results are shown: one kind of report for terminals, notebooks and other programs.

A report defines its tables and its data. `print(report)` shows the tables (with rich if it is installed), a notebook
shows them as HTML, `to_dict` and `to_json` return the data, and `save_plot` writes its `plot` to a file.
"""

from __future__ import annotations

import html
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import KeepgradError
from .files import written_whole

__all__ = ["Report", "Table", "aligned", "brief", "figures", "progress", "readable_bytes"]


@dataclass(frozen=True)
class Table:
    """Rows of text under a head. The first column is left-aligned, the others right-aligned. `note` is shown below."""

    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str = ""

    def to_text(self) -> str:
        try:
            from rich.console import Console
        except ImportError:
            return "\n".join(filter(None, [self.title, *aligned([self.head, *self.rows]), self.note]))
        # As wide as the content: a report may be printed to a file, and wrapped rows are hard to read.
        console = Console(width=10_000, no_color=True, highlight=False)
        with console.capture() as captured:
            console.print(self._rich())
        lines = [line.rstrip() for line in captured.get().splitlines()]
        return "\n".join(filter(None, [self.title, *lines, self.note]))

    def _rich(self) -> Any:
        from rich import box
        from rich.table import Table as RichTable

        table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
        for number, name in enumerate(self.head):
            table.add_column(name, justify="right" if number else "left", no_wrap=True)
        for row in self.rows:
            table.add_row(*row)
        return table

    def to_html(self) -> str:
        def line(cells: Sequence[str], tag: str) -> str:
            styles = ["left", *["right"] * (len(cells) - 1)]
            parts = (
                f'<{tag} style="text-align:{style}">{html.escape(cell)}</{tag}>'
                for style, cell in zip(styles, cells, strict=True)
            )
            return f"<tr>{''.join(parts)}</tr>"

        body = "".join(line(row, "td") for row in self.rows)
        note = f"<p>{html.escape(self.note)}</p>" if self.note else ""
        caption = f"<caption>{html.escape(self.title)}</caption>"
        return f"<table>{caption}<thead>{line(self.head, 'th')}</thead><tbody>{body}</tbody></table>{note}"

    def to_markdown(self) -> str:
        """The title, the table and the note, as in the documentation."""
        lines = [f"| {' | '.join(cells)} |" for cells in (self.head, ("---",) * len(self.head), *self.rows)]
        return "\n\n".join(filter(None, [self.title, "\n".join(lines), self.note]))


class Report:
    """A result that can be shown. Subclasses define its tables, its data and its plot."""

    def tables(self) -> list[Table]:
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """The data, in plain types."""
        raise NotImplementedError

    def plot(self) -> Any:
        """A matplotlib figure."""
        raise NotImplementedError

    def to_json(self) -> str:
        return json.dumps(_without_nan(self.to_dict()), indent=2, allow_nan=False)

    def save_json(self, path: str | Path) -> None:
        """Write the data to a file, whole or not at all.

        Raises:
            FileError: if the file cannot be written.
        """
        with written_whole(Path(path)) as partial:
            partial.write_text(self.to_json() + "\n")

    def __str__(self) -> str:
        return "\n\n".join(table.to_text() for table in self.tables())

    def _repr_html_(self) -> str:
        return "".join(table.to_html() for table in self.tables())

    def save_plot(self, path: str | Path) -> None:
        """Write the picture to a file, whole or not at all.

        Raises:
            FileError: if the file cannot be written, or matplotlib does not know the format that its name asks for.
        """
        with written_whole(Path(path)) as partial:
            self.plot().savefig(partial, dpi=150, bbox_inches="tight")


def _without_nan(value: Any) -> Any:
    """Replace NaN by None, because JSON has no NaN."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Turn rows of text into lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def brief(value: object) -> str:
    """A value as text for a message, shortened if it is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def readable_bytes(size: float) -> str:
    """A number of bytes with a readable unit."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size) >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size:.0f} B"


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Show progress on stderr. Yields a function to call at the beginning of each of `total` parts, with its name.

    Shows a bar if rich is installed, else a line for each part.
    """
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        yield lambda what: print(what, file=sys.stderr, flush=True)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        done = itertools.count()
        yield lambda what: bar.update(task, description=what, completed=next(done))


def figures() -> Any:
    """matplotlib's figure module, which draws without opening a window.

    Raises:
        KeepgradError: if matplotlib is not installed.
    """
    try:
        from matplotlib import figure
    except ImportError:
        raise KeepgradError("pictures need matplotlib: pip install 'keepgrad[report]'") from None
    return figure
