"""Runs a study, from the first setting to the report. Results are saved after every setting, for `--resume`."""

from __future__ import annotations

import json
import math
import platform
from pathlib import Path
from typing import Any

import torch

from ..errors import DivergedError, FileError, KeepgradError, MapTooSmallError, StoppedError
from ..files import make_folder, written_whole
from ..flags import write_yaml
from ..report import Table
from ..report import figures as report_figures
from . import figures
from .config import StudyConfig
from .findings import Advice, advice, code_of, front
from .page import WIDE, page
from .questions import FULL, Question, all_keys, name_of, questions, trained_as
from .results import Results, Trained
from .subject import Subject, described

__all__ = ["study"]

SHOWN = (0.5, 0.25)  # the report shows masks at these keep-ratios


def study(config: StudyConfig, output: Path) -> Table:
    """Run or resume a study, and write the report to `output`.

    Returns:
        A table of the recommended setting, the fastest one and the smallest one.

    Raises:
        ConfigError, InputError, NoSiteError: if the settings, the data or the model cannot be used.
        FileError: if the folder has a study already, or cannot be written.
        StoppedError: on Ctrl-C; the results so far are saved.
    """
    path = output / "results.json"
    if path.exists() and not config.resume:
        raise FileError(f"{output} has a study already; give --resume to continue it, or another --output")
    config = described(config)
    subject = Subject(config)
    about = subject.about()
    results = Results.read(path, about) if path.exists() else Results(about)
    results.steps = config.train
    results.seeds = tuple(str(config.seed + number) for number in range(config.seeds)) if config.train else ()
    make_folder(output)
    write_yaml(output / "config.yaml", config)  # only now: another study's file must not be replaced
    results.write(path)
    try:
        asked = _ask(subject, results, path)
    except KeyboardInterrupt:
        raise StoppedError(
            f"interrupted with {len(results.measured)} settings measured; --resume --output {output} continues"
        ) from None
    found = results.of(all_keys(asked))
    best = advice(found)
    _write(output, subject, asked, found, best)
    return _summary(found, best)


def _ask(subject: Subject, results: Results, path: Path) -> list[Question]:
    """Measure and train every setting that has no results yet. Returns the questions."""
    try:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    except ImportError:
        raise KeepgradError("a study needs rich: pip install 'keepgrad[report]'") from None
    report_figures()  # reports a missing matplotlib now, not at the end

    config = subject.config
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        bar = progress.add_task("preparing", total=None)
        if config.prepare:
            progress.update(bar, total=config.prepare)
            subject.prepare(path.with_name("start.safetensors"), lambda steps: progress.advance(bar, steps))
        progress.update(bar, description="equal memory", total=None)
        asked = questions(subject.has_attention, subject.blocks, subject.saved, config.setting())
        keys = all_keys(asked)
        # Progress counts training steps. One measurement takes this many, for its draws, timed steps and so on.
        once = config.batches * (config.draws + 1) + 2 * (config.rounds + 1) + 2
        todo = [key for key in keys if key not in results.measured and key not in results.left_out]
        trainings = dict.fromkeys([FULL, *map(trained_as, keys)])
        runs = [(key, seed) for seed in results.seeds for key in trainings if seed not in results.runs(key)]
        progress.reset(bar, total=once * len(todo) + config.train * len(runs))
        for number, key in enumerate(todo, 1):
            progress.update(bar, description=f"{number}/{len(todo)} {name_of(key)}"[:48])
            try:
                results.measured[key] = subject.measure(json.loads(key))
            except MapTooSmallError as error:
                results.left_out[key] = str(error)
            results.write(path)
            progress.advance(bar, once)
        for number, (key, seed) in enumerate(runs, 1):
            if key in results.left_out:
                progress.advance(bar, config.train)
                continue
            progress.update(bar, description=f"training {number}/{len(runs)} {name_of(key)}"[:48])
            options = None if key == FULL else json.loads(key)
            try:
                run = subject.train(options, int(seed), lambda steps: progress.advance(bar, steps))
            except DivergedError:
                if options is None:
                    raise
                run = Trained(math.inf, 0.0, config.train)  # this is a result too; go on with the other settings
            results.trained.setdefault(key, {})[seed] = run
            results.write(path)
    return asked


def _write(output: Path, subject: Subject, asked: list[Question], results: Results, best: Advice) -> None:
    """Write the page, the CSV files and the pictures."""
    on_front = front(results)
    results.write_csv(output, on_front)
    with written_whole(output / "pareto.png") as partial:
        figures.png(partial, [figures.pareto(results, on_front, best.best)], WIDE)
    for question in asked:
        if question.name == "presets":
            continue
        cosine = figures.agreement(question, results, "cosine", "cosine with exact gradients")
        norm = figures.agreement(question, results, "norm_ratio", "norm ratio")
        beside = [figures.quality(question, results), cosine] if results.runs(FULL) else [cosine, norm]
        with written_whole(output / f"{question.name}.png") as partial:
            figures.png(partial, beside)
        if question.name == "ratio":
            draw, size = figures.heat_map(question, results)
            with written_whole(output / "layers.png") as partial:
                figures.png(partial, [draw], size)
    pictures: dict[float, dict[str, bytes]] = {}
    for ratio in SHOWN:
        try:
            image, drawn = subject.masks(ratio)
        except MapTooSmallError:
            continue
        pictures[ratio] = {mask: figures.mask_picture(image, grid, kept) for mask, (grid, kept) in drawn.items()}
        for mask, data in pictures[ratio].items():
            with written_whole(output / f"mask-{mask}-{ratio:g}.png") as partial:
                partial.write_bytes(data)
    with written_whole(output / "report.html") as partial:
        partial.write_text(page(_about(subject, results), asked, results, on_front, best, pictures), encoding="utf-8")


def _about(subject: Subject, results: Results) -> dict[str, Any]:
    import timm

    config = subject.config
    weights = config.checkpoint or "from scratch"
    weights += f", {config.prepare} steps of full backprop" if config.prepare else ""
    data = config.data or "scikit-learn's digits"
    device = subject.accelerator.device.type
    facts = {
        "model": config.model if not config.model_kwargs else f"{config.model}, {config.model_kwargs}",
        "weights": weights,
        "images": f"{data}, {config.batches} batches of {config.batch_size}",
        "draws of the masks": config.draws,
        "timed steps": config.rounds,
    }
    if results.runs(FULL):
        facts["short trainings"] = f"{config.train} steps, {config.seeds} seeds, learning rate {config.lr:g}"
    facts["versions"] = f"torch {torch.__version__}, timm {timm.__version__}, Python {platform.python_version()}"
    threads = f", {torch.get_num_threads()} threads" if device == "cpu" else ""
    facts["machine"] = f"{platform.machine()}, {device}{threads}"
    summary = f"{len(results.measured)} settings on {data}, {weights}"
    return {"model": config.model, "summary": summary, "facts": facts}


def _summary(results: Results, best: Advice) -> Table:
    rows = []
    for what, key in (("recommended", best.best), ("fastest", best.fastest), ("smallest", best.smallest)):
        one = results.measured[key]
        rows.append((what, *(f"{v:.2f}x" for v in (one.bytes, one.time)), f"{one.cosine:.4f}", code_of(key)))
    title = "" if best.reduced else "no setting that reduces gradients is good enough here; these are exact"
    return Table(title, ("", "saved", "time", "cosine", ""), rows)
