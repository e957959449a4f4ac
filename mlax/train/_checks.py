"""Checks of integer arguments."""

import operator
from typing import Any

import numpy as np

from mlax.core import signature


def int_or_none(value: Any) -> int | None:
    """`value` as an int, if it is an integer scalar of Python, NumPy or JAX, and not a boolean; else None."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:  # arrays have __index__ too, but only integer scalars support it
        return None


def int_at_least(least: int, value: Any, name: str) -> int:
    """`value` as an int of at least `least`."""
    number = int_or_none(value)
    if number is None or number < least:
        what = repr(value) if np.isscalar(value) else signature(value)
        raise ValueError(f"{name} is {what}, but must be an int of at least {least}.")
    return number
