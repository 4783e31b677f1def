"""The pages: the API page has every public name, drawings are right, and links outside of docs/ lead somewhere."""

import re
import runpy
from pathlib import Path

import pytest
import timm

import keepgrad

ROOT = Path(__file__).parents[1]


def test_the_api_page_has_every_public_name():
    paths = re.findall(r"^::: ([\w.]+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    named = [path.rpartition(".")[2] for path in paths if ".integrations." not in path]
    assert sorted(named) == sorted(keepgrad.__all__)
    # A function and its module may share a name, and the page would show the module.
    parts = {path: path.removeprefix("keepgrad.").replace(".", "/") for path in paths}
    assert [path for path, part in parts.items() if (ROOT / "src" / "keepgrad" / f"{part}.py").exists()] == []


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_of_a_page_outside_of_docs_lead_to_files(name):
    """`mkdocs build --strict` checks those inside."""
    links = re.findall(r"\]\(([^)\s]+)\)", (ROOT / name).read_text())
    local = [link.split("#")[0] for link in links if "://" not in link]
    assert local
    assert [link for link in local if not (ROOT / link).exists()] == []


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(ROOT / "docs" / "drawings" / "draw.py"))


def test_the_drawings_are_those_of_the_script(script):
    drawn = {name: draw() for name, draw in script["DRAWINGS"].items()}
    assert drawn == {path.name: path.read_text() for path in (ROOT / "docs" / "drawings").glob("*.svg")}


def test_what_is_drawn_as_saved_is_what_a_block_saves(script):
    width = 192
    model = timm.create_model("vit_tiny_patch16_224", depth=2)
    for options, *parts in script["SAVED"].values():
        sites = keepgrad.plan(model, **(options or {"keep_ratio": 1.0})).sites[-2:]
        for site, part in zip(sites, parts, strict=True):
            values = site.saved if options else site.plain
            assert sum(size for _, size in part) == pytest.approx(values / width, abs=0.06)
