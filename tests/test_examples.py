"""Every example runs as it is."""

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
NEEDS = {"transformers_trainer": ("transformers", "accelerate"), "lightning_fit": ("lightning",), "lora": ("peft",)}
ARGUMENTS = {"video": ["--steps", "2", "--seeds", "1", "--held-out", "8"]}
"""For those that would take minutes."""


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
    assert not list(tmp_path.iterdir())  # an example leaves nothing behind


def test_the_readme_names_every_example():
    readme = (EXAMPLES[0].parents[1] / "README.md").read_text()
    assert all(f"examples/{path.name}" in readme for path in EXAMPLES)
