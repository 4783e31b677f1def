"""The memory claims of values stored in 8 bits, on the models they are made for."""

import pytest
import timm
import torch
from conftest import images, vit

import keepgrad
from keepgrad.memory import measure, peak_bytes, saved_bytes

# Memory


LIMITS = {
    ("vit_small_patch16_224", "exact"): 0.18,
    ("vit_small_patch16_224", "accurate"): 0.14,
    ("vit_small_patch16_224", "small"): 0.045,
    ("vit_small_patch16_224", 0.5): 0.095,
    ("convnext_tiny", "accurate"): 0.10,
    ("convnext_tiny", "small"): 0.06,
}


@pytest.mark.parametrize(("name", "setting"), LIMITS, ids=str)
def test_saved_bytes_of_real_models(name, setting):
    model = timm.create_model(name).train()
    x = torch.randn(2, 3, 224, 224)
    full = saved_bytes(lambda: model(x), model)
    keepgrad.apply(model, store="int8", **({"keep_ratio": setting} if setting == 0.5 else {"preset": setting}))
    assert saved_bytes(lambda: model(x), model) <= LIMITS[name, setting] * full


@pytest.mark.parametrize("name", ["resnet50", "efficientnet_b0"])
def test_saved_bytes_of_models_without_sites(name):
    model = timm.create_model(name).train()
    x = torch.randn(2, 3, 160, 160)
    full = saved_bytes(lambda: model(x), model)
    keepgrad.apply(model, store="int8")
    assert saved_bytes(lambda: model(x), model) <= 0.30 * full


def test_the_peak_falls_with_the_saved_bytes():
    model, x = vit(img_size=64, embed_dim=96, depth=6), images(64, batch=16)

    def step():
        model(x).sum().backward()

    peaks, measured = [], []
    for options in (
        None,
        {"preset": "exact"},
        {"preset": "exact", "store": "int8"},
        {"preset": "small", "store": "int8"},
    ):
        if options:
            keepgrad.apply(model, **options)
        step()
        model.zero_grad()
        peaks.append(peak_bytes(step))
        model.zero_grad()
        measured.append(measure(step).total)
        if options:
            keepgrad.remove(model)
    assert peaks[1] < 0.75 * peaks[0]
    assert peaks[2] < 0.35 * peaks[0]
    assert peaks[3] < 0.25 * peaks[0]
    assert measured == sorted(measured, reverse=True)


@pytest.mark.parametrize("options", [{"preset": "exact"}, {"preset": "small"}], ids=str)
def test_the_estimate_knows_it(options):
    model = timm.create_model("vit_small_patch16_224", depth=6).train()
    keepgrad.apply(model, store="int8", **options)
    x = torch.randn(8, 3, 224, 224)
    model(x).mean().backward()
    model.zero_grad()
    found = measure(lambda: model(x).mean().backward())
    told = keepgrad.estimate(model, (8, 3, 224, 224), optimizer="none", loss=lambda out: out.mean())
    assert told.total == pytest.approx(found.total, rel=0.08)
