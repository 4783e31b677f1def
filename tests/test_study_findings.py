"""What a study concludes."""

import math

import pytest
import timm
from studying import read

import keepgrad
from keepgrad.study import findings
from keepgrad.study.questions import FULL, all_keys, key_of, questions
from keepgrad.study.results import Measured, Results, Trained, mean_and_error

# What is concluded


def measured(cosine, size, time=1.0, norm=1.0):
    return Measured(cosine, norm, cosine, 0.0, cosine, size, size, time, [("blocks.0", cosine, norm)])


EXACT = key_of({"keep_ratio": 1.0})


def study_of(**settings):
    keys = {name: key_of({"keep_ratio": 0.01 * (number + 1)}) for number, name in enumerate(settings)}
    results = Results({}, {keys[name]: one for name, one in settings.items()}, steps=9, seeds=("0", "1"))
    return keys, results


def test_the_front_has_what_nothing_smaller_agrees_better_than():
    keys, results = study_of(a=measured(0.9, 0.1), b=measured(0.8, 0.2), c=measured(0.95, 0.3), d=measured(0.95, 0.4))
    assert findings.front(results) == [keys["a"], keys["c"]]


def test_the_recommended_setting_is_the_cheapest_good_one():
    keys, results = study_of(
        wrong=measured(0.9, 0.1, 0.5),
        long=measured(0.999, 0.1, 0.5, norm=1.3),
        fast=measured(0.995, 0.5, 0.6),
        small=measured(0.995, 0.1, 1.2),
    )
    best = findings.advice(results)
    assert best == findings.Advice(keys["small"], keys["small"], keys["fast"], True)


def test_a_setting_that_trains_worse_is_not_recommended():
    keys, results = study_of(worse=measured(0.999, 0.1), good=measured(0.995, 0.5))
    results.trained = {
        FULL: {"0": Trained(1.0, 0.80, 9), "1": Trained(1.0, 0.70, 9)},
        keys["worse"]: {"0": Trained(1.0, 0.77, 9), "1": Trained(1.0, 0.67, 9)},
        keys["good"]: {"0": Trained(1.0, 0.80, 9), "1": Trained(1.0, 0.698, 9)},
    }
    assert results.against_full(keys["worse"]) == pytest.approx([-0.03, -0.03])
    results.measured[EXACT] = measured(1.0, 0.6, 1.1)
    assert findings.advice(results).best == keys["good"]
    assert findings.advice(results).reduced


def test_where_no_reduced_gradient_is_good_an_exact_setting_is_named_and_that_is_said():
    _, results = study_of(a=measured(0.9, 0.1), b=measured(math.nan, 0.2), c=measured(0.999, 0.1, norm=0.5))
    results.measured[EXACT] = measured(1.0, 0.6, 1.1)
    assert findings.advice(results) == findings.Advice(EXACT, EXACT, EXACT, False)


def test_only_trainings_of_the_same_length_count():
    keys, results = study_of(a=measured(0.999, 0.1))
    results.trained = {FULL: {"0": Trained(1.0, 0.8, 9), "1": Trained(1.0, 0.9, 5), "7": Trained(1.0, 0.1, 9)}}
    assert results.top1(FULL) == [0.8]
    assert results.against_full(keys["a"]) == []


def test_the_line_of_a_setting_can_be_run():
    model = timm.models.VisionTransformer(img_size=32, patch_size=4, embed_dim=32, depth=2, num_heads=2)
    for key in all_keys(questions(True, 2, lambda options: 1)):
        exec(findings.code_of(key), {"keepgrad": keepgrad, "model": model})
        keepgrad.remove(model)


def test_answers_name_the_best_and_what_trains_worse(finished):
    results = read(finished)
    (question,) = [q for q in questions(True, 2, lambda options: 1) if q.name == "mask"]
    cosine = {c.label: results.measured[c.key].cosine for c in question.cases if c.series == "drop"}
    said = findings.answer(question, results)
    assert f"With drop, {max(cosine, key=cosine.get)} agrees best" in said
    for run_ in results.trained[key_of({"keep_ratio": 0.5})].values():
        object.__setattr__(run_, "top1", 0.0)
    for run_ in results.trained[FULL].values():
        object.__setattr__(run_, "top1", 0.5)
    assert "fold 0.5 (-50.0 points)" in findings.answer(question, results)


def test_mean_and_error():
    assert mean_and_error([1.0, 3.0]) == (2.0, pytest.approx(1.0))
    assert mean_and_error([2.0])[0] == 2.0
    assert math.isnan(mean_and_error([2.0])[1])
    assert math.isnan(mean_and_error([])[0])
