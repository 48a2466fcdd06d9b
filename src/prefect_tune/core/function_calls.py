"""Check before a function of the user is called that it takes the arguments of the call."""

from __future__ import annotations

import inspect
from collections.abc import Callable

__all__ = ["other_signature"]


def other_signature(function: Callable[..., object], argument_count: int) -> str:
    """Return the name and parameters of a function that does not take this many positional arguments.

    Empty if it takes them, or if that is not known, as of some functions in C. A wrapper is judged by its own
    parameters, whatever it calls.
    """
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(*range(argument_count))
    except TypeError:
        return f"{getattr(function, '__qualname__', function)}{signature}"
    return ""
