"""What keepgrad uses of torch that torch does not document, in one place. Tested with torch 2.15.

- A module's hooks, and those of all modules, can only be seen in private dictionaries; torch has no question for them.
- `TorchDispatchMode` is how torch's own FLOP counter sees operations; it lives in a module with an underscore.
- `FakeTensorMode` runs a model on tensors without data, `FakeTensor`s; torch.compile stands on it.
- `Tensor.backward` puts modes that watch torch's functions out of force; the engine behind it does not.
- Which mode watches torch's functions last can only be asked by a name with an underscore.
- Whether the autograd engine is at work can only be asked by the number of its current task.
- Whether transforms of `torch.func` are at work is what `autograd.Function` asks itself before it refuses them.
"""

from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = [
    "TorchDispatchMode",
    "acts_by_itself",
    "backward",
    "fake_tensors",
    "has_compiled_parts",
    "has_global_hooks",
    "has_hooks",
    "in_backward",
    "is_fake",
    "is_real",
    "is_wrapper",
    "last_function_mode",
    "only_counts",
    "tensors_of",
    "tree_leaves",
    "tree_map_only",
    "watcher",
]


QUIET_HOOKS = {"transformers.utils.output_capturing", "torch.utils.module_tracker", "keepgrad.memory.ledger"}
"""Where hooks are defined that need not see the modules inside of sites: those of transformers stay on modules and do
nothing unless they are asked (its adapters look), those of torch's FLOP counter and the ledger note names.
"""
GLOBAL_HOOKS: tuple[dict, ...] = (
    torch.nn.modules.module._global_forward_hooks,
    torch.nn.modules.module._global_forward_pre_hooks,
    torch.nn.modules.module._global_backward_hooks,
    torch.nn.modules.module._global_backward_pre_hooks,
)


def has_hooks(module: nn.Module) -> bool:
    """Whether calling the module runs hooks besides its forward, its own or those of all modules."""
    kinds = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(map(_are_heard, kinds)) or has_global_hooks()


def has_global_hooks() -> bool:
    """Whether there are hooks that run with every module."""
    return any(GLOBAL_HOOKS) and any(map(_are_heard, GLOBAL_HOOKS))


def _are_heard(hooks: dict) -> bool:
    return any(getattr(hook, "__module__", "") not in QUIET_HOOKS for hook in hooks.values())


def tensors_of(model: nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Parameters and buffers of a model. Its own methods for it take the time of a block, too much for every step."""
    parameters: list[torch.Tensor] = []
    buffers: list[torch.Tensor] = []
    left = [model]
    while left:
        module = left.pop()
        parameters += [t for t in module._parameters.values() if t is not None]
        buffers += [t for t in module._buffers.values() if t is not None]
        left += [child for child in module._modules.values() if child is not None]
    return parameters, buffers


def has_compiled_parts(model: nn.Module) -> bool:
    """Whether modules inside of the model were compiled by themselves, which saved-tensor hooks around them forbid."""
    left = list(model._modules.values())
    while left:
        module = left.pop()
        if module is None:
            continue
        if module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule":
            return True
        left += module._modules.values()
    return False


def in_backward() -> bool:
    """Whether the autograd engine is running."""
    return torch._C._current_graph_task_id() != -1


def is_wrapper(module: nn.Module) -> bool:
    """Whether this is a wrapper of `apply_activation_checkpointing`: it looks like the module inside, and is not."""
    return "_checkpoint_wrapped_module" in module._modules


def last_function_mode() -> object:
    """The mode that sees calls of torch's functions first, the one that was entered last; None if there is none."""
    return torch.overrides._get_current_function_mode()


def watcher(given: object) -> str | None:
    """What records or transforms a call with these arguments, and cannot see through an `autograd.Function`."""
    if torch._C._are_functorch_transforms_active():
        return "a transform of torch.func"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode differentiation"
    if torch.jit.is_tracing():
        return "torch.jit.trace"
    return "torch.fx" if any(isinstance(leaf, torch.fx.Proxy) for leaf in tree_leaves(given)) else None


def fake_tensors() -> AbstractContextManager:
    """A context in which tensors have shapes, types and devices, but no data. Imported when used: it is slow."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.counts_only = True  # type: ignore[attr-defined]
    return mode


def only_counts(tensor: torch.Tensor) -> bool:
    """Whether a tensor is from within `fake_tensors`, so that nobody wants to know more than shapes and bytes.

    Not so for the tensors without data of a compiler: those stand for work that is done later.
    """
    if torch.compiler.is_compiling() or not is_fake(tensor):
        return False
    return getattr(tensor.fake_mode, "counts_only", False)  # type: ignore[attr-defined]


def is_real(tensor: torch.Tensor) -> bool:
    """Whether this is a plain tensor, of no subclass such as those of sharded or quantised ones."""
    return type(tensor) is torch.Tensor or type(tensor) is nn.Parameter


def acts_by_itself(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a subclass that decides what a linear layer does with it, as quantised ones are.

    Sharded ones (`DTensor`) do not count: they are plain while their block runs.
    """
    return not (is_real(tensor) or is_fake(tensor) or type(tensor).__name__ == "DTensor")


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether this is a tensor without data, as `fake_tensors` makes them; asked without importing what makes them."""
    return type(tensor).__name__ == "FakeTensor"


def backward(loss: torch.Tensor) -> None:
    """`loss.backward()`, with the modes in force that are in force now."""
    ones = torch.ones_like(loss)
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward((loss,), (ones,), False, False, (), allow_unreachable=True, accumulate_grad=True)
