"""keepgrad as a callback of transformers' Trainer: `Trainer(..., callbacks=[KeepgradCallback(preset="accurate")])`.

Trainer tells its callbacks of the end of a training, but not of an error, and does not hand itself to them. So a
callback that is given to Trainer's constructor looks up who is being constructed, and puts the model back when that
Trainer's `train` raises. One that is added later, by `add_callback`, is used as a context:

    with KeepgradCallback(preset="accurate") as callback:
        trainer.add_callback(callback)
        trainer.train()
"""

from __future__ import annotations

import functools
import inspect
import weakref
from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..config import KeepConfig
from ..errors import ConfigError
from .training import Training

__all__ = ["KeepgradCallback"]


class KeepgradCallback(TrainerCallback):
    """Trains with kept gradients: applies at the start of a training and removes at its end, or when it fails.

    The plan and the saved bytes are logged by the logger "keepgrad"; figures are also in `trainer.state.log_history`.

    Args:
        config: a KeepConfig; or give its fields as keywords, as for `keepgrad.apply`.
        exact_last: the share of the steps, at the end, that have exact gradients, under checkpointing; 0.1 for the
            last tenth.
        cosine_every: measure the cosine with the exact gradient every so many steps; 0 for never. Such a step costs
            three.
        **options: the fields of KeepConfig.

    Raises:
        ConfigError: if a setting is wrong.
    """

    def __init__(
        self, config: KeepConfig | None = None, *, exact_last: float = 0.0, cosine_every: int = 0, **options: Any
    ) -> None:
        self.training = Training(config, exact_last=exact_last, cosine_every=cosine_every, **options)

    def __enter__(self) -> KeepgradCallback:
        return self

    def __exit__(self, *error: Any) -> None:
        self.training.end()

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        trainer = _trainer_at_work()
        if trainer is None:
            return
        own, alive = type(trainer).train, weakref.ref(trainer)  # a Trainer is not to hold itself alive

        @functools.wraps(own)
        def train(*args: Any, **kwargs: Any) -> Any:
            with self:
                return own(alive(), *args, **kwargs)  # type: ignore[arg-type]

        trainer.train = train  # type: ignore[method-assign]

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        trainer = _trainer_at_work()
        if trainer is not None and isinstance(trainer.model_wrapped, nn.DataParallel):
            raise ConfigError(
                f"with {args.n_gpu} GPUs in one process Trainer uses nn.DataParallel, which does not go with keepgrad; "
                "start with torchrun --nproc-per-node, or show it one GPU by CUDA_VISIBLE_DEVICES=0"
            )
        self.training.begin(kwargs["model"], state.is_world_process_zero)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.training.before_step(state.global_step, state.max_steps)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        figures = self.training.after_backward()
        if figures:
            state.log_history.append({**figures, "step": state.global_step})

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.training.end()


def _trainer_at_work() -> Trainer | None:
    """The Trainer that called the callback, found by looking up from here."""
    frame = inspect.currentframe()
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, Trainer):
            return found
        frame = frame.f_back
    return None
