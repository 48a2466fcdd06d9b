"""The fork server that trial processes are forked from, without Prefect.

It is started as `python -m prefect_tune.runtime.processes.fork_server`.

It has imported what every trial needs and no user code, and it has one thread, so a fork of it is safe whatever the
supervisor is doing. Between it and each trial's process is a subreaper process:

    supervisor <- fork server <- subreaper <- trial's process <- its descendants

A template is such a process too. It imports a trainable, and then is itself a fork server, for trials of that
trainable:

    fork server <- subreaper <- template <- subreaper <- trial's process

The subreaper sets `PR_SET_CHILD_SUBREAPER`, so orphaned descendants of the trial become its children, in any session.
When the supervisor requests it or is gone, and when the trial's process has ended, it ends all of them and reports
the trial's wait status. The fork server is a child subreaper too, in a session of its
own: it ends what a killed subreaper leaves. If the fork server is killed, its subreapers finish their work. Only
`kill -9` of both leaves processes alive: descendants of the trial's process, while Linux kills that process itself
together with its subreaper (`PR_SET_PDEATHSIG`).
"""

from __future__ import annotations

import gc
import inspect
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, cast

from prefect_tune.core.messages.process_messages import FORK, IMPORT, READY, ImportRequest
from prefect_tune.core.shown_text import first_line, plural
from prefect_tune.linux import (
    adopt_orphans,
    children_of,
    command_of,
    die_with_parent,
    drain_pipe,
    keep_only,
    open_descriptors,
    other_thread_names,
    poll_readable,
    send_signal,
    set_process_name,
    sigchld_pipe,
    while_alive,
)
from prefect_tune.runtime import checkpoint  # noqa: F401 - for the trials: `pt.Checkpoint`
from prefect_tune.runtime.load_named import load_trainable, names_for_spawned, prepend_import_path
from prefect_tune.runtime.processes.process_reset import (
    flush_output,
    forget_exit_handlers,
    noting_import,
    print_logs_of_run,
    reset_process_state,
)
from prefect_tune.runtime.processes.trial_process import (
    Life,
    forks_end,
    ignore_group_signals,
    remember_source,
    run_forever,
    serve,
    take_numbers,
    train_as_rank,
    warm_up,
)
from prefect_tune.runtime.ranks import is_copy_for_rank
from prefect_tune.runtime.trial_errors import text_of

# Cluster schedulers and terminals send these to all processes of a job; they are for the training, not for these two.
_NOT_FOR_US = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGXCPU,
)
_TERM_TIMEOUT = timedelta(seconds=0.5)
_TRACKER_TIMEOUT = timedelta(seconds=3)  # they clean up in milliseconds, but the machine may be busy
_DESCENDANTS_TIMEOUT = timedelta(seconds=4)
_TRACKER = b"resource_tracker"  # in the command line of multiprocessing's and loky's
_POLL_INTERVAL = timedelta(seconds=0.05)
_REASON_BYTES = 2000
_Handlers = Mapping[signal.Signals, Any]


@dataclass(frozen=True, slots=True)
class _ForkRequest:
    """A fork request: the descriptors that the supervisor sends."""

    channel: int
    output: int
    status: int
    """Socket for `born <subreaper pid>`, then `ended <wait status>`; or `failed <errno>` or `unsafe <reason>` alone."""
    word: bytes = FORK
    """`FORK` for a trial's process; `IMPORT` for a template, whose fork requests come on `channel`."""

    @property
    def descriptors(self) -> list[int]:
        return [self.channel, self.output, self.status]

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


def fork_server_main(control_fd: int, supervisor: int) -> Life | None:
    """Serve each fork request on `control_fd`, until its other side is closed or the supervisor is gone."""
    alive = while_alive(supervisor)
    if os.getppid() != supervisor:
        return None  # the supervisor died before the pidfd was opened
    set_process_name(b"tune-forkserver")
    copy_context().run(warm_up)
    return _serve_forks(socket.socket(fileno=control_fd), alive)


def _serve_forks(control: socket.socket, alive: Collection[int]) -> Life | None:
    """Fork a process for each request."""
    adopt_orphans()  # adopts the children of a killed subreaper
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _NOT_FOR_US}
    deaths = sigchld_pipe()
    subreapers: set[int] = set()
    gc.freeze()  # the children's collections then do not touch, and so do not copy, shared memory pages
    while not (woken := poll_readable([control.fileno(), deaths, *alive])).intersection(alive):
        if deaths in woken:
            _reap(deaths, subreapers)
        if control.fileno() in woken:
            message, descriptors, _, _ = socket.recv_fds(control, 16, 3)
            if not message:
                break
            channel, output, status = descriptors
            request = _ForkRequest(channel, output, status, message)
            if (subreaper := _fork(request)) == 0:
                control.close()
                return partial(_subreaper_main, request, alive, before)
            if subreaper > 0:
                subreapers.add(subreaper)
            request.close()
    while _reap(deaths, subreapers) and subreapers:  # this process ends what a subreaper leaves that is killed
        poll_readable([deaths])
    _end_descendants(deaths)
    control.close()
    return None


def _reap(deaths: int, subreapers: set[int]) -> bool:
    """Reap ended children, and kill what a killed subreaper has left; return whether a child is alive."""
    drain_pipe(deaths)
    with suppress(ChildProcessError):
        while (death := os.waitpid(-1, os.WNOHANG))[0]:
            is_subreaper = death[0] in subreapers
            subreapers.discard(death[0])
            if not is_subreaper or death[1] != 0:
                send_signal(signal.SIGKILL, children_of(os.getpid()) - subreapers)
        return True
    return False


# The subreaper.


def _subreaper_main(request: _ForkRequest, alive: Collection[int], before: _Handlers) -> Life | None:
    """Fork the trial's process, wait for its end, end its descendants, and report its wait status."""
    os.setsid()  # a kill of the fork server's process group must not reach the subreaper
    keep_only(*request.descriptors, *alive)
    set_process_name(b"tune-subreaper")
    adopt_orphans()
    deaths, subreaper = sigchld_pipe(), os.getpid()
    if (trial := _fork(request)) == 0:
        return partial(_run_forked, request, subreaper, before)
    if trial > 0:
        os.close(request.channel)
        os.close(request.output)
        _send(request.status, "born", subreaper)
        _wait_for_end(trial, deaths, [request.status, *alive])
        os.kill(trial, signal.SIGKILL)  # does nothing to a process that is dead already
        _, status = os.waitpid(trial, 0)
        _end_descendants(deaths)
        _send(request.status, "ended", status)
    return None


def _wait_for_end(trial: int, deaths: int, ends: Collection[int]) -> None:
    """Return when the trial's process is dead, or a descriptor of `ends` is readable: end of file."""
    while True:
        # Without reaping it: until it is reaped, the pid is not reused.
        dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if dead is not None and dead.si_pid == trial:
            return
        if dead is not None:
            os.waitpid(dead.si_pid, 0)  # an orphaned descendant of the trial
        elif poll_readable([deaths, *ends]).intersection(ends):
            return
        else:
            drain_pipe(deaths)


def _end_descendants(deaths: int) -> None:
    """End all children: SIGTERM at once, SIGKILL after 0.5 s, give up after 4 s.

    Resource trackers ignore SIGTERM, remove what the other processes have left in shared memory, and exit: they have
    3 s for it.
    """
    began = time.monotonic()
    terminated: set[int] = set()
    while _has_children() and (waited := timedelta(seconds=time.monotonic() - began)) < _DESCENDANTS_TIMEOUT:
        left = children_of(os.getpid())  # includes descendants whose parent has just died
        send_signal(signal.SIGTERM, left - terminated)
        terminated |= left
        if waited >= _TERM_TIMEOUT:
            cleaning_up = {each for each in left if waited < _TRACKER_TIMEOUT and _TRACKER in command_of(each)}
            send_signal(signal.SIGKILL, left - cleaning_up)
        if poll_readable([deaths], _POLL_INTERVAL):
            drain_pipe(deaths)


def _has_children() -> bool:
    """Reap dead children; return whether another child is alive."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    return False


# The trial's process, or a template.


def _run_forked(request: _ForkRequest, subreaper: int, before: _Handlers) -> Life | None:
    """Serve trials; or be a template: import a trainable, then, if that is safe, fork its trials as the server does.

    First it is set up as if it had been started by exec.
    """
    os.setsid()
    die_with_parent()
    if os.getppid() != subreaper:
        return None  # the subreaper died before prctl was called
    set_process_name(b"tune-template" if request.word == IMPORT else b"trial")
    os.dup2(request.output, 1)
    os.dup2(request.output, 2)
    keep_only(request.channel)
    os.set_inheritable(request.channel, False)  # noqa: FBT003 - takes no keyword arguments
    signal.set_wakeup_fd(-1)
    for number, handler in {**before, signal.SIGCHLD: signal.SIG_DFL}.items():
        signal.signal(number, handler)
    if request.word == FORK:
        forget_exit_handlers()
        serve(Connection(request.channel))
        return None
    ignore_group_signals()
    control = socket.socket(fileno=request.channel)
    _, files, _, _ = socket.recv_fds(control, 16, 1)
    if not files:
        return None  # the supervisor is gone
    with os.fdopen(files[0], "rb") as file:
        importing = ImportRequest.model_validate_json(file.read())
    reset_process_state(importing.environment)
    print_logs_of_run()
    reason = _import_before_forking(importing)
    control.send((reason or READY).encode("utf-8", "replace")[:_REASON_BYTES])
    return None if reason else partial(_serve_forks, control, while_alive(importing.supervisor))


def _fork(request: _ForkRequest) -> int:
    """Fork; on failure report it on the request's socket, and return -1.

    A fork beside another thread may hang for ever. Some libraries end theirs in a handler of the fork: so the threads
    are counted after it, and the child waits for that.
    """
    try:
        waiting, counted = os.pipe()
        try:
            child = os.fork()
        except OSError:
            os.close(waiting)
            os.close(counted)
            raise
    except OSError as error:
        _send(request.status, "failed", error.errno)
        return -1
    if child == 0:
        os.close(counted)
        is_safe = os.read(waiting, 1)
        os.close(waiting)
        return 0 if is_safe else os._exit(1)
    os.close(waiting)
    if threads := _running_threads():
        send_signal(signal.SIGKILL, {child, *children_of(child)})
        os.waitpid(child, 0)
        _send(request.status, "unsafe", f"threads run beside its forks: {', '.join(threads)}")
    else:
        os.write(counted, b"1")
    os.close(counted)
    return -1 if threads else child


def _send(status: int, code: str, *arguments: object) -> None:
    """Send a code and its arguments, as one packet: the last one may be a text."""
    with suppress(OSError):  # the supervisor is gone
        os.write(status, " ".join((code, *map(str, arguments)))[:_REASON_BYTES].encode())


# Import a trainable once, in the process that its trials are forked from, if forks of that process are safe then.
#
# A fork has only the thread that forked. Locks that other threads hold stay locked in it, and a GPU driver or a socket
# that it shares with the parent breaks or hangs. So after the import, what is certain and takes no time is checked:
#
# - libraries that refuse forks in their documentation: JAX, TensorFlow, MPI;
# - descriptors that the import left open: a GPU, sockets, pipes to processes, files;
# - threads: Python's at once, those of libraries after each fork, since some end theirs in a handler of the fork.
#
# A fork that hangs all the same is replaced by its supervisor after 60 s.
# https://pubs.opengroup.org/onlinepubs/9799919799/functions/fork.html

# Their documentation, or a warning at each fork, says that a fork may hang once they are imported.
_REFUSE_FORKS = {"jax": "JAX", "tensorflow": "TensorFlow", "mpi4py.MPI": "MPI"}
# Allocators end this thread before a fork, in a handler of their own, and start it again when they need it.
_FORK_SAFE_THREADS = frozenset({"jemalloc_bg_thd"})
_USES_OPTIMIZER = re.compile(r"\boptim|Trainer")
_NO_COLLECTION = 1 << 30  # allocations until the next one


def _import_before_forking(request: ImportRequest) -> str | None:
    """Import the trainable; return why this process must not be forked, None if it may be."""
    before, collecting = open_descriptors(), gc.get_threshold()
    prepend_import_path(request.import_path)
    gc.set_threshold(_NO_COLLECTION)  # a sixth of an import's CPU time would be collections that find nothing
    try:
        with noting_import(), forks_end():
            trainable = load_trainable(request.trainable)
            remember_source(trainable)
            _import_for_optimizer(trainable)
    except BaseException as error:  # noqa: BLE001 - whatever the user's module raises, SystemExit too
        return f"its import raised {type(error).__name__}: {first_line(text_of(error))}"
    finally:
        flush_output()  # else each fork prints it again
        if gc.get_threshold()[0] == _NO_COLLECTION:  # else the module has set its own
            gc.set_threshold(*collecting)
    if refusing := [name for module, name in _REFUSE_FORKS.items() if module in sys.modules]:
        return f"it imports {' and '.join(refusing)}, which cannot be forked"
    if threads := _python_threads():
        return f"its import started threads that still run: {', '.join(threads)}"
    if opened := sorted(what for number, what in open_descriptors().items() if before.get(number) != what):
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


def _running_threads() -> list[str]:
    """Return the names of the other threads: Python's, and those of libraries."""
    if not (others := [name for name in other_thread_names() if name not in _FORK_SAFE_THREADS]):
        return []
    unnamed = others.count("")
    of_libraries = [f"{plural(unnamed, 'thread', 'threads')} of libraries, without names"] * bool(unnamed)
    return _python_threads() or sorted({f"a library's {name}" for name in others if name}) + of_libraries


def _python_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]


if __name__ == "__main__" and is_copy_for_rank() and sys.argv[2:3] != [str(os.getppid())]:
    train_as_rank()
elif __name__ == "__main__":
    run_forever(partial(fork_server_main, *take_numbers()))
elif __name__ == "__mp_main__":  # in a process that a trial has started by `spawn`
    globals().update(names_for_spawned())
