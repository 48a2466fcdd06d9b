"""Import a trainable once, in the process that its trials are forked from, if forks of that process are safe then.

A fork has only the thread that forked. Locks that other threads hold stay locked in it, and a GPU driver or a socket
that it shares with the parent breaks or hangs. So this module inspects the process after the import: its threads,
drivers and sockets decide, not the names of libraries. https://pubs.opengroup.org/onlinepubs/9799919799/functions/fork.html
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Self

from prefect_tune.core.messages.process_messages import ImportRequest
from prefect_tune.core.models import first_line
from prefect_tune.runtime.load_named import load_trainable
from prefect_tune.runtime.processes.group_signals import handlers_in_fork
from prefect_tune.runtime.processes.linux import children_of
from prefect_tune.runtime.processes.process_reset import flush_output, noting_import, prepend_import_path
from prefect_tune.runtime.processes.trial_process import forks_end, remember_source
from prefect_tune.runtime.trial_errors import text_of

# Their documentation, or a warning at each fork, says that a fork may hang once they are imported.
_REFUSE_FORKS = {"jax": "JAX", "tensorflow": "TensorFlow", "mpi4py.MPI": "MPI"}
# Allocators end this thread before a fork, in a handler of their own, and start it again when they need it.
_FORK_SAFE_THREADS = frozenset({"jemalloc_bg_thd"})
# Caches in the temporary directory, which libraries write so that processes may share them.
_SHARED_CACHES = ("matplotlib-", "torchinductor_")
_PROBE = timedelta(seconds=10)
_ANSWER_BYTES, _NOTHING = 2000, b"nothing"


def import_before_forking(request: ImportRequest) -> str:
    """Import the trainable; return why this process must not be forked now, empty if it may be."""
    before, held, temporary = _handlers(), _Held.now(), Path(os.environ["TMPDIR"])
    prepend_import_path(request.import_path)
    try:
        with noting_import(), forks_end():
            remember_source(load_trainable(request.trainable))
        _finish_torch()
    except BaseException as error:  # noqa: BLE001 - whatever the user's module raises, SystemExit too
        return f"its import raised {type(error).__name__}: {first_line(text_of(error))}"
    finally:
        flush_output()  # else each fork prints it again
    return _why_not_fork(before, held, temporary)


def _finish_torch() -> None:
    """Take a step with an optimizer: the first one in a process imports 900 modules, in 1.2 CPU s (PyTorch 2.13)."""
    if (torch := sys.modules.get("torch")) is not None:
        with suppress(Exception):  # an optimizer is not needed for an import
            torch.optim.SGD([torch.zeros(1, device="cpu", requires_grad=True)], lr=0.0).step()


@dataclass(frozen=True, slots=True)
class _Held:
    """What forks would share with this process, and with each other."""

    descriptors: Mapping[str, str]
    """What each open descriptor refers to. Forks would share the position in a file, and a connection."""
    memory: frozenset[str]
    """Mappings that are shared and can be written, such as the locks of `multiprocessing`."""

    @classmethod
    def now(cls) -> Self:
        descriptors = {}
        for each in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # the listing's own
                descriptors[each.name] = str(each.readlink())
        maps = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
        return cls(descriptors, frozenset(each[-1] for each in maps if each[1].startswith("rw") and each[1][3] == "s"))

    def added_since(self, before: Self) -> list[str]:
        opened = [what for name, what in self.descriptors.items() if before.descriptors.get(name) != what]
        return sorted([*opened, *(f"shared memory {name}" for name in self.memory - before.memory)])


def _why_not_fork(before: Mapping[int, Any], held: _Held, temporary: Path) -> str:
    if refusing := [name for module, name in _REFUSE_FORKS.items() if module in sys.modules]:
        return f"it imports {' and '.join(refusing)}, which cannot be forked"
    of_fork = _done_by_a_fork()  # first: libraries with fork handlers, such as OpenBLAS, end their threads here then
    if of_import := _done_since(before, held):
        return f"its import {of_import}" + (f"; a fork of it {of_fork}" if of_fork else "")
    if of_fork:
        return f"a fork of it {of_fork}"
    if made := sorted(each.name for each in temporary.iterdir() if not each.name.startswith(_SHARED_CACHES)):
        return f"its import made temporary files, which forks would share: {', '.join(made)}"
    return ""


def _done_since(handlers: Mapping[int, Any], held: _Held) -> str:
    """Return what this process has now that a fork would lose, or share; empty if there is nothing."""
    now = _handlers()
    if changed := [signal.Signals(each).name for each, own in handlers.items() if now[each] != own]:
        return f"installed handlers of signals: {', '.join(changed)}"
    if threads := _threads():
        return f"started threads that still run: {', '.join(threads)}"
    if processes := _processes_left():
        return f"started processes that still run: {', '.join(map(str, sorted(processes)))}"
    if left := _Held.now().added_since(held) or ["a GPU"] * _has_gpu_context():
        return f"left open: {', '.join(left)}"
    if any(signal.getitimer(each)[0] for each in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)):
        return "set a timer"
    return ""


def _done_by_a_fork(generations: int = 2) -> str:
    """Return what fork handlers do in a fork of this process, and in a fork of that: a subreaper, and its trial."""
    reading, writing = os.pipe()
    handlers, held = handlers_in_fork(_handlers()), _Held.now()
    with warnings.catch_warnings(), os.fdopen(reading, "rb"), os.fdopen(writing, "wb"):
        warnings.simplefilter("ignore")  # Python 3.12 warns if there is another thread: OpenBLAS ends its own just then
        if (probe := os.fork()) == 0:
            try:
                done = _done_since(handlers, held) or (_done_by_a_fork(generations - 1) if generations > 1 else "")
                os.write(writing, done.encode("utf-8", "replace")[:_ANSWER_BYTES] or _NOTHING)
            finally:
                os._exit(0)
        if wait([reading], _PROBE.total_seconds()):
            said = os.read(reading, _ANSWER_BYTES)
        else:
            said = f"did not answer within {_PROBE}".encode()
            os.kill(probe, signal.SIGKILL)
        with suppress(ChildProcessError):  # the import has set SIGCHLD to be ignored
            os.waitpid(probe, 0)
    return "" if said == _NOTHING else said.decode("utf-8", "replace")


def _handlers() -> Mapping[int, Any]:
    return {int(number): signal.getsignal(number) for number in signal.valid_signals()}


def _processes_left() -> set[int]:
    """Return the children of this process, and of its subreaper, which adopts those whose parent has exited."""
    return children_of(os.getpid(), os.getppid()) - {os.getpid()}


def _threads() -> list[str]:
    """Return the names of the other threads: Python's, and those of libraries."""
    ours = [each.name for each in threading.enumerate() if each is not threading.main_thread()]
    own = _thread_name(Path("/proc/self"))  # a library's thread inherits it, unless the library names the thread
    names = [_thread_name(each) for each in Path("/proc/self/task").iterdir() if int(each.name) != os.getpid()]
    others = [each for each in names if each and each not in _FORK_SAFE_THREADS]
    return ours or sorted({f"a library's {each}" if each != own else "a library's" for each in others})


def _thread_name(task: Path) -> str:
    with suppress(OSError):  # it has ended
        return (task / "comm").read_text().strip()
    return ""


def _has_gpu_context() -> bool:
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    return bool(cuda is not None and cuda.is_initialized())
