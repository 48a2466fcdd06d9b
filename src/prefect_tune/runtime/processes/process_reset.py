"""Give a process that was forked, or has trained a trial before, the state of one newly started for its trial.

    import (`noting_import`: which variables, directory and seeds the module sets)
      └─► fork, or the next trial of a kept class ──► `reset_process_state`: the trial's own, then what that has set

Never: two trials that draw the same numbers of a generator that the module has not seeded; a trial without the
variables, the directory or the seeds that its module has set.
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

# Modules with a global generator, and their functions that seed it. Unseeded, it draws other numbers in each process.
_SEED_FUNCTIONS = {"random": "seed", "numpy.random": "seed", "torch": "manual_seed"}


@dataclass(frozen=True, slots=True)
class _Imported:
    """What the import of the trainable's module has set in its process."""

    removed: frozenset[bytes]
    """Environment variables."""
    added: Mapping[bytes, bytes]
    """Environment variables with their values."""
    directory: str
    """The working directory; empty if it is the same as before."""
    generators: Sequence[tuple[Callable[[Any], object], object]]
    """The functions that set the states of generators, each with the state after the import."""


_imported: _Imported | None = None


def reset_process_state(adopted: ProcessEnvironment) -> None:
    """Set the environment, working directory and temporary directory, and seed the random generators anew.

    What the import of the trainable has set stays set: see `noting_import`. The state of the trainable itself (its
    object, its modules) is not reset: that is the task of `reset_config`.
    """
    environment = {_bytes(name): _bytes(value) for name, value in adopted.environment.items()}
    for name in os.environb.keys() - environment.keys():
        del os.environb[name]
    os.environb.update({name: value for name, value in environment.items() if os.environb.get(name) != value})
    if adopted.working_directory:
        os.chdir(_bytes(adopted.working_directory))
    tempfile.tempdir = None  # so that it is read from the environment again
    time.tzset()
    random.seed()
    if (of_numpy := sys.modules.get("numpy.random")) is not None:  # which `import numpy` alone does not import
        of_numpy.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.seed()  # as a new process does
    if _imported is not None:
        for name in _imported.removed & os.environb.keys():
            del os.environb[name]
        os.environb.update(_imported.added)
        if _imported.directory:
            os.chdir(_imported.directory)
        for set_state, state in _imported.generators:
            set_state(state)


def _bytes(characters: str) -> bytes:
    return characters.encode("latin-1")


def has_noted_import() -> bool:
    """Whether `noting_import` has completed in this process, or in the one that it was forked from."""
    return _imported is not None


@contextmanager
def noting_import() -> Iterator[None]:
    """Import the trainable's module in the block: what that sets here is set again by each `reset_process_state`.

    Without it, a trial that is trained in a fork, or in a process that was used before, would not have the variables
    and seeds that the module sets. A generator from which the import only draws is seeded anew for each trial.
    """
    global _imported  # noqa: PLW0603 - of the process, as what it describes
    seeded: set[str] = set()
    originals: list[tuple[ModuleType, Callable[..., object]]] = []

    def watch(module: ModuleType) -> None:
        """Note whether a generator is seeded with a number."""
        original = getattr(module, _SEED_FUNCTIONS[module.__name__])

        @wraps(original)
        def seed(*args: object, **kwargs: object) -> object:
            is_fixed = any(each is not None for each in (*args, *kwargs.values()))
            (seeded.add if is_fixed else seeded.discard)(module.__name__)
            return original(*args, **kwargs)

        originals.append((module, original))
        setattr(module, _SEED_FUNCTIONS[module.__name__], seed)

    environment, directory = dict(os.environb), _directory()
    finder = _AfterImport(dict.fromkeys(_SEED_FUNCTIONS, watch))
    for name in _SEED_FUNCTIONS.keys() & sys.modules.keys():
        watch(sys.modules[name])
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        with suppress(ValueError):  # the import has removed it
            sys.meta_path.remove(finder)
        for module, original in originals:
            setattr(module, _SEED_FUNCTIONS[module.__name__], original)
    generators: list[tuple[Callable[[Any], object], object]] = []
    if "random" in seeded:
        generators.append((random.setstate, random.getstate()))
    if "numpy.random" in seeded:
        of_numpy = sys.modules["numpy.random"]
        generators.append((of_numpy.set_state, of_numpy.get_state()))
    if "torch" in seeded:
        torch = sys.modules["torch"]
        generators.append((torch.manual_seed, torch.initial_seed()))  # of GPUs too
        generators.append((torch.set_rng_state, torch.get_rng_state()))
    now = dict(os.environb)
    _imported = _Imported(
        removed=frozenset(environment.keys() - now.keys()),
        added={name: value for name, value in now.items() if environment.get(name) != value},
        directory="" if _directory() == directory else _directory(),
        generators=generators,
    )


def _directory() -> str:
    with suppress(FileNotFoundError):  # it was removed
        return os.getcwd()  # noqa: PTH109 - text is needed, not a Path
    return ""


class _AfterImport(MetaPathFinder):
    """Finds some modules as the other finders do, and calls a function with each of them after its import."""

    def __init__(self, functions: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self._functions = functions

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self._functions:
            return None
        others = (each.find_spec(name, path, target) for each in sys.meta_path if each is not self)
        spec = next((each for each in others if each is not None), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_call(module: ModuleType) -> None:
                run(module)
                self._functions[name](module)

            spec.loader.exec_module = run_and_call  # type: ignore[method-assign]  # as lazy loaders do
        return spec


# Prefect's logging in a process that has no flow run and does not import Prefect by itself. What it prints becomes the
# log of its run: so the loggers that Prefect would send to its API print there.

_EXTRA = "PREFECT_LOGGING_EXTRA_LOGGERS"


class _PrintingHandler(logging.Handler):
    """Prints to what `sys.stderr` is at that time."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)  # noqa: T201  its output is the log


_handler = _PrintingHandler()
_handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))


def print_logs_of_run() -> None:
    """Have `get_run_logger()` and the loggers of PREFECT_LOGGING_EXTRA_LOGGERS print, once Prefect is imported or not.

    The level is INFO, unless a logger has one. Calling it again has no effect.
    """
    if _patches_run_logger not in sys.meta_path:
        sys.meta_path.insert(0, _patches_run_logger)
    for name in filter(None, map(str.strip, os.environ.get(_EXTRA, "").split(","))):
        _print_records(logging.getLogger(name))


def _print_records(logger: logging.Logger) -> logging.Logger:
    if _handler not in logger.handlers:
        logger.addHandler(_handler)
        logger.propagate = False
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    return logger


def _add_fallback(module: ModuleType) -> None:
    """Give `get_run_logger` of Prefect's module a logger for code outside of a run."""
    original, missing = vars(module)["get_run_logger"], vars(module)["MissingContextError"]

    @wraps(original)
    def get_run_logger(*args: Any, **options: Any) -> Any:
        try:
            return original(*args, **options)
        except missing:
            return _print_records(logging.getLogger("trial"))

    vars(module)["get_run_logger"] = get_run_logger


_patches_run_logger = _AfterImport({"prefect.logging.loggers": _add_fallback})


# The end of a process or of a trial.


def flush_output() -> None:
    """Flush stdout and stderr before `os._exit`, which does not."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # closed, replaced by something else, or its reader is gone
            stream.flush()


def forget_exit_handlers() -> None:
    """Remove the handlers of `atexit` that a forked process inherits: what they clean up is shared with other trials.

    A child of `multiprocessing` runs none of them either.
    """
    vars(atexit)["_clear"]()
    finalize = vars(weakref.finalize)
    for each in list(finalize["_registry"]):
        each.atexit = False
    if finalize["_registered_with_atexit"]:  # then it does not register itself again
        atexit.register(finalize["_exitfunc"].__func__, weakref.finalize)


def run_exit_handlers() -> None:
    """Run the handlers of `atexit` before `os._exit`, which does not: those that this process has registered.

    That of `multiprocessing` is left out, since it waits for children: the subreaper ends them.
    """
    if (util := sys.modules.get("multiprocessing.util")) is not None:
        atexit.unregister(vars(util)["_exit_function"])
    vars(atexit)["_run_exitfuncs"]()  # as the interpreter does at its end; it prints what they raise


def free_memory() -> None:
    """Free what the trial has used: cycles of objects, and the GPU memory that PyTorch keeps for later."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
