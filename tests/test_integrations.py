"""The callbacks for the training loops of others."""

import copy
import gc
import logging
import os
import subprocess
import sys
import weakref

import pytest
import torch
from conftest import agreement, assert_same, spread
from torch import nn

import keepgrad
from keepgrad.patch import masks_drawn

transformers = pytest.importorskip("transformers")
from keepgrad.integrations.transformers import KeepgradCallback  # noqa: E402

LABELS = 3


def model_of(**kwargs):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_ratio": 2}
    config = transformers.Dinov2Config(**{**sizes, **kwargs}, image_size=16, patch_size=4, num_labels=LABELS)
    torch.manual_seed(0)
    return spread(transformers.Dinov2ForImageClassification(config))


class Pictures(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return {"pixel_values": torch.randn(3, 16, 16, generator=generator), "labels": index % LABELS}


class Watcher(transformers.TrainerCallback):
    """What a training did in each step: whether blocks were patched, and what they kept."""

    def __init__(self, stop_at=None):
        self.stop_at, self.exact, self.kept, self.grads = stop_at, [], {}, []

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        patch = vars(model).get("forward")
        self.exact.append(patch is None or patch.shared.exact)
        self.kept[state.global_step] = [kept.tolist() for kept in masks_drawn(model).values()]
        self.grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        if state.global_step == self.stop_at:
            raise InterruptedError


def trainer_of(model, folder, *callbacks, steps=4, data=None, **arguments):
    # Not Adam, which makes steps of noise where a gradient is zero but for rounding (biases of keys).
    defaults = {
        "optim": "sgd",
        "learning_rate": 0.01,
        "per_device_train_batch_size": 2,
        "max_steps": steps,
        "logging_steps": 2,
        "save_strategy": "no",
    }
    arguments = {**defaults, "report_to": "none", "use_cpu": True, "disable_tqdm": True, **arguments}
    args = transformers.TrainingArguments(str(folder), dataloader_pin_memory=False, **arguments)
    return transformers.Trainer(model, args, train_dataset=data or Pictures(), callbacks=list(callbacks))


def train(model, folder, *callbacks, resume=False, **arguments):
    trainer = trainer_of(model, folder, *callbacks, **arguments)
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer


def is_plain(model):
    return not any("forward" in vars(module) for module in model.modules())


def test_the_callback_applies_for_the_length_of_a_training(tmp_path, caplog):
    model, watcher = model_of(), Watcher()
    caplog.set_level(logging.INFO, "keepgrad")
    callback = KeepgradCallback(keep_ratio=0.5, seed=1, exact_last=0.5, cosine_every=1)
    trainer = train(model, tmp_path, callback, watcher)
    assert is_plain(model)
    assert watcher.exact == [False, False, True, True]
    assert not any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
    assert "keepgrad plan for Dinov2ForImageClassification" in caplog.text
    figures = [row for row in trainer.state.log_history if "keepgrad/cosine" in row]
    assert [row["step"] for row in figures] == [0, 1]
    assert all(0.5 < row["keepgrad/cosine"] < 0.99999 for row in figures)
    assert 0 < figures[0]["keepgrad/saved_bytes"] < figures[0]["keepgrad/saved_bytes_full"]


def test_ratio_one_trains_as_the_plain_model_does(tmp_path):
    model = model_of(hidden_dropout_prob=0.2)
    twin = copy.deepcopy(model)
    train(model, tmp_path, KeepgradCallback(keep_ratio=1.0, seed=0))
    train(twin, tmp_path)
    assert_same(model.state_dict(), twin.state_dict(), rtol=1e-4, atol=1e-5)


def test_the_cosine_is_that_of_the_step(tmp_path):
    """It is measured again here by the whole of the gradients, of a run with full backprop at the same weights."""
    model = model_of()
    twin = copy.deepcopy(model)
    kept, full = Watcher(), Watcher()
    trainer = train(model, tmp_path, KeepgradCallback(keep_ratio=0.3, seed=7, cosine_every=1), kept, steps=1)
    train(twin, tmp_path, full, steps=1)
    measured = next(row["keepgrad/cosine"] for row in trainer.state.log_history if "keepgrad/cosine" in row)
    # The callback draws a mask of its own, so two draws are as far from the exact gradient, not equally far.
    flat = [torch.cat([g.flatten() for g in found.grads[0].values()]) for found in (kept, full)]
    assert 0.2 < measured < 1
    assert abs(float(torch.cosine_similarity(*flat, dim=0)) - measured) < 0.15


class Broken(Pictures):
    """Its last pictures cannot be read: Trainer dies outside of a step."""

    def __getitem__(self, index):
        if index > 8:
            raise InterruptedError
        return super().__getitem__(index)


@pytest.mark.parametrize("where", ["step", "data"])
def test_a_training_that_dies_leaves_a_plain_model(tmp_path, where):
    model, watcher = model_of(), Watcher(stop_at=1 if where == "step" else None)
    data = Broken() if where == "data" else None
    with pytest.raises(InterruptedError):
        train(model, tmp_path, KeepgradCallback(keep_ratio=0.5), watcher, steps=8, data=data)
    assert watcher.exact
    assert not any(watcher.exact)
    assert is_plain(model)


def test_a_callback_that_is_added_later_is_a_context(tmp_path):
    """Without the context it leaves a patched model, which evaluates and is saved as the plain one is."""
    model, watcher, callback = model_of(), Watcher(stop_at=0), KeepgradCallback(keep_ratio=0.5)
    trainer = trainer_of(model, tmp_path)
    trainer.add_callback(callback)
    trainer.add_callback(watcher)
    with pytest.raises(InterruptedError), callback:
        trainer.train()
    assert watcher.exact == [False]
    assert is_plain(model)

    with pytest.raises(InterruptedError):
        trainer.train()
    assert not is_plain(model)
    trainer.save_model(tmp_path)
    loaded = transformers.Dinov2ForImageClassification.from_pretrained(tmp_path)
    assert_same(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    plain = trainer_of(loaded, tmp_path).predict(Pictures()).predictions
    assert (trainer.predict(Pictures()).predictions == plain).all()


def test_the_next_training_puts_a_model_back_that_a_callback_left_patched(tmp_path):
    model = model_of()
    trainer = trainer_of(model, tmp_path)
    trainer.add_callback(KeepgradCallback(keep_ratio=0.5))
    trainer.add_callback(Watcher(stop_at=1))
    with pytest.raises(InterruptedError):
        trainer.train()
    assert not is_plain(model)
    watcher = Watcher()
    train(model, tmp_path, KeepgradCallback(keep_ratio=0.25), watcher)
    assert watcher.exact == [False] * 4
    assert is_plain(model)
    keepgrad.apply(model)
    with pytest.raises(keepgrad.AlreadyAppliedError):
        train(model, tmp_path, KeepgradCallback())


def test_a_trainer_with_the_callback_is_freed_as_without(tmp_path):
    trainer = train(model_of(), tmp_path, KeepgradCallback(), steps=1)
    alive = weakref.ref(trainer)
    gc.disable()
    try:
        del trainer
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("options", [None, {"keep_ratio": 0.5, "mask": "random", "seed": 3}], ids=["plain", "keepgrad"])
def test_a_resumed_training_ends_as_an_unbroken_one(tmp_path, options):
    """To the bit, as Trainer alone does: it goes on with its optimizer and dropout, the callback with its masks.

    Not with a DINOv2: Trainer saves its weights by other names than the model's and loads only what has the model's.
    """
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    tower = {**sizes, "image_size": 16, "patch_size": 4, "attention_dropout": 0.2}
    config = transformers.SiglipConfig(vision_config=tower, num_labels=LABELS)

    def run(folder, *callbacks, **arguments):
        torch.manual_seed(0)
        model = spread(transformers.SiglipForImageClassification(config))
        callbacks = [*callbacks, *([] if options is None else [KeepgradCallback(**options)])]
        momentum = {"optim": "adamw_torch", "save_strategy": "steps", "save_steps": 2}
        train(model, folder, *callbacks, **momentum, **arguments)
        return model.state_dict()

    unbroken, resumed = Watcher(), Watcher()
    wanted = run(tmp_path / "a", unbroken)
    with pytest.raises(InterruptedError):
        run(tmp_path / "b", Watcher(stop_at=2))
    assert_same(run(tmp_path / "b", resumed, resume=True), wanted, rtol=0, atol=0)
    assert list(resumed.kept) == [2, 3]
    if options is not None:
        assert len({str(kept) for kept in unbroken.kept.values()}) == 4  # masks do change from step to step
    loaded = transformers.SiglipForImageClassification.from_pretrained(tmp_path / "b" / "checkpoint-4")
    assert_same(loaded.state_dict(), wanted, rtol=0, atol=0)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "arguments",
    [
        {"gradient_checkpointing": True},
        {"torch_compile": True, "torch_compile_backend": "aot_eager"},
        {"bf16": True},
        {"gradient_accumulation_steps": 2},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_the_ways_trainer_trains(tmp_path, arguments):
    torch.compiler.reset()
    model, watcher = model_of(num_hidden_layers=1), Watcher()
    twin = copy.deepcopy(model)
    train(model, tmp_path, KeepgradCallback(keep_ratio=1.0), watcher, steps=2, **arguments)
    train(twin, tmp_path, steps=2, **arguments)
    assert watcher.exact == [False, False]
    near = 0.99 if "bf16" in arguments else 0.99999
    assert agreement(model_of(num_hidden_layers=1), model, twin) > near


DDP = {"keep_ratio": 0.5, "mask": "random", "seed": 1, "cosine_every": 1}


def in_two_processes(folder):
    """One of two processes that train; it leaves what it found."""
    torch.set_num_threads(1)
    model, watcher = model_of(), Watcher()
    trainer = train(model, folder, KeepgradCallback(**DDP), watcher, steps=3, ddp_backend="gloo")
    found = {"grads": watcher.grads, "weights": model.state_dict(), "is_plain": is_plain(model)}
    found["wrapped"] = type(trainer.model_wrapped).__name__
    torch.save(found, folder / f"{trainer.args.process_index}.pt")


def test_two_processes_train_as_one(tmp_path):
    """Two of two pictures a step are one of four: gradients are equal in both processes, and those of one."""
    script = tmp_path / "start.py"
    script.write_text(
        f"import pathlib, test_integrations\ntest_integrations.in_two_processes(pathlib.Path({str(tmp_path)!r}))\n"
    )
    launch = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    paths = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    done = subprocess.run(
        [*launch, script], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    one, watcher = model_of(), Watcher()
    options = {name: value for name, value in DDP.items() if name != "cosine_every"}
    train(one, tmp_path, KeepgradCallback(**options), watcher, steps=3, per_device_train_batch_size=4)
    for step in range(3):
        assert_same(first["grads"][step], second["grads"][step], rtol=0, atol=0)
        assert_same(first["grads"][step], watcher.grads[step], rtol=1e-3, atol=1e-5)
    for found in (first, second):
        assert found["wrapped"] == "DistributedDataParallel"
        assert found["is_plain"]
        assert_same(found["weights"], one.state_dict(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options", [{"exact_last": 2}, {"exact_last": "x"}, {"cosine_every": -1}, {"keep_ratio": 0}, {"nonsense": 1}]
)
def test_wrong_options_are_refused_at_once(options):
    with pytest.raises(keepgrad.ConfigError):
        KeepgradCallback(**options)


def test_several_gpus_in_one_process_are_refused(tmp_path):
    model = model_of()
    trainer = trainer_of(model, tmp_path, KeepgradCallback())
    trainer.args._n_gpu = 2
    with pytest.raises(keepgrad.ConfigError, match=r"with 2 GPUs in one process.*nn\.DataParallel.*torchrun"):
        trainer.train()
    assert is_plain(model)


def test_a_cosine_of_nothing_is_refused(tmp_path):
    from keepgrad.integrations.training import Training

    model = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(keepgrad.ConfigError, match="cosine_every"):
        Training(preset="exact", store="int8", cosine_every=1).begin(model, False)
    assert is_plain(model)
