"""Whole blocks of both architectures against the oracle, in float64, for every mask, reduction, method and policy."""

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_same, convnext, images, vit, written_out
from timm.layers import GluMlp, RmsNorm, SwiGLU

import keepgrad
from keepgrad import Layout
from keepgrad.ops.oracle import Piece, attend, reduced_branch
from keepgrad.sampling import IMAGE_MASKS, REDUCTIONS

SEED = 11


def oracle_vit(model, x, ratios, mask, reduce, method, save):
    """The forward of a small ViT with the reduced gradients grafted on, written from the modules."""
    attention_ratio, mlp_ratio = ratios
    side = model.patch_embed.grid_size[0]
    grid = Layout((side, side), model.num_prefix_tokens)
    heavy = save == "heavy"
    x = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(x))))
    for block in model.blocks:
        attn, heads = block.attn, block.attn.num_heads
        reduction = written_out(SEED, grid, attention_ratio, mask, "drop" if reduce == "scaled" else reduce)
        width = attn.qkv.out_features // 3

        def normed(qkv, attn=attn, heads=heads):
            q, k, v = qkv.chunk(3, -1)
            q, k = (norm(t.unflatten(-1, (heads, -1))).flatten(-2) for norm, t in ((attn.q_norm, q), (attn.k_norm, k)))
            return q, k, v

        def full(qkv, normed=normed, heads=heads):
            return attend(*normed(qkv), heads)

        tail = [Piece(attn.norm), Piece(lambda r, attn=attn, block=block: block.ls1(attn.proj(r)))]
        if method == "qkv":

            def slots(r, normed=normed, heads=heads, size=reduction.size):
                return attend(*normed(r), heads, size)

            exact_redo = attention_ratio == 1
            pieces = [
                Piece(block.norm1),
                Piece(attn.qkv, saved=heavy),
                Piece(full, saved=heavy or not exact_redo, slots=slots),
                *tail,
            ]
            x = x + reduced_branch(pieces, x, reduction)
        elif method == "query":
            n = block.norm1(x)
            weight, bias = attn.qkv.weight, attn.qkv.bias
            q = F.linear(reduction.slots(n), weight[:width], bias[:width])
            kv = F.linear(n, weight[width:], bias[width:])
            q_slots = attn.q_norm(q.unflatten(-1, (heads, -1))).flatten(-2)
            k = attn.k_norm(kv[..., :width].unflatten(-1, (heads, -1))).flatten(-2)
            out = attend(q_slots, k, kv[..., width:], heads)
            exact_out = full(attn.qkv(n)).detach()
            out = keepgrad.ops.oracle.graft(reduction.value @ exact_out, out)
            for piece in tail:
                out, exact_out = piece.full(out), piece.full(exact_out)
            x = x + keepgrad.ops.oracle.graft(exact_out, reduction.place @ out)
        else:
            count = keepgrad.sampling.slot_count(heads, attention_ratio)
            chosen = keepgrad.sampling.hashed(torch.tensor(SEED), 3, heads).argsort()[:count]
            out = full(attn.qkv(block.norm1(x)))
            live = torch.zeros(heads, dtype=torch.bool)
            live[chosen] = True
            live = live.repeat_interleave(width // heads)
            out = torch.where(live, out, out.detach())
            for piece in tail:
                out = piece.full(out)
            x = x + out
        mlp = block.mlp
        reduction = written_out(SEED, grid, mlp_ratio, mask, reduce)
        pieces = [Piece(block.norm2), *mlp_pieces(mlp, heavy), Piece(lambda r, b=block: b.ls2(b.mlp.fc2(r)))]
        x = x + reduced_branch(pieces, x, reduction)
    return model.forward_head(model.norm(x))


def mlp_pieces(mlp, heavy):
    if isinstance(mlp, SwiGLU):
        both = Piece(lambda r: torch.cat([mlp.fc1_g(r), mlp.fc1_x(r)], -1), saved=heavy)
        gate = Piece(lambda r: mlp.act(r.chunk(2, -1)[0]) * r.chunk(2, -1)[1])
        return [both, gate, Piece(mlp.norm)]
    if isinstance(mlp, GluMlp):
        gate = Piece(lambda r: r.chunk(2, -1)[0] * mlp.act(r.chunk(2, -1)[1]))
        return [Piece(mlp.fc1, saved=heavy), gate, Piece(mlp.norm)]
    return [Piece(mlp.fc1, saved=heavy), Piece(mlp.act), Piece(mlp.norm)]


def check_vit(model, ratios, mask="grid", reduce="fold", method="qkv", save="heavy", size=32):
    model = model.double()
    x = images(size, dtype=torch.float64)
    model.zero_grad()
    expected = oracle_vit(model, x, ratios, mask, reduce, method, save)
    expected.square().sum().backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    keep_ratio = {"attention": ratios[0], "mlp": ratios[1]}
    keepgrad.apply(model, keep_ratio=keep_ratio, mask=mask, reduce=reduce, attention=method, save=save, seed=SEED)
    y = model(x)
    torch.testing.assert_close(y, expected)
    y.square().sum().backward()
    assert_same({name: p.grad for name, p in model.named_parameters()}, wanted, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("mask", IMAGE_MASKS)
@pytest.mark.parametrize("save", ["heavy", "input"])
def test_vit_equals_the_oracle(mask, reduce, save):
    check_vit(vit(), (0.5, 0.25), mask, reduce, save=save)


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("method", ["qkv", "query", "head"])
@pytest.mark.parametrize("save", ["heavy", "input"])
def test_vit_methods_equal_the_oracle(method, reduce, save):
    check_vit(vit(qk_norm=True), (0.4, 0.5), "grid", reduce, method, save)


@pytest.mark.parametrize("save", ["heavy", "input"])
@pytest.mark.parametrize(
    "form",
    [
        {"init_values": 0.7},
        {"reg_tokens": 3},
        {"class_token": False, "global_pool": "avg"},
        {"mlp_layer": SwiGLU, "init_values": 0.5},
        {"mlp_layer": GluMlp},
        {"qk_norm": True, "norm_layer": RmsNorm},
        {"scale_mlp_norm": True, "scale_attn_norm": True},
        {"pre_norm": True, "qkv_bias": True, "proj_bias": False},
        {"img_size": 40},  # 5x5 patches: no group divides them
    ],
    ids=lambda form: "-".join(form),
)
def test_vit_forms_equal_the_oracle(form, save):
    if form.get("global_pool") == "avg":
        form = {**form, "fc_norm": False}
    check_vit(vit(**form), (0.5, 0.3), save=save, size=form.get("img_size", 32))


@pytest.mark.parametrize("ratios", [(1.0, 0.5), (0.5, 1.0), (1.0, 1.0), (0.75, 0.9)])
@pytest.mark.parametrize("save", ["heavy", "input"])
def test_vit_ratios_equal_the_oracle(ratios, save):
    check_vit(vit(), ratios, save=save)


def oracle_convnext(model, x, ratio, mask, reduce, save, downsample):
    heavy = save == "heavy"
    x = model.stem(x)
    coarsest = 3
    for number, stage in enumerate(model.stages):
        if downsample and number:
            norm, conv = stage.downsample
            height, width = x.shape[2] // 2, x.shape[3] // 2
            patches = x.unflatten(3, (width, 2)).unflatten(2, (height, 2)).permute(0, 2, 4, 3, 5, 1)
            patches = patches.flatten(3).flatten(1, 2)
            reduction = written_out(SEED, Layout((height, width), cell=2 ** (coarsest - number)), ratio, mask, reduce)

            def on_patches(rows, norm=norm, conv=conv):
                maps = rows.flatten(0, 1).view(-1, 2, 2, conv.in_channels).permute(0, 3, 1, 2)
                return conv(norm(maps)).flatten(1).view(*rows.shape[:2], -1)

            rows = reduced_branch([Piece(on_patches)], patches, reduction)
            x = rows.unflatten(1, (height, width)).permute(0, 3, 1, 2)
        else:
            x = stage.downsample(x)
        for block in stage.blocks:
            mixed = block.conv_dw(x)
            height, width = mixed.shape[2:]
            reduction = written_out(SEED, Layout((height, width), cell=2 ** (coarsest - number)), ratio, mask, reduce)

            def linear(rows, layer):
                return F.linear(rows, layer.weight.flatten(1), layer.bias)

            pieces = [
                Piece(lambda r, b=block: F.layer_norm(r, r.shape[-1:], b.norm.weight, b.norm.bias, b.norm.eps)),
                Piece(lambda r, b=block, f=linear: f(r, b.mlp.fc1), saved=heavy),
                Piece(F.gelu),
                Piece(lambda r, b=block, f=linear: f(r, b.mlp.fc2) * b.gamma),
            ]
            rows = reduced_branch(pieces, mixed.permute(0, 2, 3, 1).flatten(1, 2), reduction)
            x = x + rows.unflatten(1, (height, width)).permute(0, 3, 1, 2)
    return model.forward_head(model.norm_pre(x))


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("mask", IMAGE_MASKS)
@pytest.mark.parametrize("save", ["heavy", "input"])
@pytest.mark.parametrize(("conv_mlp", "downsample"), [(False, False), (True, True)])
def test_convnext_equals_the_oracle(mask, reduce, save, conv_mlp, downsample):
    model = convnext(conv_mlp=conv_mlp).double()
    x = images(64, dtype=torch.float64)
    expected = oracle_convnext(model, x, 0.5, mask, reduce, save, downsample)
    expected.square().sum().backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    keepgrad.apply(model, keep_ratio=0.5, mask=mask, reduce=reduce, save=save, downsample=downsample, seed=SEED)
    y = model(x)
    torch.testing.assert_close(y, expected)
    y.square().sum().backward()
    assert_same({name: p.grad for name, p in model.named_parameters()}, wanted, rtol=1e-8, atol=1e-9)
