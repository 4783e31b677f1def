"""The table of `keepgrad models`: what docs/models.md says is what is found and measured."""

import re
from pathlib import Path

import pytest

from keepgrad.catalogue import EXAMPLES, measured, rows
from keepgrad.cli import main
from keepgrad.cli.models import cells

TABLE = re.search(
    r"<!-- table.*?-->\n(.*?)<!-- end of table -->",
    (Path(__file__).parent.parent / "docs" / "models.md").read_text(),
    re.DOTALL,
).group(1)
DOCUMENTED = {
    line.strip("| \n").split(" | ")[1]: line.strip("| \n").split(" | ")
    for line in TABLE.splitlines()
    if line.startswith("|")
}
LIMITS = {1: 0.40, 2: 0.60}


def test_the_table_of_the_docs_is_what_is_found():
    for row in rows():
        shown = DOCUMENTED[row.example.model]
        assert list(cells(row))[:5] == shown[:5]  # the number of architectures varies with the version
        assert row.sites > 0
    assert set(DOCUMENTED) - {"example", "---"} == {example.model for example in EXAMPLES}


def test_the_documented_bytes_are_within_the_limits():
    for example in EXAMPLES:
        shown = DOCUMENTED[example.model]
        limit = 0.45 if "V2" in example.family and "ConvNeXt" in example.family else LIMITS[int(shown[3])]
        if example.model not in WHOLE_MODELS_WITH_MORE:
            assert float(shown[6].rstrip("x")) <= limit, shown


WHOLE_MODELS_WITH_MORE = {
    "torchvision:maxvit_t",  # its convolutions with batch norm are most of it, and not keepgrad's
    "cait_xxs24_224",  # talking heads keep whole attention matrices
    "mixer_s32_224",  # the token MLPs are most of it
    "torchvision:mvit_v2_s",  # attention that pools positions is most of it
    "torch:TransformerEncoderLayer",  # norms behind the residual are on the trunk
    "xcit_tiny_12_p16_224",  # the MLPs alone are reduced
}


@pytest.mark.parametrize("name", ["vit_small_patch16_224", "convnextv2_tiny", "swin_tiny_patch4_window7_224"])
def test_documented_bytes_are_measured_again(name):
    (example,) = (one for one in EXAMPLES if one.model == name)
    assert measured(example) == pytest.approx(float(DOCUMENTED[name][6].rstrip("x")), abs=0.006)


def test_the_command_lists_families_and_classes(capsys):
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    assert "SwinTransformerBlock, WindowAttention" in out
    assert "timm: Block, ConvNeXtBlock" in out
