"""Load an object by its name, `package.module:Name`; an error says which name the module has instead."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from operator import attrgetter
from pathlib import Path
from types import FunctionType, ModuleType

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.retention import Cadence
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
    """Return the object, and what the script that defines it has defined, by name."""
    from prefect_tune.runtime.pickle_by_value import load_by_value

    process = os.getpid()
    try:
        return load_by_value(bytes.fromhex(text))
    except (Exception, SystemExit) as error:  # it imports modules, which may raise anything
        if os.getpid() != process:  # as in `load_named`
            raise
        is_of_import = isinstance(error, ImportError | AttributeError | SystemExit)
        why = import_advice(error) if is_of_import else f"{type(error).__name__}: {error}"
        raise InvalidInput(f"{parameter}: its pickle cannot be loaded by Python {_PYTHON}: {why}") from error


def import_path_of(thing: object) -> str | None:
    """Return the `package.module:Name` by which a new process imports this class or function; None if there is none.

    It has none if `__main__`, a notebook's cell or the body of a function defines it, if it is a lambda, if its name
    leads to another object, or if its module would be imported from another file.
    """
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module == "__main__" or module not in sys.modules:
        return None
    try:
        is_found = attrgetter(name)(sys.modules[module]) is thing
    except AttributeError:
        return None
    return f"{module}:{name}" if is_found and _is_importable(module) else None


def _is_importable(module: str) -> bool:
    """Whether an import that does not use `sys.modules` finds the same file."""
    package = module.rpartition(".")[0]
    if package and not (hasattr(sys.modules.get(package), "__path__") and _is_importable(package)):
        return False
    path = sys.modules[package].__path__ if package else None
    specs = (finder.find_spec(module, path) for finder in sys.meta_path if hasattr(finder, "find_spec"))
    known, found = sys.modules[module].__spec__, next((each for each in specs if each is not None), None)
    return known is not None and found is not None and known.origin == found.origin


def pickled(thing: object) -> str:
    """Return `thing` as the hexadecimal text that `load_named` takes."""
    from prefect_tune.runtime.pickle_by_value import pickle_by_value

    return pickle_by_value(thing).hex()


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


_PYTHON = ".".join(map(str, sys.version_info[:3]))
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
    """Return what an import raised, at which line of which module, and what to do about it."""
    raised = f"{type(error).__name__}: {error}{_raised_at(error)}"
    if isinstance(error, SystemExit):
        return f"{raised}. Run what may end the program only under `if __name__ == '__main__':`"
    return f"{raised}. Make it importable where it runs (working directory {working_directory()})"


def working_directory() -> str:
    """Return the working directory, for messages; it may have been removed."""
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return "that has been removed"


def _raised_at(error: BaseException) -> str:
    """Return the innermost line of a module's own code, not of a function; empty if no module was run."""
    lines = [each for each in traceback.extract_tb(error.__traceback__) if each.name == "<module>"]
    return f" (raised in {lines[-1].filename}, line {lines[-1].lineno})" if lines else ""


def _lacks(owner: object, name: str) -> str:
    """Return that `owner` has no `name`, and what it has."""
    from prefect_tune.core.shown_text import did_you_mean_or_has, nearest

    public = [each for each in dir(owner) if not each.startswith("_")]
    defined = [each for each in public if _is_defined_in(owner, each)]
    near = nearest(name, defined) or nearest(name, public)
    what = f"module {owner.__name__!r}" if inspect.ismodule(owner) else repr(owner)
    where = f" ({owner.__file__})" if inspect.ismodule(owner) and getattr(owner, "__file__", None) else ""
    hint = f"did you mean {near!r}?" if near else did_you_mean_or_has(name, defined)
    return f"{what}{where} has no {name!r}; {hint}"


def _is_defined_in(owner: object, name: str) -> bool:
    """Whether `name` is a class or function that the module itself defines, and not one that it imports."""
    found = inspect.getattr_static(owner, name, None)  # None: the module makes it on demand
    return callable(found) and getattr(found, "__module__", None) == getattr(owner, "__name__", None)
