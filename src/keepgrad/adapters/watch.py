"""Whether a block is still as it was when its programs were built.

A layer that is replaced, hooked, put into evaluation or given another forward after `apply` must be seen in the next
step. Weights are read anew in every step, so they need no watching.
"""

from __future__ import annotations

from copy import copy
from typing import Any

from torch import nn

from .._torch import has_global_hooks, has_hooks

__all__ = ["Watch"]

FACTS = ("p", "drop_prob", "merged_adapters", "_disable_adapters", "_active_adapter", "scaling")
"""Attributes that decide whether a module draws random numbers, and which adapters of PEFT are in force."""


class Watch:
    """All that the programs of a block were built from, besides the tensors.

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
        """Whether nothing has changed since this was made."""
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
    """The types of a module's parameters: None, plain ones, quantised ones."""
    return [value.__class__ for value in own["_parameters"].values()]
