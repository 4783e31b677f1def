"""Images with labels: what is read, in which range, and what is said of the rest."""

import os
import tarfile

import numpy as np
import pytest
from PIL import Image
from training import trainer

import keepgrad
from keepgrad.cli import main
from keepgrad.data.images import kind_of, open_images
from keepgrad.data.pixels import converted


def saved(path, value=100):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (6, 6), (value, value, value)).save(path)


@pytest.fixture
def classes(tmp_path):
    """Two classes, with an image each."""
    for name in ("cat", "dog"):
        saved(tmp_path / "images" / name / "0.png")
    return tmp_path / "images"


def labelled(source):
    """The class of each image, by its path."""
    return {source.name(n).partition(": ")[2]: source.classes[source.samples[n][1]] for n in range(len(source))}


# Ranges


@pytest.mark.parametrize("kind", ["png", "tif", "pgm"])
def test_grey_images_of_16_bits_are_read_in_their_range(tmp_path, kind):
    values = np.array([[0, 1000], [40_000, 65_535]], dtype=np.uint16)
    Image.fromarray(values).save(tmp_path / f"a.{kind}")
    with Image.open(tmp_path / f"a.{kind}") as image:
        found = np.asarray(converted(image, "RGB"))
    assert found[..., 0].tolist() == [[0, 4], [156, 255]]
    assert (found[..., 0] == found[..., 2]).all()


def test_training_and_detection_see_16_bits_in_their_range(classes, tmp_path):
    from keepgrad.data.coco import CocoFolder, Objects, find_split
    from keepgrad.data.shapes import make_shapes

    for name in ("cat", "dog"):
        Image.fromarray(np.full((40, 40), 32_768, dtype=np.uint16)).save(classes / name / "0.png")
        saved(classes / name / "1.png")
    run = trainer(classes, tmp_path / "run", aug=False, batch_size=1, val=str(classes))
    index = next(n for n in range(4) if run.task.source.name(n).endswith("cat/0.png"))
    image = run.task.transform(converted(run.task.source.read(index)[0], "RGB"))
    assert float(image.abs().max()) < 0.1  # normalised by a mean of one half
    shapes = make_shapes(tmp_path / "shapes", train=1, val=1)
    objects = Objects(CocoFolder(*find_split(shapes, "val"), training=False), False, 0)
    path = objects.source.folder / next(iter(objects.source.images.values()))["file_name"]
    Image.fromarray(np.full((128, 128), 32_768, dtype=np.uint16)).save(path)
    assert float(objects[0][0].max()) == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(("dtype", "value"), [(np.float32, 0.5), (np.int32, 70_000), (np.int32, -1)])
def test_values_of_no_known_range_are_refused(classes, dtype, value):
    Image.fromarray(np.full((6, 6), value, dtype=dtype)).save(classes / "cat" / "1.tif")
    source = open_images(str(classes))
    with pytest.raises(ValueError, match="save it with 8 or 16 bits"):
        converted(source.read(1)[0], "RGB")


# Which images


@pytest.mark.parametrize("kind", ["bmp", "gif", "jpeg", "JPG", "ppm", "tif", "webp"])
def test_the_usual_kinds_of_images_are_read(classes, tmp_path, kind):
    saved(classes / "cat" / f"1.{kind}")
    assert len(open_images(str(classes))) == 3
    with tarfile.open(tmp_path / "images.tar", "w") as tar:
        tar.add(classes, arcname="images")
    assert len(open_images(str(tmp_path / "images.tar"))) == 3


def test_images_in_folders_of_a_class_folder_are_of_that_class(classes):
    for name in ("cat/young", "cat/old", "dog/young"):
        saved(classes / name / "1.png")
    found = labelled(open_images(str(classes)))
    assert found == {path: path.partition("/")[0] for path in found}
    assert len(found) == 5


def test_what_is_left_out_is_said(classes, tmp_path, capsys):
    saved(classes / "stray.png")
    saved(classes / "cat" / ".hidden" / "1.png")
    (classes / "cat" / "notes.txt").write_text("nothing")
    (classes / "dog" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    (classes / "dog" / "self.png").symlink_to(classes / "dog" / "self.png")
    os.mkfifo(classes / "dog" / "waits.png")
    (classes / "up").symlink_to(classes)
    (classes / "dog" / "up").symlink_to(classes)
    (classes / "dog" / "self").symlink_to(classes / "dog")
    source = open_images(str(classes))
    assert labelled(source) == {"cat/0.png": "cat", "dog/0.png": "dog"}
    for words in (
        f"{classes}: 2 images of 2 classes; left out: ",
        "1 beside the class folders (stray.png)",
        "1 hidden (cat/.hidden)",
        "3 neither files nor folders (dog/gone.png, dog/self.png, dog/waits.png)",
        "1 not of a known kind (cat/notes.txt)",
        "3 links back to a folder above (dog/self, dog/up, up)",
    ):
        assert words in source.found
    trainer(classes, tmp_path / "run", batch_size=1)
    assert "; 1 of them are held out for evaluation\n" in capsys.readouterr().out


def test_links_to_other_folders_are_followed(classes, tmp_path):
    saved(tmp_path / "elsewhere" / "a.png")
    (classes / "fox").symlink_to(tmp_path / "elsewhere")
    (classes / "cat" / "more").symlink_to(tmp_path / "elsewhere")
    assert labelled(open_images(str(classes)))["fox/a.png"] == "fox"
    assert labelled(open_images(str(classes)))["cat/more/a.png"] == "cat"


def test_a_tar_whose_folders_do_not_say_the_class_is_refused(classes, tmp_path):
    def packed():
        with tarfile.open(tmp_path / "images.tar", "w") as tar:
            for path in sorted(classes.rglob("*.png")):
                tar.add(path, arcname=path.relative_to(classes))
        return open_images(str(tmp_path / "images.tar"))

    assert packed().found.endswith("images.tar: 2 images of 2 classes")
    saved(classes / "stray.png")
    with pytest.raises(keepgrad.InputError, match="has images beside its class folders"):
        packed()
    (classes / "stray.png").unlink()
    for name in ("cat", "dog"):
        saved(classes / name / "young" / "1.png")
    with pytest.raises(keepgrad.InputError, match="two folders for the class young, cat/young and dog/young"):
        packed()


# Kinds of datasets


@pytest.mark.parametrize("kind", ["foo", "imagenet", "foo/bar", "hfds", "hfds/", "torch/"])
def test_an_unknown_dataset_is_refused(folder, tmp_path, kind, capsys):
    args = ("--data", str(folder), "--output", str(tmp_path / "run"), "--model", "test_vit", "--cpu")
    assert main(["train", *args, "--dataset", kind]) == 2
    assert f"dataset={kind} is not known; give torch/NAME" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["tfds/mnist", "wds/x", "hfids/x"])
def test_streams_are_refused(kind):
    with pytest.raises(keepgrad.ConfigError, match="is a stream, which cannot be resumed"):
        kind_of(kind)


def test_a_dataset_that_cannot_be_opened_is_one_line(tmp_path):
    for kind in ("torch/foo", "torch/cifar10", "hfds/no/such/set"):
        with pytest.raises(keepgrad.InputError, match=f"{kind} at "):
            open_images(str(tmp_path), kind)


def test_a_folder_by_torchs_name_is_a_folder(folder, tmp_path):
    task = trainer(folder, tmp_path / "run", dataset="torch/folder").task
    assert (len(task.source), len(task.val), task.classes) == (42, 12, ["apple", "bird", "cat"])


def test_what_says_more_of_data_needs_data():
    for name in ("dataset", "val"):
        with pytest.raises(keepgrad.ConfigError, match="give data too"):
            keepgrad.train.config.TrainConfig(**{name: "torch/cifar10"})
