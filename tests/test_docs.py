"""The pages: the API page has every public name, and links from the files outside of docs/ lead somewhere."""

import re
from pathlib import Path

import pytest

import keepgrad

ROOT = Path(__file__).parents[1]


def test_the_api_page_has_every_public_name():
    named = re.findall(r"^::: keepgrad\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(keepgrad.__all__)


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_of_a_page_outside_of_docs_lead_to_files(name):
    """`mkdocs build --strict` checks those inside."""
    links = re.findall(r"\]\(([^)\s]+)\)", (ROOT / name).read_text())
    local = [link.split("#")[0] for link in links if "://" not in link]
    assert local
    assert [link for link in local if not (ROOT / link).exists()] == []
