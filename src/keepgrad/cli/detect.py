"""Train Mask R-CNN or Cascade Mask R-CNN on data in COCO's layout; with --demo, on shapes, side by side.

To use several processes: torchrun --nproc-per-node 8 -m keepgrad detect ...
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .. import flags
from ..errors import ConfigError, KeepgradError
from ..files import make_folder
from ..train.config import DetectConfig
from .train import continued, new_folder

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--demo", action="store_true", help="make a small set of shapes, and compare on it")
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings in YAML; flags override them")
    flags.add_arguments(parser, DetectConfig)


def run(args: argparse.Namespace) -> None:
    try:
        import pycocotools  # noqa: F401
        import timm  # noqa: F401
        import torchvision  # noqa: F401
    except ImportError as error:
        raise KeepgradError(f"{error}; detection needs more packages: pip install 'keepgrad[detect]'") from None
    from ..data.shapes import SETTINGS, make_shapes
    from ..train.detect import Detection
    from ..train.loop import Trainer, accelerator_for, fitted
    from ..train.loop.side_by_side import side_by_side

    file: dict[str, Any] = {} if args.config is None else flags.read_yaml(args.config)
    given = flags.given(args, DetectConfig)
    if args.demo:
        if given.get("data") or file.get("data"):
            raise ConfigError("--demo makes data of its own; leave out --demo or --data")
        output = Path(given.get("output") or file.get("output") or new_folder("shapes"))
        make_folder(output)
        data = {"data": str(make_shapes(output / "data"))}
        config = flags.make(DetectConfig, SETTINGS, file, given, data)
        metrics = {"box AP": "box_ap", "box AP50": "box_ap50", "mask AP": "mask_ap", "mask AP50": "mask_ap50"}
        print(side_by_side(config, output, Detection, metrics).to_text())
        print(f"\nresults, with pictures: {output}")
        return
    config = flags.make(DetectConfig, continued({**file, **given}), file, given)
    accelerator = accelerator_for(config)
    config = fitted(config, accelerator)
    trainer = Trainer(Detection(config, accelerator), config, accelerator)
    outcome = trainer.run(config.detector)
    if accelerator.is_main_process:
        last = outcome.history[-1]
        print(", ".join(f"{name} {last[name]:.1%}" for name in ("box_ap", "box_ap50", "mask_ap", "mask_ap50")))
        print(f"results, with pictures: {outcome.output}")
