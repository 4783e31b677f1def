"""Output folders: one run at a time, settings that are whole, a state that is what was written."""

import subprocess
import sys

import pytest
import torch
from training import trainer

import keepgrad
from keepgrad.cli import main
from keepgrad.files import locked, written_whole
from keepgrad.train.classify import open_weights
from keepgrad.train.loop.state import State, write_weights

HOLDS = """
import fcntl, sys
file = open(sys.argv[1], "a")
fcntl.lockf(file, fcntl.LOCK_EX)
print("has it", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that has the folder `run`."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").write_text("process 7 on a machine")
    args = [sys.executable, "-c", HOLDS, str(tmp_path / "run" / ".lock")]
    with subprocess.Popen(args, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        yield process
        process.kill()


def test_two_runs_in_one_folder_are_refused_and_a_dead_one_blocks_nobody(folder, tmp_path, holder):
    with pytest.raises(keepgrad.FileError, match="run is in use by process 7 on a machine; wait for its end, or give"):
        trainer(folder, tmp_path / "run")
    holder.kill()
    holder.wait()
    with locked(tmp_path / "run"):
        assert "process" in (tmp_path / "run" / ".lock").read_text()


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    """As on a read-only file system, where nothing can be taken away either."""

    def refuses(*_, **__):
        raise OSError(30, "Read-only file system")

    (tmp_path / "run").mkdir()
    for name in ("open", "unlink", "write_text"):
        monkeypatch.setattr("pathlib.Path." + name, refuses)
    with pytest.raises(keepgrad.FileError, match="Read-only file system"), locked(tmp_path / "run"):
        pass
    with pytest.raises(keepgrad.FileError, match="Read-only file system"), written_whole(tmp_path / "a") as partial:
        partial.write_text("a")


def test_resume_refuses_settings_that_are_missing_or_cut(folder, tmp_path, capsys):
    run = trainer(folder, tmp_path / "run", epochs=1)
    run.save()
    run.stack.close()
    path = tmp_path / "run" / "config.yaml"
    whole = path.read_text()
    for cut in (0, 10, whole.index("lr:"), len(whole) // 2, len(whole) - 3):
        path.write_text(whole[:cut])
        assert main(["train", "--resume", "--output", str(tmp_path / "run")]) == 2
        assert "config.yaml is not whole" in capsys.readouterr().err
    path.unlink()
    assert main(["train", "--resume", "--output", str(tmp_path / "run")]) == 2
    assert "but no config.yaml, so the settings of the run are not known" in capsys.readouterr().err
    assert not (tmp_path / "run" / "keepgrad").exists()


def test_a_state_with_flipped_bits_or_missing_weights_is_refused(folder, tmp_path):
    run = trainer(folder, tmp_path / "run", epochs=1)
    run.save()
    path = tmp_path / "run" / "state.pt"
    whole = path.read_bytes()
    for place in (100, len(whole) // 3, len(whole) // 2, len(whole) - 100, len(whole) - 1):
        flipped = bytearray(whole)
        flipped[place] ^= 4
        path.write_bytes(flipped)
        with pytest.raises(keepgrad.FileError, match=r"state\.pt is not a state that can be resumed: its content"):
            State.read(path)
    path.write_bytes(whole[:-1])
    with pytest.raises(keepgrad.FileError, match="its end is missing"):
        State.read(path)
    path.write_bytes(whole)
    state = State.read(path)
    del state.model["head.weight"]
    state.write(path)
    with pytest.raises(keepgrad.FileError, match=r"has head\.weight of shape None, and the model of \(3, 64\)"):
        trainer(folder, tmp_path / "run", epochs=1, resume=True)


@pytest.mark.parametrize(
    "change",
    [
        {"model_kwargs": {"num_classes": 3, "pretrained": True, "pretrained_cfg_overlay": {"url": "http://127.0.0.1"}}},
        {"model_kwargs": {"checkpoint_path": "/etc/passwd"}},
        {"model_kwargs": {"img_size": {"a": 1}}},
        {"model_kwargs": [1]},
        {"model": "hf:somebody/something"},
        {"model": None},
    ],
)
def test_metadata_choose_architectures_only(tmp_path, change):
    about = {"model": "test_vit", "size": 32, "model_kwargs": {"num_classes": 3, "patch_size": 8}, **change}
    write_weights(tmp_path / "a.safetensors", {"a": torch.zeros(1)}, about)
    with pytest.raises(keepgrad.ConfigError, match=r"no argument of a model|: give|no name of timm"):
        open_weights(tmp_path / "a.safetensors")
