"""The report of a study: one self-contained HTML file, for laptops and phones, in light and dark mode."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..report import Table
from . import figures
from .findings import COSINE, NORM, Advice, answer, code_of
from .questions import FULL, Question, name_of
from .results import Results, mean_and_error

__all__ = ["page"]

STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #5b636b; --line: #d5dadf; --paper: #ffffff;
  --card: #f5f7f9; --accent: #1f66c1; --good: #1c7a4d; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e7eaed; --soft: #a3acb5; --line: #3d454d; --paper: #14171a; --card: #1d2125; --accent: #7db2f5;
    --good: #5cc795; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); line-height: 1.55;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 68rem; margin: 0 auto; padding: 1.5rem 1.1rem 4rem; }
h1 { font-size: 1.65rem; line-height: 1.2; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 2.8rem 0 .4rem; padding-top: 1rem; border-top: 1px solid var(--line); }
p { margin: .4rem 0; max-width: 46rem; }
.soft { color: var(--soft); }
.headline { background: var(--card); border-left: 4px solid var(--good); border-radius: 6px; padding: 1rem 1.1rem;
  margin: 1.2rem 0; }
.headline p { margin: .3rem 0; }
.headline .what { font-size: 1.15rem; font-weight: 600; }
code { font: .9em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
pre { margin: .6rem 0; padding: .6rem .8rem; background: var(--paper); border: 1px solid var(--line);
  border-radius: 6px; white-space: pre-wrap; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); gap: 1rem;
  margin: .8rem 0; }
figure { margin: 0; min-width: 0; }
figcaption { color: var(--soft); font-size: .88rem; }
svg { display: block; width: 100%; height: auto; max-width: 44rem; }
svg text { font-family: inherit !important; }
.wide svg { max-width: 40rem; }
.masks { display: grid; grid-template-columns: repeat(3, 1fr); gap: .7rem; max-width: 44rem; }
.masks img { width: 100%; height: auto; image-rendering: pixelated; border-radius: 4px; display: block; }
.numbers { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: .8rem; margin: 1rem 0; }
.numbers div { background: var(--card); border-radius: 6px; padding: .6rem .8rem; }
.numbers b { display: block; font-size: 1.35rem; }
.numbers span { color: var(--soft); font-size: .85rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; margin: .5rem 0; }
caption { text-align: left; color: var(--soft); padding-bottom: .3rem; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 600; }
.facts th { text-align: left; vertical-align: top; }
.facts td { white-space: normal; overflow-wrap: anywhere; }
ol { columns: 2 16rem; font-size: .88rem; color: var(--soft); margin: .3rem 0; padding-left: 1.4rem; }
details { margin: .5rem 0; }
summary { cursor: pointer; color: var(--accent); }
@media print { details > * { display: block; } }
"""


def page(
    about: Mapping[str, Any],
    questions: Sequence[Question],
    results: Results,
    front: Sequence[str],
    advice: Advice,
    masks: Mapping[float, Mapping[str, bytes]],
) -> str:
    """The whole report as HTML.

    Args:
        about: the model, a summary, and facts about the study and the machine, which are shown unchanged.
        questions: the questions that were asked.
        results: the results for all settings.
        front: the keys of the settings on the Pareto front.
        advice: the recommendation.
        masks: PNG pictures of the masks, by ratio and kind of mask.
    """
    title = f"keepgrad study of {about['model']}"
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="soft">{html.escape(about["summary"])}</p>',
        _headline(results, advice),
        "<h2>Agreement against memory</h2>",
        "<p>Every setting that was measured: how well its gradients agree with exact ones, and what it saves for "
        "backward. No setting agrees better than those on the front with as little memory.</p>",
        _figures("", ("pareto", "Cosine against saved bytes", figures.pareto(results, front, advice.best), WIDE)),
        f"<ol>{''.join(f'<li>{html.escape(name_of(key))}</li>' for key in front)}</ol>",
        _details("Table", [_table([(name_of(key), key) for key in front], results)]),
    ]
    for question in questions:
        if question.name == "presets":
            parts += [f"<h2>{html.escape(question.title)}</h2>", *_tables(question, results)]
        else:
            parts += _question(question, results)
        if question.name == "mask" and masks:
            parts += [_masks(masks)]
        if question.name == "ratio":
            draw, size = figures.heat_map(question, results)
            parts += ["<p>Layer by layer, with the ratio in all branches:</p>"]
            parts += [_figures("wide", ("layers", "Cosine of each layer at each keep-ratio", draw, size))]
    parts += ["<h2>How it was measured</h2>", _method(about, results)]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head>\n<body><main>\n{body}\n</main></body></html>\n"
    )


WIDE = (5.4, 3.8)


def _headline(results: Results, advice: Advice) -> str:
    one = results.measured[advice.best]
    behind, error = mean_and_error(results.against_full(advice.best))
    bar = f"cosine with exact gradients {COSINE:g} or more, length within {NORM:.0%}"
    tried = "" if math.isnan(behind) else ", and in training not behind full backprop"
    if advice.reduced:
        why = f"Of the settings that are good enough ({bar}{tried}), it has the least product of memory and time."
    else:
        why = f"No setting that reduces gradients is good enough here ({bar}{tried}). This one keeps them exact."
    others = []
    if advice.fastest != advice.best:
        others.append(_other("Fastest", advice.fastest, results))
    if advice.smallest != advice.best:
        others.append(_other("Smallest", advice.smallest, results))
    numbers = [
        (f"{one.bytes:.2f}x", "saved for backward"),
        (f"{one.time:.2f}x", "time of a step"),
        (f"{one.flops:.2f}x", "FLOPs of a step"),
        (f"{one.cosine:.4f}", "cosine with exact gradients"),
    ]
    if not math.isnan(behind):
        spread = "" if math.isnan(error) else f" ± {100 * error:.1f}"
        numbers.append((f"{100 * behind:+.1f}{spread}", "points of accuracy, against full backprop"))
    cards = "".join(f"<div><b>{value}</b><span>{label}</span></div>" for value, label in numbers)
    code = html.escape(code_of(advice.best))
    return (
        f'<section class="headline"><p class="what">Use {html.escape(name_of(advice.best))}.</p>'
        f"<pre><code>{code}</code></pre><p>{html.escape(why)}</p>{''.join(others)}</section>"
        f'<div class="numbers">{cards}</div>'
    )


def _other(what: str, key: str, results: Results) -> str:
    one = results.measured[key]
    facts = f"{one.bytes:.2f}x saved, {one.time:.2f}x time, cosine {one.cosine:.4f}"
    return f'<p class="soft">{what}: <code>{html.escape(code_of(key))}</code> ({facts})</p>'


def _figures(kind: str, *panels: tuple[str, str, figures.Draw, tuple[float, float]]) -> str:
    drawn = (
        f"<figure>{figures.svg(name, html.escape(label), draw, size)}</figure>" for name, label, draw, size in panels
    )
    return f'<div class="figures {kind}">{"".join(drawn)}</div>'


def _question(question: Question, results: Results) -> list[str]:
    panels = [
        (f"{question.name}-{figure}", f"{question.title} {title}", figures.agreement(question, results, figure, title))
        for figure, title in (("cosine", "cosine with exact gradients"), ("norm_ratio", "norm ratio"))
    ]
    if results.runs(FULL):
        panels[1:] = [(f"{question.name}-top1", f"{question.title} accuracy", figures.quality(question, results))]
        panels.reverse()
    found = (
        f'<p>{html.escape(answer(question, results))}</p><p class="soft">The paper: {html.escape(question.paper)}</p>'
    )
    drawn = _figures("", *((name, label, draw, figures.PANEL) for name, label, draw in panels))
    return [f"<h2>{html.escape(question.title)}</h2>", found, drawn, _details("Table", _tables(question, results))]


def _tables(question: Question, results: Results) -> list[str]:
    own = question.name == "presets"  # presets have their own names
    named = {case.label if own else name_of(case.key): case.key for case in question.cases}
    left = [f"{name}: {results.left_out[key]}" for name, key in named.items() if key in results.left_out]
    said = "".join(f'<p class="soft">Left out: {html.escape(text)}</p>' for text in left)
    return [_table([(name, key) for name, key in named.items() if key in results.measured], results), said]


def _table(settings: Sequence[tuple[str, str]], results: Results) -> str:
    head = ["setting", "cosine", "norm ratio", "bias", "spread", "saved", "FLOPs", "time", "worst layer"]
    if results.runs(FULL):
        head += ["accuracy", "against full", "loss"]
    rows = []
    for name, key in settings:
        one = results.measured[key]
        worst = min((cosine for _, cosine, _ in one.layers if cosine is not None), default=math.nan)
        cells = [f"{value:.4f}" for value in (one.cosine, one.norm_ratio, one.bias, one.spread)]
        cells += [f"{value:.2f}x" for value in (one.bytes, one.flops, one.time)] + [f"{worst:.3f}"]
        if results.runs(FULL):
            cells += _quality_cells(key, results)
        rows.append((name, *cells))
    if results.runs(FULL):
        rows.append((FULL, *["1.0000"] * 3, "0.0000", *["1.00x"] * 3, "1.000", *_quality_cells(FULL, results)))
    return f'<div class="scroll">{Table("", tuple(head), rows).to_html()}</div>'


def _quality_cells(key: str, results: Results) -> list[str]:
    if not results.runs(key):
        return ["-", "-", "-"]
    behind, error = mean_and_error(results.against_full(key))
    spread = "" if math.isnan(error) else f" ± {100 * error:.1f}"
    mean = mean_and_error(results.top1(key))[0]
    return [f"{100 * mean:.1f}%", f"{100 * behind:+.1f}{spread}", f"{results.loss(key):.3f}"]


def _details(summary: str, parts: Sequence[str]) -> str:
    return f"<details><summary>{html.escape(summary)}</summary>{''.join(parts)}</details>"


def _masks(masks: Mapping[float, Mapping[str, bytes]]) -> str:
    cells = []
    for ratio, kinds in masks.items():
        for kind, data in kinds.items():
            source = f"data:image/png;base64,{base64.b64encode(data).decode()}"
            text = f"{kind}, {ratio:g}"
            picture = f'<img src="{source}" alt="{text}: kept positions of an image">'
            cells.append(f"<figure>{picture}<figcaption>{text}</figcaption></figure>")
    return f'<p>Positions that are kept, on an image of the data:</p><div class="masks">{"".join(cells)}</div>'


METHOD = """The exact gradient is that of the model's own code with the same images, weights and random numbers. Cosine
and norm ratio are of one step, means over draws of the masks; bias is the cosine of the mean gradient over the draws;
spread is what averages out. Saved bytes are those that autograd keeps for backward. The time of a step is the median,
in turns with full backprop."""
TRAININGS = """Accuracy is that after a short training from the same weights, on images that were held out; all settings
of a seed see the same images in the same order."""


def _method(about: Mapping[str, Any], results: Results) -> str:
    rows = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>"
        for name, value in about["facts"].items()
    )
    said = [METHOD, TRAININGS] if results.runs(FULL) else [METHOD]
    return "".join(f"<p>{html.escape(text)}</p>" for text in said) + f'<table class="facts">{rows}</table>'
