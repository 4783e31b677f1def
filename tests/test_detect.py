"""Detection: the cascade stage by stage, COCO's layout, average precision, keepgrad on detectors, and a whole run."""

import json
import subprocess
import sys

import pytest
import torch
from conftest import assert_same
from PIL import Image
from torchvision.models.detection.roi_heads import fastrcnn_loss
from torchvision.ops import box_iou

import keepgrad
from keepgrad import flags
from keepgrad.data.coco import CocoFolder, Objects, average_precision, find_split, to_coco
from keepgrad.data.shapes import make_shapes
from keepgrad.train.config import DETECTORS, DetectConfig
from keepgrad.train.detect import detector
from keepgrad.train.detect.cascade import STAGES

TINY = {"sizes": (64,), "max_size": 128, "channels": 16, "width": 32, "anchor": 8, "rois": 16}


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    return make_shapes(tmp_path_factory.mktemp("shapes"), train=6, val=3)


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


# COCO's layout


def test_ground_truth_as_prediction_has_average_precision_one(shapes):
    source = CocoFolder(*find_split(shapes, "val"), training=False)
    objects = Objects(source, False, 0)
    category_of = {label: category for category, label in objects.label_of.items()}
    results = []
    for image in source.ids:
        _, truth = objects.read(image)
        found = {"boxes": truth["boxes"], "labels": truth["labels"], "masks": truth["masks"].unsqueeze(1).float()}
        results += to_coco(image, {**found, "scores": torch.ones(len(truth["labels"]))}, category_of)
    metrics = average_precision(source, results)
    assert metrics["box_ap"] == pytest.approx(1.0, abs=0.02)
    assert metrics["mask_ap50"] == pytest.approx(1.0)
    wrong = [{**row, "category_id": row["category_id"] % 3 + 1} for row in results]
    assert average_precision(source, wrong)["box_ap"] < 0.5
    assert average_precision(source, [])["mask_ap"] == 0.0


def test_what_cannot_be_used_is_left_out_and_said(shapes, tmp_path):
    images, annotations = find_split(shapes, "train")
    whole = json.loads(annotations.read_text())
    good = whole["annotations"][0]
    bad = {
        9001: {"bbox": [5, 5, 0, 10]},
        9002: {"category_id": 77},
        9003: {"image_id": 4444},
        9004: {"segmentation": [[1, 2, 3]]},
        9005: {"bbox": [1, 2, float("nan"), 4]},
        9006: {"segmentation": {"size": [3, 3]}},
        9007: {"segmentation": []},
        9008: {"segmentation": {"size": [128, 128], "counts": None}},
    }
    whole["annotations"] += [{**good, "id": number, **change} for number, change in bad.items()]
    whole["annotations"].append({**good, "id": 9100, "iscrowd": 1})
    whole["images"].append({"id": 99, "file_name": "gone.png", "height": 8, "width": 8})
    path = tmp_path / "instances_train.json"
    path.write_text(json.dumps(whole))
    source = CocoFolder(images, path, training=True)
    said = {p.what: p.reason for p in source.problems}
    assert said.keys() == {*(f"annotation {number}" for number in bad), "image 99 ('gone.png')"}
    assert "has no area" in said["annotation 9001"]
    assert "there is no category 77" in said["annotation 9002"]
    assert "gone.png" in said["image 99 ('gone.png')"]
    kept = {a["id"] for own in source.annotations.values() for a in own}
    assert not kept & {*bad, 9100}
    assert "and 4 more" in source.summary()
    crowds = CocoFolder(images, path, training=False)
    assert 9100 in {a["id"] for own in crowds.annotations.values() for a in own}
    whole["categories"] = []
    path.write_text(json.dumps(whole))
    with pytest.raises(keepgrad.InputError, match="has nothing to train on"):
        CocoFolder(images, path, training=True)
    path.write_text("{")
    with pytest.raises(keepgrad.InputError, match="cannot be read as JSON"):
        CocoFolder(images, path, training=True)
    with pytest.raises(keepgrad.InputError, match="give a folder in the layout of COCO"):
        find_split(tmp_path, "val")


FAR = "far outside the image of [128, 128]"
SUM = "do not add up to the 128 x 128 pixels of the image"


@pytest.mark.parametrize(
    ("segmentation", "words"),
    [
        ([[1e300, 1, 50, 60, 70, 2]], f"has a coordinate of 1e+300, {FAR}"),
        ([[1, 1, 50, 60, 70, -1e9]], f"has a coordinate of -1e+09, {FAR}"),
        ([[10**400, 1, 50, 60, 70, 2]], "is not the numbers of three points or more"),
        ([[0, 0, 128, 128] * 20_000], "is more than 2,000,000 pixels long"),
        ({"size": [200_000, 200_000], "counts": "abc"}, "is of size [200000, 200000], and the image of [128, 128]"),
        ({"size": [200_000, 200_000], "counts": [4 * 10**10]}, "is of size [200000, 200000]"),
        ({"size": [128, 128], "counts": [2**32 - 1, 128 * 128 + 1]}, SUM),
        ({"size": [128, 128], "counts": [128 * 128 + 5, -5]}, SUM),
        ({"size": [128, 128], "counts": "oooo"}, SUM),
        ({"size": [128, 128], "counts": "\u00e9"}, SUM),
    ],
    ids=lambda value: str(value)[:40],
)
def test_numbers_that_would_crash_pycocotools_are_refused_before_it_sees_them(shapes, tmp_path, segmentation, words):
    images, annotations = find_split(shapes, "train")
    whole = json.loads(annotations.read_text())
    whole["annotations"].append({**whole["annotations"][0], "id": 9001, "segmentation": segmentation})
    path = tmp_path / "instances_train.json"
    path.write_text(json.dumps(whole))
    (problem,) = CocoFolder(images, path, training=True).problems
    assert problem.what == "annotation 9001"
    assert words in problem.reason
    assert "\n" not in str(problem)


def test_an_image_said_to_be_larger_than_any_file_is_left_out(shapes, tmp_path):
    images, annotations = find_split(shapes, "train")
    whole = json.loads(annotations.read_text())
    first, second = whole["images"][:2]
    first |= {"height": 200_000, "width": 200_000}
    second["width"] = 12.5
    path = tmp_path / "instances_train.json"
    path.write_text(json.dumps(whole))
    problems = [str(problem) for problem in CocoFolder(images, path, training=True).problems]
    assert len(problems) == 2
    assert "its 200000 x 200000 pixels are more than Pillow opens" in problems[0]
    assert "width 12.5 are not whole numbers above 0" in problems[1]


def test_masks_come_from_polygons_and_from_both_kinds_of_run_lengths(tmp_path):
    from pycocotools import mask as codes

    (tmp_path / "train").mkdir()
    (tmp_path / "annotations").mkdir()
    Image.new("RGB", (20, 10)).save(tmp_path / "train" / "a.png")
    polygon = [[2, 1, 12, 1, 12, 6, 2, 6]]
    coded = codes.merge(codes.frPyObjects(polygon, 10, 20))
    pixels = codes.decode(coded)
    counts, last, run = [], 0, 0
    for value in pixels.flatten(order="F").tolist():
        if value != last:
            counts.append(run)
            last, run = value, 0
        run += 1
    forms = [
        polygon,
        {"size": [10, 20], "counts": coded["counts"].decode()},
        {"size": [10, 20], "counts": [*counts, run]},
    ]
    broken = {"size": [10, 21], "counts": [5, 205]}
    annotations = [
        {"id": n, "image_id": 1, "category_id": 5, "bbox": [2, 1, 10, 5], "segmentation": form}
        for n, form in enumerate([*forms, broken])
    ]
    whole = {
        "images": [{"id": 1, "file_name": "a.png", "height": 10, "width": 20}],
        "annotations": annotations,
        "categories": [{"id": 5, "name": "thing"}],
    }
    (tmp_path / "annotations" / "instances_train.json").write_text(json.dumps(whole))
    objects = Objects(CocoFolder(*find_split(tmp_path, "train"), training=True), False, 0)
    _, truth = objects[0]
    assert truth["labels"].tolist() == [1, 1, 1]
    for mask in truth["masks"]:
        assert torch.equal(torch.as_tensor(mask), torch.from_numpy(pixels))


def test_flips_depend_on_the_epoch_and_keep_boxes_on_their_objects(shapes):
    source = CocoFolder(*find_split(shapes, "train"), training=True)
    objects, again = Objects(source, True, 0), Objects(source, True, 0)
    plain = objects.read(source.ids[0])[0]
    seen = [bool(torch.equal(objects[epoch * len(objects)][0], plain)) for epoch in range(8)]
    assert set(seen) == {True, False}
    for number in range(2 * len(objects)):
        image, truth = objects[number]
        assert torch.equal(image, again[number][0])
        for box, mask in zip(truth["boxes"], truth["masks"], strict=True):
            rows, columns = torch.as_tensor(mask).nonzero().unbind(1)
            found = torch.stack([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]).float()
            torch.testing.assert_close(torch.as_tensor(box), found, rtol=0, atol=2.0)


def test_the_next_image_takes_the_place_of_one_that_cannot_be_read(shapes, tmp_path, capsys):
    import shutil

    shutil.copytree(shapes, tmp_path / "data")
    source = CocoFolder(*find_split(tmp_path / "data", "train"), training=True)
    broken = tmp_path / "data" / "train2017" / source.images[source.ids[1]]["file_name"]
    broken.write_bytes(broken.read_bytes()[:50])
    objects = Objects(source, False, 0)
    assert int(objects[1][1]["image_id"]) == source.ids[2]
    assert int(objects[1][1]["image_id"]) == source.ids[2]
    said = capsys.readouterr().err
    assert said.count("left out image") == 1
    assert broken.name in said


# A run

SMALL = (
    *("--backbone", "test_convnext", "--sizes", "64", "--max-size", "64", "--channels", "16", "--head-width", "32"),
    *("--anchor", "8", "--rois", "16", "--batch-size", "2", "--workers", "0", "--cpu", "--pictures", "2"),
)


def keepgrad_detect(*args):
    args = [sys.executable, "-m", "keepgrad", "detect", *args]
    return subprocess.run(args, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    "backbone",
    [
        ("--backbone", "test_convnext"),
        (
            *("--backbone", "swin_tiny_patch4_window7_224"),
            *("--backbone-kwargs", "embed_dim=16,depths=[2,1,1,1],num_heads=[2,2,2,4]"),
        ),
    ],
    ids=lambda flags: flags[1],
)
def test_the_command_trains_evaluates_and_draws(shapes, tmp_path, backbone):
    args = (
        *("--data", str(shapes), "--output", str(tmp_path / "run"), "--detector", "cascade_mask_rcnn"),
        *("--keep-ratio", "0.5", *SMALL, *backbone),
    )
    done = keepgrad_detect(*args, "--epochs", "1")
    assert done.returncode == 0, done.stderr
    assert "box_ap" in done.stdout
    results = json.loads((tmp_path / "run" / "predictions.json").read_text())
    assert all({"image_id", "category_id", "bbox", "score", "segmentation"} == row.keys() for row in results)
    pictures = sorted((tmp_path / "run" / "pictures").iterdir())
    assert len(pictures) == 2
    with Image.open(pictures[0]) as picture:
        assert picture.size == (128, 128)
    again = keepgrad_detect(*args, "--epochs", "2", "--resume")
    assert again.returncode == 0, again.stderr
    assert "continuing" in again.stdout
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) == 3


@pytest.mark.parametrize("backbone", ["test_convnext", "test_vit"])
def test_two_processes_train_and_evaluate_every_image_once(shapes, tmp_path, backbone):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "keepgrad"]
    args = ("detect", "--data", str(shapes), "--output", str(tmp_path / "run"), *SMALL)
    more = ("--batch-size", "1", "--epochs", "2", "--backbone", backbone, "--keep-ratio", "0.5")
    done = subprocess.run([*launch, *args, *more], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    assert len(rows) == 3
    assert int(rows[-1].split(",")[1]) == 6  # steps of 2 processes over 6 images, twice
    results = json.loads((tmp_path / "run" / "predictions.json").read_text())
    seen = [(row["image_id"], *row["bbox"], row["score"], row["category_id"]) for row in results]
    assert len(seen) == len(set(seen))


def test_training_under_autocast(shapes, tmp_path):
    more = ("--epochs", "1", "--amp", "bf16", "--detector", "cascade_mask_rcnn", "--preset", "paper")
    done = keepgrad_detect("--data", str(shapes), "--output", str(tmp_path / "run"), *SMALL, *more)
    assert done.returncode == 0, done.stderr
    loss = float((tmp_path / "run" / "metrics.csv").read_text().splitlines()[1].split(",")[3])
    assert 0 < loss < 20


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), "give a folder in the layout of COCO, or --demo"),
        (("--demo", "--data", "x"), "leave out --demo or --data"),
        (("--data", "nowhere"), "has no annotations/instances_train*.json"),
        (("--data", "nowhere", "--sizes", "big"), "give a range of pixels like 480-800"),
    ],
)
def test_wrong_arguments_are_one_clear_line(args, words):
    done = keepgrad_detect(*args)
    assert done.returncode == 2
    assert words in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_settings_of_detection():
    config = flags.make(DetectConfig, {"sizes": "480-800", "backbone_kwargs": "drop_path_rate=0.4"})
    assert config.side_lengths() == (*range(480, 800, 32), 800)
    assert (config.epochs, config.sched, config.backbone_kwargs) == (12, "steps", {"drop_path_rate": 0.4})
    assert flags.make(DetectConfig, {"sizes": "64"}).side_lengths() == (64,)
