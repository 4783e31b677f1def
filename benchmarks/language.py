"""What reduced gradients cost a language model: a small decoder on Python's own standard library, setting by setting.

    python benchmarks/language.py --output docs/language.csv [--threads 1]
    python benchmarks/language.py --show docs/language.csv      # the table, as Markdown

A Llama of 4 layers and width 128 (transformers) reads the source files of the standard library, byte by byte, in pieces
of 256 bytes, 16 of them a step, for 300 steps of AdamW with warm-up and cosine. Every tenth file is held out. A row is
appended when a run is finished, and rows that are there are skipped, so it can be stopped and taken up again. Runs come
seed by seed; runs of one seed begin with the same weights and see the same pieces in the same order.

loss is the cross-entropy of held-out pieces in nats a byte, after the last step. cosine is that of the whole gradient
with full backprop's on the trained model of the setting, for 4 batches. time is that of a training step
against full backprop, the median over pairs of steps taken in turns just before the run; saved is what autograd
keeps for backward up to the logits, against full backprop.
"""

from __future__ import annotations

import argparse
import copy
import csv
import math
import platform
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from rich.progress import Progress
from torch import Tensor, nn

import keepgrad
from keepgrad.memory import saved_bytes
from keepgrad.report import Table

COLUMNS = ("setting", "seed", "loss", "train_loss", "cosine", "time", "saved", "steps", "versions")
LENGTH, BATCH, STEPS, LEARNING_RATE, SEEDS = 256, 16, 300, 2e-3, 2
HELD_OUT = 10
"""One file of so many is held out."""

EXACT = {"keep_ratio": 1.0}


def half(reduce: str, **more) -> dict:
    return {"keep_ratio": {"mlp": 0.5}, "reduce": reduce, **more}


SETTINGS: dict[str, dict | None] = {
    "full backprop": None,
    "exact": EXACT,
    "exact, int8": {**EXACT, "store": "int8"},
    "MLP drop 0.5": half("drop"),
    "MLP scaled 0.5": half("scaled"),
    "MLP fold 0.5": half("fold"),
    "queries drop 0.5": {"keep_ratio": {"attention": 0.5}, "attention": "query", "reduce": "drop"},
    "half of the sequences": None,
    "exact, int8, save input": {**EXACT, "store": "int8", "save": "input"},
    "MLP drop 0.5, random": half("drop", mask="random"),
    "drop 0.5": {"keep_ratio": 0.5, "reduce": "drop"},
    "MLP pool 0.5": half("pool"),
}
"""What `apply` gets, by the name in the table; None is full backprop."""


def make() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).train()


def files() -> list[Path]:
    """The source files of the standard library, without its tests and what was installed beside it."""
    root = Path(sysconfig.get_path("stdlib"))
    aside = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    return [path for path in sorted(root.rglob("*.py")) if not aside & set(path.relative_to(root).parts)]


def load() -> tuple[Tensor, Tensor]:
    """The bytes to train on, and pieces `[count, LENGTH + 1]` of those that are held out."""
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for number, path in enumerate(files()):
        parts[number % HELD_OUT == 0].append(path.read_bytes())
    train, held_out = (torch.frombuffer(bytearray(b"\n".join(part)), dtype=torch.uint8) for part in parts)
    pieces = held_out[: len(held_out) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0))
    return train, pieces[order[: 16 * BATCH]]


def batches(data: Tensor, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(data) - LENGTH - 1, (BATCH, 1), generator=generator)
        yield data[starts + torch.arange(LENGTH + 1)]


def loss_of(model: nn.Module, pieces: Tensor) -> Tensor:
    ids = pieces.long()
    return F.cross_entropy(model(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten())


def cost(options: dict | None, share: float, pieces: Tensor) -> tuple[float, float]:
    """Time and bytes of a training step, against full backprop."""
    plain = make()
    own = copy.deepcopy(plain)
    if options is not None:
        keepgrad.apply(own, **options)
    some = {plain: pieces, own: pieces[: int(share * len(pieces))]}
    ratios = []
    for turn in range(10):
        seconds = {}
        for model in (plain, own) if turn % 2 else (own, plain):
            start = time.perf_counter()
            loss_of(model, some[model]).backward()
            seconds[model] = time.perf_counter() - start
        ratios.append(seconds[own] / seconds[plain])
    saved = [saved_bytes(lambda m=m: m(some[m][:, :-1].long()).logits, m) for m in (own, plain)]
    return statistics.median(ratios[2:]), saved[0] / saved[1]


def train(model: nn.Module, data: Tensor, share: float, seed: int, steps: int, advance: Callable) -> float:
    """Train the model; the mean loss of the last tenth."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.05)
    warm_up = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda n: min((n + 1) / warm_up, 0.5 * (1 + math.cos(math.pi * max(0, n - warm_up) / (steps - warm_up)))),
    )
    losses = []
    given = batches(data, seed)
    for _ in range(steps):
        loss = loss_of(model, next(given)[: int(share * BATCH)])
        loss.backward()
        losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        advance()
    return statistics.mean(losses[-max(1, steps // 10) :])


@torch.no_grad()
def held_out_loss(model: nn.Module, pieces: Tensor) -> float:
    model.eval()
    return statistics.mean(loss_of(model, some).item() for some in pieces.split(BATCH))


def cosine(model: nn.Module, is_plain: bool, share: float, pieces: Tensor, count: int = 4) -> float:
    """The cosine of the setting's gradient with that of full backprop on the same model and batch."""
    model.train()
    found = []
    for batch in pieces.split(BATCH)[:count]:
        grads = []
        for own in (True, False):
            model.zero_grad()
            with nullcontext() if own or is_plain else keepgrad.exact(model):
                loss_of(model, batch[: int(share * BATCH)] if own else batch).backward()
            grads.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        found.append(float(F.cosine_similarity(grads[0], grads[1], dim=0)))
    return statistics.mean(found)


def read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def append(path: Path, row: dict) -> None:
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def show(path: Path) -> None:
    """Print a result file as Markdown."""
    rows = read(path)
    print(*dict.fromkeys(row["versions"] for row in rows), sep="; ")
    plain = {row["seed"]: float(row["loss"]) for row in rows if row["setting"] == "full backprop"}
    table: list[tuple[str, ...]] = []
    for name in SETTINGS:
        some = [row for row in rows if row["setting"] == name]
        if not some:
            continue
        pairs = [float(row["loss"]) - plain[row["seed"]] for row in some if row["seed"] in plain]
        spread = f" ({min(pairs):+.3f} to {max(pairs):+.3f})" if len(pairs) > 1 and any(pairs) else ""
        against = f"{statistics.mean(pairs):+.3f}{spread}" if pairs else "-"
        mean = {key: statistics.mean(float(row[key]) for row in some) for key in ("loss", "cosine")}
        median = {key: statistics.median(float(row[key]) for row in some) for key in ("time", "saved")}
        cells = (name, f"{mean['loss']:.3f}", str(len(some)), against, f"{mean['cosine']:.3f}")
        table.append((*cells, f"{median['saved']:.2f}x", f"{median['time']:.2f}x"))
    head = ("setting", "held-out loss", "seeds", "against full backprop", "cosine", "saved", "time")
    print(Table("", head, table).to_markdown())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", type=Path, metavar="CSV", help="print a result file as Markdown and end")
    parser.add_argument("--output", type=Path, default=Path("language.csv"))
    parser.add_argument("--only", nargs="+", default=list(SETTINGS), choices=list(SETTINGS), metavar="SETTING")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    if args.show:
        show(args.show)
        return
    torch.set_num_threads(args.threads)
    data, held_out = load()
    versions = (
        f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}, "
        f"{platform.machine()} CPU, {args.threads} threads"
    )
    with Progress() as progress:
        for seed in range(args.seeds):
            for name in args.only:
                if (name, str(seed)) in {(row["setting"], row["seed"]) for row in read(args.output)}:
                    continue
                options, share = SETTINGS[name], 0.5 if name == "half of the sequences" else 1.0
                torch.manual_seed(seed)
                ratio, saved = cost(options, share, held_out[:BATCH])
                torch.manual_seed(seed)
                model = make()
                if options is not None:
                    keepgrad.apply(model, **options)
                task = progress.add_task(f"{name}, seed {seed}", total=args.steps)
                train_loss = train(model, data, share, seed, args.steps, lambda task=task: progress.advance(task))
                found = held_out_loss(model, held_out)
                row = (name, seed, round(found, 4), round(train_loss, 4))
                agreement = cosine(model, options is None, share, held_out)
                row += (round(agreement, 4), round(ratio, 3), round(saved, 3), args.steps, versions)
                append(args.output, dict(zip(COLUMNS, row, strict=True)))
    show(args.output)


if __name__ == "__main__":
    main()
