"""Values stored in 8 bits: how they are rounded, and what becomes of the gradients of sites."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import convnext, cosine, decoded, grads, images, noise, vit
from torch import nn

import keepgrad
from keepgrad.ops.store import pack, packs, unpack

# Rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [16, 24, 105, 128, 257, 384, 1365])
def test_values_come_back_to_within_a_step(dtype, width):
    torch.manual_seed(0)
    x = (torch.randn(3, 41, width) * torch.logspace(-4, 2, 41).unsqueeze(1)).to(dtype)
    packed = pack(x, noise())
    found = unpack(packed)
    assert found.dtype == dtype
    assert found.shape == x.shape
    torch.testing.assert_close(found.float(), decoded(*packed[:2]).float(), rtol=1e-2, atol=6e-8)
    groups = packed.codes.shape[-2]
    wide, found = (t.float().unflatten(-1, (groups, -1)) for t in (x, found))
    step = wide.abs().amax(-1, keepdim=True) / 126
    assert ((found - wide).abs() <= 1.02 * step + (wide.abs() * 2**-8 + 6e-8) * (dtype != torch.float32)).all()
    assert packed.codes.nbytes + packed.scales.nbytes == x.numel() + 4 * x.numel() // (width // groups)


def test_rounding_is_right_on_average_over_steps_and_over_positions():
    torch.manual_seed(0)
    x = torch.randn(200, 128)
    one = unpack(pack(x, noise())) - x
    many = torch.stack([unpack(pack(x, noise(seed))) - x for seed in range(200)])
    step = float(x.abs().amax(-1).mean()) / 126
    assert float(many.mean(0).abs().max()) < 0.2 * step  # 0.5 by chance would be 7 standard errors
    assert float(many.mean(0).square().mean().sqrt()) < 0.05 * step
    assert float(one.mean(0).abs().max()) < 0.15 * step  # each channel over its positions, in one step
    assert float(one.mean(1).abs().max()) < 0.18 * step


def test_the_same_seed_rounds_alike_and_another_does_not():
    x = torch.randn(40, 128)
    first, again, other = (pack(x, noise(seed)).codes for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(pack(x, noise(1), 0).codes, pack(x, noise(1), 1).codes)


def test_zeros_stay_zeros_and_signs_can_be_kept():
    torch.manual_seed(0)
    x = torch.randn(64, 128).relu()
    x[3] = 0
    found = unpack(pack(x, noise()))
    assert (found[x == 0] == 0).all()
    signed = torch.randn(64, 128)
    signed[5, :64] = 0
    assert torch.equal(unpack(pack(signed, noise(), 0, True)).sign(), signed.sign())
    assert not torch.equal(unpack(pack(signed, noise())).sign(), signed.sign())


def test_dropout_masks_come_back_whole():
    mask = F.dropout(torch.ones(64, 96), 0.3)
    torch.testing.assert_close(unpack(pack(mask, noise())), mask, rtol=1e-6, atol=0)


def test_what_is_not_finite_or_hardly_anything():
    x = torch.randn(8, 4, 128)
    x[1, 1, 5], x[2, 2, 7], x[3, 3, 9] = math.nan, math.inf, -math.inf
    x[4] = torch.randn(4, 128) * 1e-42
    found = unpack(pack(x, noise()))
    bad = ~found.isfinite().all(-1)
    assert bad.nonzero().tolist() == [[1, 1], [2, 2], [3, 3]]
    assert not found[bad].isfinite().any()
    assert found[4].abs().max() < 1e-30


def test_float64_narrow_rows_and_other_kinds_are_not_packed():
    assert packs(torch.randn(2, 16))
    assert not packs(torch.randn(2, 16, dtype=torch.float64))
    assert not packs(torch.randn(2, 8))
    assert not packs(torch.ones(2, 16, dtype=torch.int64))


MODELS = {
    "vit": (lambda: vit(embed_dim=48, depth=3), 32),
    "convnext": (lambda: convnext(dims=(16, 24, 32, 48)), 64),
}


@pytest.mark.parametrize("options", [{"preset": "exact"}, {}, {"preset": "small"}, {"keep_ratio": 0.5}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_the_forward_is_exact_and_the_gradient_nearly_that_of_full_precision(name, options):
    make, size = MODELS[name]
    model, x = make(), images(size, batch=8)
    plain = model(x)
    keepgrad.apply(model, seed=3, store="full", **options)
    _, wanted = grads(model, x)
    keepgrad.remove(model)
    keepgrad.apply(model, seed=3, store="int8", **options)
    out, found = grads(model, x)
    torch.testing.assert_close(out, plain)
    assert cosine(found, wanted) > 0.9995
    assert not all(torch.equal(found[key], wanted[key]) for key in found)


def test_the_gradient_is_that_of_full_precision_on_average():
    """Of a linear layer exactly so; here of a whole model, to within what 64 draws leave."""
    model, x = vit(embed_dim=48), images(batch=4)
    _, wanted = grads(model, x)
    total = dict.fromkeys(wanted, 0)
    keepgrad.apply(model, preset="exact", store="int8", seed=0)
    errors = []
    for _ in range(64):
        _, found = grads(model, x)
        errors.append(1 - cosine(found, wanted))
        total = {key: total[key] + found[key] for key in found}
    assert 1 - cosine(total, wanted) < 0.05 * sum(errors) / len(errors)


def test_relu_in_a_site_keeps_its_gradients():
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True, norm_first=True)
    x = torch.randn(16, 40, 32)
    _, wanted = grads(layer, x)
    keepgrad.apply(layer, preset="exact", store="int8")
    _, found = grads(layer, x)
    assert cosine(found, wanted) > 0.9999


def test_store_for_one_kind_of_branch():
    model = vit(embed_dim=48)
    plan = keepgrad.apply(model, preset="exact", store={"mlp": "int8"})
    assert {site.kind: site.store for site in plan.sites} == {"attention": "full", "mlp": "int8"}
    assert not plan.packs_the_rest
    by_kind = {kind: [s.saved / s.plain for s in plan.sites if s.kind == kind] for kind in ("attention", "mlp")}
    assert max(by_kind["mlp"]) < 0.22 < 0.5 < min(by_kind["attention"])


@pytest.mark.parametrize("options", [{"preset": "exact"}, {"keep_ratio": 0.5}], ids=str)
def test_compiled_sites_pack_as_eager_ones_do(options):
    model, x = vit(embed_dim=48), images()
    _, wanted = grads(model, x)
    keepgrad.apply(model, seed=0, store="int8", **options)
    eager = copy.deepcopy(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    _, first = grads(compiled, x)
    packed = {}

    def note(tensor):
        if tensor.dtype == torch.int8:
            packed[tensor.untyped_storage()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        compiled(x)
    sites = sum(site.saved for site in keepgrad.plan(vit(embed_dim=48), store="int8", **options).sites)
    assert sum(packed.values()) == pytest.approx(4 * sites * len(x) * 17, rel=0.15)  # bytes of float32 values
    first = {key.removeprefix("_orig_mod."): value for key, value in first.items()}
    with torch._dynamo.config.patch(error_on_recompile=True):
        grads(compiled, x)
    _, same = grads(eager, x)
    assert cosine(first, same) > 0.9995
    if options == {"preset": "exact"}:
        assert cosine(first, wanted) > 0.9995


def test_a_loss_scaler_sees_what_overflowed():
    model, x = vit(embed_dim=48), images()
    keepgrad.apply(model, preset="exact", store="int8")
    with torch.no_grad():
        model.blocks[1].mlp.fc1.weight.fill_(1e38)
    model(x).sum().backward()
    assert not all(p.grad.isfinite().all() for p in model.parameters())
