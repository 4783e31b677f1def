"""The memory claims, on the models they are made for."""

import pytest
import timm
import torch
from torch import nn

import keepgrad
from keepgrad.memory import peak_bytes, saved_bytes

ROWS = {
    "vit_base_patch16_224": [
        ({"preset": "paper"}, 0.56),
        ({"preset": "exact"}, 0.66),
        ({"preset": "accurate"}, 0.50),
        ({"keep_ratio": {"attention": 1.0, "mlp": 0.25}}, 0.42),
        ({"keep_ratio": 0.5}, 0.34),
        ({"keep_ratio": 0.25}, 0.21),
        ({"keep_ratio": 0.5, "save": "input"}, 0.12),
        ({"preset": "small"}, 0.13),
    ],
    "convnext_tiny": [
        ({"preset": "paper"}, 0.46),
        ({"keep_ratio": 0.5}, 0.36),
        ({"keep_ratio": 0.25}, 0.26),
    ],
}


@pytest.mark.parametrize("name", ROWS)
def test_saved_bytes_of_real_models(name):
    model = timm.create_model(name).train()
    x = torch.randn(1, 3, 224, 224)
    full = saved_bytes(lambda: model(x), model)
    for options, limit in ROWS[name]:
        keepgrad.apply(model, **options)
        assert saved_bytes(lambda: model(x), model) <= limit * full, options
        keepgrad.remove(model)
    assert saved_bytes(lambda: model(x), model) == full


def test_saved_bytes_counts_each_storage_once_and_no_parameter():
    model = nn.Linear(4, 4)
    x = torch.randn(8, 4)
    assert saved_bytes(lambda: model(x), model) == x.nbytes
    assert saved_bytes(lambda: (model(x), model(x)), model) == x.nbytes
    y = torch.randn(8, 4, requires_grad=True)
    assert saved_bytes(lambda: y * y, model) == y.nbytes


def test_peak_bytes_sees_what_lives_at_the_same_time():
    def one_after_another():
        for _ in range(3):
            torch.ones(1000)

    assert peak_bytes(one_after_another) == 4000
    assert peak_bytes(lambda: [torch.ones(1000) for _ in range(3)]) == 12000
    x = torch.ones(1000)
    assert peak_bytes(lambda: x.view(10, 100).t()) == 0
    assert peak_bytes(lambda: x.add_(1)) == 0
