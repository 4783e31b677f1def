"""A ledger of storages: when each appeared and was freed during a step, in which module, and what it holds."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from .._torch import TorchDispatchMode, in_backward, tree_leaves

__all__ = ["Ledger", "Record"]


@dataclass
class Record:
    """One storage. `born` and `died` say when it appeared and was freed, as numbers of events in the ledger."""

    size: int
    kind: str
    device: str
    module: str
    born: int  # 0: it was there before the step
    from_forward: bool
    died: int | None = None


class Ledger(TorchDispatchMode):
    """Records every storage that operations make or use, until it is freed.

    `size_of` returns the bytes that a parameter, and its gradient, count as. It is given if these differ from the bytes
    they have here, as on a device that holds only a shard of each.
    """

    def __init__(self, model: nn.Module | None, size_of: Callable[[Tensor], int] | None = None) -> None:
        super().__init__()
        self.size_of = size_of
        self.records: list[Record] = []
        self.of: weakref.WeakKeyDictionary[Any, Record] = weakref.WeakKeyDictionary()
        self.events = 0
        self.names = {} if model is None else {id(module): name for name, module in model.named_modules()}
        self.inside: list[str] = [""]
        self.parameters: dict[int, Tensor] = {}  # those with a record, by id
        self.hooks: list[Any] = []
        self.finalizers: list[weakref.finalize] = []

    def __enter__(self) -> Ledger:
        self.hooks = [
            register_module_forward_pre_hook(lambda module, _: self.inside.append(self._name(module))),
            register_module_forward_hook(lambda *_: self._leave(), always_call=True),
            register_optimizer_step_post_hook(lambda optimizer, *_: self._add_state(optimizer)),
        ]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self.hooks:
            hook.remove()
        # A finalizer of a living storage would keep the ledger alive, and the ledger the parameters.
        for finalizer in self.finalizers:
            finalizer.detach()
        self.parameters.clear()

    def _name(self, module: nn.Module) -> str:
        return self.names.get(id(module), self.inside[-1])

    def _leave(self) -> None:
        self.inside.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, nn.Parameter):
                self.add_parameter(tensor)
            elif isinstance(tensor, Tensor):
                self.add(tensor, "other", before=True)
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.add(tensor, "temporary")
        return out

    def add_parameter(self, parameter: Tensor) -> None:
        if id(parameter) in self.parameters:
            return
        self.parameters[id(parameter)] = parameter
        self.add(parameter, "parameters", before=True)
        self._resize(parameter, parameter)
        if parameter.requires_grad:
            if parameter.grad is not None:
                self.add(parameter.grad, "gradients", before=True)
            self.hooks.append(parameter.register_post_accumulate_grad_hook(self._add_gradient))

    def _add_gradient(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.rename(parameter.grad, "gradients")
        self._resize(parameter.grad, parameter)

    def _resize(self, tensor: Tensor, parameter: Tensor) -> None:
        storage = _storage(tensor)
        if self.size_of is not None and storage is not None:
            self.of[storage].size = self.size_of(parameter)

    def _add_state(self, optimizer: torch.optim.Optimizer) -> None:
        for tensor in tree_leaves([dict(state) for state in optimizer.state.values()]):
            if isinstance(tensor, Tensor):
                self.rename(tensor, "optimizer")

    def rename(self, tensor: Tensor, kind: str) -> None:
        """Change the kind of a tensor's storage: sometimes the kind is only known later."""
        self.add(tensor, kind)
        storage = _storage(tensor)
        if storage is not None:
            self.of[storage].kind = kind

    def add(self, tensor: Tensor, kind: str, before: bool = False) -> None:
        """Begin a record of a tensor's storage, if it has none. `before`: True if it was there before the step."""
        storage = _storage(tensor)
        if storage is None or storage in self.of:
            return
        self.events += 1
        born = 0 if before else self.events
        record = Record(storage.nbytes(), kind, tensor.device.type, self.inside[-1], born, not in_backward())
        self.records.append(record)
        self.of[storage] = record
        self.finalizers.append(weakref.finalize(storage, self._free, record))

    def _free(self, record: Record) -> None:
        self.events += 1
        record.died = self.events
        if record.kind == "temporary" and record.from_forward and in_backward():
            record.kind = "activations"

    def peak(self, records: Sequence[Record]) -> tuple[int, int]:
        """The most bytes that these records have at one time, and the event when that was."""
        changes = sorted(
            [(record.born, record.size) for record in records]
            + [(record.died, -record.size) for record in records if record.died is not None]
        )
        now, most, when = 0, 0, 0
        for event, change in changes:
            now += change
            if now > most:
                most, when = now, event
        return most, when

    def at_peak(self) -> list[Record]:
        """The records of the storages that were alive at the peak."""
        _, when = self.peak(self.records)
        return [r for r in self.records if r.born <= when and (r.died is None or r.died > when)]


def _storage(tensor: Tensor) -> Any:
    """The storage of a tensor; None for tensors without a storage of their own, such as sparse ones."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
