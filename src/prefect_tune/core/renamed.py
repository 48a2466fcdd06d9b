"""Reject the old names of public methods, attributes and functions with an error that tells the new name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar


class RenamedMembers:
    """Base class of classes with renamed members. Defining an old name in a subclass is an error; so is reading it."""

    __slots__ = ()
    _renamed: ClassVar[Mapping[str, str]] = {}
    """The new name of each old name."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for old, new in cls._renamed.items():
            if callable(member := getattr(cls, old, None)) or isinstance(member, property):
                raise TypeError(f"{cls.__qualname__}.{old} is now called {new}")

    if not TYPE_CHECKING:  # a type checker that sees this method would accept any attribute

        def __getattr__(self, name: str) -> Any:
            if new := type(self)._renamed.get(name):  # noqa: SLF001  of its own class
                raise AttributeError(f"{type(self).__qualname__}.{name} is now called {new}")
            return super().__getattr__(name) if hasattr(super(), "__getattr__") else object.__getattribute__(self, name)


def make_module_getattr(module: str, renamed: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for `module` that raises an error with the new name for each old name in `renamed`."""

    def get_attribute(name: str) -> Any:
        if new := renamed.get(name):
            raise ImportError(f"{module}.{name} is now called {new}")  # imports hide the message of an AttributeError
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return get_attribute
