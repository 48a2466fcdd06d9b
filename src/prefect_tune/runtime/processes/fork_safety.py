"""Import a trainable once, in the process that its trials are forked from, if forks of that process are safe then.

A fork has only the thread that forked. Locks that other threads hold stay locked in it, and a GPU driver or a socket
that it shares with the parent breaks or hangs. So this module inspects the process after the import: its threads,
drivers and sockets decide, not the names of libraries. https://pubs.opengroup.org/onlinepubs/9799919799/functions/fork.html

The first optimizer in a process that uses PyTorch imports 900 modules (`torch._dynamo`), in 1.7 CPU s. The first trial
does not wait for that, and none that needs no optimizer pays for it:

    import ──► inspection ──► READY ──► the first trial is forked ──► `LateImport.run` ──► inspection ──► the others
                                            if the trainable's source names an optimizer, or a trial had to import it
"""

from __future__ import annotations

import ast
import gc
import inspect
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from textwrap import dedent
from typing import Any, NoReturn, Self, cast

from prefect_tune.core.messages.process_messages import ImportRequest
from prefect_tune.core.shown_text import first_line, plural, visible
from prefect_tune.runtime.load_named import load_trainable, prepend_import_path
from prefect_tune.runtime.processes.linux import children_of, command_of, send_signal
from prefect_tune.runtime.processes.process_reset import LATE_IMPORT, flush_output, noting_import, share_late_import
from prefect_tune.runtime.processes.trial_process import forks_end, handlers_in_fork, remember_source
from prefect_tune.runtime.trial_errors import text_of

# Their documentation, or a warning at each fork, says that a fork may hang once they are imported.
_REFUSE_FORKS = {"jax": "JAX", "tensorflow": "TensorFlow", "mpi4py.MPI": "MPI"}
# Allocators end this thread before a fork, in a handler of their own, and start it again when they need it.
_FORK_SAFE_THREADS = frozenset({"jemalloc_bg_thd"})
# Caches in the temporary directory, which libraries write so that processes may share them.
_SHARED_CACHES = ("matplotlib-", "torchinductor_")
_PROBE = timedelta(seconds=10)
_SLOW = timedelta(seconds=3)  # a probe that takes longer: each trial would wait as long
_SHOWN_CHARACTERS = 80
_ANSWER_BYTES, _NOTHING = 2000, b"nothing"
_NAME_FIELDS = ("attr", "id", "name", "module")  # of nodes of `ast`
_NO_COLLECTION = 1 << 30  # allocations until the next one


def import_before_forking(request: ImportRequest) -> str | LateImport:
    """Import the trainable; return why this process must not be forked now, or what is left to import if it may be."""
    before = _State.now()
    prepend_import_path(request.import_path)
    try:
        with noting_import(), forks_end(), _collecting_no_garbage():
            trainable = load_trainable(request.trainable)
            remember_source(trainable)
    except BaseException as error:  # noqa: BLE001 - whatever the user's module raises, SystemExit too
        return f"its import raised {type(error).__name__}: {first_line(text_of(error))}"
    finally:
        flush_output()  # else each fork prints it again
    return _inspect(before) or LateImport(trainable)


class LateImport:
    """The import that the first optimizer in a process needs, done in a template for all trials but the first ones."""

    def __init__(self, trainable: object) -> None:
        self._is_possible = "torch" in sys.modules and LATE_IMPORT not in sys.modules
        self.is_expected = self._is_possible and _names_optimizer(trainable)
        """Whether trials are likely to need it."""
        self._noted = share_late_import()

    def is_needed(self) -> bool:
        """Return whether a trial had to do it by itself."""
        return self._is_possible and bool(self._noted[0])

    def run(self) -> str:
        """Take a step with an optimizer; return why this process must not be forked any more, empty if it may be."""
        before, torch = _State.now(), sys.modules["torch"]
        with suppress(Exception), _collecting_no_garbage():  # where this fails, trials report it
            torch.optim.SGD([torch.zeros(1, device="cpu", requires_grad=True)], lr=0.0).step()
        flush_output()
        gc.freeze()  # as before the first fork
        return _inspect(before)


def _names_optimizer(trainable: object) -> bool:
    """Whether a name in the code of the trainable's module has to do with optimizers: a guess that only saves time."""
    name = getattr(trainable, "__module__", "")
    with suppress(Exception):  # there is no source, which `inspect` and `ast` say in several ways
        # Of what a script has sent, `__main__` is the script's; here, it is the program of this process.
        source = inspect.getsource(cast("type", trainable) if name == "__main__" else sys.modules[name])
        names = (getattr(node, field, "") for node in ast.walk(ast.parse(dedent(source))) for field in _NAME_FIELDS)
        return any("optim" in str(name) for name in names)
    return False


@contextmanager
def _collecting_no_garbage() -> Iterator[None]:
    """Import in the block: a sixth of an import's CPU time would be collections that find nothing."""
    before = gc.get_threshold()
    gc.set_threshold(_NO_COLLECTION)
    try:
        yield
    finally:
        if gc.get_threshold()[0] == _NO_COLLECTION:  # else the module has set its own
            gc.set_threshold(*before)


def _inspect(before: _State) -> str:
    """Return why this process must not be forked now, empty if it may be."""
    try:
        return _why_not_fork(before, Path(os.environ["TMPDIR"]))
    except Exception as error:  # noqa: BLE001 - the import may have replaced what this module calls
        return f"it could not be inspected after its import: {type(error).__name__}: {first_line(str(error))}"


@dataclass(frozen=True, slots=True)
class _State:
    """What forks would share with this process, and with each other, or would lose."""

    handlers: Mapping[int, Any]
    """Of signals."""
    blocked: frozenset[int]
    """The signals that are blocked."""
    processes: frozenset[int]
    """Its children, and those that its subreaper has adopted."""
    has_gpu: bool
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
        shared = frozenset(each[-1] for each in maps if each[1].startswith("rw") and each[1][3] == "s")
        blocked = frozenset(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())))
        handlers = {int(number): signal.getsignal(number) for number in signal.valid_signals()}
        return cls(handlers, blocked, _processes_left(), _has_gpu_context(), descriptors, shared)

    def added_since(self, before: Self) -> list[str]:
        """Return the names of what is open now, and was not."""
        opened = [what for name, what in self.descriptors.items() if before.descriptors.get(name) != what]
        gpu = ["a GPU"] * (self.has_gpu and not before.has_gpu)
        return sorted([*opened, *(f"shared memory {name}" for name in self.memory - before.memory)]) or gpu


def _why_not_fork(before: _State, temporary: Path) -> str:
    if refusing := [name for module, name in _REFUSE_FORKS.items() if module in sys.modules]:
        return f"it imports {' and '.join(refusing)}, which cannot be forked"
    began = time.monotonic()
    of_fork = _done_by_a_fork()  # first: libraries with fork handlers, such as OpenBLAS, end their threads here then
    took = time.monotonic() - began
    if of_import := _done_since(before):
        return f"its import {of_import}" + (f"; a fork of it {of_fork}" if of_fork else "")
    if of_fork:
        return f"a fork of it {of_fork}"
    if made := sorted(each.name for each in temporary.iterdir() if not each.name.startswith(_SHARED_CACHES)):
        return f"its import made temporary files, which forks would share: {', '.join(made)}"
    if took > _SLOW.total_seconds():
        return f"a fork of it takes {took:.0f} s: handlers of os.register_at_fork wait"
    return ""


def _done_since(before: _State) -> str:
    """Return what this process has now that a fork would lose, or share; empty if there is nothing."""
    now = _State.now()
    if changed := [signal.Signals(each).name for each, own in before.handlers.items() if now.handlers[each] != own]:
        return f"installed handlers of signals: {', '.join(changed)}"
    if changed := [signal.Signals(each).name for each in now.blocked ^ before.blocked]:
        return f"changed which signals are blocked: {', '.join(sorted(changed))}"
    if threads := running_threads():
        return f"started threads that still run: {', '.join(threads)}"
    if processes := now.processes - before.processes:
        return f"started processes that still run: {', '.join(map(_shown, sorted(processes)))}"
    if left := now.added_since(before):
        return f"left open: {', '.join(left)}"
    if any(signal.getitimer(each)[0] for each in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)):
        return "set a timer"
    return ""


def _done_by_a_fork(generations: int = 2) -> str:
    """Return what fork handlers do in a fork of this process, and in a fork of that: a subreaper, and its trial."""
    reading, writing = os.pipe()
    before = _State.now()
    before = replace(before, handlers=handlers_in_fork(before.handlers))
    with warnings.catch_warnings(), os.fdopen(reading, "rb"), os.fdopen(writing, "wb") as theirs:
        warnings.simplefilter("ignore")  # Python 3.12 warns if there is another thread: OpenBLAS ends its own just then
        if (probe := os.fork()) == 0:
            _answer(writing, before, generations)
        theirs.close()
        if wait([reading], _PROBE.total_seconds()):
            said = os.read(reading, _ANSWER_BYTES) or b"ended before it could be inspected"
        else:
            said = f"did not answer within {_PROBE.total_seconds():g} s".encode()
            send_signal(signal.SIGKILL, {probe, *children_of(probe)})
        with suppress(ChildProcessError):  # the import has set SIGCHLD to be ignored
            os.waitpid(probe, 0)
    return "" if said == _NOTHING else said.decode("utf-8", "replace")


def _answer(writing: int, before: _State, generations: int) -> NoReturn:
    """In a fork: write what its fork handlers have done, and what those of a fork of it do."""
    try:
        done = _done_since(before) or (_done_by_a_fork(generations - 1) if generations > 1 else "")
    except BaseException as error:  # noqa: BLE001 - the process's edge
        done = f"cannot be inspected: {type(error).__name__}: {first_line(str(error))}"
    try:
        os.write(writing, done.encode("utf-8", "replace")[:_ANSWER_BYTES] or _NOTHING)
    finally:
        os._exit(0)


def _processes_left() -> frozenset[int]:
    """Return the children of this process, and of its subreaper, which adopts those whose parent has exited."""
    found = children_of(os.getpid(), os.getppid()) - {os.getpid()}
    return frozenset(each for each in found if command_of(each))  # one that is dead has none


def _shown(process: int) -> str:
    """Return the command line of a process, and its number."""
    command = command_of(process).rstrip(b"\0").replace(b"\0", b" ").decode("utf-8", "replace")
    return f"{visible(command[:_SHOWN_CHARACTERS]) or 'a process'} ({process})"


def running_threads() -> list[str]:
    """Return the names of the other threads: Python's, and those of libraries."""
    ours = [each.name for each in threading.enumerate() if each is not threading.main_thread()]
    own = _thread_name(Path("/proc/self"))  # a library's thread inherits it, unless the library names the thread
    names = [_thread_name(each) for each in Path("/proc/self/task").iterdir() if int(each.name) != os.getpid()]
    others = [each for each in names if each is not None and each not in _FORK_SAFE_THREADS]
    unnamed = sum(each in (own, "") for each in others)
    of_libraries = [f"{plural(unnamed, 'thread', 'threads')} of libraries, without names"] * bool(unnamed)
    return ours or sorted({f"a library's {each}" for each in others if each not in (own, "")}) + of_libraries


def _thread_name(task: Path) -> str | None:
    """Return the name that a thread has, maybe an empty one; None if it has ended."""
    with suppress(OSError):
        return (task / "comm").read_text().strip()
    return None


def _has_gpu_context() -> bool:
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    return bool(cuda is not None and cuda.is_initialized())
