"""The heads of Cascade R-CNN: three box heads in a row, each working on the boxes of the previous one, and a mask head.

Each stage is one of torchvision's `RoIHeads`, with its own IoU threshold and its own scale of box offsets. This file
only adds the steps between the stages. A stage moves each box by the same offsets for all classes, and no gradient
flows through the moved boxes. The next stage matches them with the ground truth again. In the end, the class scores are
the mean over the stages, and the boxes are those of the last stage.

| stage | IoU of a positive | weights of box offsets | weight of the loss |
| ---   | ---               | ---                    | ---                |
| 1     | 0.5               | 10, 10, 5, 5           | 1                  |
| 2     | 0.6               | 20, 20, 10, 10         | 0.5                |
| 3     | 0.7               | 30, 30, 15, 15         | 0.25               |

Cai and Vasconcelos: Cascade R-CNN, 2018.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.roi_heads import RoIHeads, fastrcnn_loss, maskrcnn_inference, maskrcnn_loss
from torchvision.ops import clip_boxes_to_image, remove_small_boxes

__all__ = ["CascadeHeads"]

Boxes = list[Tensor]
Targets = list[dict[str, Tensor]]
STAGES = (
    (0.5, (10.0, 10.0, 5.0, 5.0), 1.0),
    (0.6, (20.0, 20.0, 10.0, 10.0), 0.5),
    (0.7, (30.0, 30.0, 15.0, 15.0), 0.25),
)


class CascadeHeads(nn.Module):
    """Replaces the `roi_heads` of a Mask R-CNN, and reuses their pooling, mask head and thresholds."""

    def __init__(self, heads: RoIHeads, channels: int, classes: int, width: int = 1024) -> None:
        super().__init__()
        sampler, size = heads.fg_bg_sampler, heads.box_roi_pool.output_size[0]
        self.stages = nn.ModuleList(
            RoIHeads(
                heads.box_roi_pool,
                TwoMLPHead(channels * size**2, width),
                _ClassAgnostic(width, classes),
                overlap,
                overlap,
                sampler.batch_size_per_image,
                sampler.positive_fraction,
                weights,
                heads.score_thresh,
                heads.nms_thresh,
                heads.detections_per_img,
            )
            for overlap, weights, _ in STAGES
        )
        self.mask_roi_pool, self.mask_head = heads.mask_roi_pool, heads.mask_head
        self.mask_predictor = heads.mask_predictor
        self.classes = classes

    def forward(
        self,
        features: dict[str, Tensor],
        proposals: Boxes,
        image_shapes: list[tuple[int, int]],
        targets: Targets | None = None,
    ) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        """Returns detections and losses. The detections are empty in training, the losses in evaluation."""
        if self.training:
            assert targets is not None
            return [], self.losses(features, proposals, image_shapes, targets)
        return self.detections(features, proposals, image_shapes), {}

    def losses(
        self, features: dict[str, Tensor], proposals: Boxes, image_shapes: list[tuple[int, int]], targets: Targets
    ) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        first: Any = self.stages[0]
        boxes, matched, labels, offsets = first.select_training_samples(proposals, targets)
        for number, stage in enumerate(self.stages):
            if number:
                matched, labels, offsets = self.matched(stage, boxes, targets)
            logits, moves = self._predict(stage, features, boxes, image_shapes)
            losses = fastrcnn_loss(logits, moves.repeat(1, self.classes), labels, offsets)
            weight = STAGES[number][2]
            found[f"loss_classifier_{number + 1}"], found[f"loss_box_reg_{number + 1}"] = (weight * x for x in losses)
            if number + 1 < len(self.stages):
                moved = self.refined(stage, moves, boxes, image_shapes)
                boxes = [_not_empty(new, old) for new, old in zip(moved, boxes, strict=True)]
        positive = [own > 0 for own in labels]
        boxes, matched = _chosen(boxes, positive), _chosen(matched, positive)
        logits = self._masks(features, boxes, image_shapes)
        masks, classes = [t["masks"] for t in targets], [t["labels"] for t in targets]
        found["loss_mask"] = maskrcnn_loss(logits, boxes, masks, classes, matched)
        return found

    def detections(
        self, features: dict[str, Tensor], proposals: Boxes, image_shapes: list[tuple[int, int]]
    ) -> list[dict[str, Tensor]]:
        boxes, scores = proposals, []
        for number, stage in enumerate(self.stages):
            logits, moves = self._predict(stage, features, boxes, image_shapes)
            scores.append(logits.softmax(-1))
            if number + 1 < len(self.stages):
                boxes = self.refined(stage, moves, boxes, image_shapes)
        last: Any = self.stages[-1]
        # It applies a softmax, and the softmax of the log of probabilities gives these probabilities back.
        found = last.postprocess_detections(
            torch.stack(scores).mean(0).log(), moves.repeat(1, self.classes), boxes, image_shapes
        )
        results = [dict(zip(("boxes", "scores", "labels"), one, strict=True)) for one in zip(*found, strict=True)]
        logits = self._masks(features, [one["boxes"] for one in results], image_shapes)
        masks = maskrcnn_inference(logits, [one["labels"] for one in results])
        return [{**one, "masks": own} for one, own in zip(results, masks, strict=True)]

    def matched(self, stage: Any, boxes: Boxes, targets: Targets) -> tuple[Boxes, Boxes, Boxes]:
        """Match boxes with the ground truth. Returns the index of each match, the labels and the target offsets."""
        truth = [t["boxes"].to(own.dtype) for t, own in zip(targets, boxes, strict=True)]
        matched, labels = stage.assign_targets_to_proposals(boxes, truth, [t["labels"] for t in targets])
        goals = [
            own[index] if len(own) else own.new_zeros(len(index), 4) for own, index in zip(truth, matched, strict=True)
        ]
        return matched, labels, stage.box_coder.encode(goals, boxes)

    def refined(self, stage: Any, moves: Tensor, boxes: Boxes, image_shapes: list[tuple[int, int]]) -> Boxes:
        """Move the boxes by the offsets of a stage, and clip them to their images. No gradient flows through them."""
        moved = stage.box_coder.decode(moves.detach(), boxes).squeeze(1).split([len(own) for own in boxes])
        return [clip_boxes_to_image(own, shape) for own, shape in zip(moved, image_shapes, strict=True)]

    def _predict(
        self, stage: Any, features: dict[str, Tensor], boxes: Boxes, image_shapes: list[tuple[int, int]]
    ) -> tuple[Tensor, Tensor]:
        return stage.box_predictor(stage.box_head(stage.box_roi_pool(features, boxes, image_shapes)))

    def _masks(self, features: dict[str, Tensor], boxes: Boxes, image_shapes: list[tuple[int, int]]) -> Tensor:
        return self.mask_predictor(self.mask_head(self.mask_roi_pool(features, boxes, image_shapes)))


class _ClassAgnostic(FastRCNNPredictor):
    """Predicts a score for every class, and one set of box offsets shared by all classes."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__(width, classes)
        self.bbox_pred = nn.Linear(width, 4)


def _not_empty(boxes: Tensor, otherwise: Tensor) -> Tensor:
    """The boxes that are not empty. If all are empty, the boxes in `otherwise`, so that there still is a loss."""
    index = remove_small_boxes(boxes, min_size=1e-2)
    return boxes[index] if len(index) else otherwise


def _chosen(values: Boxes, where: Boxes) -> Boxes:
    return [own[index] for own, index in zip(values, where, strict=True)]
