"""Give a process that was forked, or has trained a trial before, the state of one newly started for its trial.

    import (`noting_import`: which variables, directory and seeds the module sets)
      └─► fork, or the next trial of a kept class ──► `reset_process_state`: the trial's own, then what that has set

Never: two trials that draw the same numbers of a generator that the module has not seeded; a trial without the
variables, the directory or the seeds that its module has set.
"""

from __future__ import annotations

import atexit
import gc
import os
import random
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
        _imported.apply()


@dataclass(frozen=True, slots=True)
class _Imported:
    """What the import of the trainable's module has set in its process: variables, directory, seeded generators."""

    removed: frozenset[bytes]
    added: Mapping[bytes, bytes]
    directory: str
    """Empty if it is the same as before."""
    generators: Sequence[tuple[Callable[[Any], object], object]]
    """The functions that set the states of generators, each with the state after the import."""

    def apply(self) -> None:
        for name in self.removed & os.environb.keys():
            del os.environb[name]
        os.environb.update(self.added)
        if self.directory:
            os.chdir(self.directory)
        for set_state, state in self.generators:
            set_state(state)


_imported: _Imported | None = None


@contextmanager
def noting_import() -> Iterator[None]:
    """Import the trainable's module in the block: what that sets here is set again by each `reset_process_state`.

    Without it, a trial that is trained in a fork, or in a process that was used before, would not have the variables
    and seeds that the module sets. A generator from which the import only draws is seeded anew for each trial.
    """
    global _imported  # noqa: PLW0603 - of the process, as what it describes
    environment, directory = dict(os.environb), _directory()
    with _noting_seeds() as seeded:
        yield
    now = dict(os.environb)
    _imported = _Imported(
        removed=frozenset(environment.keys() - now.keys()),
        added={name: value for name, value in now.items() if environment.get(name) != value},
        directory="" if _directory() == directory else _directory(),
        generators=tuple(_states_of(seeded)),
    )


def has_noted_import() -> bool:
    """Whether `noting_import` has completed in this process, or in the one that it was forked from."""
    return _imported is not None


@contextmanager
def _noting_seeds() -> Iterator[set[str]]:
    """Yield the modules of `_SEED_FUNCTIONS` that the block seeds with a number; this function imports none."""
    seeded: set[str] = set()
    originals: list[tuple[ModuleType, Callable[..., object]]] = []

    def watch(module: ModuleType) -> None:
        original = getattr(module, _SEED_FUNCTIONS[module.__name__])

        @wraps(original)
        def seed(*args: object, **kwargs: object) -> object:
            is_fixed = any(each is not None for each in (*args, *kwargs.values()))
            (seeded.add if is_fixed else seeded.discard)(module.__name__)
            return original(*args, **kwargs)

        originals.append((module, original))
        setattr(module, _SEED_FUNCTIONS[module.__name__], seed)

    finder = _Finder(watch)
    for name in _SEED_FUNCTIONS.keys() & sys.modules.keys():
        watch(sys.modules[name])
    sys.meta_path.insert(0, finder)
    try:
        yield seeded
    finally:
        with suppress(ValueError):  # the import has removed it
            sys.meta_path.remove(finder)
        for module, original in originals:
            setattr(module, _SEED_FUNCTIONS[module.__name__], original)


class _Finder(MetaPathFinder):
    """Finds the modules of `_SEED_FUNCTIONS` as the other finders do, and calls `watch` after their import."""

    def __init__(self, watch: Callable[[ModuleType], None]) -> None:
        self._watch = watch

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in _SEED_FUNCTIONS:
            return None
        others = (each.find_spec(name, path, target) for each in sys.meta_path if each is not self)
        spec = next((each for each in others if each is not None), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_watch(module: ModuleType) -> None:
                run(module)
                self._watch(module)

            spec.loader.exec_module = run_and_watch  # type: ignore[method-assign]  # as lazy loaders do
        return spec


def _states_of(seeded: Collection[str]) -> Iterator[tuple[Callable[[Any], object], object]]:
    """Yield the functions that set the states of these modules' generators, each with the present state."""
    if "random" in seeded:
        yield random.setstate, random.getstate()
    if "numpy.random" in seeded:
        of_numpy = sys.modules["numpy.random"]
        yield of_numpy.set_state, of_numpy.get_state()
    if "torch" in seeded:
        torch = sys.modules["torch"]
        yield torch.manual_seed, torch.initial_seed()  # of GPUs too
        yield torch.set_rng_state, torch.get_rng_state()


def _directory() -> str:
    with suppress(FileNotFoundError):  # it was removed
        return os.getcwd()  # noqa: PTH109 - text is needed, not a Path
    return ""


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


def _bytes(characters: str) -> bytes:
    return characters.encode("latin-1")
