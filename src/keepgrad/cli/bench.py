"""Measure a training step on this machine: memory, time and gradients of every method, side by side.

First checks that keepgrad computes correct results on this device, in this precision.
"""

from __future__ import annotations

import argparse
import os
import platform
from pathlib import Path
from typing import Any

import torch

from .. import flags, models
from ..bench import Task, bench, check
from ..config import KeepConfig
from ..errors import ConfigError, InputError, KeepgradError, StoppedError, reason_of
from ..memory import AMP
from ..methods import FULL, Method, kept, methods_for
from ..report import figures, progress
from .numbers import pixels, positive
from .version import versions

__all__ = ["add_arguments", "run"]

SMALL: dict[str, Any] = {"model": "vit_tiny_patch16_224", "batch": 8, "rounds": 5}
"""Settings if no model is given; they take under two minutes on two cores."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    which = (
        f"a model of timm; torchvision:NAME; or hf:NAME_OR_FOLDER (default: {SMALL['model']}, batch {SMALL['batch']})"
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help=which)
    parser.add_argument("--device", help="e.g. cuda, cuda:1 or cpu (default: an accelerator, if there is one)")
    parser.add_argument("--batch", type=positive, help="images or texts a step (default: 16)")
    parser.add_argument("--size", type=pixels, help="pixels a side (default: the model's own)")
    parser.add_argument(
        "--length", type=positive, help=f"tokens a text (default: the model's own, at most {models.LONGEST})"
    )
    parser.add_argument("--amp", choices=[name for name in AMP if name], help="autocast to this type")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model with every method")
    parser.add_argument("--rounds", type=positive, help="timed steps of each method (default: 9)")
    parser.add_argument("--only", nargs="+", metavar="METHOD", help="these methods only, and full backprop")
    flags.add_arguments(parser, KeepConfig)
    parser.add_argument("--profile", metavar="METHOD", help="print where the time of this method goes instead")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw peak memory against time, e.g. bench.png")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured")


def run(args: argparse.Namespace) -> None:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences the profiler that measures CPU memory
    if args.plot:
        figures()  # reports a missing matplotlib now, not at the end
    for name, value in SMALL.items() if args.model is None else ():
        if getattr(args, name) is None:
            setattr(args, name, value)
    device = _device(args.device)
    torch.manual_seed(0)
    model = models.create(args.model, size=args.size, device=str(device))
    given = models.inputs_for(model, args.batch or 16, args.size, args.length, device)
    task = Task(model, given, args.amp, args.compile)
    options = flags.given(args, KeepConfig)
    methods = methods_for(model, options)
    if args.profile:
        named = [method for method in _chosen(methods, [args.profile]) if method.name == args.profile]
        print(_profile(task, named[0]))
        return
    own = [kept(**options).name] if options else []
    methods = _chosen(methods, args.only and [*args.only, *own])
    checks = _checked(task)
    rounds = args.rounds or 9
    with progress(len(methods) + rounds + 1) as advance:
        found = bench(task, methods, rounds, _title(args, task, rounds), advance)
    found.checks = checks
    print("\n\n".join(t.to_markdown() for t in found.tables()) if args.markdown else found)
    if args.plot:
        found.save_plot(args.plot)
    if args.json:
        found.save_json(args.json)
    if found.interrupted:
        raise StoppedError("interrupted; what was measured so far is above")


def _device(name: str | None) -> torch.device:
    if name is None:
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return found or torch.device("cpu")
    try:
        torch.empty(1, device=name)
        return torch.device(name)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"--device {name}: {reason_of(error, 200)}") from None


def _chosen(known: list[Method], names: list[str] | None) -> list[Method]:
    if names is None:
        return known
    unknown = [name for name in names if name not in [method.name for method in known]]
    if unknown:
        listed = ", ".join(f"'{method.name}'" for method in known)
        raise ConfigError(f"there is no method {unknown[0]!r} for this model; these are: {listed}")
    return [method for method in known if method.name in names or method is FULL]


def _checked(task: Task) -> list[Any]:
    """Run the checks and print their results.

    Raises:
        KeepgradError: if keepgrad computes wrong results here.
        InputError: if the model does not run.
    """
    try:
        found = check(task)
    except KeepgradError:
        raise
    except Exception as error:  # any code of the model may raise any kind
        raise InputError(f"the model fails on this device with these inputs: {reason_of(error)}") from None
    for one in found:
        print(one, flush=True)
    failed = next((one for one in found if not one.passed), None)
    if failed is not None:
        raise KeepgradError(
            f"{failed.what}: wrong here, so nothing was measured. Please report the model, the device and the versions "
            "that keepgrad --version prints"
        )
    return found


def _title(args: argparse.Namespace, task: Task, rounds: int) -> str:
    given: dict[str, Any] = task.given if isinstance(task.given, dict) else {"": task.given}
    shapes = ", ".join(f"{name} {'x'.join(map(str, tensor.shape))}".strip() for name, tensor in given.items())
    how = f"{args.amp} autocast" if args.amp else "fp32"
    compiled = ", compiled" if args.compile else ""
    device = task.device
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} {device.type}"
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    prefix, colon, _ = args.model.partition(":")
    library = {"hf": "transformers"}.get(prefix, prefix) if colon else "timm"
    where = f"{versions('torch', library)}, {place}{threads}"
    return f"{args.model}, {shapes}, {how}{compiled}, {rounds} rounds; {where}"


def _profile(task: Task, method: Method) -> str:
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (task.device.type == "cuda")
    with task.put_on(method) as forward:
        task.step(forward)
        with profile(activities=kinds) as found:
            task.seconds(forward)
    by = "self_cuda_time_total" if task.device.type == "cuda" else "self_cpu_time_total"
    return found.key_averages().table(sort_by=by, row_limit=20, max_name_column_width=50)
