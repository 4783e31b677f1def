"""What keepgrad uses of torch that torch does not document, in one place. Tested with torch 2.15.

- A module's hooks can only be seen in its private dictionaries; torch has no question for them.
- `TorchDispatchMode` is how torch's own FLOP counter sees operations; it lives in a module with an underscore.
"""

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["TorchDispatchMode", "has_hooks", "tree_leaves"]


def has_hooks(module: nn.Module) -> bool:
    """Whether calling the module runs hooks of its own besides its forward."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )
