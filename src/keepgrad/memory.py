"""The memory of a training step: known before a run (`estimate`), and measured in one (`measure`).

Both keep a ledger of storages: when each appeared and was freed, and what it is. `estimate` runs the step on fake
tensors, which have shapes but no data, so the largest model takes seconds and no memory. `measure` runs the real step
and asks torch's allocator for the peak; the ledger says what it consists of.

| part        | what                                                                                           |
| ---         | ---                                                                                            |
| parameters  | of the model                                                                                   |
| gradients   | of the parameters                                                                              |
| optimizer   | its state                                                                                      |
| activations | made in the forward pass and freed in the backward pass: what is kept for it                   |
| temporary   | everything else that operations make: results not kept, gradients on their way, recomputation  |
| other       | what was there before and is none of these: the batch, buffers                                 |
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile

from ._torch import backward, fake_tensors, tree_leaves, tree_map_only
from .errors import ConfigError, InputError
from .ledger import Ledger
from .ops.outside import observers
from .patch import draws_set_aside
from .report import Report, Table, figures, readable_bytes
from .sharding import bucket_bytes, gathered_bytes, shard_bytes

__all__ = [
    "PARTS",
    "MemoryReport",
    "allocated_peak",
    "call",
    "estimate",
    "in_training",
    "measure",
    "peak_bytes",
    "saved_bytes",
]

PARTS = ("parameters", "gradients", "optimizer", "activations", "temporary", "other")
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer] | None] = {
    "none": None,
    "sgd": torch.optim.SGD,
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
}
AMP = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16}

# What CUDA's autocast does in float32, by torch's documentation; that of the CPU leaves most of it as it is.
FLOAT32_ON_CUDA = {
    *("binary_cross_entropy_with_logits", "cross_entropy", "huber_loss", "kl_div", "l1_loss", "mse_loss"),
    *("nll_loss", "smooth_l1_loss", "group_norm", "layer_norm", "norm", "normalize", "softmax", "log_softmax"),
    *("softplus", "cumprod", "cumsum", "prod", "sum", "exp", "log", "pow", "reciprocal", "rsqrt"),
}


@dataclass(frozen=True)
class MemoryReport(Report):
    """Bytes at the peak of one training step, by part; `modules` has the activations of each module by name."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    temporary: int
    other: int
    modules: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(getattr(self, part) for part in PARTS)

    def to_dict(self) -> dict[str, Any]:
        return {"total": self.total, **asdict(self)}

    def tables(self) -> list[Table]:
        sizes = {part: getattr(self, part) for part in PARTS}
        rows = [(part, readable_bytes(size), f"{size / max(self.total, 1):.0%}") for part, size in sizes.items()]
        rows.append(("total", readable_bytes(self.total), ""))
        found = [Table("Peak memory of a training step", ("", "", ""), rows)]
        if self.modules:
            largest = sorted(self.modules.items(), key=lambda item: -item[1])
            shown = [(name or "(the model itself)", readable_bytes(size)) for name, size in largest[:12]]
            rest = sum(size for _, size in largest[12:])
            if rest:
                shown.append((f"{len(largest) - 12} others", readable_bytes(rest)))
            found.append(Table("Activations by module", ("module", ""), shown))
        return found

    def plot(self) -> Any:
        """A bar of the parts, and the activations of the modules in the order they run."""
        figure = figures().Figure(figsize=(9, 3.5), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1, 2))
        left.barh(PARTS[::-1], [getattr(self, part) / 2**30 for part in PARTS[::-1]])
        left.set(xlabel="GiB", title=f"peak {readable_bytes(self.total)}")
        right.bar(range(len(self.modules)), [size / 2**20 for size in self.modules.values()])
        right.set(xlabel="module, in the order of the forward pass", ylabel="MiB", title="activations")
        return figure


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
    """The peak memory of one training step, without running it: nothing is computed or allocated.

    The step is forward, backward and optimizer, gradients set to None before it, in a run that is under way (the
    optimizer has its state). What kernels use inside is not seen. The model stays as it is.

    Args:
        model: any model, patched by keepgrad, checkpointed or frozen in part; on the meta device it counts as on
            the CPU.
        batch: the shape of the input, `(64, 3, 224, 224)`, or a batch: a tensor, or a tuple, list or dictionary
            of arguments for the model.
        optimizer: a name of `OPTIMIZERS`, or a function from parameters to an optimizer. Its state is taken to be
            proportional to the parameters, which it is not for factored ones such as Adafactor.
        amp: "bf16" or "fp16" for autocast around the forward pass, by CUDA's rules wherever the model is.
        loss: from the model's output to the loss; by default the mean of the output, or its `loss` if it has one.
        train_step: forward and backward, as `train_step(model, batch)`, in place of the two.
        processes: how many devices train together; the report is of one of them, and `batch` is what it is given.
            With DDP, the buckets count as gradients.
        fsdp: shards by FSDP2, block by block, in place of DDP. What is gathered for a while counts as temporary
            (`keepgrad.sharding`).

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
    state = _optimizer_bytes(model, optimizer, size_of or (lambda parameter: parameter.nbytes))
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
    report = _report(ledger, optimizer=state)
    if fsdp:
        return replace(report, temporary=report.temporary + gathered_bytes(model))
    return replace(report, gradients=report.gradients + (bucket_bytes(model) if processes > 1 else 0))


def measure(step: Callable[[], object], *, model: nn.Module | None = None) -> MemoryReport:
    """Run `step`, a training step, and report its peak memory.

    On the CPU the peak is that of torch's allocator during the step, on top of the tensors from before that the step
    uses; where the step uses a GPU, it is the peak of the CUDA allocator.

    Args:
        step: a function of no arguments; it runs once.
        model: gives the names for the report by module.
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
        return _report(ledger, total=torch.cuda.max_memory_allocated())
    return _report(ledger, allocated=_allocator_peak(found))


def saved_bytes(forward: Callable[[], object], model: nn.Module) -> int:
    """The bytes saved for backward while `forward` runs: each storage once, parameters and buffers excluded."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    storages: dict[int, int] = {}
    held: list[object] = []  # keeps every storage alive, so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)
        return tensor

    observers.append(pack)
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            held.append(forward())
    finally:
        observers.remove(pack)
    return sum(storages.values())


def peak_bytes(step: Callable[[], object]) -> int:
    """The most bytes that tensors made during `step` occupy at one time, on any device; what kernels use inside is
    not seen."""
    with Ledger(None) as ledger:
        step()
    return ledger.peak([record for record in ledger.records if record.born])[0]


def allocated_peak(step: Callable[[], object]) -> int:
    """The most bytes that torch's allocator for the CPU hands out at one time during `step`, compiled code included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as found:
        step()
    return _allocator_peak(found)


@contextmanager
def in_training(model: nn.Module) -> Iterator[None]:
    """The model in training mode. One that is in evaluation gets its modes back at the end."""
    if model.training:
        yield
        return
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _report(ledger: Ledger, optimizer: int = 0, total: int | None = None, allocated: int | None = None) -> MemoryReport:
    """The parts at the peak.

    `optimizer` is the state of an optimizer that was not run. `total` is the peak, or `allocated` what the step had
    allocated then, by the allocator's own account.
    """
    alive = ledger.at_peak()
    parts = dict.fromkeys(PARTS, 0)
    modules: dict[str, int] = {}
    for record in alive:
        parts[record.kind] += record.size
        if record.kind == "activations":
            modules[record.module] = modules.get(record.module, 0) + record.size
    parts["optimizer"] += optimizer
    if allocated is not None:
        total = allocated + sum(record.size for record in alive if record.born == 0)
    if total is not None:
        parts["temporary"] = max(0, total - sum(size for part, size in parts.items() if part != "temporary"))
    return MemoryReport(**parts, modules=modules)


@contextmanager
def _tensors_put_back(model: nn.Module) -> Iterator[None]:
    """Tensors that the model keeps for later when it runs, such as rotary positions for a size, are forgotten again."""

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
    """A whole training step as a module, so that torch.func.functional_call swaps the parameters in backward too,
    where checkpointed blocks run again."""

    def __init__(self, model: nn.Module, step: Callable[[nn.Module, Any], object]) -> None:
        super().__init__()
        self.model, self.step = model, step

    def forward(self, batch: Any) -> None:
        self.step(self.model, batch)


def _forward_backward(model: nn.Module, batch: Any, loss: Callable[[Any], Tensor] | None, amp: str | None) -> None:
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    device = leaves[0].device.type if leaves else "cpu"
    with _CudaRules(device):
        with torch.autocast(device, dtype=AMP[amp], enabled=amp is not None):
            out = call(model, batch)
            value = _default_loss(out) if loss is None else loss(out)
        backward(value)


def call(model: Callable[..., Any], inputs: Any) -> Any:
    """The model's output for a tensor, for a tuple or list of arguments, or for a dictionary of them."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


class _CudaRules(TorchFunctionMode):
    """Autocast on another device with those operations in float32 that CUDA does in float32."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in FLOAT32_ON_CUDA and torch.is_autocast_enabled(self.device):
            args, kwargs = tree_map_only(Tensor, _widened, (args, kwargs))
        return func(*args, **kwargs)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


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
    """A fake twin of a tensor, in the fake mode that is on."""
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


def _optimizer_bytes(
    model: nn.Module, optimizer: str | Callable[..., torch.optim.Optimizer], size_of: Callable[[Tensor], int]
) -> int:
    """The bytes of the optimizer's state for the model, found by a step of it on small parameters.

    `size_of` has the bytes of a parameter that the optimizer works on.
    """
    make = OPTIMIZERS.get(optimizer, optimizer) if isinstance(optimizer, str) else optimizer
    if make is not None and not callable(make):
        raise ConfigError(
            f"optimizer={make!r} is not known; use one of {', '.join(OPTIMIZERS)}, or a function from parameters "
            "to an optimizer, e.g. lambda params: torch.optim.AdamW(params, amsgrad=True)"
        )
    if make is None:
        return 0
    per_element: dict[torch.dtype, tuple[float, int]] = {}
    total = 0.0
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.dtype not in per_element:
            per_element[parameter.dtype] = _state_of(make, parameter.dtype)
        each, constant = per_element[parameter.dtype]
        total += size_of(parameter) / parameter.element_size() * each + constant
    return int(total)


def _state_of(make: Callable[..., torch.optim.Optimizer], dtype: torch.dtype) -> tuple[float, int]:
    """Bytes of state for each element of a parameter, and for each parameter besides."""
    probe = nn.Parameter(torch.zeros(64, 64, dtype=dtype))
    probe.grad = torch.ones_like(probe)
    made = make([probe])
    made.step()
    states = [leaf for leaf in tree_leaves(dict(made.state.get(probe, {}))) if isinstance(leaf, Tensor)]
    each = sum(leaf.nbytes for leaf in states if leaf.dim()) / probe.numel()
    return each, sum(leaf.nbytes for leaf in states if not leaf.dim())


def _allocator_peak(found: profile) -> int:
    """The most bytes that the step had allocated at one time on the CPU, by the profiler's trace."""
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
