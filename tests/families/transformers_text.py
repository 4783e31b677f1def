"""transformers' language models. Their RMS norms compute in float32."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import torch
from oracle_model import Branch
from torch import Tensor

from keepgrad import Layout

from .family import Family
from .transformers import hidden, model, padded, words

WORDS = {"vocab_size": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 39, "max_position_embeddings": 32}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, **WORDS}
LLAMA = {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8, "use_cache": False}
GEMMA = {
    **{**LLAMA, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "query_pre_attn_scalar": 8,
}
GPT2 = {**SIZES, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "use_cache": False}


def layer(norms: str, ends: str, attention: str, query: str, out: str, last: str) -> dict[str, Branch]:
    (first, second), (leave, end), layout = norms.split(), ends.split(), Layout((16,))
    query, out = f"{attention}.{query}", f"{attention}.{out}"
    return {
        "attention": Branch(first, leave, layout, last=(out,), out=out, query=query, heads=4),
        "mlp": Branch(second, end, layout, last=(f"mlp.{last}",)),
    }


NAMES = ("self_attn", "q_proj", "o_proj", "down_proj")
LLAMA_LAYER = layer("input_layernorm post_attention_layernorm", "self_attn mlp", *NAMES)
GEMMA_LAYER = {  # a norm follows the last linear layer of each branch, whose output is then saved
    kind: replace(branch, last=())
    for kind, branch in layer(
        "input_layernorm pre_feedforward_layernorm", "post_attention_layernorm post_feedforward_layernorm", *NAMES
    ).items()
}
GPT2_LAYER = layer("ln_1 ln_2", "attn mlp", "attn", "c_attn", "c_proj", "c_proj")
# An MLP in a layer that is not known, which is a site by itself.
ALONE = {"mlp": Branch("", "", Layout((16,)), last=("down_proj",))}


def packed(dtype: torch.dtype) -> dict[str, Tensor]:
    """Two texts in each row, told by the positions of their words."""
    positions = torch.cat([torch.arange(10), torch.arange(6)]).expand(2, -1)
    return {**words(dtype), "position_ids": positions}


def of_words(
    name: str, kind: str, branches: dict[str, Branch], side: str = "", options: dict = LLAMA, **more
) -> Family:
    """A family of a model that is given words. Heads that share their keys cannot be reduced by themselves."""
    methods = ("qkv", "query") if "attention" in branches else ()
    if side:
        branches = padded(branches, side)
    inputs, more = partial(words, padded=side), {"methods": methods, "rtol": 1e-5, "output": hidden, **more}
    return Family(partial(model, name, **options), inputs, {kind: branches}, **more)


FAMILIES: dict[str, Family] = {}
if find_spec("transformers") is not None:
    OLMO = {name: value for name, value in LLAMA.items() if name != "head_dim"}
    FAMILIES = {
        "HF Llama": of_words("LlamaModel", "LlamaDecoderLayer", LLAMA_LAYER),
        "HF Llama, eager": of_words(
            "LlamaModel", "LlamaDecoderLayer", LLAMA_LAYER, "right", {**LLAMA, "attention": "eager"}
        ),
        "HF Mistral": of_words(
            "MistralModel", "MistralDecoderLayer", LLAMA_LAYER, "right", {**LLAMA, "sliding_window": 4}
        ),
        "HF Qwen 3": of_words("Qwen3Model", "Qwen3DecoderLayer", LLAMA_LAYER, "left"),
        "HF Gemma 3": of_words(
            "Gemma3TextModel",
            "Gemma3DecoderLayer",
            GEMMA_LAYER,
            "left",
            GEMMA,
        ),
        "HF GPT-2": of_words(
            "GPT2Model",
            "GPT2Block",
            GPT2_LAYER,
            "right",
            GPT2,
            methods=("qkv", "query", "head"),
            rtol=1e-7,
        ),
        "HF OLMo 2 (its MLP)": of_words("Olmo2Model", "Olmo2MLP", ALONE, "", OLMO),
    }
