"""keepgrad as a callback for transformers' Trainer: `Trainer(..., callbacks=[KeepgradCallback(preset="accurate")])`.

Trainer tells its callbacks when training ends, but not when it fails, and it does not pass itself to them. So a
callback that is given to Trainer's constructor finds the Trainer on the call stack, and wraps its `train` to remove
keepgrad from the model if `train` raises. If you add the callback later, with `add_callback`, use it as a context:

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
    """Applies keepgrad to the model when training starts, and removes it when training ends or fails.

    The plan, the saved bytes and the cosines are logged by the logger "keepgrad". The saved bytes and the cosines are
    also in `trainer.state.log_history`.

    Args:
        config: a KeepConfig; or give its fields as keywords, as for `keepgrad.apply`.
        exact_last: the share of the steps, at the end of training, that compute exact gradients, with checkpointing.
            0.1 is the last tenth.
        cosine_every: how often, in steps, to measure the cosine with the exact gradient; 0 for never. A step that
            measures it costs as much as three.
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
        own, alive = type(trainer).train, weakref.ref(trainer)  # a weak reference, so that the Trainer can be freed

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
    """The Trainer that called the callback, found by walking up the call stack; None if there is none."""
    frame = inspect.currentframe()
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, Trainer):
            return found
        frame = frame.f_back
    return None
