"""keepgrad: train PyTorch models in less memory and less time by stochastic backpropagation.

    plan = keepgrad.apply(model, keep_ratio=0.5)   # in place; print(plan) shows what it does
    with keepgrad.exact(model): ...                # full backprop for a while
    keepgrad.remove(model)                         # the model is as it was
"""

from .config import KeepConfig
from .errors import (
    AlreadyAppliedError,
    ConfigError,
    InputError,
    KeepgradError,
    NoSiteError,
    NotAppliedError,
)
from .ops.algorithm1 import sbp
from .patch import apply, exact, plan, remove
from .plan import Plan, Site
from .sampling import Grid, kept_indices

__version__ = "0.1.0"

__all__ = [
    "AlreadyAppliedError",
    "ConfigError",
    "Grid",
    "InputError",
    "KeepConfig",
    "KeepgradError",
    "NoSiteError",
    "NotAppliedError",
    "Plan",
    "Site",
    "apply",
    "exact",
    "kept_indices",
    "plan",
    "remove",
    "sbp",
]
