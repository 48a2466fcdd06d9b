"""What a value is in every process, as a digest: by it, a retry finds what an earlier try of its flow has called.

Of an object that is no plain value only the type counts: its pickle may differ in each process.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from enum import Enum
from inspect import isroutine
from numbers import Number
from pathlib import PurePath
from types import CellType, FunctionType, MethodType
from typing import Any

from pydantic import BaseModel

from prefect_tune.core.values import digest_of


def stable_digest(value: object) -> str:
    """Return a digest that is equal for an equal value in another process; different values may have one digest."""
    return digest_of(_form(value, ()).encode())[:16]


def _form(value: Any, within: tuple[object, ...]) -> str:
    def together(*parts: object) -> str:
        return f"({','.join(_form(part, (*within, value)) for part in parts)})"

    if any(value is outer for outer in within):  # the class of a method, in a cell of it
        return ""
    match value:
        case None | Number() | bytes():
            return repr(value)
        case str() | PurePath():
            name, folder = str(value), f"{tempfile.gettempdir()}{os.sep}"
            # Each start gets another folder for its temporary files.
            return repr(name.removeprefix(folder).partition(os.sep)[2] if name.startswith(folder) else name)
        case dict():
            return f"{{{','.join(sorted(together(*item) for item in value.items()))}}}"
        case set() | frozenset():
            return f"{{{','.join(sorted(map(together, value)))}}}"
        case list() | tuple():
            return together(*value)
        case _:
            named = value if isinstance(value, type) or isroutine(value) else type(value)
            return str(named.__qualname__) + together(*_parts_of(value))


def _parts_of(value: Any) -> Iterable[object]:
    """Return what tells a value apart from others of its name or type."""
    match value:
        case functools.partial():
            return [value.func, value.args, value.keywords]
        case MethodType():
            return [value.__self__, value.__func__]
        case FunctionType() | type() if "<locals>" not in value.__qualname__:
            return []  # its code may be edited before a retry
        case FunctionType():
            return [*_cells_of(value), value.__defaults__, value.__kwdefaults__]
        case type():
            held = {name: _cells_of(part) or part for name, part in vars(value).items() if _is_held(name, part)}
            return [held, value.__bases__]
        case Enum():
            return [value.name]
        case BaseModel():
            return [vars(value)]
        case _:
            return [getattr(value, field.name) for field in fields(value)] if is_dataclass(value) else []


def _cells_of(function: object) -> list[object]:
    """Return the values of the variables of outer functions that a function uses."""
    cells: tuple[CellType, ...] = getattr(function, "__closure__", None) or ()
    return [cell.cell_contents for cell in cells if cell != CellType()]


def _is_held(name: str, part: object) -> bool:
    return bool(_cells_of(part)) if isinstance(part, FunctionType) else not name.startswith("_")
