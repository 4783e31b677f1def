"""What one device of many holds: replicas with DDP, or shards with FSDP2, where each block is one group.

| part       | DDP                                    | FSDP2                                              |
| ---        | ---                                    | ---                                                |
| parameters | all                                    | rows divided by the processes, rounded up          |
| gradients  | all, and DDP's buckets, as large again | as the parameters                                  |
| optimizer  | all                                    | as the parameters                                  |
| gathered   | -                                      | whole parameters and gradients of what is computed |

FSDP2 pads a parameter whose rows cannot be divided equally, so every process holds as much as the first. These are
gathered, that is, whole on every device for a while:

- what is in no block (embedding, head), with its gradients, from its forward pass to the end of the backward pass;
- the block that is being computed and the next one, which torch fetches in advance;
- the gradients of a block, twice: as autograd makes them, and in the buffer from which they are sent.
"""

from __future__ import annotations

import math

from torch import Tensor, nn

from ..adapters import find_blocks

__all__ = ["bucket_bytes", "gathered_bytes", "shard_bytes"]


def shard_bytes(parameter: Tensor, processes: int) -> int:
    """The bytes of a parameter that one process holds under FSDP2."""
    rows = parameter.shape[0] if parameter.dim() else 1
    return math.ceil(rows / processes) * (parameter.nbytes // max(rows, 1))


def bucket_bytes(model: nn.Module) -> int:
    """The bytes of DDP's buckets, from which gradients are sent: a copy of all gradients, during the whole run."""
    return sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)


def gathered_bytes(model: nn.Module) -> int:
    """The most bytes that FSDP2 has gathered at one time. Each block is a group, and so is the rest of the model."""
    seen: set[int] = set()
    groups = []  # from the inside out: a parameter belongs to the innermost block that has it
    for module in (*sorted((block.module for block in find_blocks(model)), key=_size), model):
        own = [p for p in module.parameters() if id(p) not in seen]
        seen.update(map(id, own))
        groups.append((module, sum(p.nbytes for p in own), sum(p.nbytes for p in own if p.requires_grad)))
    *blocks, (_, rest, rest_gradients) = groups
    order = {id(module): number for number, module in enumerate(model.modules())}
    blocks.sort(key=lambda group: order[id(group[0])])
    sizes = [size for _, size, _ in blocks]
    ahead = max((a + b for a, b in zip(sizes, [*sizes[1:], 0], strict=True)), default=0)
    return rest + rest_gradients + ahead + 2 * max((gradients for _, _, gradients in blocks), default=0)


def _size(module: nn.Module) -> int:
    return sum(1 for _ in module.modules())
