"""Numbers from outside: whether a float can hold them, and how a message shows them."""

from __future__ import annotations

import math
from numbers import Real
from typing import TypeGuard

__all__ = ["is_finite", "is_number", "shown"]

_SHOWN = 80


def is_finite(number: float | Real) -> bool:
    """Return whether `number` is finite as a float: no NaN, no infinity, no integer beyond a float's range."""
    try:
        return math.isfinite(number)
    except OverflowError:
        return False


def is_number(value: object) -> TypeGuard[float]:
    """Return whether `value` is a number that is finite as a float; False for True and False."""
    return not isinstance(value, bool) and isinstance(value, Real) and is_finite(value)


def shown(value: object) -> str:
    """Return `value` for a message, in ASCII, cut to 80 characters."""
    try:
        text = ascii(value)
    except ValueError:  # Python refuses to convert an integer of more than 4300 digits
        return f"a whole number of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}… ({len(text)} characters)"
