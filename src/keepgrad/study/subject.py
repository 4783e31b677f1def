"""The model, weights and images of a study. Settings are measured one at a time, always from the same weights."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..adapters import find_blocks
from ..data.images import some_of
from ..data.order import Batches, mixed_seed
from ..errors import ConfigError, DivergedError, InputError
from ..fidelity import cost, fidelity
from ..memory import saved_bytes
from ..patch import apply, exact, masks_drawn, plan, remove
from ..sampling import IMAGE_MASKS, Layout
from ..timing import seconds_in_turns
from ..train.classify import Batch, Classification, evaluate
from ..train.loop import accelerator_for
from ..train.loop.state import read_weights, write_weights
from .config import StudyConfig
from .results import Measured, Trained

__all__ = ["Subject", "described"]

EVALUATED = 2000  # maximum number of images that a short training is evaluated on


def described(config: StudyConfig) -> StudyConfig:
    """If no model is given, add the model that is named in the checkpoint, which `train` wrote."""
    if config.model is not None or config.checkpoint is None:
        return config
    about = read_weights(Path(config.checkpoint))[1] if config.checkpoint.endswith(".safetensors") else {}
    if "model_kwargs" not in about:
        raise ConfigError(f"{config.checkpoint} does not say what model it is for; name the model as well")
    found = {
        "model": about["model"],
        "model_kwargs": {**about["model_kwargs"], **(config.model_kwargs or {})},
        "size": config.size or about["size"],
        "crop_pct": config.crop_pct or about["data_config"].get("crop_pct"),
    }
    return dataclasses.replace(config, **found)


class Subject:
    """A timm model and the images to study it on.

    Raises:
        NoSiteError: if the model has no block that keepgrad knows.
        InputError: if there are fewer images than a study needs.
    """

    def __init__(self, config: StudyConfig) -> None:
        from timm.data import create_transform

        self.config = config
        training = config.training()
        self.accelerator = accelerator_for(training)
        if self.accelerator.num_processes > 1:
            raise ConfigError("a study runs in one process; start it without torchrun")
        self.task = Classification(training, self.accelerator)
        self.model = self.task.model.to(self.accelerator.device)
        wanted = config.batch_size * config.batches
        if len(self.task.source) < wanted:
            raise InputError(
                f"the data has {len(self.task.source)} training images, but {config.batches} batches of "
                f"{config.batch_size} need {wanted}; lower batch_size or batches"
            )
        # Images are prepared as in evaluation, without augmentation: the gradients of the same batch are compared.
        self.task.transform = create_transform(**self.task.data_config, is_training=False)
        sites = plan(self.model, keep_ratio=0.5).sites
        self.blocks = len({block.index for block in find_blocks(self.model)})
        self.has_attention = any(site.kind == "attention" for site in sites)
        self.batches = [batch for _, batch in zip(range(config.batches), self._stream(config.seed), strict=False)]
        self.full = cost(self.model, *self.batches[0], F.cross_entropy)

    def about(self) -> dict[str, Any]:
        """Settings that identify a study: two studies with different values here must not share results."""
        what = ("model", "model_kwargs", "size", "crop_pct", "data", "val")
        how = ("batch_size", "batches", "draws", "prepare", "lr", "seed")
        about = {name: getattr(self.config, name) for name in what + how}
        about["images"] = len(self.task.source)
        about["weights"] = hashlib.sha256(b"".join(map(_bytes, self.model.state_dict().values()))).hexdigest()[:16]
        return about

    def prepare(self, path: Path, advance: Callable[[int], None]) -> None:
        """Load the weights to study from a file. If it does not exist, train with full backprop first and write it."""
        if path.exists():
            self.model.load_state_dict(read_weights(path)[0])
            advance(self.config.prepare)
            return
        self._steps(self.model, self.config.prepare, self.config.seed, advance)
        write_weights(path, self.model.state_dict(), self.task.about())

    def saved(self, options: Mapping[str, Any]) -> int:
        """The bytes that a setting saves for backward with a batch of one image."""
        image = self.batches[0][0][:1]
        apply(self.model, **options)
        try:
            self.model.train()
            return saved_bytes(lambda: self.model(image), self.model)
        finally:
            remove(self.model)

    def measure(self, options: Mapping[str, Any]) -> Measured:
        """Measure the agreement with exact gradients, and the memory, FLOPs and time of a step.

        Raises:
            MapTooSmallError: if the feature maps are too small for the mask: smaller than one of its groups.
        """
        torch.manual_seed(self.config.seed)
        apply(self.model, **options)
        try:
            report = fidelity(self.model, self.batches, F.cross_entropy, self.config.draws)
            size, flops = cost(self.model, *self.batches[0], F.cross_entropy)
            time = self._time()
        finally:
            remove(self.model)
        whole = report.whole
        return Measured(
            *(whole.cosine, whole.norm_ratio, whole.bias, whole.spread, whole.adam),
            bytes=size / self.full[0],
            flops=flops / self.full[1],
            time=time,
            layers=[(one.name, _or_none(one.cosine), _or_none(one.norm_ratio)) for one in report.layers],
        )

    def _time(self) -> float:
        """The time of a step of the patched model, divided by that of full backprop."""

        def kept() -> None:
            images, labels = self.batches[0]
            F.cross_entropy(self.model(images), labels).backward()

        def full() -> None:
            with exact(self.model):
                kept()

        self.model.train()
        seconds = seconds_in_turns({"full": full, "kept": kept}, self.config.rounds)
        self.model.zero_grad()
        return seconds["kept"] / seconds["full"]

    def train(self, options: Mapping[str, Any] | None, seed: int, advance: Callable[[int], None]) -> Trained:
        """Run a short training from the studied weights. With `options=None`, it uses full backprop."""
        model = copy.deepcopy(self.model)
        if options is not None:
            apply(model, **options)
        losses = self._steps(model, self.config.train, seed, advance)
        chosen = torch.randperm(len(self.task.val), generator=torch.Generator().manual_seed(0))[:EVALUATED]
        val, config = some_of(self.task.val, chosen.tolist()), self.config
        model.eval()
        found = evaluate(model, val, self.task.data_config, config.batch_size, config.workers, self.accelerator)
        return Trained(statistics.mean(losses[-max(1, len(losses) // 10) :]), found.top1, config.train)

    def _steps(self, model: nn.Module, steps: int, seed: int, advance: Callable[[int], None]) -> list[float]:
        """Train a model in place with AdamW, a warm-up and a cosine schedule. Returns the losses."""
        optimizer = torch.optim.AdamW(model.parameters(), self.config.lr, weight_decay=0.05)
        warm_up = max(1, steps // 10)

        def share(step: int) -> float:
            along = max(0, step - warm_up) / max(1, steps - warm_up)
            return min((step + 1) / warm_up, 0.5 * (1 + math.cos(math.pi * along)))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
        model.train()
        losses = []
        for number, (images, labels) in zip(range(steps), self._stream(seed), strict=False):
            torch.manual_seed(mixed_seed(seed, number))
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            losses.append(loss.item())
            if not math.isfinite(losses[-1]):
                raise DivergedError(f"the loss is {losses[-1]} at step {number}; lower --lr")
            optimizer.step()
            schedule.step()
            advance(1)
        optimizer.zero_grad()
        return losses

    def _stream(self, seed: int) -> Iterator[Batch]:
        """Yield training batches without end."""
        task = self.task
        task.order = Batches(len(task.source), self.config.batch_size, seed, True)
        epoch = 0
        while True:
            yield from task.batches(epoch, 0)
            epoch += 1

    def masks(self, ratio: float) -> tuple[Tensor, dict[str, tuple[Layout, Tensor]]]:
        """An image with its original colours, and a feature map and its kept positions for each kind of mask."""
        image = self.batches[0][0][:1]
        found = {}
        for mask in IMAGE_MASKS:
            torch.manual_seed(self.config.seed)
            # Attention is off: window attention has masks for one window, not for the whole image.
            apply(self.model, keep_ratio=ratio, mask=mask, reduce="drop", attention="off")
            try:
                self.model.train()
                self.model(image)
                drawn = masks_drawn(self.model)
            finally:
                remove(self.model)
            large = {layout: kept for layout, kept in drawn.items() if math.prod(layout.shape) >= 16} or drawn
            coarsest = min(large, key=lambda layout: math.prod(layout.shape))
            found[mask] = coarsest, drawn[coarsest].cpu()
        data = self.task.data_config
        mean, std = (torch.tensor(data[name]).view(-1, 1, 1) for name in ("mean", "std"))
        return (image[0].cpu() * std + mean).clamp(0, 1), found


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value
