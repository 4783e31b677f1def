"""Every family in every loop: the table of docs/works-with.md.

    python benchmarks/works_with.py [--only FAMILY ...] [--loops LOOP ...]

Models are the small ones of the tests. A cell is found out: the loop trains the plain model and one with keepgrad at
ratio 1, and what comes out (gradients, or weights after a step; outputs in evaluation) must be the same. "plain fails"
is where the loop does not run without keepgrad either.
"""

from __future__ import annotations

import argparse
import copy
import logging
import platform
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch
import timm
import torch
import torchvision
import transformers
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from families import FAMILIES
from families.family import Family

import keepgrad
from keepgrad.adapters import find_blocks

OPTIONS = {"keep_ratio": 1.0}
Found = dict[str, Tensor]


class Task(nn.Module):
    """A family's model with the loss of the tests, for loops that want a loss."""

    def __init__(self, family: Family, model: nn.Module) -> None:
        super().__init__()
        self.family, self.net = family, model

    def forward(self, index: Tensor | None = None) -> dict[str, Tensor]:
        return {"loss": self.family.run(self.net).square().mean()}


def say(where: str, error: Exception) -> None:
    print(f"{where}: {type(error).__name__}: {str(error).strip().splitlines()[0]}", file=sys.stderr)


def gradients(family: Family, model: nn.Module, called: nn.Module | None = None) -> Found:
    family.run(model if called is None else called).float().square().mean().backward()
    whole = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in whole.items()}


def autocast(family: Family, model: nn.Module) -> Found:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return gradients(family, model)


def checkpointing(family: Family, model: nn.Module) -> Found:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    blocks = {id(block.module) for block in find_blocks(model) if not block.is_inner}
    apply_activation_checkpointing(model, check_fn=lambda module: id(module) in blocks)
    return {name.replace("_checkpoint_wrapped_module.", ""): g for name, g in gradients(family, model).items()}


def in_backward(family: Family, model: nn.Module) -> Found:
    def move(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(move)
    gradients(family, model)
    return dict(model.named_parameters())


def ddp(family: Family, model: nn.Module) -> Found:
    parallel = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    return gradients(family, model, parallel)


def fsdp2(family: Family, model: nn.Module) -> Found:
    from torch.distributed.fsdp import fully_shard

    for block in find_blocks(model):
        if not block.is_inner and block.outer is None:
            fully_shard(block.module)
    fully_shard(model)
    return gradients(family, model)


def compiled(family: Family, model: nn.Module) -> Found:
    """By the backend that takes seconds; where torch fails in that, by the one of torch.compile's default."""
    try:
        torch.compiler.reset()
        return gradients(family, model, torch.compile(model, backend="aot_eager"))
    except RuntimeError as error:
        say("torch.compile, aot_eager", error)
        torch.compiler.reset()
        model.zero_grad()
        return gradients(family, model, torch.compile(model))


def trainer(family: Family, model: nn.Module, *callbacks: Any) -> Found:
    with tempfile.TemporaryDirectory() as folder:
        quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "dataloader_pin_memory": False}
        args = transformers.TrainingArguments(folder, max_steps=1, optim="sgd", use_cpu=True, logging_steps=9, **quiet)
        one = transformers.Trainer(Task(family, model), args, train_dataset=[{"index": 0}], callbacks=list(callbacks))
        one.remove_callback(transformers.PrinterCallback)
        one.train()
    return dict(model.named_parameters())


def fit(family: Family, model: nn.Module, *callbacks: Any) -> Found:
    class Module(lightning.pytorch.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: Tensor, _: int) -> Tensor:
            return family.run(self.net).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    one = lightning.pytorch.Trainer(accelerator="cpu", max_steps=1, barebones=True, callbacks=list(callbacks))
    one.fit(Module(), torch.utils.data.DataLoader([0]))
    return dict(model.named_parameters())


def exported(family: Family, model: nn.Module) -> Found:
    given = family.inputs(torch.float32)
    args, kwargs = ((), given) if isinstance(given, dict) else ((given,), {})
    program = torch.export.export(model.eval(), args, kwargs).module()
    return {"out": family.output(program(*args, **kwargs))}


def traced(family: Family, model: nn.Module) -> Found:
    given = family.inputs(torch.float32)
    how: dict[str, Any] = {"example_kwarg_inputs": given} if isinstance(given, dict) else {"example_inputs": given}
    program = torch.jit.trace(model.eval(), strict=False, check_trace=False, **how)
    out = program(**given) if isinstance(given, dict) else program(given)
    return {"out": next(iter(out.values())) if isinstance(out, dict) else out[0] if isinstance(out, tuple) else out}


LOOPS: dict[str, Callable[..., Found]] = {
    "autocast": autocast,
    "checkpointing": checkpointing,
    "optimizer in backward": in_backward,
    "DDP": ddp,
    "FSDP2": fsdp2,
    "torch.compile": compiled,
    "Trainer": trainer,
    "Lightning": fit,
    "torch.export": exported,
    "torch.jit.trace": traced,
}


def callback_for(name: str) -> Any:
    if name == "Trainer":
        from keepgrad.integrations.transformers import KeepgradCallback

        return KeepgradCallback(**OPTIONS)
    from keepgrad.integrations.lightning import KeepgradCallback as ForLightning

    return ForLightning(**OPTIONS)


def cell(name: str, of: str) -> str:
    """What comes of a family in a loop."""
    family = FAMILIES[of]
    model = family.model()
    twin = copy.deepcopy(model)
    torch.manual_seed(0)
    try:
        wanted = LOOPS[name](family, twin)
    except Exception as error:
        say(f"{of}, {name}, plain", error)
        return "plain fails"
    torch.manual_seed(0)
    try:
        if name in ("Trainer", "Lightning"):
            found = LOOPS[name](family, model, callback_for(name))
        else:
            keepgrad.apply(model, **OPTIONS)
            found = LOOPS[name](family, model)
    except Exception as error:
        say(f"{of}, {name}", error)
        return f"no: {type(error).__name__}"
    a, b = (torch.cat([t.detach().double().flatten() for _, t in sorted(one.items())]) for one in (found, wanted))
    near = 0.999 if name == "autocast" else 0.999999
    same = found.keys() == wanted.keys() and float(torch.cosine_similarity(a, b, dim=0)) > near
    return "yes" if same else "no: differs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(FAMILIES), default=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--loops", nargs="+", choices=list(LOOPS), default=list(LOOPS), metavar="LOOP")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    packages = (torch, timm, torchvision, transformers, lightning)
    versions = ", ".join(f"{package.__name__} {package.__version__}" for package in packages)
    print(f"{versions}, Python {platform.python_version()}, {platform.machine()} CPU\n")
    for line in (("family", *args.loops), ("---",) * (len(args.loops) + 1)):
        print(f"| {' | '.join(line)} |")
    for name in args.only:
        print(f"| {' | '.join((name, *(cell(loop, name) for loop in args.loops)))} |", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
