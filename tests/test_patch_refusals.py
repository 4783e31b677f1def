"""What cannot be patched, or not as asked: a clear error, and the model is left as it is."""

import math

import pytest
import torch
from conftest import assert_same, assert_unchanged, convnext, fingerprint, grads, images, vit
from torch import nn

import keepgrad
from keepgrad import (
    AlreadyAppliedError,
    ConfigError,
    InputError,
    KeepConfig,
    KeepgradError,
    NoSiteError,
    NotAppliedError,
)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_ratio": 0.0}, r"keep_ratio=0.0 is outside \(0, 1\]"),
        ({"keep_ratio": 1.5}, r"outside \(0, 1\]"),
        ({"keep_ratio": -0.5}, r"outside \(0, 1\]"),
        ({"keep_ratio": math.nan}, r"keep_ratio=nan is outside"),
        ({"keep_ratio": "half"}, r"keep_ratio='half': give a number"),
        ({"keep_ratio": True}, r"give a number"),
        ({"keep_ratio": []}, r"empty list"),
        ({"keep_ratio": [0.5]}, r"lists 1 ratios, but 2 blocks"),
        ({"keep_ratio": [0.5, 2.0]}, r"outside"),
        ({"keep_ratio": lambda i, n: 7.0}, r"keep_ratio=7.0 is outside"),
        ({"keep_ratio": {"heads": 0.5}}, r"'attention', for 'mlp'"),
        ({"keep_ratio": {}}, r"'attention', for 'mlp'"),
        ({"mask": "stripes"}, r"mask='stripes' is not known; use one of 'grid', 'random', 'block'"),
        ({"reduce": "max"}, r"reduce='max' is not known"),
        ({"schedule": "cosine"}, r"schedule='cosine' is not known"),
        ({"keep_ratio": [0.5, 0.5], "schedule": "increasing"}, r"goes with one keep_ratio"),
        ({"attention": "keys"}, r"attention='keys' is not known"),
        ({"save": "nothing"}, r"save='nothing' is not known"),
        ({"save": {"mlp": "all"}}, r"save='all' is not known"),
        ({"preset": "tiny"}, r"preset='tiny' is not known"),
        ({"mlp": "yes"}, r"mlp='yes': give True or False"),
        ({"seed": 1.5}, r"seed=1.5"),
        ({"layers": []}, r"layers is empty"),
        ({"layers": [5]}, r"block 5, but the model has blocks 0 to 1"),
        ({"layers": "middle"}, r"layers='middle' is not understood"),
        ({"layers": "last 3/2"}, r"not understood"),
        ({"layers": 3}, r"layers=3"),
        ({"layers": lambda name: False}, r"chooses none of the 2 blocks"),
        ({"attention": "off", "mlp": False}, r"leave no branch"),
        ({"downsample": True}, r"no downsample branch"),
        ({"keep_ratio": {"attention": 0.3}, "attention": "off"}, r"sets 'attention', which is switched off"),
        ({"save": {"mlp": "input"}, "mlp": False}, r"sets 'mlp', which is switched off"),
        ({"keep_ratio": lambda i, n: None}, r"keep_ratio=None: give a number"),
        ({"seed": 2**64}, r"does not fit"),
        ({"keepratio": 0.5}, r"keepratio.*the options are preset, keep_ratio"),
    ],
)
def test_bad_settings_are_clear_errors_and_leave_the_model_alone(options, message):
    model = vit()
    before = fingerprint(model)
    with pytest.raises(ConfigError, match=message):
        keepgrad.apply(model, **options)
    assert_unchanged(model, before)
    with pytest.raises(ConfigError, match=message):
        keepgrad.plan(model, **options)


def test_config_or_keywords_but_not_both():
    model = vit()
    with pytest.raises(ConfigError, match="not both"):
        keepgrad.apply(model, KeepConfig(keep_ratio=0.5), mask="grid")
    with pytest.raises(ConfigError, match="config is a float"):
        keepgrad.apply(model, 0.5)
    by_config = keepgrad.plan(model, KeepConfig(keep_ratio=0.5))
    assert by_config == keepgrad.plan(model, keep_ratio=0.5)


def test_a_model_without_sites_is_an_error():
    model = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(NoSiteError, match="Sequential has no block that keepgrad knows"):
        keepgrad.apply(model, keep_ratio=0.5)


def test_convnext_has_no_attention_to_set():
    with pytest.raises(ConfigError, match="no attention branch"):
        keepgrad.apply(convnext(), attention="head")
    for options in ({"keep_ratio": {"attention": 0.5, "mlp": 0.5}}, {"save": {"attention": "input"}}):
        with pytest.raises(ConfigError, match="no attention branch"):
            keepgrad.apply(convnext(), **options)


@pytest.mark.parametrize("norm", ["batchnorm2d", "groupnorm1"])
def test_norms_over_positions_are_not_reduced(norm):
    with pytest.raises(NoSiteError, match="works over positions or samples"):
        keepgrad.apply(convnext(conv_mlp=True, norm_layer=norm), keep_ratio=0.5)


@pytest.mark.parametrize(
    ("layer", "module", "reason"),
    [
        ("drop1", nn.AlphaDropout(0.3), "AlphaDropout draws random numbers"),
        ("act", nn.RReLU(), "RReLU draws random numbers"),
        ("act", nn.ReLU(inplace=True), "ReLU works in place"),
    ],
)
def test_layers_that_cannot_be_redone_leave_the_branch_alone(layer, module, reason):
    model = vit()
    setattr(model.blocks[0].mlp, layer, module)
    plan = keepgrad.apply(model, keep_ratio=1.0)
    assert reason in str(plan)
    _, found = grads(model, images(), seed=1)
    keepgrad.remove(model)
    assert_same(found, grads(model, images(), seed=1)[1], rtol=1e-4, atol=1e-5)


def test_applying_twice_and_removing_twice():
    model = vit()
    with pytest.raises(NotAppliedError, match="not patched"):
        keepgrad.remove(model)
    with pytest.raises(NotAppliedError, match="not patched"), keepgrad.exact(model):
        pass
    keepgrad.apply(model, keep_ratio=0.5)
    for again in (model, model.blocks[0], nn.Sequential(model)):
        with pytest.raises(AlreadyAppliedError, match="already patched"):
            keepgrad.apply(again, keep_ratio=0.25)
    keepgrad.remove(model)
    keepgrad.apply(model, keep_ratio=0.25)


def test_an_input_smaller_than_a_group_names_the_layer():
    model = convnext()
    keepgrad.apply(model, keep_ratio=0.25)
    with pytest.raises(InputError, match=r"stages\.3\.blocks\.0 \(mlp\): .*only 1x1"):
        model(images(32))
    grads(model, images(64))


def test_every_error_is_of_one_family():
    for error in (AlreadyAppliedError, ConfigError, InputError, NoSiteError, NotAppliedError):
        assert issubclass(error, KeepgradError)


@pytest.mark.filterwarnings("ignore")
def test_a_dynamically_quantised_model_has_no_sites():
    model = torch.ao.quantization.quantize_dynamic(vit(), {nn.Linear}, dtype=torch.qint8).train()
    with pytest.raises(NoSiteError, match="Linear is quantised, for inference alone"):
        keepgrad.apply(model, keep_ratio=0.5)


@pytest.mark.parametrize("ratio", [1e-320, 1e-10, {"mlp": 1e-320}, [1e-320, 0.5]])
def test_a_ratio_that_keeps_less_than_a_position_is_refused_at_once(ratio):
    with pytest.raises(ConfigError, match="is less than one position of any input; give at least 1e-09"):
        keepgrad.apply(vit(), keep_ratio=ratio)


@pytest.mark.parametrize("given", [None, "vit", vit])
@pytest.mark.parametrize("call", [keepgrad.apply, keepgrad.plan, keepgrad.remove])
def test_what_is_no_model_is_refused(call, given):
    with pytest.raises(keepgrad.InputError, match=f"^model is a {type(given).__name__}; give a torch.nn.Module$"):
        call(given)
    with pytest.raises(keepgrad.InputError, match=r"^model is a"), keepgrad.exact(given):
        pass
