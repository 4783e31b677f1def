"""The settings of a training run: flags, YAML and recipes."""

import pytest
from training import RICH

import keepgrad
from keepgrad import flags
from keepgrad.train.config import RECIPES, TrainConfig

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
        ({"smoothing": 2.0}, "smoothing=2.0: give a number from 0"),
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
