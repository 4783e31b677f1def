"""A patched model: its forward, its modules, and how it is taken back."""

import copy

import pytest
import timm
import torch
from conftest import Noisy, assert_same, assert_unchanged, convnext, fingerprint, grads, images, vit
from timm.layers import SwiGLU
from torch import nn

import keepgrad
from keepgrad.memory import peak_bytes
from keepgrad.sampling import IMAGE_MASKS

NOISY = {"proj_drop_rate": 0.3, "attn_drop_rate": 0.2, "drop_path_rate": 0.4, "pos_drop_rate": 0.1, "drop_rate": 0.1}
FORMS = {
    "plain": {},
    "average pooling": {"class_token": False, "global_pool": "avg"},
    "registers": {"reg_tokens": 2, "no_embed_class": True},
    "qk-norm": {"qk_norm": True},
    "layer scale": {"init_values": 0.5},
    "swiglu": {"mlp_layer": SwiGLU},
    "noisy": {**NOISY, "init_values": 0.5},
    "drop path": {"drop_path_rate": 0.5, "proj_drop_rate": 0.2},
}


def nodes(tensor):
    """The names of all nodes of the graph behind a tensor."""
    found, stack = set(), [tensor.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in found:
            found.add(node)
            stack += [child for child, _ in node.next_functions]
    return {node.name() for node in found}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("save", ["heavy", "input"])
@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_training_forward_is_the_models_own_and_ratio_one_is_autograd(form, save, ratio):
    model = vit(**form)
    y, wanted = grads(model, images(), seed=3)
    keepgrad.apply(model, keep_ratio=ratio, save=save)
    y_kept, found = grads(model, images(), seed=3)
    torch.testing.assert_close(y_kept, y)
    if ratio == 1:
        assert_same(found, wanted, rtol=1e-4, atol=1e-5)
    else:
        assert found.keys() == wanted.keys()
        assert any(not torch.allclose(found[name], wanted[name]) for name in found)


@pytest.mark.parametrize("mask", IMAGE_MASKS)
@pytest.mark.parametrize("method", ["qkv", "query", "head", "off"])
def test_forward_is_exact_for_every_mask_and_method(mask, method):
    model = vit(**NOISY)
    y, _ = grads(model, images(), seed=3)
    keepgrad.apply(model, keep_ratio=0.5, mask=mask, attention=method)
    torch.testing.assert_close(grads(model, images(), seed=3)[0], y)


@pytest.mark.parametrize("conv_mlp", [False, True])
@pytest.mark.parametrize("downsample", [False, True])
def test_convnext_forward_is_exact_and_ratio_one_is_autograd(conv_mlp, downsample):
    model = convnext(conv_mlp=conv_mlp, drop_path_rate=0.5)
    y, wanted = grads(model, images(64), seed=3)
    keepgrad.apply(model, keep_ratio=1.0, downsample=downsample)
    y_kept, found = grads(model, images(64), seed=3)
    torch.testing.assert_close(y_kept, y)
    assert_same(found, wanted, rtol=1e-4, atol=1e-5)


def test_odd_feature_maps_lose_what_the_strided_convolution_leaves_out():
    model = convnext()
    x = images(68)  # 17, 8, 4 and 2 positions a side
    y, wanted = grads(model, x)
    keepgrad.apply(model, keep_ratio=1.0, downsample=True)
    y_kept, found = grads(model, x)
    torch.testing.assert_close(y_kept, y)
    assert_same(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [vit, lambda: convnext().eval().train()])
def test_input_gradients(make):
    model = make()
    size = 32 if isinstance(model, timm.models.VisionTransformer) else 64
    x = images(size).requires_grad_()
    model(x).square().sum().backward()
    wanted, x.grad = x.grad, None
    keepgrad.apply(model, preset="exact")
    model(x).square().sum().backward()
    torch.testing.assert_close(x.grad, wanted, rtol=1e-4, atol=1e-5)


def test_evaluation_no_grad_and_exact_run_the_models_own_code():
    model = vit()
    keepgrad.apply(model, keep_ratio=0.5)
    assert any("Chain" in name for name in nodes(model(images())))
    with keepgrad.exact(model):
        assert not any("Chain" in name for name in nodes(model(images())))
    assert any("Chain" in name for name in nodes(model(images())))
    model.eval()
    assert not any("Chain" in name for name in nodes(model(images())))
    plain = copy.deepcopy(model)
    keepgrad.remove(plain)
    assert torch.equal(model(images()), plain(images()))
    model.train()
    with torch.no_grad():
        assert torch.equal(model(images()), plain.train()(images()))


def test_exact_is_undone_by_an_exception():
    model = vit()
    keepgrad.apply(model, keep_ratio=0.5)
    with pytest.raises(ZeroDivisionError), keepgrad.exact(model):
        raise ZeroDivisionError
    assert any("Chain" in name for name in nodes(model(images())))


def test_the_model_keeps_its_modules_parameters_and_class():
    model = vit(init_values=0.5)
    names = [name for name, _ in model.named_modules()]
    keys = list(model.state_dict())
    parameters = [id(p) for p in model.parameters()]
    keepgrad.apply(model, keep_ratio=0.5)
    assert [name for name, _ in model.named_modules()] == names
    assert list(model.state_dict()) == keys
    assert [id(p) for p in model.parameters()] == parameters
    assert type(model) is timm.models.VisionTransformer
    assert type(model.blocks[0]) is timm.models.vision_transformer.Block
    model.load_state_dict(vit(init_values=0.5).state_dict())


@pytest.mark.parametrize("make", [vit, convnext])
def test_remove_restores_the_model_bit_for_bit(make):
    model = make()
    before = fingerprint(model)
    keepgrad.apply(model, preset="paper")
    model(images(64 if make is convnext else 32)).sum().backward()
    model.zero_grad()
    keepgrad.remove(model)
    assert_unchanged(model, before)


def test_remove_gives_back_a_forward_that_was_there_before():
    model = vit()
    calls = []

    def forward(x, **kwargs):
        calls.append(1)
        return type(model.blocks[0]).forward(model.blocks[0], x, **kwargs)

    model.blocks[0].forward = forward
    keepgrad.apply(model, keep_ratio=0.5)
    with keepgrad.exact(model):
        model(images())
    assert calls == [1]
    keepgrad.remove(model)
    assert model.blocks[0].forward is forward


def test_a_single_block_and_a_sequence_of_blocks_can_be_patched():
    for model in (vit().blocks[0], vit().blocks):
        x = torch.randn(2, 16, 24)
        before = fingerprint(model)
        y = model(x)
        keepgrad.apply(model, keep_ratio=0.5)
        torch.testing.assert_close(model(x), y)
        model(x).sum().backward()
        model.zero_grad()
        keepgrad.remove(model)
        assert_unchanged(model, before)


def test_dropout_inside_of_a_layer_that_is_not_known():
    model = vit().double()
    model.blocks[0].mlp.fc1 = Noisy(24, 96).double()
    x = images(dtype=torch.float64)
    y, wanted = grads(model, x, seed=1)
    for save in ("heavy", "input"):
        assert len(keepgrad.apply(model, keep_ratio=1.0, save=save).sites) == 4
        y_kept, found = grads(model, x, seed=1)
        torch.testing.assert_close(y_kept, y)
        assert_same(found, wanted)
        keepgrad.remove(model)
    keepgrad.apply(model, keep_ratio=0.5)
    torch.testing.assert_close(grads(model, x, seed=1)[0], y)
    assert "forward" not in vars(model.blocks[0].mlp.fc1.drop)


def test_the_activation_of_a_gate_keeps_its_parameters():
    model = vit(mlp_layer=SwiGLU, act_layer=nn.PReLU)
    plan = keepgrad.apply(model, keep_ratio=1.0)
    assert "PReLU has parameters" in str(plan)
    assert "blocks.0.mlp.act.weight" in grads(model, images())[1]


@pytest.mark.parametrize("reduce", ["drop", "fold", "pool"])
@pytest.mark.parametrize("save", ["heavy", "input"])
@pytest.mark.parametrize(("model", "size"), [(vit, 32), (convnext, 64)])
def test_a_forward_in_pieces_of_the_batch_is_the_whole_one(model, size, reduce, save, monkeypatch):
    found = []
    for piece_bytes in (2**40, 1):
        monkeypatch.setattr("keepgrad.ops.chain.PIECE_BYTES", piece_bytes)
        patched = model(drop_path_rate=0.3).double()
        keepgrad.apply(patched, keep_ratio=0.5, reduce=reduce, save=save)
        found.append(grads(patched, images(size, batch=5, dtype=torch.float64), seed=3))
    torch.testing.assert_close(found[0][0], found[1][0])
    assert_same(found[0][1], found[1][1])


def test_pieces_of_the_batch_make_temporaries_small(monkeypatch):
    x = images(64, batch=8)
    peaks = []
    for piece_bytes in (2**40, 2**14):
        monkeypatch.setattr("keepgrad.ops.chain.PIECE_BYTES", piece_bytes)
        model = convnext()
        keepgrad.apply(model, keep_ratio=0.25, save="input")
        peaks.append(peak_bytes(lambda model=model: model(x)))
    assert peaks[1] < 0.9 * peaks[0]


@pytest.mark.parametrize(
    "options", [{}, {"keep_ratio": 0.5}, {"preset": "balanced"}, {"preset": "exact", "store": "int8"}]
)
def test_a_step_on_the_meta_device(options):
    model = vit().to("meta")
    keepgrad.apply(model, **options)
    model(images().to("meta")).sum().backward()
    assert all(p.grad.is_meta for p in model.parameters())
