"""The pictures of a study. Each is drawn twice: as a PNG file, and as SVG for the page, in the page's colours."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..report import figures
from ..sampling import Layout
from .questions import EVERYWHERE, FULL, Question, name_of
from .results import Results, mean_and_error

__all__ = ["agreement", "heat_map", "mask_picture", "pareto", "png", "quality", "svg"]

Draw = Callable[[Any], None]

PANEL = (4.4, 3.2)  # inches; fits on a phone
INK, LINE = "#0a0b0c", "#0d0e0f"  # placeholders: the page sets the real colours
SERIES = ("#3d7fd9", "#d9772b", "#2f9e6e")
MARKED = "#c8352b"
NEAREST = 1e-5  # cosines are not drawn closer to 1 than this
MOST_LAYERS = 30  # with more layers, the heat map has colours but no numbers


def _style(ink: str, line: str) -> dict[str, Any]:
    return {
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color"), ink),
        **{"axes.edgecolor": line, "grid.color": line, "axes.spines.top": False, "axes.spines.right": False},
        **{"font.size": 10, "axes.titlesize": 10, "legend.frameon": False, "legend.fontsize": 9},
        **{"svg.fonttype": "none", "axes.facecolor": "none", "axes.axisbelow": True, "axes.grid": True},
        **{"grid.linewidth": 0.7, "lines.linewidth": 1.8, "lines.markersize": 5},
    }


def _drawn(panels: Sequence[Draw], size: tuple[float, float], ink: str, line: str, save: Callable[[Any], None]) -> None:
    import matplotlib

    with matplotlib.rc_context(_style(ink, line)):  # type: ignore[arg-type]
        figure = figures().Figure(figsize=(size[0] * len(panels), size[1]), layout="constrained")
        for draw, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
            draw(axes)
        save(figure)


def png(path: Any, panels: Sequence[Draw], size: tuple[float, float] = PANEL) -> None:
    """Draw panels side by side into a PNG file."""
    _drawn(panels, size, "#222222", "#cccccc", lambda figure: figure.savefig(path, dpi=150, facecolor="white"))


def svg(name: str, label: str, draw: Draw, size: tuple[float, float] = PANEL) -> str:
    """One panel as SVG for the page, as wide as the page allows. `label` describes it to screen readers."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):  # ids must be unique on the page
        _drawn(
            [draw],
            size,
            INK,
            LINE,
            lambda figure: figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None}),
        )
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace(INK, "var(--ink)").replace(LINE, "var(--line)")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'id="([^"]*)"', rf'id="{name}-\1"', text)
    text = re.sub(r'(url\(#|href="#)', rf"\1{name}-", text)
    opening = re.sub(r' (width|height)="[^"]*"', "", text[: text.index(">")])
    return f'{opening} role="img" aria-label="{label}"' + text[text.index(">") :]


def pareto(results: Results, front: Sequence[str], best: str) -> Draw:
    """Plot agreement against memory. The axis of the cosine is logarithmic in 1 - cosine."""

    def draw(axes: Any) -> None:
        def point(key: str) -> tuple[float, float]:
            one = results.measured[key]
            return one.bytes, min(1.0, max(1 - one.cosine, NEAREST))

        behind = [key for key in results.measured if key not in front]
        axes.scatter(*zip(*map(point, behind), strict=True) if behind else ((), ()), s=14, color=LINE, zorder=2)
        axes.plot(*zip(*map(point, front), strict=True), "o-", color=SERIES[0], label="Pareto front", zorder=3)
        for number, key in enumerate(front, 1):
            axes.annotate(str(number), point(key), (-7, 7), textcoords="offset points", ha="center", size=9)
        axes.plot(*point(best), "o", color=MARKED, markersize=9, label=f"recommended: {name_of(best)}", zorder=4)
        axes.set(yscale="log", xlabel="saved for backward, against full backprop", ylabel="cosine with exact gradient")
        axes.set_xlim(left=0)
        axes.invert_yaxis()
        axes.yaxis.set_major_formatter(lambda value, _: f"{1 - value:.6g}" if value > NEAREST * 1.01 else "1")
        axes.yaxis.set_minor_formatter(lambda value, _: "")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1))

    return draw


def _panel(axes: Any, question: Question, values: Callable[[str], tuple[float, float]], title: str) -> None:
    """Plot a value for every setting of a question, with error bars if the errors are known."""
    labels = list(dict.fromkeys(case.label for case in question.cases))
    lines = question.lines()
    for number, (series, cases) in enumerate(lines.items()):
        shift = 0.12 * (number - (len(lines) - 1) / 2) if question.name != "ratio" else 0
        found = [(labels.index(case.label) + shift, *values(case.key)) for case in cases]
        found = [one for one in found if not math.isnan(one[1])]
        if not found:
            continue
        x, y, error = zip(*found, strict=True)
        errors = [0.0 if math.isnan(e) else e for e in error]
        style = "o-" if question.name == "ratio" else "o"
        label = series if len(lines) > 1 else None
        axes.errorbar(x, y, errors if any(errors) else None, fmt=style, color=SERIES[number], label=label, capsize=3)
    axes.set_xticks(range(len(labels)), labels)
    if sum(map(len, labels)) > 34:
        axes.tick_params(axis="x", labelrotation=28)
        for tick in axes.get_xticklabels():
            tick.set_ha("right")
    axes.set_xlim(-0.5, len(labels) - 0.5)
    axes.set_title(title, loc="left")
    axes.grid(False, axis="x")
    if axes.get_legend_handles_labels()[0]:
        axes.legend()


def agreement(question: Question, results: Results, figure: str, title: str) -> Draw:
    """Plot one measure of agreement for every setting of a question. `figure` names it, e.g. "cosine"."""

    def value(key: str) -> tuple[float, float]:
        return (getattr(results.measured[key], figure) if key in results.measured else math.nan), math.nan

    return lambda axes: _panel(axes, question, value, title)


def quality(question: Question, results: Results) -> Draw:
    """Plot the accuracy after short trainings, minus that of full backprop with the same images."""
    seeds = len(results.runs(FULL))

    def difference(key: str) -> tuple[float, float]:
        mean, error = mean_and_error(results.against_full(key))
        return 100 * mean, 100 * error

    def draw(axes: Any) -> None:
        axes.axhline(0, color=INK, linewidth=1, linestyle="--", label=FULL)
        title = "accuracy against full backprop, points"
        _panel(axes, question, difference, f"{title}; {seeds} seeds" if seeds > 1 else title)

    return draw


def heat_map(question: Question, results: Results) -> tuple[Draw, tuple[float, float]]:
    """Plot the cosine of each layer at each keep-ratio in all branches. Also returns the size of the picture."""
    cases = [case for case in question.cases if case.series == EVERYWHERE and case.key in results.measured]
    layers = [name for name, *_ in results.measured[cases[0].key].layers] if cases else []
    table = [
        [math.nan if cosine is None else cosine for _, cosine, _ in results.measured[case.key].layers] for case in cases
    ]

    def draw(axes: Any) -> None:
        import matplotlib

        flat = [value for row in table for value in row if not math.isnan(value)]
        low = min([0.9, *flat])
        rows = list(map(list, zip(*table, strict=True)))
        colours = matplotlib.colormaps["viridis"]
        axes.pcolormesh(rows, vmin=low, vmax=1, cmap=colours, edgecolors=LINE, linewidth=0.3)
        if len(layers) <= MOST_LAYERS:
            for y, row in enumerate(rows):
                for x, value in enumerate(row):
                    dark = not math.isnan(value) and (value - low) / (1 - low) < 0.6
                    text = "-" if math.isnan(value) else f"{value:.3f}".lstrip("0")
                    axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", size=8, color="w" if dark else "k")
        axes.set_xticks([n + 0.5 for n in range(len(cases))], [case.label for case in cases])
        axes.set_yticks([n + 0.5 for n in range(len(layers))], layers, size=8)
        axes.invert_yaxis()
        axes.grid(False)
        axes.set_xlabel("keep-ratio")

    return draw, (PANEL[0] * 1.25, 1.0 + 0.24 * len(layers))


def mask_picture(image: Tensor, layout: Layout, kept: Tensor, side: int = 224) -> bytes:
    """An image as PNG, with the positions that a mask drops made pale."""
    import torch
    from torchvision.transforms.v2.functional import to_pil_image

    height, width = layout.tall_and_wide
    shown = torch.zeros(height * width).index_fill_(0, kept, 1.0).view(1, 1, height, width)
    tall, wide = (side, round(side * width / height))
    large = torch.nn.functional.interpolate(shown, (tall, wide), mode="nearest")[0]
    pixels = torch.nn.functional.interpolate(image.float().unsqueeze(0), (tall, wide), mode="bilinear")[0]
    pixels = pixels[:3] if pixels.shape[0] >= 3 else pixels[:1].expand(3, -1, -1)
    pale = 0.82 + 0.12 * pixels
    buffer = io.BytesIO()
    to_pil_image(torch.where(large > 0, pixels, pale)).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()
