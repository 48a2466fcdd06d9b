"""Convert metrics and other values from outside to plain JSON, or reject them.

A scalar is None, a bool, a number or a text. Its type is Python's own, a subclass of it (`class Kind(str, Enum)`), or
another type of number (NumPy's types, `Fraction`). An array or tensor without dimensions is a scalar, too. Scalars are
converted to Python's own types. A `Path`, a date, a `Decimal` or a member of a plain `Enum` is not a JSON value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableSequence, Sequence
from dataclasses import fields
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, TypeGuard

from prefect_tune.core.display_text import is_utf8_encodable
from prefect_tune.core.errors import BadMetric, InvalidInput

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_MAX_DEPTH = 100  # JSON readers fail at about 200 levels
_TIME_KINDS = ("m", "M")  # NumPy's durations and dates are not scalars here: their `item` may return an integer


def to_plain_scalar(value: object) -> object:
    """Return a scalar (see above) as None or Python's own bool, int, float or str; return any other value unchanged."""
    match value:
        case str():
            return str.__str__(value)  # for an enum member, `str(value)` would return a text such as 'Kind.LINEAR'
        case bool():
            return value
        case int():
            return int.__int__(value)
        case float():
            return float.__float__(value)
        case _ if isinstance(value, type) or _has_time_dtype(value):
            return value
        case _:
            pass
    shape, item = getattr(value, "shape", None), None if _is_masked_element(value) else getattr(value, "item", None)
    if isinstance(shape, tuple) and not shape and callable(item) and type(element := item()) is not type(value):
        return to_plain_scalar(element)  # not for a NumPy long double: its `item` returns a long double again
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) and is_finite(value) else value


def _has_time_dtype(value: object) -> bool:
    return getattr(getattr(value, "dtype", None), "kind", None) in _TIME_KINDS


def _is_masked_element(value: object) -> bool:
    """Return whether `value` is a masked NumPy element: it has no value, although `item` returns 0.0 or hidden data."""
    mask = getattr(value, "mask", False)
    return getattr(mask, "size", 0) == 1 and bool(mask)


def to_plain_keys(values: Mapping[Any, Any], where: str, error: type[InvalidInput] = InvalidInput) -> dict[Any, Any]:
    """Return `values` with its keys as plain scalars; raise `error` if the conversion makes two keys equal."""
    plain = {to_plain_scalar(key): value for key, value in values.items()}
    if len(plain) < len(values):
        raise error(f"{where}: expected unique keys, found keys that are equal as text: {short_repr(list(values))}")
    return plain


def convert_scalar_fields(options: DataclassInstance) -> None:
    """Convert the scalar fields of a frozen dataclass to plain scalars. Call this first in `__post_init__`."""
    for field in fields(options):
        object.__setattr__(options, field.name, to_plain_scalar(getattr(options, field.name)))


def to_plain_metrics(value: Mapping[str, object], where: str) -> dict[str, object]:
    """Return `value` as plain JSON: scalars of NumPy, PyTorch and similar libraries become Python numbers.

    Raises:
        BadMetric: a metric cannot be stored; the message names the metric and `where`.
    """
    return _convert_mapping(value, where, _MAX_DEPTH)


def average_metrics(metrics_by_rank: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Return the metrics of the first rank, in which each number that all ranks report is replaced by the mean."""
    return {name: _average_values([metrics.get(name) for metrics in metrics_by_rank]) for name in metrics_by_rank[0]}


def _average_values(values: Sequence[object]) -> object:
    if mappings := [value for value in values if isinstance(value, Mapping)]:
        return average_metrics(mappings) if len(mappings) == len(values) else values[0]
    numbers = [value for value in values if is_number(value)]
    if len(numbers) < len(values) or len(set(numbers)) == 1:
        return values[0]
    return math.fsum(value / len(numbers) for value in numbers)


def _convert_mapping(value: Mapping[str, object], where: str, levels: int) -> dict[str, object]:
    if not isinstance(value, Mapping):
        raise BadMetric(f"{where}: expected a dict of metrics, like {{'loss': value}}, found {type(value).__name__}")
    plain: dict[str, object] = {}
    for name, metric in to_plain_keys(value, where, BadMetric).items():
        if not isinstance(name, str):
            raise BadMetric(f"{where}: expected names of type str, found {name!r}")
        plain[_require_unicode(name, where)] = _convert_value(metric, f"{where}: {name!r}", levels - 1)
    return plain


def _convert_value(value: object, where: str, levels: int) -> object:
    value = to_plain_scalar(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _require_unicode(value, where)
    if isinstance(value, int | float):
        if is_finite(value):
            return value
        raise BadMetric(
            f"{where}: found {short_repr(value)}; training has diverged, or the metric divides by zero. "
            "To count the trial as bad, report a bad finite value, such as 1e9 for a loss, and return"
        )
    if levels <= 0:
        raise BadMetric(f"{where[:200]}…: expected at most {_MAX_DEPTH} levels, found more; save it in the checkpoint")
    if isinstance(value, Mapping):
        return _convert_mapping(value, where, levels)
    if isinstance(value, MutableSequence | tuple) and not isinstance(value, bytearray):
        return [_convert_value(element, f"{where}[{index}]", levels - 1) for index, element in enumerate(value)]
    item = None if _has_time_dtype(value) or _is_masked_element(value) else getattr(value, "item", None)
    if callable(item) and _count_elements(value) == 1 and type(plain := item()) is not type(value):
        return _convert_value(plain, where, levels - 1)  # a loss of shape (1,) counts as a number
    raise BadMetric(
        f"{where}: expected a finite number, text, or JSON made of these, found {type(value).__name__}; "
        "convert it (float(x), x.tolist()), or save it in the checkpoint"
    )


def _count_elements(value: object) -> object:
    """Return the number of elements: `size` in NumPy; `numel()` in PyTorch, where `size()` is the shape."""
    count = getattr(value, "numel", None)
    return count() if callable(count) else getattr(value, "size", 1)


def _require_unicode(value: str, where: str) -> str:
    if is_utf8_encodable(value):
        return value
    raise BadMetric(f"{where}: expected Unicode text, found {value!a}; pass ascii(x) instead")


# Check numbers from outside, and format values for messages.

_MAX_LENGTH = 80


def is_finite(number: float | Real) -> bool:
    """Return whether `number` is finite as a float; False for NaN, infinity and integers beyond the range of floats."""
    try:
        return math.isfinite(number)
    except OverflowError:
        return False


def is_number(value: object) -> TypeGuard[float]:
    """Return whether `value` converts to a number that is finite as a float; False for a bool."""
    plain = to_plain_scalar(value)
    return isinstance(plain, int | float) and not isinstance(plain, bool) and is_finite(plain)


def is_integer_at_least(value: object, at_least: int) -> bool:
    """Return whether `value` is an integer of at least `at_least`. A bool and 3.0 are no integers."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


def is_number_at_least(value: object, at_least: float) -> bool:
    """Return whether `value` is a finite number of at least `at_least`. A bool is no number."""
    return isinstance(value, int | float) and is_number(value) and at_least <= value


def describe_non_number(value: object) -> str:
    """Return what `value` is: `text`, `a list` (also for a tuple) or `a dict`; an empty text for any other value."""
    if isinstance(value, Mapping):
        return "a dict"
    return "text" if isinstance(value, str) else "a list" if isinstance(value, list | tuple) else ""


def short_repr(value: object) -> str:
    """Return the `ascii()` of a value for a message, truncated to 80 characters."""
    try:
        text = ascii(value)
    except ValueError:  # Python refuses to convert an integer of more than 4300 digits
        return f"a whole number of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= _MAX_LENGTH else f"{text[: _MAX_LENGTH - 1]}… ({len(text)} characters)"
