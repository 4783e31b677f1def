"""What autograd saves outside of sites, in 8 bits."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_same, convnext, cosine, grads, images
from torch import nn

import keepgrad
from keepgrad.memory import saved_bytes

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
