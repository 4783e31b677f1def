"""The bytes at the peak of a training step by part, as a table and as a plot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..report import Report, Table, figures, readable_bytes
from .ledger import Ledger

__all__ = ["PARTS", "MemoryReport", "report_of"]

PARTS = ("parameters", "gradients", "optimizer", "activations", "temporary", "other")


@dataclass(frozen=True)
class MemoryReport(Report):
    """The bytes at the peak of one training step, by part. `modules`: the activations of each module, by name."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    temporary: int
    other: int
    modules: Mapping[str, int] = field(default_factory=dict)
    saved: int = 0
    """The most that activations take at any one time. In small models the peak comes when they are freed already."""

    @property
    def total(self) -> int:
        return sum(getattr(self, part) for part in PARTS)

    def to_dict(self) -> dict[str, Any]:
        return {"total": self.total, **asdict(self)}

    def tables(self) -> list[Table]:
        sizes = {part: getattr(self, part) for part in PARTS}
        rows = [(part, readable_bytes(size), f"{size / max(self.total, 1):.0%}") for part, size in sizes.items()]
        rows.append(("total", readable_bytes(self.total), ""))
        found = [Table("Peak memory of a training step", ("", "", ""), rows)]
        if self.modules:
            largest = sorted(self.modules.items(), key=lambda item: -item[1])
            shown = [(name or "(the model itself)", readable_bytes(size)) for name, size in largest[:12]]
            rest = sum(size for _, size in largest[12:])
            if rest:
                shown.append((f"{len(largest) - 12} others", readable_bytes(rest)))
            found.append(Table("Activations by module", ("module", ""), shown))
        return found

    def plot(self) -> Any:
        """A bar with the parts, and the activations of the modules in the order in which they run."""
        figure = figures().Figure(figsize=(9, 3.5), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1, 2))
        left.barh(PARTS[::-1], [getattr(self, part) / 2**30 for part in PARTS[::-1]])
        left.set(xlabel="GiB", title=f"peak {readable_bytes(self.total)}")
        right.bar(range(len(self.modules)), [size / 2**20 for size in self.modules.values()])
        right.set(xlabel="module, in the order of the forward pass", ylabel="MiB", title="activations")
        return figure


def report_of(
    ledger: Ledger, optimizer: int = 0, total: int | None = None, allocated: int | None = None
) -> MemoryReport:
    """Make the report of a ledger: the parts at the peak.

    `optimizer`: bytes of state of an optimizer that was not run. The peak may be known from the allocator: give it as
    `total`, or give as `allocated` what the step had allocated at the peak, without what was there before.
    """
    alive = ledger.at_peak()
    parts = dict.fromkeys(PARTS, 0)
    modules: dict[str, int] = {}
    for record in alive:
        parts[record.kind] += record.size
        if record.kind == "activations":
            modules[record.module] = modules.get(record.module, 0) + record.size
    parts["optimizer"] += optimizer
    if allocated is not None:
        total = allocated + sum(record.size for record in alive if record.born == 0)
    if total is not None:
        parts["temporary"] = max(0, total - sum(size for part, size in parts.items() if part != "temporary"))
    saved = ledger.peak([record for record in ledger.records if record.kind == "activations"])[0]
    return MemoryReport(**parts, modules=modules, saved=saved)
