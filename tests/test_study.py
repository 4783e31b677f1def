"""The study: what is asked, what is measured, what is concluded, the report, and going on after an interruption."""

import csv
import html
import json
import math
import re
import shutil
from html.parser import HTMLParser

import pytest
import timm
import torch
import torch.nn.functional as F
from conftest import SMALL_MODELS

import keepgrad
from keepgrad.cli import main
from keepgrad.data import digits
from keepgrad.errors import ConfigError, FileError, StoppedError
from keepgrad.memory import saved_bytes
from keepgrad.study import findings, run
from keepgrad.study.config import StudyConfig
from keepgrad.study.questions import FULL, all_keys, key_of, name_of, questions, trained_as
from keepgrad.study.results import Measured, Results, Trained, mean_and_error
from keepgrad.study.subject import Subject

SMALL = {**digits.SETTINGS["model_kwargs"], "embed_dim": 32, "depth": 2, "num_heads": 2}
QUICK = {"model": "vit_tiny_patch16_224", "model_kwargs": SMALL, "crop_pct": 1.0, "batch_size": 8, "batches": 1}
QUICK |= {"draws": 1, "rounds": 1, "prepare": 2, "train": 2, "seeds": 2, "workers": 0}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    output = tmp_path_factory.mktemp("study")
    run.study(StudyConfig(**QUICK), output)
    return output


def read(folder):
    results = Results.read(folder / "results.json", {})
    results.steps, results.seeds = QUICK["train"], ("0", "1")
    return results


def results_in(folder):
    return json.loads((folder / "results.json").read_text())


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
    assert trained[key_of({"keep_ratio": 1.0})]["0"]["loss"] == pytest.approx(trained[FULL]["0"]["loss"], rel=1e-4)
    assert trained[key_of({"keep_ratio": 0.125})]["0"]["loss"] != pytest.approx(trained[FULL]["0"]["loss"], rel=1e-4)
    assert set(trained[FULL]) == {"0", "1"}
    assert trained[FULL]["0"]["loss"] != trained[FULL]["1"]["loss"]


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


# The report


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.ids, self.found, self.links = [], [], []

    def handle_starttag(self, tag, attrs):
        self.found.append(tag)
        self.ids += [value for name, value in attrs if name == "id"]
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href")]


def test_the_report_needs_nothing_from_elsewhere(finished):
    text = (finished / "report.html").read_text()
    tags = Tags()
    tags.feed(text)
    assert "script" not in tags.found
    assert "link" not in tags.found
    assert all(link.startswith(("data:", "#")) for link in tags.links)
    assert not re.search(r"url\((?!#)|@import", text)
    assert len(tags.ids) == len(set(tags.ids))
    assert set(re.findall(r"url\(#([^)]*)\)", text)) <= set(tags.ids)
    assert tags.found.count("img") == 6
    assert tags.found.count("svg") == 1 + 2 * 6 + 1
    assert "#0a0b0c" not in text


def test_the_report_says_what_was_found(finished):
    text = (finished / "report.html").read_text()
    results = read(finished)
    headline = text[text.index('class="headline"') : text.index("</section>")]
    assert html.escape(findings.code_of(findings.advice(results).best)) in headline
    for title in ("Which positions?", "How many positions?", "Which layers, at equal memory?", "How is attention"):
        assert title in text


def test_tables_and_pictures_are_files_too(finished):
    with (finished / "study.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    results = read(finished)
    assert [row["setting"] for row in rows] == [FULL, *map(name_of, results.measured)]
    one = next(row for row in rows if row["setting"] == "fold 0.25")
    key = key_of({"keep_ratio": 0.25})
    assert float(one["cosine"]) == pytest.approx(results.measured[key].cosine, abs=1e-6)
    assert json.loads(one["options"]) == {"keep_ratio": 0.25}
    assert float(one["top1"]) == pytest.approx(mean_and_error(results.top1(key))[0], abs=1e-6)
    with (finished / "layers.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == sum(len(one.layers) for one in results.measured.values())
    names = {"pareto", "mask", "reduce", "ratio", "schedule", "attention", "layers", "mask-grid-0.5"}
    assert names <= {path.stem for path in finished.glob("*.png")}


def test_a_study_without_training_shows_the_norm_instead(finished, tmp_path):
    for name in ("results.json", "start.safetensors"):
        shutil.copy(finished / name, tmp_path)
    run.study(StudyConfig(**{**QUICK, "train": 0, "resume": True, "output": str(tmp_path)}), tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert 'id="mask-norm_ratio-' in text
    assert 'id="mask-top1-' not in text
    assert "short trainings" not in text
    assert results_in(tmp_path)["trained"] == results_in(finished)["trained"]


@pytest.fixture(scope="module")
def browser():
    webdriver = pytest.importorskip("selenium.webdriver")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("needs chromium and chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("headless=new", "no-sandbox", "disable-gpu", "disable-background-networking", "disable-sync"):
        options.add_argument(f"--{argument}")
    found = webdriver.Chrome(options, webdriver.ChromeService(driver))
    yield found
    found.quit()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [(1280, 800), (390, 844)], ids=["laptop", "phone"])
def test_the_report_in_a_browser(finished, browser, size, scheme):
    width, height = size
    shape = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", shape)
    preference = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [preference]})
    browser.get((finished / "report.html").as_uri())
    look = browser.execute_script(
        """
        const boxes = [...document.querySelectorAll("svg, img")].map(e => e.getBoundingClientRect());
        const ink = document.querySelector("svg text");
        return {
            wide: document.documentElement.scrollWidth,
            least: Math.min(...boxes.map(b => b.width)),
            right: Math.max(...boxes.map(b => b.right)),
            columns: new Set([...document.querySelectorAll(".figures")][1].children.length
                ? [...[...document.querySelectorAll(".figures")][1].children].map(e => e.getBoundingClientRect().top)
                : []).size,
            paper: getComputedStyle(document.body).backgroundColor,
            ink: getComputedStyle(ink).fill,
            loaded: [...document.images].every(i => i.complete && i.naturalWidth > 0),
            outside: performance.getEntriesByType("resource").filter(e => e.name.startsWith("http")).length,
        };
        """
    )
    assert look["wide"] <= width
    assert look["right"] <= width
    assert look["least"] > 80
    assert look["columns"] == (1 if width > 500 else 2)  # rows that the two figures of a question take
    assert look["loaded"]
    assert look["outside"] == 0
    bright = {"paper": sum(map(int, re.findall(r"\d+", look["paper"])[:3]))}
    bright["ink"] = sum(map(int, re.findall(r"\d+", look["ink"])[:3]))
    assert (bright["paper"] > bright["ink"] + 300) == (scheme == "light")
    assert abs(bright["paper"] - bright["ink"]) > 300


# Going on


def test_an_interrupted_study_goes_on_where_it_was(finished, tmp_path, monkeypatch):
    own = Subject.measure
    calls = []

    def interrupted(self, options):
        calls.append(options)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return own(self, options)

    monkeypatch.setattr(Subject, "measure", interrupted)
    config = {**QUICK, "train": 0, "output": str(tmp_path)}
    with pytest.raises(StoppedError, match=r"5 settings measured; --resume --output"):
        run.study(StudyConfig(**config), tmp_path)
    assert len(results_in(tmp_path)["measured"]) == 5
    with pytest.raises(FileError, match="has a study already; give --resume"):
        run.study(StudyConfig(**config), tmp_path)
    run.study(StudyConfig(**config, resume=True), tmp_path)
    after, whole = results_in(tmp_path)["measured"], results_in(finished)["measured"]
    assert len(calls) == len(after) + 1
    assert {key: value["cosine"] for key, value in after.items()} == {k: v["cosine"] for k, v in whole.items()}
    again = len(calls)
    run.study(StudyConfig(**config, resume=True), tmp_path)
    assert len(calls) == again


def test_a_study_can_be_trained_more_later(finished, tmp_path, monkeypatch):
    shutil.copytree(finished, tmp_path / "copy")
    trained = []
    monkeypatch.setattr(Subject, "measure", lambda self, options: pytest.fail("measured again"))
    monkeypatch.setattr(Subject, "train", lambda *args: trained.append(args[2]) or Trained(1.0, 0.5, 2))
    run.study(StudyConfig(**{**QUICK, "seeds": 3, "resume": True, "output": "x"}), tmp_path / "copy")
    assert set(trained) == {2}
    assert len(trained) == len(results_in(finished)["trained"])


def test_a_study_of_something_else_is_not_continued(finished, tmp_path):
    shutil.copy(finished / "results.json", tmp_path)
    config = {**QUICK, "draws": 2, "resume": True, "output": str(tmp_path)}
    with pytest.raises(ConfigError, match="is of a study with draws=1, and this one has 2"):
        run.study(StudyConfig(**config), tmp_path)
    assert not (tmp_path / "config.yaml").exists()
    (tmp_path / "results.json").write_text('{"about": 3')
    with pytest.raises(FileError, match="is not the result of a study"):
        run.study(StudyConfig(**config), tmp_path)


def test_settings_that_the_model_does_not_allow_are_left_out_and_said(tmp_path):
    kwargs = {"img_size": 4, "patch_size": 2, "in_chans": 1, "embed_dim": 16, "depth": 2, "num_heads": 2}
    run.study(StudyConfig(**{**QUICK, "model_kwargs": kwargs, "train": 0, "size": 4}), tmp_path)
    results = Results.read(tmp_path / "results.json", {})
    assert key_of({"keep_ratio": 0.125}) in results.left_out
    assert key_of({"keep_ratio": 0.5}) in results.measured
    assert "Left out: fold 0.125" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--data", "nowhere"], "give a model of timm"),
        (["vit_tiny_patch16_224"], "data: give images"),
        (["vit_tiny_patch16_224", "--data", "nowhere"], "no such folder"),
        (["vit_tony_patch16_224", "--data", "IMAGES"], "did you mean vit_tiny_patch16_224"),
        (["--checkpoint", "nowhere.pt"], "there is no such file"),
        (["--draws", "0"], "draws='0': give a whole number from 1"),
        (["--resume"], "give the output folder"),
    ],
)
def test_wrong_arguments_are_one_clear_line(args, words, capsys, tmp_path):
    args = [str(_images(tmp_path)) if arg == "IMAGES" else arg for arg in args]
    output = [] if args == ["--resume"] else ["--output", str(tmp_path / "new")]
    assert main(["study", *args, *output]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("model", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"])
def test_the_command_studies_weights_of_train(tmp_path, capsys, model):
    train = ["train", "--data", str(_images(tmp_path)), "--model", model, "--keep-ratio", "0.5", "--output"]
    kwargs = ",".join(f"{name}={value}" for name, value in SMALL_MODELS[model][0].items())
    more = ["--model-kwargs", kwargs, "--epochs", "1", "--batch-size", "4", "--workers", "0", "--size", "16"]
    assert main([*train, str(tmp_path / "run"), *more]) == 0
    assert f"branches of {model}\n" in capsys.readouterr().out
    weights = tmp_path / "run" / "best.safetensors"
    quick = ["--batch-size", "4", "--batches", "1", "--draws", "1", "--rounds", "1", "--workers", "0"]
    data = ["--data", str(tmp_path / "images"), "--checkpoint", str(weights)]
    assert main(["study", *data, *quick, "--output", str(tmp_path / "study")]) == 0
    assert re.search(r"recommended .* keepgrad\.apply\(model", capsys.readouterr().out)
    text = (tmp_path / "study" / "report.html").read_text()
    assert f"keepgrad study of {model}" in text
    assert not results_in(tmp_path / "study")["left_out"]


def test_pictures_of_masks_show_the_whole_image_where_attention_is_in_windows():
    kwargs = {**SMALL_MODELS["swin_tiny_patch4_window7_224"][0], "depths": [2], "num_heads": [2], "in_chans": 1}
    settings = {"model": "swin_tiny_patch4_window7_224", "model_kwargs": kwargs, "size": 16}
    _, masks = Subject(StudyConfig(**{**QUICK, **settings})).masks(0.5)
    assert {layout.shape for layout, _ in masks.values()} == {(8, 8)}  # of windows of 4 x 4


def _images(folder):
    from PIL import Image

    generator = torch.Generator().manual_seed(0)
    for name in ("cat", "dog"):
        (folder / "images" / name).mkdir(parents=True)
        for number in range(8):
            pixels = torch.randint(256, (16, 16, 3), dtype=torch.uint8, generator=generator).numpy()
            Image.fromarray(pixels).save(folder / "images" / name / f"{number}.png")
    return folder / "images"


def test_a_model_without_sites_is_refused_before_anything_is_done(tmp_path):
    data = {"data": str(_images(tmp_path)), "model": "resnet10t", "model_kwargs": None, "size": 32}
    with pytest.raises(keepgrad.NoSiteError, match="has no block that keepgrad knows"):
        run.study(StudyConfig(**{**QUICK, **data}), tmp_path / "study")
    assert not (tmp_path / "study").exists()


def test_a_pyramid_whose_last_stage_is_one_position(tmp_path):
    kwargs = {"depths": [1, 1, 1, 1], "dims": [8, 8, 16, 16], "in_chans": 1, "ls_init_value": 0.5}
    shape = {"model": "convnext_atto", "model_kwargs": kwargs, "size": 32, "prepare": 1, "train": 0}
    run.study(StudyConfig(**{**QUICK, **shape}), tmp_path)
    results = Results.read(tmp_path / "results.json", {})
    assert key_of({"keep_ratio": 0.5}) in results.left_out
    assert key_of({"keep_ratio": 0.5, "schedule": "careful"}) in results.measured
    text = (tmp_path / "report.html").read_text()
    assert "Which layers" not in text
    assert "How is attention" not in text


def test_a_training_that_diverges_counts_against_its_setting_alone(finished, tmp_path, monkeypatch):
    shutil.copytree(finished, tmp_path / "copy")

    def train(self, options, seed, advance):
        if options == {"keep_ratio": 0.125}:
            raise keepgrad.DivergedError("the loss is nan")
        return Trained(1.0, 0.5, 3)

    monkeypatch.setattr(Subject, "train", train)
    run.study(StudyConfig(**{**QUICK, "train": 3, "resume": True, "output": "x"}), tmp_path / "copy")
    assert results_in(tmp_path / "copy")["trained"][key_of({"keep_ratio": 0.125})]["1"]["top1"] == 0
    assert "fold 0.125 (-50.0 points)" in (tmp_path / "copy" / "report.html").read_text()


def test_measuring_leaves_the_model_as_it_was():
    subject = Subject(StudyConfig(**{**QUICK, "prepare": 0}))
    before = {name: value.clone() for name, value in subject.model.state_dict().items()}
    subject.measure({"keep_ratio": 0.5})
    subject.train({"keep_ratio": 0.5}, 0, lambda steps: None)
    subject.masks(0.5)
    assert all(torch.equal(value, before[name]) for name, value in subject.model.state_dict().items())
    assert not any("forward" in vars(module) for module in subject.model.modules())
    assert all(parameter.grad is None for parameter in subject.model.parameters())
