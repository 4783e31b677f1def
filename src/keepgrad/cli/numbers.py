"""Number types for argparse arguments."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from ..numbers import Numbers
from ..train.config import SEED, SIDE

__all__ = ["from_zero", "pixels", "positive", "seed"]


def _argument(numbers: Numbers) -> Callable[[str], int]:
    """Raise errors as ArgumentTypeError: argparse does not show the text of other errors."""

    def parsed(text: str) -> int:
        try:
            return numbers(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r:.80}: {error}") from None

    return parsed


positive = _argument(Numbers(int, least=1, most=10**6))
from_zero = _argument(Numbers(int, least=0, most=10**6))
pixels = _argument(SIDE)
seed = _argument(SEED)
