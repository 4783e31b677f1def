"""Which blocks keepgrad knows, and where they are in a model.

An adapter says what is in one kind of block: its branches, as lists of the block's own modules in the order in which
they run. It is registered under the import path of the block's class with `adapts`, here or by a user; no library is
imported to know its classes. Three tiers:

1. a known block: whole branches run in the engine;
2. a position-wise MLP in a block that is not known: a site at the MLP's own boundary;
3. everything else is left as it is.
"""

# The families register their adapters.
from . import (  # noqa: F401
    peft,
    timm,
    timm_vit,
    timm_windows,
    torch_nn,
    torchvision,
    transformers,
    transformers_text,
    video,
)
from .find import Block, find_blocks
from .items import Attention, LinearOf, Scale, Unsupported
from .registry import Adapter, RunBranch, adapts

__all__ = ["Adapter", "Attention", "Block", "LinearOf", "RunBranch", "Scale", "Unsupported", "adapts", "find_blocks"]
