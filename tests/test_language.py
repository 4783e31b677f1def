"""Language models: caches, padding, packed sequences, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import assert_same, spread
from torch import nn

import keepgrad
from keepgrad.padding import real_positions, sample_padded
from keepgrad.patch import masks_drawn

transformers = pytest.importorskip("transformers")

from families.transformers import REAL, clip_model, model, words  # noqa: E402  (what they need may not be there)
from families.transformers_text import FAMILIES, GEMMA, GPT2, LLAMA, packed  # noqa: E402
from test_families import check_against_the_oracle  # noqa: E402


def made(name: str = "LlamaForCausalLM", **options) -> nn.Module:
    torch.manual_seed(0)
    return spread(model(name, **(options if "attn_pdrop" in options else {**LLAMA, **options}))).train()


def step(one: nn.Module, weight: torch.Tensor | None = None, **inputs):
    one.zero_grad()
    out = one(**inputs)
    ((out.logits if weight is None else out.logits * weight).square().sum()).backward()
    return out, {name: p.grad.clone() for name, p in one.named_parameters()}


LLAMA_FILE = "transformers.models.llama.modeling_llama"
IDS = words(torch.float32)["input_ids"]


def test_a_cache_that_is_empty_stays_empty_and_says_so():
    one = made(use_cache=True)
    plain, grads = step(one, input_ids=IDS)
    assert plain.past_key_values.get_seq_length() == 16
    keepgrad.apply(one, keep_ratio=1.0)
    with pytest.warns(UserWarning, match="LlamaDecoderLayer leaves the cache .* empty in training"):
        out, same = step(one, input_ids=IDS)
    assert out.past_key_values.get_seq_length() == 0
    torch.testing.assert_close(out.logits, plain.logits)
    assert_same(same, grads, rtol=1e-3, atol=1e-3)
    with torch.no_grad():
        assert one(IDS).past_key_values.get_seq_length() == 16


def test_what_is_in_a_cache_is_read_by_the_models_own_code():
    one = made()
    with torch.no_grad():
        cache = one(IDS[:, :10], use_cache=True).past_key_values
        layers = [(layer.keys, layer.values) for layer in cache.layers]
    wanted, grads = step(one, input_ids=IDS[:, 10:], past_key_values=cache)
    for layer, (keys, values) in zip(cache.layers, layers, strict=True):
        layer.keys, layer.values = keys, values
    keepgrad.apply(one, keep_ratio=0.5)
    found, same = step(one, input_ids=IDS[:, 10:], past_key_values=cache)
    torch.testing.assert_close(found.logits, wanted.logits)
    assert_same(same, grads)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM"])
def test_packed_sequences_do_not_see_one_another(name):
    """They come in the mask of the scores, and so are understood."""
    one = made(name, **(GEMMA if name.startswith("Gemma") else {}))
    inputs = packed(torch.float32)
    wanted, grads = step(one, **inputs)
    alone = one(IDS[:, :10]).logits
    torch.testing.assert_close(wanted.logits[:, :10], alone, rtol=1e-4, atol=1e-5)
    keepgrad.apply(one, keep_ratio=1.0, save="input")
    found, same = step(one, **inputs)
    torch.testing.assert_close(found.logits, wanted.logits)
    assert_same(same, grads, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["HF Llama", "HF Mistral", "HF Qwen 3", "HF Gemma 3", "HF GPT-2"])
@pytest.mark.parametrize(("mask", "reduce"), [("random", "drop"), ("grid", "fold")])
def test_reduced_packed_sequences_equal_the_oracle(name, mask, reduce):
    family = FAMILIES[name]
    everything = torch.ones(2, 16, dtype=torch.bool)
    specs = {
        layer: {kind: replace(branch, real=everything) for kind, branch in branches.items()}
        for layer, branches in family.specs.items()
    }
    check_against_the_oracle(replace(family, inputs=packed, specs=specs), mask=mask, reduce=reduce)


@pytest.mark.parametrize(
    "given", [{"attention_mask": REAL["left"].long()}, packed(torch.float32), {"cu_seq_lens_q": torch.tensor([0, 16])}]
)
def test_flash_attention_with_padding_or_packed_sequences_is_left_alone(given, monkeypatch):
    """There is no such kernel for the CPU; what matters is that the layer's own code runs."""
    one = made()
    keepgrad.apply(one, keep_ratio=0.5)
    own = []
    monkeypatch.setattr(type(one.model.layers[0]), "forward", lambda m, x, **more: own.append(more) or x)
    one.config._attn_implementation = "flash_attention_2"
    monkeypatch.setattr(f"{LLAMA_FILE}.create_causal_mask", lambda attention_mask, **_: attention_mask)
    if "cu_seq_lens_q" in given:
        one(IDS, **given)
    else:
        with pytest.warns(UserWarning, match="use attn_implementation='sdpa'"):
            one(**{"input_ids": IDS, **given})
    assert len(own) == 2


def test_flash_attention_without_them_is_reduced(monkeypatch):
    one = made()
    wanted, grads = step(one, input_ids=IDS)
    keepgrad.apply(one, keep_ratio=1.0, save="input")
    one.config._attn_implementation = "flash_attention_2"
    monkeypatch.setattr(f"{LLAMA_FILE}.create_causal_mask", lambda **_: None)
    found, same = step(one, input_ids=IDS)
    torch.testing.assert_close(found.logits, wanted.logits)
    assert_same(same, grads, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("Gemma2ForCausalLM", {**GEMMA, "attn_logit_softcapping": 50.0}, "scores are capped"),
        ("GPT2LMHeadModel", {**GPT2, "reorder_and_upcast_attn": True}, "computed in float32"),
    ],
)
def test_attention_that_cannot_be_expressed_runs_as_it_is(name, options, reason):
    one = made(name, **{**options, "attention": "eager"})
    wanted, grads = step(one, input_ids=IDS)
    plan = keepgrad.apply(one, keep_ratio=1.0)
    assert {site.kind for site in plan.sites} == {"mlp"}
    assert reason in str(plan)
    found, same = step(one, input_ids=IDS)
    torch.testing.assert_close(found.logits, wanted.logits)
    assert_same(same, grads, rtol=1e-3, atol=1e-3)


def test_a_layer_with_more_than_is_known_is_refused():
    one = made("GPT2LMHeadModel", **GPT2, add_cross_attention=True)
    with pytest.raises(keepgrad.NoSiteError, match=r"GPT2Block of .*: it has parameters that belong to no"):
        keepgrad.plan(one, keep_ratio=0.5)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("mask", ["grid", "random", "block"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_padding_is_never_kept(side, mask, attention):
    one = made(attention=attention)
    real = REAL[side]
    keepgrad.apply(one, keep_ratio=0.25, mask=mask, reduce="drop", seed=1)
    for _ in range(8):
        one(IDS, attention_mask=real.long())
        (picked,) = masks_drawn(one).values()
        assert real.gather(1, picked).all()
        assert all(len(set(row)) == 4 for row in picked.tolist())


def test_the_loss_of_padding_gives_no_gradient_to_the_weights():
    """Whatever comes from positions that are padding is left out; the residual stream passes it on."""
    one, real = made(), REAL["right"]
    keepgrad.apply(one, keep_ratio=0.5, reduce="fold", seed=1)
    _, grads = step(one, real.unsqueeze(-1), input_ids=IDS, attention_mask=real.long())
    keepgrad.remove(one)
    keepgrad.apply(one, keep_ratio=0.5, reduce="fold", seed=1)
    weight = torch.where(real, 1.0, 5.0).unsqueeze(-1)
    _, more = step(one, weight, input_ids=IDS, attention_mask=real.long())
    inside = [name for name in grads if ".layers.1." in name]
    assert_same({n: more[n] for n in inside}, {n: grads[n] for n in inside}, rtol=1e-4, atol=1e-4)


def test_short_samples_have_slots_that_stand_for_nothing():
    real = torch.zeros(2, 16, dtype=torch.bool)
    real[0, :3] = real[1] = True
    kept = sample_padded(torch.tensor(3), real, 0.5, "grid", "scaled")
    assert kept.slots == 8
    assert kept.live.sum(1).tolist() == [3, 8]
    grads = kept.gather_grad(torch.ones(2, 16, 1))
    assert grads.sum((1, 2)).tolist() == [3, 16]
    assert kept.give_back(torch.ones(2, 8, 1))[0].flatten().tolist() == [1.0] * 3 + [0.0] * 13


def test_every_real_position_is_kept_as_often():
    real = REAL["left"]
    for mask in ("grid", "random", "block"):
        counts = torch.zeros(2, 16)
        for seed in range(2000):
            kept = sample_padded(torch.tensor(seed), real, 0.25, mask, "drop")
            counts.scatter_add_(1, kept.picked, torch.ones(2, 4))
        share = counts / 2000 * real.sum(1, keepdim=True) / 4
        assert (share[~real] == 0).all()
        assert share[real].min() > 0.6
        assert share[real].max() < 1.4


def test_masks_tell_what_is_padding():
    real = REAL["left"]
    seen = torch.ones(16, 16, dtype=torch.bool).tril() & real[:, None, None]
    assert torch.equal(real_positions(seen), real)
    added = torch.zeros(seen.shape).masked_fill_(~seen, torch.finfo(torch.float32).min)
    assert torch.equal(real_positions(added), real)


def test_the_default_for_text_is_exact_gradients_in_8_bits():
    one = made()
    wanted, grads = step(one, input_ids=IDS)
    plan = keepgrad.apply(one)
    assert plan.preset == "text"
    assert "preset 'text'" in str(plan)
    assert {(site.keep_ratio, site.store) for site in plan.sites} == {(1.0, "int8")}
    assert plan.packs_the_rest
    assert plan == keepgrad.plan(made(), preset="text")
    found, same = step(one, input_ids=IDS)
    torch.testing.assert_close(found.logits, wanted.logits)
    both = [torch.cat([g.flatten() for g in one.values()]) for one in (same, grads)]
    assert torch.cosine_similarity(*both, dim=0) > 0.999


def test_a_model_of_images_and_text_has_the_default_of_each():
    plan = keepgrad.plan(clip_model())
    assert str(plan).startswith("keepgrad plan for CLIPModel, preset 'accurate', 'text' for text")
    found = {
        tower: {(site.kind, site.keep_ratio, site.store) for site in plan.sites if site.name.startswith(tower)}
        for tower in ("text", "vision")
    }
    assert found["text"] == {("attention", 1.0, "int8"), ("mlp", 1.0, "int8")}
    assert found["vision"] == {("attention", 1.0, "full"), ("mlp", 1.0, "full"), ("mlp", 0.5, "full")}
    assert not plan.packs_the_rest


def test_what_is_asked_for_holds_for_text_too():
    assert {site.keep_ratio for site in keepgrad.plan(made(), keep_ratio=0.5).sites} == {0.5}
    assert {site.store for site in keepgrad.plan(made(), preset="exact").sites} == {"full"}
    assert {site.store for site in keepgrad.plan(made(), store="full").sites} == {"full"}
