"""Patched models under torch.compile."""

import copy

import pytest
import torch
from conftest import assert_same, both, convnext, grads, images, vit

import keepgrad


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("options", [{}, {"seed": 4}, {"attention": "head"}, {"attention": "query", "save": "input"}])
@both
def test_compile_the_whole_model_without_recompiling(make, size, options):
    if make is convnext and "attention" in options:
        pytest.skip("no attention")
    model = make(drop_path_rate=0.2)
    keepgrad.apply(model, keep_ratio=0.5, mask="random", **options)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = []
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            model.zero_grad()
            compiled(images(size)).square().sum().backward()
            found.append({n: p.grad.clone() for n, p in model.named_parameters()})
    name = next(n for n in found[0] if "fc1.weight" in n)
    assert not torch.equal(found[0][name], found[1][name])
    assert not torch.equal(found[1][name], found[2][name])


@pytest.mark.filterwarnings("default")
def test_compile_a_model_for_images_of_any_aspect():
    model = vit(dynamic_img_size=True)
    keepgrad.apply(model, keep_ratio=0.5)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    wide = images(32)[..., :16, :]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            compiled(wide).square().sum().backward()


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("make", "options", "size"),
    [(vit, {"depth": 1}, 32), (convnext, {"depths": (1, 1, 0, 0)}, 64)],
    ids=["vit", "convnext"],
)
def test_compiled_gradients_equal_eager_ones(make, options, size):
    """By the default compiler, which takes long; what many blocks do to one another is tested above, without it."""
    model = make(**options)
    keepgrad.apply(model, keep_ratio=0.5, seed=2)
    twin = copy.deepcopy(model)
    torch.compiler.reset()
    compiled = torch.compile(twin, fullgraph=True)
    for _ in range(2):
        y, wanted = grads(model, images(size))
        twin.zero_grad()
        y_compiled = compiled(images(size))
        y_compiled.square().sum().backward()
        torch.testing.assert_close(y_compiled, y, rtol=1e-4, atol=1e-4)
        assert_same({n: p.grad for n, p in twin.named_parameters()}, wanted, rtol=1e-3, atol=1e-3)
