"""A study that goes on, from an interruption, with more, or beside a setting that fails; and its command."""

import re
import shutil

import pytest
import torch
from conftest import SMALL_MODELS
from studying import QUICK, results_in

import keepgrad
from keepgrad.cli import main
from keepgrad.errors import ConfigError, FileError, StoppedError
from keepgrad.study import run
from keepgrad.study.config import StudyConfig
from keepgrad.study.questions import key_of
from keepgrad.study.results import Results, Trained
from keepgrad.study.subject import Subject

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
