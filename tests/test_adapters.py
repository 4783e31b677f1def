"""The seam between models and engine: declared modules, adapters from outside, tiers, what is left alone and why."""

import copy
import re
import sys
import types
import warnings
from pathlib import Path

import pytest
import timm
import torch
from conftest import assert_same, grads, images, spread, vit
from torch import nn

import keepgrad
from keepgrad import ConfigError, NoSiteError
from keepgrad.adapters.find import find_blocks
from keepgrad.memory import saved_bytes

DOCS = Path(__file__).parent.parent / "docs"


class MyMlp(nn.Module):
    def __init__(self, width=16, hidden=64):
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class MyModel(nn.Module):
    """Two blocks of a kind that keepgrad does not know, on tokens or maps."""

    def __init__(self, mlp=MyMlp):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.mlps = nn.ModuleList(mlp() for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        for mlp in self.mlps:
            x = x + mlp(x)
        return x


def rows(*shape):
    return torch.randn(*shape, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("declared", ["class", "module", "modules"])
def test_a_declared_class_or_module_becomes_a_site(declared):
    model = spread(MyModel()).double()
    given = {"class": MyMlp, "module": model.mlps[0], "modules": [model.mlps[0], model.mlps[1]]}[declared]
    with pytest.raises(NoSiteError, match="Declare a position-wise class of your own"):
        keepgrad.apply(model, keep_ratio=0.5)
    y, wanted = grads(model, rows(2, 12))
    plan = keepgrad.apply(model, keep_ratio=1.0, modules={"mlp": given})
    assert {site.tier for site in plan.sites} == {2}
    assert len(plan.sites) == (1 if declared == "module" else 2)
    assert_same(grads(model, rows(2, 12))[1], wanted)
    keepgrad.remove(model)
    keepgrad.apply(model, keep_ratio=0.5, modules={"mlp": given})
    found, kept = grads(model, rows(2, 12))
    torch.testing.assert_close(found, y)
    assert not torch.allclose(kept["mlps.0.up.weight"], wanted["mlps.0.up.weight"])


def test_a_declared_module_saves_what_it_keeps():
    model = MyModel()
    x = torch.randn(4, 64, 8)
    full = saved_bytes(lambda: model(x), model)
    keepgrad.apply(model, keep_ratio=0.25, reduce="drop", modules={"mlp": MyMlp})
    assert saved_bytes(lambda: model(x), model) < 0.45 * full


@pytest.mark.parametrize("shape", [(2, 12), (2, 3, 4), (2, 2, 3, 4)])
def test_a_declared_module_takes_sequences_maps_and_clips(shape):
    model = spread(MyModel()).double()
    y = model(rows(*shape))
    keepgrad.apply(model, keep_ratio=0.5, modules={"mlp": MyMlp})
    found = model(rows(*shape))
    torch.testing.assert_close(found, y)
    found.sum().backward()
    assert model.forward.shared.draw is not None


def test_what_has_no_positions_runs_by_itself():
    model = spread(MyModel()).double()
    _, wanted = grads(model, rows(5))
    keepgrad.apply(model, keep_ratio=0.25, modules={"mlp": MyMlp})
    assert_same(grads(model, rows(5))[1], wanted)
    keepgrad.remove(model)
    _, wanted = grads(model, rows(2, 3))
    keepgrad.apply(model, keep_ratio=0.25, modules={"mlp": MyMlp})
    assert_same(grads(model, rows(2, 3))[1], wanted)  # fewer positions than a group


def test_a_declared_module_runs_by_itself_under_compile():
    model = spread(MyModel()).double()
    _, wanted = grads(model, rows(2, 12))
    keepgrad.apply(model, keep_ratio=0.5, modules={"mlp": MyMlp})
    assert_same(
        grads(torch.compile(model, fullgraph=True, backend="aot_eager"), rows(2, 12))[1],
        {f"_orig_mod.{name}": grad for name, grad in wanted.items()},
    )


def test_torchvisions_mlp_is_found_by_itself():
    ops = pytest.importorskip("torchvision.ops")
    model = spread(MyModel(lambda: ops.MLP(16, [64, 16], activation_layer=nn.GELU, inplace=None, dropout=0.0))).double()
    y, wanted = grads(model, rows(2, 12))
    plan = keepgrad.apply(model, keep_ratio=0.5)
    assert [site.tier for site in plan.sites] == [2, 2]
    assert all(site.saved <= 0.6 * site.plain for site in plan.sites)
    found, kept = grads(model, rows(2, 12))
    torch.testing.assert_close(found, y)
    assert not torch.allclose(kept["mlps.0.0.weight"], wanted["mlps.0.0.weight"])


class Mixing(MyMlp):
    def forward(self, x):
        return super().forward(x) + x.mean(1, keepdim=True)


class Counting(MyMlp):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Random(MyMlp):
    def forward(self, x):
        return super().forward(x) * torch.rand(())


class Pooling(MyMlp):
    def forward(self, x):
        return super().forward(x).mean(1)


class Dropping(MyMlp):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.1)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Mixing, "Mixing is not position-wise: a change of one position moved the output of others"),
        (Counting, "changes its buffer 'calls'"),
        (Random, "gives another output when it is run again"),
        (Pooling, "does not map rows"),
        (Dropping, "cannot be reduced: Dropout draws random numbers"),
    ],
)
def test_a_declaration_is_proved(kind, message):
    model = MyModel(kind)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError, match=re.escape(message)):
        keepgrad.apply(model, keep_ratio=0.5, modules={"mlp": kind})
    assert "forward" not in vars(model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("modules", [{"attention": MyMlp}, {}, MyMlp])
def test_modules_are_declared_by_the_branch_whose_settings_they_follow(modules):
    with pytest.raises(ConfigError, match=re.escape("give {'mlp': MyMlp}")):
        keepgrad.apply(MyModel(), modules=modules)


def test_a_declaration_that_nothing_uses_is_an_error():
    with pytest.raises(ConfigError, match="modules names MyMlp, which is not in VisionTransformer"):
        keepgrad.apply(vit(), modules={"mlp": MyMlp})


def test_the_text_of_the_docs_adds_a_model():
    """Exactly the code that "Add a model" shows."""
    text = (DOCS / "adding-a-model.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1)
    assert len(code.splitlines()) < 60
    module = types.ModuleType("mymodels")
    sys.modules["mymodels"] = module
    try:
        exec(compile(code, "adding-a-model.md", "exec"), module.__dict__)
        torch.manual_seed(0)
        model = spread(nn.Sequential(*(module.MyBlock(24, 3) for _ in range(2)))).double()
        x = torch.randn(2, 16, 24, dtype=torch.float64)
        y, wanted = grads(model, x)
        plan = keepgrad.apply(model, keep_ratio=1.0)
        assert [(site.kind, site.tier) for site in plan.sites] == [("attention", 1), ("mlp", 1)] * 2
        found, kept = grads(model, x)
        torch.testing.assert_close(found, y)
        assert_same(kept, wanted)
        for method in ("qkv", "query", "head"):
            keepgrad.remove(model)
            keepgrad.apply(model, keep_ratio=0.5, attention=method)
            torch.testing.assert_close(grads(model, x)[0], y)
    finally:
        del sys.modules["mymodels"]


def test_a_block_that_is_not_built_as_expected_is_refused_with_its_version():
    model = vit()
    model.blocks[0].extra = nn.Linear(3, 3)
    del model.blocks[1].norm2
    plan = keepgrad.plan(vit(depth=3), keep_ratio=0.5)
    assert len(plan.sites) == 6
    with pytest.raises(
        NoSiteError, match=rf"Block of timm {re.escape(timm.__version__)}: it has parameters that belong"
    ):
        keepgrad.plan(model, keep_ratio=0.5)


def test_a_patched_block_that_never_runs_is_warned_of_once():
    class Skipping(nn.Module):
        def __init__(self):
            super().__init__()
            self.vit = vit(depth=3)

        def forward(self, x):
            x = self.vit._pos_embed(self.vit.patch_embed(x))
            for block in self.vit.blocks[:2]:
                x = block(x)
            # What the third block does, by its parts.
            block = self.vit.blocks[2]
            x = x + block.attn(block.norm1(x))
            return x + block.mlp(block.norm2(x))

    model = Skipping()
    keepgrad.apply(model, keep_ratio=0.5)
    with pytest.warns(UserWarning, match=r"1 patched blocks did not run in this training step \(e.g. vit.blocks.2\)"):
        grads(model, images())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grads(model, images())


def test_no_warning_in_evaluation_or_under_exact():
    model = vit()
    keepgrad.apply(model, keep_ratio=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            model(images())
        with keepgrad.exact(model):
            grads(model, images())
        grads(model, images())


def test_known_blocks_are_found_anywhere_and_counted_by_trunk():
    both = nn.ModuleDict({"a": vit(depth=2), "b": nn.Sequential(nn.Identity(), vit(depth=3))})
    blocks = find_blocks(both)
    assert [block.index for block in blocks] == [0, 1, 2, 3, 4]
    assert [block.trunk for block in blocks] == ["a.blocks."] * 2 + ["b."] * 3
    ratios = [site.keep_ratio for site in keepgrad.plan(both).sites if site.kind == "mlp"]
    assert ratios == [1.0, 0.5, 1.0, 0.5, 0.5]  # the first block of each keeps everything


@pytest.mark.parametrize(
    "name", ["convit_tiny", "coat_lite_tiny", "crossvit_tiny_240", "edgenext_xx_small", "pit_ti_224"]
)
def test_other_architectures_of_timm_have_sites_and_an_exact_forward(name):
    torch.manual_seed(0)
    model = timm.create_model(name).train()
    x = torch.randn(2, *model.pretrained_cfg["input_size"])
    with torch.no_grad():
        torch.manual_seed(1)
        y = model(x)
    plan = keepgrad.apply(model, keep_ratio=0.5)
    assert plan.sites
    torch.manual_seed(1)
    found = model(x)
    torch.testing.assert_close(found, y, rtol=1e-3, atol=1e-4)
    found.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
