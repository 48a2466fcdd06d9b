"""The one style of numbers in a report: four significant digits, commas between thousands, durations with units."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from prefect_tune.core.metrics import shown
from prefect_tune.core.values import flat
from prefect_tune.terminal.formatting import format_seconds

_DIGITS = 4
_LARGE = 10_000_000
_SMALL = 0.001
"""Numbers with a fraction, from `_LARGE` on and below `_SMALL`, are written with an exponent."""
_LONGEST_INT = 10**15


def format_number(value: float) -> str:
    """Return a number: `0.02041`, `27`, `12,346`, `2.148e-28`."""
    if not math.isfinite(value):
        return str(value)
    if value and not _SMALL <= abs(value) < _LARGE:
        mantissa, _, exponent = f"{value:.{_DIGITS - 1}e}".partition("e")
        return f"{_trimmed(mantissa)}e{int(exponent)}"
    places = _DIGITS - 1 - math.floor(math.log10(abs(value))) if value else 0
    return _trimmed(f"{value:,.{max(0, places)}f}")


def format_count(count: int) -> str:
    """Return a whole number in full: `27`, `12,346`."""
    return f"{count:,}"


def format_span(seconds: float) -> str:
    """Return a duration: `0.53 s`, `8.2 s`, `3 min 20 s`."""
    if seconds >= 10:
        return format_seconds(seconds)
    return f"{seconds:.3g} s" if seconds >= _SMALL else "0 s"


def format_cell(value: object) -> str:
    """Return a parameter or a metric."""
    match value:
        case bool():
            return str(value)
        case int():
            return format_count(value) if abs(value) < _LONGEST_INT else shown(value)
        case float():
            return format_number(value)
        case None:
            return ""
        case Mapping():
            return format_metrics(value)
        case str():
            return value
        case Sequence():
            return ", ".join(map(format_cell, value))
        case _:
            return str(value)


def format_metrics(metrics: Mapping[str, object]) -> str:
    """Return metrics on one line: `loss 0.02041, accuracy 0.9931`."""
    return ", ".join(f"{name} {format_cell(value)}" for name, value in flat(metrics).items())


def _trimmed(digits: str) -> str:
    return digits.rstrip("0").rstrip(".") if "." in digits else digits
