"""Values stored in 8 bits: how they are rounded, what is packed, and what is left alone."""

import copy
import gc
import math
import pickle
import weakref

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from conftest import assert_same, convnext, draw, grads, images, run, vit
from torch import nn

import keepgrad
from keepgrad.memory import measure, peak_bytes, saved_bytes
from keepgrad.ops.attention import Core, SelfAttention
from keepgrad.ops.stages import Linear, linear
from keepgrad.ops.store import dither, pack, packs, unpack


def noise(seed=0):
    return dither(seed, torch.empty(0))


def decoded(codes, scales):
    """Packed values as numbers, written out in numpy."""
    return torch.from_numpy(codes.numpy() * scales.numpy().view(np.float32)).flatten(-2)


def cosine(a, b):
    a, b = (torch.cat([g.double().flatten() for g in one.values()]) for one in (a, b))
    return float(torch.cosine_similarity(a, b, dim=0))


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


# Sites


@pytest.mark.parametrize("reduced", [False, True])
def test_attention_is_differentiated_at_the_rounded_q_k_and_v(reduced):
    """The oracle is autograd's attention at the values that are in the bytes."""
    torch.manual_seed(0)
    core = Core(heads=2, kv_heads=2, sections=(32, 32, 32))
    weight, bias = (t.requires_grad_() for t in (torch.randn(96, 32) * 0.4, torch.randn(96)))
    out_weight = (torch.randn(32, 32) * 0.3).requires_grad_()
    stage = SelfAttention("qkv", Linear(True), core, (2, 0))
    x = torch.randn(2, 12, 32, requires_grad=True)
    saved = []
    kept = draw(0, keepgrad.Layout((3, 4)), 0.5, "grid", "drop", batch=2) if reduced else None
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = run([(stage, (weight, bias)), linear(out_weight)], x, kept, "heavy", None, noise())
    dy = torch.randn_like(y)
    y.backward(dy)
    found = [t.grad.clone() for t in (weight, bias, out_weight, x)]

    pairs = [(t, saved[i + 1]) for i, t in enumerate(saved) if t.dtype == torch.int8]
    # The input of the chain and, where it is not redone, the output of attention come first.
    rows, *middle, qkv = [decoded(*pair) for pair in pairs]
    slots = slice(None) if kept is None else kept.picked
    leaf = qkv.clone().requires_grad_()
    q, k, v = (part.unflatten(-1, (2, 16)).transpose(1, 2) for part in leaf.split(32, -1))
    attended = ((q @ k.mT / 4).softmax(-1) @ v).transpose(1, 2).flatten(2)
    d_slots = dy[:, slots]
    (d_qkv,) = torch.autograd.grad(attended, leaf, d_slots @ out_weight)
    read = middle[0] if middle else attended.detach()
    d_x = torch.zeros_like(x)
    d_x[:, slots] = d_qkv @ weight.detach()
    wanted = [
        d_qkv.flatten(0, 1).T @ rows.flatten(0, 1),
        d_qkv.sum((0, 1)),
        d_slots.flatten(0, 1).T @ read.flatten(0, 1),
        d_x,
    ]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


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


# Outside of sites


class Net(nn.Module):
    """Convolutions, norms, a pooling with indices, a shortcut, a view that two layers read."""

    def __init__(self, inplace=True):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(inplace))
        self.pool = nn.MaxPool2d(2)
        self.conv, self.norm, self.act = nn.Conv2d(24, 24, 3, padding=1), nn.GroupNorm(4, 24), nn.ReLU(inplace)
        self.left, self.right, self.head = nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 5)

    def forward(self, x):
        x = self.pool(self.stem(x))
        x = self.act(x + self.norm(self.conv(x)))
        rows = x.flatten(2).transpose(1, 2)
        return self.head((self.left(rows) * self.right(rows).sigmoid()).mean(1))


@pytest.mark.parametrize("inplace", [False, True])
def test_any_model_is_packed(inplace):
    torch.manual_seed(0)
    model, x = Net(inplace), images(24, batch=8)
    plain = saved_bytes(lambda: model(x), model)
    wanted_out, wanted = grads(model, x)
    keys = list(model.state_dict())
    plan = keepgrad.apply(model, store="int8")
    assert plan.sites == ()
    assert "8 bits" in str(plan)
    out, found = grads(model, x)
    torch.testing.assert_close(out, wanted_out)
    assert cosine(found, wanted) > 0.9999
    assert list(model.state_dict()) == keys
    # The batch and the indices of the pooling stay as they are.
    indices = 8 * 24 * 12 * 12 * 8
    assert saved_bytes(lambda: model(x), model) - x.nbytes - indices < 0.28 * (plain - x.nbytes - indices)
    keepgrad.remove(model)
    assert saved_bytes(lambda: model(x), model) == plain
    assert_same(grads(model, x)[1], wanted)


def test_a_tensor_with_many_readers_is_packed_once_and_held_by_nobody():
    class Readers(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(64))

        def forward(self, x):
            hidden = x * self.scale
            watched.append(weakref.ref(hidden.untyped_storage()))
            a = hidden.sin() + hidden.transpose(0, 1).cos().transpose(0, 1) + hidden.view(-1, 32).exp().view_as(hidden)
            return a.sum(), hidden[:, :32].square().sum(), hidden[0].square().sum()

    watched = []
    model, x = Readers(), torch.randn(256, 64)
    keepgrad.apply(model, store="int8")
    out = model(x)
    gc.collect()
    assert watched[0]() is None
    held = saved_bytes(lambda: model(x), model)
    numbers = x.numel()
    # x itself; hidden once, once more for the half of its columns, which has gaps; exp's output; a row.
    assert held < x.nbytes + (1 + 0.5 + 1) * numbers * 132 / 128 + 1024
    sum(out).backward()


def test_parameters_and_weights_that_are_made_are_not_rounded():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(128, 128, bias=False))

        def forward(self, x):
            return self.layer(x)

    model = Normed()
    x = torch.randn(64, 128, requires_grad=True)
    keepgrad.apply(model, store="int8")
    dy = torch.randn(64, 128)
    model(x).backward(dy)
    torch.testing.assert_close(x.grad, dy @ model.layer.weight.detach())


def test_weights_that_autocast_casts_are_not_rounded():
    model = nn.Sequential(nn.Linear(128, 128, bias=False))
    x = torch.randn(64, 128, requires_grad=True)
    keepgrad.apply(model, store="int8")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x)
    dy = torch.randn(64, 128).bfloat16()
    out.backward(dy)
    wanted = (dy @ model[0].weight.detach().bfloat16()).float()
    torch.testing.assert_close(x.grad, wanted, rtol=1e-2, atol=1e-2)


class Attends(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.qkv, self.dropout = nn.Linear(32, 96), dropout

    def forward(self, x, mask=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(query=q, key=k, value=v, attn_mask=mask, dropout_p=self.dropout)
        return out.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("masked", [False, True])
def test_fused_attention_is_redone(masked):
    torch.manual_seed(0)
    model, x = Attends(), torch.randn(4, 64, 32)
    mask = torch.randn(4, 2, 64, 64, requires_grad=True) if masked else None
    model(x, mask).square().sum().backward()
    wanted = {"weight": model.qkv.weight.grad.clone()} | ({"mask": mask.grad.clone()} if masked else {})
    model.zero_grad()
    if masked:
        mask.grad = None
    keepgrad.apply(model, store="int8")
    model(x, mask).square().sum().backward()
    found = {"weight": model.qkv.weight.grad} | ({"mask": mask.grad} if masked else {})
    assert cosine(found, wanted) > 0.9998
    held = saved_bytes(lambda: model(x), model)
    assert held < x.nbytes + 3 * x.numel() * 20 / 16 + 1024  # heads of 16 channels have a scale each


def test_attention_with_dropout_is_left_to_torch():
    model, x = Attends(0.2), torch.randn(4, 64, 32)
    torch.manual_seed(1)
    model(x).square().sum().backward()
    wanted = model.qkv.weight.grad.clone()
    model.zero_grad()
    keepgrad.apply(model, store="int8")
    torch.manual_seed(1)
    model(x).square().sum().backward()
    torch.testing.assert_close(model.qkv.weight.grad, wanted, rtol=1e-2, atol=1e-2)


def test_log_probabilities_are_not_rounded():
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(8, 4096)

        def forward(self, x, y):
            return F.cross_entropy(self.head(x), y)

    model, x, y = Loss(), torch.randn(16, 8), torch.arange(16)
    model(x, y).backward()
    wanted = model.head.weight.grad.clone()
    model.zero_grad()
    keepgrad.apply(model, store="int8")
    model(x, y).backward()
    torch.testing.assert_close(model.head.weight.grad, wanted)


def test_evaluation_exact_and_no_grad_are_untouched():
    model, x = Net().eval(), images(24, batch=8)
    evaluated = saved_bytes(lambda: model(x), model)
    plain = saved_bytes(lambda: model.train()(x), model)
    keepgrad.apply(model, store="int8")
    with keepgrad.exact(model):
        assert saved_bytes(lambda: model(x), model) == plain
    model.eval()
    assert saved_bytes(lambda: model(x), model) == evaluated
    with torch.no_grad():
        model(x)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_of_a_model_without_sites(how):
    model, x = Net(), images(24, batch=8)
    keepgrad.apply(model, store="int8", seed=0)
    twin = how(model)
    assert_same(grads(twin, x)[1], grads(model, x)[1])


def test_options_that_nothing_can_use_are_errors():
    for options in ({"preset": "small"}, {"keep_ratio": 0.5}, {"save": "input"}, {"reduce": "pool"}):
        with pytest.raises(keepgrad.NoSiteError, match="no block that keepgrad knows"):
            keepgrad.apply(Net(), store="int8", **options)
    with pytest.raises(keepgrad.NoSiteError, match="store='int8'"):
        keepgrad.apply(Net())
    with pytest.raises(keepgrad.ConfigError, match="store='int4' is not known"):
        keepgrad.apply(Net(), store="int4")
    with pytest.raises(keepgrad.ConfigError, match="no attention branch"):
        keepgrad.apply(convnext(), store={"attention": "int8"})


def test_the_random_stream_is_that_of_the_plain_model():
    """Dropout inside a model draws the same with and without packing."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64))
    x = torch.randn(128, 64)
    torch.manual_seed(5)
    wanted = model(x)
    keepgrad.apply(model, store="int8")
    torch.manual_seed(5)
    torch.testing.assert_close(model(x), wanted)


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
