"""The study: what is asked, and what is measured."""

import json

import pytest
import timm
import torch
import torch.nn.functional as F
from studying import QUICK, results_in

import keepgrad
from keepgrad.memory import saved_bytes
from keepgrad.study.config import StudyConfig
from keepgrad.study.questions import FULL, all_keys, key_of, name_of, questions, trained_as
from keepgrad.study.results import Measured
from keepgrad.study.subject import Subject

# What is asked


def test_every_question_varies_what_it_asks_about():
    asked = {q.name: q for q in questions(True, 4, lambda options: 1)}
    labels = {name: [case.label for case in q.cases if case.series == q.cases[0].series] for name, q in asked.items()}
    assert labels["mask"] == ["grid", "random", "block"]
    assert labels["reduce"] == ["drop", "scaled", "fold", "pool"]
    assert labels["ratio"] == [str(n / 8) for n in range(1, 8)]
    assert labels["schedule"] == ["uniform", "increasing", "decreasing", "careful", "first half", "last half"]
    assert labels["attention"] == ["qkv", "query", "head", "off"]
    keys = all_keys(list(asked.values()))
    assert len(keys) == len(set(keys)) < sum(len(q.cases) for q in asked.values())
    for key in keys:
        keepgrad.KeepConfig(**json.loads(key))


def test_a_model_without_attention_is_not_asked_about_it():
    asked = questions(False, 4, lambda options: 1)
    assert "attention" not in [q.name for q in asked]
    assert not any("attention" in key for key in all_keys(asked))


@pytest.mark.parametrize(
    ("model", "size"),
    [
        (timm.models.VisionTransformer(img_size=32, patch_size=4, embed_dim=32, depth=4, num_heads=2), 32),
        (timm.models.ConvNeXt(depths=(1, 1, 2, 1), dims=(8, 16, 32, 64)), 128),
    ],
    ids=["vit", "convnext"],
)
def test_layers_are_compared_at_equal_memory(model, size):
    image = torch.rand(1, 3, size, size)

    def saved(options):
        keepgrad.apply(model, **options)
        try:
            return saved_bytes(lambda: model(image), model)
        finally:
            keepgrad.remove(model)

    blocks = 4 if size == 32 else 5
    (question,) = [q for q in questions(size == 32, blocks, saved) if q.name == "schedule"]
    sizes = {case.label: saved(case.options) for case in question.cases}
    assert len(sizes) == 6
    assert max(sizes.values()) <= min(sizes.values()) * 1.06, sizes
    assert max(sizes.values()) >= saved({"keep_ratio": 0.5}) * 0.97


def test_settings_have_one_key_and_a_name():
    assert key_of({"keep_ratio": 0.5, "mask": "grid", "reduce": "fold"}) == key_of({"keep_ratio": 0.5})
    assert key_of({"keep_ratio": 0.5, "reduce": "drop"}) != key_of({"keep_ratio": 0.5})
    assert trained_as(key_of({"keep_ratio": 0.5, "save": "input"})) == key_of({"keep_ratio": 0.5})
    assert trained_as(FULL) == FULL
    names = [
        ({"preset": "paper"}, "preset paper"),
        ({"keep_ratio": 0.25, "mask": "random", "reduce": "drop"}, "drop 0.25, mask random"),
        ({"keep_ratio": {"attention": 1.0, "mlp": 0.5}}, "fold 0.5, MLPs only"),
        ({"keep_ratio": [0.3, 0.3, 1.0]}, "fold 0.3 x2, 1 x1"),
        ({"keep_ratio": 1.0, "save": "input"}, "exact, save input"),
    ]
    for options, name in names:
        assert name_of(key_of(options)) == name


# What is measured


def test_a_setting_is_measured_like_by_the_instruments(finished):
    subject = Subject(StudyConfig(**QUICK))
    subject.prepare(finished / "start.safetensors", lambda steps: None)
    found = Measured(**results_in(finished)["measured"][key_of({"keep_ratio": 0.5})])
    (wanted,) = keepgrad.compare(subject.model, subject.batches, F.cross_entropy, [{"keep_ratio": 0.5}], 1).settings
    assert found.cosine == pytest.approx(wanted.cosine, abs=1e-6)
    assert found.norm_ratio == pytest.approx(wanted.norm_ratio, abs=1e-6)
    assert found.bytes == pytest.approx(wanted.bytes / subject.full[0])
    assert found.flops == pytest.approx(wanted.flops / subject.full[1])
    assert found.time > 0
    assert {"blocks.0", "blocks.1", "head"} <= {name for name, *_ in found.layers}


def test_exact_settings_train_like_full_backprop_and_others_do_not(finished):
    trained = results_in(finished)["trained"]
    assert trained[key_of({"keep_ratio": 1.0})]["0"]["loss"] == pytest.approx(trained[FULL]["0"]["loss"], rel=1e-6)
    assert trained[key_of({"keep_ratio": 0.125})]["0"]["loss"] != pytest.approx(trained[FULL]["0"]["loss"], rel=1e-5)
    assert set(trained[FULL]) == {"0", "1"}
    assert trained[FULL]["0"]["loss"] != trained[FULL]["1"]["loss"]


def test_measuring_leaves_the_model_as_it_was():
    subject = Subject(StudyConfig(**{**QUICK, "prepare": 0}))
    before = {name: value.clone() for name, value in subject.model.state_dict().items()}
    subject.measure({"keep_ratio": 0.5})
    subject.train({"keep_ratio": 0.5}, 0, lambda steps: None)
    subject.masks(0.5)
    assert all(torch.equal(value, before[name]) for name, value in subject.model.state_dict().items())
    assert not any("forward" in vars(module) for module in subject.model.modules())
    assert all(parameter.grad is None for parameter in subject.model.parameters())
