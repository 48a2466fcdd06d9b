"""Break lines of the package for the length of a test."""

from __future__ import annotations

import inspect
import textwrap
from types import FunctionType

import pytest

__all__ = ["break_lines"]


def break_lines(monkeypatch: pytest.MonkeyPatch, function: FunctionType, lines: dict[str, str]) -> None:
    """Have `function`, wherever it was imported to, run as if each key in its source were its value."""
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in lines.items():
        assert source.count(old) == 1, f"{function.__qualname__} does not hold {old!r} once:\n{source}"
        source = source.replace(old, new)
    names = dict(function.__globals__)  # for what its defaults name
    code = compile(f"from __future__ import annotations\n{source}", f"<broken {function.__qualname__}>", "exec")
    exec(code, names)
    broken = names[function.__name__]
    assert isinstance(broken, FunctionType)
    monkeypatch.setattr(function, "__code__", broken.__code__)
