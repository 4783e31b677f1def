"""The memory of a training step before it is run: full backprop, checkpointing, the paper and keepgrad side by side.

Runs on fake tensors: it needs neither a GPU nor the memory it estimates, and takes
seconds even for a large model.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from .. import flags, models
from ..config import KeepConfig
from ..errors import CheckpointingError, ConfigError, MapTooSmallError, NoSiteError
from ..memory import AMP, OPTIMIZERS, MemoryReport, estimate
from ..memory.sharding import gathered_bytes
from ..methods import FULL, METHODS, Method, kept, methods_for
from ..report import Table, readable_bytes
from .numbers import pixels, positive

__all__ = ["add_arguments", "run"]


# Table 1 of the paper: model, batch size per GPU, MB without stochastic backpropagation (SBP) and with it at 0.5.
PAPER_ROWS = (
    ("vit_tiny_patch16_224", 256, 8248, 5587),
    ("vit_base_patch16_224", 64, 10083, 7436),
    ("convnext_tiny", 128, 12134, 7059),
    ("convnext_base", 64, 14130, 8758),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    which = "a model of timm, e.g. vit_base_patch16_224; torchvision:NAME; or hf:NAME_OR_FOLDER (with a config.json)"
    parser.add_argument("model", nargs="?", metavar="MODEL", help=which)
    parser.add_argument("--batch", type=positive, help="images or texts a step (default: 64)")
    parser.add_argument("--size", type=pixels, help="pixels a side (default: the model's own)")
    parser.add_argument(
        "--length", type=positive, help=f"tokens a text (default: the model's own, at most {models.LONGEST})"
    )
    parser.add_argument("--amp", choices=[name for name in AMP if name], help="autocast to this type")
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), help="(default: adamw)")
    parser.add_argument(
        "--processes", type=positive, default=1, metavar="N", help="devices that train together; shows what one holds"
    )
    parser.add_argument("--fsdp", action="store_true", help="shard over them by FSDP2, block by block (default: DDP)")
    flags.add_arguments(parser, KeepConfig)
    parser.add_argument("--paper-table", action="store_true", help="Table 1 of the paper, estimated, instead")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> None:
    if args.paper_table == (args.model is not None):
        raise ConfigError("give a model, e.g. keepgrad estimate vit_base_patch16_224 --batch 64, or --paper-table")
    if args.paper_table:
        given = [name for name in ("batch", "size", "length", "amp", "optimizer") if getattr(args, name) is not None]
        given += [*flags.given(args, KeepConfig), *(["fsdp"] if args.fsdp else [])]
        given += ["processes"] if args.processes > 1 else []
        if given:
            raise ConfigError(f"--paper-table is the paper's setting; leave out --{given[0].replace('_', '-')}")
        _paper_table(args.json)
        return
    batch, optimizer = args.batch or 64, args.optimizer or "adamw"
    methods = methods_for(models.create(args.model, device="meta"), flags.given(args, KeepConfig))
    methods = [method for method in methods if method.can_estimate]
    how = {"amp": args.amp, "optimizer": optimizer, "processes": args.processes, "fsdp": args.fsdp}
    found = dict(_estimates(args.model, batch, args.size, args.length, methods, **how))
    if args.json:
        print(json.dumps({name: report.to_dict() for name, report in found.items()}, indent=2))
        return
    full = found[FULL.name].total
    parts = ("activations", "temporary", "parameters", "gradients", "optimizer")
    rows = [
        (
            name,
            readable_bytes(report.total),
            f"{report.total / full:.2f}x",
            *(readable_bytes(getattr(report, p)) for p in parts),
        )
        for name, report in found.items()
    ]
    amp = f"autocast to {args.amp}" if args.amp else "no autocast"
    title = f"{args.model}, batch {batch}, {amp}, {optimizer}: peak of a training step, estimated"
    note = ""
    if args.fsdp:
        gathered = gathered_bytes(models.create(args.model, size=args.size, device="meta"))
        note = (
            f"one of {args.processes} devices with FSDP2: one shard of the fixed parts. temporary: with\n"
            f"{readable_bytes(gathered)} that is gathered: what is in no block, the block that is computed and the\n"
            "next one, and the gradients of a block before they are sent"
        )
    elif args.processes > 1:
        note = f"one of {args.processes} devices with DDP. gradients: with the buckets from which they are sent"
    print(Table(title, ("method", "peak", "", *parts), rows, note).to_text())


def _estimates(
    name: str,
    batch: int,
    size: int | None,
    length: int | None,
    methods: Sequence[Method],
    **how: Any,
) -> Iterator[tuple[str, MemoryReport]]:
    told: set[str] = set()
    for method in methods:
        model = models.create(name, size=size, device="meta")
        given = models.batch_for(model, batch, size, length)
        try:
            with method.put_on(model):
                yield method.name, estimate(model, given, **how)
        except (NoSiteError, CheckpointingError, MapTooSmallError) as error:
            if str(error) not in told:
                print(f"left out: {error}", file=sys.stderr)
            told.add(str(error))


def _paper_table(as_json: bool) -> None:
    """Print the paper's numbers, estimates of its method, and estimates of keepgrad.

    The estimates of its method are for the setting of the paper: fp16, with attention matrices saved, as in 2022.
    """
    ours = [FULL, kept(preset="paper"), kept(), kept(keep_ratio=0.25, save="input")]
    published = METHODS["Algorithm 1, the paper's layers"]
    theirs = [_unfused(method) for method in (FULL, published)]
    rows, data = [], []
    for name, batch, plain_mb, sbp_mb in PAPER_ROWS:
        then = dict(_estimates(name, batch, None, None, theirs, amp="fp16"))
        now = dict(_estimates(name, batch, None, None, ours, amp="fp16"))
        full_then, full_now = then[FULL.name].total, now[FULL.name].total
        rows.append(
            (
                f"{name}, batch {batch}",
                f"{plain_mb} / {sbp_mb}",
                f"{sbp_mb / plain_mb:.2f}x",
                f"{full_then / 2**20:.0f} / {then[published.name].total / 2**20:.0f}",
                f"{then[published.name].total / full_then:.2f}x",
                f"{full_now / 2**20:.0f}",
                *(f"{now[m.name].total / full_now:.2f}x" for m in ours[1:]),
            )
        )
        data.append(
            {
                "model": name,
                "batch": batch,
                "paper_mb": [plain_mb, sbp_mb],
                "algorithm1": {key: report.to_dict() for key, report in then.items()},
                "keepgrad": {key: report.to_dict() for key, report in now.items()},
            }
        )
    if as_json:
        print(json.dumps(data, indent=2))
        return
    head = ("network", "paper, MB", "", "Algorithm 1, MiB", "", "full today, MiB", "paper", "default", "smallest")
    note = (
        "paper, MB: Table 1, without and with SBP at 0.5, measured on a GPU. Algorithm 1: the same, estimated in\n"
        "the paper's setting (fp16 autocast, AdamW, attention without a fused kernel). full today: timm's model with\n"
        "fused attention. The last three are keepgrad's, against it: preset paper, the default, and keep_ratio 0.25\n"
        "with save='input'."
    )
    print(Table("Table 1 of the paper, and keepgrad", head, rows, note).to_text())


def _unfused(method: Method) -> Method:
    """The same method, with attention that is not fused, so that it saves the attention matrix."""

    @contextmanager
    def put_on(model: nn.Module) -> Iterator[Any]:
        module: Any
        for module in model.modules():
            if hasattr(module, "fused_attn"):
                module.fused_attn = False
        with method.put_on(model) as forward:
            yield forward

    return Method(method.name, put_on)
