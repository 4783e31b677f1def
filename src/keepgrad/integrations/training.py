"""What the callbacks for other libraries' training loops have in common.

To measure a step, hooks record the model's input and the gradients of its output; they are removed after that step.
With these two, the step can be repeated with exact gradients, without knowing the loss function.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import is_real, tree_leaves
from ..config import KeepConfig
from ..errors import CheckpointingError, ConfigError, InputError
from ..fidelity import fidelity
from ..memory import estimate
from ..methods import checkpointed
from ..patch import apply, exact, remove, set_step
from ..plan import Plan, config_from
from ..report import readable_bytes

__all__ = ["Training"]

log = logging.getLogger("keepgrad")

PATCHED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""The models that a callback has patched and not yet restored."""


class Training:
    """Applies keepgrad to one model while it is trained, from `begin` to `end`. `begin` may be called again.

    Args:
        config: a KeepConfig; or give its fields as keywords.
        exact_last: the share of the steps, at the end of training, that compute exact gradients, with checkpointing.
        cosine_every: how often, in steps, to measure the cosine with the exact gradient; 0 for never. A step that
            measures it costs as much as three.
        **options: the fields of KeepConfig.

    Raises:
        ConfigError: if a setting is wrong.
    """

    def __init__(
        self, config: KeepConfig | None = None, *, exact_last: float = 0.0, cosine_every: int = 0, **options: Any
    ) -> None:
        self.config = config_from(config, options)
        if isinstance(exact_last, bool) or not isinstance(exact_last, (int, float)) or not 0 <= exact_last <= 1:
            raise ConfigError(f"exact_last={exact_last!r}: give the share of the steps, between 0 and 1")
        if isinstance(cosine_every, bool) or not isinstance(cosine_every, int) or cosine_every < 0:
            raise ConfigError(f"cosine_every={cosine_every!r}: give a whole number of steps, or 0 for never")
        self.exact_last, self.cosine_every = exact_last, cosine_every
        self.model: nn.Module | None = None
        self.plan: Plan | None = None
        self.stack = ExitStack()
        self.step = -1
        self.is_exact = False
        self.bytes_known = False
        self.noted: _Noted | None = None

    def begin(self, model: nn.Module, speaks: bool) -> None:
        """Apply keepgrad to the model. With `speaks`, log the plan (True in one process only).

        If the model is still patched by an earlier training, for example one that failed, it is restored first.

        Raises:
            AlreadyAppliedError: if keepgrad was applied to the model by other means than a callback.
            ConfigError: if a setting does not fit the model.
            NoSiteError: if the model has no site.
        """
        self.end()
        if model in PATCHED:
            _put_back(model)
        plan = apply(model, self.config)
        PATCHED.add(model)
        self.model, self.plan, self.step, self.bytes_known = model, plan, -1, False
        if self.cosine_every and not plan.sites:
            self.end()
            raise ConfigError("cosine_every: no gradient is reduced in this model; leave the option out")
        if speaks:
            log.info("%s", plan)

    def before_step(self, step: int, steps: float) -> None:
        """Call this before step `step` of `steps`, or before each batch of that step."""
        model = self.model
        if model is None or step == self.step:
            return
        self.step = step
        if self.config.seed is not None:
            set_step(model, step)
        if not self.is_exact and step >= steps * (1 - self.exact_last):
            self._finish(model)
        due = bool(self.cosine_every) and step % self.cosine_every == 0
        if self.is_exact or not (due or not self.bytes_known):
            return
        if all(is_real(p) for p in model.parameters()):
            self.noted = _Noted(model, due)
        elif due:
            raise ConfigError("cosine_every: the parameters are sharded over processes; leave the option out")
        self.bytes_known |= self.noted is None

    def _finish(self, model: nn.Module) -> None:
        """Switch to exact gradients with checkpointing for the rest of the training."""
        self.stack.enter_context(exact(model))
        try:
            self.stack.enter_context(checkpointed(model))
        except CheckpointingError as error:
            log.warning("keepgrad: the last steps take the memory of full backprop: %s", error)
        self.is_exact = True
        log.info("keepgrad: exact gradients from step %d on", self.step)

    def after_backward(self) -> dict[str, float]:
        """Call this after the backward pass of a step and before the optimizer step. Returns the metrics to log."""
        noted, self.noted = self.noted, None
        if noted is None or self.model is None:
            return {}
        noted.close()
        found: dict[str, float] = {}
        if noted.inputs is None:
            if noted.wants_cosine:
                log.warning("keepgrad: the cosine cannot be measured where the whole model is compiled")
            self.bytes_known = True
            return found
        if not self.bytes_known:
            self.bytes_known = True
            found |= self._saved(noted)
        if noted.wants_cosine and noted.gradients:
            found["keepgrad/cosine"] = fidelity(self.model, (noted.inputs, None), noted.loss, draws=1).whole.cosine
            log.info("keepgrad: cosine with the exact gradient %.4f", found["keepgrad/cosine"])
        return found

    def _saved(self, noted: _Noted) -> dict[str, float]:
        """Estimate the bytes that such a step saves for backward, with and without keepgrad."""
        assert self.model is not None
        try:
            kept = estimate(self.model, noted.inputs, optimizer="none", amp=noted.amp).saved
            with exact(self.model):
                full = estimate(self.model, noted.inputs, optimizer="none", amp=noted.amp).saved
        except InputError as error:
            log.info("keepgrad: saved bytes are not known: %s", error)
            return {}
        log.info("keepgrad: saved for backward %s, full backprop %s", readable_bytes(kept), readable_bytes(full))
        return {"keepgrad/saved_bytes": kept, "keepgrad/saved_bytes_full": full}

    def end(self) -> None:
        """Restore the model. Does nothing if it is already restored."""
        if self.noted is not None:
            self.noted.close()
        self.stack.close()
        model, self.model, self.noted, self.is_exact = self.model, None, None, False
        if model is not None and model in PATCHED:
            _put_back(model)


def _put_back(model: nn.Module) -> None:
    PATCHED.discard(model)
    remove(model)


class _Noted:
    """Records the input of a model in one step, and the gradients of its outputs."""

    def __init__(self, model: nn.Module, wants_cosine: bool) -> None:
        self.model, self.wants_cosine = model, wants_cosine
        self.inputs: Any = None
        self.amp: str | None = None
        self.gradients: dict[int, Tensor] = {}
        self.handles = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after),
        ]

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        names = inspect.signature(module.forward).parameters
        self.inputs = {**dict(zip(names, args, strict=False)), **kwargs} if kwargs else args
        self.gradients = {}
        device = next(module.parameters()).device.type
        if torch.is_autocast_enabled(device):
            self.amp = {torch.bfloat16: "bf16", torch.float16: "fp16"}[torch.get_autocast_dtype(device)]

    def _after(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if self.inputs is None or not self.wants_cosine or not torch.is_grad_enabled():
            return
        for number, leaf in enumerate(_returned(out)):
            leaf.register_hook(lambda grad, number=number: self.gradients.__setitem__(number, grad.detach()))

    def loss(self, out: Any, _: None) -> Tensor:
        """A stand-in for the loss: its gradients with respect to the model's outputs are the recorded ones."""
        leaves = _returned(out)
        return sum((leaves[number] * grad).sum() for number, grad in self.gradients.items())  # type: ignore[return-value]


def _returned(out: Any) -> list[Tensor]:
    """The output tensors through which gradients flow: the model's own loss if it returns one, otherwise all."""
    own = getattr(out, "loss", None)
    if isinstance(own, Tensor) and own.requires_grad:
        return [own]
    return [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.requires_grad]
