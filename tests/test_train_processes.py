"""Training in many processes."""

import subprocess
import sys

import pytest
import torch
from processes import free_port
from training import assert_close, assert_equal_bits, run_processes, weights

from keepgrad.train.loop.state import State


@pytest.mark.parametrize("fsdp", [False, True], ids=["ddp", "fsdp2"])
def test_two_processes_train_like_one(folder, tmp_path, fsdp):
    settings = {"aug": False, "accumulate": 2, "opt": "sgd", "lr": 0.05, "clip_grad": 1.0}
    alone, output = run_processes(tmp_path, "alone", 1, folder, **settings)
    both, shared = run_processes(tmp_path, "both", 2, folder, **settings, batch_size=3, fsdp=fsdp)
    assert len(both["grads"]) == len(alone["grads"]) == 6
    for found, wanted in zip(both["grads"], alone["grads"], strict=True):
        assert_close(found, wanted)
    assert both["losses"] == pytest.approx(alone["losses"], rel=1e-4)
    for found, wanted in zip(both["vals"], alone["vals"], strict=True):
        assert found == pytest.approx(wanted, rel=1e-4)
    assert_close(weights(shared), weights(output))


@pytest.mark.parametrize("fsdp", [False, True], ids=["ddp", "fsdp2"])
def test_a_run_of_two_processes_is_resumed(folder, tmp_path, fsdp):
    settings = {"batch_size": 3, "fsdp": fsdp, "aug": False, "save_every": 1}
    whole, _ = run_processes(tmp_path, "whole", 2, folder, **settings)
    run_processes(tmp_path, "parts", 2, folder, **settings, stop_after=5)
    state = State.read(tmp_path / "parts" / "state.pt")
    assert state.step == 5
    assert state.model["head.weight"].shape == state.optimizer["state"]["head.weight"]["exp_avg"].shape == (3, 64)
    rest, _ = run_processes(tmp_path, "parts", 2, folder, **settings, resume=True)
    assert len(rest["grads"]) == len(whole["grads"]) - 5
    for name, wanted in whole["grads"][5].items():
        torch.testing.assert_close(rest["grads"][0][name], wanted, rtol=1e-4, atol=1e-7, msg=name)
    assert_equal_bits(weights(tmp_path / "parts"), weights(tmp_path / "whole"))


def test_torchrun_and_accelerate_start_the_command(folder, tmp_path):
    launches = {
        "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"],
        "accelerate": [
            *("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--num_machines", "1"),
            *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", str(free_port()), "-m"),
        ],
    }
    for name, launch in launches.items():
        args = ["keepgrad", "train", "--data", str(folder), "--output", str(tmp_path / name), "--model", "test_vit"]
        args += ["--size", "32", "--epochs", "1", "--batch-size", "3", "--workers", "0", "--cpu"]
        done = subprocess.run([sys.executable, *launch, *args], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("results:") == 1
        assert (tmp_path / name / "best.safetensors").exists()
