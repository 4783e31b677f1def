"""Every family keepgrad knows, one line each: exact forward, autograd at ratio 1, the oracle below it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from conftest import assert_same
from families import FAMILIES
from families.family import Family
from oracle_model import reduced_model
from torch import Tensor, nn

import keepgrad
from keepgrad.sampling import MASKS, REDUCTIONS

SEED = 11

EVERY = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


def gradients(model: nn.Module, out: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    out.double().square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@EVERY
@pytest.mark.parametrize("save", ["heavy", "input"])
def test_forward_is_exact_and_ratio_one_is_autograd(family, save):
    model = family.model(torch.float64)
    torch.manual_seed(3)
    wanted = family.run(model, torch.float64)
    wanted_grads = gradients(model, wanted)
    keepgrad.apply(model, keep_ratio=1.0, save=save)
    torch.manual_seed(3)
    found = family.run(model, torch.float64)
    torch.testing.assert_close(found, wanted)
    assert_same(gradients(model, found), wanted_grads, rtol=1e-7, atol=1e-9)


def check_against_the_oracle(family: Family, ratio=0.5, **options) -> None:
    model = family.model(torch.float64)
    save = options.get("save", "heavy")
    sites = keepgrad.plan(model, keep_ratio=ratio, **options).sites
    run = partial(family.run, model, torch.float64)
    wanted = reduced_model(model, run, family.specs, sites, SEED, save)
    wanted_grads = gradients(model, wanted)
    keepgrad.apply(model, keep_ratio=ratio, seed=SEED, **options)
    found = run()
    torch.testing.assert_close(found, wanted)
    assert_same(gradients(model, found), wanted_grads, rtol=1e-7, atol=1e-9)


@EVERY
@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("mask", MASKS)
def test_masks_and_reductions_equal_the_oracle(family, mask, reduce):
    check_against_the_oracle(family, mask=mask, reduce=reduce)


@EVERY
@pytest.mark.parametrize("reduce", ["drop", "fold", "pool"])
@pytest.mark.parametrize("method", ["qkv", "query", "head"])
def test_methods_equal_the_oracle(family, method, reduce):
    if method not in family.methods:
        pytest.skip("the family has no such method")
    check_against_the_oracle(family, 0.4, attention=method, reduce=reduce, save="input")
