"""Whatever is given: an error of keepgrad's own, or a training forward that is the model's own and a mask that is one.

The examples are the same in every run (`derandomize`) and few, so that the time is bounded.
"""

import copy
import dataclasses
import json
import math

import pytest
import torch
from conftest import convnext, vit

import keepgrad
from keepgrad import flags
from keepgrad.config import PRESETS, SAVES, STORES
from keepgrad.data.coco import CocoFolder, Objects, average_precision, find_split
from keepgrad.data.shapes import make_shapes
from keepgrad.errors import ConfigError, InputError, KeepgradError
from keepgrad.numbers import Numbers
from keepgrad.ops.attention import METHODS
from keepgrad.sampling import MASKS, REDUCTIONS, Layout, sample, slot_count
from keepgrad.schedule import SCHEDULES
from keepgrad.train.config import DetectConfig, TrainConfig

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402


def bounded(examples):
    """So many examples, always the same ones, however long each takes."""
    return hypothesis.settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )


def is_one_line(error):
    assert "\n" not in str(error)
    assert len(str(error)) < 1000


NUMBERS = st.one_of(
    st.integers(), st.floats(), st.sampled_from([0, 1, -1, 2**31, 2**63, 2**64, 10**400, math.inf, math.nan, 1e308])
)
JUNK = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=2)),
    max_leaves=4,
)


def or_junk(usual):
    """Mostly what is usual: other values are refused before anything happens."""
    return st.one_of(usual, usual, usual, usual, usual, usual, JUNK)


# Options and shapes

RATIOS = st.floats(0.02, 1.0)
BRANCHES = st.fixed_dictionaries({}, optional={"attention": RATIOS, "mlp": RATIOS})
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "preset": or_junk(st.sampled_from(list(PRESETS))),
        "keep_ratio": or_junk(st.one_of(RATIOS, RATIOS, BRANCHES, st.lists(RATIOS, min_size=2, max_size=2))),
        "mask": or_junk(st.sampled_from(MASKS)),
        "reduce": or_junk(st.sampled_from(REDUCTIONS)),
        "schedule": or_junk(st.sampled_from(list(SCHEDULES))),
        "layers": or_junk(st.sampled_from(["all", "first 1/2", "last 2/3", "paper", [0], [-1], [7]])),
        "attention": or_junk(st.sampled_from(METHODS)),
        "mlp": or_junk(st.booleans()),
        "downsample": or_junk(st.booleans()),
        "save": or_junk(st.one_of(st.sampled_from(SAVES), st.fixed_dictionaries({"mlp": st.sampled_from(SAVES)}))),
        "store": or_junk(st.one_of(st.sampled_from(STORES), st.fixed_dictionaries({"mlp": st.sampled_from(STORES)}))),
        "seed": or_junk(st.integers(0, 2**40)),
    },
)


def trains_exactly(model, x, options):
    """Apply, one training step, remove. Errors of keepgrad's own are fine, and leave a model that is as it was."""
    plain = copy.deepcopy(model)
    torch.manual_seed(0)
    expected = plain(x)
    forward = model.forward
    try:
        keepgrad.apply(model, **options)
    except KeepgradError:
        assert model.forward == forward
        return
    try:
        torch.manual_seed(0)
        found = model(x)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        found.square().sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert torch.isfinite(parameter.grad).all(), name
    except KeepgradError:
        pass
    keepgrad.remove(model)
    assert model.forward == forward
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)


@bounded(50)
@given(OPTIONS)
def test_options_of_a_transformer(options):
    trains_exactly(vit(), torch.ones(2, 3, 32, 32), options)


@bounded(40)
@given(OPTIONS)
def test_options_of_a_convolutional_network(options):
    trains_exactly(convnext(), torch.ones(1, 3, 64, 64), options)


@bounded(30)
@given(
    batch=st.integers(1, 3),
    height=st.integers(1, 9),
    width=st.integers(1, 9),
    tokens=st.integers(0, 2),
    ratio=RATIOS,
    mask=st.sampled_from(MASKS),
    reduce=st.sampled_from(REDUCTIONS),
)
def test_shapes_of_a_transformer(batch, height, width, tokens, ratio, mask, reduce):
    model = vit(dynamic_img_size=True, class_token=tokens > 0, reg_tokens=max(0, tokens - 1), global_pool="avg")
    x = torch.randn(batch, 3, 8 * height, 8 * width, generator=torch.Generator().manual_seed(0))
    trains_exactly(model, x, {"keep_ratio": ratio, "mask": mask, "reduce": reduce, "seed": 1})


@bounded(20)
@given(batch=st.integers(1, 2), height=st.integers(32, 97), width=st.integers(32, 97), ratio=RATIOS)
def test_shapes_of_a_convolutional_network(batch, height, width, ratio):
    x = torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(0))
    trains_exactly(convnext(), x, {"keep_ratio": ratio, "seed": 1})


# Masks


@bounded(200)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    prefix=st.integers(0, 3),
    ratio=RATIOS,
    mask=st.sampled_from(MASKS),
    reduce=st.sampled_from(REDUCTIONS),
    seed=st.integers(0, 2**62),
)
def test_a_mask_keeps_its_share_and_groups_every_position_once(shape, prefix, ratio, mask, reduce, seed):
    layout = Layout(tuple(shape), prefix)
    try:
        kept = sample(seed, 1, layout, ratio, mask, reduce)
    except KeepgradError:
        return
    positions = math.prod(shape)
    # Whole frames are kept, so their share is that of the frames.
    share = slot_count(shape[0], ratio) * positions // shape[0] if mask == "frame" else slot_count(positions, ratio)
    if kept is None:
        assert share == positions
        return
    picked = kept.picked.flatten().tolist()
    assert len(picked) == len(set(picked)) == kept.slots == prefix + share
    assert set(range(prefix)) <= set(picked) <= set(range(prefix + positions))
    if kept.slot_of_flat is not None:
        slots = kept.slot_of_flat[: kept.positions].tolist()
        assert len(slots) == prefix + positions
        assert set(slots) == set(range(kept.slots))
        if reduce != "pool":
            assert [slots[position] for position in picked] == list(range(kept.slots))


# Settings


@bounded(300)
@given(
    st.sampled_from([TrainConfig, DetectConfig]).flatmap(
        lambda kind: st.tuples(st.just(kind), st.sampled_from([f.name for f in dataclasses.fields(kind)]), JUNK)
    )
)
def test_a_setting_is_of_its_kind_or_refused(case):
    kind, name, value = case
    try:
        config = flags.make(kind, {name: value})
    except ConfigError as error:
        is_one_line(error)
        return
    again = flags.make(kind, {name: getattr(config, name)})
    assert again == config
    own = next(f for f in dataclasses.fields(kind) if f.name == name).metadata.get("type")
    if isinstance(own, Numbers) and getattr(config, name) is not None:
        assert type(getattr(config, name)) is own.kind
        assert math.isfinite(getattr(config, name))


@bounded(150)
@given(st.one_of(st.text(alphabet="lr:-_ .[]{}&*!?|>'\"#\n1e\t", max_size=25), JUNK.map(str)))
def test_a_file_of_settings_is_read_or_refused(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "some.yaml"
    path.write_text(text, errors="replace")
    try:
        assert isinstance(flags.read_yaml(path), dict)
    except ConfigError as error:
        is_one_line(error)


# Annotations


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    return make_shapes(tmp_path_factory.mktemp("coco"), train=1, val=1)


COORDINATES = st.one_of(st.floats(-300, 300), st.integers(-10, 140), NUMBERS)
MASKS_OF_COCO = st.one_of(
    st.lists(st.lists(COORDINATES, min_size=4, max_size=9), max_size=2),
    st.fixed_dictionaries(
        {
            "size": st.sampled_from([[128, 128], [128, 64], [10**9, 10**9]]),
            "counts": st.one_of(
                st.lists(st.integers(-2, 20_000), max_size=4), st.just([100, 16_284]), st.text("0PTo^a", max_size=6)
            ),
        }
    ),
    JUNK,
)
CHANGES = st.one_of(
    st.tuples(
        st.just("annotations"),
        st.one_of(
            st.tuples(st.just("segmentation"), MASKS_OF_COCO),
            st.tuples(st.just("bbox"), st.one_of(st.lists(COORDINATES, min_size=4, max_size=4), JUNK)),
            st.tuples(st.sampled_from(["id", "image_id", "category_id", "iscrowd", "area"]), JUNK),
        ),
    ),
    st.tuples(
        st.just("images"), st.tuples(st.sampled_from(["id", "file_name", "height", "width"]), st.one_of(JUNK, NUMBERS))
    ),
    st.tuples(st.just("categories"), st.tuples(st.sampled_from(["id", "name"]), JUNK)),
)


@bounded(150)
@given(st.lists(CHANGES, min_size=1, max_size=2), st.booleans())
def test_annotations_are_used_left_out_or_refused(shapes, tmp_path_factory, changes, training):
    images, path = find_split(shapes, "train")
    found = json.loads(path.read_text())
    for kind, (name, value) in changes:
        found[kind][0][name] = value
    changed = tmp_path_factory.getbasetemp() / "changed.json"
    changed.write_text(json.dumps(found))
    try:
        source = CocoFolder(images, changed, training)
    except InputError as error:
        is_one_line(error)
        return
    for number in range(len(source.ids)):
        pixels, target = Objects(source, training, 0)[number]
        count = len(target["labels"])
        assert target["masks"].shape == (count, *pixels.shape[1:])
        assert target["boxes"].shape == (count, 4)
        assert torch.isfinite(target["boxes"]).all()
        assert (target["boxes"] >= 0).all()
        assert (target["boxes"] <= max(pixels.shape)).all()
    average_precision(source, [])
