"""keepgrad: train PyTorch models in less memory and less time by stochastic backpropagation.

`keepgrad.apply(model, keep_ratio=0.5)` patches a model in place, `print(keepgrad.plan(model, ...))` shows what that
would do, `with keepgrad.exact(model):` is full backprop for a while, and `keepgrad.remove(model)` takes it off again.
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
