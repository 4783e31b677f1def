import re

import pytest
import torch
from torch import nn

import keepgrad
from keepgrad import InputError


@pytest.fixture
def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 4)).double()


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("as_mask", [False, True])
def test_value_is_exact_and_gradient_is_that_of_the_kept_positions(mlp, dim, as_mask):
    x = torch.randn(2, 5, 7, 6, dtype=torch.float64, requires_grad=True)
    kept = torch.tensor([0, 3, 4])
    given = torch.zeros(x.shape[dim], dtype=torch.bool).index_fill(0, kept, True) if as_mask else kept
    y = keepgrad.sbp(mlp, x, given, dim=dim)
    torch.testing.assert_close(y, mlp(x))
    dy = torch.randn_like(y)
    inputs = (x, *mlp.parameters())
    found = torch.autograd.grad(y, inputs, dy)
    live = torch.zeros(x.shape[dim], dtype=torch.float64).index_fill(0, kept, 1.0)
    shape = [1] * 4
    shape[dim] = -1
    wanted = torch.autograd.grad(mlp(x), inputs, dy * live.view(shape))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_everything_kept_is_autograd_and_functions_work():
    x = torch.randn(2, 5, 3, requires_grad=True)
    y = keepgrad.sbp(torch.tanh, x, torch.arange(5))
    (found,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(found, 1 - torch.tanh(x) ** 2)


def test_only_kept_positions_are_saved(mlp):
    x = torch.randn(2, 8, 6, dtype=torch.float64)
    whole = keepgrad.memory.saved_bytes(lambda: mlp(x), mlp)
    part = keepgrad.memory.saved_bytes(lambda: keepgrad.sbp(mlp, x, torch.arange(2)), mlp)
    assert part < 0.3 * whole


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (torch.tensor([0, 5]), "outside 0 to 4"),
        (torch.tensor([-1]), "outside 0 to 4"),
        (torch.tensor([1, 1]), "twice"),
        (torch.tensor([], dtype=torch.long), "empty"),
        (torch.zeros(5, dtype=torch.bool), "empty"),
        (torch.ones(4, dtype=torch.bool), "4 entries, but x has 5"),
        (torch.ones(5), "integer indices"),
        (torch.ones(2, 2, dtype=torch.long), "2 dimensions"),
    ],
)
def test_bad_indices_are_clear_errors(kept, message):
    with pytest.raises(InputError, match=message):
        keepgrad.sbp(torch.tanh, torch.randn(2, 5, 3), kept)


def test_dimensions_count_from_the_end_too():
    x = torch.randn(2, 5, 3)
    torch.testing.assert_close(keepgrad.sbp(torch.tanh, x, torch.tensor([1]), dim=-2), torch.tanh(x))


def test_a_function_over_positions_is_refused():
    with pytest.raises(InputError, match="position-wise"):
        keepgrad.sbp(lambda x: x.mean(1), torch.randn(2, 5, 3), torch.tensor([0, 1]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": "x"}, "dim='x' is no dimension of x, which has 3; give a whole number"),
        ({"dim": 1.0}, "dim=1.0 is no dimension of x, which has 3; give a whole number"),
        ({"dim": 3}, "dim=3 is no dimension of x, which has 3; give a whole number"),
        ({"x": None}, "f is a Linear, x is a NoneType, kept is a Tensor; give a module or a function, and two tensors"),
        ({"f": None}, "f is a NoneType, x is a Tensor, kept is a Tensor; give a module or a function, and two tensors"),
        ({"kept": [0]}, "f is a Linear, x is a Tensor, kept is a list; give a module or a function, and two tensors"),
    ],
)
def test_arguments_of_the_wrong_kind(options, message):
    given = {"f": nn.Linear(3, 3), "x": torch.randn(2, 4, 3), "kept": torch.tensor([0]), **options}
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        keepgrad.sbp(**given)
