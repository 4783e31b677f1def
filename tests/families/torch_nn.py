"""torch's own layers."""

from __future__ import annotations

from functools import partial

import torch
from oracle_model import Branch
from torch import Tensor, nn

from keepgrad import Layout

from .family import Family

COUNT, WIDTH = 18, 24


def encoder(**options) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 3, 40, dropout=0.0, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def inputs(dtype: torch.dtype, batch_first: bool = True, **masks: bool) -> dict[str, Tensor]:
    """Two sequences, with masks if asked for: causal, of the padding, or of any pairs."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, COUNT, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    found: dict = {"src": x if batch_first else x.transpose(0, 1).contiguous()}
    if masks.get("causal"):
        found |= {"mask": nn.Transformer.generate_square_subsequent_mask(COUNT, dtype=dtype), "is_causal": True}
    if masks.get("pairs"):
        found["mask"] = torch.rand(6, COUNT, COUNT, generator=generator) < 0.2
    if masks.get("padding"):
        found["src_key_padding_mask"] = torch.arange(COUNT) >= torch.tensor([[15], [18]])
    return found


def specs(entrances: tuple[str, str] = ("self_attn", "linear1"), form: str = "nlc") -> dict[str, dict[str, Branch]]:
    names = {"last": ("self_attn.out_proj",), "out": "self_attn.out_proj", "query": "self_attn"}
    first, second = entrances
    return {
        "TransformerEncoderLayer": {
            "attention": Branch(first, "dropout1", Layout((COUNT,)), form, **names, heads=3),
            "mlp": Branch(second, "dropout2", Layout((COUNT,)), form, last=("linear2",)),
        }
    }


NORM_FIRST = ("norm1", "norm2")

FAMILIES: dict[str, Family] = {
    # Norms after the sum are on the trunk, and full backprop does not save what is before a ReLU.
    "TransformerEncoderLayer": Family(
        partial(encoder, batch_first=True), partial(inputs, padding=True), specs(), limit=0.5
    ),
    "TransformerEncoderLayer, norm first, causal": Family(
        partial(encoder, batch_first=True, norm_first=True, activation="gelu"),
        partial(inputs, causal=True),
        specs(NORM_FIRST),
    ),
    "TransformerEncoderLayer, sequence first": Family(
        partial(encoder, norm_first=True, bias=False),
        partial(inputs, batch_first=False, pairs=True, padding=True),
        specs(NORM_FIRST, "lnc"),
    ),
}
