"""The cascade, stage by stage."""

import pytest
import torch
from detection import losses, target, tiny
from torchvision.models.detection.roi_heads import fastrcnn_loss
from torchvision.ops import box_iou

import keepgrad
from keepgrad.train.config import DETECTORS
from keepgrad.train.detect import detector
from keepgrad.train.detect.cascade import STAGES

# The cascade


@pytest.fixture
def heads():
    return tiny("cascade_mask_rcnn").roi_heads


def test_stages_ask_for_more_and_more_overlap_and_move_less_and_less(heads):
    truth = target([10, 10, 50, 50])
    box = torch.tensor([[10.0, 10.0, 50.0, 36.0]])
    assert float(box_iou(box, truth["boxes"])) == pytest.approx(0.65)
    labels = [int(heads.matched(stage, [box], [truth])[1][0]) for stage in heads.stages]
    assert labels == [1, 1, 0]
    weights = [stage.box_coder.weights for stage in heads.stages]
    assert weights == [(10, 10, 5, 5), (20, 20, 10, 10), (30, 30, 15, 15)]
    offsets = [heads.matched(stage, [box], [truth])[2][0] for stage in heads.stages]
    torch.testing.assert_close(offsets[1], 2 * offsets[0])
    torch.testing.assert_close(offsets[2], 3 * offsets[0])


def test_a_stage_that_predicts_the_right_offsets_moves_boxes_to_the_truth(heads):
    truth = target([12, 8, 40, 44], [50, 20, 80, 55])
    boxes = [truth["boxes"] + torch.tensor([3.0, -2.0, -4.0, 1.0])]
    for stage in heads.stages:
        _, _, offsets = heads.matched(stage, boxes, [truth])
        moved = heads.refined(stage, offsets[0], boxes, [(60, 90)])
        torch.testing.assert_close(moved[0], truth["boxes"], rtol=1e-4, atol=1e-3)
        assert not moved[0].requires_grad


def test_refined_boxes_stay_in_their_image(heads):
    far = torch.tensor([[100.0, 100.0, 0.0, 0.0]])
    (moved,) = heads.refined(heads.stages[0], far, [torch.tensor([[10.0, 10.0, 50.0, 50.0]])], [(60, 90)])
    assert float(moved[:, 0::2].max()) <= 90
    assert float(moved[:, 1::2].max()) <= 60


def features_for(height=64, width=96):
    torch.manual_seed(1)
    return {str(n): torch.randn(1, 16, height // 2 ** (n + 2), width // 2 ** (n + 2)) for n in range(4)}


def test_losses_are_those_of_each_stage_on_the_boxes_of_the_one_before(heads):
    heads.train()
    truth = target([12, 8, 40, 44], [50, 20, 80, 55])
    features, shapes = features_for(), [(60, 90)]
    torch.manual_seed(2)
    proposals = [torch.tensor([[10.0, 6.0, 42.0, 40.0], [48.0, 22.0, 78.0, 50.0], [0.0, 0.0, 20.0, 20.0]])]
    torch.manual_seed(3)
    found = heads.losses(features, [p.clone() for p in proposals], shapes, [truth])
    torch.manual_seed(3)
    boxes, _, labels, offsets = heads.stages[0].select_training_samples([p.clone() for p in proposals], [truth])
    for number, (stage, (_, _, weight)) in enumerate(zip(heads.stages, STAGES, strict=True)):
        if number:
            _, labels, offsets = heads.matched(stage, boxes, [truth])
        logits, moves = stage.box_predictor(stage.box_head(stage.box_roi_pool(features, boxes, shapes)))
        wanted = fastrcnn_loss(logits, moves.repeat(1, 4), labels, offsets)
        torch.testing.assert_close(found[f"loss_classifier_{number + 1}"], weight * wanted[0])
        torch.testing.assert_close(found[f"loss_box_reg_{number + 1}"], weight * wanted[1])
        boxes = heads.refined(stage, moves, boxes, shapes)
    assert found["loss_mask"] > 0
    later = found["loss_classifier_2"] + found["loss_box_reg_3"]
    first = list(heads.stages[0].parameters())
    assert all(g is None for g in torch.autograd.grad(later, first, allow_unused=True))


def test_detections_have_the_mean_score_of_the_stages_and_the_boxes_of_the_last(heads):
    heads.eval()
    for stage in heads.stages:
        stage.score_thresh = 0.0
        torch.nn.init.zeros_(stage.box_predictor.bbox_pred.weight)
        torch.nn.init.zeros_(stage.box_predictor.bbox_pred.bias)
    proposals = [torch.tensor([[10.0, 6.0, 42.0, 40.0]])]
    features, shapes = features_for(), [(60, 90)]
    with torch.no_grad():
        (found,) = heads.detections(features, proposals, shapes)
        rows = [s.box_predictor(s.box_head(s.box_roi_pool(features, proposals, shapes)))[0] for s in heads.stages]
    scores = torch.stack([row.softmax(-1) for row in rows]).mean(0)[0, 1:]
    torch.testing.assert_close(found["scores"], scores.sort(descending=True).values)
    torch.testing.assert_close(found["boxes"], proposals[0].expand(3, 4))
    assert found["masks"].shape == (3, 1, 28, 28)


@pytest.mark.parametrize("kind", DETECTORS)
def test_images_without_objects_are_trained_on(kind):
    model = tiny(kind)
    empty = target()
    found, grads = losses(model, [torch.rand(3, 60, 90)], [empty])
    assert all(torch.isfinite(v) for v in found.values())
    assert all(torch.isfinite(g).all() for g in grads.values())


@pytest.mark.parametrize("kind", DETECTORS)
def test_boxes_keep_their_precision_under_autocast(kind):
    model = tiny(kind).eval()
    seen = []
    pool = (model.roi_heads if kind == "mask_rcnn" else model.roi_heads.stages[0]).box_roi_pool
    pool.register_forward_pre_hook(lambda module, args: seen.extend(args[1]))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        found = model([torch.rand(3, 60, 90)])
    assert {boxes.dtype for boxes in seen} == {found[0]["boxes"].dtype} == {torch.float32}


def test_a_cascade_whose_offsets_are_no_numbers_still_has_a_loss(heads):
    heads.train()
    torch.nn.init.constant_(heads.stages[0].box_predictor.bbox_pred.bias, float("nan"))
    found = heads.losses(
        features_for(), [torch.tensor([[10.0, 6.0, 42.0, 40.0]])], [(60, 90)], [target([12, 8, 40, 44])]
    )
    assert torch.isnan(found["loss_box_reg_1"])


def test_an_unknown_detector_or_backbone_is_named():
    with pytest.raises(keepgrad.ConfigError, match="use one of mask_rcnn, cascade_mask_rcnn"):
        detector("yolo", "convnext_tiny", 3)
    with pytest.raises(keepgrad.ConfigError, match="did you mean"):
        detector("mask_rcnn", "convnext_tny", 3)
