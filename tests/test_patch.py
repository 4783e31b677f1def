import copy
import math

import pytest
import timm
import torch
from conftest import assert_same, convnext, grads, images, vit
from timm.layers import SwiGLU
from torch import nn

import keepgrad
from keepgrad import (
    AlreadyAppliedError,
    ConfigError,
    InputError,
    KeepConfig,
    KeepgradError,
    NoSiteError,
    NotAppliedError,
)
from keepgrad.memory import peak_bytes
from keepgrad.sampling import IMAGE_MASKS, Layout

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


def fingerprint(model):
    """All that a module tree is made of."""
    modules = {name: (type(m), {k: id(v) for k, v in vars(m).items()}) for name, m in model.named_modules()}
    values = {name: t.clone() for name, t in model.state_dict(keep_vars=True).items()}
    identity = {name: id(p) for name, p in model.named_parameters()}
    hooks = {name: (dict(m._forward_hooks), dict(m._forward_pre_hooks)) for name, m in model.named_modules()}
    return modules, identity, hooks, values


def assert_unchanged(model, before):
    after = fingerprint(model)
    assert after[:3] == before[:3]
    assert after[3].keys() == before[3].keys()
    assert all(torch.equal(after[3][k], before[3][k]) for k in after[3])


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


def test_masks_change_from_step_to_step_and_follow_the_seed():
    model = vit()
    keepgrad.apply(model, keep_ratio=0.5, mask="random")
    torch.manual_seed(0)
    steps = [grads(model, images())[1]["blocks.0.mlp.fc1.weight"] for _ in range(3)]
    assert not torch.equal(steps[0], steps[1])
    assert not torch.equal(steps[1], steps[2])
    torch.manual_seed(0)
    assert torch.equal(grads(model, images())[1]["blocks.0.mlp.fc1.weight"], steps[0])
    state = torch.get_rng_state()
    third = grads(model, images())[1], grads(model, images())[1]
    torch.set_rng_state(state)
    resumed = copy.deepcopy(model)
    keepgrad.remove(resumed)
    keepgrad.apply(resumed, keep_ratio=0.5, mask="random")
    assert_same(grads(resumed, images())[1], third[0], rtol=0, atol=0)
    assert_same(grads(resumed, images())[1], third[1], rtol=0, atol=0)


def test_a_seed_makes_masks_independent_of_the_random_state():
    found = []
    for state in (1, 2):
        model = vit()
        keepgrad.apply(model, keep_ratio=0.5, mask="random", seed=7)
        torch.manual_seed(state)
        before = torch.get_rng_state()
        found.append([grads(model, images())[1] for _ in range(2)])
        assert torch.equal(torch.get_rng_state(), before)
    assert_same(found[0][0], found[1][0], rtol=0, atol=0)
    assert_same(found[0][1], found[1][1], rtol=0, atol=0)
    name = "blocks.0.mlp.fc1.weight"
    assert not torch.equal(found[0][0][name], found[0][1][name])


def test_masks_change_without_the_models_own_forward_too():
    model = vit()
    keepgrad.apply(model, keep_ratio=0.5, mask="random")
    found = []
    for _ in range(3):
        model.zero_grad()
        model.forward_features(images()).square().sum().backward()
        found.append(model.blocks[0].mlp.fc1.weight.grad.clone())
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])


def test_all_sites_of_a_step_share_the_mask():
    model = vit()
    keepgrad.apply(model, keep_ratio=0.5, mask="random")
    model(images())
    shared = model.forward.shared
    assert len(shared.draw.kept) == 1
    assert len(shared.draw.seen) == 4


def test_other_image_sizes_and_patch_dropout():
    for model, size in ((vit(dynamic_img_size=True), 48), (vit(patch_drop_rate=0.3), 32)):
        keepgrad.apply(model, keep_ratio=0.5)
        grads(model, images(size))


def test_masks_follow_the_aspect_of_the_images():
    model = vit(dynamic_img_size=True)
    keepgrad.apply(model, keep_ratio=0.5)
    patch = model.patch_embed.patch_size[0]
    for height, width in ((3, 7), (6, 2), (4, 4)):
        model(torch.rand(1, 3, height * patch, width * patch))
        (key,) = model.forward.shared.draw.kept
        assert key[1] == Layout((height, width), model.num_prefix_tokens)
    keepgrad.remove(model)
    assert "forward" not in vars(model.patch_embed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_ratio": 0.0}, r"keep_ratio=0.0 is outside \(0, 1\]"),
        ({"keep_ratio": 1.5}, r"outside \(0, 1\]"),
        ({"keep_ratio": -0.5}, r"outside \(0, 1\]"),
        ({"keep_ratio": math.nan}, r"keep_ratio=nan is outside"),
        ({"keep_ratio": "half"}, r"keep_ratio='half': give a number"),
        ({"keep_ratio": True}, r"give a number"),
        ({"keep_ratio": []}, r"empty list"),
        ({"keep_ratio": [0.5]}, r"lists 1 ratios, but 2 blocks"),
        ({"keep_ratio": [0.5, 2.0]}, r"outside"),
        ({"keep_ratio": lambda i, n: 7.0}, r"keep_ratio=7.0 is outside"),
        ({"keep_ratio": {"heads": 0.5}}, r"'attention', for 'mlp'"),
        ({"keep_ratio": {}}, r"'attention', for 'mlp'"),
        ({"mask": "stripes"}, r"mask='stripes' is not known; use one of 'grid', 'random', 'block'"),
        ({"reduce": "max"}, r"reduce='max' is not known"),
        ({"schedule": "cosine"}, r"schedule='cosine' is not known"),
        ({"keep_ratio": [0.5, 0.5], "schedule": "increasing"}, r"goes with one keep_ratio"),
        ({"attention": "keys"}, r"attention='keys' is not known"),
        ({"save": "nothing"}, r"save='nothing' is not known"),
        ({"save": {"mlp": "all"}}, r"save='all' is not known"),
        ({"preset": "tiny"}, r"preset='tiny' is not known"),
        ({"mlp": "yes"}, r"mlp='yes': give True or False"),
        ({"seed": 1.5}, r"seed=1.5"),
        ({"layers": []}, r"layers is empty"),
        ({"layers": [5]}, r"block 5, but the model has blocks 0 to 1"),
        ({"layers": "middle"}, r"layers='middle' is not understood"),
        ({"layers": "last 3/2"}, r"not understood"),
        ({"layers": 3}, r"layers=3"),
        ({"layers": lambda name: False}, r"chooses none of the 2 blocks"),
        ({"attention": "off", "mlp": False}, r"leave no branch"),
        ({"downsample": True}, r"no downsample branch"),
        ({"keep_ratio": {"attention": 0.3}, "attention": "off"}, r"sets 'attention', which is switched off"),
        ({"save": {"mlp": "input"}, "mlp": False}, r"sets 'mlp', which is switched off"),
        ({"keep_ratio": lambda i, n: None}, r"keep_ratio=None: give a number"),
        ({"seed": 2**64}, r"does not fit"),
        ({"keepratio": 0.5}, r"keepratio.*the options are preset, keep_ratio"),
    ],
)
def test_bad_settings_are_clear_errors_and_leave_the_model_alone(options, message):
    model = vit()
    before = fingerprint(model)
    with pytest.raises(ConfigError, match=message):
        keepgrad.apply(model, **options)
    assert_unchanged(model, before)
    with pytest.raises(ConfigError, match=message):
        keepgrad.plan(model, **options)


def test_config_or_keywords_but_not_both():
    model = vit()
    with pytest.raises(ConfigError, match="not both"):
        keepgrad.apply(model, KeepConfig(keep_ratio=0.5), mask="grid")
    with pytest.raises(ConfigError, match="config is a float"):
        keepgrad.apply(model, 0.5)
    by_config = keepgrad.plan(model, KeepConfig(keep_ratio=0.5))
    assert by_config == keepgrad.plan(model, keep_ratio=0.5)


def test_a_model_without_sites_is_an_error():
    model = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(NoSiteError, match="Sequential has no block that keepgrad knows"):
        keepgrad.apply(model, keep_ratio=0.5)


def test_convnext_has_no_attention_to_set():
    with pytest.raises(ConfigError, match="no attention branch"):
        keepgrad.apply(convnext(), attention="head")
    for options in ({"keep_ratio": {"attention": 0.5, "mlp": 0.5}}, {"save": {"attention": "input"}}):
        with pytest.raises(ConfigError, match="no attention branch"):
            keepgrad.apply(convnext(), **options)


@pytest.mark.parametrize("norm", ["batchnorm2d", "groupnorm1"])
def test_norms_over_positions_are_not_reduced(norm):
    with pytest.raises(NoSiteError, match="works over positions or samples"):
        keepgrad.apply(convnext(conv_mlp=True, norm_layer=norm), keep_ratio=0.5)


class Noisy(nn.Module):
    """A layer that keepgrad does not know, with dropout inside."""

    def __init__(self, width, out):
        super().__init__()
        self.layer, self.drop = nn.Linear(width, out), nn.Dropout(0.1)

    def forward(self, x):
        return self.drop(self.layer(x))


@pytest.mark.parametrize(
    ("layer", "module", "reason"),
    [
        ("drop1", nn.AlphaDropout(0.3), "AlphaDropout draws random numbers"),
        ("act", nn.RReLU(), "RReLU draws random numbers"),
        ("act", nn.ReLU(inplace=True), "ReLU works in place"),
    ],
)
def test_layers_that_cannot_be_redone_leave_the_branch_alone(layer, module, reason):
    model = vit()
    setattr(model.blocks[0].mlp, layer, module)
    plan = keepgrad.apply(model, keep_ratio=1.0)
    assert reason in str(plan)
    _, found = grads(model, images(), seed=1)
    keepgrad.remove(model)
    assert_same(found, grads(model, images(), seed=1)[1], rtol=1e-4, atol=1e-5)


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


def test_masks_follow_the_random_state_under_checkpointing_too():
    model = vit()
    model.set_grad_checkpointing()
    keepgrad.apply(model, keep_ratio=0.5, mask="random")
    assert_same(grads(model, images(), seed=1)[1], grads(model, images(), seed=1)[1], rtol=0, atol=0)


@pytest.mark.parametrize("reduce", ["drop", "scaled", "fold", "pool"])
@pytest.mark.parametrize("ratio", [0.5, 0.25])
def test_gradients_vary_from_step_to_step_with_every_reduction(reduce, ratio):
    model = convnext()
    keepgrad.apply(model, keep_ratio=ratio, reduce=reduce)
    found = {float(grads(model, images(64))[1]["stages.0.blocks.0.mlp.fc1.weight"].sum()) for _ in range(8)}
    assert len(found) > 1


def test_applying_twice_and_removing_twice():
    model = vit()
    with pytest.raises(NotAppliedError, match="not patched"):
        keepgrad.remove(model)
    with pytest.raises(NotAppliedError, match="not patched"), keepgrad.exact(model):
        pass
    keepgrad.apply(model, keep_ratio=0.5)
    for again in (model, model.blocks[0], nn.Sequential(model)):
        with pytest.raises(AlreadyAppliedError, match="already patched"):
            keepgrad.apply(again, keep_ratio=0.25)
    keepgrad.remove(model)
    keepgrad.apply(model, keep_ratio=0.25)


def test_an_input_smaller_than_a_group_names_the_layer():
    model = convnext()
    keepgrad.apply(model, keep_ratio=0.25)
    with pytest.raises(InputError, match=r"stages\.3\.blocks\.0 \(mlp\): .*only 1x1"):
        model(images(32))
    grads(model, images(64))


def test_every_error_is_of_one_family():
    for error in (AlreadyAppliedError, ConfigError, InputError, NoSiteError, NotAppliedError):
        assert issubclass(error, KeepgradError)


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


@pytest.mark.filterwarnings("ignore")
def test_a_dynamically_quantised_model_has_no_sites():
    model = torch.ao.quantization.quantize_dynamic(vit(), {nn.Linear}, dtype=torch.qint8).train()
    with pytest.raises(NoSiteError, match="Linear is quantised, for inference alone"):
        keepgrad.apply(model, keep_ratio=0.5)


@pytest.mark.parametrize(
    "options", [{}, {"keep_ratio": 0.5}, {"preset": "balanced"}, {"preset": "exact", "store": "int8"}]
)
def test_a_step_on_the_meta_device(options):
    model = vit().to("meta")
    keepgrad.apply(model, **options)
    model(images().to("meta")).sum().backward()
    assert all(p.grad.is_meta for p in model.parameters())


@pytest.mark.parametrize("ratio", [1e-320, 1e-10, {"mlp": 1e-320}, [1e-320, 0.5]])
def test_a_ratio_that_keeps_less_than_a_position_is_refused_at_once(ratio):
    with pytest.raises(ConfigError, match="is less than one position of any input; give at least 1e-09"):
        keepgrad.apply(vit(), keep_ratio=ratio)


@pytest.mark.parametrize("given", [None, "vit", vit])
@pytest.mark.parametrize("call", [keepgrad.apply, keepgrad.plan, keepgrad.remove])
def test_what_is_no_model_is_refused(call, given):
    with pytest.raises(keepgrad.InputError, match=f"^model is a {type(given).__name__}; give a torch.nn.Module$"):
        call(given)
    with pytest.raises(keepgrad.InputError, match=r"^model is a"), keepgrad.exact(given):
        pass
