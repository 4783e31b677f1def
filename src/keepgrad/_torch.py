"""All uses of undocumented parts of torch, in one place. Tested with torch 2.15.

- Hooks of a module, and global hooks of all modules, are only in private dictionaries; torch has no function for them.
- `TorchDispatchMode` sees every operation. Torch's own FLOP counter uses it, but it is in a private module.
- `FakeTensorMode` runs a model on tensors without data, `FakeTensor`s. torch.compile is built on it.
- `Tensor.backward` switches off modes that watch torch's functions. Calling the autograd engine directly does not.
- Which mode that watches torch's functions was entered last is only known to a private function.
- Whether the autograd engine is running is only known from the id of its current task.
- Whether a transform of `torch.func` is active: `autograd.Function` uses the same private function to refuse them.
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
"""Python modules whose hooks need not see the `nn.Module`s inside of sites.

The hooks of transformers stay on modules and do nothing unless outputs are asked for, which its adapters check. Those
of torch's FLOP counter and of the ledger only note names.
"""
GLOBAL_HOOKS: tuple[dict, ...] = (
    torch.nn.modules.module._global_forward_hooks,
    torch.nn.modules.module._global_forward_pre_hooks,
    torch.nn.modules.module._global_backward_hooks,
    torch.nn.modules.module._global_backward_pre_hooks,
)


def has_hooks(module: nn.Module) -> bool:
    """True if calling the module runs hooks besides its forward: its own, or global ones."""
    kinds = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(map(_are_heard, kinds)) or has_global_hooks()


def has_global_hooks() -> bool:
    """True if there are hooks that run with every module."""
    return any(GLOBAL_HOOKS) and any(map(_are_heard, GLOBAL_HOOKS))


def _are_heard(hooks: dict) -> bool:
    return any(getattr(hook, "__module__", "") not in QUIET_HOOKS for hook in hooks.values())


def tensors_of(model: nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The parameters and buffers of a model. Its own methods take as long as a block, too slow for every step."""
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
    """True if modules inside the model were compiled by themselves. Saved-tensor hooks cannot be used around those."""
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
    """True if the autograd engine is running."""
    return torch._C._current_graph_task_id() != -1


def is_wrapper(module: nn.Module) -> bool:
    """True for a wrapper of `apply_activation_checkpointing`, which only looks like the module inside it."""
    return "_checkpoint_wrapped_module" in module._modules


def last_function_mode() -> object:
    """The mode that was entered last, which sees calls of torch's functions first; None if there is none."""
    return torch.overrides._get_current_function_mode()


def watcher(given: object) -> str | None:
    """The torch tool, if any, that records or transforms this call and cannot see through an `autograd.Function`."""
    if torch._C._are_functorch_transforms_active():
        return "a transform of torch.func"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode differentiation"
    if torch.jit.is_tracing():
        return "torch.jit.trace"
    return "torch.fx" if any(isinstance(leaf, torch.fx.Proxy) for leaf in tree_leaves(given)) else None


def fake_tensors() -> AbstractContextManager:
    """A context in which tensors have shapes, types and devices, but no data. The import is slow, so it is here."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.counts_only = True  # type: ignore[attr-defined]
    return mode


def only_counts(tensor: torch.Tensor) -> bool:
    """True for a tensor made in `fake_tensors`, of which only the shape and the bytes matter.

    False for the fake tensors of a compiler: those stand for work that is done later.
    """
    if torch.compiler.is_compiling() or not is_fake(tensor):
        return False
    return getattr(tensor.fake_mode, "counts_only", False)  # type: ignore[attr-defined]


def is_real(tensor: torch.Tensor) -> bool:
    """True for a plain tensor or parameter; False for a subclass, such as a sharded or quantised tensor."""
    return type(tensor) is torch.Tensor or type(tensor) is nn.Parameter


def acts_by_itself(tensor: torch.Tensor) -> bool:
    """True for a tensor subclass that decides what a linear layer does with it, such as a quantised tensor.

    False for sharded tensors (`DTensor`): they are plain tensors while their block runs.
    """
    return not (is_real(tensor) or is_fake(tensor) or type(tensor).__name__ == "DTensor")


def is_fake(tensor: torch.Tensor) -> bool:
    """True for a tensor without data, as in `fake_tensors`. Checks the class's name, because importing it is slow."""
    return type(tensor).__name__ == "FakeTensor"


def backward(loss: torch.Tensor) -> None:
    """`loss.backward()`, but the modes that watch torch's functions stay active."""
    ones = torch.ones_like(loss)
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward((loss,), (ones,), False, False, (), allow_unreachable=True, accumulate_grad=True)
