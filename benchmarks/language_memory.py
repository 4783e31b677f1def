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

import torch
import transformers
from torch import Tensor, nn

from keepgrad.memory import saved_bytes
from keepgrad.methods import CHECKPOINTING, FULL, Method, kept
from keepgrad.report import Table
from keepgrad.timing import seconds_in_turns

METHODS = (FULL, CHECKPOINTING, kept(preset="exact"), kept(preset="text"), kept(preset="text", save="input"))


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


def step(method: Method, model: nn.Module, ids: Tensor) -> None:
    """A training step without its loss. Putting a method on is a matter of milliseconds."""
    with method.put_on(model):
        model(ids).last_hidden_state.square().mean().backward()


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
    for method in METHODS:
        with method.put_on(model):
            saved[method.name] = saved_bytes(lambda: model(ids).last_hidden_state, model)
    steps: dict[str, Callable[[], object]] = {method.name: partial(step, method, model, ids) for method in METHODS}
    seconds = seconds_in_turns(steps, args.time) if args.time else {}
    rows = [
        (
            name,
            f"{count / 2**20:.0f}",
            f"{count / saved[FULL.name]:.2f}x",
            *([f"{seconds[name] / seconds[FULL.name]:.2f}x"] if seconds else []),
        )
        for name, count in saved.items()
    ]
    head = ("method", "saved, MB", "saved", *(["time"] if seconds else []))
    title = f"torch {torch.__version__}, transformers {transformers.__version__}, {platform.machine()} CPU"
    print(Table(title, head, rows).to_markdown())


if __name__ == "__main__":
    main()
