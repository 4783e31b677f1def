"""Settings, weights and annotations that cannot work: one line of keepgrad's own that says what to give.

Nothing is started as a process of its own; what a user types goes through the command's `main`.
"""

import json
import os

import pytest
import timm
import torch
from conftest import line_of
from safetensors.torch import save_file

import keepgrad
from keepgrad.cli import main
from keepgrad.numbers import Numbers
from keepgrad.train.config import TrainConfig
from keepgrad.train.loop.stop import memory_errors_named

TRAIN = (
    *("train", "--model", "test_vit", "--size", "32", "--epochs", "1", "--workers", "0", "--batch-size", "6", "--cpu"),
    *("--warmup-epochs", "0"),
)


# Numbers and words


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("seed", "-1", "give a whole number from 0 to 18446744073709551615"),
        ("seed", str(2**64), "give a whole number from 0"),
        ("crop-pct", "-1", "give a number from 0.1 to 1"),
        ("crop-pct", "inf", "give a number from 0.1 to 1"),
        ("crop-pct", "0", "give a number from 0.1 to 1"),
        ("lr", "1e308", "give a number from 0"),
        ("lr", "nan", "lr='nan': give a number from 0"),
        ("lr", "fast", "lr='fast': give a number from 0"),
        ("weight-decay", "inf", "give a number from 0"),
        ("warmup-epochs", "inf", "give a number from 0"),
        ("clip-grad", "inf", "give a number above 0"),
        ("cutmix", "inf", "give a number from 0"),
        ("cutmix", "1e-320", "give a number from 0"),
        ("mixup", "inf", "give a number from 0"),
        ("color-jitter", "inf", "give a number from 0 to 100"),
        ("smoothing", "1", "give a number from 0 to below 1"),
        ("ema", "0", "give a number between 0 and 1"),
        ("size", "100000", "give a whole number from 1 to 8192"),
        ("size", str(10**20), "give a whole number from 1 to 8192"),
        ("size", "7", "VisionTransformer takes no images of 3 x 7 x 7: Input height (7) should be divisible"),
        ("epochs", "1e3", "epochs='1e3': give a whole number from 1"),
        ("epochs", str(10**400), "give a whole number from 1"),
        ("batch-size", str(10**12), "give a whole number from 1"),
        ("auto-augment", "foo", "give a rule of timm, e.g. rand-m9-mstd0.5-inc1"),
        ("auto-augment", "rand-m9-foo", "give a rule of timm"),
        ("auto-augment", "rand-n-1", "give a rule of timm"),
        ("auto-augment", "augmix-d99999", "give a rule of timm"),
        ("auto-augment", "augmix-a0", "images cannot be prepared with "),
        ("auto-augment", "rand-tfoo", "give a rule of timm"),
        ("auto-augment", "", "give a rule of timm"),
        ("dataset", "hfds/", "dataset=hfds/ is not known"),
        ("output", "", "give a text, or leave it out"),
        ("keep-ratio", f"attention={10**400}", "is outside (0, 1]"),
        ("keep-ratio", "half", "is no number, and not like attention=1,mlp=0.5"),
        ("model-kwargs", "img_size=-1", "img_size=-1: give a whole number from 1 to 8192"),
        ("model-kwargs", "num_classes=x", "num_classes='x': give a whole number from 1"),
        ("model-kwargs", "num_classes=null", "num_classes=None: give a whole number from 1"),
        ("model-kwargs", "num_classes=[3]", "give one value, not a list"),
        ("model-kwargs", "norm_layer=foo", "cannot be made with img_size=32, norm_layer=foo, num_classes=3: KeyError"),
        ("model-kwargs", "act_layer=5", "act_layer=5: give a text"),
        ("model-kwargs", "class_token=x", "class_token='x': give true or false"),
        ("model-kwargs", "features_only=true", "'features_only' is no argument of a model that can be chosen"),
        ("model-kwargs", "checkpoint_path=/etc/passwd", "'checkpoint_path' is no argument of a model"),
        ("model-kwargs", "patch_size=0", "give a whole number from 1"),
        ("model-kwargs", "num_heads=7", "dim should be divisible by num_heads"),
        ("model-kwargs", "mlp_ratio=.inf", "give a number above 0"),
        ("model-kwargs", "drop_path_rate=2", "give a number from 0 to below 1"),
        ("model-kwargs", "global_pool=''", "training needs one value per class"),
        ("model-kwargs", "depth=1,depth=2", "depth is there twice"),
        ("model-kwargs", "depth", "'depth' is not of the form name=value"),
    ],
)
def test_a_flag_of_train(folder, tmp_path, capsys, name, value, words):
    args = (*TRAIN, "--data", str(folder), "--output", str(tmp_path / "run"), f"--{name}={value}")
    assert words in line_of(capsys, *args)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lr: .inf", "lr=inf: give a number from 0"),
        ("lr: .nan", "lr=nan: give a number from 0"),
        ("lr: [1]", "lr=[1]: give a number"),
        ("lr: 2020-01-01", "give a number"),
        ("lr: !!timestamp x", "cannot be read as YAML"),
        ("lr: true", "give no true or false"),
        ("seed: .inf", "seed=inf: give a whole number"),
        ("size: 22.5", "size=22.5: give a whole number"),
        ("epochs: 1\nepochs: 2", "epochs is there twice"),
        ("min-lr: 1\nmin_lr: 2", "min_lr is there twice"),
        ("model_kwargs: {depth: 1, depth: 2}", "depth is there twice"),
        ("model_kwargs: 5", "give names and values of the model's arguments"),
        ("model_kwargs: {5: 5}", "5 is no argument of a model that can be chosen"),
        ("recipe: [a]", "recipe ['a'] is not known"),
        ("mask: [grid]", "mask=['grid']: give a text"),
        ("auto_augment: 5", "give a rule of timm"),
        ("opt: 5", "give a text"),
        ("full: 1", "give true or false"),
        ("? [a]\n: 1", "cannot be read as YAML"),
        ("- a", "give settings as 'name: value' lines"),
        ("a: &a [*a]", "there is no setting 'a'"),
        ("a: " + "[" * 1500, "cannot be read as YAML"),
    ],
)
def test_a_line_of_yaml(folder, tmp_path, capsys, text, words):
    (tmp_path / "some.yaml").write_text(text)
    args = ("train", "--data", str(folder), "--output", str(tmp_path / "run"), "--config", str(tmp_path / "some.yaml"))
    assert words in line_of(capsys, *args)


def test_python_goes_through_the_same_checks():
    assert TrainConfig(lr="1e-3", warmup_epochs=2).lr == 1e-3
    for settings in ({"lr": float("nan")}, {"seed": -1}, {"model_kwargs": {"depth": "x"}}, {"size": 0}):
        with pytest.raises(keepgrad.ConfigError, match=": give a"):
            TrainConfig(**settings)


def test_numbers_say_what_they_are():
    assert str(Numbers(float, above=0)) == "a number above 0"
    assert Numbers(int, least=1)(32.0) == 32
    assert Numbers(float)("1e-3") == 1e-3
    for value in (float("inf"), float("nan"), 1e39, 1e-320, True, None, [1], "x", 10**400):
        with pytest.raises(ValueError, match=r"^give a number$"):
            Numbers(float)(value)


@pytest.mark.parametrize(
    "args",
    [
        ("fidelity", "test_vit", "--data", "x", "--seed", str(2**64)),
        ("fidelity", "test_vit", "--data", "x", "--seed", "-1"),
        ("eval", "x", "--data", "x", "--workers", "-1"),
        ("estimate", "test_vit", "--batch", str(2**70)),
        ("estimate", "test_vit", "--size", str(2**40)),
    ],
)
def test_an_argument_of_the_other_commands(capsys, args):
    with pytest.raises(SystemExit) as error:
        main(args)
    assert error.value.code == 2
    assert ": give a whole number from " in capsys.readouterr().err.splitlines()[-1]


def test_a_size_that_the_model_does_not_take(folder, capsys):
    args = ("fidelity", "test_vit", "--data", str(folder), "--batch-size", "1", "--size", "7")
    assert "takes no images of 3 x 7 x 7" in line_of(capsys, *args)


def test_estimates_of_more_values_than_there_can_be():
    with pytest.raises(keepgrad.InputError, match="more values than a tensor can have"):
        keepgrad.estimate(timm.create_model("test_vit"), (2**62, 3, 160, 160))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_want_of_memory_says_what_to_do(error):
    with pytest.raises(keepgrad.KeepgradError, match=r"memory runs out: .*; lower --batch-size"), memory_errors_named():
        raise error
    with pytest.raises(RuntimeError, match="another one"), memory_errors_named():
        raise RuntimeError("another one")
    with pytest.raises(keepgrad.KeepgradError, match=r"memory runs out: .*allocate"), memory_errors_named():
        torch.empty(2**60, dtype=torch.uint8)


# Files


def weights():
    return timm.create_model("test_vit", img_size=32, num_classes=3).state_dict()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([1, 2], "cannot be read as weights"),
        (5, "cannot be read as weights"),
        (None, "cannot be read as weights"),
        ({1: torch.ones(1)}, "cannot be read as weights"),
        ({"head.weight": 2}, "'head.weight' is 2, no tensor of real numbers"),
        ({"head.weight": [1]}, "no tensor of real numbers"),
        ({"head.weight": torch.ones(3, 64, dtype=torch.complex64)}, "no tensor of real numbers"),
        ({"head.weight": torch.tensor(1.0)}, "cannot be made with"),
        ({"head.weight": torch.full((3, 64), torch.nan)}, "head.weight has values that are no finite numbers"),
        ({"state_dict": 5}, "cannot be read as weights"),
        ({}, "cannot be made with"),
        ({"foo": torch.ones(1)}, "cannot be made with"),
        (b"", "cannot be read as weights"),
        (b"nothing", "cannot be read as weights"),
    ],
)
def test_pretrained_weights_that_are_none(folder, tmp_path, capsys, content, words):
    path = tmp_path / "some.pth"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    args = (*TRAIN, "--data", str(folder), "--output", str(tmp_path / "run"), "--pretrained", str(path))
    said = line_of(capsys, *args)
    assert words in said
    assert "some.pth" in said


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"size": "x"}, "give a whole number from 1 to 8192"),
        ({"size": -1}, "give a whole number from 1 to 8192"),
        ({"classes": 5}, "it does not name its classes"),
        ({"data_config": None}, "it does not say what its images are like"),
        ({"data_config": {"input_size": 5}}, "it does not say what its images are like"),
        ({"data_config": {"input_size": [3, 10**9, 32]}}, "give a whole number from 1 to 8192"),
        ({"data_config": {"input_size": [3, 32, 32], "wings": 1}}, "images cannot be prepared with"),
        ({"data_config": {"input_size": [3, 33, 33]}}, "takes no images of 3 x 33 x 33"),
        ({"model_kwargs": {"num_classes": 4}}, "does not have the weights of the model it names"),
    ],
)
def test_weights_whose_description_is_wrong(folder, tmp_path, capsys, change, words):
    about = {"model": "test_vit", "size": 32, "model_kwargs": {"num_classes": 3}, "classes": ["apple", "bird", "cat"]}
    about |= {"data_config": {"input_size": [3, 32, 32]}, **change}
    save_file(weights(), tmp_path / "a.safetensors", metadata={"keepgrad": json.dumps(about)})
    args = ("eval", str(tmp_path / "a.safetensors"), "--data", str(folder), "--workers", "0", "--cpu")
    assert words in line_of(capsys, *args)


def test_a_fifo_is_no_file(folder, tmp_path, capsys):
    """Whoever opens one waits for a writer."""
    for name in ("some.yaml", "some.pth", "some.tar"):
        os.mkfifo(tmp_path / name)
    output = ("--output", str(tmp_path / "run"))
    data = ("--data", str(folder))
    assert "not a plain file" in line_of(capsys, *TRAIN, *data, *output, "--config", str(tmp_path / "some.yaml"))
    assert "no such file" in line_of(capsys, *TRAIN, *data, *output, "--pretrained", str(tmp_path / "some.pth"))
    assert "neither a folder nor a .tar" in line_of(capsys, *TRAIN, *output, "--data", str(tmp_path / "some.tar"))


# Detection
