"""keepgrad under autocast, with a loss scaler, and in other memory formats."""

import copy

import pytest
import torch
from conftest import assert_same, both, convnext, grads, images, vit

import keepgrad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("save", ["heavy", "input"])
@both
def test_autocast(make, size, dtype, save):
    model, x = make(), images(size)
    with torch.autocast("cpu", dtype=dtype):
        y, wanted = grads(model, x)
        keepgrad.apply(model, keep_ratio=1.0, save=save)
        y_kept, found = grads(model, x)
        torch.testing.assert_close(y_kept, y, rtol=0.02, atol=0.02)
        for name in wanted:
            assert found[name].dtype == wanted[name].dtype == torch.float32
            close = torch.cosine_similarity(found[name].flatten(), wanted[name].flatten(), dim=0)
            assert close > 0.99, name
        keepgrad.remove(model)
        keepgrad.apply(model, keep_ratio=0.5, save=save)
        assert torch.equal(grads(model, x)[0], y_kept)


def test_autocast_saves_hidden_rows_in_the_compute_dtype():
    model = vit()
    keepgrad.apply(model, keep_ratio=0.5)
    dtypes = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: dtypes.append((t.shape[-1:], t.dtype)) or t, lambda t: t),
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        model(images())
    assert (torch.Size([96]), torch.bfloat16) in dtypes
    assert (torch.Size([72]), torch.bfloat16) in dtypes


def test_autocast_keeps_weights_trainable_for_what_runs_beside_it():
    """A cast cached inside keepgrad would carry no graph and take the gradient from the exact pass."""
    model, x = vit(), images()
    keepgrad.apply(model, keep_ratio=1.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        kept = model(x)
        with keepgrad.exact(model):
            model(x).float().square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    del kept


def test_grad_scaler():
    model = vit()
    keepgrad.apply(model, keep_ratio=0.5, seed=0)
    twin = copy.deepcopy(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(images()).float().square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    with torch.autocast("cpu", dtype=torch.float16):
        twin(images()).float().square().mean().backward()
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.cosine_similarity(p.grad.flatten(), q.grad.flatten(), dim=0) > 0.99, name
    before = [p.clone() for p in model.parameters()]
    scaler.step(optimizer)
    assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("conv_mlp", [False, True])
def test_channels_last(conv_mlp):
    model = convnext(conv_mlp=conv_mlp)
    keepgrad.apply(model, keep_ratio=0.5, downsample=True, seed=0)
    twin = copy.deepcopy(model).to(memory_format=torch.channels_last)
    y, wanted = grads(model, images(64))
    y_last, found = grads(twin, images(64).to(memory_format=torch.channels_last))
    torch.testing.assert_close(y_last, y)
    assert_same(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batch", [0, 1])
@both
def test_small_batches_and_strided_input(make, size, batch):
    model = make()
    keepgrad.apply(model, keep_ratio=0.5)
    x = images(size, batch=2).transpose(2, 3)[:batch]
    grads(model, x)
