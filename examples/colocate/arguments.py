"""Readers of command-line arguments. A wrong argument is an error before the program starts its work."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def integer(least: int) -> Callable[[str], int]:
    """Reads integers of `least` or more."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}, expected an integer of {least} or more")
        return int(text)

    return read


def positive(text: str) -> float:
    """Reads a finite number above 0."""
    return _number(text, math.inf, "a positive number")


def share(text: str) -> float:
    """Reads a part of a whole."""
    return _number(text, 1.0, "a share above 0 and up to 1")


def _number(text: str, most: float, expected: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 < value <= most and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text!r}, expected {expected}")
    return value
