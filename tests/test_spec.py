"""What a chain saves and redoes, as its specification says."""

import pytest
import torch
import torch.nn.functional as F

from keepgrad.ops.attention import Core, SelfAttention
from keepgrad.ops.spec import Spec
from keepgrad.ops.stages import Gelu, LayerNorm, Linear, Noise, Pointwise

MLP = (LayerNorm(F.layer_norm, shape=(8,)), Linear(True), Gelu(F.gelu), Linear(True))
COUNTS = (2, 2, 0, 2)


def spec(needs=(True,) * 6, input_needs=True, save="heavy", stages=MLP, counts=COUNTS):
    return Spec(stages, counts, needs, input_needs, save, False, True, None)


@pytest.mark.parametrize(
    ("save", "needs", "saved_at"),
    [
        ("heavy", (True,) * 6, [0, 2]),
        ("input", (True,) * 6, [0]),
        ("heavy", (False,) * 6, [0, 2]),  # norm and GELU still read their inputs
        ("heavy", (True, True, False, False, False, False), [0, 2]),
    ],
)
def test_what_is_saved(save, needs, saved_at):
    assert spec(needs, save=save).saved_at == saved_at


def test_nothing_is_saved_for_what_comes_before_the_first_gradient():
    late = spec((False,) * 4 + (True, True), input_needs=False)
    assert late.first == 3
    assert late.saved_at == [2]
    assert [start for start, _ in late.segments] == [2]


def test_segments_are_redone_from_the_value_before_them():
    assert [(start, [turn.place for turn in turns]) for start, turns in spec().segments] == [(2, [2, 3]), (0, [0, 1])]


def test_samples_run_in_pieces_up_to_the_noise_at_the_end():
    dropout = Noise(torch.nn.Dropout(0.5), False)
    assert spec().piece_end == 4
    assert spec(stages=(*MLP, dropout), counts=(*COUNTS, 0)).piece_end == 4
    assert spec(stages=(*MLP, dropout, Pointwise(torch.tanh)), counts=(*COUNTS, 0, 0)).piece_end is None


@pytest.mark.parametrize(("reduced", "saved_at"), [(True, [0, 1]), (False, [0])])
def test_reduced_attention_is_saved_because_slots_cannot_redo_it(reduced, saved_at):
    attention = SelfAttention("qkv", Linear(True), Core(2, 2, (8, 8, 8)), (2, 0))
    found = Spec((attention, Linear(False)), (2, 1), (True,) * 3, True, "input", reduced, True, None)
    assert found.saved_at == saved_at


def test_only_a_new_value_that_is_not_the_input_is_overwritten():
    assert spec().overwrites == [False, False, True, False]
    assert spec((True,), stages=(Gelu(F.gelu), Linear(False)), counts=(0, 1)).overwrites == [False, False]
