"""Detection: a whole run."""

import json

import pytest
from PIL import Image
from processes import run

from keepgrad import flags
from keepgrad.train.config import DetectConfig

# A run


SMALL = (
    *("--backbone", "test_convnext", "--sizes", "64", "--max-size", "64", "--channels", "16", "--head-width", "32"),
    *("--anchor", "8", "--rois", "16", "--batch-size", "2", "--workers", "0", "--cpu", "--pictures", "2"),
)


def keepgrad_detect(*args):
    return run(("-m", "keepgrad", "detect", *args))


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
    args = ("detect", "--data", str(shapes), "--output", str(tmp_path / "run"), *SMALL)
    more = ("--batch-size", "1", "--epochs", "2", "--backbone", backbone, "--keep-ratio", "0.5")
    done = run(("-m", "keepgrad", *args, *more), processes=2)
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
