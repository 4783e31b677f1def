"""Settings and annotations of detection that cannot work: one line that says what to give, or what was left out."""

import json
import os
import shutil

import numpy as np
import pytest
from conftest import line_of

import keepgrad
from keepgrad.data.coco import CocoFolder, Objects, average_precision, find_split
from keepgrad.data.shapes import make_shapes

DETECT = (
    *("detect", "--backbone", "test_convnext", "--sizes", "64", "--max-size", "64", "--channels", "8", "--rois", "8"),
    *("--head-width", "8", "--epochs", "1", "--workers", "0", "--cpu"),
)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    return make_shapes(tmp_path_factory.mktemp("coco"), train=2, val=2)


@pytest.fixture
def changed(shapes, tmp_path):
    """A copy of the set whose annotations of evaluation a function changes."""

    def change(function):
        shutil.copytree(shapes, tmp_path / "set")
        path = find_split(tmp_path / "set", "val")[1]
        found = json.loads(path.read_text())
        function(found)
        path.write_text(json.dumps(found))
        return CocoFolder(*find_split(tmp_path / "set", "val"), training=False)

    return change


NO_IDS = [[1], {"a": 1}, "x", "1", None, 2**63, -(2**64), 1.5, float("nan"), float("inf"), True]


@pytest.mark.parametrize("value", NO_IDS, ids=str)
@pytest.mark.parametrize("kind", ["image", "image of an annotation", "category of an annotation", "category"])
def test_ids_that_are_not_whole_numbers_of_64_bits(changed, kind, value):
    def change(found):
        image, annotation, category = found["images"][0], found["annotations"][0], found["categories"][0]
        match kind:
            case "image":
                image["id"] = value
            case "image of an annotation":
                annotation["image_id"] = value
            case "category of an annotation":
                annotation["category_id"] = value
            case "category":
                category["id"] = value

    if kind == "category":
        with pytest.raises(keepgrad.InputError, match="every category needs an id, a whole number of 64 bits"):
            changed(change)
        return
    source = changed(change)
    words = "its id is not a whole number" if kind == "image" else "there is no "
    assert words in source.summary(most=100)
    for number in range(len(source.ids)):
        assert Objects(source, False, 0)[number]


@pytest.mark.parametrize("value", [5, None, [1], True, "9" * 5000, "a\0b", "", "no.png"], ids=lambda v: repr(v)[:9])
def test_file_names_that_are_none(changed, value):
    source = changed(lambda found: found["images"][0].update(file_name=value))
    words = "there is no file" if isinstance(value, str) else "its file name is not a text"
    assert words in source.summary()
    assert len(source.ids) == 1
    assert len(source.summary()) < 600


@pytest.mark.parametrize("change", [{"iscrowd": "x"}, {"iscrowd": -1}, {"area": None}, {"area": [1]}], ids=str)
def test_what_evaluation_would_fail_on_is_left_out(changed, change):
    source = changed(lambda found: found["annotations"][0].update(change))
    assert "its iscrowd is not 0 or 1, or its area is not a number" in source.summary()
    assert average_precision(source, [])["box_ap"] == 0


@pytest.mark.parametrize("value", [0, 7, "x", [1]], ids=str)
def test_evaluation_does_not_depend_on_the_ids_of_annotations(changed, value):
    """pycocotools takes annotations of one id for one, and those of id 0 for missed."""

    def change(found):
        for annotation in found["annotations"]:
            annotation["id"] = value

    source = changed(change)
    rows = [
        {"image_id": image, "category_id": own["category_id"], "bbox": own["bbox"], "score": 0.9}
        for image, every in source.annotations.items()
        for own in every
    ]
    rows = [{**row, "segmentation": {"size": [128, 128], "counts": codes_of_nothing()}} for row in rows]
    assert average_precision(source, rows)["box_ap"] == pytest.approx(1)


def codes_of_nothing():
    from pycocotools import mask

    return mask.encode(np.zeros((128, 128), dtype=np.uint8, order="F"))["counts"].decode()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("sizes", "1", "from 32 to 8192"),
        ("sizes", "64-100000000000", "from 32 to 8192"),
        ("sizes", "big", "give a range of pixels like 480-800"),
        ("max-size", "1", "give a whole number from 32 to 8192"),
        ("anchor", str(10**20), "give a whole number from 1"),
        ("pictures", "-1", "give a whole number from 0"),
        ("backbone", "hf:x", "give a name of timm"),
        ("backbone-kwargs", "features_only=false", "'features_only' is no argument of a model that can be chosen"),
        ("backbone-kwargs", "pretrained_cfg_overlay=x", "is no argument of a model that can be chosen"),
        ("backbone-kwargs", "in_chans=1", "images of detection have 3 channels"),
        ("backbone-kwargs", "norm_layer=foo", "test_convnext cannot be made with"),
    ],
)
def test_a_flag_of_detect(shapes, tmp_path, capsys, name, value, words):
    args = (*DETECT, "--data", str(shapes), "--output", str(tmp_path / "run"), f"--{name}={value}")
    assert words in line_of(capsys, *args)
    assert not (tmp_path / "run").exists()


def test_ids_that_are_there_twice(changed):
    source = changed(lambda found: found["images"].append(found["images"][0]))
    assert "an image before it has the same id" in source.summary()


def test_categories_that_are_there_twice(changed):
    with pytest.raises(keepgrad.InputError, match="two categories have the id"):
        changed(lambda found: found["categories"].append(found["categories"][0]))


NO_JSON = {"deep": "[" * 100_000, "long": '{"images": [' + "9" * 5000, "empty": "", "nan": "NaN"}


@pytest.mark.parametrize("text", NO_JSON.values(), ids=NO_JSON)
def test_annotations_that_are_no_json(shapes, tmp_path, capsys, text):
    shutil.copytree(shapes, tmp_path / "set")
    find_split(tmp_path / "set", "train")[1].write_text(text)
    said = line_of(capsys, *DETECT, "--data", str(tmp_path / "set"), "--output", str(tmp_path / "run"))
    assert "cannot be read as JSON" in said or "is not in COCO's form" in said


def test_fifos_among_annotations_and_images(shapes, tmp_path, capsys):
    shutil.copytree(shapes, tmp_path / "set")
    images, path = find_split(tmp_path / "set", "val")
    name = json.loads(path.read_text())["images"][0]["file_name"]
    (images / name).unlink()
    os.mkfifo(images / name)
    assert "there is no file" in CocoFolder(images, path, training=False).summary()
    path.unlink()
    os.mkfifo(path)
    said = line_of(capsys, *DETECT, "--data", str(tmp_path / "set"), "--output", str(tmp_path / "run"))
    assert "not a plain file" in said
