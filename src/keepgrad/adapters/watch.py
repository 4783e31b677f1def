"""Notices when a block has changed since its programs were built.

After `apply`, a user may replace a layer, add a hook to it, call `eval()` on it or set another forward. The next step
must notice. The values of weights are read again in every step, so they need no watching.
"""

from __future__ import annotations

from copy import copy
from typing import Any

from torch import nn

from .._torch import has_global_hooks, has_hooks

__all__ = ["Watch"]

FACTS = ("p", "drop_prob", "merged_adapters", "_disable_adapters", "_active_adapter", "scaling")
"""Attributes that decide whether a module draws random numbers, and which PEFT adapters are active."""


class Watch:
    """Records everything that the programs of a block were built from, except the values of tensors.

    `holds` runs for every block in every step, so it reads the modules' dictionaries directly.
    """

    def __init__(self, block: nn.Module) -> None:
        self.seen: list[tuple[Any, ...]] = []
        for module in block.modules():
            own = module.__dict__
            hooks = [own[f"_{kind}_hooks"] for kind in ("forward", "forward_pre", "backward", "backward_pre")]
            facts = [(name, copy(own[name])) for name in FACTS if name in own]
            forward = None if module is block else own.get("forward")
            fixed = (own["training"], list(own["_modules"].values()), _kinds(own), facts, forward, has_hooks(module))
            self.seen.append((module, type(module), own, *fixed, hooks))
        self.block = block
        self.all_hooked = has_global_hooks()

    def holds(self) -> bool:
        """True if nothing has changed since this object was made."""
        block = self.block
        if has_global_hooks() is not self.all_hooked:
            return False
        for module, kind, own, training, children, kinds, facts, forward, hooked, hooks in self.seen:
            if module.__class__ is not kind or own["training"] is not training:
                return False
            if own.get("forward") is not forward and module is not block:
                return False
            if (kinds or own["_parameters"]) and _kinds(own) != kinds:
                return False
            if (children or own["_modules"]) and list(own["_modules"].values()) != children:
                return False
            for name, value in facts:
                if own[name] != value:
                    return False
            if (hooked or any(hooks)) and has_hooks(module) != hooked:
                return False
        return True


def _kinds(own: dict[str, Any]) -> list[type]:
    """The type of each of a module's parameters: `Parameter`, a quantised type, or that of None."""
    return [value.__class__ for value in own["_parameters"].values()]
