"""The house is as it is drawn: every op has tests of its own stem, every module stands in docs/how-it-works.md.

What is said in two files is the same in both.
"""

import re
from pathlib import Path

import pytest
import yaml

import keepgrad

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "keepgrad"


@pytest.mark.parametrize("stem", sorted(path.stem for path in (PACKAGE / "ops").glob("[!_]*.py")))
def test_an_op_has_tests_of_its_stem(stem):
    assert (ROOT / "tests" / f"test_{stem}.py").exists()


def test_every_module_is_in_the_drawing():
    drawing = (ROOT / "docs" / "how-it-works.md").read_text().split("## The house")[1].split("```")[1]
    modules = [*PACKAGE.glob("*.py"), *(PACKAGE / "ops").glob("[!_]*.py"), *(PACKAGE / "memory").glob("[!_]*.py")]
    names = [path.name for path in modules if path.name != "__main__.py"]
    names += [f"{path.name}/" for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"]
    assert [name for name in names if f" {name}" not in drawing] == []


def test_the_oldest_versions_that_are_tested_are_those_that_are_declared():
    declared = dict(re.findall(r'"([a-z]+(?:-[a-z]+)*)>=([\d.]+)"', (ROOT / "pyproject.toml").read_text()))
    pins = dict(re.findall(r"^([a-z-]+)==([\d.]+)$", (ROOT / ".ci" / "oldest.txt").read_text(), re.M))
    assert len(pins) > 10
    assert {name: declared.get(name) for name in pins} == pins


def test_the_version_to_cite_is_this_one():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == keepgrad.__version__
