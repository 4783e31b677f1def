"""The training loop, for any task.

A step computes the gradients of `accumulation` batches in each process, then updates the weights once. Between two
steps, a `State` describes the whole run. It is saved after every epoch, every `save_every` steps, on a signal, and when
data cannot be read. A run resumed from it continues as if it had never stopped.
"""

from __future__ import annotations

import dataclasses
import math
import signal
import time
from collections.abc import Generator, Mapping
from contextlib import ExitStack, closing
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from ...adapters import find_blocks
from ...data.order import mixed_seed
from ...errors import ConfigError, DivergedError, FileError, InputError, KeepgradError, StoppedError
from ...files import locked
from ...flags import write_yaml
from ...memory import AMP
from ...methods import checkpointed
from ...patch import apply
from ...plan import Plan
from ...report import brief
from ..config import RunFlags
from .record import Record, peak_memory
from .state import State, optimizer_state_of, restore, weights_of, write_weights
from .stop import memory_errors_named, noted_signals, together

R = TypeVar("R", bound=RunFlags)

READ_EVERY = 10
"""Steps between two readings of the losses from an accelerator: each reading makes the CPU wait for it."""
STEPS_AT = (2 / 3, 11 / 12)  # where `sched=steps` lowers the rate: after epochs 8 and 11 of 12

__all__ = ["Outcome", "Task", "Trainer", "accelerator_for", "fitted"]


class Task(Protocol):
    """A model and the data it is trained on: what the loop needs to know of them."""

    model: nn.Module
    goal: str
    """Name of the metric that decides which epoch was best; higher is better."""
    shown: tuple[str, ...]
    """Names of the metrics to print and plot."""

    def batches_per_epoch(self) -> int:
        """The number of batches per epoch in this process."""

    def batches(self, epoch: int, start: int) -> Generator[Any]:
        """Yield the batches of an epoch, starting with batch number `start`."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean loss of a batch."""

    def sample(self) -> Any:
        """A batch for measuring the time and memory of a step."""

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Evaluate a model that is in evaluation mode. All processes get the same metrics."""

    def about(self) -> dict[str, Any]:
        """A description of the model, enough to build it again for its weights."""

    def write(self, output: Path) -> None:
        """Write files about the last evaluation, if the task has any. Called in the first process only."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a run."""

    output: Path
    history: list[dict[str, float]]
    best: dict[str, float]
    plan: Plan | None
    model: nn.Module
    """The model with the weights of the last step. It is not wrapped (e.g. in DDP), but still patched by keepgrad."""


def accelerator_for(config: RunFlags) -> Any:
    """Create the `Accelerator` of accelerate, which knows the processes and devices of this run."""
    try:
        from accelerate import Accelerator
    except ImportError:
        raise KeepgradError("training needs more packages: pip install 'keepgrad[train]'") from None

    if config.fsdp and config.amp == "fp16":
        raise ConfigError("fsdp with fp16 would need a scaler of its own; use amp bf16")
    # keepgrad's own settings decide precision, compiler and sharding, not the file that `accelerate config` writes.
    accelerator = Accelerator(cpu=config.cpu, mixed_precision="no", dynamo_backend="no")
    kind = accelerator.distributed_type.value
    if kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        raise ConfigError(f"accelerate is set up for {kind}; run 'accelerate config' without it, and use --fsdp here")
    if config.fsdp and accelerator.num_processes == 1:
        raise ConfigError(
            "fsdp shards over processes, and there is one; start with torchrun --nproc-per-node N, or give --no-fsdp"
        )
    if config.amp == "fp16" and accelerator.device.type == "cpu":
        raise ConfigError("fp16 is for accelerators; use amp bf16 on the CPU")
    return accelerator


def fitted(config: R, accelerator: Any) -> R:
    """Adapt the batch size of a resumed run to the number of processes, so that a step has as many samples as before.

    Raises:
        ConfigError: if these samples cannot be divided equally among the processes.
    """
    path = Path(config.output or "") / "state.pt"
    samples = State.read(path, mapped=True).samples if config.resume and path.exists() else None
    processes = accelerator.num_processes
    given = config.batch_size * config.accumulate * processes if config.global_batch is None else None
    if samples is None or samples == given:
        return config
    split = config.split(samples, processes)
    if split != config and accelerator.is_main_process:
        parts = f"{processes} processes x batch_size={split.batch_size} x {split.accumulation(processes)} batches"
        print(f"steps of {samples} samples, as before: {parts}")
    return split


class Trainer:
    """A training run: its model and optimizer, ready to start, or to resume from a saved state.

    Raises:
        ConfigError: if settings contradict each other, or the run to be resumed.
        FileError: if the output folder already has a run and `resume` is off, or the run there cannot be resumed.
        InputError: if there is less data than one step needs.
    """

    def __init__(self, task: Task, config: RunFlags, accelerator: Any) -> None:
        from timm.optim import create_optimizer_v2
        from timm.utils import ModelEmaV3

        self.task, self.config, self.accelerator = task, config, accelerator
        self.output = Path(config.output or datetime.now().strftime("runs/%Y%m%d-%H%M%S"))
        self.is_main = accelerator.is_main_process
        self.accumulation = config.accumulation(accelerator.num_processes)
        self.steps_per_epoch = task.batches_per_epoch() // self.accumulation
        if not self.steps_per_epoch:
            raise InputError(
                f"the data is less than one step of {accelerator.num_processes} processes x batch_size="
                f"{config.batch_size} x {self.accumulation} batches; lower batch_size or the accumulation"
            )
        self.steps = self.steps_per_epoch * config.epochs

        model = task.model
        self.plan = None if config.full else apply(model, config.keep_config())
        self.stack = ExitStack()
        if config.checkpointing:
            self.stack.enter_context(checkpointed(model))
        model.to(accelerator.device)
        if config.channels_last:
            model.to(memory_format=torch.channels_last)
        self.ema = None if config.ema is None else ModelEmaV3(model, decay=config.ema, use_warmup=True)
        self.bare = model
        if config.compile:
            model.compile()
        self.model = self._distributed(model)
        try:
            # After `_distributed`, because sharding creates new parameters.
            self.optimizer = create_optimizer_v2(
                model, config.opt, config.lr, config.weight_decay, layer_decay=config.layer_decay
            )
        except (AssertionError, ValueError, TypeError, RuntimeError) as error:
            raise ConfigError(f"opt={config.opt!r} cannot be made: {error}; see timm.optim.list_optimizers()") from None
        self.scheduler = self._schedule()
        self.scaler = torch.amp.GradScaler(accelerator.device.type, enabled=config.amp == "fp16")
        self.moved = False  # whether there was a step since the state was last written
        self.losses: list[torch.Tensor] = []  # of the steps whose losses were not read yet
        self.read_every = 1 if accelerator.device.type == "cpu" else READ_EVERY
        self.state = self._begin()

    def _schedule(self) -> Any:
        """Create the learning rate schedule: a warm-up, then a cosine or two drops."""
        from timm.scheduler import CosineLRScheduler, MultiStepLRScheduler

        config = self.config
        warmup = round(min(config.warmup_epochs, config.epochs / 2) * self.steps_per_epoch)
        common: dict[str, Any] = {"warmup_t": warmup, "warmup_lr_init": min(1e-6, config.lr), "t_in_epochs": False}
        if config.sched == "steps":
            # timm looks one step ahead.
            at = [round(self.steps * share) + 1 for share in STEPS_AT]
            return MultiStepLRScheduler(self.optimizer, at, 0.1, warmup_prefix=False, **common)
        lowest = min(config.min_lr, config.lr)
        return CosineLRScheduler(self.optimizer, self.steps - warmup, lowest, warmup_prefix=True, **common)

    def _distributed(self, model: nn.Module) -> nn.Module:
        """Shard the model (FSDP2) or wrap it in DDP. With one process, return it unchanged."""
        if self.config.fsdp:
            # Use torch directly: accelerate shards on accelerators only.
            from torch.distributed.fsdp import fully_shard

            for block in find_blocks(model):
                fully_shard(block.module)
            fully_shard(model)
            return model
        if self.accelerator.num_processes > 1:
            return self.accelerator.prepare_model(model)
        return model

    def _begin(self) -> State:
        """The state to start from: the one in the output folder if there is one, else a new one."""
        with together():
            if self.is_main:
                self.stack.enter_context(locked(self.output))
        path = self.output / "state.pt"
        about = {**self.task.about(), "steps_per_epoch": self.steps_per_epoch}
        about |= {"seed": self.config.seed, "opt": self.config.opt}
        if path.exists() and not self.config.resume:
            raise FileError(f"{self.output} has a run already; give --resume to continue it, or another --output")
        if not path.exists():
            self._write_config()
            return State(about=about, samples=self._samples())
        state = State.read(path)
        for name, value in about.items():
            if state.about.get(name) != value:
                raise ConfigError(
                    f"{path} has {name}={brief(state.about.get(name))}, and this run has {brief(value)}; "
                    "continue with the settings it was begun with, or choose another --output"
                )
        self._write_config()
        restore(self.bare, self.optimizer, state)
        for group in self.optimizer.param_groups:  # the state has the old value
            group["weight_decay"] = self.config.weight_decay if group["weight_decay"] else 0.0
        if state.scaler:
            self.scaler.load_state_dict(state.scaler)
        if self.ema is not None:
            if state.ema is None:
                raise ConfigError(f"{path} has no moving average; leave out --ema, or choose another --output")
            self.ema.module.load_state_dict(state.ema)
        state.model, state.optimizer, state.ema = {}, {}, None
        state.samples = self._samples()
        return state

    def _write_config(self) -> None:
        with together():
            if self.is_main:
                write_yaml(self.output / "config.yaml", self.config)

    def run(self, title: str = "training") -> Outcome:
        """Train to the end.

        Raises:
            StoppedError: after a signal; the state is written.
            StoppedElsewhereError: if another process stopped; the state is written.
            DivergedError: if the loss is NaN or infinite.
            InputError: if data cannot be read; the state is written first.
            KeepgradError: if a loader process died; the state is written first.
            FileError: if a file cannot be written; the last saved state is still there.
        """
        state = self.state
        with together():
            record = Record(self.output, self.is_main, title, self.task.shown, self.steps, state.step)
        with record, self.stack, noted_signals() as signals:
            if state.step:
                record.print(f"continuing {self.output} after step {state.step} of {self.steps}")
            while state.step < self.steps or self._waits_for_evaluation():
                if not self._waits_for_evaluation():
                    self._train_epoch(record, signals)
                try:
                    with together():
                        self._heed(signals)
                    self._end_epoch()
                except KeepgradError:
                    self._save_moved()
                    raise
                with together():
                    record.epoch(state.history)
                self.save()
        return Outcome(self.output, state.history, self._best(), self.plan, self.bare)

    def _waits_for_evaluation(self) -> bool:
        """True if all steps of an epoch are done, but its evaluation is not."""
        return bool(self.state.running) and self.state.step % self.steps_per_epoch == 0

    def _train_epoch(self, record: Record, signals: list[int]) -> None:
        """Run the remaining steps of the current epoch."""
        state = self.state
        epoch, done = divmod(state.step, self.steps_per_epoch)
        self.model.train()
        with closing(self.task.batches(epoch, done * self.accumulation)) as batches:
            for number in range(done, self.steps_per_epoch):
                began = time.perf_counter()
                self._step(self._group(batches, signals))
                is_last = number + 1 == self.steps_per_epoch
                loss = self._read_losses() if is_last or len(self.losses) >= self.read_every else None
                state.running["seconds"] = state.running.get("seconds", 0.0) + time.perf_counter() - began
                if loss is not None:
                    rate = (number + 1) * self._samples() / state.running["seconds"]
                    record.step(state.step, loss, rate, self.accelerator.device)
                if is_last:
                    return  # the state is saved after the evaluation
                if self.config.save_every and state.step % self.config.save_every == 0:
                    self.save()

    def _group(self, batches: Generator[Any], signals: list[int]) -> list[Any]:
        """Get the batches of the next step. If a process cannot load them or got a signal, all save and stop."""
        try:
            with together():
                self._heed(signals)
                return [next(batches) for _ in range(self.accumulation)]
        except KeepgradError:
            self._save_moved()
            raise

    def _heed(self, signals: list[int]) -> None:
        if signals:
            name = signal.Signals(signals[0]).name
            raise StoppedError(
                f"{name} after step {self.state.step} of {self.steps}; --resume --output {self.output} continues"
            )

    def _samples(self) -> int:
        """Samples per step, over all processes."""
        return self.config.batch_size * self.accumulation * self.accelerator.num_processes

    def _save_moved(self) -> None:
        """Save the state if there was a step since it was last saved."""
        if self.moved:
            self.save()

    def _step(self, group: list[Any]) -> None:
        """Run one step on a group of batches. Its loss stays on the device until `_read_losses` reads it."""
        from accelerate.utils import set_seed

        state, config = self.state, self.config
        self.scheduler.step_update(state.step)
        self.optimizer.zero_grad()
        total = torch.zeros((), device=self.accelerator.device)
        for number, batch in enumerate(group):
            set_seed(mixed_seed(config.seed, state.step, number, self.accelerator.process_index))
            last = number + 1 == len(group)
            with self._synced(last), memory_errors_named():
                with self._autocast():
                    loss = self.task.loss(self.model, batch) / len(group)
                self.scaler.scale(loss).backward()
            total += loss.detach()
        self.losses.append(total)
        if config.clip_grad is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), config.clip_grad)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        state.step += 1
        self.moved = True
        if self.ema is not None:
            self.ema.update(self.bare, step=state.step)

    def _read_losses(self) -> float | None:
        """Read the losses of the latest steps, and add them to the sum of the epoch. Returns the last one.

        Raises:
            DivergedError: if one of them is NaN or infinite.
        """
        if not self.losses:
            return None
        values = self.accelerator.reduce(torch.stack(self.losses), "mean").tolist()
        first = self.state.step - len(values)
        self.losses.clear()
        for step, value in enumerate(values, first):
            if not math.isfinite(value):
                raise DivergedError(
                    f"the loss is {value} at step {step}, in epoch {step // self.steps_per_epoch + 1}; what was "
                    f"saved before it is in {self.output}. Lower the learning rate or clip gradients, and --resume"
                )
            self.state.running["loss"] = self.state.running.get("loss", 0.0) + value
        return values[-1]

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.accelerator.device.type, AMP[self.config.amp], enabled=self.config.amp is not None)

    def _synced(self, last: bool) -> Any:
        """A context in which DDP exchanges gradients only for the last batch of a step."""
        if last or self.config.fsdp or self.accelerator.num_processes == 1:
            return ExitStack()
        return self.accelerator.no_sync(self.model)

    def _end_epoch(self) -> None:
        """Evaluate, and add a row with the metrics of the epoch to the history."""
        state, device = self.state, self.accelerator.device
        evaluated = self.model if self.ema is None else self.ema.module
        evaluated.eval()
        with torch.no_grad(), self._autocast():
            metrics = self.task.evaluate(evaluated)
        row: dict[str, float] = {"epoch": state.step // self.steps_per_epoch, "step": state.step}
        row |= {"lr": max(self._rates()), "train_loss": state.running["loss"] / self.steps_per_epoch, **metrics}
        row |= {"seconds": state.running["seconds"], "memory": peak_memory(device)}
        # Write files before changing the state: if a file cannot be written, the resumed run evaluates again.
        with together():
            if self.is_main:
                self.task.write(self.output)
        if all(row[self.task.goal] > other[self.task.goal] for other in state.history):
            weights = weights_of(self.bare)
            with together():
                self._write_weights("best", weights)
        state.history.append(row)
        state.running.clear()

    def _rates(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def _best(self) -> dict[str, float]:
        return max(self.state.history, key=lambda row: row[self.task.goal])

    def _write_weights(self, name: str, weights: Mapping[str, Any]) -> None:
        """Write a weight file: the moving average (EMA) if there is one, else `weights`."""
        if self.is_main:
            own = weights if self.ema is None else self.ema.module.state_dict()
            write_weights(self.output / f"{name}.safetensors", own, self.task.about())

    def save(self) -> None:
        """Write the state, and the weights as `last.safetensors`. All processes must call this.

        Raises:
            FileError: if they cannot be written; the previous state file is unchanged.
            DivergedError: if a loss or a weight is NaN or infinite; the previous state file is unchanged.
        """
        self._read_losses()
        model, optimizer = weights_of(self.bare), optimizer_state_of(self.bare, self.optimizer)
        with together():
            if self.is_main:
                self._write_state(model, optimizer)
        self.moved = False

    def _write_state(self, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
        broken = next((name for name, t in model.items() if not bool(torch.isfinite(t).all())), None)
        if broken is not None:
            raise DivergedError(
                f"{broken} has values that are no finite numbers after step {self.state.step}; what was saved "
                f"before is in {self.output}. Lower the learning rate or clip gradients, and --resume"
            )
        self._write_weights("last", model)
        ema = None if self.ema is None else self.ema.module.state_dict()
        whole = dataclasses.replace(
            self.state, model=model, optimizer=optimizer, ema=ema, scaler=self.scaler.state_dict()
        )
        whole.write(self.output / "state.pt")
