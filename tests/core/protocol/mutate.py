"""Break lines of the package during a test, which must detect it."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType

import pytest


def break_lines(monkeypatch: pytest.MonkeyPatch, function: FunctionType, lines: dict[str, str]) -> None:
    """Replace each key by its value in the source of `function`, wherever the function was imported."""
    function = inspect.unwrap(function)  # such as the generator of a context manager
    source = textwrap.dedent(inspect.getsource(function))
    source = source[source.index("def ") :]
    for old, new in lines.items():
        assert source.count(old) == 1, f"{function.__qualname__} does not hold {old!r} once:\n{source}"
        source = source.replace(old, new)
    names = dict(function.__globals__)  # for names in its defaults
    code = compile(f"from __future__ import annotations\n{source}", f"<broken {function.__qualname__}>", "exec")
    exec(code, names)
    broken = names[function.__name__]
    assert isinstance(broken, FunctionType)
    monkeypatch.setattr(function, "__code__", broken.__code__)


@dataclass(frozen=True)
class Mutant:
    """The check that must detect the mutation, and by function the replaced lines and their replacements."""

    finder: Callable[[], Sequence[str]]
    """Looks for broken promises, and ends with the first."""
    breaks: Mapping[Callable[..., object], dict[str, str]]

    def require_noticed(self, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]) -> None:
        for function, lines in self.breaks.items():
            assert isinstance(function, FunctionType)
            break_lines(monkeypatch, function, lines)
        problems = self.finder()
        print("->", problems[:1])
        assert problems
        record_property("figure: mutants of the package, each noticed", 1)
