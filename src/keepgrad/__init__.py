"""keepgrad: train PyTorch models in less memory and less time by stochastic backpropagation.

- `keepgrad.apply(model, keep_ratio=0.5)` patches a model in place.
- `print(keepgrad.plan(model, ...))` shows what `apply` would do.
- `with keepgrad.exact(model):` uses full backprop inside the context.
- `keepgrad.remove(model)` undoes `apply`.
- `estimate`, `measure` and `fit` tell how much memory training takes.
- `fidelity` and `compare` tell how well the gradients agree with exact ones.
"""

from .adapters import Adapter, Attention, LinearOf, Scale, Unsupported, adapts
from .budget import Fit, fit
from .config import KeepConfig
from .errors import (
    AlreadyAppliedError,
    BudgetError,
    CheckpointingError,
    ConfigError,
    DivergedError,
    FileError,
    InputError,
    KeepgradError,
    MapTooSmallError,
    NoSiteError,
    NotAppliedError,
    StoppedElsewhereError,
    StoppedError,
    UnsupportedByTorchError,
)
from .fidelity import Comparison, FidelityReport, compare, fidelity
from .memory import MemoryReport, estimate, measure
from .ops.algorithm1 import sbp
from .patch import apply, exact, plan, remove, set_step
from .plan import Plan, Site
from .sampling import Layout, kept_indices

__version__ = "0.2.0"

__all__ = [
    "Adapter",
    "AlreadyAppliedError",
    "Attention",
    "BudgetError",
    "CheckpointingError",
    "Comparison",
    "ConfigError",
    "DivergedError",
    "FidelityReport",
    "FileError",
    "Fit",
    "InputError",
    "KeepConfig",
    "KeepgradError",
    "Layout",
    "LinearOf",
    "MapTooSmallError",
    "MemoryReport",
    "NoSiteError",
    "NotAppliedError",
    "Plan",
    "Scale",
    "Site",
    "StoppedElsewhereError",
    "StoppedError",
    "Unsupported",
    "UnsupportedByTorchError",
    "adapts",
    "apply",
    "compare",
    "estimate",
    "exact",
    "fidelity",
    "fit",
    "kept_indices",
    "measure",
    "plan",
    "remove",
    "sbp",
    "set_step",
]
