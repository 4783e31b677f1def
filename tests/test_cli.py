"""The command line through its real entry point."""

import json
import platform
import subprocess
import sys
import tarfile

import pytest
import torch
from PIL import Image
from processes import run

from keepgrad import __version__
from keepgrad.cli import COMMANDS, main


def keepgrad(*args):
    return run(("-m", "keepgrad", *args))


def test_train_without_data_trains_digits_with_and_without(tmp_path):
    done = keepgrad("train", "--epochs", "1", "--keep-ratio", "0.5", "--output", str(tmp_path / "runs"))
    assert done.returncode == 0, done.stderr
    for words in ("full backprop", "keepgrad 0.5", "1.00x", "accuracy", "cosine"):
        assert words in done.stdout
    assert (tmp_path / "runs" / "full-backprop" / "best.safetensors").exists()
    assert (tmp_path / "runs" / "keepgrad" / "metrics.csv").exists()


def test_errors_are_one_line_with_exit_code_two():
    done = keepgrad("train", "--epochs", "0")
    assert done.returncode == 2
    assert done.stderr == "keepgrad train: epochs='0': give a whole number from 1 to 1000000000\n"


@pytest.mark.parametrize("args", [(), ("fly",)])
def test_an_unknown_command_shows_the_known_ones(args):
    done = keepgrad(*args)
    assert done.returncode == 2
    assert "usage: keepgrad" in done.stderr


ALONE = '''
import sys

class Without:
    """A finder that does not find these libraries."""

    blocked = {"numpy", "timm", "torchvision", "transformers", "accelerate", "peft", "torchao", "lightning", "rich",
        "matplotlib", "yaml", "PIL", "sklearn", "safetensors", "tensorboard", "pycocotools"}

    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, *more):
        return None if name.partition(".")[0] in self.blocked else self.finder.find_spec(name, *more)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path = [Without(finder) for finder in sys.meta_path]
'''
"""Torch alone: nothing else can be imported."""


def with_torch_alone(code):
    return subprocess.run([sys.executable, "-c", ALONE + code], capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_needs_torch_alone(command):
    args = ["--help"] if command is None else [command, "--help"]
    done = with_torch_alone(f"from keepgrad.cli import main; main({args})")
    assert done.returncode == 0, done.stderr
    for word in COMMANDS if command is None else ("--help",):
        assert word in done.stdout


def test_the_core_works_with_torch_alone():
    code = """
import torch
import keepgrad
from torch import nn

layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
full = keepgrad.estimate(model, (64, 16, 16)).activations
plan = keepgrad.apply(model, keep_ratio=0.5)
print(plan)
report = keepgrad.estimate(model, (64, 16, 16))
print(report)
assert report.activations < full
model(torch.randn(2, 16, 16)).sum().backward()
keepgrad.remove(model)
keepgrad.fit(model, (64, 16, 16), "1GiB")
assert "numpy" not in sys.modules
"""
    done = with_torch_alone(code)
    assert done.returncode == 0, done.stderr
    assert "activations" in done.stdout


def test_a_command_without_its_packages_says_what_to_install():
    done = with_torch_alone("from keepgrad.cli import main; sys.exit(main(['train']))")
    assert done.returncode == 2
    assert "pip install 'keepgrad[" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_the_version_names_the_libraries_that_are_installed():
    done = keepgrad("--version")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        f"keepgrad {__version__}, Python {platform.python_version()}, torch {torch.__version__[:4]}"
    )
    assert ", timm " in done.stdout
    done = with_torch_alone("from keepgrad.cli import main; main(['--version'])")
    assert ", torch " in done.stdout  # looked up, not imported


def test_estimate_shows_the_methods_side_by_side():
    done = keepgrad("estimate", "test_vit", "--batch", "8", "--amp", "bf16")
    assert done.returncode == 0, done.stderr
    for name in ("full backprop", "checkpointing", "Algorithm 1, the paper's layers", "keepgrad accurate (default)"):
        assert name in done.stdout
    assert "1.00x" in done.stdout


def test_estimate_shows_what_one_device_of_many_holds(capsys):
    assert main(["estimate", "test_vit", "--batch", "2", "--processes", "2", "--fsdp"]) == 0
    assert "one of 2 devices with FSDP2" in capsys.readouterr().out
    assert main(["estimate", "test_vit", "--fsdp"]) == 2
    assert "processes=1: give a number from 2" in capsys.readouterr().err


def test_estimate_for_machines():
    done = keepgrad("estimate", "test_convnext", "--batch", "2", "--size", "64", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["keepgrad 0.25"]["activations"] < found["keepgrad 0.5"]["activations"]
    assert found["keepgrad 0.5"]["activations"] < found["full backprop"]["activations"]


def test_the_paper_table_is_as_close_to_the_paper_as_an_estimate_can_be():
    done = keepgrad("estimate", "--paper-table", "--json")
    assert done.returncode == 0, done.stderr
    for row in json.loads(done.stdout):
        plain, sbp = row["paper_mb"]
        full, kept = (report["total"] for report in row["algorithm1"].values())
        assert kept / full == pytest.approx(sbp / plain, abs=0.08), row["model"]
        ours = {name: report["total"] for name, report in row["keepgrad"].items()}
        assert ours["keepgrad paper"] / ours["full backprop"] < kept / full
        assert ours["keepgrad 0.25, save input"] < ours["keepgrad default"] < ours["full backprop"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Twelve small images of three classes."""
    root = tmp_path_factory.mktemp("images")
    torch.manual_seed(0)
    for kind in ("apple", "bird", "cat"):
        (root / kind).mkdir()
        for number in range(4):
            pixels = torch.randint(256, (64, 64, 3), dtype=torch.uint8).numpy()
            Image.fromarray(pixels).save(root / kind / f"{number}.png")
    return root


def test_fidelity_prints_layers_and_writes_a_picture(folder, tmp_path):
    picture = tmp_path / "agreement.png"
    args = ("--data", str(folder), "--size", "64", "--batch-size", "4", "--batches", "2", "--draws", "2")
    done = keepgrad("fidelity", "test_convnext", *args, "--keep-ratio", "0.5", "--output", str(picture))
    assert done.returncode == 0, done.stderr
    assert "stages.0.blocks.0" in done.stdout
    assert "whole" in done.stdout
    assert "head.fc" in done.stdout
    with Image.open(picture) as image:
        assert image.width > 500


def test_fidelity_reads_a_tar(folder, tmp_path):
    with tarfile.open(tmp_path / "images.tar", "w") as tar:
        tar.add(folder, arcname="images")
    args = ("--data", str(tmp_path / "images.tar"), "--size", "64", "--batch-size", "2", "--draws", "1", "--json")
    done = keepgrad("fidelity", "test_convnext", *args, "--output", str(tmp_path / "a.png"))
    assert done.returncode == 0, done.stderr
    sizes = {layer["name"]: layer["size"] for layer in json.loads(done.stdout)["layers"]}
    assert sizes["head.fc"] == (64 + 1) * 3


def test_fidelity_reads_weights_without_running_code(folder, tmp_path):
    import timm

    weights = tmp_path / "weights.pth"
    model = timm.create_model("test_convnext", num_classes=3)
    torch.save(model.state_dict(), weights)
    args = ("fidelity", "test_convnext", "--data", str(folder), "--size", "64", "--batch-size", "2", "--draws", "1")
    done = keepgrad(*args, "--checkpoint", str(weights), "--json", "--output", str(tmp_path / "a.png"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["draws"] == 1
    torch.save(model, weights)
    done = keepgrad(*args, "--checkpoint", str(weights))
    assert done.returncode == 2
    assert done.stderr.startswith(f"keepgrad fidelity: {weights} does not load into the model: ")
    assert done.stderr.count("\n") == 1
    torch.save(timm.create_model("test_convnext", num_classes=7).state_dict(), weights)
    done = keepgrad(*args, "--checkpoint", str(weights))
    assert done.returncode == 2
    assert "size mismatch for head.fc.weight" in done.stderr
    assert done.stderr.count("\n") == 1
    done = keepgrad(*args, "--checkpoint", str(tmp_path / "none.pth"))
    assert done.stderr.endswith("none.pth: there is no such file\n")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("estimate",), "give a model, e.g."),
        (("estimate", "vit_base", "--paper-table"), "give a model, e.g."),
        (("estimate", "--paper-table", "--batch", "8"), "leave out --batch"),
        (("estimate", "vit_base_patch16_24"), "did you mean vit_base_patch16_224"),
        (("estimate", "vit_tiny_patch16_224", "--batch", "0"), "give a whole number from 1"),
        (("fidelity", "vit_tiny_patch16_224", "--data", "no/such/folder"), "there is no such folder"),
    ],
)
def test_wrong_arguments_are_named_in_one_line(args, words):
    done = keepgrad(*args)
    assert done.returncode == 2
    assert words in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_fidelity_names_an_image_it_cannot_read(folder, tmp_path):
    (tmp_path / "apple").mkdir()
    (tmp_path / "apple" / "broken.png").write_bytes(b"no image")
    done = keepgrad("fidelity", "test_convnext", "--data", str(tmp_path), "--size", "64", "--batch-size", "1")
    assert done.returncode == 2
    assert "has 1 classes; put the images into two or more folders" in done.stderr
    (tmp_path / "bird").mkdir()
    (tmp_path / "bird" / "broken.png").write_bytes(b"no image")
    done = keepgrad("fidelity", "test_convnext", "--data", str(tmp_path), "--size", "64", "--batch-size", "1")
    assert done.returncode == 2
    assert "broken.png cannot be read as an image" in done.stderr
    done = keepgrad("fidelity", "test_convnext", "--data", str(tmp_path), "--size", "64", "--batch-size", "4")
    assert "has 2 images, but 1 batches of 4 need 4" in done.stderr


def test_importing_keepgrad_imports_no_model_library():
    code = "import sys, keepgrad; print([m for m in ('timm', 'torchvision', 'rich', 'matplotlib') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n"
