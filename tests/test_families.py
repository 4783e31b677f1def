"""Every family keepgrad knows, one line each: exact forward, autograd at ratio 1, the oracle below it."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
from conftest import assert_same
from families import FAMILIES
from families.family import Family
from oracle_model import reduced_model
from torch import Tensor, nn

import keepgrad
from keepgrad.ops import outside, store
from keepgrad.ops.store import Packed

SEED = 11

EVERY = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


def gradients(model: nn.Module, out: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    out.double().square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(family: Family, found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    largest = max(float(grad.abs().max()) for grad in wanted.values())
    atol = 1e-9 if family.rtol < 1e-6 else family.rtol * largest
    assert_same(found, wanted, rtol=family.rtol, atol=atol)


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
    torch.testing.assert_close(found, wanted, rtol=family.rtol, atol=family.rtol)
    assert_close(family, gradients(model, found), wanted_grads)


@pytest.fixture
def packs_without_loss(monkeypatch):
    """Values are packed into bytes as `store="int8"` does, all of them, but with every digit."""

    def pack(tensor, noise, number=0, keeps_signs=False):
        codes = tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)
        return Packed(codes, codes.new_empty(len(codes), 0), tensor.dtype)

    for module in (store, outside):
        monkeypatch.setattr(module, "pack", pack)
        monkeypatch.setattr(module, "unpack", lambda given: given.codes.view(given.dtype))
        monkeypatch.setattr(module, "packs", lambda tensor: True)
    monkeypatch.setattr(outside, "TYPES", (torch.float32, torch.float64))
    monkeypatch.setattr(outside, "LEAST", 1)


@EVERY
@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_what_is_packed_is_what_is_needed(family, ratio, packs_without_loss):
    model = family.model(torch.float64)
    if ratio < 1:
        keepgrad.apply(model, keep_ratio=ratio, seed=SEED)
    torch.manual_seed(3)
    wanted = family.run(model, torch.float64)
    wanted_grads = gradients(model, wanted)
    if ratio < 1:
        keepgrad.remove(model)
    keepgrad.apply(model, keep_ratio=ratio, seed=SEED, store="int8")
    torch.manual_seed(3)
    found = family.run(model, torch.float64)
    torch.testing.assert_close(found, wanted, rtol=family.rtol, atol=family.rtol)
    assert_close(family, gradients(model, found), wanted_grads)


def check_against_the_oracle(family: Family, ratio=0.5, **options) -> None:
    model = family.model(torch.float64)
    save = options.get("save", "heavy")
    sites = keepgrad.plan(model, keep_ratio=ratio, **options).sites
    run = partial(family.run, model, torch.float64)
    with family.apart(model):
        wanted = reduced_model(model, run, family.specs, sites, SEED, save)
    wanted_grads = gradients(model, wanted)
    keepgrad.apply(model, keep_ratio=ratio, seed=SEED, **options)
    found = run()
    torch.testing.assert_close(found, wanted, rtol=family.rtol, atol=family.rtol)
    assert_close(family, gradients(model, found), wanted_grads)


PAIRS = [("grid", "drop"), ("random", "scaled"), ("block", "fold"), ("grid", "pool"), ("grid", "fold")]
"""Every mask and every reduction; all pairs of them are tested on the two oldest families, in test_branch.py."""


@EVERY
@pytest.mark.parametrize(("mask", "reduce"), PAIRS)
def test_masks_and_reductions_equal_the_oracle(family, mask, reduce):
    check_against_the_oracle(family, mask=mask, reduce=reduce)


@EVERY
@pytest.mark.parametrize(
    ("method", "reduce"), [("qkv", "pool"), ("query", "fold"), ("query", "drop"), ("head", "drop")]
)
def test_methods_equal_the_oracle(family, method, reduce):
    if method not in family.methods:
        pytest.skip("the family has no such method")
    check_against_the_oracle(family, 0.4, attention=method, reduce=reduce, save="input")


@EVERY
def test_noise_is_what_the_model_draws(family):
    """Dropout wherever the model has it; that of the attention matrix leaves the attention to autograd."""
    model = family.model(torch.float64)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
    torch.manual_seed(3)
    wanted = family.run(model, torch.float64)
    wanted_grads = gradients(model, wanted)
    keepgrad.apply(model, keep_ratio=1.0)
    torch.manual_seed(3)
    found = family.run(model, torch.float64)
    torch.testing.assert_close(found, wanted, rtol=family.rtol, atol=family.rtol)
    assert_close(family, gradients(model, found), wanted_grads)


@EVERY
def test_frozen_parameters_get_no_gradient_and_change_nothing(family):
    model = family.model(torch.float64)
    keepgrad.apply(model, keep_ratio=0.5, seed=SEED)
    whole = gradients(model, family.run(model, torch.float64))
    keepgrad.remove(model)
    keepgrad.apply(model, keep_ratio=0.5, seed=SEED)
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 2 == 1)
    some = gradients(model, family.run(model, torch.float64))
    names = [name for name, p in model.named_parameters() if p.requires_grad and name in whole]
    assert_close(family, some, {name: whole[name] for name in names})


@EVERY
def test_autocast(family):
    model = family.model()
    plain = copy.deepcopy(model)
    keepgrad.apply(model, preset="exact", save="input")
    found = []
    for one in (plain, model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = family.run(one)
        found.append((out, gradients(one, out)))
    assert found[0][0].dtype == found[1][0].dtype
    torch.testing.assert_close(found[1][0].float(), found[0][0].float(), rtol=0.1, atol=0.1)
    wanted, kept = (torch.cat([g.flatten() for g in one[1].values()]) for one in found)
    assert torch.cosine_similarity(wanted, kept, dim=0) > 0.99


@EVERY
def test_copies_pickles_and_removal(family):
    model = family.model()
    before = {name: (type(m), {k: id(v) for k, v in vars(m).items()}) for name, m in model.named_modules()}
    keys = list(model.state_dict())
    keepgrad.apply(model, keep_ratio=0.5, seed=SEED)
    assert list(model.state_dict()) == keys
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(copy.deepcopy(model)))]
    wanted = gradients(model, family.run(model))
    for one in copies:
        assert_same(gradients(one, family.run(one)), wanted)
    model.zero_grad()
    keepgrad.remove(model)
    assert {name: (type(m), {k: id(v) for k, v in vars(m).items()}) for name, m in model.named_modules()} == before


@EVERY
def test_what_the_branches_save(family):
    """By the plan, which counts; `docs/models.md` has what is measured on whole models of real size."""
    sites = keepgrad.plan(family.model(), keep_ratio=0.5).sites
    assert sum(site.saved for site in sites) <= family.limit * sum(site.plain for site in sites)
