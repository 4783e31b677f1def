import json

import pytest
import timm
import torch
from conftest import convnext, vit
from torch import nn

import keepgrad
from keepgrad.memory import saved_bytes


def covered(plan, kind="mlp"):
    return [site.name for site in plan.sites if site.kind == kind]


def test_plan_shows_every_site_and_leaves_the_model_alone():
    model = vit()
    plan = keepgrad.plan(model, keep_ratio=0.5, reduce="drop")
    assert "forward" not in vars(model)
    text = str(plan)
    assert text.count("blocks.0") == 2
    assert "attention  1     0.5   grid  drop    qkv" in text
    assert "0.31x" in text
    assert json.loads(plan.to_json())["sites"][0]["keep_ratio"] == 0.5
    assert keepgrad.apply(model, keep_ratio=0.5, reduce="drop") == plan


def test_default_is_accurate():
    assert keepgrad.plan(vit()).sites == keepgrad.plan(vit(), preset="accurate").sites
    assert {site.kind: site.keep_ratio for site in keepgrad.plan(vit()).sites} == {"attention": 1.0, "mlp": 0.5}


def test_keywords_take_precedence_over_the_preset():
    plan = keepgrad.plan(vit(), preset="paper", keep_ratio=0.25, layers="all")
    assert {(site.keep_ratio, site.reduce) for site in plan.sites} == {(0.25, "drop")}
    assert len(plan.sites) == 4


def test_a_careful_schedule_goes_by_the_whole_model():
    plan = keepgrad.plan(convnext(), keep_ratio=0.5, schedule="careful", downsample=True)
    by_stage = {}
    for site in plan.sites:
        by_stage.setdefault(site.name.split(".")[1], set()).add(site.keep_ratio)
    stages = sorted(by_stage)
    assert by_stage[stages[0]] == {0.25}
    assert by_stage[stages[-1]] == {1.0}
    assert all(by_stage[stage] == {0.5} for stage in stages[1:-1])
    part = keepgrad.plan(convnext(), keep_ratio=0.5, schedule="careful", layers="first 1/2")
    assert 1.0 not in {site.keep_ratio for site in part.sites}
    ratios = [site.keep_ratio for site in keepgrad.plan(vit(depth=3), keep_ratio=0.5, schedule="careful").sites]
    assert ratios == [1.0, 1.0, 0.5, 0.5, 0.5, 0.5]
    last = keepgrad.plan(vit(depth=3), keep_ratio=0.5, schedule="careful", layers="last 2/3")
    assert {site.keep_ratio for site in last.sites} == {0.5}


def test_ratio_by_branch_list_and_schedule():
    plan = keepgrad.plan(vit(depth=3), keep_ratio={"attention": 0.5, "mlp": [0.1, 0.2, 0.3]})
    assert [site.keep_ratio for site in plan.sites] == [0.5, 0.1, 0.5, 0.2, 0.5, 0.3]
    plan = keepgrad.plan(vit(depth=3), keep_ratio={"mlp": 0.5}, schedule="decreasing")
    assert [s.keep_ratio for s in plan.sites if s.kind == "mlp"] == [0.75, 0.5, 0.25]
    assert [s.keep_ratio for s in plan.sites if s.kind == "attention"] == [1.0, 1.0, 1.0]
    plan = keepgrad.plan(vit(depth=2), keep_ratio=0.5, save={"attention": "input"})
    assert [s.save for s in plan.sites] == ["input", "heavy", "input", "heavy"]


def test_branches_can_be_left_out():
    assert {s.kind for s in keepgrad.plan(vit(), keep_ratio=0.5, attention="off").sites} == {"mlp"}
    assert {s.kind for s in keepgrad.plan(vit(), keep_ratio=0.5, mlp=False).sites} == {"attention"}


def test_paper_preset_covers_the_papers_layers():
    vit_plan = keepgrad.plan(timm.create_model("vit_tiny_patch16_224"), preset="paper")
    assert covered(vit_plan) == covered(vit_plan, "attention") == [f"blocks.{i}" for i in range(4, 12)]
    assert {(s.keep_ratio, s.mask, s.reduce, s.method) for s in vit_plan.sites} == {
        (0.5, "grid", "drop", "qkv"),
        (0.5, "grid", "drop", ""),
    }
    for name, third in (("convnext_tiny", 6), ("convnext_base", 21)):
        plan = keepgrad.plan(timm.create_model(name), preset="paper")
        blocks = {0: 3, 1: 3, 2: third}
        assert covered(plan) == [f"stages.{s}.blocks.{b}" for s, count in blocks.items() for b in range(count)]
        assert covered(plan, "downsample") == ["stages.1.downsample", "stages.2.downsample"]
        assert {s.name[:8]: s.cell for s in plan.sites} == {"stages.0": 4, "stages.1": 2, "stages.2": 1}


def test_features_only_models_have_sites():
    model = timm.create_model("convnext_atto.d2_in1k", features_only=True, pretrained=False)
    assert len(keepgrad.plan(model, keep_ratio=0.5).sites) == 12
    model = timm.create_model("vit_tiny_patch16_224", features_only=True)
    assert len(keepgrad.plan(model, keep_ratio=0.5).sites) == 24


def test_branches_that_cannot_be_reduced_are_listed_with_the_reason():
    model = vit()
    model.blocks[0].attn.register_forward_hook(lambda *_: None)
    plan = keepgrad.plan(model, keep_ratio=0.5)
    assert len(plan.sites) == 3
    assert "left alone: blocks.0.attention: Attention has hooks, which expect to see every position once" in str(plan)


@pytest.mark.parametrize(
    "options",
    [
        {"preset": "exact"},
        {"keep_ratio": 0.5},
        {"keep_ratio": 0.5, "save": "input"},
        {"preset": "small"},
        {"preset": "accurate"},
        {"keep_ratio": 0.5, "attention": "query"},
        {"keep_ratio": 0.5, "attention": "head"},
        {"keep_ratio": 0.5, "attention": "head", "save": "input"},
        {"keep_ratio": 1.0, "attention": "head", "save": "input"},
    ],
)
@pytest.mark.parametrize("form", [{}, {"init_values": 0.5}])
def test_expected_saving_is_what_is_measured(options, form):
    model = vit(depth=1, img_size=64, patch_size=4, class_token=False, global_pool="avg", num_heads=4, **form).blocks
    x = torch.randn(4, 256, 24, requires_grad=True)
    plan = keepgrad.plan(model, **options)
    full = saved_bytes(lambda: model(x), model)
    keepgrad.apply(model, **options)
    kept = saved_bytes(lambda: model(x), model)
    expected = sum(s.saved for s in plan.sites) / sum(s.plain for s in plan.sites)
    assert kept / full == pytest.approx(expected, abs=0.03)


def test_convnext_expected_saving():
    model = convnext()
    plan = keepgrad.plan(model, keep_ratio=0.5)
    for site in plan.sites:
        assert site.saved / site.plain == pytest.approx(5 * 0.5 / 11, abs=0.01)


def test_two_models_in_one_have_stages_of_their_own():
    both = nn.ModuleDict({"a": convnext(), "b": convnext()})
    one = [(site.cell, site.name) for site in keepgrad.plan(convnext(), preset="paper").sites]
    two = [(site.cell, site.name) for site in keepgrad.plan(both, keep_ratio=0.5, reduce="drop").sites]
    assert [cell for cell, name in two if name.startswith("a")] == [cell for cell, name in two if name.startswith("b")]
    assert max(cell for cell, _ in one) == 4
