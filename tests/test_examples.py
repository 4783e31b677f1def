"""Every example runs as it is, the notebook too."""

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
NOTEBOOK = EXAMPLES[0].parent / "from_too_large_to_training.ipynb"
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
    assert all(f"examples/{path.name}" in readme for path in (*EXAMPLES, NOTEBOOK))


def printed(notebook):
    """What each cell of code prints."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return ["".join(out.get("text", "") for out in cell.outputs if out.get("name") != "stderr") for cell in code]


@pytest.mark.filterwarnings("default")
def test_the_notebook_runs_and_fits_its_budget(tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    committed = printed(notebook)
    said = printed(nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": tmp_path}}).execute())
    full, now, budget = map(int, re.findall(r"(\d+) ?MiB", next(text for text in said if "full backprop: " in text)))
    assert now <= budget < full
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", "".join(said))]
    assert losses[-1] < losses[0] - 0.2
    assert [bool(text) for text in committed] == [bool(text) for text in said]  # committed with its outputs
    assert not re.search(r"/(home|root|tmp|usr|work)/", NOTEBOOK.read_text())
    assert not list(tmp_path.iterdir())
