"""The exit code and output of a call of the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Done:
    code: object
    out: str
    err: str


Run = Callable[..., Done]
