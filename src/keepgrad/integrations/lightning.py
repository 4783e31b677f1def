"""keepgrad as a callback of Lightning: `Trainer(callbacks=[KeepgradCallback(preset="accurate")])`."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from ..adapters import find_blocks
from ..config import KeepConfig
from ..errors import ConfigError, NoSiteError
from .training import Training

__all__ = ["KeepgradCallback"]


class KeepgradCallback(Callback):
    """Trains with kept gradients: applies in `setup` and removes in `teardown`, or when training fails.

    A model that is made in `configure_model` is patched when that is done. The plan and the saved bytes are logged by
    the logger "keepgrad"; figures go to the loggers of the Trainer.

    Args:
        config: a KeepConfig; or give its fields as keywords, as for `keepgrad.apply`.
        module: which module of the LightningModule to patch, "encoder.trunk"; by default the attribute that has
            the blocks keepgrad knows. It should be one that is called as a whole in `training_step`.
        exact_last: the share of the steps, at the end, that have exact gradients, under checkpointing; 0.1 for the
            last tenth.
        cosine_every: measure the cosine with the exact gradient every so many steps; 0 for never. Such a step costs
            three.
        **options: the fields of KeepConfig.

    Raises:
        ConfigError: if a setting is wrong.
    """

    def __init__(
        self,
        config: KeepConfig | None = None,
        *,
        module: str | None = None,
        exact_last: float = 0.0,
        cosine_every: int = 0,
        **options: Any,
    ) -> None:
        self.module = module
        self.training = Training(config, exact_last=exact_last, cosine_every=cosine_every, **options)
        self.steps = float("inf")

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        try:
            self._begin(trainer, pl_module)
        except (ConfigError, NoSiteError):
            if type(pl_module).configure_model is LightningModule.configure_model:
                raise

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.training.model is None:
            self._begin(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.steps = trainer.estimated_stepping_batches
        if self.training.exact_last and self.steps == float("inf"):
            raise ConfigError("exact_last: this training has no end; give the Trainer max_steps or max_epochs")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.training.before_step(trainer.global_step, self.steps)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        figures = self.training.after_backward()
        for logger in trainer.loggers if figures else ():
            logger.log_metrics(figures, step=trainer.global_step)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.training.end()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.training.end()

    def _begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.training.begin(self._model(pl_module), trainer.is_global_zero)

    def _model(self, pl_module: LightningModule) -> nn.Module:
        if self.module is not None:
            try:
                return pl_module.get_submodule(self.module)
            except AttributeError as error:
                raise ConfigError(f"module={self.module!r}: {error}") from None
        names = {block.name.partition(".")[0] for block in find_blocks(pl_module, self.training.config.modules)}
        names = names or {name for name, child in pl_module.named_children() if any(child.parameters())}
        if len(names) != 1:
            known = ", ".join(sorted(names)) or "none"
            raise ConfigError(f"which module of {type(pl_module).__name__} is to be patched? Give module=, of: {known}")
        return pl_module.get_submodule(names.pop())
