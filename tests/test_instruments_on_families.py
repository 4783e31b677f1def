"""Every instrument on every tier-1 family of timm."""

import pytest
import torch
import torch.nn.functional as F
from families import FAMILIES

import keepgrad

TIMM = {name: family for name, family in FAMILIES.items() if name.startswith("timm") and "NaFlex" not in name}


@pytest.mark.parametrize("family", TIMM.values(), ids=TIMM)
def test_instruments(family):
    model = family.model()
    x = family.inputs(torch.float32)
    labels = torch.zeros(len(x), dtype=torch.int64)
    full = keepgrad.estimate(model, tuple(x.shape)).total
    found = keepgrad.compare(model, (x, labels), F.cross_entropy, ["exact", {"keep_ratio": 0.5}], draws=1)
    exact, reduced = found.settings
    assert exact.cosine > 0.9999
    assert 0 < reduced.cosine < exact.cosine
    assert reduced.bytes < exact.bytes < found.full_bytes
    assert "forward" not in vars(model)
    keepgrad.apply(model, keep_ratio=0.5)
    assert keepgrad.estimate(model, tuple(x.shape)).total < full
    report = keepgrad.fidelity(model, (x, labels), F.cross_entropy, draws=1)
    assert 0 < report.whole.cosine < 1


@pytest.mark.parametrize("name", ["timm ViT", "timm EVA-02", "timm CaiT", "timm Mixer", "timm ConvNeXt", "timm Swin"])
def test_fit(name):
    """A fit is many estimates; how a family is estimated is tested above."""
    model, x = TIMM[name].model(), TIMM[name].inputs(torch.float32)
    full = keepgrad.estimate(model, tuple(x.shape)).total
    fitted = keepgrad.fit(model, tuple(x.shape), full, by="cheapest")
    assert fitted.best.memory.total <= full
