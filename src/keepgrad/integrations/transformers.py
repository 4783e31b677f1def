"""keepgrad as a callback of transformers' Trainer: `Trainer(..., callbacks=[KeepgradCallback(preset="accurate")])`.

Trainer does not tell its callbacks of an error. A model whose training died stays patched, which changes neither
evaluation nor what is saved; the next training with a KeepgradCallback puts it back first, and so does
`keepgrad.remove(model)`.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..config import KeepConfig
from .training import Training

__all__ = ["KeepgradCallback"]


class KeepgradCallback(TrainerCallback):
    """Trains with kept gradients: applies at the start of a training and removes at its end.

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
        self.training = Training(config, options, exact_last, cosine_every)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
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
