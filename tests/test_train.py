"""Training from the command line and in Python: results, resumption, many processes, and what can go wrong."""

import csv
import dataclasses
import hashlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys

import pytest
import timm
import torch
import yaml
from conftest import SMALL_MODELS
from PIL import Image
from safetensors.torch import load_file

import keepgrad
from keepgrad import flags
from keepgrad.train.classify import Classification
from keepgrad.train.config import RECIPES, TrainConfig
from keepgrad.train.loop import Trainer, accelerator_for
from keepgrad.train.loop.state import MARK, State

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
    **{"ema": 0.9, "mixup": 0.4, "cutmix": 0.5, "drop_path": 0.2, "accumulate": 2, "finish": 0.4, "clip_grad": 1.0},
    **{"keep_ratio": 0.5, "erasing": 0.3, "auto_augment": "rand-m5-inc1", "layer_decay": 0.8, "save_every": 1},
}


def trainer(data, output, **settings):
    config = flags.make(TrainConfig, {**SMALL, "data": str(data), "output": str(output), **settings})
    accelerator = accelerator_for(config)
    return Trainer(Classification(config, accelerator), config, accelerator)


def command(*args, **options):
    return [sys.executable, "-m", "keepgrad", *args]


def keepgrad_train(data, output, *more, **options):
    small = (
        *("--model", "test_vit", "--size", "32", "--model-kwargs", "patch_size=8", "--epochs", "2", "--workers", "0"),
        *("--batch-size", "6", "--cpu", "--data", str(data), "--output", str(output)),
    )
    return subprocess.run(command("train", *small, *more), capture_output=True, text=True, timeout=300, **options)


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


# Settings


def test_every_flag_can_come_from_yaml_and_goes_back_there(tmp_path):
    config = flags.make(TrainConfig, {**RICH, "keep_ratio": {"attention": 1.0, "mlp": 0.5}})
    flags.write_yaml(tmp_path / "config.yaml", config)
    assert flags.make(TrainConfig, flags.read_yaml(tmp_path / "config.yaml")) == config


def test_what_a_flag_parses_a_yaml_file_may_say_in_words():
    found = flags.make(TrainConfig, {"keep-ratio": "attention=1,mlp=0.25", "model_kwargs": "img_size=32", "lr": "1e-3"})
    assert found.keep_ratio == {"attention": 1, "mlp": 0.25}
    assert found.model_kwargs == {"img_size": 32}
    found = flags.make(TrainConfig, {"model_kwargs": "depths=[0,1,3],dims=[8, 16,32],conv_mlp=true"})
    assert found.model_kwargs == {"depths": [0, 1, 3], "dims": [8, 16, 32], "conv_mlp": True}
    with pytest.raises(keepgrad.ConfigError, match="cannot be read"):
        flags.make(TrainConfig, {"model_kwargs": "depths=[0,1"})
    assert found.lr == 1e-3


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"bach_size": 3}, "there is no setting 'bach_size'; did you mean batch_size?"),
        ({"epochs": 0}, "epochs=0: give a whole number from 1"),
        ({"epochs": 1.5}, "give a whole number"),
        ({"channels_last": "yes"}, "give true or false"),
        ({"amp": "int8"}, "use one of bf16, fp16"),
        ({"keep_ratio": "half"}, "is no number"),
        ({"keep_ratio": 1.5}, "outside (0, 1]"),
        ({"full": True, "mask": "grid"}, "full backprop has no use for mask"),
        ({"full": True, "finish": 0.1}, "full backprop is exact from the beginning"),
        ({"finish": 2.0}, "finish=2.0: give a number from 0 to 1"),
        ({"accumulate": 2, "global_batch": 64}, "not both"),
        ({"global_batch": 50, "batch_size": 32}, None),
        ({"fsdp": True, "ema": 0.9}, "leave out one of the two"),
        ({"mixup": 0.2, "batch_size": 3}, "takes samples in pairs|take samples in pairs"),
        ({"resume": True}, "give the output folder"),
        ({"ema": 1.0}, "between 0 and 1"),
        ({"lr": None}, "lr is empty; give a value, or leave it out for 0.001"),
        ({"output": 2024}, "give a text"),
        ({"clip_grad": -1}, "give a number above 0"),
        ({"size": 22.5}, "give a whole number"),
    ],
)
def test_settings_that_cannot_work(settings, words):
    if words is None:
        with pytest.raises(keepgrad.ConfigError, match="no multiple of 1 processes"):
            flags.make(TrainConfig, settings).accumulation(1)
        return
    with pytest.raises(keepgrad.ConfigError) as error:
        flags.make(TrainConfig, settings)
    assert any(part in str(error.value) for part in words.split("|"))


def test_recipes_are_the_published_ones():
    for name, (gpus, steps) in {"vit_tiny": (8, 1), "vit_base": (32, 2), "convnext_tiny": (8, 4)}.items():
        assert flags.make(TrainConfig, RECIPES[name]).accumulation(gpus) == steps
    assert {config["preset"] for config in RECIPES.values()} == {"paper"}


def test_flags_override_the_file_and_the_file_the_recipe(tmp_path, folder):
    (tmp_path / "some.yaml").write_text("recipe: convnext_tiny\nlr: 0.5\nbatch-size: 4\n")
    args = ("--config", str(tmp_path / "some.yaml"), "--accumulate", "2", "--lr", "0.25", "--full", "--amp", "bf16")
    parser = __import__("argparse").ArgumentParser()
    from keepgrad.cli import train

    train.add_arguments(parser)
    config = train._config(parser.parse_args([*args, "--data", str(folder)]))
    assert (config.model, config.batch_size, config.lr, config.drop_path) == ("convnext_tiny", 4, 0.25, 0.1)
    assert (config.accumulate, config.global_batch, config.full, config.preset) == (2, None, True, None)
    (tmp_path / "some.yaml").write_text("recipe: vit_base\nfull: false\naccumulate: 1\n")
    args = ("--config", str(tmp_path / "some.yaml"), "--ema", "none", "--fsdp", "--amp", "bf16", "--data", str(folder))
    config = train._config(parser.parse_args(args))
    assert (config.preset, config.global_batch, config.ema, config.fsdp) == ("paper", 4096, None, True)


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
        args = command(
            "eval", str(path), "--data", str(folder), "--workers", "1", "--batch-size", "5", "--cpu", "--json"
        )
        done = subprocess.run(args, capture_output=True, text=True, timeout=300)
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


def test_finish_trains_the_last_steps_with_exact_gradients_under_checkpointing(folder, tmp_path):
    run = trainer(folder, tmp_path / "run", keep_ratio=0.25, finish=0.5)
    block = run.bare.blocks[0]
    seen = []
    step = run._step

    def watched(group):
        loss = step(group)
        seen.append((block.forward.shared.exact, run.bare.grad_checkpointing))
        return loss

    run._step = watched
    run.run()
    assert seen == [(False, False)] * (run.steps // 2) + [(True, True)] * (run.steps - run.steps // 2)


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


def test_the_compiler_changes_no_more_than_rounding_also_where_gradients_become_exact(folder, tmp_path):
    settings = {"epochs": 1, "aug": False, "preset": "exact", "finish": 0.4}
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
    killed = subprocess.run(
        [sys.executable, str(tmp_path / "kills.py"), point, str(number), *args], capture_output=True, timeout=300
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    done = subprocess.run(command(*args), capture_output=True, text=True, timeout=300)
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
    stopped = subprocess.run(
        [sys.executable, str(tmp_path / "kills.py"), "step", "5", *args], capture_output=True, text=True, timeout=300
    )
    assert stopped.returncode == 130
    assert f"{name} after step 5 of 9; --resume --output {tmp_path / 'run'} continues" in stopped.stderr
    assert State.read(tmp_path / "run" / "state.pt").step == 5
    # Just as the message says: the settings are those of the run.
    done = subprocess.run(
        command("train", "--resume", "--output", str(tmp_path / "run")), capture_output=True, text=True, timeout=300
    )
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


# What can go wrong


def test_a_full_disk_leaves_the_state_from_before(folder, tmp_path):
    first = keepgrad_train(folder, tmp_path / "run", "--epochs", "1")
    assert first.returncode == 0, first.stderr
    before = (tmp_path / "run" / "state.pt").read_bytes()

    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, len(before) // 2))

    done = keepgrad_train(folder, tmp_path / "run", "--resume", "--epochs", "2", preexec_fn=small_files)
    assert done.returncode == 2
    assert "cannot write" in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "run" / "state.pt").read_bytes() == before
    done = keepgrad_train(folder, tmp_path / "run", "--resume", "--epochs", "2")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("workers", ["0", "2"])
def test_an_unreadable_image_is_named_and_the_run_goes_on_when_it_is_mended(folder, tmp_path, workers):
    import shutil

    shutil.copytree(folder, tmp_path / "images")
    broken = tmp_path / "images" / "train" / "bird" / "3.png"
    whole = broken.read_bytes()
    broken.write_bytes(whole[:100])
    done = keepgrad_train(tmp_path / "images", tmp_path / "run", "--workers", workers)
    assert done.returncode == 2
    assert "bird/3.png cannot be read as an image" in done.stderr
    assert "Traceback" not in done.stderr
    assert State.read(tmp_path / "run" / "state.pt").step < 14
    broken.write_bytes(whole)
    done = keepgrad_train(tmp_path / "images", tmp_path / "run", "--workers", workers, "--resume")
    assert done.returncode == 0, done.stderr
    keepgrad_train(folder, tmp_path / "other")
    assert_equal_bits(weights(tmp_path / "run"), weights(tmp_path / "other"))


def test_classes_that_do_not_fit(folder, tmp_path):
    import shutil

    shutil.copytree(folder, tmp_path / "images")
    (tmp_path / "images" / "train" / "dog").mkdir()
    with pytest.raises(keepgrad.InputError, match="dog is a class folder without images"):
        trainer(tmp_path / "images", tmp_path / "run")
    shutil.copy(folder / "val" / "cat" / "0.png", tmp_path / "images" / "train" / "dog" / "0.png")
    with pytest.raises(keepgrad.InputError, match="training has 4 classes and evaluation 3; only one of them has dog"):
        trainer(tmp_path / "images", tmp_path / "run")
    trainer(folder, tmp_path / "run", epochs=1).run()
    (tmp_path / "images" / "val" / "dog").mkdir()
    shutil.copy(folder / "val" / "cat" / "0.png", tmp_path / "images" / "val" / "dog" / "0.png")
    with pytest.raises(keepgrad.ConfigError, match="has num_classes=3, and this run has 4"):
        trainer(tmp_path / "images", tmp_path / "run", resume=True)
    args = command("eval", str(tmp_path / "run"), "--data", str(tmp_path / "images"), "--cpu")
    done = subprocess.run(args, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert "is for 3 classes" in done.stderr


def test_weights_that_are_no_numbers_do_not_replace_good_ones(folder, tmp_path):
    run = trainer(folder, tmp_path / "run", epochs=1)
    run.run()
    before = (tmp_path / "run" / "state.pt").read_bytes()
    with torch.no_grad():
        run.bare.head.weight[0, 0] = float("nan")
    with pytest.raises(keepgrad.DivergedError, match=r"head\.weight has values that are no finite numbers"):
        run.save()
    assert (tmp_path / "run" / "state.pt").read_bytes() == before


def test_folders_are_found_by_their_usual_names(folder, tmp_path):
    import shutil

    shutil.copytree(folder / "train", tmp_path / "a" / "train")
    shutil.copytree(folder / "val", tmp_path / "a" / "test")
    task = trainer(tmp_path / "a", tmp_path / "run").task
    assert (len(task.source), len(task.val)) == (42, 12)
    task = trainer(folder / "train", tmp_path / "run2").task
    assert (len(task.source), len(task.val)) == (38, 4)
    shutil.rmtree(tmp_path / "a" / "train")
    with pytest.raises(keepgrad.InputError, match="has test/ but no train/"):
        trainer(tmp_path / "a", tmp_path / "run3")


def test_images_of_other_channels(folder, tmp_path):
    for channels in (1, 4):
        outcome = trainer(
            folder, tmp_path / f"{channels}", epochs=1, model_kwargs={"patch_size": 8, "in_chans": channels}
        )
        assert outcome.task.sample()[0].shape[1] == channels
        outcome.run()


def test_a_loss_that_is_no_number_names_the_step(folder, tmp_path):
    run = trainer(folder, tmp_path / "run", lr=1e30, warmup_epochs=0)
    with pytest.raises(keepgrad.DivergedError, match=r"the loss is (nan|inf) at step \d+, in epoch 1"):
        run.run()


def test_losses_read_now_and_then_are_those_of_every_step(folder, tmp_path):
    """On an accelerator the losses of some steps are read together."""
    outcomes = []
    for every in (1, 3):
        run = trainer(folder, tmp_path / f"{every}", epochs=2)
        run.read_every = every
        outcomes.append(run.run().history)
    assert [row["train_loss"] for row in outcomes[0]] == [row["train_loss"] for row in outcomes[1]]


def test_a_nan_loss_that_is_not_read_yet_reaches_no_checkpoint(folder, tmp_path):
    run = trainer(folder, tmp_path / "run", epochs=2, save_every=2)
    run.read_every = 10**6
    loss = run.task.loss
    run.task.loss = lambda *args: loss(*args) * (float("nan") if run.state.step == 3 else 1)
    with pytest.raises(keepgrad.DivergedError, match="the loss is nan at step 3, in epoch"):
        run.run()
    assert torch.load(tmp_path / "run" / "state.pt", weights_only=True)["step"] == 2


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--data", "no/such/folder"), "no/such/folder: there is no such folder or file"),
        (("--batch-size", "64"), "the data is less than one step"),
        (("--model", "vit_smal"), "did you mean"),
        (("--model-kwargs", "wings=2"), "'wings' is no argument of a model that can be chosen; these are"),
        (("--opt", "adamwings"), "see timm.optim.list_optimizers()"),
        (("--fsdp",), "start with torchrun"),
        (("--model", "test_resnet", "--model-kwargs", ""), "has no block that keepgrad knows"),
    ],
)
def test_wrong_arguments_are_one_clear_line(folder, tmp_path, args, words):
    done = keepgrad_train(folder, tmp_path / "run", *args)
    assert done.returncode == 2
    assert words in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "state.pt").exists()


# Many processes

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


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_processes(tmp_path, name, processes, folder, stop_after=None, **settings):
    (tmp_path / "worker.py").write_text(WORKER)
    output = tmp_path / name
    config = {**SMALL, "data": str(folder), "output": str(output), "epochs": 2, "keep_ratio": 0.5, **settings}
    (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(config))
    launch = [sys.executable]
    if processes > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    args = [*launch, str(tmp_path / "worker.py"), str(tmp_path / f"{name}.yaml"), str(tmp_path / f"{name}.pt")]
    args += [] if stop_after is None else [str(stop_after)]
    done = subprocess.run(args, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return None if stop_after else torch.load(tmp_path / f"{name}.pt"), output


@pytest.mark.parametrize("fsdp", [False, True], ids=["ddp", "fsdp2"])
def test_two_processes_train_like_one(folder, tmp_path, fsdp):
    settings = {"aug": False, "accumulate": 2, "opt": "sgd", "lr": 0.05, "clip_grad": 1.0, "finish": 0.3}
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
