"""Objects in another process: by name (`package.module:Name`), by value (a pickle), and recognized by a digest."""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import io
import os
import pickle
import queue
import sys
import tempfile
import threading
import traceback
import typing
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from enum import Enum
from numbers import Number
from operator import attrgetter
from pathlib import Path, PurePath
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import cloudpickle
from pydantic import BaseModel

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.retention import Cadence
from prefect_tune.core.values import digest_of
from prefect_tune.runtime.ranks import PROGRAM, is_program_of_trials
from prefect_tune.runtime.trainable import require_saves, require_trainable

_prepended: tuple[str, ...] = ()


def prepend_import_path(import_path: Sequence[str]) -> None:
    """Put `import_path` before the other entries of `sys.path`; once, since modules may change `sys.path` then."""
    global _prepended  # noqa: PLW0603 - of the process, as `sys.path`
    if tuple(import_path) != _prepended:
        _prepended = tuple(import_path)
        sys.path[:] = [*import_path, *(entry for entry in sys.path if entry not in import_path)]


def load_named(name: str, parameter: str = "trainable") -> object:
    """Return the object at `package.module:Name`, or, if there is no colon, unpickle the hexadecimal text.

    Args:
        name: the name, or the text.
        parameter: the parameter that names it, for messages.

    Raises:
        InvalidInput: the module cannot be imported or has no such name, or the text cannot be unpickled here.
    """
    module, _, attribute = name.partition(":")
    if not attribute:
        return _unpickle(name, parameter)[0]
    process, before = os.getpid(), _importing.set(module)
    try:
        found: object = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        if os.getpid() != process:  # a fork that the module has made ends as it likes
            raise
        raise InvalidInput(
            f"{parameter} {name!r}: module {module!r} cannot be imported: {import_advice(error)}"
        ) from error
    finally:
        _importing.reset(before)
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise InvalidInput(f"{parameter} {name!r}: {_lacks(found, part)}") from error
    return found


_importing: ContextVar[str] = ContextVar("prefect_tune_importing", default="")


def require_not_importing(flow: str) -> None:
    """Refuse a flow that the import of a trainable's module calls: each of its trials would import it again.

    Raises:
        InvalidInput: a module is being imported by its name.
    """
    if module := _importing.get():
        raise InvalidInput(
            f"{flow}: the import of module {module!r} calls it, which would start itself again in each trial. Call it "
            "only under `if __name__ == '__main__':`"
        )


def _unpickle(text: str, parameter: str) -> tuple[object, dict[str, object]]:
    """Return the object, and the functions and classes of the `__main__` in which it was pickled, by name."""
    process = os.getpid()
    try:
        thing, names = cloudpickle.loads(bytes.fromhex(text))
    except (Exception, SystemExit) as error:  # it imports modules, which may raise anything
        if os.getpid() != process:  # as in `load_named`
            raise
        is_of_import = isinstance(error, ImportError | AttributeError | SystemExit)
        why = import_advice(error) if is_of_import else f"{type(error).__name__}: {error}"
        version = ".".join(map(str, sys.version_info[:3]))
        raise InvalidInput(f"{parameter}: its pickle cannot be loaded by Python {version}: {why}") from error
    return thing, names


def import_path_of(thing: object) -> str | None:
    """Return the `package.module:Name` by which a new process imports this class or function; None if there is none.

    It has none if `__main__`, a notebook's cell or the body of a function defines it, if it is a lambda, if its name
    leads to another object, or if its module would be imported from another file.
    """
    module = getattr(thing, "__module__", None)
    if not _is_importable(thing) or not isinstance(module, str) or not _is_found_again(module):
        return None
    return f"{module}:{_name_of(thing)}"


def _is_found_again(module: str) -> bool:
    """Whether an import that does not use `sys.modules` finds the same file."""
    package = module.rpartition(".")[0]
    if package and not (hasattr(sys.modules.get(package), "__path__") and _is_found_again(package)):
        return False
    path = sys.modules[package].__path__ if package else None
    specs = (finder.find_spec(module, path) for finder in sys.meta_path if hasattr(finder, "find_spec"))
    known, found = sys.modules[module].__spec__, next((each for each in specs if each is not None), None)
    return known is not None and found is not None and known.origin == found.origin


def load_trainable(name: str) -> object:
    """Return what `load_named` does, checked to be a trainable.

    In a trial's process, what a script or a notebook has defined is in its `__main__` then, so that it can be pickled.

    Raises:
        InvalidInput: it cannot be loaded, or is neither a function nor a subclass of `Trainable` with `step`.
    """
    if ":" in name:
        return require_trainable(load_named(name), name)
    trainable, names = _unpickle(name, "trainable")
    require_trainable(trainable, name)
    if is_program_of_trials() and (defined := _globals_of_script(trainable) | names):
        main = ModuleType("__main__")
        main.__dict__.update({**defined, "__spec__": PROGRAM.__spec__})  # which `multiprocessing` runs in a new process
        sys.modules["__main__"] = main
    return trainable


def _globals_of_script(trainable: object) -> dict[str, object]:
    """Return the global variables, of the script or notebook that defined it, that a pickled trainable uses."""
    kind = trainable if isinstance(trainable, type) else type(trainable)
    methods = (each for base in kind.__mro__ for each in vars(base).values())
    parts = [inspect.unwrap(each) for each in (trainable, getattr(trainable, "func", None), *methods) if callable(each)]
    functions = [each for each in parts if isinstance(each, FunctionType) and each.__module__ == "__main__"]
    scripts = [each.__globals__ for each in functions if each.__globals__.get("__name__") == "__main__"]
    return dict(scripts[0]) if scripts else {}  # one dictionary for all functions of a pickle


_SPAWNED = "PREFECT_TUNE_TRAINABLE"
_MOST_SPAWNED_CHARACTERS = 64 * 1024 * 1024  # what is larger costs more disk than `spawn` is worth


def offer_to_spawned(trainable: str) -> None:
    """Keep a pickled trainable in a file, for processes that the trial starts by `spawn`; see `names_for_spawned`."""
    os.environ.pop(_SPAWNED, None)  # that of an outer search
    if sys.modules["__main__"] is PROGRAM or len(trainable) > _MOST_SPAWNED_CHARACTERS:
        return
    file = tempfile.NamedTemporaryFile("w", suffix=".trainable", delete=False)  # noqa: SIM115  it outlives this call
    try:
        with file:
            file.write(trainable)
    except OSError:  # the disk is full: a cut pickle would end every spawned process
        Path(file.name).unlink(missing_ok=True)
    else:
        os.environ[_SPAWNED] = file.name


def names_for_spawned() -> dict[str, object]:
    """Return what the script of the trial that spawned this process defines, for its `__main__`.

    If that cannot be read, write why to stderr, and return nothing: the process may need none of it.
    """
    if not (file := os.environ.get(_SPAWNED)):
        return {}  # the trainable is in a module
    try:
        trainable, names = _unpickle(Path(file).read_text(encoding="ascii"), f"{_SPAWNED}={file}")
        return _globals_of_script(require_trainable(trainable, file)) | names
    except (InvalidInput, OSError, UnicodeDecodeError) as error:
        sys.stderr.write(f"prefect-tune: a spawned process lacks what the script of its trial defines: {error}\n")
        return {}


def require_loadable(config: Mapping[str, object]) -> None:
    """Load the trainable that `config` names, and train nothing: itself a function trainable, for a trial's process.

    Raises:
        InvalidInput: as `load_trainable`, and as `require_saves` if `config` has a cadence.
    """
    loaded = load_trainable(str(config["trainable"]))
    if isinstance(loaded, type) and config.get("cadence") is not None:
        require_saves(loaded, Cadence.model_validate(config["cadence"]))


def import_advice(error: BaseException) -> str:
    """Return what an import raised, at which line of a module's own code, and what to do about it."""
    lines = [each for each in traceback.extract_tb(error.__traceback__) if each.name == "<module>"]
    raised_at = f" (raised in {lines[-1].filename}, line {lines[-1].lineno})" if lines else ""
    raised = f"{type(error).__name__}: {error}{raised_at}"
    if isinstance(error, SystemExit):
        return f"{raised}. Run what may end the program only under `if __name__ == '__main__':`"
    return f"{raised}. Make it importable where it runs (working directory {working_directory()})"


def working_directory() -> str:
    """Return the working directory, for messages; it may have been removed."""
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return "that has been removed"


def _lacks(owner: object, name: str) -> str:
    """Return that `owner` has no `name`, and what it has: its own classes and functions before imported ones."""
    from prefect_tune.core.shown_text import did_you_mean_or_has, nearest

    public = [each for each in dir(owner) if not each.startswith("_")]
    found = {each: inspect.getattr_static(owner, each, None) for each in public}  # None: the module makes it on demand
    own_name = getattr(owner, "__name__", None)
    defined = [each for each, it in found.items() if callable(it) and getattr(it, "__module__", None) == own_name]
    near = nearest(name, defined) or nearest(name, public)
    what = f"module {own_name!r}" if inspect.ismodule(owner) else repr(owner)
    where = f" ({owner.__file__})" if inspect.ismodule(owner) and getattr(owner, "__file__", None) else ""
    hint = f"did you mean {near!r}?" if near else did_you_mean_or_has(name, defined)
    return f"{what}{where} has no {name!r}; {hint}"


# Pickle what a script or a notebook defines, by value: a trial's process cannot import its `__main__`.
#
# cloudpickle does so for functions and classes. Here are the other objects that `pickle` stores as a name to import
# (cached functions, types of `typing`), and those that a script's functions often refer to and that hold nothing but
# their process's own state (locks, weak dictionaries). What cannot be sent is an error that names it.

_Cached = functools._lru_cache_wrapper  # noqa: SLF001 - it has no public name
_Lock, _RLock = type(threading.Lock()), type(threading.RLock())


def pickled(thing: object) -> str:
    """Return a pickle of `thing`, and of the names of what it uses of `__main__`, as the text that `load_named` takes.

    Raises:
        Exception: of any class, if it cannot be pickled; see `find_unpicklable`.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump((thing, pickler.names))  # the names are pickled last, when all of them are known
    return file.getvalue().hex()


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


_REDUCERS: Mapping[type, Callable[[Any], object]] = {
    CodeType: _reduce_code,
    _Cached: _reduce_cached,
    typing.NewType: _reduce_new_type,
    typing.ParamSpec: _reduce_parameter,
    typing.TypeVarTuple: _reduce_parameter,
    **dict.fromkeys(
        (weakref.WeakKeyDictionary, weakref.WeakValueDictionary),
        lambda weak: (type(weak), (), None, None, iter([*weak.items()])),
    ),
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
        own = {name for base in kind.__mro__[:-1] for name in vars(base)} if kind.__module__ == "__main__" else set()
        reduces_itself = not own.isdisjoint(("__reduce__", "__reduce_ex__"))  # maybe to a name
        if kind in self.dispatch_table or issubclass(kind, type) or not reduces_itself:
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
        pickled(thing)
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


# What a value is in every process, as a digest: by it, a retry finds what an earlier try of its flow has called.
#
# Of an object that is no plain value only the type counts: its pickle may differ in each process.


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
            named = value if isinstance(value, type) or inspect.isroutine(value) else type(value)
            return str(named.__qualname__) + together(*_parts_that_count(value))


def _parts_that_count(value: Any) -> Iterable[object]:
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
