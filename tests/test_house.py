"""The house is as it is drawn: every op has tests of its own stem, and every module stands in docs/how-it-works.md."""

from pathlib import Path

import pytest

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
