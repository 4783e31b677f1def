"""What a run is continued from: killed or stopped at any moment, it ends with the same bits."""

import dataclasses
import hashlib
import os
import signal

import pytest
import torch
import yaml
from processes import run
from training import RICH, assert_equal_bits, command, keepgrad_train, trainer, weights

import keepgrad
from keepgrad import flags
from keepgrad.train.config import TrainConfig
from keepgrad.train.loop.state import MARK, State

# Resumption


KILLS = """
import os, signal, sys
from pathlib import Path
from keepgrad.cli import main
from keepgrad.train.loop import state, trainer as loop

point, number = sys.argv[1], int(sys.argv[2])
count = 0

def die(*_):
    global count
    count += 1
    if count == number:
        os.kill(os.getpid(), signal.SIGKILL)

def before(owner, name):
    own = getattr(owner, name)
    def replaced(*args, **kwargs):
        die()
        return own(*args, **kwargs)
    setattr(owner, name, replaced)

if point == "step":
    before(loop.Trainer, "_step")
elif point == "update":
    import torch
    before(torch.optim.AdamW, "step")
elif point == "evaluation":
    before(loop.Trainer, "_end_epoch")
elif point == "weights":
    before(loop.Trainer, "_write_weights")
elif point == "state":
    import torch
    own_save = torch.save
    def half(found, path):
        own_save(found, path)
        count_now = globals()["count"] + 1
        if count_now == number:
            os.truncate(path, os.path.getsize(path) // 2)
        die()
    state.torch.save = half
elif point == "replace":
    before(os, "replace")
sys.exit(main(sys.argv[3:]))
"""


@pytest.fixture(scope="module")
def unbroken(folder, tmp_path_factory):
    output = tmp_path_factory.mktemp("unbroken") / "run"
    outcome = trainer(folder, output, **RICH).run()
    return output, outcome


def rich_args(folder, output):
    config = flags.make(TrainConfig, {**RICH, "data": str(folder), "output": str(output), "resume": True})
    path = output.parent / "rich.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in dataclasses.asdict(config).items() if v is not None}))
    return ("train", "--config", str(path))


@pytest.mark.parametrize(
    ("point", "number"),
    [("step", 1), ("step", 5), ("update", 8), ("evaluation", 2), ("weights", 4), ("state", 4), ("replace", 11)],
)
def test_killed_at_any_moment_a_resumed_run_ends_with_the_same_bits(folder, tmp_path, unbroken, point, number):
    (tmp_path / "kills.py").write_text(KILLS)
    args = rich_args(folder, tmp_path / "run")
    killed = run((str(tmp_path / "kills.py"), point, str(number), *args))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    done = command(*args)
    assert done.returncode == 0, done.stderr
    output, outcome = unbroken
    for name in ("last", "best"):
        assert_equal_bits(weights(tmp_path / "run", name), weights(output, name))
    state, wanted = State.read(tmp_path / "run" / "state.pt"), State.read(output / "state.pt")
    for row, own in zip(outcome.history, state.history, strict=True):
        for key in ("epoch", "step", "lr", "train_loss", "val_loss", "top1"):
            assert own[key] == row[key], key
    assert torch.equal(
        state.optimizer["state"]["head.weight"]["exp_avg"], wanted.optimizer["state"]["head.weight"]["exp_avg"]
    )
    assert not list((tmp_path / "run").glob(".*partial*"))


def test_loader_processes_change_nothing(folder, tmp_path, unbroken):
    trainer(folder, tmp_path / "run", **{**RICH, "workers": 2}).run()
    assert_equal_bits(weights(tmp_path / "run"), weights(unbroken[0]))


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_stops_between_two_steps_and_nothing_is_lost(folder, tmp_path, name, unbroken):
    (tmp_path / "kills.py").write_text(KILLS.replace("SIGKILL", name))
    args = rich_args(folder, tmp_path / "run")
    stopped = run((str(tmp_path / "kills.py"), "step", "5", *args))
    assert stopped.returncode == 130
    assert f"{name} after step 5 of 9; --resume --output {tmp_path / 'run'} continues" in stopped.stderr
    assert State.read(tmp_path / "run" / "state.pt").step == 5
    # Just as the message says: the settings are those of the run.
    done = command("train", "--resume", "--output", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert "continuing" in done.stdout
    assert_equal_bits(weights(tmp_path / "run"), weights(unbroken[0]))


def test_a_failed_evaluation_is_all_that_is_repeated(folder, tmp_path):
    import shutil

    shutil.copytree(folder, tmp_path / "images")
    broken = tmp_path / "images" / "val" / "bird" / "3.png"
    whole = broken.read_bytes()
    broken.write_bytes(whole[:100])
    run = trainer(tmp_path / "images", tmp_path / "run", epochs=1)
    with pytest.raises(keepgrad.InputError, match=r"bird/3\.png cannot be read as an image"):
        run.run()
    broken.write_bytes(whole)
    again = trainer(tmp_path / "images", tmp_path / "run", epochs=1, resume=True)
    again._step = None  # no step is left to do
    found = again.run().history[0]
    wanted = trainer(folder, tmp_path / "other", epochs=1).run().history[0]
    for key in ("epoch", "step", "lr", "train_loss", "val_loss", "top1"):
        assert found[key] == wanted[key]


def test_resume_starts_anew_where_there_is_nothing_and_does_nothing_where_all_is_done(folder, tmp_path):
    first = keepgrad_train(folder, tmp_path / "run", "--resume")
    assert first.returncode == 0, first.stderr
    before = (tmp_path / "run" / "last.safetensors").read_bytes()
    again = keepgrad_train(folder, tmp_path / "run", "--resume")
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "run" / "last.safetensors").read_bytes() == before
    without = keepgrad_train(folder, tmp_path / "run")
    assert without.returncode == 2
    assert "has a run already; give --resume to continue it, or another --output" in without.stderr


def test_a_state_cannot_run_code(folder, tmp_path):
    trainer(folder, tmp_path / "run", epochs=1).run()
    path = tmp_path / "run" / "state.pt"
    torch.save({"step": os.system}, path)
    path.write_bytes(path.read_bytes() + MARK + hashlib.sha256(path.read_bytes()).digest())
    with pytest.raises(keepgrad.FileError, match=r"state\.pt is not a state that can be resumed: Weights only"):
        trainer(folder, tmp_path / "run", resume=True)
