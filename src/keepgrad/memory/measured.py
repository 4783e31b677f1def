"""Measure the memory of a real training step: the peak of torch's allocator, and what is saved for backward."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from ..errors import InputError
from ..ops.outside import observers
from .ledger import Ledger
from .report import MemoryReport, report_of

__all__ = ["allocated_peak", "measure", "peak_bytes", "saved_bytes"]


def measure(step: Callable[[], object], *, model: nn.Module | None = None) -> MemoryReport:
    """Run `step`, a training step, and report its peak memory.

    On the CPU, the peak is what torch's allocator allocates during the step, plus the tensors from before that the step
    uses. If the step uses a GPU, it is the peak of the CUDA allocator.

    Args:
        step: a function of no arguments; it runs once.
        model: the model, for the names of modules in the report.
    """
    if not callable(step):
        raise InputError(
            f"step is a {type(step).__name__}; give a function without arguments that runs a training step"
        )
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    with (
        profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as found,
        Ledger(model) as ledger,
    ):
        step()
    if any(record.device == "cuda" for record in ledger.records):
        torch.cuda.synchronize()
        ledger.records = [record for record in ledger.records if record.device == "cuda"]
        return report_of(ledger, total=torch.cuda.max_memory_allocated())
    return report_of(ledger, allocated=_allocator_peak(found))


def saved_bytes(forward: Callable[[], object], model: nn.Module) -> int:
    """The bytes saved for backward while `forward` runs: each storage once, parameters and buffers excluded."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    storages: dict[int, int] = {}
    held: list[object] = []  # keeps every storage alive, so that no address is reused

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
            held.append(storage)
        return tensor.detach()  # saving an output with its graph would make a reference cycle

    observers.append(pack)
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            held.append(forward())
    finally:
        observers.remove(pack)
        held.clear()  # the graph refers to `pack`, and `pack` to this list: they would never be freed
    return sum(storages.values())


def peak_bytes(step: Callable[[], object]) -> int:
    """The most bytes that tensors made during `step` occupy at one time, on any device.

    Memory that kernels use internally is not counted.
    """
    with Ledger(None) as ledger:
        step()
    return ledger.peak([record for record in ledger.records if record.born])[0]


def allocated_peak(step: Callable[[], object]) -> int:
    """The most bytes that torch's CPU allocator has allocated at one time during `step`, also in compiled code."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as found:
        step()
    return _allocator_peak(found)


def _allocator_peak(found: profile) -> int:
    """The most bytes that the step had allocated at one time on the CPU, from the profiler's trace."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        found.export_chrome_trace(str(path))
        events = json.loads(path.read_text(errors="replace"))["traceEvents"]
    changes = [e for e in events if e.get("name") == "[memory]" and e["args"].get("Device Type") == 0]
    live: dict[int, int] = {}
    now = most = 0
    for event in sorted(changes, key=lambda event: event["ts"]):
        size, address = event["args"]["Bytes"], event["args"]["Addr"]
        if size > 0:
            live[address] = size
        else:
            size = -live.pop(address, 0)  # what was there before the step does not count
        now += size
        most = max(most, now)
    return most
