"""What tests of detection share: small detectors, a target, losses with their gradients."""

import torch

from keepgrad.train.detect import detector

TINY = {"sizes": (64,), "max_size": 128, "channels": 16, "width": 32, "anchor": 8, "rois": 16}


def tiny(kind="mask_rcnn", backbone="test_convnext", **options):
    torch.manual_seed(0)
    scale = {"ls_init_value" if "convnext" in backbone else "init_values": 0.5}  # branches that count
    if "swin" in backbone:
        scale = {"embed_dim": 16, "depths": (2, 1, 1, 1), "num_heads": (2, 2, 2, 4), "drop_path_rate": 0.0}
    return detector(kind, backbone, 3, **{**TINY, "backbone_options": scale, **options}).train()


def target(*boxes, height=60, width=90):
    masks = torch.zeros(len(boxes), height, width, dtype=torch.uint8)
    for mask, (left, top, right, bottom) in zip(masks, boxes, strict=True):
        mask[top:bottom, left:right] = 1
    labels = torch.arange(len(boxes)) % 3 + 1
    return {"boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4), "labels": labels, "masks": masks}


def losses(model, images, targets, seed=0):
    model.zero_grad()
    torch.manual_seed(seed)
    found = model(images, targets)
    sum(found.values()).backward()
    return {k: v.detach() for k, v in found.items()}, {n: p.grad.clone() for n, p in model.named_parameters()}
