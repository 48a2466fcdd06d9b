"""The fork server, from which trial processes are forked. It does not import Prefect.

It is started as `python -m prefect_tune.runtime.processes.fork_server`. It imports the modules that every trial needs,
but no user code, and it has one thread, so it can be forked safely at any time. A subreaper process is between the fork
server and each trial's process (an arrow points from a child process to its parent):

    supervisor <- fork server <- subreaper <- trial's process <- its descendants

A template is a process that imports a trainable, then becomes a fork server for its trials. It has a subreaper, too:

    fork server <- subreaper <- template <- subreaper <- trial's process

Due to `PR_SET_CHILD_SUBREAPER`, orphaned descendants of the trial, of any session, become children of the subreaper.
When the trial's process exits, or when the supervisor exits or requests the end, the subreaper ends all descendants and
reports the wait status of the trial's process. If a subreaper is killed, the fork server, which has its own session,
inherits the descendants and ends them. If the fork server is killed, its subreapers finish their work. Descendants of
the trial's process stay alive only if both the subreaper and the fork server are killed. Even then, the trial's process
ends, because Linux kills it together with its subreaper (`PR_SET_PDEATHSIG`).
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

from prefect_tune.core.display_text import first_line, pluralize
from prefect_tune.core.messages.process_messages import FORK_REQUEST, IMPORT_REQUEST, TEMPLATE_READY, ImportRequest
from prefect_tune.linux import (
    become_subreaper,
    close_other_descriptors,
    die_with_parent,
    drain_pipe,
    find_children,
    get_cmdline,
    list_descriptors,
    list_other_thread_names,
    open_sigchld_pipe,
    poll_readable,
    send_signal,
    set_process_name,
    try_open_pidfd,
)
from prefect_tune.runtime import checkpoint  # noqa: F401 - for the trials: `pt.Checkpoint`
from prefect_tune.runtime.load_named import load_definitions_for_spawn, load_trainable, prepend_import_path
from prefect_tune.runtime.processes.process_reset import (
    clear_exit_handlers,
    flush_output,
    install_printing_loggers,
    recording_import_effects,
    reset_process_state,
)
from prefect_tune.runtime.processes.trial_process import (
    MainFunction,
    exiting_forked_children,
    ignore_group_signals,
    pop_program_arguments,
    record_source_digest,
    run_and_exit,
    serve_attempts,
    train_as_rank,
    warm_up,
)
from prefect_tune.runtime.ranks import is_relaunched_as_rank
from prefect_tune.runtime.trial_errors import format_error_text

# The fork server and subreapers ignore these signals, which terminals and cluster schedulers send to a whole job.
_TERMINAL_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
_SCHEDULER_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
_TERM_TIMEOUT = timedelta(seconds=0.5)
_TRACKER_TIMEOUT = timedelta(seconds=3)  # enough even on a busy machine; a resource tracker usually needs milliseconds
_DESCENDANTS_TIMEOUT = timedelta(seconds=4)
_TRACKER_NAME = b"resource_tracker"  # the command lines of multiprocessing's and loky's trackers contain it
_POLL_INTERVAL = timedelta(seconds=0.05)
_MAX_STATUS_BYTES = 2000
_Handlers = Mapping[signal.Signals, Any]


@dataclass(frozen=True, slots=True)
class _ForkRequest:
    """A fork request with the descriptors that the supervisor sends."""

    channel_fd: int
    output_fd: int
    status_fd: int
    """Receives `born <subreaper pid>`, then `ended <wait status>`; or only `failed <errno>` or `unsafe <reason>`."""
    command: bytes = FORK_REQUEST
    """`FORK_REQUEST`: start a trial. `IMPORT_REQUEST`: start a template, which gets fork requests on `channel_fd`."""


def fork_server_main(control_fd: int, supervisor: int) -> MainFunction | None:
    """Serve fork requests on the socket `control_fd` until its other end is closed or the supervisor exits."""
    supervisor_fds = try_open_pidfd(supervisor)
    if os.getppid() != supervisor:
        return None  # the supervisor exited before the pidfd was opened
    set_process_name(b"tune-forkserver")
    copy_context().run(warm_up)
    return _serve_fork_requests(socket.socket(fileno=control_fd), supervisor_fds)


def _serve_fork_requests(control: socket.socket, supervisor_fds: Collection[int]) -> MainFunction | None:
    """Fork a process for each request, until the other end of `control` is closed or the supervisor exits."""
    become_subreaper()  # so that this process inherits the children of a killed subreaper
    ignored = (*_TERMINAL_SIGNALS, *_SCHEDULER_SIGNALS)
    original_handlers = {number: signal.signal(number, signal.SIG_IGN) for number in ignored}
    sigchld_fd = open_sigchld_pipe()
    subreapers: set[int] = set()
    gc.freeze()  # else garbage collections in the children would copy shared memory pages
    fds = [control.fileno(), sigchld_fd, *supervisor_fds]
    while not (readable := poll_readable(fds)).intersection(supervisor_fds):
        if sigchld_fd in readable:
            _reap_subreapers(sigchld_fd, subreapers)
        if control.fileno() in readable:
            message, descriptors, _, _ = socket.recv_fds(control, 16, 3)
            if not message:
                break
            channel, output, status = descriptors
            request = _ForkRequest(channel, output, status, message)
            if (subreaper := _fork_child(request)) == 0:
                control.close()
                return partial(_subreaper_main, request, supervisor_fds, original_handlers)
            if subreaper > 0:
                subreapers.add(subreaper)
            for descriptor in descriptors:
                os.close(descriptor)
    while _reap_subreapers(sigchld_fd, subreapers) and subreapers:  # wait for the exit of all subreapers
        poll_readable([sigchld_fd])
    _end_descendants(sigchld_fd)
    control.close()
    return None


def _reap_subreapers(sigchld_fd: int, subreapers: set[int]) -> bool:
    """Reap exited children, and kill the descendants of killed subreapers. Return whether a child is alive."""
    drain_pipe(sigchld_fd)
    with suppress(ChildProcessError):
        while (exited := os.waitpid(-1, os.WNOHANG))[0]:
            is_subreaper = exited[0] in subreapers
            subreapers.discard(exited[0])
            if not is_subreaper or exited[1] != 0:
                send_signal(signal.SIGKILL, find_children(os.getpid()) - subreapers)
        return True
    return False


# The subreaper.


def _subreaper_main(request: _ForkRequest, supervisor_fds: Collection[int], handlers: _Handlers) -> MainFunction | None:
    """Fork the trial's process, wait for its exit, end its descendants, and report its wait status."""
    os.setsid()  # a kill of the fork server's process group must not reach the subreaper
    close_other_descriptors(request.channel_fd, request.output_fd, request.status_fd, *supervisor_fds)
    set_process_name(b"tune-subreaper")
    become_subreaper()
    sigchld_fd, subreaper = open_sigchld_pipe(), os.getpid()
    if (trial := _fork_child(request)) == 0:
        return partial(_child_main, request, subreaper, handlers)
    if trial > 0:
        os.close(request.channel_fd)
        os.close(request.output_fd)
        _send_status(request.status_fd, "born", subreaper)
        _wait_for_trial_exit(trial, sigchld_fd, [request.status_fd, *supervisor_fds])
        os.kill(trial, signal.SIGKILL)  # the trial's process still runs if the supervisor has ended the wait
        _, status = os.waitpid(trial, 0)
        _end_descendants(sigchld_fd)
        _send_status(request.status_fd, "ended", status)
    return None


def _wait_for_trial_exit(trial: int, sigchld_fd: int, stop_fds: Collection[int]) -> None:
    """Wait until the trial's process exits, or until `stop_fds` show that the supervisor exits or requests the end."""
    while True:
        # WNOWAIT does not reap the trial's process, so its pid is not reused before the caller's `os.kill`.
        exited = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if exited is not None and exited.si_pid == trial:
            return
        if exited is not None:
            os.waitpid(exited.si_pid, 0)  # reap an orphaned descendant of the trial
        elif poll_readable([sigchld_fd, *stop_fds]).intersection(stop_fds):
            return
        else:
            drain_pipe(sigchld_fd)


def _end_descendants(sigchld_fd: int) -> None:
    """End all children: send SIGTERM at once and SIGKILL after 0.5 s; return after 4 s even if a child is alive.

    Resource trackers ignore SIGTERM. They get 3 s to remove the shared memory of the other processes and exit.
    """
    started_at = time.monotonic()
    terminated: set[int] = set()
    while _reap_children() and (waited := timedelta(seconds=time.monotonic() - started_at)) < _DESCENDANTS_TIMEOUT:
        children = find_children(os.getpid())  # includes descendants whose parent has just exited
        send_signal(signal.SIGTERM, children - terminated)
        terminated |= children
        if waited >= _TERM_TIMEOUT:
            trackers = {pid for pid in children if waited < _TRACKER_TIMEOUT and _TRACKER_NAME in get_cmdline(pid)}
            send_signal(signal.SIGKILL, children - trackers)
        if poll_readable([sigchld_fd], _POLL_INTERVAL):
            drain_pipe(sigchld_fd)


def _reap_children() -> bool:
    """Reap exited children; return whether another child is alive."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    return False


# The trial's process, or a template.


def _child_main(request: _ForkRequest, subreaper: int, handlers: _Handlers) -> MainFunction | None:
    """In a trial's process, serve trials; in a template, import a trainable, and serve fork requests if forks are safe.

    First, the process is set up as if it had been started by exec.
    """
    os.setsid()
    die_with_parent()
    if os.getppid() != subreaper:
        return None  # the subreaper exited before `die_with_parent` was called
    set_process_name(b"tune-template" if request.command == IMPORT_REQUEST else b"trial")
    os.dup2(request.output_fd, 1)
    os.dup2(request.output_fd, 2)
    close_other_descriptors(request.channel_fd)
    os.set_inheritable(request.channel_fd, False)  # noqa: FBT003 - takes no keyword arguments
    signal.set_wakeup_fd(-1)
    for number, handler in {**handlers, signal.SIGCHLD: signal.SIG_DFL}.items():
        signal.signal(number, handler)
    if request.command == FORK_REQUEST:
        clear_exit_handlers()
        serve_attempts(Connection(request.channel_fd))
        return None
    ignore_group_signals()
    control = socket.socket(fileno=request.channel_fd)
    _, files, _, _ = socket.recv_fds(control, 16, 1)
    if not files:
        return None  # the supervisor has exited
    with os.fdopen(files[0], "rb") as file:
        import_request = ImportRequest.model_validate_json(file.read())
    reset_process_state(import_request.environment)
    install_printing_loggers()
    reason = _preload_trainable(import_request)
    control.send((reason or TEMPLATE_READY).encode("utf-8", "replace")[:_MAX_STATUS_BYTES])
    return None if reason else partial(_serve_fork_requests, control, try_open_pidfd(import_request.supervisor))


def _fork_child(request: _ForkRequest) -> int:
    """Fork. Return the child's pid, or 0 in the child. If the fork fails or is unsafe, send the reason and return -1.

    A child that is forked while other threads run may hang forever. Since some libraries end their threads in a fork
    handler, the parent looks for threads only after the fork, and the child waits for the result.
    """
    try:
        read_fd, write_fd = os.pipe()
        try:
            child = os.fork()
        except OSError:
            os.close(read_fd)
            os.close(write_fd)
            raise
    except OSError as error:
        _send_status(request.status_fd, "failed", error.errno)
        return -1
    if child == 0:
        os.close(write_fd)
        is_safe = os.read(read_fd, 1)
        os.close(read_fd)
        return 0 if is_safe else os._exit(1)
    os.close(read_fd)
    if threads := _list_unsafe_threads():
        send_signal(signal.SIGKILL, {child, *find_children(child)})
        os.waitpid(child, 0)
        _send_status(request.status_fd, "unsafe", f"other threads run during its forks: {', '.join(threads)}")
    else:
        os.write(write_fd, b"1")
    os.close(write_fd)
    return -1 if threads else child


def _send_status(status_fd: int, code: str, *arguments: object) -> None:
    """Send a code and its arguments in one packet. The last argument may contain spaces."""
    with suppress(OSError):  # the supervisor has exited
        os.write(status_fd, " ".join((code, *map(str, arguments)))[:_MAX_STATUS_BYTES].encode())


# Import a trainable once, and then fork its trials from the process that imported it, if such forks are safe.
# A forked child has only the thread that forked. Locks held by other threads stay locked in the child, and a GPU driver
# or a socket that child and parent share breaks or hangs. So after the import, fast and reliable checks look for:
#
# - libraries whose documentation forbids forks: JAX, TensorFlow, MPI;
# - descriptors that the import left open: a GPU, sockets, pipes to processes, files;
# - threads: of Python, right after the import; of libraries, after each fork, since fork handlers end some of them.
#
# After 60 s, the supervisor replaces a forked child that hangs despite these checks.
# https://pubs.opengroup.org/onlinepubs/9799919799/functions/fork.html

# After an import of one of these libraries, a fork may hang or print a warning, as the library's documentation says.
_FORK_UNSAFE_LIBRARIES = {"jax": "JAX", "tensorflow": "TensorFlow", "mpi4py.MPI": "MPI"}
# This thread is no risk, because jemalloc's fork handler ends it before a fork; jemalloc restarts it when needed.
_FORK_SAFE_THREADS = frozenset({"jemalloc_bg_thd"})
_OPTIMIZER_PATTERN = re.compile(r"\boptim|Trainer")
_GC_OFF_THRESHOLD = 1 << 30  # allocations until the next garbage collection


def _preload_trainable(request: ImportRequest) -> str | None:
    """Import the trainable. Return why this process must not be forked, or None if it may be forked."""
    before, gc_threshold = list_descriptors(), gc.get_threshold()
    prepend_import_path(request.import_path)
    gc.set_threshold(_GC_OFF_THRESHOLD)  # during an import, collections free nothing and take a sixth of the CPU time
    try:
        with recording_import_effects(), exiting_forked_children():
            trainable = load_trainable(request.trainable)
            record_source_digest(trainable)
            _warm_up_optimizer(trainable)
    except BaseException as error:  # noqa: BLE001 - anything that the user's module raises, including SystemExit
        return f"its import raised {type(error).__name__}: {first_line(format_error_text(error))}"
    finally:
        flush_output()  # else each fork would print the buffered text again
        if gc.get_threshold()[0] == _GC_OFF_THRESHOLD:  # unless the module has set its own threshold
            gc.set_threshold(*gc_threshold)
    if unsafe := [name for module, name in _FORK_UNSAFE_LIBRARIES.items() if module in sys.modules]:
        return f"it imports {' and '.join(unsafe)}, which cannot be forked"
    if threads := _list_python_threads():
        return f"its import started threads that still run: {', '.join(threads)}"
    if left_open := sorted(kind for number, kind in list_descriptors().items() if before.get(number) != kind):
        return f"its import left open: {', '.join(left_open)}"
    return None


def _warm_up_optimizer(trainable: object) -> None:
    """Take a step with a PyTorch optimizer here, so that no trial repeats the first step's imports (1.7 s of CPU time).

    Do so only if the trainable's module mentions an optimizer. If the trainable does not use it, only time is lost.
    """
    name = getattr(trainable, "__module__", "")
    with suppress(Exception):  # various errors if there is no source; any other error occurs in the trials, too
        # The module of a script's trainable is `__main__`, which is not the script here: get the trainable's source.
        source = inspect.getsource(cast("type", trainable) if name == "__main__" else sys.modules[name])
        if (torch := sys.modules.get("torch")) is not None and _OPTIMIZER_PATTERN.search(source):
            torch.optim.SGD([torch.zeros(1, device="cpu", requires_grad=True)], lr=0.0).step()


def _list_unsafe_threads() -> list[str]:
    """Return the names of the other Python threads or, if there are none, of the threads that libraries started."""
    if not (others := [name for name in list_other_thread_names() if name not in _FORK_SAFE_THREADS]):
        return []
    unnamed = others.count("")
    unnamed_text = [pluralize(unnamed, "unnamed library thread", "unnamed library threads")] * bool(unnamed)
    return _list_python_threads() or sorted({f"a library's {name}" for name in others if name}) + unnamed_text


def _list_python_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]


if __name__ == "__main__" and is_relaunched_as_rank() and sys.argv[2:3] != [str(os.getppid())]:
    train_as_rank()
elif __name__ == "__main__":
    run_and_exit(partial(fork_server_main, *pop_program_arguments()))
elif __name__ == "__mp_main__":  # in a process that a trial has started by `spawn`
    globals().update(load_definitions_for_spawn())
