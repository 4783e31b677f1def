"""Training runs in Python and from the command line: what they leave, and that they train as plain PyTorch does."""

import csv
import json

import pytest
import timm
import torch
import yaml
from conftest import SMALL_MODELS
from PIL import Image
from training import assert_close, assert_equal_bits, command, trainer, weights

import keepgrad

# A run


@pytest.mark.parametrize("model", SMALL_MODELS)
def test_a_run_leaves_results_that_timm_reads(folder, tmp_path, model):
    kwargs, classes = SMALL_MODELS[model]
    settings = {"model": model, "model_kwargs": kwargs, "size": 16, "ema": 0.9, "keep_ratio": 0.5}
    outcome = trainer(folder, tmp_path / "run", **settings).run()
    sites = outcome.plan.sites
    assert {type(outcome.model.get_submodule(site.name)).__name__ for site in sites} == classes
    assert {(site.kind, site.tier, site.keep_ratio) for site in sites} == {("attention", 1, 0.5), ("mlp", 1, 0.5)}
    assert not outcome.plan.skipped
    names = {path.name for path in (tmp_path / "run").iterdir()} - {".lock"}
    assert names == {
        *("config.yaml", "metrics.csv", "events", "curves.png", "best.safetensors", "last.safetensors", "state.pt")
    }
    with (tmp_path / "run" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["1", "2", "3"]
    assert float(rows[-1]["top1"]) == outcome.history[-1]["top1"]
    assert float(rows[2]["train_loss"]) < float(rows[0]["train_loss"])
    assert 1e-6 < float(rows[2]["lr"]) < 1e-4
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["model"] == model
    assert list((tmp_path / "run" / "events").iterdir())
    with Image.open(tmp_path / "run" / "curves.png") as picture:
        assert picture.width > 500
    plain = timm.create_model(
        model, img_size=16, num_classes=3, checkpoint_path=tmp_path / "run" / "best.safetensors", **kwargs
    )
    assert_equal_bits(dict(plain.state_dict()), weights(tmp_path / "run", "best"))


def test_eval_finds_the_accuracy_that_training_saw(folder, tmp_path):
    outcome = trainer(folder, tmp_path / "run").run()
    for path in (tmp_path / "run", tmp_path / "run" / "best.safetensors"):
        args = ("--data", str(folder), "--workers", "1", "--batch-size", "5", "--cpu", "--json")
        done = command("eval", str(path), *args)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["top1"] == outcome.best["top1"]
        assert found["images"] == 12
        assert found["loss"] == pytest.approx(outcome.best["val_loss"], rel=1e-4)


def test_full_backprop_trains_like_plain_pytorch(folder, tmp_path):
    """The loop against a dozen lines of its own: the same batches, AdamW, and nothing else."""
    settings = {"full": True, "smoothing": 0.0, "warmup_epochs": 0, "min_lr": 1e-3, "weight_decay": 0.0, "epochs": 1}
    own = trainer(folder, tmp_path / "run", **settings)
    torch.manual_seed(0)
    model = timm.create_model("test_vit", img_size=32, patch_size=8, num_classes=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for images, labels in own.task.batches(0, 0):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    own.run()
    found = weights(tmp_path / "run")
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


def test_accumulated_batches_are_one_large_batch(folder, tmp_path):
    found = []
    for number, (batch, accumulate) in enumerate(((12, 1), (6, 2))):
        settings = {"batch_size": batch, "accumulate": accumulate, "aug": False, "full": True, "epochs": 1}
        trainer(folder, tmp_path / f"{number}", **settings).run()
        found.append(weights(tmp_path / f"{number}"))
    for name in found[0]:
        torch.testing.assert_close(found[0][name], found[1][name], rtol=1e-4, atol=1e-5)


def test_precision_memory_format_and_checkpointing_change_no_more_than_rounding(folder, tmp_path):
    settings = {"model": "test_convnext", "model_kwargs": None, "size": 64, "epochs": 1, "aug": False}
    plain = trainer(folder, tmp_path / "a", **settings).run().history[0]
    more = {"amp": "bf16", "channels_last": True, "checkpointing": True}
    other = trainer(folder, tmp_path / "b", **settings, **more).run().history[0]
    assert other["train_loss"] == pytest.approx(plain["train_loss"], rel=0.02)


def test_the_compiler_changes_no_more_than_rounding(folder, tmp_path):
    settings = {"epochs": 1, "aug": False, "preset": "exact"}
    settings["model_kwargs"] = {"patch_size": 8, "depth": 2}  # the compiler takes seconds for every block
    plain = trainer(folder, tmp_path / "a", **settings).run().history[0]
    compiled = trainer(folder, tmp_path / "b", **settings, compile=True).run().history[0]
    assert compiled["train_loss"] == pytest.approx(plain["train_loss"], rel=1e-4)
    assert_close(weights(tmp_path / "b"), weights(tmp_path / "a"), atol=1e-4)


def test_the_learning_rate_warms_up_and_falls(folder, tmp_path):
    settings = {"epochs": 12, "warmup_epochs": 2, "lr": 1.0, "min_lr": 0.0}
    rates = {}
    for sched in ("cosine", "steps"):
        run = trainer(folder, tmp_path / sched, **settings, sched=sched)
        rates[sched] = []
        for step in range(run.steps):
            run.scheduler.step_update(step)
            rates[sched].append(run.optimizer.param_groups[0]["lr"])
    steps, warm = run.steps, run.steps // 6
    for found in rates.values():
        assert found[0] < 0.01
        assert found[warm // 2] == pytest.approx(0.5, abs=0.05)
        assert found[warm] == pytest.approx(1.0)
    assert rates["cosine"][(warm + steps) // 2] == pytest.approx(0.5, abs=0.01)
    assert rates["cosine"][-1] < 0.001
    eighth, eleventh = steps * 8 // 12, steps * 11 // 12
    assert rates["steps"][eighth - 1 : eighth + 1] == pytest.approx([1.0, 0.1])
    assert rates["steps"][eleventh - 1 : eleventh + 1] == pytest.approx([0.1, 0.01])


def test_pretrained_weights_from_a_file_with_another_classifier(folder, tmp_path):
    other = timm.create_model("test_vit", img_size=32, patch_size=8, num_classes=7)
    torch.save(other.state_dict(), tmp_path / "other.pth")
    run = trainer(folder, tmp_path / "run", pretrained=str(tmp_path / "other.pth"))
    assert torch.equal(run.bare.blocks[1].mlp.fc1.weight.detach(), other.blocks[1].mlp.fc1.weight.detach())
    assert run.bare.head.out_features == 3
    torch.save(other, tmp_path / "other.pth")
    with pytest.raises(keepgrad.ConfigError, match="cannot be read as weights"):
        trainer(folder, tmp_path / "run2", pretrained=str(tmp_path / "other.pth"))
