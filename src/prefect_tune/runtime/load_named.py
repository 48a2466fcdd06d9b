"""Send objects to other processes by name (`package.module:Name`) or value (a pickle), and compute object digests."""

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
from prefect_tune.core.values import hash_bytes
from prefect_tune.runtime.ranks import INITIAL_MAIN_MODULE, is_trial_program
from prefect_tune.runtime.trainable import require_save_checkpoint, require_trainable

_prepended_path: tuple[str, ...] = ()


def prepend_import_path(import_path: Sequence[str]) -> None:
    """Put `import_path` first in `sys.path`, unless the last call did so: modules may have changed the path since."""
    global _prepended_path  # noqa: PLW0603 - of the process, like `sys.path`
    if tuple(import_path) != _prepended_path:
        _prepended_path = tuple(import_path)
        sys.path[:] = [*import_path, *(entry for entry in sys.path if entry not in import_path)]


def load_object(name: str, parameter: str = "trainable") -> object:
    """Return the object at `package.module:Name`; a text without a colon is a pickle in hexadecimal.

    Args:
        name: the name, or the pickle.
        parameter: where the user passed this text, such as `trainable` or `--stop`; messages begin with it.

    Raises:
        InvalidInput: the module cannot be imported or has no such name, or the pickle cannot be loaded here.
    """
    module, _, attribute = name.partition(":")
    if not attribute:
        return _unpickle(name, parameter)[0]
    process, before = os.getpid(), _importing_module.set(module)
    try:
        result: object = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        if os.getpid() != process:  # this is a process that the module has forked: let it exit
            raise
        reason = describe_import_error(error)
        raise InvalidInput(f"{parameter} {name!r}: module {module!r} cannot be imported: {reason}") from error
    finally:
        _importing_module.reset(before)
    for part in attribute.split("."):
        try:
            result = getattr(result, part)
        except (AttributeError, ImportError) as error:  # a module may raise ImportError for an old name
            raise InvalidInput(f"{parameter} {name!r}: {_missing_attribute_message(result, part)}") from error
    return result


_importing_module: ContextVar[str] = ContextVar("prefect_tune_importing", default="")


def require_not_importing(flow: str) -> None:
    """Raise InvalidInput if `load_object` is importing a module that calls `flow`, since trials would call it too."""
    if module := _importing_module.get():
        raise InvalidInput(
            f"{flow}: the import of module {module!r} calls it, so each trial would start it again. Call it "
            "only under `if __name__ == '__main__':`"
        )


def _unpickle(text: str, parameter: str) -> tuple[object, dict[str, object]]:
    """Return the object, and a dict of the definitions that it uses from the `__main__` in which it was pickled."""
    process = os.getpid()
    try:
        obj, names = cloudpickle.loads(bytes.fromhex(text))
    except (Exception, SystemExit) as error:  # unpickling imports modules, and these may raise any exception
        if os.getpid() != process:  # as in `load_object`
            raise
        is_import_error = isinstance(error, ImportError | AttributeError | SystemExit)
        reason = describe_import_error(error) if is_import_error else f"{type(error).__name__}: {error}"
        version = ".".join(map(str, sys.version_info[:3]))
        raise InvalidInput(f"{parameter}: its pickle cannot be loaded by Python {version}: {reason}") from error
    return obj, names


def find_import_name(obj: object) -> str | None:
    """Return the `package.module:Name` by which a new process can import this class or function; None if there is none.

    There is none for a lambda, for a definition in `__main__`, a notebook's cell or a function's body, for an object
    whose name refers to another object, and for an object whose module a new process would find in another file.
    """
    module = getattr(obj, "__module__", None)
    if not _is_importable(obj) or not isinstance(module, str) or not _is_reimportable(module):
        return None
    return f"{module}:{_qualified_name(obj)}"


def _is_reimportable(module: str) -> bool:
    """Return whether a new process would find `module` in the file from which this process imported it."""
    package = module.rpartition(".")[0]
    if package and not (hasattr(sys.modules.get(package), "__path__") and _is_reimportable(package)):
        return False
    path = sys.modules[package].__path__ if package else None
    specs = (finder.find_spec(module, path) for finder in sys.meta_path if hasattr(finder, "find_spec"))
    loaded, found_again = sys.modules[module].__spec__, next((spec for spec in specs if spec is not None), None)
    return loaded is not None and found_again is not None and loaded.origin == found_again.origin


def load_trainable(name: str) -> object:
    """Load a trainable like `load_object`, and check it.

    In a trial's process, put the definitions of a script or notebook into `__main__`, so that they can be pickled.

    Raises:
        InvalidInput: the object cannot be loaded, or is neither a function nor a subclass of `Trainable` with `step`.
    """
    if ":" in name:
        return require_trainable(load_object(name), name)
    trainable, names = _unpickle(name, "trainable")
    require_trainable(trainable, name)
    if is_trial_program() and (defined := _find_script_globals(trainable) | names):
        main = ModuleType("__main__")
        # Keep the original `__spec__`, because a new process of `multiprocessing` runs the module that the spec names.
        main.__dict__.update({**defined, "__spec__": INITIAL_MAIN_MODULE.__spec__})
        sys.modules["__main__"] = main
    return trainable


def _find_script_globals(trainable: object) -> dict[str, object]:
    """Return the global variables that a pickled trainable uses from the script or notebook that defined it."""
    kind = trainable if isinstance(trainable, type) else type(trainable)
    methods = (method for base in kind.__mro__ for method in vars(base).values())
    parts = [inspect.unwrap(part) for part in (trainable, getattr(trainable, "func", None), *methods) if callable(part)]
    functions = [part for part in parts if isinstance(part, FunctionType) and part.__module__ == "__main__"]
    scripts = [part.__globals__ for part in functions if part.__globals__.get("__name__") == "__main__"]
    return dict(scripts[0]) if scripts else {}  # all functions of a pickle share these globals


_TRAINABLE_FILE_ENV = "PREFECT_TUNE_TRAINABLE"
_MAX_TRAINABLE_CHARACTERS = 64 * 1024 * 1024  # a larger file would take too much disk space


def write_trainable_for_spawn(trainable: str) -> None:
    """Write a pickled trainable to a file for the processes that the trial spawns; see `load_definitions_for_spawn`."""
    os.environ.pop(_TRAINABLE_FILE_ENV, None)  # this process may have inherited it from an outer search
    if sys.modules["__main__"] is INITIAL_MAIN_MODULE or len(trainable) > _MAX_TRAINABLE_CHARACTERS:
        return
    file = tempfile.NamedTemporaryFile("w", suffix=".trainable", delete=False)  # noqa: SIM115  it is used after this call
    try:
        with file:
            file.write(trainable)
    except OSError:  # such as a full disk; a truncated pickle would fail in every spawned process
        Path(file.name).unlink(missing_ok=True)
    else:
        os.environ[_TRAINABLE_FILE_ENV] = file.name


def load_definitions_for_spawn() -> dict[str, object]:
    """Return the definitions of the trial's script for the `__main__` of this spawned process.

    If the trainable's file cannot be read, write the reason to stderr and return {}, since the process may not need it.
    """
    if not (file := os.environ.get(_TRAINABLE_FILE_ENV)):
        return {}  # no definitions are needed, or they could not be written
    try:
        trainable, names = _unpickle(Path(file).read_text(encoding="ascii"), f"{_TRAINABLE_FILE_ENV}={file}")
        return _find_script_globals(require_trainable(trainable, file)) | names
    except (InvalidInput, OSError, UnicodeDecodeError) as error:
        sys.stderr.write(f"prefect-tune: a spawned process lacks the definitions of its trial's script: {error}\n")
        return {}


def require_loadable(config: Mapping[str, object]) -> None:
    """Load the trainable that `config` names, without training. A trial that only checks the import runs this function.

    Raises:
        InvalidInput: the trainable cannot be loaded, or lacks `save_checkpoint` although `cadence` requires saves.
    """
    loaded = load_trainable(str(config["trainable"]))
    if isinstance(loaded, type) and config.get("cadence") is not None:
        require_save_checkpoint(loaded, Cadence.model_validate(config["cadence"]))


def describe_import_error(error: BaseException) -> str:
    """Return a text with the error of an import, the line of module code that raised the error, and advice."""
    lines = [line for line in traceback.extract_tb(error.__traceback__) if line.name == "<module>"]
    raised_at = f" (raised in {lines[-1].filename}, line {lines[-1].lineno})" if lines else ""
    raised = f"{type(error).__name__}: {error}{raised_at}"
    if isinstance(error, SystemExit):
        return f"{raised}. Run code that may exit the program only under `if __name__ == '__main__':`"
    directory = describe_working_directory()
    return f"{raised}. Make the module importable where the trial runs (working directory {directory})"


def describe_working_directory() -> str:
    """Return the working directory, for messages; `<removed>` if it does not exist."""
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return "<removed>"


def _missing_attribute_message(owner: object, name: str) -> str:
    """Return the message that `owner` has no `name`. It suggests a similar name, preferably one defined in `owner`."""
    from prefect_tune.core.display_text import did_you_mean_or_list, find_nearest_name

    public = [attribute for attribute in dir(owner) if not attribute.startswith("_")]
    # The value is None for a name that the module's `__getattr__` makes on demand.
    values = {key: inspect.getattr_static(owner, key, None) for key in public}
    own_name = getattr(owner, "__name__", None)
    defined = [key for key, it in values.items() if callable(it) and getattr(it, "__module__", None) == own_name]
    near = find_nearest_name(name, defined) or find_nearest_name(name, public)
    what = f"module {own_name!r}" if inspect.ismodule(owner) else repr(owner)
    where = f" ({owner.__file__})" if inspect.ismodule(owner) and getattr(owner, "__file__", None) else ""
    hint = f"did you mean {near!r}?" if near else did_you_mean_or_list(name, defined)
    return f"{what}{where} has no {name!r}; {hint}"


# Pickle the definitions of a script or a notebook by value, because a trial's process cannot import that `__main__`.
# cloudpickle does this for functions and classes. This code does it for other objects that `pickle` stores as a name
# (cached functions, types of `typing`). It also pickles objects with process-local state that functions of a script
# often use (locks, weak dictionaries). `find_unpicklable` finds the name of any other object that cannot be pickled.

_LruCache = functools._lru_cache_wrapper  # noqa: SLF001 - it has no public name
_Lock, _RLock = type(threading.Lock()), type(threading.RLock())


def pickle_to_hex(obj: object) -> str:
    """Return a pickle of `obj` and of the `__main__` objects that it uses, as text for `load_object`.

    Raises:
        Exception: any exception, if `obj` cannot be pickled; see `find_unpicklable`.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump((obj, pickler.names))  # `names` is last, since pickling `obj` fills it
    return file.getvalue().hex()


def _qualified_name(obj: object) -> str:
    return str(getattr(obj, "__qualname__", None) or getattr(obj, "__name__", ""))


def _is_importable(obj: object) -> bool:
    """Return whether another process can import this object by its name; False for objects of `__main__`."""
    module = getattr(obj, "__module__", None)
    try:
        return module != "__main__" and attrgetter(_qualified_name(obj))(sys.modules[str(module)]) is obj
    except (AttributeError, KeyError):
        return False


def _reduce_code(code: CodeType) -> tuple[object, ...]:
    """Pickle a code object with its file name, which tracebacks show, but which cloudpickle 3.1.3 drops."""
    make, arguments = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return make, tuple(code.co_filename if argument == "<dynamic-code>" else argument for argument in arguments)


def _reduce_cached_function(cached: Any) -> object:
    """Pickle a function decorated with `functools.cache` or `lru_cache`, without its cached results."""
    if _is_importable(cached):
        return _qualified_name(cached)
    if not any(referent is cached.__wrapped__ for referent in gc.get_referents(cached)):
        raise pickle.PicklingError("functools.update_wrapper has replaced the cached function")
    own = {name: value for name, value in vars(cached).items() if name not in ("__wrapped__", "cache_parameters")}
    return _make_cached, (cached.__wrapped__, cached.cache_parameters()), own


def _make_cached(function: Callable[..., object], parameters: Mapping[str, Any]) -> object:
    return functools.lru_cache(**parameters)(function)


def _reduce_new_type(new_type: typing.NewType) -> object:
    if _is_importable(new_type):
        return _qualified_name(new_type)
    return typing.NewType, (new_type.__name__, new_type.__supertype__), vars(new_type)


def _reduce_type_parameter(parameter: Any) -> object:
    """Pickle a `ParamSpec` or `TypeVarTuple` by its name, the only part that programs read."""
    return _qualified_name(parameter) if _is_importable(parameter) else (type(parameter), (parameter.__name__,))


_REDUCERS: Mapping[type, Callable[[Any], object]] = {
    CodeType: _reduce_code,
    _LruCache: _reduce_cached_function,
    typing.NewType: _reduce_new_type,
    typing.ParamSpec: _reduce_type_parameter,
    typing.TypeVarTuple: _reduce_type_parameter,
    **dict.fromkeys(
        (weakref.WeakKeyDictionary, weakref.WeakValueDictionary),
        lambda weak: (type(weak), (), None, None, iter([*weak.items()])),
    ),
    _Lock: lambda _: (threading.Lock, ()),
    _RLock: lambda _: (threading.RLock, ()),
}
_THREAD_TYPES = (
    *(threading.Thread, threading.Event, threading.Condition, threading.Semaphore, threading.Barrier),
    *(queue.Queue, queue.SimpleQueue),
)
_NAMED_TYPES = (type, FunctionType, _LruCache, typing.NewType, typing.ParamSpec, typing.TypeVarTuple, typing.TypeVar)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    dispatch_table: Mapping[type, Any] = ChainMap({**_REDUCERS}, cloudpickle.Pickler.dispatch_table)

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.names: dict[str, object] = {}

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if issubclass(kind, _NAMED_TYPES) and obj.__module__ == "__main__":
            name = _qualified_name(obj)
            if getattr(sys.modules["__main__"], name, None) is obj:
                self.names[name] = obj
        if issubclass(kind, _THREAD_TYPES):
            raise pickle.PicklingError("it works only between threads of one process; each trial has its own process")
        if obj is sys.modules["__main__"]:
            raise pickle.PicklingError("each process has its own __main__")
        own = {name for base in kind.__mro__[:-1] for name in vars(base)} if kind.__module__ == "__main__" else set()
        reduces_itself = not own.isdisjoint(("__reduce__", "__reduce_ex__"))  # such a method may return only a name
        if kind in self.dispatch_table or issubclass(kind, type) or not reduces_itself:
            return super().reducer_override(obj)
        if isinstance(reduced := obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL), str) and not _is_importable(obj):
            raise pickle.PicklingError(f"its pickle is only the name {reduced!r} in {obj.__module__}")
        return reduced


def find_unpicklable(obj: object) -> tuple[str, object]:
    """Return the name (like `'lock' in 'data'`) and the value of the innermost part of `obj` that cannot be pickled.

    The name is empty if the part is `obj` itself.
    """
    names: list[str] = []
    seen: set[int] = set()
    part: tuple[str, object] | None = ("", obj)
    while part is not None:
        obj = part[1]
        seen.add(id(obj))
        names += [repr(part[0])] if part[0] else []
        part = next((it for it in _iter_parts(obj) if id(it[1]) not in seen and not _is_picklable(it[1])), None)
    return " in ".join(reversed(names)), obj


def _is_picklable(obj: object) -> bool:
    try:
        pickle_to_hex(obj)
    except Exception:  # noqa: BLE001 - a user's `__reduce__` may raise anything
        return False
    return True


def _iter_parts(obj: Any) -> Iterator[tuple[str, object]]:
    """Yield the name and the value of each part of `obj` that its pickle contains."""
    match obj:
        case _ if isinstance(obj, _THREAD_TYPES):
            return
        case functools.partial():
            yield from [(_qualified_name(obj.func), obj.func), *_iter_items(obj.args), *obj.keywords.items()]
        case MethodType():
            yield from [(obj.__name__, obj.__func__), ("self", obj.__self__)]
        case FunctionType():
            yield from ((key, obj.__globals__[key]) for key in _find_used_names(obj.__code__) & obj.__globals__.keys())
            cells = zip(obj.__code__.co_freevars, obj.__closure__ or (), strict=True)
            for name, cell in cells:
                with suppress(ValueError):  # the variable has no value yet
                    yield name, cell.cell_contents
            yield from [*_iter_items(obj.__defaults__ or ()), *(obj.__kwdefaults__ or {}).items()]
        case ModuleType():
            pass
        case staticmethod() | classmethod() | _LruCache():
            yield _qualified_name(obj), obj.__wrapped__
        case property():
            yield from ((_qualified_name(part), part) for part in (obj.fget, obj.fset, obj.fdel) if part is not None)
        case dict():
            yield from ((str(name), value) for name, value in obj.items())
        case list() | tuple() | set() | frozenset():
            yield from _iter_items(obj)
        case type():
            yield from [*vars(obj).items(), *((base.__name__, base) for base in obj.__bases__)]
        case _:
            yield from getattr(obj, "__dict__", {}).items()
            yield type(obj).__name__, type(obj)


def _iter_items(items: Iterable[object]) -> Iterator[tuple[str, object]]:
    return ((f"[{number}]", item) for number, item in enumerate(items))


def _find_used_names(code: CodeType) -> set[str]:
    """Return the names that `code` uses, including the names that its inner functions use."""
    return {*code.co_names}.union(*(_find_used_names(part) for part in code.co_consts if isinstance(part, CodeType)))


# Compute digests that are equal in every process, so that a retry of a flow recognizes the calls of its earlier run.
# If an object is not a plain value, its type and parts stand for it in the digest, since its pickles may differ.


def compute_stable_digest(value: object) -> str:
    """Return a digest that is equal for equal values in all processes; different values may have the same digest."""
    return hash_bytes(_format_canonical(value, ()).encode())[:16]


def _format_canonical(value: Any, parents: tuple[object, ...]) -> str:
    def format_parts(*parts: object) -> str:
        return f"({','.join(_format_canonical(part, (*parents, value)) for part in parts)})"

    if any(value is parent for parent in parents):  # a cycle, for example of a class and a method that calls `super()`
        return ""
    match value:
        case None | Number() | bytes():
            return repr(value)
        case str() | PurePath():
            name, folder = str(value), f"{tempfile.gettempdir()}{os.sep}"
            # In a path below the temporary folder, omit the first folder, whose name may differ in each process.
            return repr(name.removeprefix(folder).partition(os.sep)[2] if name.startswith(folder) else name)
        case dict():
            return f"{{{','.join(sorted(format_parts(*item) for item in value.items()))}}}"
        case set() | frozenset():
            return f"{{{','.join(sorted(map(format_parts, value)))}}}"
        case list() | tuple():
            return format_parts(*value)
        case _:
            named = value if isinstance(value, type) or inspect.isroutine(value) else type(value)
            return str(named.__qualname__) + format_parts(*_get_identifying_parts(value))


def _get_identifying_parts(value: Any) -> Iterable[object]:
    """Return the parts that distinguish a value from other values of the same name or type."""
    match value:
        case functools.partial():
            return [value.func, value.args, value.keywords]
        case MethodType():
            return [value.__self__, value.__func__]
        case FunctionType() | type() if "<locals>" not in value.__qualname__:
            return []  # only the name counts, since the code may be edited before a retry
        case FunctionType():
            return [*_get_closure_values(value), value.__defaults__, value.__kwdefaults__]
        case type():
            parts = {name: part for name, part in vars(value).items() if _identifies_type(name, part)}
            return [{name: _get_closure_values(part) or part for name, part in parts.items()}, value.__bases__]
        case Enum():
            return [value.name]
        case BaseModel():
            return [vars(value)]
        case _:
            return [getattr(value, field.name) for field in fields(value)] if is_dataclass(value) else []


def _get_closure_values(function: object) -> list[object]:
    """Return the values of a function's closure variables."""
    cells: tuple[CellType, ...] = getattr(function, "__closure__", None) or ()
    return [cell.cell_contents for cell in cells if cell != CellType()]


def _identifies_type(name: str, part: object) -> bool:
    return bool(_get_closure_values(part)) if isinstance(part, FunctionType) else not name.startswith("_")
