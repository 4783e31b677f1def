"""Predict the memory of a training step by running it on fake tensors, which have shapes but no data.

Even for the largest models this takes seconds and no memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import backward, fake_tensors, tree_leaves, tree_map_only
from ..calling import call, in_training
from ..errors import ConfigError, InputError
from ..patch import draws_set_aside
from .autocast import AMP, CudaRules
from .ledger import Ledger
from .optimizers import state_bytes
from .report import MemoryReport, report_of
from .sharding import bucket_bytes, gathered_bytes, shard_bytes

__all__ = ["estimate"]


def estimate(
    model: nn.Module,
    batch: Any,
    *,
    optimizer: str | Callable[[list[nn.Parameter]], torch.optim.Optimizer] = "adamw",
    amp: str | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    train_step: Callable[[nn.Module, Any], object] | None = None,
    processes: int = 1,
    fsdp: bool = False,
) -> MemoryReport:
    """Predict the peak memory of one training step, without running it: nothing is computed or allocated.

    The step is forward, backward and optimizer. Gradients are None at its beginning, and the optimizer already has its
    state, as in the middle of a run. Memory that kernels use internally is not counted. The model is not changed.

    Args:
        model: any model. It may be patched by keepgrad, checkpointed or partly frozen. On the meta device, it counts
            as on the CPU.
        batch: the shape of the input, e.g. `(64, 3, 224, 224)`, or a batch: a tensor, or a tuple, list or dictionary
            of arguments for the model.
        optimizer: a name in `OPTIMIZERS`, or a function that takes parameters and returns an optimizer. The size of
            its state is assumed to be proportional to the parameters. This is wrong for factored optimizers such as
            Adafactor.
        amp: "bf16" or "fp16" for autocast around the forward pass. It follows CUDA's rules on every device.
        loss: a function that takes the model's output and returns the loss. By default, the output's `loss` if it has
            one, else the mean of the output.
        train_step: a function `train_step(model, batch)` that runs forward and backward, in place of the usual ones.
        processes: how many devices train together. The report is for one of them, and `batch` is the batch of one.
            With DDP, its buckets count as gradients.
        fsdp: True to shard by FSDP2, block by block, instead of DDP. Parameters and gradients that are gathered for a
            while count as temporary (`keepgrad.memory.sharding`).

    Raises:
        ConfigError: if an argument is not one of those above.
        InputError: if the batch does not fit the model.
    """
    if amp not in AMP:
        raise ConfigError(f"amp={amp!r} is not known; use None, 'bf16' or 'fp16'")
    if train_step is not None and (loss is not None or amp is not None):
        raise ConfigError("train_step does the whole of forward and backward; leave out loss and amp")
    if processes < 1 or (fsdp and processes == 1):
        raise ConfigError(f"processes={processes}: give a number from {2 if fsdp else 1}, e.g. 8")
    size_of = partial(shard_bytes, processes=processes) if fsdp else None
    state = state_bytes(model, optimizer, size_of or (lambda parameter: parameter.nbytes))
    step = train_step or (lambda model, batch: _forward_backward(model, batch, loss, amp))
    rng_state = torch.get_rng_state()
    with ExitStack() as stack:
        stack.callback(torch.set_rng_state, rng_state)
        stack.enter_context(in_training(model))
        stack.enter_context(draws_set_aside(model))
        stack.enter_context(_tensors_put_back(model))
        stack.enter_context(fake_tensors())
        own = {id(t): _without_data(t) for t in (*model.parameters(), *model.buffers())}
        named = {**_all_named(model.named_parameters), **_all_named(model.named_buffers)}
        fakes = {f"model.{name}": own[id(t)] for name, t in named.items()}
        arguments = _batch_without_data(batch, next(iter(own.values()), None))
        ledger = stack.enter_context(Ledger(model, size_of))
        for parameter in model.parameters():
            ledger.add_parameter(own[id(parameter)])
        for t in (*own.values(), *(leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor))):
            ledger.add(t, "other", before=True)
        try:
            torch.func.functional_call(_Step(model, step), fakes, (arguments,))
        except InputError:
            raise
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:
            given = f"of shape {tuple(batch)}" if _is_shape(batch) else f"({type(batch).__name__})"
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise InputError(f"the training step fails on a batch {given}: {reason}") from error
    report = report_of(ledger, optimizer=state)
    if fsdp:
        return replace(report, temporary=report.temporary + gathered_bytes(model))
    return replace(report, gradients=report.gradients + (bucket_bytes(model) if processes > 1 else 0))


@contextmanager
def _tensors_put_back(model: nn.Module) -> Iterator[None]:
    """At the end, remove tensors that the model cached on itself while it ran, such as rotary positions for a size."""

    def own(module: nn.Module) -> dict[str, Any]:
        return {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}

    before = [(module, dict(module._buffers), own(module)) for module in model.modules()]
    try:
        yield
    finally:
        for module, buffers, attributes in before:
            module._buffers.clear()
            module._buffers.update(buffers)
            for name in own(module).keys() - attributes.keys():
                delattr(module, name)
            vars(module).update(attributes)


class _Step(nn.Module):
    """A whole training step as a module.

    So torch.func.functional_call replaces the parameters during backward too, where checkpointed blocks run again.
    """

    def __init__(self, model: nn.Module, step: Callable[[nn.Module, Any], object]) -> None:
        super().__init__()
        self.model, self.step = model, step

    def forward(self, batch: Any) -> None:
        self.step(self.model, batch)


def _forward_backward(model: nn.Module, batch: Any, loss: Callable[[Any], Tensor] | None, amp: str | None) -> None:
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    device = leaves[0].device.type if leaves else "cpu"
    with CudaRules(device):
        with torch.autocast(device, dtype=AMP[amp], enabled=amp is not None):
            out = call(model, batch)
            value = _default_loss(out) if loss is None else loss(out)
        backward(value)


def _default_loss(out: Any) -> Tensor:
    own = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    if isinstance(own, Tensor):
        return own
    found = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not found:
        raise InputError("the model's output has no tensor with a gradient; give loss=..., or unfreeze a parameter")
    return torch.stack([leaf.float().mean() for leaf in found]).sum()


def _is_shape(batch: Any) -> bool:
    return isinstance(batch, (tuple, list, torch.Size)) and bool(batch) and all(type(n) is int for n in batch)


def _without_data(tensor: Tensor) -> Tensor:
    """A fake tensor like this one, in the active fake mode."""
    device = "cpu" if tensor.device.type == "meta" else tensor.device
    twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return nn.Parameter(twin, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin


def _batch_without_data(batch: Any, like: Tensor | None) -> Any:
    if _is_shape(batch):
        if min(batch) < 1:
            raise InputError(f"the shape {tuple(batch)} has a size below 1; give a shape such as (64, 3, 224, 224)")
        if math.prod(batch) >= 2**58:
            raise InputError(f"the shape {tuple(batch)} has more values than a tensor can have; give a smaller one")
        if like is None:
            return torch.empty(tuple(batch))
        return torch.empty(tuple(batch), dtype=like.dtype if like.is_floating_point() else None, device=like.device)
    if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(batch)):
        raise InputError(
            f"the batch is a {type(batch).__name__}; give the shape of the input, e.g. (64, 3, 224, 224), or tensors"
        )
    return tree_map_only(Tensor, _without_data, batch)


def _all_named(named: Callable[..., Iterator[tuple[str, Tensor]]]) -> dict[str, Tensor]:
    return dict(named(remove_duplicate=False))
