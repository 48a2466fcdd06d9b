"""Import a trainable once, in the process that its trials are forked from, if forks of that process are safe then.

A fork has only the thread that forked. Locks that other threads hold stay locked in it, and a GPU driver or a socket
that it shares with the parent breaks or hangs. So after the import, what is certain and takes no time is checked:

- libraries that refuse forks in their documentation: JAX, TensorFlow, MPI;
- descriptors that the import left open: a GPU, sockets, pipes to processes, files;
- threads: Python's at once, those of libraries after each fork, since some end theirs in a handler of the fork.

A fork that hangs all the same is replaced by its supervisor after 60 s.
https://pubs.opengroup.org/onlinepubs/9799919799/functions/fork.html
"""

from __future__ import annotations

import gc
import inspect
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import cast

from prefect_tune.core.messages.process_messages import ImportRequest
from prefect_tune.core.shown_text import first_line, plural
from prefect_tune.runtime.load_named import load_trainable, prepend_import_path
from prefect_tune.runtime.processes.process_reset import flush_output, noting_import
from prefect_tune.runtime.processes.trial_process import forks_end, remember_source
from prefect_tune.runtime.trial_errors import text_of

# Their documentation, or a warning at each fork, says that a fork may hang once they are imported.
_REFUSE_FORKS = {"jax": "JAX", "tensorflow": "TensorFlow", "mpi4py.MPI": "MPI"}
# Allocators end this thread before a fork, in a handler of their own, and start it again when they need it.
_FORK_SAFE_THREADS = frozenset({"jemalloc_bg_thd"})
_USES_OPTIMIZER = re.compile(r"\boptim|Trainer")
_NO_COLLECTION = 1 << 30  # allocations until the next one


def import_before_forking(request: ImportRequest) -> str | None:
    """Import the trainable; return why this process must not be forked, None if it may be."""
    before = _open_descriptors()
    prepend_import_path(request.import_path)
    try:
        with noting_import(), forks_end(), _collecting_no_garbage():
            trainable = load_trainable(request.trainable)
            remember_source(trainable)
            _import_for_optimizer(trainable)
    except BaseException as error:  # noqa: BLE001 - whatever the user's module raises, SystemExit too
        return f"its import raised {type(error).__name__}: {first_line(text_of(error))}"
    finally:
        flush_output()  # else each fork prints it again
    if refusing := [name for module, name in _REFUSE_FORKS.items() if module in sys.modules]:
        return f"it imports {' and '.join(refusing)}, which cannot be forked"
    if threads := _python_threads():
        return f"its import started threads that still run: {', '.join(threads)}"
    if opened := sorted(what for number, what in _open_descriptors().items() if before.get(number) != what):
        return f"its import left open: {', '.join(opened)}"
    return None


def _import_for_optimizer(trainable: object) -> None:
    """Take a step with an optimizer of PyTorch: a process's first one imports 900 modules, in 1.7 CPU s.

    Do it if the module of the trainable names one: a guess that only saves time.
    """
    name = getattr(trainable, "__module__", "")
    with suppress(Exception):  # there is no source, which `inspect` says in several ways; or trials report it
        # Of what a script has sent, `__main__` is the script's; here, it is the program of this process.
        source = inspect.getsource(cast("type", trainable) if name == "__main__" else sys.modules[name])
        if (torch := sys.modules.get("torch")) is not None and _USES_OPTIMIZER.search(source):
            torch.optim.SGD([torch.zeros(1, device="cpu", requires_grad=True)], lr=0.0).step()


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


def _open_descriptors() -> dict[str, str]:
    """Return what each open descriptor refers to. Forks would share the position in a file, and a connection."""
    descriptors = {}
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the listing's own
            descriptors[entry.name] = str(entry.readlink())
    return descriptors


def running_threads() -> list[str]:
    """Return the names of the other threads: Python's, and those of libraries."""
    if len(os.listdir("/proc/self/task")) == 1:  # noqa: PTH208 - names, not paths
        return []
    own = _thread_name(Path("/proc/self"))  # a library's thread inherits it, unless the library names the thread
    names = [_thread_name(each) for each in Path("/proc/self/task").iterdir() if int(each.name) != os.getpid()]
    others = [each for each in names if each is not None and each not in _FORK_SAFE_THREADS]
    unnamed = sum(each in (own, "") for each in others)
    of_libraries = [f"{plural(unnamed, 'thread', 'threads')} of libraries, without names"] * bool(unnamed)
    named = sorted({f"a library's {each}" for each in others if each not in (own, "")})
    return _python_threads() or named + of_libraries


def _thread_name(task: Path) -> str | None:
    """Return the name that a thread has, maybe an empty one; None if it has ended."""
    with suppress(OSError):
        return (task / "comm").read_text().strip()
    return None


def _python_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
