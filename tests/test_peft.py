"""PEFT's adapters inside of sites: only they get gradients, and these are the model's own, or the oracle's."""

from __future__ import annotations

import warnings

import pytest
import torch
from conftest import assert_same, images, vit
from families import FAMILIES
from oracle_model import reduced_model
from torch import Tensor, nn

import keepgrad
from keepgrad.memory import saved_bytes

transformers = pytest.importorskip("transformers")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what it imports
    peft = pytest.importorskip("peft")

SEED = 11
TARGETS = {
    "timm ViT": ["qkv", "proj", "fc1", "fc2"],
    "HF ViT": ["q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2"],
    "HF Llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}
VARIANTS = {
    "LoRA": {},
    "dropout": {"lora_dropout": 0.3},
    "rsLoRA": {"use_rslora": True},
    "bias": {"lora_bias": True},
    "DoRA": {"use_dora": True},
    "DoRA, dropout": {"use_dora": True, "lora_dropout": 0.3},
}

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def adapted(name: str, dtype: torch.dtype = torch.float64, targets: list[str] | None = None, **options) -> nn.Module:
    """A family's small model with adapters of rank 3, none of which is zero."""
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=targets or TARGETS[name], **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(FAMILIES[name].model(dtype), config, autocast_adapter_dtype=False).train()
    return filled(model)


def filled(model: nn.Module) -> nn.Module:
    torch.manual_seed(5)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                parameter.normal_(std=0.3)
    return model


def step(name: str, model: nn.Module, dtype: torch.dtype = torch.float64) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    torch.manual_seed(3)
    out = FAMILIES[name].run(model, dtype)
    out.double().square().sum().backward()
    return out.detach(), {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}


def assert_equal(name: str, found, wanted) -> None:
    rtol = FAMILIES[name].rtol  # larger where a norm of the model computes in float32
    torch.testing.assert_close(found[0], wanted[0], rtol=rtol, atol=rtol)
    largest = max(float(grad.abs().max()) for grad in wanted[1].values())
    assert_same(found[1], wanted[1], rtol=rtol, atol=1e-9 if rtol < 1e-6 else rtol * largest)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_ratio_one_is_autograd_with_the_same_dropout(name, variant):
    if variant == "bias" and name == "HF Llama":
        pytest.skip("its layers have no bias")
    model = adapted(name, **VARIANTS[variant])
    wanted = step(name, model)
    assert wanted[1]
    assert all("lora_" in key for key in wanted[1])
    for save in ("heavy", "input"):
        plan = keepgrad.apply(model, keep_ratio=1.0, save=save)
        assert len(plan.sites) == 4
        assert_equal(name, step(name, model), wanted)
        keepgrad.remove(model)
    assert_equal(name, step(name, model), wanted)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize(
    ("variant", "reduce", "save"),
    [
        *(("dropout", "drop", "heavy"), ("dropout", "fold", "heavy"), ("dropout", "fold", "input")),
        ("DoRA, dropout", "fold", "input"),  # with "heavy" the oracle takes its products of weights for layers
    ],
)
def test_reduced_gradients_equal_the_oracle(name, variant, reduce, save):
    family, model = FAMILIES[name], adapted(name, **VARIANTS[variant])
    options = {"keep_ratio": 0.5, "reduce": reduce, "save": save}

    def run() -> Tensor:
        torch.manual_seed(3)
        return family.run(model, torch.float64)

    wanted = reduced_model(model, run, family.specs, keepgrad.plan(model, **options).sites, SEED, save)
    model.zero_grad()
    wanted.square().sum().backward()
    grads = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    keepgrad.apply(model, seed=SEED, **options)
    assert_equal(name, step(name, model), (wanted, grads))


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("attention", ["query", "head"])
def test_methods_that_cut_the_projection_leave_attention_to_autograd(name, attention):
    model = adapted(name, lora_dropout=0.3)
    wanted = step(name, model)
    keepgrad.apply(model, keep_ratio=0.5, attention=attention)
    found = step(name, model)
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=1e-5)
    assert found[1].keys() == wanted[1].keys()


def test_gpt2_whose_layers_are_transposed():
    name, targets = "HF GPT-2", ["c_attn", "c_fc", "mlp.c_proj"]
    model = adapted(name, targets=targets, lora_dropout=0.3, fan_in_fan_out=True)
    wanted = step(name, model)
    keepgrad.apply(model, keep_ratio=1.0)
    assert_equal(name, step(name, model), wanted)


def test_adapters_merged_switched_off_and_changed_after_apply():
    name = "timm ViT"
    model, plain = adapted(name, lora_dropout=0.3), adapted(name, lora_dropout=0.3)
    keepgrad.apply(model, keep_ratio=1.0)
    merged = []
    for one in (plain, model):
        torch.manual_seed(4)
        one.add_adapter("other", peft.LoraConfig(r=2, target_modules=TARGETS[name], lora_dropout=0.2))
        filled(one.double())
    for one in (plain, model):
        found = [step(name, one)]
        one.base_model.set_adapter(["default", "other"])
        found.append(step(name, one))
        one.base_model.set_adapter("other")
        found.append(step(name, one))
        with one.disable_adapter():
            one.base_model.model.head.weight.requires_grad_(True)
            found.append(step(name, one))
        one.merge_adapter()
        found.append(step(name, one))
        one.unmerge_adapter()
        found.append(step(name, one))
        merged.append(found)
    for found, wanted in zip(*merged, strict=True):
        assert_equal(name, found, wanted)
    keys = [set(grads) for _, grads in merged[0]]
    assert keys[3] == keys[4] == {"base_model.model.head.weight"}
    assert len({len(own) for own in keys}) > 2


@pytest.mark.parametrize("saved", [["norm1", "head"], ["mlp"]])
def test_modules_to_save_are_trained_in_the_place_of_their_originals(saved):
    name = "timm ViT"
    model = adapted(name, targets=["qkv", "proj"], modules_to_save=saved, lora_dropout=0.3)
    wanted = step(name, model)
    assert any("modules_to_save" in key for key in wanted[1])
    plan = keepgrad.apply(model, keep_ratio=1.0)
    assert len(plan.sites) == 4
    assert_equal(name, step(name, model), wanted)


def test_adapters_of_higher_precision_than_the_model():
    name = "HF Llama"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = peft.LoraConfig(r=3, target_modules=TARGETS[name], lora_dropout=0.3)
        model = filled(peft.get_peft_model(FAMILIES[name].model(torch.bfloat16), config).train())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16, torch.float32}
    out, wanted = step(name, model, torch.bfloat16)
    keepgrad.apply(model, keep_ratio=1.0)
    found_out, found = step(name, model, torch.bfloat16)
    torch.testing.assert_close(found_out, out, rtol=0.05, atol=0.05)
    assert {key: g.dtype for key, g in found.items()} == {key: g.dtype for key, g in wanted.items()}
    both = [torch.cat([g.flatten() for g in one.values()]) for one in (found, wanted)]
    assert torch.cosine_similarity(*both, dim=0) > 0.99


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("options", [{"preset": "text"}, {"preset": "exact", "store": "int8"}])
def test_saved_bytes_against_lora_alone(dropout, options):
    """q, k, v, o, gate, up and down of a Llama, with groups of 128 values as in large ones."""
    shape = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=64, num_hidden_layers=2, use_cache=False, **shape)
    lora = peft.LoraConfig(r=8, target_modules=TARGETS["HF Llama"], lora_dropout=dropout)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = filled(peft.get_peft_model(transformers.LlamaModel(config), lora).train())
    ids, weight = torch.randint(64, (2, 64)), torch.randn(2, 64, 128)

    def forward() -> Tensor:
        return model(ids).last_hidden_state * weight

    alone = saved_bytes(forward, model)
    torch.manual_seed(3)
    forward().square().mean().backward()
    wanted = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    keepgrad.apply(model, **options)
    assert saved_bytes(forward, model) <= 0.35 * alone
    torch.manual_seed(3)
    forward().square().mean().backward()
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert torch.cosine_similarity(found, wanted, dim=0) > 0.999


@pytest.mark.filterwarnings("default")
def test_compile_draws_new_dropout_in_each_step():
    config = peft.LoraConfig(r=2, target_modules=["fc1"], lora_dropout=0.3)
    model = filled(peft.get_peft_model(vit(depth=1), config).train())
    keepgrad.apply(model, keep_ratio=0.5, attention="off", seed=1)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    outs = [compiled(images()) for _ in range(2)]
    assert not torch.equal(*outs)
    outs[1].square().sum().backward()
    assert all(p.grad is not None for key, p in model.named_parameters() if "lora_" in key)
