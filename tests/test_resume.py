"""Runs that stop: at a signal, at data that cannot be read, with another process; and how they go on."""

import signal
import subprocess
import sys

import pytest
import torch
from processes import run
from training import assert_close, assert_equal_bits, run_processes, trainer, weights

import keepgrad
from keepgrad import flags
from keepgrad.cli import main
from keepgrad.train.config import RECIPES, TrainConfig
from keepgrad.train.loop.state import State

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
ARGS = (
    *("train", "--model", "test_vit", "--size", "32", "--model-kwargs", "patch_size=8", "--epochs", "2"),
    *("--warmup-epochs", "1", "--batch-size", "3", "--keep-ratio", "0.5", "--ema", "0.9", "--cpu", "--workers", "2"),
)
HAPPENS = """
import multiprocessing, os, pathlib, subprocess, sys, time
from torch.utils.data import get_worker_info
from keepgrad.cli import main
from keepgrad.data import images, order
from keepgrad.train import loop

what, number, process = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
step, following, collated = loop.Trainer._step, order._next, images._collated
waits = pathlib.Path(__file__).with_name("waits")
asked = made = 0

def end_group():
    # By another process: torch's loader processes look at who sends a signal.
    subprocess.run(["sh", "-c", f"trap '' TERM; kill -TERM -{os.getpgrp()}"], check=True)

def watched(trainer, group):
    if trainer.state.step + 1 == number and trainer.accelerator.process_index == process:
        if what == "worker":
            multiprocessing.active_children()[0].kill()
        for _ in range({"once": 1, "twice": 2}.get(what, 0)):
            end_group()
    return step(trainer, group)

def asking(iterator):
    global asked
    asked += 1
    if asked == number:
        waits.touch()
    return following(iterator)

def making(samples):
    # In a loader process, when the training process waits for the batch that it makes.
    global made
    made += 1
    worker = get_worker_info()
    if what == "waiting" and worker.id + (made - 1) * worker.num_workers == number - 1:
        while not waits.exists():
            time.sleep(0.01)
        time.sleep(0.2)
        end_group()
    return collated(samples)

loop.Trainer._step, order._next, images._collated = watched, asking, making
if __name__ == "__main__":
    sys.exit(main(sys.argv[4:]))
"""


def launched(processes, *args):
    """Python in so many processes, in a process group of its own."""
    return run(args, processes, timeout=170)


def completed(processes, *args):
    """The command, which has to end well."""
    if processes == 1:
        assert main(args) == 0
        return
    done = launched(processes, "-m", "keepgrad", *args)
    assert done.returncode == 0, done.stderr


def happens(tmp_path, folder, processes, what, step, process=0):
    """A run with something that happens at the beginning of a step of one process."""
    (tmp_path / "happens.py").write_text(HAPPENS)
    args = (what, str(step), str(process), *ARGS, "--data", str(folder), "--output", str(tmp_path / "run"))
    return launched(processes, str(tmp_path / "happens.py"), *args)


def resumed(tmp_path, processes):
    completed(processes, "train", "--resume", "--output", str(tmp_path / "run"))
    return weights(tmp_path / "run")


def said(done):
    """The lines of keepgrad itself, and nothing worse."""
    assert "Traceback" not in done.stderr, done.stderr
    return [line for line in done.stderr.splitlines() if line.startswith("keepgrad train: ")]


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    """What unbroken runs of one and of two processes end with."""
    found = {}
    for processes in (1, 2):
        output = tmp_path_factory.mktemp("whole") / "run"
        completed(processes, *ARGS, "--data", str(folder), "--output", str(output))
        found[processes] = weights(output)
    return found


# Another number of processes


def test_any_number_of_processes_goes_on_from_any_other(folder, tmp_path):
    settings = {"aug": False, "opt": "sgd", "lr": 0.05, "save_every": 1}
    trainer(folder, tmp_path / "alone", epochs=2, keep_ratio=0.5, **settings).run()
    split = [(1, False), (2, False), (3, True), (1, False)]
    for number, (processes, fsdp) in enumerate(split):
        last = number + 1 == len(split)
        more = {"batch_size": 6 // processes, "fsdp": fsdp, "resume": True}
        run_processes(tmp_path, "run", processes, folder, None if last else 2 * number + 2, **settings, **more)
    assert_close(weights(tmp_path / "run"), weights(tmp_path / "alone"))


def test_a_step_has_as_many_samples_as_before_on_any_number_of_processes(folder, tmp_path):
    more = ("--data", str(folder), "--output", str(tmp_path / "run"), "--workers", "0", "--batch-size", "6")
    for epochs, (processes, batch) in enumerate([(1, 6), (2, 3), (1, 6)], start=1):
        completed(processes, *ARGS, *more, "--resume", "--epochs", str(epochs))
        assert State.read(tmp_path / "run" / "state.pt").step == 7 * epochs
        assert f"batch_size: {batch}\n" in (tmp_path / "run" / "config.yaml").read_text()


def test_samples_of_a_step_over_other_numbers_of_processes():
    config = flags.make(TrainConfig, {"batch_size": 12, "accumulate": 2})
    found = {n: config.split(24, n) for n in (1, 2, 3, 4, 8)}
    assert {n: (own.batch_size, own.accumulation(n)) for n, own in found.items()} == {
        **{1: (12, 2), 2: (12, 1), 3: (8, 1), 4: (6, 1), 8: (3, 1)}
    }
    mixed = flags.make(TrainConfig, {"batch_size": 4, "mixup": 0.1})
    assert mixed.split(12, 2).batch_size == 2  # not 3: mixup takes pairs
    with pytest.raises(keepgrad.ConfigError, match="steps of 24 samples, which 5 processes cannot share equally"):
        config.split(24, 5)


# Signals


@pytest.mark.parametrize(("processes", "what"), [(1, "once"), (1, "waiting"), (2, "twice")])
def test_a_signal_to_the_process_group_saves_the_state(folder, tmp_path, whole, processes, what):
    """In a step, while it waits for data, and twice as from a launcher that passes on what its group has had already.

    What waits would wait for a loader process that the signal has ended, if those did not leave signals alone.
    """
    steps = 28 // processes
    done = happens(tmp_path, folder, processes, what, 3, process=processes - 1)
    (line,) = said(done)
    assert f"SIGTERM after step 3 of {steps}; --resume --output {tmp_path / 'run'} continues" in line
    assert State.read(tmp_path / "run" / "state.pt").step == 3
    assert_equal_bits(resumed(tmp_path, processes), whole[processes])


def test_torchrun_passes_a_signal_on_and_the_state_is_saved(folder, tmp_path):
    args = (*ARGS, "--epochs", "1000", "--data", str(folder), "--output", str(tmp_path / "run"))
    run = subprocess.Popen(
        [*TORCHRUN, "2", "-m", "keepgrad", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for line in run.stdout:
        if line.startswith("epoch   1"):
            break
    run.send_signal(signal.SIGTERM)
    _, error = run.communicate(timeout=120)
    lines = [line for line in error.splitlines() if line.startswith("keepgrad train: ")]
    assert len(lines) == 1, error
    assert "SIGTERM after step" in lines[0]
    assert f"after step {State.read(tmp_path / 'run' / 'state.pt').step} of 7000" in lines[0]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_killed_loader_process_is_one_line_and_the_state_is_saved(folder, tmp_path, whole, processes):
    done = happens(tmp_path, folder, processes, "worker", 2, process=processes - 1)
    (line,) = said(done)
    assert "a process that loads data was killed" in line
    assert State.read(tmp_path / "run" / "state.pt").step >= 2
    assert_equal_bits(resumed(tmp_path, processes), whole[processes])


# Data that cannot be used


@pytest.mark.parametrize("split", ["train", "val"])
def test_an_unreadable_image_in_one_of_two_processes_saves_the_state(folder, tmp_path, whole, split):
    import shutil

    shutil.copytree(folder, tmp_path / "images")
    broken = tmp_path / "images" / split / "bird" / "3.png"
    intact = broken.read_bytes()
    broken.write_bytes(intact[:100])
    args = (*ARGS, "--data", str(tmp_path / "images"), "--output", str(tmp_path / "run"))
    done = launched(2, "-m", "keepgrad", *args)
    (line,) = said(done)
    assert "bird/3.png cannot be read as an image" in line
    step = State.read(tmp_path / "run" / "state.pt").step
    assert 0 < step < 7 if split == "train" else step == 7
    broken.write_bytes(intact)
    assert_equal_bits(resumed(tmp_path, 2), whole[2])


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_augmentation_names_the_image_and_saves_the_state(folder, tmp_path, workers):
    run = trainer(folder, tmp_path / "run", workers=workers, epochs=1)
    own = run.task.transform

    def fails_late(image):
        if image.getpixel((0, 0)) == marked:
            raise ValueError("bits must be between or equal to 1 and 8")
        return own(image)

    number = run.task.order.of(0)[3][2]
    marked = run.task.source.read(number)[0].getpixel((0, 0))
    run.task.transform = fails_late
    with pytest.raises(keepgrad.InputError, match=r"\.png cannot be augmented: bits must be") as error:
        run.run()
    assert run.task.source.name(number) in str(error.value)
    assert State.read(tmp_path / "run" / "state.pt").step == 3


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_runs(folder, tmp_path, recipe):
    model = "test_vit" if recipe.startswith("vit") else "test_convnext"
    args = ("--recipe", recipe, "--model", model, "--size", "32", "--batch-size", "14", "--global-batch", "14")
    # A seed with which posterize asks for no bits, once.
    args = (*args, "--seed", "12", "--epochs", "2", "--amp", "bf16", "--cpu", "--workers", "0", "--data", str(folder))
    completed(1, "train", *args, "--output", str(tmp_path / "run"))
    assert len(State.read(tmp_path / "run" / "state.pt").history) == 2


def test_the_recipes_augmentation_never_asks_for_no_bits(folder, tmp_path):
    """At its highest level posterize keeps 4 - 4 bits; Pillow from 13 on refuses that."""
    from PIL import Image

    run = trainer(folder, tmp_path / "run", auto_augment="rand-m10-inc1-n15")
    image = Image.new("RGB", (40, 40), (200, 100, 50))
    for seed in range(5):
        torch.manual_seed(seed)
        assert run.task.transform(image).shape == (3, 32, 32)
