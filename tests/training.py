"""What tests of training share: small settings, a run in Python, by the command and in many processes."""

import torch
import yaml
from processes import run
from safetensors.torch import load_file

from keepgrad import flags
from keepgrad.train.classify import Classification
from keepgrad.train.config import TrainConfig
from keepgrad.train.loop import Trainer, accelerator_for

SMALL = {
    "model": "test_vit",
    "size": 32,
    "model_kwargs": {"patch_size": 8},
    "epochs": 3,
    "batch_size": 6,
    "lr": 1e-3,
    "warmup_epochs": 1,
    "workers": 0,
    "cpu": True,
}
# Everything that a resumed run has to take up again.
RICH = {
    **SMALL,
    **{"ema": 0.9, "mixup": 0.4, "cutmix": 0.5, "drop_path": 0.2, "accumulate": 2, "clip_grad": 1.0},
    **{"keep_ratio": 0.5, "erasing": 0.3, "auto_augment": "rand-m5-inc1", "layer_decay": 0.8, "save_every": 1},
}


def trainer(data, output, **settings):
    config = flags.make(TrainConfig, {**SMALL, "data": str(data), "output": str(output), **settings})
    accelerator = accelerator_for(config)
    return Trainer(Classification(config, accelerator), config, accelerator)


def command(*args, **options):
    """The command `keepgrad` in a process of its own."""
    return run(("-m", "keepgrad", *args), **options)


def keepgrad_train(data, output, *more, **options):
    small = (
        *("--model", "test_vit", "--size", "32", "--model-kwargs", "patch_size=8", "--epochs", "2", "--workers", "0"),
        *("--batch-size", "6", "--cpu", "--data", str(data), "--output", str(output)),
    )
    return command("train", *small, *more, **options)


def weights(output, name="last"):
    return load_file(output / f"{name}.safetensors")


def assert_equal_bits(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def assert_close(a, b, rtol=1e-3, atol=1e-5):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


WORKER = """
import sys
import torch
from keepgrad import flags
from keepgrad.train.loop import trainer as loop
from keepgrad.train.classify import Classification
from keepgrad.train.config import TrainConfig

torch.set_num_threads(1)
# The same masks in every process, so that a batch in pieces is the batch.
own = loop.mixed_seed
loop.mixed_seed = lambda seed, step, number, process: own(seed, step, number, 0)
config = flags.make(TrainConfig, flags.read_yaml(__import__("pathlib").Path(sys.argv[1])))
accelerator = loop.accelerator_for(config)
trainer = loop.Trainer(Classification(config, accelerator), config, accelerator)
found = []
if len(sys.argv) > 3:
    save = trainer.save

    def save_and_stop():
        save()
        if trainer.state.step == int(sys.argv[3]):
            if accelerator.num_processes > 1:
                torch.distributed.destroy_process_group()
            sys.exit()

    trainer.save = save_and_stop

def note(optimizer, *_):
    grads = {}
    for name, p in trainer.bare.named_parameters():
        grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        grads[name] = grad.clone()
    found.append(grads)

trainer.optimizer.register_step_pre_hook(note)
outcome = trainer.run()
if accelerator.is_main_process:
    losses = [row["train_loss"] for row in outcome.history]
    vals = [(row["val_loss"], row["top1"]) for row in outcome.history]
    torch.save({"grads": found, "losses": losses, "vals": vals}, sys.argv[2])
if accelerator.num_processes > 1:
    torch.distributed.destroy_process_group()
"""


def run_processes(tmp_path, name, processes, folder, stop_after=None, **settings):
    (tmp_path / "worker.py").write_text(WORKER)
    output = tmp_path / name
    config = {**SMALL, "data": str(folder), "output": str(output), "epochs": 2, "keep_ratio": 0.5, **settings}
    (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(config))
    args = [str(tmp_path / "worker.py"), str(tmp_path / f"{name}.yaml"), str(tmp_path / f"{name}.pt")]
    args += [] if stop_after is None else [str(stop_after)]
    done = run(args, processes)
    assert done.returncode == 0, done.stderr
    return None if stop_after else torch.load(tmp_path / f"{name}.pt"), output
