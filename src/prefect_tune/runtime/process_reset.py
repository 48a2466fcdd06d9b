"""Reset a forked or reused process to the state of one that was newly started for its trial."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from prefect_tune.core.messages.process_messages import Surroundings

_TORCH_SEED = 67280421310721  # torch's default seed
_PROBE_SEED = 20261123
_BLOCK = 624  # numbers of 32 bits for each key of a Mersenne twister
_BLOCKS = 200  # keys; an import that draws more than 124,800 numbers is taken for one that seeds


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
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(_TORCH_SEED)


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
    environment, directory = dict(os.environb), _directory()
    if find_spec("numpy") is not None:
        import_module("numpy.random").seed(_PROBE_SEED)
    random.seed(_PROBE_SEED)
    yield
    now = dict(os.environb)
    _imported = _Imported(
        removed=frozenset(environment.keys() - now.keys()),
        added={name: value for name, value in now.items() if environment.get(name) != value},
        directory="" if _directory() == directory else _directory(),
        generators=tuple(_seeded_generators()),
    )
    _forget_what_was_drawn()
    _imported.apply()


def has_noted_import() -> bool:
    """Whether `noting_import` has completed in this process, or in the one that it was forked from."""
    return _imported is not None


def _seeded_generators() -> Iterator[tuple[Callable[[Any], object], object]]:
    """Yield the generators that were seeded since they were seeded with `_PROBE_SEED`."""
    own = random.Random(_PROBE_SEED)  # noqa: S311 - no secret
    state = random.getstate()
    if not _was_drawn(state[1][:-1], lambda: own.getstate()[1][:-1], lambda: own.getrandbits(32 * _BLOCK)):
        yield random.setstate, state
    if (numpy := sys.modules.get("numpy")) is not None:
        like = numpy.random.RandomState(_PROBE_SEED)
        found = numpy.random.get_state()
        if not _was_drawn(tuple(found[1]), lambda: tuple(like.get_state()[1]), lambda: like.bytes(4 * _BLOCK)):
            yield numpy.random.set_state, found
    torch = sys.modules.get("torch")
    if torch is not None and (seed := torch.initial_seed()) != _TORCH_SEED:
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

    @classmethod
    def now(cls) -> Self:
        handlers = {int(number): signal.getsignal(number) for number in signal.valid_signals()}
        return cls(frozenset(threading.enumerate()), handlers)

    def is_restored(self) -> bool:
        """Whether no thread, no process and no signal handler was added since."""
        now = ProcessState.now()
        if now.threads - self.threads or now.handlers != self.handlers:
            return False
        me, subreaper = os.getpid(), os.getppid()
        return children_of(me, subreaper) == {me}  # the subreaper adopts those whose parent has exited


def free_memory() -> None:
    """Free what the trial has used: cycles of objects, and the GPU memory that PyTorch keeps for later."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _bytes(characters: str) -> bytes:
    return characters.encode("latin-1")


def children_of(*parents: int) -> set[int]:
    """Return the pids of the processes' children, adopted ones included."""
    pids = {str(each).encode() for each in parents}
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):  # it has ended
                # pid (name) state parent ...; the name may hold any bytes, parentheses too
                _, its_parent, *_ = (entry / "stat").read_bytes().rpartition(b")")[2].split()
                if its_parent in pids:
                    found.add(int(entry.name))
    return found
