"""The rule by which values and numbers from outside are taken: by value as plain JSON, or refused. And metrics by it.

A scalar is None, a truth value, a number or a text: Python's own, of a class derived from one of them (`class Kind(str,
Enum)`), of Python's numeric tower (NumPy's, a `Fraction`), or the element of an array or tensor without dimensions. It
becomes the value of Python's own type. A `Path`, a date, a `Decimal` or a member of a plain `Enum` is no JSON value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableSequence, Sequence
from dataclasses import fields
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, TypeGuard

from prefect_tune.core.errors import BadMetric, InvalidInput
from prefect_tune.core.shown_text import is_unicode

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_DEEPEST = 100  # readers of JSON stop at about 200
_TIMES = ("m", "M")  # NumPy's kinds of a duration and a date: of nanoseconds, `item` returns them as bare integers


def plain_scalar(value: object) -> object:
    """Return a scalar (see above) as None or an exact bool, int, float or str; any other value as it is."""
    match value:
        case str():
            return str.__str__(value)  # `str(value)` calls a method of its class: 'Kind.LINEAR' for a member of an enum
        case bool():
            return value
        case int():
            return int.__int__(value)
        case float():
            return float.__float__(value)
        case _ if isinstance(value, type) or _is_time(value):
            return value
        case _:
            return _number_of(value)


def _number_of(value: object) -> object:
    shape, item = getattr(value, "shape", None), None if _is_masked(value) else getattr(value, "item", None)
    if isinstance(shape, tuple) and not shape and callable(item) and type(element := item()) is not type(value):
        return plain_scalar(element)  # `item` of a NumPy long double returns the same object
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) and is_finite(value) else value


def _is_time(value: object) -> bool:
    return getattr(getattr(value, "dtype", None), "kind", None) in _TIMES


def _is_masked(value: object) -> bool:
    """Return whether it is a masked element of NumPy, for which `item` returns 0.0 or the value that is masked."""
    mask = getattr(value, "mask", False)
    return getattr(mask, "size", 0) == 1 and bool(mask)


def plain_keys(values: Mapping[Any, Any], where: str, error: type[InvalidInput] = InvalidInput) -> dict[Any, Any]:
    """Return `values` with each key as a plain scalar, or raise `error` if two keys are then equal."""
    plain = {plain_scalar(key): value for key, value in values.items()}
    if len(plain) < len(values):
        raise error(f"{where}: expected each key once, found some that are equal as text: {shown(list(values))}")
    return plain


def convert_fields(options: DataclassInstance) -> None:
    """Convert each field of a frozen dataclass that is a scalar: called first in its `__post_init__`."""
    for each in fields(options):
        object.__setattr__(options, each.name, plain_scalar(getattr(options, each.name)))


def storable(value: Mapping[str, object], where: str) -> dict[str, object]:
    """Return `value` as plain JSON: scalars of NumPy, PyTorch and the like become Python numbers.

    Raises:
        BadMetric: a value cannot be stored; the message names it and its place.
    """
    return _mapping(value, where, _DEEPEST)


def mean_of(ranks: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Return the metrics of the first rank, with the mean in place of each number that all ranks have."""
    return {name: _mean([each.get(name) for each in ranks]) for name in ranks[0]}


def _mean(values: Sequence[object]) -> object:
    if mappings := [each for each in values if isinstance(each, Mapping)]:
        return mean_of(mappings) if len(mappings) == len(values) else values[0]
    numbers = [each for each in values if is_number(each)]
    if len(numbers) < len(values) or len(set(numbers)) == 1:
        return values[0]
    return math.fsum(each / len(numbers) for each in numbers)


def _mapping(value: Mapping[str, object], where: str, levels: int) -> dict[str, object]:
    if not isinstance(value, Mapping):
        raise BadMetric(
            f"{where}: expected a dict of metrics, found {type(value).__name__}; give it a name: {{'loss': value}}"
        )
    plain: dict[str, object] = {}
    for name, each in plain_keys(value, where, BadMetric).items():
        if not isinstance(name, str):
            raise BadMetric(f"{where}: expected names of type str, found {name!r}")
        plain[_text(name, where)] = _plain(each, f"{where}: {name!r}", levels - 1)
    return plain


def _plain(value: object, where: str, levels: int) -> object:
    value = plain_scalar(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value, where)
    if isinstance(value, int | float):
        if is_finite(value):
            return value
        raise BadMetric(
            f"{where}: found {shown(value)}; training has diverged, or the metric divides by zero. "
            "For a trial that counts as a bad one: report a bad finite value, such as 1e9 for a loss, and return"
        )
    if levels <= 0:
        raise BadMetric(f"{where[:200]}…: expected at most {_DEEPEST} levels, found more; save it in the checkpoint")
    if isinstance(value, Mapping):
        return _mapping(value, where, levels)
    if isinstance(value, MutableSequence | tuple) and not isinstance(value, bytearray):
        return [_plain(each, f"{where}[{index}]", levels - 1) for index, each in enumerate(value)]
    item = None if _is_time(value) or _is_masked(value) else getattr(value, "item", None)
    if callable(item) and _element_count(value) == 1 and type(plain := item()) is not type(value):
        return _plain(plain, where, levels - 1)  # a loss of shape (1,) is a number
    raise BadMetric(
        f"{where}: expected a finite number, text, or JSON made of these, found {type(value).__name__}; "
        "convert it (float(x), x.tolist()), or save it in the checkpoint"
    )


def _element_count(value: object) -> object:
    """Return the number of elements: NumPy has it as `size`; PyTorch's `size` is a method for the shape."""
    count = getattr(value, "numel", None)
    return count() if callable(count) else getattr(value, "size", 1)


def _text(value: str, where: str) -> str:
    if is_unicode(value):
        return value
    raise BadMetric(f"{where}: expected Unicode text, found {value!a}; write ascii(x)")


# Numbers from outside: whether a float can hold them, and how a message shows them.

_SHOWN = 80


def is_finite(number: float | Real) -> bool:
    """Return whether `number` is finite as a float: no NaN, no infinity, no integer beyond a float's range."""
    try:
        return math.isfinite(number)
    except OverflowError:
        return False


def is_number(value: object) -> TypeGuard[float]:
    """Return whether `value` is by value a number that is finite as a float; False for True and False."""
    plain = plain_scalar(value)
    return isinstance(plain, int | float) and not isinstance(plain, bool) and is_finite(plain)


def is_count(value: object, at_least: int) -> bool:
    """Return whether `value` is an integer of `at_least`; False for True and 3.0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


def is_at_least(value: object, at_least: float) -> bool:
    """Return whether `value` is a finite number of `at_least`; False for True."""
    return isinstance(value, int | float) and is_number(value) and at_least <= value


def kind_unless_number(value: object) -> str:
    """Return what was reported in place of a number: `text`, `a list` or `a dict`; empty for a number and None."""
    if isinstance(value, Mapping):
        return "a dict"
    return "text" if isinstance(value, str) else "a list" if isinstance(value, list | tuple) else ""


def shown(value: object) -> str:
    """Return `value` for a message, in ASCII, cut to 80 characters."""
    try:
        text = ascii(value)
    except ValueError:  # Python refuses to convert an integer of more than 4300 digits
        return f"a whole number of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}… ({len(text)} characters)"
