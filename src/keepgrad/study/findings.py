"""Conclusions from the results of a study.

A setting is good enough if its gradients agree with exact ones (cosine and norm ratio of the whole gradient) and, if
short trainings were run, it does not train worse than full backprop. Among the settings that are good enough or exact,
the one with the lowest product of memory and time is recommended.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .questions import FULL, Case, Question, is_exact, name_of
from .results import Measured, Results, mean_and_error

__all__ = ["COSINE", "NORM", "Advice", "advice", "answer", "code_of", "front"]

COSINE = 0.99
NORM = 0.1
TOP1 = 0.005


@dataclass(frozen=True)
class Advice:
    """The recommended setting, the one that needs least memory and the fastest one.

    `reduced` is False if no setting that reduces gradients is good enough, so that only exact ones are recommended.
    """

    best: str
    smallest: str
    fastest: str
    reduced: bool


def front(results: Results) -> list[str]:
    """The Pareto front: no other setting has both a better cosine and fewer bytes. The smallest comes first."""
    rows = sorted(results.measured.items(), key=lambda item: (item[1].bytes, -item[1].cosine))
    found, best = [], -math.inf
    for key, one in rows:
        if one.cosine > best:
            best = one.cosine
            found.append(key)
    return found


def advice(results: Results) -> Advice:
    good = {key: one for key, one in results.measured.items() if is_exact(key) or is_good(key, one, results)}

    def least(of: Callable[[Measured], float]) -> str:
        return min(good, key=lambda key: of(good[key]))

    return Advice(
        best=least(lambda one: one.bytes * one.time),
        smallest=least(lambda one: one.bytes),
        fastest=least(lambda one: one.time),
        reduced=not all(map(is_exact, good)),
    )


def is_good(key: str, one: Measured, results: Results) -> bool:
    """True if the gradients agree with exact ones and the short trainings, if any, are not worse than full backprop."""
    agrees = one.cosine >= COSINE and abs(one.norm_ratio - 1) <= NORM
    return agrees and not is_behind(results.against_full(key))


def is_behind(differences: Sequence[float]) -> bool:
    """True if accuracy is below full backprop by more than half a point and more than twice the standard error."""
    mean, error = mean_and_error(differences)
    return mean < -max(TOP1, 0.0 if math.isnan(error) else 2 * error)


def code_of(key: str) -> str:
    """The line of code that applies a setting to a model."""
    options = json.loads(key)
    return f"keepgrad.apply(model, {', '.join(f'{name}={value!r}' for name, value in options.items())})"


def answer(question: Question, results: Results) -> str:
    """The answer to a question, in a few sentences."""
    lines = {
        series: [case for case in cases if case.key in results.measured] for series, cases in question.lines().items()
    }
    said = []
    for series, cases in lines.items():
        if cases and question.name == "ratio":
            said.append(_least_ratio(series, cases, results))
        elif cases:
            where = f"With {series}, " if len(lines) > 1 else ""
            said.append(f"{where}{_ranked(cases, results)}.")
    return " ".join([*(text[:1].upper() + text[1:] for text in said), *_trained(question, results)])


def _ranked(cases: Sequence[Case], results: Results) -> str:
    ranked = sorted(cases, key=lambda case: -results.measured[case.key].cosine)

    def figures(case: Case) -> str:
        one = results.measured[case.key]
        return f"{one.cosine:.4f}, {one.bytes:.2f}x saved"

    first, *others = ranked
    best = f"{first.label} agrees best with exact gradients (cosine {figures(first)})"
    shown = ", ".join(f"{case.label} ({figures(case)})" for case in others)
    return f"{best}, before {shown}" if shown else best


def _least_ratio(series: str, cases: Sequence[Case], results: Results) -> str:
    enough = [float(case.label) for case in cases if results.measured[case.key].cosine >= COSINE]
    if enough:
        return f"In {series}, {min(enough):g} is the least ratio with a cosine of {COSINE:g} or more."
    return f"In {series}, none of the ratios tried comes to a cosine of {COSINE:g}."


def _trained(question: Question, results: Results) -> list[str]:
    """A sentence that names the settings that trained worse than full backprop; no sentence if none were trained."""
    runs = {case.key: results.against_full(case.key) for case in question.cases}
    if not any(runs.values()):
        return []
    rule = f"behind {FULL} by more than half a point and twice the standard error"
    worse = [
        f"{name_of(key)} ({100 * mean_and_error(differences)[0]:+.1f} points)"
        for key, differences in runs.items()
        if is_behind(differences)
    ]
    return [f"In training, {rule}: {', '.join(worse)}."] if worse else [f"In training, none was {rule}."]
