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
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from prefect_tune.core.messages.process_messages import Surroundings

_TORCH_SEED = 67280421310721  # torch's default seed


def settle_in(surroundings: Surroundings) -> None:
    """Set the environment, working directory and temporary directory, and seed the random generators anew.

    The state of the trainable itself (its object, its modules) is not reset: that is the task of `reset_config`.
    """
    _take_on({_bytes(name): _bytes(value) for name, value in surroundings.environment.items()})
    if surroundings.working_directory:
        os.chdir(_bytes(surroundings.working_directory))
    tempfile.tempdir = None  # so that it is read from the environment again
    time.tzset()
    _forget_what_was_drawn()


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
