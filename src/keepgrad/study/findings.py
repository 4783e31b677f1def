"""What the figures of a study say.

A setting is good enough if its gradients agree with exact ones (cosine and norm ratio of the whole gradient) and, where
short trainings were run, if it trains as well as full backprop, within the noise. Of those, the one with the least
product of memory and time is recommended.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from .questions import EVERYWHERE, FULL, Case, Question, name_of
from .results import Measured, Results, mean_and_error

__all__ = ["COSINE", "NORM", "Advice", "advice", "answer", "code_of", "front"]

COSINE = 0.99
NORM = 0.1
TOP1 = 0.005


@dataclass(frozen=True)
class Advice:
    """The recommended setting, and others for those who need one thing above all. `enough`: it is good enough."""

    best: str
    smallest: str
    fastest: str
    enough: bool


def front(results: Results) -> list[str]:
    """The settings than which no other agrees better with less memory, the smallest first."""
    rows = sorted(results.measured.items(), key=lambda item: (item[1].bytes, -item[1].cosine))
    found, best = [], -math.inf
    for key, one in rows:
        if one.cosine > best:
            best = one.cosine
            found.append(key)
    return found


def advice(results: Results) -> Advice:
    good = {key: one for key, one in results.measured.items() if is_good(key, one, results)}
    if not good:
        key = max(results.measured, key=lambda key: results.measured[key].cosine)
        return Advice(key, key, key, False)

    def least(of: str) -> str:
        def value(key: str) -> float:
            one = good[key]
            return {"both": one.bytes * one.time, "bytes": one.bytes, "time": one.time}[of]

        return min(good, key=value)

    return Advice(least("both"), least("bytes"), least("time"), True)


def is_good(key: str, one: Measured, results: Results) -> bool:
    """Whether a setting agrees and, if that was tried, trains as well as full backprop."""
    if one.cosine < COSINE or abs(one.norm_ratio - 1) > NORM:
        return False
    behind, error = mean_and_error(results.against_full(key))
    noise = TOP1 if math.isnan(error) else max(TOP1, 2 * error)
    return math.isnan(behind) or behind >= -noise


def code_of(key: str) -> str:
    """The line that puts a setting into force."""
    options = json.loads(key)
    return f"keepgrad.apply(model, {', '.join(f'{name}={value!r}' for name, value in options.items())})"


def answer(question: Question, results: Results) -> str:
    """What was found, in a sentence or two."""
    lines: dict[str, list[Case]] = {}
    for case in question.cases:
        if case.key in results.measured:
            lines.setdefault(case.series, []).append(case)
    if question.name == "ratio":
        return _least_ratio(lines, results)
    said = []
    for series, cases in lines.items():
        where = f"With {series}, " if len(lines) > 1 else ""
        said.append(f"{where}{_ranked(cases, results)}.")
    trained = _trained(question, results)
    return " ".join([*(text[:1].upper() + text[1:] for text in said), *trained])


def _ranked(cases: Sequence[Case], results: Results) -> str:
    cosine = {case.label: results.measured[case.key].cosine for case in cases}
    ranked = sorted(cosine, key=lambda label: -cosine[label])
    shown = ", ".join(f"{label} ({cosine[label]:.4f})" for label in ranked[1:])
    first = f"{ranked[0]} agrees best with exact gradients (cosine {cosine[ranked[0]]:.4f})"
    return f"{first}, before {shown}" if shown else first


def _least_ratio(lines: dict[str, list[Case]], results: Results) -> str:
    said = []
    for series, cases in lines.items():
        enough = [float(case.label) for case in cases if results.measured[case.key].cosine >= COSINE]
        where = "all branches" if series == EVERYWHERE else series
        if enough:
            said.append(f"In {where}, {min(enough):g} is the least ratio with a cosine of {COSINE:g} or more.")
        else:
            said.append(f"In {where}, no ratio below 1 comes to a cosine of {COSINE:g}.")
    return " ".join(said)


def _trained(question: Question, results: Results) -> list[str]:
    """The settings of a question that trained worse than full backprop by more than the noise."""
    runs = {case.key: results.against_full(case.key) for case in question.cases}
    if not any(runs.values()):
        return []
    worse = []
    for key, differences in runs.items():
        mean, error = mean_and_error(differences)
        if not math.isnan(mean) and mean < -max(TOP1, 0.0 if math.isnan(error) else 2 * error):
            worse.append(f"{name_of(key)} ({100 * mean:+.1f} points)")
    if not worse:
        return [f"None trains worse than {FULL} by more than the noise."]
    return [f"Worse than {FULL} by more than the noise: {', '.join(worse)}."]
