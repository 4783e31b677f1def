"""Attention in windows: padding, masks that differ from window to window, windows in a model of several resolutions."""

from __future__ import annotations

import pytest
import torch
from conftest import assert_same, grads, images
from families import FAMILIES

import keepgrad
from keepgrad.ops import chain

SWINS = [name for name in FAMILIES if name.startswith(("timm Swin", "torchvision Swin")) and not name.endswith("3D")]


@pytest.mark.parametrize("reduce", ["drop", "fold", "pool"])
@pytest.mark.parametrize("name", [name for name in SWINS if name.endswith("V2") and name.startswith("torchvision")])
def test_zeros_of_the_padding_have_no_gradient_of_their_own(name, reduce):
    # 9 x 9 positions in windows of 4 x 4. The length of a row of zeros has no derivative, and k is zero in the padding.
    model, x = FAMILIES[name].model(), images(36)
    _, full = grads(model, x)
    keepgrad.apply(model, keep_ratio=0.5, reduce=reduce, seed=0)
    _, found = grads(model, x)
    sizes = [torch.cat([g.flatten() for g in given.values()]).norm() for given in (found, full)]
    assert sizes[0] < 2 * sizes[1]


@pytest.mark.parametrize("name", SWINS)
def test_a_batch_in_pieces_has_the_masks_of_the_whole(name, monkeypatch):
    family = FAMILIES[name]
    model = family.model(torch.float64)
    found = []
    for size in (chain.PIECE_BYTES, 3000):
        monkeypatch.setattr(chain, "PIECE_BYTES", size)
        keepgrad.apply(model, keep_ratio=0.5, seed=0)
        found.append(grads(model, images(32, batch=3, dtype=torch.float64)))
        keepgrad.remove(model)
    (whole, whole_grads), (pieces, pieces_grads) = found
    torch.testing.assert_close(pieces, whole)
    assert_same(pieces_grads, whole_grads)


def test_masks_of_windows_do_not_nest_with_those_of_coarser_stages():
    timm = pytest.importorskip("timm")
    sizes = {"embed_dim": 8, "depths": (1, 1, 1, 1), "num_heads": (1, 1, 1, 1), "window_size": 8, "img_size": 256}
    model = timm.create_model("swin_tiny_patch4_window7_224", **sizes).train()
    plan = keepgrad.apply(model, keep_ratio=0.5, reduce="drop")
    assert {site.cell for site in plan.sites if site.kind == "attention"} == {1}
    assert [site.cell for site in plan.sites if site.kind == "mlp"] == [8, 4, 2, 1]
    model(images(256, batch=1)).sum().backward()
