"""Clips: masks over frames, rows and columns, and what only video models have."""

from __future__ import annotations

import pytest
import torch
from conftest import draw, grads, groups_of, vit
from families import FAMILIES
from families.video import FAMILIES as VIDEO
from families.video import clips
from test_families import check_against_the_oracle

import keepgrad
from keepgrad import ConfigError, InputError, Layout, kept_indices
from keepgrad.patch import masks_drawn
from keepgrad.sampling import MASKS, REDUCTIONS, sample, slot_count

CLIP = Layout((4, 6, 8))


def places(positions, layout: Layout) -> list[tuple[int, int, int]]:
    _, height, width = layout.shape
    return [(p // (height * width), p // width % height, p % width) for p in map(int, positions)]


def test_grid_at_one_half_is_a_checkerboard_over_space_and_time():
    phases = set()
    for seed in range(10):
        kept = places(draw(seed, CLIP, 0.5, "grid", "drop").picked, CLIP)
        (phase,) = {sum(place) % 2 for place in kept}
        assert len(kept) == 96
        phases.add(phase)
    assert phases == {0, 1}


@pytest.mark.parametrize(
    ("ratio", "shapes"), [(0.5, {(2, 1, 1)}), (0.25, {(2, 2, 1), (2, 1, 2)}), (0.125, {(2, 2, 2)})]
)
def test_grid_groups_are_tiles_over_space_and_time(ratio, shapes):
    """But for the tiles at the turns of the walk, and the one that joins its two ends."""
    layout, found = Layout((4, 8, 16)), set()
    for seed in range(10):
        groups = groups_of(draw(seed, layout, ratio, "grid", "pool"))
        sides = [tuple(len(set(side)) for side in zip(*places(group, layout), strict=True)) for group in groups]
        tiles = [side for side in sides if side in shapes]
        assert len(tiles) >= 0.7 * len(groups)
        found |= set(tiles)
    assert found == shapes


@pytest.mark.parametrize("ratio", [0.25, 0.125])
def test_two_frames_and_the_next_two_do_not_keep_the_same(ratio):
    for seed in range(10):
        kept = places(draw(seed, CLIP, ratio, "grid", "drop").picked, CLIP)
        first, second = ({(t % 2, row, col) for t, row, col in kept if t // 2 == slab} for slab in (0, 1))
        assert not first & second


def test_frame_keeps_whole_frames_with_any_phase():
    phases = set()
    for seed in range(10):
        kept = draw(seed, CLIP, 0.5, "frame", "fold")
        frames = {place[0] for place in places(kept.picked, CLIP)}
        assert len(kept.picked) == 2 * 48
        assert frames in ({0, 2}, {1, 3})
        phases |= {min(frames)}
        for group in groups_of(kept):
            members = places(group, CLIP)
            assert len({place[1:] for place in members}) == 1
            assert [place[0] for place in members] in ([0, 1], [2, 3])
    assert phases == {0, 1}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("ratio", [0.25, 0.4, 0.5])
def test_every_position_of_a_clip_is_kept_equally_often(mask, ratio):
    layout, draws = Layout((5, 2, 4)), 2000
    counts = torch.zeros(40)
    for seed in range(draws):
        counts[sample(seed, 1, layout, ratio, mask, "drop").picked] += 1
    share = slot_count(5, ratio) / 5 if mask == "frame" else slot_count(40, ratio) / 40
    error = (share * (1 - share) / draws) ** 0.5
    assert (counts / draws - share).abs().max() < 5 * error


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", [CLIP, Layout((5, 3, 3), 1)])
def test_a_seed_that_is_a_tensor_draws_the_same(mask, layout):
    for seed in range(8):
        for ratio in (0.5, 0.25, 0.3):
            number, tensor = (sample(one, 2, layout, ratio, mask, "fold") for one in (seed, torch.tensor(seed)))
            assert torch.equal(number.picked_flat, tensor.picked_flat)
            assert torch.equal(number.order_flat, tensor.order_flat)


def test_frame_without_frames_is_an_error_that_says_what_to_do():
    with pytest.raises(InputError, match=r"mask='frame' keeps whole frames.*4x4, without frames; use mask='grid'"):
        kept_indices(Layout((4, 4)), 0.5, "frame")
    with pytest.raises(InputError, match=r"1 of every 8 frames.*only 4; use a larger input"):
        kept_indices(CLIP, 0.125, "frame")
    with pytest.raises(ConfigError, match=r"mask='frame' keeps whole frames of clips, but blocks.0 of VisionTransfor"):
        keepgrad.plan(vit(), keep_ratio=0.5, mask="frame")


@pytest.mark.parametrize("family", VIDEO.values(), ids=VIDEO)
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_whole_frames_equal_the_oracle(family, reduce):
    name = family_name(family)
    layers = None if "V-JEPA" not in name else lambda name: "predictor" not in name
    ratio = {"attention": 1.0, "mlp": 0.5} if name == "HF TimeSformer" else 0.5  # its attention is inside of frames
    check_against_the_oracle(family, ratio, mask="frame", reduce=reduce, layers=layers)


def family_name(family) -> str:
    return next(name for name, one in VIDEO.items() if one is family)


@pytest.mark.parametrize("name", [name for name in VIDEO if "V-JEPA" in name])
def test_a_sequence_of_chosen_patches_has_no_frames(name):
    model = VIDEO[name].model()
    keepgrad.apply(model, keep_ratio=0.5, mask="frame")
    with pytest.raises(InputError, match=r"predictor.layer.0 \(attention\): mask='frame'.*30, without frames"):
        VIDEO[name].run(model)


TIMESFORMER = pytest.mark.skipif("HF TimeSformer" not in FAMILIES, reason="no transformers")


@TIMESFORMER
def test_the_masks_of_timesformer_are_over_frames_places_and_clips():
    family = VIDEO["HF TimeSformer"]
    model = family.model()
    plan = keepgrad.apply(model, keep_ratio=0.5)
    assert [site.name.rpartition(".")[2] for site in plan.sites if site.kind == "attention"] == [
        *("0", "temporal_attention", "1", "temporal_attention")
    ]
    family.run(model).sum().backward()
    assert set(masks_drawn(model)) == {Layout((4, 1, 1)), Layout((4, 4), 1), Layout((4, 4, 4), 1)}
    keepgrad.remove(model)
    keepgrad.apply(model, keep_ratio=0.5, mask="frame")
    with pytest.raises(InputError, match=r"encoder.layer.0 \(attention\): mask='frame'.*4x4, without frames"):
        family.run(model)


@TIMESFORMER
def test_timesformer_with_dropout_is_a_sequence_and_draws_what_it_draws():
    """Rows are laid out frame by frame only where no dropout is drawn for them."""
    family = VIDEO["HF TimeSformer"]
    model = family.model()
    for layer in model.encoder.layer:
        layer.output.dropout.p = 0.3
    torch.manual_seed(3)
    wanted = family.run(model)
    keepgrad.apply(model, keep_ratio={"attention": 1.0, "mlp": 0.5})
    torch.manual_seed(3)
    torch.testing.assert_close(family.run(model), wanted)
    assert set(masks_drawn(model)) == {Layout((64,), 1)}


@TIMESFORMER
@pytest.mark.parametrize("options", [{"attention_type": "space_only"}, {"drop_path_rate": 1}])
def test_other_layers_of_timesformer(options):
    """Attention in each frame alone, and drop path, which forgets the whole branch in the last layer here."""
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 48}
    config = transformers.TimesformerConfig(**sizes, image_size=16, patch_size=8, num_frames=3, **options)
    model = transformers.TimesformerModel(config).train().double()
    x = clips(3, 16, torch.float64)
    if "drop_path_rate" in options:
        model.encoder.layer[1].drop_path.drop_prob = 0.5
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        out = model(x).last_hidden_state
        model.zero_grad()
        out.square().sum().backward()
        found.append((out, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
        if len(found) == 1:
            keepgrad.apply(model, preset="exact")
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.skipif("torchvision Swin3D" not in FAMILIES, reason="no torchvision")
@pytest.mark.parametrize(("frames", "size"), [(2, 20), (6, 12)])
def test_clips_smaller_than_a_window_of_swin3d(frames, size):
    model = VIDEO["torchvision Swin3D"].model(torch.float64)
    x = clips(frames, size, torch.float64, channels_first=True)
    wanted, wanted_grads = grads(model, x)
    keepgrad.apply(model, keep_ratio=1.0, save="input")
    found, found_grads = grads(model, x)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(found_grads, wanted_grads)
    keepgrad.remove(model)
    keepgrad.apply(model, keep_ratio=0.5)
    torch.testing.assert_close(grads(model, x)[0], wanted)
    shape = ((frames + 1) // 2, size // 4, size // 4)
    assert {layout.shape for layout in masks_drawn(model)} == {shape, tuple(map(min, (2, 4, 4), shape))}


@pytest.mark.skipif("torchvision MViT 1" not in FAMILIES, reason="no torchvision")
def test_the_plan_says_what_is_left_of_mvit():
    model = VIDEO["torchvision MViT 1"].model()
    plan = keepgrad.plan(model, keep_ratio=0.5)
    assert "left alone: blocks.0.attn.attention: it pools positions; only the projection to q, k and v" in str(plan)
    with pytest.raises(ConfigError, match="MViT has no attention to reduce by 'query'"):
        keepgrad.plan(model, keep_ratio=0.5, attention="query")
    off = keepgrad.plan(model, keep_ratio=0.5, attention="off")
    assert {site.kind for site in off.sites} == {"mlp"}
