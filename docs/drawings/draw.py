"""The drawings of docs/how-it-works.md, as SVG files beside this script.

python docs/drawings/draw.py
"""

from __future__ import annotations

from pathlib import Path

from keepgrad.sampling import Layout, sample

HERE = Path(__file__).parent
INK, QUIET, LINE, PAPER = "#1f2933", "#52606d", "#9aa5b1", "#ffffff"
ALL, KEPT, EMPTY, GRADIENT = "#a9c7e8", "#f2a33a", "#eef1f4", "#8fce9b"

SAVED = {
    "full backprop": (
        {},
        [("x", 1), ("norm", 1), ("q, k, v", 3), ("out", 1)],
        [("x", 1), ("norm", 1), ("fc1", 4), ("gelu", 4)],
    ),
    'preset="exact"': ({"preset": "exact"}, [("x", 1), ("q, k, v", 3), ("out", 1)], [("x", 1), ("fc1", 4)]),
    "default (accurate)": ({"preset": "accurate"}, [("x", 1), ("q, k, v", 3), ("out", 1)], [("x", 0.5), ("fc1", 2)]),
    "keep_ratio=0.5": ({"keep_ratio": 0.5}, [("x", 0.5), ("q, k, v", 1.5), ("out", 0.5)], [("x", 0.5), ("fc1", 2)]),
    'exact, store="int8"': (
        {"preset": "exact", "store": "int8"},
        [("x", 0.258), ("q, k, v", 0.773)],
        [("x", 0.258), ("fc1", 1.031)],
    ),
    'exact, save="input"': ({"preset": "exact", "save": "input"}, [("x", 1)], [("x", 1)]),
    'preset="small"': ({"preset": "small"}, [("x", 0.258)], [("x", 0.129)]),
}
"""A setting: options of `keepgrad.plan`, and what a block of a ViT saves in attention and in the MLP, in rows of C
values in float32 for each position."""

SLOT_NOTE = (
    "s is what the backward pass of the branch computes for the slot. In a group of m members, m takes the place of 2."
)
SAVED_NOTE = (
    "x: input of the branch. norm, q k v, out (of attention), fc1, gelu: outputs of these layers. "
    "Width is memory: 8 bits are a quarter of the width."
)


class Drawing:
    """Shapes on a white card, which reads on light and on dark pages."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'font-family="Helvetica, Arial, sans-serif" font-size="13" role="img">',
            f"<title>{title}</title>",
            f'<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{QUIET}"/></marker></defs>',
            f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8" fill="{PAPER}" stroke="{LINE}"/>',
        ]

    def box(self, x: float, y: float, w: float, h: float, fill: str, stroke: str = LINE, wide: float = 1) -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" fill="{fill}" stroke="{stroke}" '
            f'stroke-width="{wide:g}"/>'
        )

    def line(
        self, x1: float, y1: float, x2: float, y2: float, tip: bool = False, stroke: str = QUIET, wide: float = 1.4
    ) -> None:
        end = ' marker-end="url(#tip)"' if tip else ""
        self.parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{stroke}" stroke-width="{wide:g}"{end}/>'
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        self.line(x1, y1, x2, y2, tip=True)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        anchor: str = "middle",
        size: int = 13,
        fill: str = INK,
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        words = words.replace("&", "&amp;").replace("<", "&lt;")
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" fill="{fill}"{weight}>{words}</text>'
        )

    def stage(self, x: float, y: float, words: str, w: float = 64, dashed: bool = False) -> None:
        """A rounded box with the name of an operation, with its middle at `x, y`."""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<rect x="{x - w / 2:g}" y="{y - 16:g}" width="{w:g}" height="32" rx="8" fill="{EMPTY}" '
            f'stroke="{QUIET}"{dash}/>'
        )
        self.text(x, y + 4, words)

    def rows(self, x: float, y: float, fills: list[str], w: float = 26, h: float = 11) -> None:
        """A tensor as a stack of rows, one for each position, with its middle at `x, y`."""
        top = y - len(fills) * h / 2
        for i, fill in enumerate(fills):
            self.box(x - w / 2, top + i * h, w, h, fill)

    def done(self) -> str:
        return "\n".join([*self.parts, "</svg>", ""])


def engine() -> str:
    """One MLP branch at keep-ratio 0.5, forward and backward."""
    d = Drawing(980, 500, "The branch engine: exact forward on all rows, saved slots, backward on slots")
    every = [KEPT if i % 2 == 0 else ALL for i in range(8)]
    slots, slot_grads, grads = [KEPT] * 4, [GRADIENT] * 4, [GRADIENT] * 8
    top, middle, bottom = 100, 235, 385
    d.text(20, 28, "Forward: exact, on all 8 positions", "start", 15, bold=True)
    places = {"norm": 215, "fc1": 365, "gelu": 515, "fc2": 665}
    d.rows(125, top, every)
    d.text(125, top - 54, "x")
    d.arrow(140, top, 180, top)
    for name, after in (("norm", 290), ("fc1", 440), ("gelu", 590), ("fc2", None)):
        d.stage(places[name], top, name)
        if after is not None:
            wide = 26 if name == "norm" else 44
            d.arrow(places[name] + 33, top, after - wide / 2 - 2, top)
            d.rows(after, top, every, wide)
            d.arrow(after + wide / 2 + 1, top, after + 41, top)
    d.arrow(698, top, 766, top)
    d.stage(784, top, "+", 30)
    d.arrow(800, top, 858, top)
    d.rows(873, top, every)
    d.text(873, top - 54, "y")
    d.parts.append(
        f'<path d="M132,{top + 46} V{top + 62} H784 V{top + 18}" fill="none" stroke="{QUIET}" stroke-width="1.4" '
        'marker-end="url(#tip)"/>'
    )
    d.text(700, top + 57, "residual", size=12, fill=QUIET)

    d.text(690, middle - 4, "Saved until backward:", "start", 15, bold=True)
    d.text(690, middle + 16, "the 4 kept rows of two tensors", "start", fill=QUIET)
    for x, wide, name in ((118, 26, "slots of x"), (440, 44, "slots of fc1's output")):
        d.rows(x, middle, slots, wide)
        d.text(x + wide / 2 + 8, middle + 4, name, "start")
    d.arrow(118, top + 46, 118, middle - 26)
    d.arrow(440, top + 46, 440, middle - 26)

    d.text(690, bottom - 80, "Backward: on 4 slots", "start", 15, bold=True)
    d.rows(873, bottom, grads)
    d.text(873, bottom - 54, "gradient of y")
    d.arrow(857, bottom, 812, bottom)
    d.stage(784, bottom, "sum", 52)
    d.text(784, bottom + 34, "of each pair", size=12, fill=QUIET)
    d.arrow(757, bottom, 744, bottom)
    d.rows(728, bottom, slot_grads)
    d.arrow(713, bottom, 700, bottom)
    for name, after in (("fc2", 590), ("gelu", 440), ("fc1", 290), ("norm", None)):
        d.stage(places[name], bottom, name, dashed=name in ("gelu", "norm"))
        if after is not None:
            wide = 26 if name == "fc1" else 44
            d.arrow(places[name] - 34, bottom, after + wide / 2 + 2, bottom)
            d.rows(after, bottom, slot_grads, wide)
            d.line(after - wide / 2, bottom, after - 42, bottom, tip=True)
    d.arrow(181, bottom, 161, bottom)
    d.stage(125, bottom, "share", 66)
    d.text(125, bottom + 34, "half to each", size=12, fill=QUIET)
    d.arrow(91, bottom, 73, bottom)
    d.rows(58, bottom, grads)
    d.text(58, bottom - 54, "gradient of x")
    for x, to in ((118, 205), (440, 505)):
        d.arrow(x, middle + 24, to, bottom - 18)
    d.text(168, middle + 68, "norm is redone from x", "start", 12, QUIET)
    d.text(480, middle + 68, "gelu is redone from fc1's output", "start", 12, QUIET)
    for name in ("fc1", "fc2"):
        d.arrow(places[name], bottom + 17, places[name], bottom + 48)
        d.text(places[name], bottom + 64, f"gradient of {name}'s weight, from 4 slots", size=12)
    d.text(58, bottom + 62, "plus the gradient", size=11, fill=QUIET)
    d.text(58, bottom + 75, "of y (residual)", size=11, fill=QUIET)
    legend = ((KEPT, "kept (picked) position"), (ALL, "other position"), (GRADIENT, "gradient"))
    for i, (fill, words) in enumerate(legend):
        d.box(300 + 190 * i, 478, 12, 12, fill)
        d.text(318 + 190 * i, 489, words, "start", 12)
    return d.done()


def masks() -> str:
    """Masks on a map of 8x8 positions, drawn by keepgrad itself, and what becomes of a dropped position."""
    d = Drawing(980, 560, "Masks and groups, and what becomes of the gradient of a dropped position")
    d.text(20, 28, "Which positions are kept: a map of 8x8 positions", "start", 15, bold=True)
    panels = (
        ("grid", 0.5, "groups: pairs"),
        ("grid", 0.25, "groups: 2x2 tiles"),
        ("random", 0.5, "any positions"),
        ("block", 0.5, "one contiguous piece"),
    )
    side = 22
    for i, (mask, ratio, words) in enumerate(panels):
        kept = sample(SEEDS[mask, ratio], 1, Layout((8, 8)), ratio, mask, "fold")
        assert kept is not None
        assert kept.slot_of_flat is not None
        group, picked = kept.slot_of_flat.tolist(), set(kept.picked.tolist())
        left, top = 40 + 236 * i, 66
        d.text(left + 4 * side, top - 12, f'mask="{mask}", keep-ratio {ratio:g}', size=12, bold=True)
        for place in range(64):
            d.box(
                left + place % 8 * side,
                top + place // 8 * side,
                side,
                side,
                KEPT if place in picked else EMPTY,
                "#d5dbe1",
            )
        if mask == "grid":
            _outline_groups(d, group, left, top, side)
        d.box(left, top, 8 * side, 8 * side, "none", QUIET, 1.5)
        d.text(left + 4 * side, top + 8 * side + 20, words, fill=QUIET)
    d.text(
        20,
        300,
        "What becomes of the others: a pair of a (picked) and b (not picked), with one slot",
        "start",
        15,
        bold=True,
    )
    for x, words in ((250, "activations of the slot"), (450, "gradient of the slot"), (800, "gradient given back")):
        d.text(x, 326, words, fill=QUIET)
    rows = (
        ("drop", "the paper", "a", "grad a", ("s", "0")),
        ("scaled", "", "a", "2 * grad a", ("s", "0")),
        ("fold", "the default", "a", "grad a + grad b", ("s / 2", "s / 2")),
        ("pool", "", "(a + b) / 2", "grad a + grad b", ("s / 2", "s / 2")),
    )
    for i, (name, note, activation, gradient, back) in enumerate(rows):
        y = 360 + 46 * i
        d.text(30, y + 5, name, "start", 14, bold=True)
        d.text(84, y + 5, note, "start", 12, QUIET)
        for x, words, fill in ((250, activation, KEPT), (450, gradient, GRADIENT)):
            d.box(x - 70, y - 15, 140, 30, fill)
            d.text(x, y + 5, words)
        d.text(350, y + 5, "and")
        d.arrow(530, y, 698, y)
        d.text(612, y - 6, "backward gives s", size=12, fill=QUIET)
        for x, who, words in ((755, "a", back[0]), (845, "b", back[1])):
            d.box(x - 45, y - 15, 90, 30, EMPTY if words == "0" else GRADIENT)
            d.text(x, y + 5, f"to {who}: {words}")
    d.text(20, 545, SLOT_NOTE, "start", 12, QUIET)
    return d.done()


SEEDS = {("grid", 0.5): 3, ("grid", 0.25): 1, ("random", 0.5): 1, ("block", 0.5): 1}
"""Draws that show a mask well: any draw would be right."""


def _outline_groups(d: Drawing, group: list[int], left: float, top: float, side: float) -> None:
    """A line between neighbours that are in different groups."""
    for place in range(64):
        row, col = divmod(place, 8)
        x, y = left + col * side, top + row * side
        if col < 7 and group[place] != group[place + 1]:
            d.line(x + side, y, x + side, y + side, stroke=QUIET, wide=1.8)
        if row < 7 and group[place] != group[place + 8]:
            d.line(x, y + side, x + side, y + side, stroke=QUIET, wide=1.8)


def saved() -> str:
    """What one block of a ViT saves for backward with several settings."""
    d = Drawing(980, 420, "What one block of a vision transformer saves for the backward pass")
    unit, left = 43, 175
    d.text(
        20,
        28,
        "What one ViT block saves for each position (1 = one row of C values in float32)",
        "start",
        15,
        bold=True,
    )
    for i, words in enumerate(("attention branch", "MLP branch")):
        d.box(left + 160 * i, 44, 12, 12, (ALL, KEPT)[i])
        d.text(left + 18 + 160 * i, 55, words, "start", 12)
    whole = sum(size for part in SAVED["full backprop"][1:] for _, size in part)
    for i, (name, (_, *parts)) in enumerate(SAVED.items()):
        y = 74 + 46 * i
        d.text(left - 10, y + 20, name, "end")
        x = float(left)
        for fill, part in zip((ALL, KEPT), parts, strict=True):
            for words, size in part:
                d.box(x, y, size * unit, 30, fill, QUIET)
                if size * unit > 7 * len(words):
                    d.text(x + size * unit / 2, y + 20, words)
                x += size * unit
        total = sum(size for part in parts for _, size in part)
        d.text(x + 10, y + 20, f"{total:.2g} of {whole}", "start", bold=True)
    d.text(20, 408, SAVED_NOTE, "start", 12, QUIET)
    return d.done()


DRAWINGS = {"engine.svg": engine, "masks.svg": masks, "saved.svg": saved}

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (HERE / name).write_text(draw())
        print(HERE.name + "/" + name)
