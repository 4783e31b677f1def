"""COCO's layout, and average precision."""

import json

import pytest
import torch
from PIL import Image

import keepgrad
from keepgrad.data.coco import CocoFolder, Objects, average_precision, find_split, to_coco

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
