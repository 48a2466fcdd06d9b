"""Reset a forked or reused process to the state of one that was newly started for its trial."""

from __future__ import annotations

import atexit
import gc
import locale
import logging
import multiprocessing
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from prefect_tune.core.messages.process_messages import Surroundings
from prefect_tune.runtime.processes.linux import children_of

# Libraries read these variables once: when they are imported, or when they first compute.
READ_ONCE = (
    "ASCEND_RT_VISIBLE_DEVICES",
    "CUDA_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "HABANA_VISIBLE_DEVICES",
    "HABANA_VISIBLE_MODULES",
    "HIP_VISIBLE_DEVICES",
    "MKL_NUM_THREADS",
    "NEURON_RT_NUM_CORES",
    "NEURON_RT_VISIBLE_CORES",
    "OMP_NUM_THREADS",
    "ONEAPI_DEVICE_SELECTOR",
    "OPENBLAS_NUM_THREADS",
    "ROCR_VISIBLE_DEVICES",
    "TPU_VISIBLE_CHIPS",
    "TPU_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
)
# Modules with a global generator, and their functions that seed it. Unseeded, it draws other numbers in each process.
_SEEDED_BY = {"numpy.random": "seed", "torch": "manual_seed"}
_BLOCK = 624  # numbers of 32 bits for each key of a Mersenne twister
_BLOCKS = 4000  # keys; an import that draws more than 2,496,000 numbers is taken for one that seeds


def settle_in(surroundings: Surroundings) -> None:
    """Set the environment, working directory and temporary directory, and seed the random generators anew.

    What the import of the trainable has set stays set: see `noting_import`. The state of the trainable itself (its
    object, its modules) is not reset: that is the task of `reset_config`.
    """
    _take_on({_bytes(name): _bytes(value) for name, value in surroundings.environment.items()})
    if surroundings.working_directory:
        os.chdir(_bytes(surroundings.working_directory))
    tempfile.tempdir = None  # so that it is read from the environment again
    time.tzset()
    _forget_what_was_drawn()
    if _imported is not None:
        _imported.apply()


def _take_on(environment: dict[bytes, bytes]) -> None:
    for name in os.environb.keys() - environment.keys():
        del os.environb[name]
    os.environb.update({name: value for name, value in environment.items() if os.environb.get(name) != value})


def _forget_what_was_drawn() -> None:
    """Seed the generators of imported libraries; one that is imported later is new anyway."""
    random.seed()
    if (of_numpy := sys.modules.get("numpy.random")) is not None:  # which `import numpy` alone does not import
        of_numpy.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.seed()  # as a new process does


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
    """Import the trainable's module in the block: what that sets in this process is set again by each `settle_in`.

    Without it, a trial that is trained in a fork, or in a process that was used before, would not have the variables
    and seeds that the module sets. A generator from which the import only draws is seeded anew for each trial.
    """
    global _imported  # noqa: PLW0603 - of the process, as what it describes
    environment, directory, probe = dict(os.environb), _directory(), int.from_bytes(os.urandom(4), "little")
    random.seed(probe)
    with _libraries_seeded_with(probe):
        yield
    now = dict(os.environb)
    _imported = _Imported(
        removed=frozenset(environment.keys() - now.keys()),
        added={name: value for name, value in now.items() if environment.get(name) != value},
        directory="" if _directory() == directory else _directory(),
        generators=tuple(_seeded_generators(probe)),
    )
    _forget_what_was_drawn()
    _imported.apply()


def has_noted_import() -> bool:
    """Whether `noting_import` has completed in this process, or in the one that it was forked from."""
    return _imported is not None


_prepended: tuple[str, ...] = ()


def prepend_import_path(import_path: Sequence[str]) -> None:
    """Put `import_path` before the other entries of `sys.path`; once, since modules may change `sys.path` then."""
    global _prepended  # noqa: PLW0603 - of the process, as `sys.path`
    if tuple(import_path) != _prepended:
        _prepended = tuple(import_path)
        sys.path[:] = [*import_path, *(entry for entry in sys.path if entry not in import_path)]


@contextmanager
def _libraries_seeded_with(seed: int) -> Iterator[None]:
    """Seed the libraries' generators now, or as soon as the block imports them; this function imports none."""
    finder = _SeedingFinder(seed)
    for name in _SEEDED_BY.keys() & sys.modules.keys():
        getattr(sys.modules[name], _SEEDED_BY[name])(seed)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        with suppress(ValueError):  # the import has removed it
            sys.meta_path.remove(finder)


class _SeedingFinder(MetaPathFinder):
    """Finds the modules of `_SEEDED_BY` as the other finders do, and seeds their generators after their import."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in _SEEDED_BY:
            return None
        others = (each.find_spec(name, path, target) for each in sys.meta_path if each is not self)
        spec = next((each for each in others if each is not None), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_seed(module: ModuleType) -> None:
                run(module)
                getattr(module, _SEEDED_BY[name])(self._seed)

            spec.loader.exec_module = run_and_seed  # type: ignore[method-assign]  # as lazy loaders do
        return spec


def _seeded_generators(probe: int) -> Iterator[tuple[Callable[[Any], object], object]]:
    """Yield the generators that were seeded since they were seeded with `probe`."""
    own = random.Random(probe)  # noqa: S311 - no secret
    state = random.getstate()
    if not _was_drawn(state[1][:-1], lambda: own.getstate()[1][:-1], lambda: own.getrandbits(32 * _BLOCK)):
        yield random.setstate, state
    if (of_numpy := sys.modules.get("numpy.random")) is not None:
        like, found = of_numpy.RandomState(probe), of_numpy.get_state()
        if not _was_drawn(tuple(found[1]), lambda: tuple(like.get_state()[1]), lambda: like.bytes(4 * _BLOCK)):
            yield of_numpy.set_state, found
    torch = sys.modules.get("torch")
    if torch is not None and (seed := torch.initial_seed()) != probe:
        yield torch.manual_seed, seed  # of GPUs too
        yield torch.set_rng_state, torch.get_rng_state()


def _was_drawn(key: object, of_probe: Callable[[], object], skip: Callable[[], object]) -> bool:
    """Whether a Mersenne twister's key is one of the first of a probe, which has the seed that it had at first."""
    for _ in range(_BLOCKS):
        if of_probe() == key:
            return True
        skip()
    return False


def _directory() -> str:
    with suppress(FileNotFoundError):  # it was removed
        return os.getcwd()  # noqa: PTH109 - text is needed, not a Path
    return ""


@dataclass(frozen=True, slots=True)
class ProcessState:
    """What a trial may leave in its process that cannot be reset."""

    threads: frozenset[threading.Thread]
    handlers: Mapping[int, Any]
    outputs: tuple[object, ...]
    """The streams and the root log's handlers, to which what a trial prints and logs goes."""
    files: frozenset[tuple[str, str]]
    """Open files and sockets, each with its descriptor; a GPU driver's own are needed by the next trial too."""
    settings: tuple[object, ...]

    @classmethod
    def now(cls) -> Self:
        return cls(
            threads=frozenset(threading.enumerate()),
            handlers={int(number): signal.getsignal(number) for number in signal.valid_signals()},
            outputs=(sys.stdout, sys.stderr, *logging.getLogger().handlers),
            files=frozenset(_open_files()),
            settings=_settings(),
        )

    def is_restored(self) -> bool:
        """Whether no thread, process, file, signal handler, stream or log handler was added, and no setting changed."""
        now = ProcessState.now()
        if now.threads - self.threads or now.files - self.files:
            return False
        if (now.handlers, now.outputs, now.settings) != (self.handlers, self.outputs, self.settings):
            return False
        return not processes_left()


def processes_left() -> set[int]:
    """Return the children of this process, and of its subreaper, which adopts those whose parent has exited."""
    return children_of(os.getpid(), os.getppid()) - {os.getpid()}


def _settings() -> tuple[object, ...]:
    """Return what holds for a whole process, and would hold for the next trial too."""
    mask = os.umask(0o077)
    os.umask(mask)
    return (
        mask,
        os.getpriority(os.PRIO_PROCESS, 0),
        os.sched_getaffinity(0),
        [resource.getrlimit(getattr(resource, each)) for each in dir(resource) if each.startswith("RLIMIT_")],
        locale.setlocale(locale.LC_ALL),
        multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0],
        {name: os.environ.get(name) for name in READ_ONCE},
        _torch_settings(sys.modules.get("torch")),
    )


def _torch_settings(torch: ModuleType | None) -> tuple[object, ...]:
    """Return settings that decide what PyTorch computes; its defaults if it is not imported."""
    if torch is None:
        return "torch.float32", True, False, "highest", False
    return (
        str(torch.get_default_dtype()),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.distributed.is_available() and torch.distributed.is_initialized(),
    )


def _open_files() -> Iterator[tuple[str, str]]:
    for each in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the listing's own
            opened = str(each.readlink())
            if opened.startswith("socket:") or (opened.startswith("/") and not opened.startswith(("/dev/", "/proc/"))):
                yield each.name, opened


def flush_output() -> None:
    """Flush stdout and stderr before `os._exit`, which does not."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or its reader is gone
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
