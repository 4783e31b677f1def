import math

import pytest
import torch
from conftest import draw, groups_of

from keepgrad import InputError, Layout, kept_indices
from keepgrad.ops.oracle import matrices
from keepgrad.sampling import IMAGE_MASKS, MASKS, REDUCTIONS, slot_count

GRIDS = [
    *(
        Layout((4, 4)),
        Layout((4, 4), prefix=1),
        Layout((7, 7)),
        Layout((5, 6), prefix=3),
        Layout((1, 9)),
        Layout((3, 1)),
    ),
    *(Layout((9,)), Layout((8,), prefix=2), Layout((2, 4, 4)), Layout((3, 3, 5), prefix=1)),
]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("ratio", [0.125, 0.25, 0.3, 0.5, 0.75, 0.9])
def test_groups_split_all_positions_and_one_of_each_is_picked(mask, grid, ratio):
    frames = grid.shape[0] if mask == "frame" and len(grid.shape) == 3 else 0
    if (frames or math.prod(grid.shape)) < round(1 / ratio):
        pytest.skip("smaller than a group")
    if mask == "frame" and not frames:
        pytest.skip("no clip")
    slots = slot_count(math.prod(grid.shape), ratio)
    if frames:
        slots = slot_count(frames, ratio) * math.prod(grid.shape[1:])
    for seed in range(5):
        kept = draw(seed, grid, ratio, mask, "fold")
        if kept is None:
            assert slots == math.prod(grid.shape)
            continue
        groups = groups_of(kept)
        assert len(groups) == grid.prefix + slots
        assert sorted(p for group in groups for p in group) == list(range(kept.positions))
        assert all(int(p) in group for p, group in zip(kept.picked, groups, strict=True))
        assert [len(g) for g in groups] == kept.size.int().tolist()
        assert max(map(len, groups[grid.prefix :])) - min(map(len, groups[grid.prefix :])) <= 1
        assert kept.picked[: grid.prefix].tolist() == list(range(grid.prefix))


@pytest.mark.parametrize("mask", IMAGE_MASKS)
@pytest.mark.parametrize("ratio", [0.25, 0.3, 0.5, 0.75])
def test_every_position_is_kept_equally_often(mask, ratio):
    grid, draws = Layout((4, 6)), 4000
    counts = torch.zeros(24)
    for seed in range(draws):
        counts[draw(seed, grid, ratio, mask, "drop").picked] += 1
    share = slot_count(24, ratio) / 24
    error = (share * (1 - share) / draws) ** 0.5
    assert (counts / draws - share).abs().max() < 5 * error


def test_grid_at_one_half_is_the_papers_checkerboard():
    row, col = torch.meshgrid(torch.arange(6), torch.arange(8), indexing="ij")
    phases = set()
    for seed in range(10):
        kept = draw(seed, Layout((6, 8)), 0.5, "grid", "drop").picked
        phase = ((row + col) % 2).flatten()[kept].unique()
        assert len(phase) == 1
        phases.add(int(phase))
    assert phases == {0, 1}


@pytest.mark.parametrize(("ratio", "shapes"), [(0.5, {(2, 1), (1, 2)}), (0.25, {(2, 2)}), (0.125, {(2, 4), (4, 2)})])
def test_grid_groups_are_tiles_of_neighbours_that_vary(ratio, shapes):
    """But for the tiles at the turns of the curve, and the one that joins its two ends."""
    found, groupings = set(), set()
    for seed in range(20):
        kept = draw(seed, Layout((16, 16)), ratio, "grid", "pool")
        groups = groups_of(kept)
        groupings.add(tuple(sorted(map(tuple, groups))))
        sides = [(len({p // 16 for p in group}), len({p % 16 for p in group})) for group in groups]
        tiles = [side for side in sides if side in shapes]
        assert len(tiles) >= 0.7 * len(groups)
        found |= set(tiles)
    assert found == shapes
    assert len(groupings) > 1


def test_block_keeps_one_contiguous_piece():
    for seed in range(5):
        kept = set(draw(seed, Layout((2, 8)), 0.5, "block", "drop").picked.tolist())
        columns = [{(c) in kept, (c + 8) in kept} for c in range(8)]
        changes = sum(columns[c] != columns[c - 1] for c in range(8))
        assert len(kept) == 8
        assert changes in (2, 4)  # two ends of the piece, each perhaps in the middle of a column


def test_random_masks_differ_from_draw_to_draw():
    draws = {tuple(draw(seed, Layout((8, 8)), 0.5, "random", "drop").picked.tolist()) for seed in range(20)}
    assert len(draws) == 20


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("ratio", [0.25, 0.4])
def test_gather_and_give_back_equal_their_matrices(reduce, ratio):
    grid = Layout((5, 4), prefix=2)
    kept = draw(1, grid, ratio, "grid", reduce, batch=3)
    positions = 22
    dense = matrices(groups_of(kept), kept.picked.tolist(), positions, reduce, grid.prefix)
    x, dy, onto = (torch.randn(3, positions, 6, dtype=torch.float64) for _ in range(3))
    slots = torch.randn(3, kept.slots, 6, dtype=torch.float64)
    tight = {"atol": 1e-12, "rtol": 1e-12}
    torch.testing.assert_close(kept.gather(x), dense.value @ x, **tight)
    torch.testing.assert_close(kept.gather_grad(dy), dense.place.t() @ dy, **tight)
    torch.testing.assert_close(kept.give_back(slots), dense.grad.t() @ slots, **tight)
    before = onto.clone()
    torch.testing.assert_close(kept.give_back(slots, onto), onto + dense.grad.t() @ slots, **tight)
    assert torch.equal(onto, before)
    bias = kept.key_bias(torch.float64)
    bias = None if bias is None else bias.squeeze(0)
    torch.testing.assert_close(torch.zeros(kept.slots).double() if bias is None else bias, dense.size.log(), **tight)


@pytest.mark.parametrize("mask", IMAGE_MASKS)
def test_a_cell_kept_at_the_coarse_stage_is_kept_at_the_fine_one(mask):
    coarse = set(draw(5, Layout((4, 6)), 0.5, mask, "drop").picked.tolist())
    fine = draw(5, Layout((8, 12), cell=2), 0.5, mask, "drop").picked.tolist()
    assert {(p // 12 // 2) * 6 + (p % 12) // 2 for p in fine} == coarse
    assert len(fine) == 4 * len(coarse)


def test_cells_that_do_not_tile_the_map_fall_back_to_positions():
    assert draw(0, Layout((9, 12), cell=2), 0.5, "grid", "drop").slots == 54


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_dtype_and_an_empty_batch(dtype):
    kept = draw(0, Layout((4, 4)), 0.5, "grid", "fold")
    x = torch.randn(2, 16, 3).to(dtype)
    assert kept.gather_grad(x).dtype == dtype
    empty = draw(0, Layout((4, 4)), 0.5, "grid", "fold", batch=0)
    assert empty.gather_grad(x[:0]).shape == (0, 8, 3)
    assert empty.give_back(empty.gather_grad(x[:0]), x[:0]).shape == (0, 16, 3)


def test_a_map_smaller_than_a_group_is_an_error_that_says_what_to_do():
    with pytest.raises(InputError, match=r"1 of every 4 positions.*only 1x3.*larger keep_ratio"):
        draw(0, Layout((1, 3)), 0.25, "grid", "fold")


def test_kept_indices_are_sorted_and_reproducible():
    kept = kept_indices(Layout((4, 4), prefix=1), 0.5, "random", seed=3)
    assert torch.equal(kept, kept_indices(Layout((4, 4), prefix=1), 0.5, "random", seed=3))
    assert kept.tolist() == sorted(kept.tolist())
    assert kept[0] == 0
    assert len(kept) == 9
    assert kept_indices(Layout((2, 2)), 1.0).tolist() == [0, 1, 2, 3]


def test_prefix_tokens_are_never_scaled():
    kept = draw(0, Layout((4, 4), prefix=2), 0.25, "grid", "scaled")
    slots = kept.gather_grad(torch.ones(2, 18, 1))[1].flatten()
    assert slots.tolist() == [1.0, 1.0, 4.0, 4.0, 4.0, 4.0]
