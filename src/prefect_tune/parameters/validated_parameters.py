"""`ValidatedParameters`: the base class of the parameters of a flow or task, which are parsed and validated at once."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.models import Value


class ValidatedParameters(Value):
    """Parsed and validated parameters; the fields have the names and defaults of the parameters.

    Raises:
        InvalidInput: a parameter is invalid; the message names it.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    def __init__(self, **parameters: Any) -> None:
        invalid: Exception | None = None
        try:
            super().__init__(**parameters)
        except ValidationError as error:
            invalid = _first_cause(error)
        if invalid is not None:
            raise invalid  # outside of `except`: pydantic's error would print the values, which may be secret


def _first_cause(invalid: ValidationError) -> Exception:
    """Return the error that a validator raised; else the first of pydantic's: of values it shows only numbers."""
    first = invalid.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, Exception):
        return cause
    return InvalidInput(f"{'.'.join(map(str, first['loc']))}: {first['msg']}{_found(first)}")


def _found(error: ErrorDetails) -> str:
    return f", found {found!r}" if isinstance(found := error["input"], int | float) else ""
