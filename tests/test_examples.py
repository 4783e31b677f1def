"""Every example runs as it is."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
NEEDS = {"transformers_trainer": ("transformers", "accelerate"), "lightning_fit": ("lightning",), "lora": ("peft",)}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path, capsys, tmp_path, monkeypatch):
    for package in NEEDS.get(path.stem, ()):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(path), run_name="__main__")
    assert "loss" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())  # an example leaves nothing behind


def test_the_readme_names_every_example():
    readme = (EXAMPLES[0].parents[1] / "README.md").read_text()
    assert all(f"examples/{path.name}" in readme for path in EXAMPLES)
