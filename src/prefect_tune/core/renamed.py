"""Reject earlier names of public methods, attributes and functions; the error names the new name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar


class RenamedMembers:
    """A class with renamed members. A subclass that defines an old name, and code that reads one, get an error."""

    __slots__ = ()
    _renamed: ClassVar[Mapping[str, str]] = {}
    """The new names by the old names."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for old, new in cls._renamed.items():
            if callable(member := getattr(cls, old, None)) or isinstance(member, property):
                raise TypeError(f"{cls.__qualname__}.{old} is now called {new}")

    if not TYPE_CHECKING:  # a type checker would accept any attribute

        def __getattr__(self, name: str) -> Any:
            if new := type(self)._renamed.get(name):  # noqa: SLF001  of its own class
                raise AttributeError(f"{type(self).__qualname__}.{name} is now called {new}")
            return super().__getattr__(name) if hasattr(super(), "__getattr__") else object.__getattribute__(self, name)


def make_module_getattr(module: str, renamed: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module's `__getattr__`. For a function's old name in `renamed`, its error names the new name."""

    def get_attribute(name: str) -> Any:
        if new := renamed.get(name):
            raise ImportError(f"{module}.{name} is now called {new}")  # an AttributeError would lose its message
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return get_attribute
