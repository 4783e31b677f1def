"""keepgrad on a detector."""

import pytest
import torch
from conftest import assert_same
from detection import losses, target, tiny

import keepgrad
from keepgrad.train.config import DETECTORS

# keepgrad on a detector


SIZES = [((60, 90), (83, 61)), ((64, 64), (64, 64)), ((37, 120), (50, 50))]


@pytest.mark.parametrize("kind", DETECTORS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(
    "options", [{"preset": "paper"}, {"keep_ratio": 0.5}, {"keep_ratio": 0.25, "reduce": "pool"}], ids=str
)
def test_a_patched_detector_has_the_losses_of_the_plain_one(kind, sizes, options):
    torch.manual_seed(5)
    images = [torch.rand(3, *size) for size in sizes]
    targets = [target([4, 4, 30, 30], height=h, width=w) for h, w in sizes]
    model = tiny(kind, sizes=(96,), max_size=160)
    wanted, exact = losses(model, images, targets)
    keepgrad.apply(model, **options)
    found, grads = losses(model, images, targets)
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-3, atol=1e-4, msg=name)
    name = "backbone.body.stages_0.blocks.0.mlp.fc1.weight"
    assert not torch.allclose(grads[name], exact[name], rtol=1e-3)
    assert torch.cosine_similarity(grads[name].flatten(), exact[name].flatten(), dim=0) > 0.3
    keepgrad.remove(model)
    assert_same(losses(model, images, targets)[1], exact)


@pytest.mark.parametrize(
    ("backbone", "sites"), [("test_convnext", 9), ("test_vit", 12), ("swin_tiny_patch4_window7_224", 10)]
)
def test_ratio_one_has_the_gradients_of_autograd(backbone, sites):
    images, targets = [torch.rand(3, 64, 64)], [target([4, 4, 30, 30], height=64, width=64)]
    model = tiny("mask_rcnn", backbone).double()
    images = [image.double() for image in images]
    targets[0]["boxes"] = targets[0]["boxes"].double()
    wanted = losses(model, images, targets)[1]
    assert len(keepgrad.apply(model, preset="exact").sites) == sites
    assert_same(losses(model, images, targets)[1], wanted)


def test_checkpointing_and_layer_decay_know_the_backbone():
    from timm.optim import create_optimizer_v2

    model = tiny()
    images, targets = [torch.rand(3, 60, 90)], [target([4, 4, 30, 30])]
    wanted = losses(model, images, targets)[1]
    model.set_grad_checkpointing()
    assert_same(losses(model, images, targets)[1], wanted, rtol=1e-4, atol=1e-5)
    optimizer = create_optimizer_v2(model, "adamw", 1e-3, 0.05, layer_decay=0.5)
    scale = {id(p): group["lr_scale"] for group in optimizer.param_groups for p in group["params"]}
    named = {name: scale[id(p)] for name, p in model.named_parameters()}
    assert named["roi_heads.box_predictor.cls_score.weight"] == 1
    assert named["backbone.body.stem_0.weight"] == min(scale.values()) < 0.05
    first, last = (named[f"backbone.body.stages_{n}.blocks.0.mlp.fc1.weight"] for n in (0, 3))
    assert first < last < 1
