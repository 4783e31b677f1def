"""Every example runs as it is."""

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
NEEDS = {
    "transformers_trainer": ("transformers", "accelerate"),
    "lightning_fit": ("lightning",),
    "lora": ("peft",),
    "video": ("transformers", "sklearn"),
}
ARGUMENTS = {"video": ["--steps", "2", "--seeds", "1", "--held-out", "8"], "lora": ["--steps", "21"]}
"""For those that would take minutes."""


def of_lora(said):
    alone, saved = map(float, re.findall(r"([\d.]+) MB", said))
    assert saved < 0.5 * alone
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", said)]
    assert losses[-1] < 0.8 * losses[0]


def of_video(said):
    rows = {line[:36].strip(): line.split() for line in said.splitlines()}
    assert rows["full backprop"][-1] == "1.00x"
    assert float(rows["keepgrad, 0.25"][-1].rstrip("x")) < float(rows["keepgrad, default"][-1].rstrip("x")) < 1


CHECKS = {"lora": of_lora, "video": of_video}
"""What an example says, where it has figures to check."""


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path, capsys, tmp_path, monkeypatch):
    for package in NEEDS.get(path.stem, ()):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(path), *ARGUMENTS.get(path.stem, ())])
    runpy.run_path(str(path), run_name="__main__")
    said = capsys.readouterr().out
    assert "loss" in said or "accuracy" in said
    CHECKS.get(path.stem, len)(said)
    assert not list(tmp_path.iterdir())  # an example leaves nothing behind


def test_the_readme_names_every_example():
    readme = (EXAMPLES[0].parents[1] / "README.md").read_text()
    assert all(f"examples/{path.name}" in readme for path in EXAMPLES)
