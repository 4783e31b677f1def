"""The masks of a patched model: new in each step, shared by its sites, following seed, size and aspect."""

import copy

import pytest
import torch
from conftest import assert_same, convnext, grads, images, vit

import keepgrad
from keepgrad.sampling import Layout


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
