"""What can go wrong in a training run, and what is said then."""

import pytest
import torch
from training import assert_equal_bits, command, keepgrad_train, trainer, weights

import keepgrad
from keepgrad.train.loop.state import State

# What can go wrong


def test_a_full_disk_leaves_the_state_from_before(folder, tmp_path):
    first = keepgrad_train(folder, tmp_path / "run", "--epochs", "1")
    assert first.returncode == 0, first.stderr
    before = (tmp_path / "run" / "state.pt").read_bytes()

    done = keepgrad_train(folder, tmp_path / "run", "--resume", "--epochs", "2", largest_file=len(before) // 2)
    assert done.returncode == 2
    assert "cannot write" in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "run" / "state.pt").read_bytes() == before
    done = keepgrad_train(folder, tmp_path / "run", "--resume", "--epochs", "2")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("workers", ["0", "2"])
def test_an_unreadable_image_is_named_and_the_run_goes_on_when_it_is_mended(folder, tmp_path, workers):
    import shutil

    shutil.copytree(folder, tmp_path / "images")
    broken = tmp_path / "images" / "train" / "bird" / "3.png"
    whole = broken.read_bytes()
    broken.write_bytes(whole[:100])
    done = keepgrad_train(tmp_path / "images", tmp_path / "run", "--workers", workers)
    assert done.returncode == 2
    assert "bird/3.png cannot be read as an image" in done.stderr
    assert "Traceback" not in done.stderr
    assert State.read(tmp_path / "run" / "state.pt").step < 14
    broken.write_bytes(whole)
    done = keepgrad_train(tmp_path / "images", tmp_path / "run", "--workers", workers, "--resume")
    assert done.returncode == 0, done.stderr
    keepgrad_train(folder, tmp_path / "other")
    assert_equal_bits(weights(tmp_path / "run"), weights(tmp_path / "other"))


def test_classes_that_do_not_fit(folder, tmp_path):
    import shutil

    shutil.copytree(folder, tmp_path / "images")
    (tmp_path / "images" / "train" / "dog").mkdir()
    with pytest.raises(keepgrad.InputError, match="dog is a class folder without images"):
        trainer(tmp_path / "images", tmp_path / "run")
    shutil.copy(folder / "val" / "cat" / "0.png", tmp_path / "images" / "train" / "dog" / "0.png")
    with pytest.raises(keepgrad.InputError, match="training has 4 classes and evaluation 3; only one of them has dog"):
        trainer(tmp_path / "images", tmp_path / "run")
    trainer(folder, tmp_path / "run", epochs=1).run()
    (tmp_path / "images" / "val" / "dog").mkdir()
    shutil.copy(folder / "val" / "cat" / "0.png", tmp_path / "images" / "val" / "dog" / "0.png")
    with pytest.raises(keepgrad.ConfigError, match="has num_classes=3, and this run has 4"):
        trainer(tmp_path / "images", tmp_path / "run", resume=True)
    done = command("eval", str(tmp_path / "run"), "--data", str(tmp_path / "images"), "--cpu")
    assert done.returncode == 2
    assert "is for 3 classes" in done.stderr


def test_weights_that_are_no_numbers_do_not_replace_good_ones(folder, tmp_path):
    run = trainer(folder, tmp_path / "run", epochs=1)
    run.run()
    before = (tmp_path / "run" / "state.pt").read_bytes()
    with torch.no_grad():
        run.bare.head.weight[0, 0] = float("nan")
    with pytest.raises(keepgrad.DivergedError, match=r"head\.weight has values that are no finite numbers"):
        run.save()
    assert (tmp_path / "run" / "state.pt").read_bytes() == before


def test_folders_are_found_by_their_usual_names(folder, tmp_path):
    import shutil

    shutil.copytree(folder / "train", tmp_path / "a" / "train")
    shutil.copytree(folder / "val", tmp_path / "a" / "test")
    task = trainer(tmp_path / "a", tmp_path / "run").task
    assert (len(task.source), len(task.val)) == (42, 12)
    task = trainer(folder / "train", tmp_path / "run2").task
    assert (len(task.source), len(task.val)) == (38, 4)
    shutil.rmtree(tmp_path / "a" / "train")
    with pytest.raises(keepgrad.InputError, match="has test/ but no train/"):
        trainer(tmp_path / "a", tmp_path / "run3")


def test_images_of_other_channels(folder, tmp_path):
    for channels in (1, 4):
        outcome = trainer(
            folder, tmp_path / f"{channels}", epochs=1, model_kwargs={"patch_size": 8, "in_chans": channels}
        )
        assert outcome.task.sample()[0].shape[1] == channels
        outcome.run()


def test_a_loss_that_is_no_number_names_the_step(folder, tmp_path):
    run = trainer(folder, tmp_path / "run", lr=1e30, warmup_epochs=0)
    with pytest.raises(keepgrad.DivergedError, match=r"the loss is (nan|inf) at step \d+, in epoch 1"):
        run.run()


def test_losses_read_now_and_then_are_those_of_every_step(folder, tmp_path):
    """On an accelerator the losses of some steps are read together."""
    outcomes = []
    for every in (1, 3):
        run = trainer(folder, tmp_path / f"{every}", epochs=2)
        run.read_every = every
        outcomes.append(run.run().history)
    assert [row["train_loss"] for row in outcomes[0]] == [row["train_loss"] for row in outcomes[1]]


def test_a_nan_loss_that_is_not_read_yet_reaches_no_checkpoint(folder, tmp_path):
    run = trainer(folder, tmp_path / "run", epochs=2, save_every=2)
    run.read_every = 10**6
    loss = run.task.loss
    run.task.loss = lambda *args: loss(*args) * (float("nan") if run.state.step == 3 else 1)
    with pytest.raises(keepgrad.DivergedError, match="the loss is nan at step 3, in epoch"):
        run.run()
    assert torch.load(tmp_path / "run" / "state.pt", weights_only=True)["step"] == 2


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--data", "no/such/folder"), "no/such/folder: there is no such folder or file"),
        (("--batch-size", "64"), "the data is less than one step"),
        (("--model", "vit_smal"), "did you mean"),
        (("--model-kwargs", "wings=2"), "'wings' is no argument of a model that can be chosen; these are"),
        (("--opt", "adamwings"), "see timm.optim.list_optimizers()"),
        (("--fsdp",), "start with torchrun"),
        (("--model", "test_resnet", "--model-kwargs", ""), "has no block that keepgrad knows"),
    ],
)
def test_wrong_arguments_are_one_clear_line(folder, tmp_path, args, words):
    done = keepgrad_train(folder, tmp_path / "run", *args)
    assert done.returncode == 2
    assert words in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "state.pt").exists()
