import pytest

from keepgrad.errors import ConfigError
from keepgrad.schedule import careful, choose, paper_layers, ratios

NAMES = [f"blocks.{i}" for i in range(12)]


def test_schedules_have_the_same_mean():
    assert ratios(0.5, "uniform", 3) == [0.5, 0.5, 0.5]
    assert ratios(0.5, "increasing", 3) == [0.25, 0.5, 0.75]
    assert ratios(0.5, "decreasing", 3) == [0.75, 0.5, 0.25]
    assert ratios(0.9, "increasing", 3) == pytest.approx([0.8, 0.9, 1.0])
    assert ratios(0.3, "increasing", 1) == [0.3]


def test_a_careful_schedule_keeps_less_where_a_model_is_fine_and_all_where_it_is_coarse():
    four, two, one = {0: 0, 1: 1, 2: 2, 3: 3}, {0: 0, 1: 1}, {4: 0, 5: 0, 6: 0}
    assert [careful(0.5, four, index) for index in four] == [0.25, 0.5, 0.5, 1.0]
    assert [careful(0.8, two, index) for index in two] == pytest.approx([0.6, 1.0])
    assert careful(1.0, four, 0) == 1.0
    assert [careful(0.5, one, index) for index in one] == [1.0, 0.5, 0.5]


def test_the_papers_layers():
    assert paper_layers(dict.fromkeys(range(12), 0)) == set(range(4, 12))
    stages = [0] * 3 + [1] * 3 + [2] * 9 + [3] * 3
    assert paper_layers(dict(enumerate(stages))) == set(range(12))


def test_lists_and_functions():
    assert ratios([0.1, 0.2], "uniform", 2) == [0.1, 0.2]
    assert ratios(lambda i, n: (i + 1) / n, "uniform", 4) == [0.25, 0.5, 0.75, 1.0]
    with pytest.raises(ConfigError, match="lists 2 ratios, but 3 blocks"):
        ratios([0.1, 0.2], "uniform", 3)


@pytest.mark.parametrize(
    ("layers", "chosen"),
    [
        ("all", range(12)),
        ("last 2/3", range(4, 12)),
        ("first 0.5", range(6)),
        ("first 1/100", [0]),
        ([0, -1, 3], [0, 3, 11]),
        (range(2, 5), [2, 3, 4]),
        (lambda name: name.endswith("1"), [1, 11]),
    ],
)
def test_choice_of_layers(layers, chosen):
    assert choose(layers, NAMES) == list(chosen)
