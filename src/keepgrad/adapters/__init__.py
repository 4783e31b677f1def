"""Which blocks keepgrad knows, and where they are in a model.

An adapter describes one kind of block. It lists the block's branches, and for each branch the block's own modules in
the order in which they run. `adapts` registers it under the import path of the block's class, here or in a user's code.
Classes are known by that path, so no library has to be imported. There are three tiers:

1. a known block: its whole branches run in the engine;
2. a position-wise MLP in an unknown block: the MLP alone is a site;
3. everything else is left as it is.
"""

# Importing these modules registers their adapters.
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
