"""keepgrad as a Lightning callback: `Trainer(callbacks=[KeepgradCallback(preset="accurate")])`."""

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
    """Applies keepgrad to the model in `setup`, and removes it in `teardown` or when training fails.

    If the model is built in `configure_model`, keepgrad is applied after that. The plan and the saved bytes are logged
    by the logger "keepgrad". The Trainer's loggers get the metrics: saved bytes and cosines.

    Args:
        config: a KeepConfig; or give its fields as keywords, as for `keepgrad.apply`.
        module: the name of the module to patch inside the LightningModule, such as "encoder.trunk". By default, the
            attribute that holds the blocks keepgrad knows. `training_step` should call this module as a whole.
        exact_last: the share of the steps, at the end of training, that compute exact gradients, with checkpointing.
            0.1 is the last tenth.
        cosine_every: how often, in steps, to measure the cosine with the exact gradient; 0 for never. A step that
            measures it costs as much as three.
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
