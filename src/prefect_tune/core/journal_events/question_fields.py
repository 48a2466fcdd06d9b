"""Questions to a person: a form of simple fields, each with a default or with choices, and its validation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.numbers import is_finite, is_number, shown
from prefect_tune.core.texts import is_unicode

__all__ = ["GO_ON", "Scalar", "answer_to", "default_of", "valid_fields"]

Scalar: TypeAlias = bool | int | float | str
GO_ON: Mapping[str, object] = {"go_on": True}
"""The fields of a question that has none of its own."""
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


def valid_fields(fields: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of a question as JSON, after validating them.

    Raises:
        InvalidInput: there is no field, or a field's default is no truth value, number, text or list of texts.
    """
    if not fields:
        raise InvalidInput("fields: a question needs one, such as {'go_on': True}")
    return {name: _valid(name, value) for name, value in fields.items()}


def _valid(name: object, value: object) -> object:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidInput(f"fields: {name!r}: expected a name made of letters, digits and underscores")
    if isinstance(value, list | tuple):
        if value and all(isinstance(each, str) and is_unicode(each) for each in value):
            return list(value)
    elif isinstance(value, Scalar) and (is_unicode(value) if isinstance(value, str) else is_finite(value)):
        return value
    raise InvalidInput(
        f"fields: {name!r}: expected its default (a truth value, a number, a text) or a list of texts to choose from, "
        f"found {shown(value)}"
    )


def default_of(field: object) -> Scalar:
    """Return the value of a field that is left unanswered."""
    if isinstance(field, Sequence) and not isinstance(field, str):
        return str(field[0])
    return field if isinstance(field, Scalar) else str(field)


def answer_to(fields: Mapping[str, object], given: Mapping[str, object]) -> dict[str, Scalar]:
    """Return an answer whose every field has a value.

    Raises:
        InvalidInput: `given` has a field that the question lacks, or a value that its field cannot have.
    """
    if unknown := sorted(set(given) - set(fields)):
        raise InvalidInput(f"{', '.join(unknown)}: unknown field; the fields are {', '.join(fields)}")
    return {name: _answered(name, field, given.get(name)) for name, field in fields.items()}


def _answered(name: str, field: object, given: object) -> Scalar:
    default = default_of(field)
    if given is None:
        return default
    if isinstance(field, Sequence) and not isinstance(field, str):
        if given in field:
            return str(given)
        raise InvalidInput(f"{name}: expected one of {', '.join(map(str, field))}, found {given!r}")
    kind = type(default)
    if kind is float and is_number(given):
        return float(given)
    if isinstance(given, Scalar) and type(given) is kind and (isinstance(given, str) or is_finite(given)):
        return given
    raise InvalidInput(f"{name}: expected {_KINDS[kind]}, found {shown(given)}")


_KINDS: Mapping[type, str] = {bool: "yes or no", int: "a whole number", float: "a number", str: "a text"}
