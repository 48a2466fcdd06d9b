"""Import a trainable once, in the process that its trials are forked from, if forks of that process are safe then.

A fork has only the thread that forked. What other threads hold, and what a GPU driver or a socket shares with the
parent, is broken in it, or hangs. So the import is inspected: not the libraries' names decide, but what they left in
this process. https://pubs.opengroup.org/onlinepubs/9799919799/functions/fork.html
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

from prefect_tune.core.messages.process_messages import Preload
from prefect_tune.core.models import first_line
from prefect_tune.runtime.process_reset import ProcessState, children_of, noting_import
from prefect_tune.runtime.trial_process import flush_output, load_trainable, prepend_import_path, remember_source

__all__ = ["import_before_forking"]

# These say in their documentation, or warn at each fork, that a fork of a process that has imported them may hang.
_REFUSE_FORKS = {"jax": "JAX", "tensorflow": "TensorFlow", "mpi4py.MPI": "MPI"}
# Allocators end this thread before a fork, in a handler of their own, and start it again when they need it.
_FORK_SAFE_THREADS = frozenset({"jemalloc_bg_thd"})
_NO_STATE = frozenset({"/dev/null", "/dev/random", "/dev/urandom", "/dev/zero"})
_PROBE = timedelta(seconds=10)
_LOOK_AGAIN = timedelta(seconds=0.002)


def import_before_forking(request: Preload, control: int) -> str:
    """Import the trainable; return why this process must not be forked now, empty if it may be.

    Until it returns, the kernel kills this process when the other side of `control` is closed, even if the import
    hangs in C code.
    """
    before, opened = ProcessState.now(), _opened()
    with _killed_at_hangup(control), _output_of_import():
        prepend_import_path(request.import_path)
        try:
            with noting_import():
                remember_source(load_trainable(request.trainable))
            _finish_torch()
        except BaseException as error:  # noqa: BLE001 - whatever the user's module raises, SystemExit too
            return f"its import raised {type(error).__name__}: {first_line(str(error))}"
        return _why_not_fork(before, opened)


def _finish_torch() -> None:
    """Take a step with an optimizer: the first one in a process imports 900 modules, in 1.2 CPU s (PyTorch 2.13)."""
    if (torch := sys.modules.get("torch")) is not None:
        with suppress(Exception):  # an optimizer is not needed for an import
            torch.optim.SGD([torch.zeros(1, device="cpu", requires_grad=True)], lr=0.0).step()


def _why_not_fork(before: ProcessState, opened: Mapping[str, str]) -> str:
    if refusing := [name for module, name in _REFUSE_FORKS.items() if module in sys.modules]:
        return f"it imports {' and '.join(refusing)}, which cannot be forked"
    if not _a_fork_ends():
        return f"a fork of it did not end within {_PROBE}"
    if threads := _threads():
        return f"its import started threads that still run: {', '.join(threads)}"
    if children := children_of(os.getpid()):
        return f"its import started processes that still run: {', '.join(map(str, sorted(children)))}"
    if left := sorted(set(_opened().values()) - set(opened.values())) or ["a GPU"] * _has_gpu_context():
        return f"its import left open: {', '.join(left)}"
    now = ProcessState.now().handlers
    if changed := [signal.Signals(each).name for each, own in before.handlers.items() if now[each] != own]:
        return f"its import installed handlers of signals: {', '.join(changed)}"
    return ""


def _a_fork_ends() -> bool:
    """Fork once. Libraries with fork handlers, such as OpenBLAS, end their threads in this process then."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns if there is another thread: OpenBLAS ends its own just then
        if (probe := os.fork()) == 0:
            os._exit(0)
    until = time.monotonic() + _PROBE.total_seconds()
    while os.waitpid(probe, os.WNOHANG) == (0, 0):
        if time.monotonic() >= until:
            os.kill(probe, signal.SIGKILL)
            os.waitpid(probe, 0)
            return False
        time.sleep(_LOOK_AGAIN.total_seconds())
    return True


def _threads() -> list[str]:
    """Return the names of the other threads: Python's, and those of libraries."""
    ours = [each.name for each in threading.enumerate() if each is not threading.main_thread()]
    names = [_thread_name(each) for each in Path("/proc/self/task").iterdir() if int(each.name) != os.getpid()]
    return ours or [each for each in names if each and each not in _FORK_SAFE_THREADS]


def _thread_name(task: Path) -> str:
    with suppress(OSError):  # it has ended
        return (task / "comm").read_text().strip()
    return ""


def _has_gpu_context() -> bool:
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    return bool(cuda is not None and cuda.is_initialized())


def _opened() -> Mapping[str, str]:
    """Return the open files, sockets and devices by descriptor. Forks would share them, and the position in a file."""
    found = {}
    for each in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the listing's own
            found[each.name] = str(each.readlink())
    return {name: opened for name, opened in found.items() if opened not in _NO_STATE}


@contextmanager
def _killed_at_hangup(control: int) -> Iterator[None]:
    """Have the kernel send SIGKILL to this process when the other side of `control` is closed."""
    flags = fcntl.fcntl(control, fcntl.F_GETFL)
    fcntl.fcntl(control, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(control, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(control, fcntl.F_SETFL, flags | os.O_ASYNC)
    poll = select.poll()
    poll.register(control, select.POLLIN)
    if poll.poll(0):  # it was closed before
        os._exit(0)
    try:
        yield
    finally:
        fcntl.fcntl(control, fcntl.F_SETFL, flags)
        fcntl.fcntl(control, fcntl.F_SETSIG, 0)


@contextmanager
def _output_of_import() -> Iterator[None]:
    """Send stderr to where stdout goes, the log of the search; afterwards, stdout to nowhere: forks have their own."""
    own = os.dup(2)
    os.dup2(1, 2)
    try:
        yield
    finally:
        flush_output()
        os.dup2(own, 2)
        os.close(own)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
