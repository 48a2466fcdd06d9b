"""Give a forked or reused process the state of a process that was newly started for its trial.

    import (`recording_import_effects` records the variables, directory and seeds that the module sets)
      └─► fork, or reuse for the next trial ──► `reset_process_state`: set the trial's state, then what was recorded

Two trials never draw the same numbers from a generator that the module did not seed, and each trial has the variables,
the directory and the seeds that its module sets.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import random
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from prefect_tune.core.messages.process_messages import ProcessEnvironment

# The functions that seed the global generators of modules. Unseeded generators draw different numbers in each process.
_SEED_FUNCTIONS = {"random": "seed", "numpy.random": "seed", "torch": "manual_seed"}


@dataclass(frozen=True, slots=True)
class _ImportEffects:
    """The changes that the import of the trainable's module made to the process."""

    removed_variables: frozenset[bytes]
    added_variables: Mapping[bytes, bytes]
    """Added or changed environment variables with their values."""
    directory: str | None
    """The working directory; None if it is unchanged."""
    generators: Sequence[tuple[Callable[[Any], object], object]]
    """The functions that set the states of generators, each with the state after the import."""


_import_effects: _ImportEffects | None = None


def reset_process_state(new: ProcessEnvironment) -> None:
    """Set the environment, working directory and temporary directory, and reseed the random generators.

    Also repeat the changes that the trainable's import made; see `recording_import_effects`. The state of the trainable
    itself (its object, its modules) is not reset here, but by `reset_config`.
    """
    environment = {name.encode("latin-1"): value.encode("latin-1") for name, value in new.environment.items()}
    for name in os.environb.keys() - environment.keys():
        del os.environb[name]
    os.environb.update({name: value for name, value in environment.items() if os.environb.get(name) != value})
    if new.working_directory:
        os.chdir(new.working_directory.encode("latin-1"))
    tempfile.tempdir = None  # so that `tempfile` reads the environment again
    time.tzset()
    random.seed()
    if (numpy_random := sys.modules.get("numpy.random")) is not None:  # may be missing even after `import numpy`
        numpy_random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.seed()  # a random seed, as in a new process
    if _import_effects is not None:
        for name in _import_effects.removed_variables & os.environb.keys():
            del os.environb[name]
        os.environb.update(_import_effects.added_variables)
        if _import_effects.directory:
            os.chdir(_import_effects.directory)
        for set_state, state in _import_effects.generators:
            set_state(state)


def has_recorded_import_effects() -> bool:
    """Return whether `recording_import_effects` has completed in this process or in its parent."""
    return _import_effects is not None


@contextmanager
def recording_import_effects() -> Iterator[None]:
    """Record the changes that the block, an import of the trainable's module, makes to this process.

    `reset_process_state` applies the changes again, because otherwise a trial in a forked or reused process would lack
    the variables and seeds that the module sets. A generator that the import does not seed is reseeded for each trial.
    """
    global _import_effects  # noqa: PLW0603 - of the process, like the state that it describes
    seeded: set[str] = set()
    originals: list[tuple[ModuleType, Callable[..., object]]] = []

    def wrap_seed_function(module: ModuleType) -> None:
        """Replace the module's seed function by a function that also records whether a seed is passed."""
        original = getattr(module, _SEED_FUNCTIONS[module.__name__])

        @wraps(original)
        def seed(*args: object, **kwargs: object) -> object:
            is_fixed = any(value is not None for value in (*args, *kwargs.values()))
            (seeded.add if is_fixed else seeded.discard)(module.__name__)
            return original(*args, **kwargs)

        originals.append((module, original))
        setattr(module, _SEED_FUNCTIONS[module.__name__], seed)

    environment, directory = dict(os.environb), _get_working_directory()
    finder = _PostImportFinder(dict.fromkeys(_SEED_FUNCTIONS, wrap_seed_function))
    for name in _SEED_FUNCTIONS.keys() & sys.modules.keys():
        wrap_seed_function(sys.modules[name])
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        with suppress(ValueError):  # the import has removed the finder
            sys.meta_path.remove(finder)
        for module, original in originals:
            setattr(module, _SEED_FUNCTIONS[module.__name__], original)
    generators: list[tuple[Callable[[Any], object], object]] = []
    if "random" in seeded:
        generators.append((random.setstate, random.getstate()))
    if "numpy.random" in seeded:
        numpy_random = sys.modules["numpy.random"]
        generators.append((numpy_random.set_state, numpy_random.get_state()))
    if "torch" in seeded:
        torch = sys.modules["torch"]
        generators.append((torch.manual_seed, torch.initial_seed()))  # seeds GPUs too
        generators.append((torch.set_rng_state, torch.get_rng_state()))
    now = dict(os.environb)
    _import_effects = _ImportEffects(
        removed_variables=frozenset(environment.keys() - now.keys()),
        added_variables={name: value for name, value in now.items() if environment.get(name) != value},
        directory=None if _get_working_directory() == directory else _get_working_directory(),
        generators=generators,
    )


def _get_working_directory() -> str | None:
    with suppress(FileNotFoundError):  # the directory was removed
        return os.getcwd()  # noqa: PTH109 - a str is needed, not a Path
    return None


class _PostImportFinder(MetaPathFinder):
    """Calls a function with a module right after its import; the other finders of `sys.meta_path` find the module."""

    def __init__(self, functions: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self._functions = functions

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self._functions:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in others if spec is not None), None)
        if spec is not None and spec.loader is not None:
            exec_module = spec.loader.exec_module

            def exec_and_call(module: ModuleType) -> None:
                exec_module(module)
                self._functions[name](module)

            spec.loader.exec_module = exec_and_call  # type: ignore[method-assign]  # like lazy loaders
        return spec


# Prefect's logging in a trial's process, which has no flow run, and imports Prefect only if the trainable does. Loggers
# print the records that Prefect would send to its API, because what the process prints gets into the log of the run.

_EXTRA_LOGGERS_ENV = "PREFECT_LOGGING_EXTRA_LOGGERS"


class _PrintingHandler(logging.Handler):
    """Prints to the current `sys.stderr`."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)  # noqa: T201  the output is the log


_printing_handler = _PrintingHandler()
_printing_handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))


def install_printing_loggers() -> None:
    """Make the loggers of `get_run_logger()` and PREFECT_LOGGING_EXTRA_LOGGERS print, without importing Prefect.

    The level is INFO, unless a logger has its own level. A second call has no effect.
    """
    if _run_logger_finder not in sys.meta_path:
        sys.meta_path.insert(0, _run_logger_finder)
    for name in filter(None, map(str.strip, os.environ.get(_EXTRA_LOGGERS_ENV, "").split(","))):
        _make_logger_print(logging.getLogger(name))


def _make_logger_print(logger: logging.Logger) -> logging.Logger:
    if _printing_handler not in logger.handlers:
        logger.addHandler(_printing_handler)
        logger.propagate = False
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    return logger


def _patch_get_run_logger(module: ModuleType) -> None:
    """Make `get_run_logger` of Prefect's `module` return a printing logger outside of a run, instead of raising."""
    original, missing_context_error = vars(module)["get_run_logger"], vars(module)["MissingContextError"]

    @wraps(original)
    def get_run_logger(*args: Any, **options: Any) -> Any:
        try:
            return original(*args, **options)
        except missing_context_error:
            return _make_logger_print(logging.getLogger("trial"))

    vars(module)["get_run_logger"] = get_run_logger


_run_logger_finder = _PostImportFinder({"prefect.logging.loggers": _patch_get_run_logger})


# The end of a process or of a trial.


def flush_output() -> None:
    """Flush stdout and stderr, since `os._exit` does not flush them."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the stream is closed, replaced, or without a reader
            stream.flush()


def clear_exit_handlers() -> None:
    """Remove the `atexit` handlers that a forked process inherits, since they would clean up state of other trials.

    Children of `multiprocessing` do not run inherited handlers either.
    """
    vars(atexit)["_clear"]()
    finalize = vars(weakref.finalize)
    for finalizer in list(finalize["_registry"]):
        finalizer.atexit = False
    if finalize["_registered_with_atexit"]:  # register the function again, since `weakref.finalize` does so only once
        atexit.register(finalize["_exitfunc"].__func__, weakref.finalize)


def run_exit_handlers() -> None:
    """Run the `atexit` handlers that this process has registered, since `os._exit` does not run them.

    Skip the handler of `multiprocessing`, which would wait for children that the subreaper ends.
    """
    if (util := sys.modules.get("multiprocessing.util")) is not None:
        atexit.unregister(vars(util)["_exit_function"])
    vars(atexit)["_run_exitfuncs"]()  # as the interpreter does when it exits; exceptions are printed


def free_memory() -> None:
    """Free the trial's memory: reference cycles, and GPU memory that PyTorch caches."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
