"""The oracle itself, against numbers written by hand and against autograd."""

import pytest
import torch
import torch.nn.functional as F

from keepgrad.ops.oracle import Piece, attend, graft, matrices, reduced_branch

GROUPS, PICKED = [[0], [1, 2], [3, 4, 5]], [0, 2, 3]


def test_a_graft_has_the_value_of_one_and_the_gradient_of_the_other():
    a, b = torch.tensor([2.0, 3.0], requires_grad=True), torch.tensor([5.0, 7.0], requires_grad=True)
    out = graft(a * a, b * b)
    torch.testing.assert_close(out, torch.tensor([4.0, 9.0]))
    out.sum().backward()
    assert a.grad is None
    torch.testing.assert_close(b.grad, torch.tensor([10.0, 14.0]))


PICK = [[1, 0, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0], [0, 0, 0, 1, 0, 0]]
MEAN = [[1, 0, 0, 0, 0, 0], [0, 1 / 2, 1 / 2, 0, 0, 0], [0, 0, 0, 1 / 3, 1 / 3, 1 / 3]]
SUM = [[1, 0, 0, 0, 0, 0], [0, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1]]
SCALED = [[1, 0, 0, 0, 0, 0], [0, 0, 2.5, 0, 0, 0], [0, 0, 0, 2.5, 0, 0]]  # five positions for two slots


@pytest.mark.parametrize(
    ("reduce", "value", "grad", "place", "size"),
    [
        ("drop", PICK, PICK, PICK, [1, 1, 1]),
        ("scaled", PICK, PICK, SCALED, [1, 1, 1]),
        ("fold", PICK, MEAN, SUM, [1, 2, 3]),
        ("pool", MEAN, MEAN, SUM, [1, 2, 3]),
    ],
)
def test_matrices_by_hand(reduce, value, grad, place, size):
    found = matrices(GROUPS, PICKED, 6, reduce, prefix=1)
    for own, wanted in ((found.value, value), (found.grad, grad), (found.place.t(), place), (found.size, size)):
        torch.testing.assert_close(own, torch.tensor(wanted, dtype=torch.float64))


def test_an_unknown_reduction_is_refused():
    with pytest.raises(ValueError, match="mean"):
        matrices(GROUPS, PICKED, 6, "mean")


def test_a_slot_of_some_members_counts_as_so_many_keys():
    q, k, v = torch.randn(3, 2, 3, 8, dtype=torch.float64)
    sizes = [1, 2, 3]
    found = attend(q, k, v, 2, torch.tensor(sizes, dtype=torch.float64))
    repeated = [rows.repeat_interleave(torch.tensor(sizes), dim=1) for rows in (k, v)]
    heads = [rows.unflatten(-1, (2, 4)).transpose(1, 2) for rows in (q, *repeated)]
    wanted = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
    torch.testing.assert_close(found, wanted)


PIECES = {
    "nothing saved between": [Piece(torch.tanh), Piece(lambda x: x * x)],
    "saved between": [Piece(torch.tanh, saved=True), Piece(lambda x: x * x)],
}


@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
@pytest.mark.parametrize("reduce", ["drop", "scaled", "fold", "pool"])
def test_groups_of_one_are_autograd(pieces, reduce):
    reduction = matrices([[p] for p in range(6)], range(6), 6, reduce)
    x = torch.randn(2, 6, 3, dtype=torch.float64, requires_grad=True)
    dy = torch.randn_like(x)
    found = reduced_branch(pieces, x, reduction)
    torch.testing.assert_close(found, torch.tanh(x).square())
    (wanted,) = torch.autograd.grad(torch.tanh(x).square(), x, dy)
    torch.testing.assert_close(torch.autograd.grad(found, x, dy)[0], wanted)


@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
def test_fold_by_hand(pieces):
    """The slot of positions 1 and 2 has the activations of 2, the gradients of both, and gives each a half."""
    reduction = matrices(GROUPS, PICKED, 6, "fold", prefix=1)
    x = torch.randn(1, 6, 3, dtype=torch.float64, requires_grad=True)
    dy = torch.randn_like(x)
    found = reduced_branch(pieces, x, reduction)
    torch.testing.assert_close(found, torch.tanh(x).square())
    (grad,) = torch.autograd.grad(found, x, dy)
    tanh = torch.tanh(x.detach()[:, 2])
    slope = 2 * tanh * (1 - tanh**2)
    half = (dy[:, 1] + dy[:, 2]) * slope / 2
    torch.testing.assert_close(grad[:, 1], half)
    torch.testing.assert_close(grad[:, 2], half)
