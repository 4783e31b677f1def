"""Settings as flags: every option of keepgrad on every command."""

import argparse
import dataclasses

import pytest
from torch import nn

from keepgrad import ConfigError, KeepConfig, flags
from keepgrad.cli import main, parser_of
from keepgrad.train.config import TrainConfig

GIVEN = {
    "preset": (["small"], "small"),
    "keep_ratio": (["attention=1,mlp=0.5"], {"attention": 1.0, "mlp": 0.5}),
    "mask": (["random"], "random"),
    "reduce": (["drop"], "drop"),
    "schedule": (["careful"], "careful"),
    "layers": (["0,2"], [0, 2]),
    "attention": (["query"], "query"),
    "mlp": ([], True),
    "downsample": ([], True),
    "save": (["attention=input,mlp=heavy"], {"attention": "input", "mlp": "heavy"}),
    "store": (["int8"], "int8"),
    "modules": (["mlp=torch.nn.Linear"], {"mlp": "torch.nn.Linear"}),
    "seed": (["7"], 7),
}


@pytest.mark.parametrize("command", ["train", "detect", "study", "estimate", "fidelity", "bench"])
@pytest.mark.parametrize("field", dataclasses.fields(KeepConfig), ids=lambda field: field.name)
def test_every_option_is_a_flag_of_every_command(command, field):
    words, value = GIVEN[field.name]
    args = [command, *{"fidelity": ["test_vit", "--data", "x"]}.get(command, [])]
    found = parser_of(command).parse_args([*args, f"--{field.name.replace('_', '-')}", *words])
    assert flags.given(found, KeepConfig)[field.name] == value


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("keep_ratio", "0.5", 0.5),
        ("keep_ratio", "1,0.5", [1.0, 0.5]),
        ("layers", "last 2/3", "last 2/3"),
        ("layers", "3", [3]),
        ("save", "input", "input"),
    ],
)
def test_values_are_read_from_text(name, text, value):
    parser = argparse.ArgumentParser()
    flags.add_arguments(parser, KeepConfig)
    found = flags.given(parser.parse_args([f"--{name.replace('_', '-')}", text]), KeepConfig)
    assert found == {name: value}
    KeepConfig(**found)


def test_off_is_given_too():
    parser = argparse.ArgumentParser()
    flags.add_arguments(parser, KeepConfig)
    assert flags.given(parser.parse_args(["--no-mlp"]), KeepConfig) == {"mlp": False}


def test_a_class_is_given_by_its_name():
    assert KeepConfig(modules={"mlp": "torch.nn.Linear"}).modules == {"mlp": nn.Linear}
    with pytest.raises(ConfigError, match=r"modules: there is no class 'torch\.nn\.Nothing'"):
        KeepConfig(modules={"mlp": "torch.nn.Nothing"})
    with pytest.raises(ConfigError, match="there is no class 'Linear'"):
        KeepConfig(modules={"mlp": "Linear"})
    with pytest.raises(ConfigError, match=r"torch\.nn\.functional\.relu is no class"):
        KeepConfig(modules={"mlp": "torch.nn.functional.relu"})


def test_a_run_keeps_its_settings_as_text(tmp_path):
    config = TrainConfig(model="test_vit", modules={"mlp": "torch.nn.Linear"}, mlp=False, layers="0,1", seed=3)
    flags.write_yaml(tmp_path / "config.yaml", config)
    again = flags.make(TrainConfig, flags.read_yaml(tmp_path / "config.yaml", whole=True))
    assert again == config
    assert again.keep_config() == KeepConfig(modules={"mlp": nn.Linear}, mlp=False, layers=[0, 1])
    assert again.without_keepgrad().keep_config() == KeepConfig()


def test_estimate_has_a_row_for_a_setting_of_your_own(capsys):
    assert main(["estimate", "test_vit", "--batch", "2", "--keep-ratio", "0.3", "--mask", "random"]) == 0
    assert "keepgrad 0.3, mask random" in capsys.readouterr().out
    assert main(["estimate", "--paper-table", "--keep-ratio", "0.3"]) == 2
    assert "leave out --keep-ratio" in capsys.readouterr().err
