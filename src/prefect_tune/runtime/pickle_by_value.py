"""Pickle what a script or a notebook defines, by value: a trial's process cannot import its `__main__`.

cloudpickle does so for functions and classes. Here are the other objects that `pickle` stores as a name to import
(cached functions, types of `typing`), and those that a script's functions often refer to and that hold nothing but
their process's own state (locks, weak dictionaries). What cannot be sent is an error that names it.
"""

from __future__ import annotations

import functools
import gc
import io
import pickle
import queue
import sys
import threading
import typing
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from operator import attrgetter
from types import CodeType, FunctionType, MethodType, ModuleType, new_class
from typing import Any

import cloudpickle

_Cached = functools._lru_cache_wrapper  # noqa: SLF001 - it has no public name
_Lock, _RLock = type(threading.Lock()), type(threading.RLock())


def pickle_by_value(thing: object) -> bytes:
    """Return a pickle of `thing`, and of the names of what it uses of `__main__`; see `load_by_value`.

    Raises:
        Exception: of any class, if it cannot be pickled; see `find_unpicklable`.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump((thing, pickler.names))  # the names are pickled last, when all of them are known
    return file.getvalue()


def load_by_value(content: bytes) -> tuple[object, dict[str, object]]:
    """Return the object, and the functions and classes of the `__main__` in which it was pickled, by name."""
    thing, names = cloudpickle.loads(content)
    return thing, names


def _reduces_itself(kind: type) -> bool:
    """Whether a class of the script says how `pickle` stores its objects: maybe as names."""
    defined = {name for base in kind.__mro__[:-1] for name in vars(base)}
    return kind.__module__ == "__main__" and not defined.isdisjoint(("__reduce__", "__reduce_ex__"))


def _name_of(thing: object) -> str:
    return str(getattr(thing, "__qualname__", None) or getattr(thing, "__name__", ""))


def _is_importable(thing: object) -> bool:
    """Whether another process finds this very object by its name; not what `__main__` defines."""
    module = getattr(thing, "__module__", None)
    try:
        return module != "__main__" and attrgetter(_name_of(thing))(sys.modules[str(module)]) is thing
    except (AttributeError, KeyError):
        return False


def _reduce_code(code: CodeType) -> tuple[object, ...]:
    """Keep the file of code, for tracebacks: cloudpickle 3.1.3 names none."""
    make, arguments = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return make, tuple(code.co_filename if argument == "<dynamic-code>" else argument for argument in arguments)


def _reduce_cached(cached: Any) -> object:
    """Send a function with `functools.cache` or `lru_cache` with an empty cache."""
    if _is_importable(cached):
        return _name_of(cached)
    if not any(referent is cached.__wrapped__ for referent in gc.get_referents(cached)):
        raise pickle.PicklingError("functools.update_wrapper has replaced the function that it caches")
    own = {name: value for name, value in vars(cached).items() if name not in ("__wrapped__", "cache_parameters")}
    return _make_cached, (cached.__wrapped__, cached.cache_parameters()), own


def _make_cached(function: Callable[..., object], parameters: Mapping[str, Any]) -> object:
    return functools.lru_cache(**parameters)(function)


def _reduce_new_type(new_type: typing.NewType) -> object:
    if _is_importable(new_type):
        return _name_of(new_type)
    return typing.NewType, (new_type.__name__, new_type.__supertype__), vars(new_type)


def _reduce_parameter(parameter: Any) -> object:
    """Send a `ParamSpec` or `TypeVarTuple`; no program reads more than its name."""
    return _name_of(parameter) if _is_importable(parameter) else (type(parameter), (parameter.__name__,))


def _reduce_typed_dict(kind: Any) -> object:
    bases = [base for base in getattr(kind, "__orig_bases__", ()) if typing.get_origin(base) is typing.Generic]
    annotations = {
        "__annotations__": dict(kind.__annotations__),
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
    }
    keys = {name: value for name, value in vars(kind).items() if name.endswith("_keys__")}
    return _make_typed_dict, (kind.__name__, kind.__qualname__, bases, kind.__total__, annotations, keys)


def _make_typed_dict(
    name: str,
    qualified_name: str,
    bases: list[object],
    total: bool,  # noqa: FBT001 - as TypedDict takes it
    namespace: Mapping[str, object],
    keys: Mapping[str, object],
) -> object:
    kind = new_class(name, (typing.TypedDict, *bases), {"total": total}, lambda body: body.update(namespace))
    for attribute, value in {**keys, "__qualname__": qualified_name}.items():
        setattr(kind, attribute, value)
    return kind


def _reduce_weak_dictionary(weak: Any) -> object:
    return type(weak), (), None, None, iter([*weak.items()])


_REDUCERS: Mapping[type, Callable[[Any], object]] = {
    CodeType: _reduce_code,
    _Cached: _reduce_cached,
    typing.NewType: _reduce_new_type,
    typing.ParamSpec: _reduce_parameter,
    typing.TypeVarTuple: _reduce_parameter,
    weakref.WeakKeyDictionary: _reduce_weak_dictionary,
    weakref.WeakValueDictionary: _reduce_weak_dictionary,
    _Lock: lambda _: (threading.Lock, ()),
    _RLock: lambda _: (threading.RLock, ()),
}
_OF_THREADS = (
    *(threading.Thread, threading.Event, threading.Condition, threading.Semaphore, threading.Barrier),
    *(queue.Queue, queue.SimpleQueue),
)
_NAMED = (type, FunctionType, _Cached, typing.NewType, typing.ParamSpec, typing.TypeVarTuple, typing.TypeVar)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    dispatch_table: Mapping[type, Any] = ChainMap({**_REDUCERS}, cloudpickle.Pickler.dispatch_table)

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.names: dict[str, object] = {}

    def reducer_override(self, thing: Any) -> Any:
        kind = type(thing)
        if issubclass(kind, _NAMED) and thing.__module__ == "__main__":
            name = _name_of(thing)
            if getattr(sys.modules["__main__"], name, None) is thing:
                self.names[name] = thing
        if issubclass(kind, _OF_THREADS):
            raise pickle.PicklingError("it is for the threads of one process, and each trial is another")
        if thing is sys.modules["__main__"]:
            raise pickle.PicklingError("another process has another __main__")
        if issubclass(kind, type) and typing.is_typeddict(thing) and not _is_importable(thing):
            return _reduce_typed_dict(thing)
        if kind in self.dispatch_table or issubclass(kind, type) or not _reduces_itself(kind):
            return super().reducer_override(thing)
        if isinstance(reduced := thing.__reduce_ex__(pickle.HIGHEST_PROTOCOL), str) and not _is_importable(thing):
            raise pickle.PicklingError(f"its pickle is the name {reduced!r} in {thing.__module__}")
        return reduced


def find_unpicklable(thing: object) -> tuple[str, object]:
    """Return the innermost part of `thing` that cannot be pickled: its name, as `'lock' in 'data'`, and itself.

    The name is empty if it is `thing` itself.
    """
    names: list[str] = []
    seen: set[int] = set()
    part: tuple[str, object] | None = ("", thing)
    while part is not None:
        thing = part[1]
        seen.add(id(thing))
        names += [repr(part[0])] if part[0] else []
        part = next((each for each in _parts(thing) if id(each[1]) not in seen and not _is_picklable(each[1])), None)
    return " in ".join(reversed(names)), thing


def _is_picklable(thing: object) -> bool:
    try:
        pickle_by_value(thing)
    except Exception:  # noqa: BLE001 - a user's `__reduce__` may raise anything
        return False
    return True


def _parts(thing: Any) -> Iterator[tuple[str, object]]:
    """Yield the name and the value of each part of `thing` that a pickle of it contains."""
    match thing:
        case _ if isinstance(thing, _OF_THREADS):
            return
        case functools.partial():
            yield from [(_name_of(thing.func), thing.func), *_numbered(thing.args), *thing.keywords.items()]
        case MethodType():
            yield from [(thing.__name__, thing.__func__), ("self", thing.__self__)]
        case FunctionType():
            yield from (
                (name, thing.__globals__[name]) for name in _names_in(thing.__code__) & thing.__globals__.keys()
            )
            cells = zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True)
            for name, cell in cells:
                with suppress(ValueError):  # the variable has no value yet
                    yield name, cell.cell_contents
            yield from [*_numbered(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).items()]
        case ModuleType():
            pass
        case staticmethod() | classmethod() | _Cached():
            yield _name_of(thing), thing.__wrapped__
        case property():
            yield from ((_name_of(part), part) for part in (thing.fget, thing.fset, thing.fdel) if part is not None)
        case dict():
            yield from ((str(name), value) for name, value in thing.items())
        case list() | tuple() | set() | frozenset():
            yield from _numbered(thing)
        case type():
            yield from [*vars(thing).items(), *((base.__name__, base) for base in thing.__bases__)]
        case _:
            yield from getattr(thing, "__dict__", {}).items()
            yield type(thing).__name__, type(thing)


def _numbered(items: Iterable[object]) -> Iterator[tuple[str, object]]:
    return ((f"[{number}]", item) for number, item in enumerate(items))


def _names_in(code: CodeType) -> set[str]:
    """Return the names that code uses, also in the functions that it defines."""
    return {*code.co_names}.union(*(_names_in(part) for part in code.co_consts if isinstance(part, CodeType)))
