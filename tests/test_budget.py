"""What fits a budget."""

import json

import conftest
import pytest
from conftest import convnext

import keepgrad
from keepgrad.budget import bytes_of
from keepgrad.errors import AlreadyAppliedError, BudgetError, ConfigError
from keepgrad.methods import FULL, kept

SHAPE = (64, 3, 64, 64)


def vit():
    return conftest.vit(img_size=64, patch_size=16)


def total(model, shape=SHAPE, **options):
    if not options:
        return keepgrad.estimate(model, shape).total
    keepgrad.apply(model, **options)
    try:
        return keepgrad.estimate(model, shape).total
    finally:
        keepgrad.remove(model)


@pytest.mark.parametrize("make", [vit, convnext])
def test_the_largest_keep_ratio_that_fits(make):
    model = make().train()
    budget = (total(model, keep_ratio=0.25) + total(model, keep_ratio=0.75)) // 2
    found = keepgrad.fit(model, SHAPE, budget, by="keep_ratio")
    assert found.memory.total <= budget
    assert total(model, keep_ratio=found.keep_ratio) == found.memory.total
    assert total(model, keep_ratio=found.keep_ratio + 1 / 32) > budget
    keepgrad.apply(model, **found.options)


def test_all_is_kept_where_all_fits():
    assert keepgrad.fit(vit(), SHAPE, "1TiB").keep_ratio == 1.0


def test_the_largest_batch_that_fits():
    model = vit().train()
    budget = total(model, (37, *SHAPE[1:])) + 10
    found = keepgrad.fit(model, SHAPE, budget, by="batch_size")
    assert found.batch_size == 37
    assert len(found.trials) < 10
    keepgrad.apply(model, keep_ratio=0.25)
    assert keepgrad.fit(model, SHAPE, budget, by="batch_size").batch_size > 50


def test_the_cheapest_setting_that_fits():
    model = vit().train()
    plenty = keepgrad.fit(model, SHAPE, "1TiB", by="cheapest")
    assert plenty.options == {"preset": "accurate"}
    assert plenty.best.flops == min(trial.flops for trial in plenty.trials)
    tight = keepgrad.fit(model, SHAPE, total(model, preset="small"), by="cheapest")
    assert tight.memory.total <= total(model, preset="small")
    assert all(not trial.fits for trial in tight.trials if trial.flops < tight.best.flops)
    assert not any(getattr(module, "grad_checkpointing", False) for module in model.modules())
    assert "forward" not in vars(model)


def test_settings_that_the_feature_maps_are_too_small_for_are_left_out(monkeypatch):
    methods = (FULL, kept(preset="exact"), kept(keep_ratio=0.5))
    monkeypatch.setattr("keepgrad.budget.CLASSES", (methods,))
    found = keepgrad.fit(convnext(), (4, 3, 32, 32), "1TiB", by="cheapest")
    assert {trial.name for trial in found.trials} == {"full backprop", "keepgrad exact"}


def test_nothing_fits_is_said_with_what_is_needed():
    model = vit().train()
    for by in ("keep_ratio", "batch_size", "cheapest"):
        with pytest.raises(BudgetError, match=r"nothing fits into 1\.00 KiB: the least is .* alone take"):
            keepgrad.fit(model, SHAPE, "1KiB", by=by)
    assert "forward" not in vars(model)


def test_a_fit_shows_itself():
    found = keepgrad.fit(vit(), SHAPE, "1TiB", by="cheapest")
    assert "best" in str(found)
    assert json.loads(found.to_json())["best"]["name"] == "keepgrad accurate (default)"
    assert len(found.plot().axes) == 1


@pytest.mark.parametrize(
    ("budget", "size"), [(5, 5), ("8GiB", 8 * 2**30), ("1.5 gb", 15 * 10**8), ("500MB", 5 * 10**8), ("7", 7)]
)
def test_budgets(budget, size):
    assert bytes_of(budget) == size


@pytest.mark.parametrize("budget", ["", "8 apples", "-1GiB", 0, True, None, float("nan")])
def test_wrong_budgets(budget):
    with pytest.raises(ConfigError, match="give bytes"):
        bytes_of(budget)


def test_wrong_arguments_are_named():
    model = vit()
    with pytest.raises(ConfigError, match="by='size'"):
        keepgrad.fit(model, SHAPE, by="size")
    with pytest.raises(ConfigError, match="takes no mask"):
        keepgrad.fit(model, SHAPE, by="cheapest", mask="grid")
    with pytest.raises(ConfigError, match="finds the keep_ratio"):
        keepgrad.fit(model, SHAPE, keep_ratio=0.5)
    keepgrad.apply(model)
    with pytest.raises(AlreadyAppliedError, match="remove"):
        keepgrad.fit(model, SHAPE)
