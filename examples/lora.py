"""LoRA by PEFT with keepgrad: only the adapters are trained, and what waits for backward waits in 8 bits.

    python examples/lora.py

A tiny Llama, built from a configuration, learns to count: each token is the one before it plus the step of its text.
It prints what LoRA saves for backward alone and with keepgrad, and the loss as it falls. With a model of your own,
the line that matters is `keepgrad.apply(model)`, after `get_peft_model`.
"""

import argparse

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import keepgrad
from keepgrad.memory import saved_bytes

WORDS = 32
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def texts(count: int, length: int = 32) -> torch.Tensor:
    """Texts that count up from a random word in steps of 1 to 4."""
    start, step = torch.randint(WORDS, (count, 1)), torch.randint(1, 5, (count, 1))
    return (start + step * torch.arange(length)) % WORDS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=WORDS, num_hidden_layers=2, use_cache=False, **shape)
    lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules=TARGETS)
    model = get_peft_model(LlamaForCausalLM(config), lora).train()
    model.print_trainable_parameters()

    batch = texts(16)
    alone = saved_bytes(lambda: model(batch, labels=batch).loss, model)
    print(keepgrad.apply(model))  # preset 'text': exact gradients, stored in 8 bits
    saved = saved_bytes(lambda: model(batch, labels=batch).loss, model)
    print(f"saved for backward: LoRA alone {alone / 2**20:.1f} MB, with keepgrad {saved / 2**20:.1f} MB")

    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    for number in range(args.steps):
        batch = texts(16)
        loss = model(batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % 20 == 0 or number == args.steps - 1:
            print(f"step {number}: loss {loss.item():.3f}")

    keepgrad.remove(model)  # from here on it is PEFT's own model, to merge or to save


if __name__ == "__main__":
    main()
