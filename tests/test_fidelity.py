"""Agreement with exact gradients, against figures worked out by hand."""

import copy
import json

import conftest
import pytest
import torch
import torch.nn.functional as F
from conftest import convnext
from torch import nn

import keepgrad
from keepgrad.errors import AlreadyAppliedError, ConfigError, InputError, NotAppliedError


def batch_of(seed=0):
    """Four images of 64 pixels, which both small models take, and their classes."""
    torch.manual_seed(seed)
    return torch.randn(4, 3, 64, 64), torch.randint(5, (4,))


def vit(**options):
    return conftest.vit(img_size=64, patch_size=16, **options)


def gradient(model, batch):
    model.zero_grad()
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()]).double()


def test_everything_kept_is_exact():
    model = vit().train()
    keepgrad.apply(model, preset="exact")
    report = keepgrad.fidelity(model, batch_of(), F.cross_entropy, draws=2)
    for layer in (report.whole, *report.layers, *report.parameters):
        if layer.cosine == layer.cosine:
            assert layer.cosine == pytest.approx(1, abs=1e-5)
            assert layer.norm_ratio == pytest.approx(1, abs=1e-5)
            assert layer.bias == pytest.approx(1, abs=1e-5)
            assert layer.spread == pytest.approx(0, abs=1e-4)
    assert report.whole.adam > 0.99


def test_the_figures_are_their_definitions():
    model = vit().double().train()
    batches = [tuple(t.double() if t.is_floating_point() else t for t in batch_of(s)) for s in (0, 1)]
    draws = 3
    exact = [gradient(model, batch) for batch in batches]
    kept = []
    for number, batch in enumerate(batches):
        for draw in range(draws):
            twin = copy.deepcopy(model)
            keepgrad.apply(twin, keep_ratio=0.5, seed=number * draws + draw)
            kept.append(gradient(twin, batch))
    pairs = list(zip(kept, [g for g in exact for _ in range(draws)], strict=True))

    def cosine(a, b):
        return float(a @ b / (a.norm() * b.norm()))

    def update(grads):
        second = torch.stack([g.square() for g in grads]).mean(0).sqrt()
        return torch.where(second > 0, torch.stack(grads).mean(0) / second, 0)

    means = [torch.stack(kept[k : k + draws]).mean(0) for k in (0, draws)]
    scatter = sum((g - means[i // draws]).square().sum() for i, g in enumerate(kept))
    keepgrad.apply(model, keep_ratio=0.5)
    whole = keepgrad.fidelity(model, batches, F.cross_entropy, draws).whole
    assert whole.size == sum(p.numel() for p in model.parameters())
    assert whole.cosine == pytest.approx(sum(cosine(a, b) for a, b in pairs) / len(pairs))
    assert whole.norm_ratio == pytest.approx(sum(float(a.norm() / b.norm()) for a, b in pairs) / len(pairs))
    assert whole.bias == pytest.approx(cosine(sum(kept), sum(exact)))
    assert whole.spread == pytest.approx(float(scatter / sum(b.square().sum() for _, b in pairs)) ** 0.5)
    assert whole.adam == pytest.approx(cosine(update(kept), update(exact)))
    assert 0.3 < whole.cosine < 0.9999


def test_layers_are_blocks_and_what_lies_outside():
    model = vit().train()
    keepgrad.apply(model, keep_ratio=0.5)
    report = keepgrad.fidelity(model, batch_of(), F.cross_entropy, draws=1)
    names = [layer.name for layer in report.layers]
    assert "blocks.0" in names
    assert "head" in names
    assert [p.name for p in report.parameters] == [name for name, _ in model.named_parameters()]
    assert sum(layer.size for layer in report.layers) == report.whole.size


class Normed(nn.Module):
    """A model with buffers that training changes, dropout, and drop path."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.body = vit(drop_path_rate=0.2, proj_drop_rate=0.1)

    def forward(self, x):
        return self.body(self.norm(x))


def test_nothing_of_the_model_changes():
    model = Normed()
    model.eval()
    model.body.blocks.train()
    keepgrad.apply(model, keep_ratio=0.5, seed=5)
    for p in model.parameters():
        p.grad = torch.full_like(p, 2.0)
    before = copy.deepcopy(model)
    modes = [module.training for module in model.modules()]
    keepgrad.fidelity(model, batch_of(), F.cross_entropy, draws=2)
    assert [module.training for module in model.modules()] == modes
    for a, b in zip(before.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert all(bool((p.grad == 2).all()) for p in model.parameters())
    x = batch_of()[0]
    outs = []
    for one in (model, before):
        one.train().zero_grad()
        torch.manual_seed(0)
        one(x).sum().backward()
        outs.append([p.grad for p in one.parameters()])
    for a, b in zip(*outs, strict=True):
        assert torch.equal(a, b)


def test_the_random_state_is_as_before():
    model = vit(drop_path_rate=0.2).train()
    keepgrad.apply(model, keep_ratio=0.5)
    batch = batch_of()
    state = torch.get_rng_state()
    keepgrad.fidelity(model, batch, F.cross_entropy, draws=1)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_parameter_without_a_gradient_is_none_in_json():
    model = vit().train()
    model.unused = nn.Parameter(torch.ones(3))
    keepgrad.apply(model, keep_ratio=0.5)
    report = keepgrad.fidelity(model, batch_of(), F.cross_entropy, draws=1)
    found = {p["name"]: p["cosine"] for p in json.loads(report.to_json())["parameters"]}
    assert found["unused"] is None
    assert found["head.weight"] > 0.9


def test_dropout_is_the_same_in_both_gradients():
    model = vit(drop_path_rate=0.5, proj_drop_rate=0.5).train()
    keepgrad.apply(model, preset="exact")
    report = keepgrad.fidelity(model, batch_of(), F.cross_entropy, draws=2)
    assert report.whole.cosine == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("make", [vit, convnext])
def test_compare_ranks_and_marks_the_front(make):
    model = make().train()
    before = copy.deepcopy(model.state_dict())
    configs = [
        "exact",
        {"keep_ratio": 0.5},
        keepgrad.KeepConfig(keep_ratio=0.25),
        {"keep_ratio": 0.25, "reduce": "scaled"},
    ]
    found = keepgrad.compare(model, batch_of(), F.cross_entropy, configs, draws=2)
    assert found.settings[0].name == "exact"
    assert [s.cosine for s in found.settings] == sorted((s.cosine for s in found.settings), reverse=True)
    by_name = {s.name: s for s in found.settings}
    assert by_name["keep_ratio 0.25"].bytes < by_name["keep_ratio 0.5"].bytes < found.full_bytes
    assert by_name["keep_ratio 0.25"].flops < by_name["keep_ratio 0.5"].flops < found.full_flops
    costs = [(-s.cosine, s.bytes, s.flops) for s in found.settings]
    for s, cost in zip(found.settings, costs, strict=True):
        better = [c for c in costs if c != cost and all(x <= y for x, y in zip(c, cost, strict=True))]
        assert s.front == (not better)
    assert "forward" not in vars(model)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))


def test_reports_show_themselves(tmp_path):
    model = vit().train()
    batch = batch_of()
    compared = keepgrad.compare(model, batch, F.cross_entropy, ["exact", "balanced"], draws=1)
    keepgrad.apply(model, keep_ratio=0.5)
    report = keepgrad.fidelity(model, batch, F.cross_entropy, draws=1)
    assert json.loads(report.to_json())["whole"]["cosine"] == report.whole.cosine
    assert json.loads(compared.to_json())["settings"][0]["name"] == "exact"
    assert "blocks.0" in str(report)
    assert "balanced" in compared._repr_html_()
    for number, shown in enumerate((report, compared)):
        shown.save_plot(tmp_path / f"{number}.png")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.png", "1.png"]
    with pytest.raises(keepgrad.KeepgradError, match="cannot write"):
        report.save_plot(tmp_path / "none" / "a.png")
    with pytest.raises(keepgrad.KeepgradError, match="cannot write"):
        report.save_plot(tmp_path / "a.docx")
    assert len(list(tmp_path.iterdir())) == 2


def test_wrong_input_is_named():
    model = vit().train()
    batch = batch_of()
    with pytest.raises(NotAppliedError, match="not patched"):
        keepgrad.fidelity(model, batch, F.cross_entropy)
    with pytest.raises(ConfigError, match="at least one"):
        keepgrad.compare(model, batch, F.cross_entropy, [])
    with pytest.raises(ConfigError, match="at least one"):
        keepgrad.compare(model, batch, F.cross_entropy, "paper")
    keepgrad.apply(model)
    with pytest.raises(AlreadyAppliedError, match="remove"):
        keepgrad.compare(model, batch, F.cross_entropy, ["exact"])
    for wrong in (batch[0], [], [batch[0]], None):
        with pytest.raises(InputError, match="pair"):
            keepgrad.fidelity(model, wrong, F.cross_entropy)
    with pytest.raises(InputError, match="draws=0"):
        keepgrad.fidelity(model, batch, F.cross_entropy, draws=0)
    with pytest.raises(InputError, match="one number"):
        keepgrad.fidelity(model, batch, lambda out, _: out)
    with pytest.raises(InputError, match="the loss is nan"):
        keepgrad.fidelity(model, batch, lambda out, _: out.sum() * float("nan"))
    with pytest.raises(InputError, match="frozen"):
        keepgrad.fidelity(model.requires_grad_(False), batch, F.cross_entropy)
