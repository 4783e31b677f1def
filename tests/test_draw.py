"""The draw of a step: reproduced by what a run is resumed with, and never seen by the random numbers of others."""

import copy

import pytest
import torch
from conftest import assert_same, grads, images, vit
from torch import nn

import keepgrad
from keepgrad.patch import masks_drawn


class Whole(nn.Module):
    """A model with dropout around the part that is patched."""

    def __init__(self):
        super().__init__()
        self.before, self.part, self.after = nn.Dropout(0.2), vit(), nn.Dropout(0.5)

    def forward(self, x):
        return self.after(self.part(self.before(x)))


@pytest.mark.parametrize("options", [{}, {"seed": 3}, {"store": "int8"}])
def test_a_patched_part_leaves_dropout_outside_of_it_alone(options):
    model = Whole().train()
    torch.manual_seed(0)
    wanted = model(images())
    keepgrad.apply(model.part, keep_ratio=0.5, **options)
    torch.manual_seed(0)
    torch.testing.assert_close(model(images()), wanted)


def kept(model, backward=True):
    """The positions that a step keeps."""
    loss = model(images()).square().sum()
    if backward:
        loss.backward()
    return next(iter(masks_drawn(model).values())).tolist()


def test_masks_differ_from_step_to_step_where_nothing_else_draws():
    model = vit()
    keepgrad.apply(model, keep_ratio=0.5, mask="random")
    torch.manual_seed(0)
    first = [kept(model) for _ in range(4)]
    assert len(set(map(tuple, first))) > 1
    torch.manual_seed(0)
    assert [kept(model) for _ in range(4)] == first


@pytest.mark.parametrize("resumed_at", [1, 2, 4])
def test_masks_of_a_seed_go_on_at_the_step_that_is_set(resumed_at):
    def steps(model, numbers):
        found = []
        for number in numbers:
            keepgrad.set_step(model, number)
            found.append([kept(model), kept(model)])  # two batches a step
        return found

    model = vit()
    keepgrad.apply(model, keep_ratio=0.5, mask="random", seed=5)
    twin = copy.deepcopy(model)
    unbroken = steps(model, range(6))
    assert len({str(step) for step in unbroken}) > 4
    kept(twin)
    assert steps(twin, range(resumed_at, 6)) == unbroken[resumed_at:]


def test_step_zero_is_where_a_seed_begins():
    model = vit()
    keepgrad.apply(model, keep_ratio=0.5, seed=2**62)
    twin = copy.deepcopy(model)
    keepgrad.set_step(twin, 0)
    assert_same(grads(twin, images())[1], grads(model, images())[1], rtol=0, atol=0)
    keepgrad.set_step(twin, 2**50)  # larger than any: it goes round
    grads(twin, images())


@pytest.mark.filterwarnings("default")
def test_a_step_can_be_set_in_a_compiled_model_without_recompiling():
    model = vit()
    keepgrad.apply(model, keep_ratio=0.5, mask="random", seed=5)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = []
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in (3, 4, 3):
            keepgrad.set_step(model, step)
            model.zero_grad()
            compiled(images()).square().sum().backward()
            found.append(model.blocks[0].mlp.fc1.weight.grad.clone())
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])


@pytest.mark.parametrize("step", [-1, 1.0, True, "2"])
def test_a_step_is_a_whole_number(step):
    model = vit()
    with pytest.raises(keepgrad.NotAppliedError, match="not patched"):
        keepgrad.set_step(model, 0)
    keepgrad.apply(model, seed=1)
    with pytest.raises(keepgrad.InputError, match="whole number"):
        keepgrad.set_step(model, step)
