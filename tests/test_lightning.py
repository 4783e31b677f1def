"""The callback for Lightning, in one process and in two."""

import copy
import csv
import logging
import os
import subprocess
import sys

import pytest
import torch
from conftest import agreement, assert_same, images, vit

import keepgrad
from keepgrad.patch import masks_drawn

lightning = pytest.importorskip("lightning.pytorch")
from keepgrad.integrations.lightning import KeepgradCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


class Task(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = vit()
        self.seen, self.kept = [], []

    def training_step(self, batch, _):
        loss = self.net(batch).square().mean()
        patch = vars(self.net).get("forward")
        self.seen.append("plain" if patch is None else "exact" if patch.shared.exact else "kept")
        self.kept.append([kept.tolist() for kept in masks_drawn(self.net).values()])
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Sharded(Task):
    """Sharded by block, as FSDP2 is used; the class is that of a model that is there before."""

    def configure_model(self):
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for block in self.net.blocks:
            fully_shard(block, mesh=self.device_mesh["data_parallel"], mp_policy=policy)
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"], mp_policy=policy)


class Late(Task):
    """The model is made when Lightning asks for it."""

    def __init__(self):
        super().__init__()
        del self.net

    def configure_model(self):
        self.net = vit()


def fit(task, folder, *callbacks, resume=None, steps=4, **options):
    defaults = {"accelerator": "cpu", "devices": 1, "max_steps": steps, "logger": False, "enable_checkpointing": False}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "barebones": False}
    trainer = lightning.Trainer(default_root_dir=folder, callbacks=list(callbacks), **{**defaults, **quiet, **options})
    data = torch.utils.data.DataLoader(list(images(batch=2)), batch_size=2)  # a step an epoch
    trainer.fit(task, data, ckpt_path=resume)
    return trainer


def is_plain(task):
    return not any(getattr(vars(m).get("forward"), "is_of_keepgrad", False) for m in task.modules())


def test_the_callback_applies_for_the_length_of_a_fit(tmp_path, caplog):
    from lightning.pytorch.loggers import CSVLogger

    caplog.set_level(logging.INFO, "keepgrad")
    task, logger = Task(), CSVLogger(tmp_path)
    callback = KeepgradCallback(keep_ratio=0.5, exact_last=0.5, cosine_every=1, seed=0)
    fit(task, tmp_path, callback, logger=logger, log_every_n_steps=1)
    assert task.seen == ["kept", "kept", "exact", "exact"]
    assert is_plain(task)
    assert not task.net.grad_checkpointing
    assert "keepgrad plan for VisionTransformer" in caplog.text
    logger.save()
    with open(os.path.join(logger.log_dir, "metrics.csv")) as file:
        rows = [row for row in csv.DictReader(file) if row["keepgrad/cosine"]]
    assert [row["step"] for row in rows] == ["0", "1"]
    assert all(0.3 < float(row["keepgrad/cosine"]) < 0.99999 for row in rows)
    assert 0 < float(rows[0]["keepgrad/saved_bytes"]) < float(rows[0]["keepgrad/saved_bytes_full"])


@pytest.mark.parametrize("options", [{}, {"precision": "bf16-mixed"}], ids=str)
def test_ratio_one_trains_as_the_plain_model_does(tmp_path, options):
    task = Task()
    twin = copy.deepcopy(task)
    fit(task, tmp_path, KeepgradCallback(keep_ratio=1.0, module="net"), steps=2, **options)
    fit(twin, tmp_path, steps=2, **options)
    assert set(task.seen) == {"kept"}
    assert agreement(Task(), task, twin) > (0.99 if "precision" in options else 0.99999)


def test_a_model_that_is_made_late_is_patched_late(tmp_path):
    task = Late()
    fit(task, tmp_path, KeepgradCallback(), steps=1)
    assert task.seen == ["kept"]


def test_setup_and_teardown_can_be_repeated(tmp_path):
    task, callback = Task(), KeepgradCallback(keep_ratio=0.5)
    trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, barebones=True)
    for _ in range(2):
        callback.setup(trainer, task, "fit")
    assert not is_plain(task)
    for _ in range(2):
        callback.teardown(trainer, task, "fit")
    assert is_plain(task)
    callback.setup(trainer, task, "validate")
    assert is_plain(task)


def test_a_fit_that_fails_leaves_a_plain_model(tmp_path):
    class Broken(Task):
        def training_step(self, batch, number):
            super().training_step(batch, number)
            raise InterruptedError

    task = Broken()
    with pytest.raises(InterruptedError):
        fit(task, tmp_path, KeepgradCallback())
    assert task.seen == ["kept"]
    assert is_plain(task)


def test_a_checkpoint_loads_without_keepgrad_and_a_resumed_fit_goes_on_with_its_masks(tmp_path):
    options = {"keep_ratio": 0.5, "mask": "random", "seed": 3}
    unbroken, first, resumed = Task(), Task(), Task()
    fit(unbroken, tmp_path, KeepgradCallback(**options))
    trainer = fit(first, tmp_path, KeepgradCallback(**options), steps=2)
    path = tmp_path / "two.ckpt"
    trainer.save_checkpoint(path)
    found = torch.load(path, weights_only=True)
    Task().load_state_dict(found["state_dict"])
    assert "keepgrad" not in str(found["callbacks"])
    fit(resumed, tmp_path, KeepgradCallback(**options), resume=path)
    assert resumed.kept == unbroken.kept[2:]
    assert_same(resumed.state_dict(), unbroken.state_dict(), rtol=0, atol=0)


def test_which_module_is_asked_for_where_it_is_not_clear(tmp_path):
    class Two(Task):
        def __init__(self):
            super().__init__()
            self.other = vit()

        def training_step(self, batch, _):
            return self.net(batch).square().mean() + self.other(batch).square().mean()

    with pytest.raises(keepgrad.ConfigError, match="net, other"):
        fit(Two(), tmp_path, KeepgradCallback())
    with pytest.raises(keepgrad.ConfigError, match="module='nothing'"):
        fit(Task(), tmp_path, KeepgradCallback(module="nothing"))
    task, callback = Two(), KeepgradCallback(module="other")
    fit(task, tmp_path, callback, steps=1)
    assert len(callback.training.plan.sites) == 4


def in_two_processes(kind):
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

    torch.set_num_threads(1)
    task = {"ddp": Task, "fsdp2": Sharded}[kind]()
    strategy = DDPStrategy() if kind == "ddp" else ModelParallelStrategy(process_group_backend="gloo")
    options = {"keep_ratio": 0.5, "mask": "random", "seed": 1}
    fit(task, ".", KeepgradCallback(**options), devices=2, strategy=strategy, steps=2)
    assert task.seen == ["kept", "kept"]
    assert is_plain(task)
    if kind == "fsdp2":
        whole = {name: p.full_tensor() for name, p in task.net.state_dict().items()}
        task.net = vit()
        task.net.load_state_dict(whole)
    # Each process has one of the two images; a plain loop over both gives the same.
    wanted = vit()
    keepgrad.apply(wanted, **options)
    optimizer = torch.optim.SGD(wanted.parameters(), lr=0.01)
    for step in range(2):
        keepgrad.set_step(wanted, step)
        optimizer.zero_grad()
        wanted(images(batch=2)).square().mean().backward()
        optimizer.step()
    near = agreement(vit(), task.net, wanted)
    assert near > (0.99 if kind == "fsdp2" else 0.99999), near
    print("trained")


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes(tmp_path, kind):
    """As Lightning starts them: the first process starts the second, as the same script."""
    paths = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    script = tmp_path / "train.py"
    script.write_text(f"import test_lightning\ntest_lightning.in_two_processes({kind!r})\n")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("trained") == 2, done.stderr[-3000:]
