"""The range of numbers that a setting may have, declared once, with the setting. Error messages are made from it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Numbers"]


@dataclass(frozen=True)
class Numbers:
    """Whole numbers (`kind` is int) or any numbers (float), in a range.

    `least` and `most` are themselves allowed; `above` and `below` are not. Floats outside of the range of float32 are
    never allowed (infinity, NaN, 1e308, 1e-320), because training computes in float32 or in fewer bits.
    """

    kind: type
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None

    def __call__(self, value: Any) -> Any:
        """Return a value as a number; text such as "0.5" is converted.

        Raises:
            ValueError: if it is not one of these numbers. The message says which are.
        """
        try:
            if isinstance(value, bool) or not isinstance(value, (int, float, str)):
                raise ValueError
            number = self.kind(value)
            if isinstance(value, float) and number != value:
                raise ValueError
        except (ValueError, OverflowError):
            raise ValueError(f"give {self}") from None
        if not (self._is_usual(number) and self._is_inside(number)):
            raise ValueError(f"give {self}")
        return number

    def _is_usual(self, number: float) -> bool:
        if self.kind is int:
            return abs(number) < sys.float_info.max  # a larger int cannot be multiplied with a float
        known = torch.finfo(torch.float32)
        return number == 0 or known.tiny <= abs(number) <= known.max

    def _is_inside(self, number: float) -> bool:
        return (
            (self.least is None or number >= self.least)
            and (self.most is None or number <= self.most)
            and (self.above is None or number > self.above)
            and (self.below is None or number < self.below)
        )

    def __str__(self) -> str:
        name = "a whole number" if self.kind is int else "a number"
        if self.above is not None and self.below is not None:
            return f"{name} between {self.above} and {self.below}"
        low = (
            f" from {self.least}"
            if self.least is not None
            else f" above {self.above}"
            if self.above is not None
            else ""
        )
        high = (
            f" to {self.most}" if self.most is not None else f" to below {self.below}" if self.below is not None else ""
        )
        return f"{name}{low}{high}"
