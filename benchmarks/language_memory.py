"""What a decoder of real size saves for backward: the shapes of Llama 3.2 1B, 4 layers, 2,048 tokens, batch 1.

    python benchmarks/language_memory.py                 # saved bytes; a minute or two
    python benchmarks/language_memory.py --time 5        # also the time of a training step, median of 5 in turns
    python benchmarks/language_memory.py --lora 16       # with adapters of rank 16 by PEFT, which alone are trained
    python benchmarks/language_memory.py --lora 16 --lora-dropout 0.1

The model is transformers' Llama with the shapes of Llama 3.2 1B (width 2,048, MLP 8,192, 32 heads, 8 of k and v) and
random weights, in float32 on the CPU. saved is what autograd keeps for backward up to the output of the last layer's
norm: the loss over the vocabulary, which is not keepgrad's, is left out. Time is that of forward and backward up to
there, against full backprop; take it on a machine that does nothing else. With --lora, full backprop is PEFT's LoRA
alone, on q, k, v, o, gate, up and down.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import keepgrad
from keepgrad.memory import saved_bytes
from keepgrad.timing import seconds_in_turns

SETTINGS: dict[str, dict | None] = {
    "full backprop": None,
    "transformers' gradient checkpointing": None,
    "exact": {"preset": "exact"},
    "text (default)": {},
    "text, save input": {"preset": "text", "save": "input"},
}


def make(layers: int) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=256,  # the table of words is not what is measured
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=4096,
        use_cache=False,
    )
    return transformers.LlamaModel(config).train()


def adapted(model: nn.Module, rank: int, dropout: float) -> nn.Module:
    """The model with adapters on every linear layer of its layers."""
    import peft

    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return peft.get_peft_model(model, peft.LoraConfig(r=rank, lora_dropout=dropout, target_modules=names)).train()


def set_up(name: str, model: nn.Module) -> None:
    options = SETTINGS[name]
    if options is not None:
        keepgrad.apply(model, **options)
    elif "checkpointing" in name:
        checkpointing(model, "enable")


def take_off(name: str, model: nn.Module) -> None:
    if SETTINGS[name] is not None:
        keepgrad.remove(model)
    elif "checkpointing" in name:
        checkpointing(model, "disable")


def checkpointing(model: Any, what: str) -> None:
    """transformers calls it by another name from 5.23 on."""
    name = next(name for name in ("activation", "gradient") if hasattr(model, f"{name}_checkpointing_{what}"))
    getattr(model, f"{name}_checkpointing_{what}")()


def step(name: str, model: nn.Module, ids: Tensor) -> None:
    """A training step without its loss. Setting up is a matter of milliseconds."""
    set_up(name, model)
    model(ids).last_hidden_state.square().mean().backward()
    take_off(name, model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--time", type=int, default=0, metavar="ROUNDS", help="also measure time, in so many turns")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train adapters of this rank alone")
    parser.add_argument("--lora-dropout", type=float, default=0.0)
    args = parser.parse_args()
    torch.manual_seed(0)
    model, ids = make(args.layers), torch.randint(256, (1, args.length))
    if args.lora:
        model = adapted(model, args.lora, args.lora_dropout)
    saved = {}
    for name in SETTINGS:
        set_up(name, model)
        saved[name] = saved_bytes(lambda: model(ids).last_hidden_state, model)
        take_off(name, model)
    steps: dict[str, Callable[[], object]] = {name: partial(step, name, model, ids) for name in SETTINGS}
    seconds = seconds_in_turns(steps, args.time) if args.time else {}
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {platform.machine()} CPU\n")
    print("| setting | saved, MB | saved |" + (" time |" if seconds else ""))
    print("| --- | --- | --- |" + (" --- |" if seconds else ""))
    for name, count in saved.items():
        row = f"| {name} | {count / 2**20:.0f} | {count / saved['full backprop']:.2f}x |"
        print(row + (f" {seconds[name] / seconds['full backprop']:.2f}x |" if seconds else ""))


if __name__ == "__main__":
    main()
