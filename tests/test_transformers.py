"""What transformers' models do besides running their layers, and the MLPs of layers that keepgrad does not know."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
from conftest import assert_same, spread
from families.family import images
from torch import nn

import keepgrad
from keepgrad import Layout
from keepgrad.adapters.items import path_of
from keepgrad.adapters.position_wise import structure
from keepgrad.patch import masks_drawn

transformers = pytest.importorskip("transformers")

from families.transformers import (  # noqa: E402  (what they need may not be there)
    BEIT,
    SIZES,
    SWIN,
    TEXT,
    VIT,
    model,
    words,
)
from families.transformers_text import GEMMA, GPT2, LLAMA  # noqa: E402
from families.video import TUBES, VIDEOMAE, clips  # noqa: E402


def made(name: str, attention: str | None = None, **options) -> nn.Module:
    torch.manual_seed(0)
    return spread(model(name, attention, **options)).train()


def step(one: nn.Module, inputs, **options):
    """What the model returns, and the gradients of one step."""
    one.zero_grad()
    torch.manual_seed(3)
    out = one(**inputs, **options)
    value = out.logits if "logits" in out else out.last_hidden_state
    if "attention_mask" in inputs:  # what padding makes is not defined: attention there may see nothing at all
        value = value * inputs["attention_mask"].unsqueeze(-1)
    value.square().sum().backward()
    return out, {name: p.grad.clone() for name, p in one.named_parameters() if p.grad is not None}


PIXELS = {"pixel_values": images(32, torch.float32)}
KINDS = {
    "vit": ("ViTForImageClassification", VIT, PIXELS),
    "beit": ("BeitForImageClassification", BEIT, PIXELS),
    "data2vec": ("Data2VecVisionForImageClassification", BEIT, PIXELS),
    "clip text": ("CLIPTextModel", TEXT, words(torch.float32, padded="right")),
    "swin": ("SwinForImageClassification", SWIN, PIXELS),
    "llama": ("LlamaForCausalLM", {**LLAMA, "tie_word_embeddings": True}, words(torch.float32, padded="left")),
    "gemma 3": ("Gemma3ForCausalLM", GEMMA, words(torch.float32, padded="right")),
    "gpt-2": ("GPT2LMHeadModel", GPT2, words(torch.float32, padded="right")),
}
EACH = pytest.mark.parametrize("kind", KINDS)


@EACH
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_both_implementations_of_attention_are_exact(kind, attention):
    name, options, inputs = KINDS[kind]
    one = made(name, attention, **options)
    wanted, grads = step(one, inputs)
    keepgrad.apply(one, keep_ratio=1.0, save="input")
    found, same = step(one, inputs)
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-4, atol=1e-5)
    assert_same(same, grads, rtol=1e-3, atol=1e-3)


@EACH
def test_attention_scores_are_returned_when_asked_for(kind):
    name, options, inputs = KINDS[kind]
    one = made(name, "eager", **options)
    wanted, grads = step(one, inputs, output_attentions=True)
    keepgrad.apply(one, keep_ratio=0.5)
    found, same = step(one, inputs, output_attentions=True)
    assert len(found.attentions) == len(wanted.attentions) > 0
    for a, b in zip(found.attentions, wanted.attentions, strict=True):
        torch.testing.assert_close(a, b)
    assert_same(same, grads)


@EACH
def test_hidden_states_are_recorded_and_gradients_reduced_all_the_same(kind):
    name, options, inputs = KINDS[kind]
    one = made(name, "sdpa" if kind == "data2vec" else "eager", **options)
    count = len(one(**inputs, output_hidden_states=True).hidden_states)
    keepgrad.apply(one, keep_ratio=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, reduced = step(one, inputs)
        found, same = step(one, inputs, output_hidden_states=True)
        _, after = step(one, inputs)
    assert len(found.hidden_states) == count
    assert_same(same, reduced)
    assert_same(after, reduced)


@EACH
@pytest.mark.parametrize("off", [{"attention": "off"}, {"mlp": False}])
def test_a_branch_that_is_off_runs_as_it_is(kind, off):
    name, options, inputs = KINDS[kind]
    one = made(name, **options)
    wanted, grads = step(one, inputs)
    keepgrad.apply(one, keep_ratio=1.0, save="input", **off)
    found, same = step(one, inputs)
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-4, atol=1e-5)
    assert_same(same, grads, rtol=1e-3, atol=1e-3)


@EACH
def test_gradient_checkpointing_saves_as_without_keepgrad(kind):
    name, options, inputs = KINDS[kind]
    one = made(name, **options)
    _, grads = step(one, inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it has another name from 5.23 on
        one.gradient_checkpointing_enable({"use_reentrant": False})

    def saved() -> int:
        return keepgrad.memory.saved_bytes(lambda: one(**inputs)[0], one)

    checkpointed = saved()
    keepgrad.apply(one, keep_ratio=1.0)
    assert saved() <= checkpointed
    _, same = step(one, inputs)
    assert_same(same, grads, rtol=1e-3, atol=1e-3)


def test_compiled_gradients_are_those_of_eager_mode():
    name, options, inputs = KINDS["vit"]
    one = made(name, **{**options, "num_hidden_layers": 1})
    keepgrad.apply(one, keep_ratio=0.5, seed=11)
    _, wanted = step(one, inputs)
    keepgrad.remove(one)
    keepgrad.apply(one, keep_ratio=0.5, seed=11)
    one.zero_grad()
    out = torch.compile(one, fullgraph=True, backend="aot_eager")(**inputs)
    out.logits.square().sum().backward()
    assert_same({key: p.grad for key, p in one.named_parameters() if p.grad is not None}, wanted)


def test_a_hook_on_the_attention_leaves_it_to_autograd():
    one, seen = made("ViTForImageClassification", **VIT), []
    keepgrad.apply(one, keep_ratio=0.5)
    layer = one.vit.layers[0]
    layer.attention.register_forward_hook(lambda *given: seen.append(given))
    with pytest.warns(UserWarning, match="layers.0 .attention. now runs with full backprop"):
        step(one, PIXELS)
    assert len(seen) == 1


def test_a_subclass_that_transformers_wraps_is_the_same_layer():
    one = made("ViTForImageClassification", **VIT)
    layer = one.vit.layers[0]
    name = path_of(layer)
    layer.__class__ = type("FSDPViTLayer", (type(layer),), {})
    assert path_of(layer) == name
    assert keepgrad.plan(one, keep_ratio=0.5).sites[0].name == "vit.layers.0"


def test_an_attention_that_is_not_the_librarys_is_refused():
    one = made("ViTForImageClassification", **VIT)
    one.vit.layers[0].attention = nn.Identity()
    (name, reason), *_ = keepgrad.plan(one, keep_ratio=0.5).skipped
    assert name.startswith("vit.layers.0")
    assert "ViTLayer of transformers" in reason


LAYOUTS = {
    "DeiTForImageClassification": (VIT, PIXELS, {Layout((4, 4), 2)}),
    "ViTMAEModel": (VIT, PIXELS, {Layout((2, 2), 1)}),
    "IJepaModel": (VIT, PIXELS, {Layout((4, 4))}),
    "VideoMAEModel": (VIDEOMAE, {"pixel_values": clips(4, 32, torch.float32)}, {Layout((2, 4, 4))}),
    "VivitModel": (TUBES, {"pixel_values": clips(4, 32, torch.float32)}, {Layout((2, 4, 4), 1)}),
    "ASTModel": (
        {**SIZES, "patch_size": 8, "max_length": 32, "num_mel_bins": 24, "time_stride": 6, "frequency_stride": 6},
        {"input_values": torch.randn(2, 32, 24)},
        {Layout((15,), 2)},
    ),
    "SiglipTextModel": (TEXT, words(torch.float32), {Layout((16,))}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_tokens_lie_as_the_model_has_them(name):
    options, inputs, layouts = LAYOUTS[name]
    one = made(name, **options)
    keepgrad.apply(one, keep_ratio=0.5)
    step(one, inputs)
    assert set(masks_drawn(one)) == layouts


@pytest.mark.parametrize(
    "name", ["ViTForImageClassification", "Dinov2WithRegistersModel", "BeitForImageClassification"]
)
def test_images_of_another_size(name):
    one = made(name, **(BEIT if name.startswith("Beit") else VIT))
    inputs = {"pixel_values": images(48, torch.float32)[:, :, :32]}
    options = {"interpolate_pos_encoding": True} if name.startswith("ViT") else {}
    wanted, _ = step(one, inputs, **options)
    keepgrad.apply(one, keep_ratio=0.5)
    found, _ = step(one, inputs, **options)
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-4, atol=1e-5)
    assert {layout.shape for layout in masks_drawn(one)} == {(4, 6)}


WORDS = {"vocab_size": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 39}
LLM = {**SIZES, **WORDS, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 32}
T5 = {**WORDS, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
GPT_NEO = {**WORDS, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]}
AUDIO = {
    **{**SIZES, "vocab_size": 32, "conv_dim": (16, 16), "conv_kernel": (3, 3), "conv_stride": (2, 2), "layerdrop": 0.0},
    **{"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2},
    **{"apply_spec_augment": False},
}
SAM = {**SIZES, "image_size": 32, "patch_size": 8, "window_size": 2, "global_attn_indexes": [1], "mlp_dim": 48}
TIER_2 = {
    "Olmo2ForCausalLM": (LLM, words(torch.float32), ["gate_proj up_proj act_fn", "down_proj"]),
    "Phi3ForCausalLM": (LLM, words(torch.float32), ["gate_up_proj activation_fn", "down_proj"]),
    "PhiForCausalLM": (LLM, words(torch.float32), ["fc1", "activation_fn", "fc2"]),
    "GPTNeoForCausalLM": (GPT_NEO, words(torch.float32), ["c_fc", "act", "c_proj", "dropout"]),
    "T5ForConditionalGeneration": (
        {**T5, "feed_forward_proj": "gated-gelu"},
        {**words(torch.float32), "decoder_input_ids": words(torch.float32)["input_ids"][:, :8]},
        ["wi_0 wi_1 act", "dropout", "wo"],
    ),
    "Wav2Vec2Model": (
        AUDIO,
        {"input_values": torch.randn(2, 100)},
        ["intermediate_dense", "intermediate_act_fn", "intermediate_dropout", "output_dense", "output_dropout"],
    ),
    "SamVisionModel": ({**SAM, "num_pos_feats": 8, "output_channels": 16}, PIXELS, ["lin1", "act", "lin2"]),
}


@pytest.mark.parametrize("name", TIER_2)
def test_an_mlp_in_an_unknown_layer_is_found_by_its_structure(name):
    options, inputs, order = TIER_2[name]
    one = made(name, **options)
    block = keepgrad.adapters.find_blocks(one)[0]
    parts = [part if isinstance(part, str) else " ".join(filter(None, part[:3])) for part in block.adapter.order]
    assert parts == order
    wanted, grads = step(one, inputs)
    for save in ("heavy", "input"):
        plan = keepgrad.apply(one, keep_ratio=1.0, save=save)
        assert {site.tier for site in plan.sites} == {2}
        found, same = step(one, inputs)
        keepgrad.remove(one)
        torch.testing.assert_close(found[0], wanted[0])
        assert_same(same, grads, rtol=1e-3, atol=1e-3)
    keepgrad.apply(one, keep_ratio=0.5)
    found, _ = step(one, inputs)
    torch.testing.assert_close(found[0], wanted[0])
    assert masks_drawn(one)


def test_the_structure_of_an_mlp_of_conv1d():
    assert structure(made("GPT2LMHeadModel", **GPT2).transformer.h[0].mlp) == ["c_fc", "act", "c_proj", "dropout"]


@pytest.mark.parametrize("kind", ["llama", "gemma 3", "gpt-2"])
def test_text_is_generated_as_before(kind):
    name, options, _ = KINDS[kind]
    one, inputs = made(name, **{**options, "use_cache": True}).eval(), words(torch.float32)
    call = {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"]), "max_new_tokens": 4, "do_sample": False}
    wanted = one.generate(**call)
    keepgrad.apply(one, keep_ratio=0.5)
    torch.testing.assert_close(one.generate(**call), wanted)


def test_a_patched_model_says_which_arguments_it_takes():
    """transformers' trainer and its generation read it off `model.forward`."""
    one = made("ViTForImageClassification", **VIT)
    wanted = inspect.signature(one.forward)
    keepgrad.apply(one, keep_ratio=0.5)
    assert inspect.signature(one.forward) == wanted
    assert "pixel_values" in wanted.parameters


@pytest.mark.parametrize("name", ["OPTForCausalLM", "BertModel"])
def test_a_model_without_such_an_mlp_says_so(name):
    more = {"ffn_dim": 64, "word_embed_proj_dim": 32} if name.startswith("OPT") else {}
    with pytest.raises(keepgrad.NoSiteError, match=f"{name} has no block"):
        keepgrad.plan(made(name, **LLM, **more), keep_ratio=0.5)
