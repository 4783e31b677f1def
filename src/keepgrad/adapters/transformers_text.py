"""Hugging Face transformers: its language models (decoders).

One adapter serves the layers that are built like Llama's: a norm and attention with rotary embeddings, then a norm and
a gated MLP. Some models (Gemma 3) also have a norm after each of the two, before the residual is added. The parts are
looked up by Llama's attribute names; a layer with other or further parameters is not reduced. GPT-2 has an older layout
and an adapter of its own.

Which positions may see which others is given to a layer in one of two ways: as a mask `[batch, 1, n, n]` of the scores,
which covers causality, a sliding window, padding and packed sequences; or as no mask and a flag for causality. Flash
attention is given padding, packed sequences and sliding windows in other forms. The layer then runs its own code.

A cache of keys and values that is empty stays empty in training, as with transformers' own checkpointing. If it holds
something, the layer runs its own code.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..ops.norms import weighted_rms_norm
from ..ops.stages import gelu as gelu_stage
from .items import Attention, Step
from .modules import gate, reads, side_by_side, steps_for
from .position_wise import NotRows, steps_of_mlp
from .registry import RunBranch, adapts
from .transformers import EncoderLayer, added, arguments, check_call, check_own, classes, first_of, names_of

LLAMA = {
    **{"llama": "Llama", "mistral": "Mistral", "ministral": "Ministral", "cwm": "Cwm"},
    **{"qwen2": "Qwen2", "qwen3": "Qwen3"},
}
GEMMA = {"gemma": "Gemma", "gemma2": "Gemma2", "gemma3": "Gemma3"}
DECODERS = {**LLAMA, **GEMMA}


@steps_for(*classes(LLAMA, "RMSNorm"))
def _rms_norm(m: Any) -> list[Step]:
    return [Step(weighted_rms_norm(m.weight, m.variance_epsilon)[0], reads(m, "weight"))]


@steps_for(*classes(GEMMA, "RMSNorm"))
def _gemma_norm(m: Any) -> list[Step]:
    stage = weighted_rms_norm(m.weight, m.eps, one_more=True, casts_first=False)[0]
    return [Step(stage, reads(m, "weight"))]


@steps_for(*classes(DECODERS, "MLP"))
def _gated_mlp(m: Any) -> list[Step]:
    return steps_of_mlp(side_by_side(m.gate_proj, m.up_proj), gate(m.act_fn, True), m.down_proj)


@steps_for("transformers.activations.NewGELUActivation")
def _gelu(m: Any) -> list[Step]:
    return [Step(gelu_stage("tanh")[0])]


def attention(layer: nn.Module, m: Any) -> Attention:
    """Describes the attention of a layer that is built like Llama's."""
    check_own(layer, m, called=m)
    capped = getattr(m, "attn_logit_softcapping", None) is not None
    return Attention(
        m,
        project=[m.q_proj, m.k_proj, m.v_proj],
        heads=m.config.num_attention_heads,
        kv_heads=m.config.num_key_value_heads,
        q_norm=getattr(m, "q_norm", None),
        k_norm=getattr(m, "k_norm", None),
        scale=m.scaling,
        dropout=lambda: m.attention_dropout if m.training else 0.0,
        rotate_half=True,
        out=[m.o_proj],
        call=call_of(m),
        reason="its scores are capped, which no fused attention does" if capped else None,
    )


def call_of(m: nn.Module) -> Any:
    """A function that calls an attention as its layer would. It is used when nothing is reduced."""
    return lambda x, given, **options: first_of(m(x, **given))


CACHES = ("past_key_values", "past_key_value", "layer_past")
"""The names that the argument for the cache of keys and values has had."""


@adapts(*classes(DECODERS, "DecoderLayer"))
class DecoderLayer(EncoderLayer):
    """A layer like Llama's: attention and an MLP, each with a norm before it and, in Gemma 3, another after it."""

    known = ("attention_mask", "position_ids", "cache_position", "position_embeddings", "is_causal")

    def branches(self, m: Any) -> dict[str, Any]:
        if hasattr(m, "pre_feedforward_layernorm"):
            first, second = [m.post_attention_layernorm], [m.post_feedforward_layernorm]
            norm = m.pre_feedforward_layernorm
        else:
            first, second, norm = [], [], m.post_attention_layernorm
        inner = attention(m, self.attention_of(m))
        return {"attention": [m.input_layernorm, inner, *first], "mlp": [norm, m.mlp, *second]}

    def attention_of(self, m: Any) -> Any:
        return m.self_attn

    def covers(self, m: Any) -> bool:
        """True if every parameter and every dropout of the layer is known. A later version may add some."""
        items: list[Any] = [item for items in self.branches(m).values() for item in items]
        inner = next(item for item in items if isinstance(item, Attention))
        items += [*inner.project, *inner.out, *(norm for norm in (inner.q_norm, inner.k_norm) if norm is not None)]
        inside = [part for item in items if isinstance(item, nn.Module) for part in item.modules()]
        known = {id(part) for part in inside} | {id(p) for part in inside for p in part.parameters(recurse=False)}
        known.add(id(getattr(inner.module, "attn_dropout", None)))
        drops = [part for part in m.modules() if isinstance(part, nn.Dropout)]
        return all(id(one) in known for one in (*m.parameters(), *drops))

    def layer(self, m: Any, run: RunBranch, *args: Any, **kwargs: Any) -> Any:
        given = arguments(m, args, kwargs)
        x, attn = given.pop("hidden_states"), self.attention_of(m)
        given = without_cache(m, given)
        check_call(attn, given, self.known)
        options = self.options(m, attn, x, given)
        x = run("attention", x, x, **options)
        x = run("mlp", x, x, attn_mask=options["attn_mask"])
        return (x,) if "output_attentions" in names_of(m) else x

    def options(self, m: Any, attn: Any, x: Tensor, given: dict[str, Any]) -> dict[str, Any]:
        mask, implementation = given.get("attention_mask"), attn.config._attn_implementation
        if "flash" in (implementation or ""):
            check_flash(m, attn, given)
        flag = given.get("is_causal")
        causal = implementation not in (None, "eager") and (attn.is_causal if flag is None else flag)
        options = {"attn_mask": added([mask]), "is_causal": mask is None and causal, "given": given}
        if "position_embeddings" in given:
            cos, sin = given["position_embeddings"]
            options["rope"] = (sin.unsqueeze(1), cos.unsqueeze(1))
        return options


def without_cache(m: nn.Module, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call without the cache of keys and values, which stays empty.

    Raises:
        NotRows: if the cache holds something. The layer's own code has to read it.
    """
    caches = [given[name] for name in CACHES if given.get(name) is not None]
    if not caches:
        return given
    if any(not hasattr(cache, "get_seq_length") or cache.get_seq_length() > 0 for cache in caches):
        raise NotRows
    warnings.warn(
        f"keepgrad: {type(m).__name__} leaves the cache of keys and values empty in training, as transformers does "
        "under gradient checkpointing; train with use_cache=False",
        stacklevel=2,
    )
    return {name: value for name, value in given.items() if name not in CACHES}


def check_flash(m: nn.Module, attn: Any, given: Mapping[str, Any]) -> None:
    """Raise NotRows if flash attention is given padding, packed sequences or a sliding window."""
    positions = given.get("position_ids")
    packed = isinstance(positions, Tensor) and bool((positions.diff(dim=-1) != 1).any())
    if given.get("attention_mask") is None and getattr(attn, "sliding_window", None) is None and not packed:
        return
    warnings.warn(
        f"keepgrad: {type(m).__name__} runs with full backprop where flash attention is given padding, packed "
        "sequences or a sliding window; use attn_implementation='sdpa' for these",
        stacklevel=2,
    )
    raise NotRows


@adapts(*classes({"gpt2": "GPT2"}, "Block"))
class Gpt2Block(DecoderLayer):
    """GPT-2: learned positions, layer norms, one layer for q, k and v, and linear layers of the class `Conv1D`."""

    def attention_of(self, m: Any) -> Any:
        return m.attn

    def branches(self, m: Any) -> dict[str, Any]:
        inner = m.attn
        check_own(m, inner, called=inner)
        attention = Attention(
            inner,
            project=[inner.c_attn],
            heads=inner.num_heads,
            scale=inner.scaling,
            dropout=lambda: inner.attn_dropout.p if inner.training else 0.0,
            out=[inner.c_proj, inner.resid_dropout],
            call=call_of(inner),
            reason="its scores are computed in float32, by code of its own" if inner.reorder_and_upcast_attn else None,
        )
        return {"attention": [m.ln_1, attention], "mlp": [m.ln_2, m.mlp]}


@steps_for(*classes({"gpt2": "GPT2"}, "MLP"))
def _gpt2_mlp(m: Any) -> list[Step]:
    return steps_of_mlp(m.c_fc, m.act, m.c_proj, m.dropout)
