"""The callbacks for the training loops of others."""

import copy
import logging

import pytest
import torch
from conftest import assert_same, spread
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


def train(model, folder, *callbacks, resume=False, steps=4, **arguments):
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
    trainer = transformers.Trainer(model, args, train_dataset=Pictures(), callbacks=list(callbacks))
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


def test_a_training_that_died_leaves_a_model_that_can_be_trained_again(tmp_path):
    model = model_of()
    with pytest.raises(InterruptedError):
        train(model, tmp_path, KeepgradCallback(keep_ratio=0.5), Watcher(stop_at=1))
    assert not is_plain(model)
    watcher = Watcher()
    train(model, tmp_path, KeepgradCallback(keep_ratio=0.25), watcher)
    assert watcher.exact == [False] * 4
    assert is_plain(model)
    keepgrad.apply(model)
    with pytest.raises(keepgrad.AlreadyAppliedError):
        train(model, tmp_path, KeepgradCallback())


def test_a_resumed_training_draws_the_masks_of_an_unbroken_one(tmp_path):
    options = {"keep_ratio": 0.5, "mask": "random", "seed": 3}
    unbroken, resumed = Watcher(), Watcher()
    train(model_of(), tmp_path / "a", KeepgradCallback(**options), unbroken)
    saves = {"save_strategy": "steps", "save_steps": 2}
    with pytest.raises(InterruptedError):
        train(model_of(), tmp_path / "b", KeepgradCallback(**options), Watcher(stop_at=2), **saves)
    model = model_of()
    train(model, tmp_path / "b", KeepgradCallback(**options), resumed, resume=True, **saves)
    assert resumed.kept == {step: unbroken.kept[step] for step in (2, 3)}
    loaded = transformers.Dinov2ForImageClassification.from_pretrained(tmp_path / "b" / "checkpoint-4")
    assert_same(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)


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
    far = 1e-2 if "bf16" in arguments else 1e-4
    assert_same(model.state_dict(), twin.state_dict(), rtol=far, atol=far)


@pytest.mark.parametrize(
    "options", [{"exact_last": 2}, {"exact_last": "x"}, {"cosine_every": -1}, {"keep_ratio": 0}, {"nonsense": 1}]
)
def test_wrong_options_are_refused_at_once(options):
    with pytest.raises(keepgrad.ConfigError):
        KeepgradCallback(**options)


def test_a_cosine_of_nothing_is_refused(tmp_path):
    from keepgrad.integrations.training import Training

    model = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(keepgrad.ConfigError, match="cosine_every"):
        Training(None, {"preset": "exact", "store": "int8"}, 0.0, 1).begin(model, False)
    assert is_plain(model)
