"""Output folders: one run at a time, settings that are whole, a state that is what was written."""

import subprocess
import sys

import pytest
from test_train import trainer

import keepgrad
from keepgrad.cli import main
from keepgrad.files import locked, written_whole

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
