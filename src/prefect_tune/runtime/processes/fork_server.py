"""The fork server that trial processes are forked from, without Prefect.

It is started as `python -m prefect_tune.runtime.processes.fork_server`.

It has imported what every trial needs and no user code, and it has one thread, so a fork of it is safe whatever the
supervisor is doing. Between it and each trial's process is a subreaper process:

    supervisor <- fork server <- subreaper <- trial's process <- its descendants

A template is such a process too. It imports a trainable (`fork_safety.py`, beside this file), and then is itself
a fork server, for trials of that trainable:

    fork server <- subreaper <- template <- subreaper <- trial's process

The subreaper sets `PR_SET_CHILD_SUBREAPER`, so orphaned descendants of the trial become its children, in any session.
When the supervisor requests it or is gone, and when the trial's process has ended, it ends all of them and reports
the trial's wait status. Then it may serve another trial. The fork server is a child subreaper too, in a session of its
own: it ends what a killed subreaper leaves. If the fork server is killed, its subreapers finish their work. Only
`kill -9` of both leaves processes alive: descendants of the trial's process, while Linux kills that process itself
together with its subreaper (`PR_SET_PDEATHSIG`).
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NoReturn, TypeAlias

from prefect_tune.core.messages.process_messages import FORK, IMPORT, READY, ImportRequest
from prefect_tune.runtime import checkpoint  # noqa: F401 - for the trials: `pt.Checkpoint`
from prefect_tune.runtime.load_named import names_for_spawned
from prefect_tune.runtime.processes.fork_safety import LateImport, import_before_forking, running_threads
from prefect_tune.runtime.processes.linux import (
    adopt_orphans,
    children_of,
    command_of,
    die_with_parent,
    keep_only,
    rung,
    send_signal,
    set_process_name,
    sigchld_pipe,
    silence,
    while_alive,
)
from prefect_tune.runtime.processes.process_reset import flush_output, settle_in
from prefect_tune.runtime.processes.trial_process import (
    ignore_group_signals,
    rehearse,
    serve,
    take_numbers,
    train_as_rank,
)
from prefect_tune.runtime.ranks import is_copy_for_rank
from prefect_tune.runtime.run_logging import print_logs_of_run

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
_STRAYS_LEAVE_WITHIN = timedelta(seconds=0.5)
_TRACKERS_LEAVE_WITHIN = timedelta(seconds=3)  # they clean up in milliseconds, but the machine may be busy
_STRAYS_DIE_WITHIN = timedelta(seconds=4)
_TRACKER = b"resource_tracker"  # in the command line of multiprocessing's and loky's
_LOOK_AGAIN = timedelta(seconds=0.05)
_SUBREAPERS_STAY = timedelta(seconds=0.2)  # if another trial follows, its process is requested at once
_FIRST_REQUEST_WITHIN = timedelta(seconds=0.5)  # a search that waits for a template sends one in milliseconds
_FREE = b"free"
_REASON_BYTES = 2000
_Handlers = Mapping[signal.Signals, Any]
_Life: TypeAlias = "Callable[[], _Life | None]"


@dataclass(frozen=True, slots=True)
class _ForkRequest:
    """A fork request: the descriptors that the supervisor sends."""

    channel: int
    output: int
    status: int
    """Socket for `born <subreaper pid> <trial pid>`, then `ended <wait status>`; or `failed <errno>` alone."""
    word: bytes = FORK
    """`FORK` for a trial's process; `IMPORT` for a template, whose fork requests come on `channel`."""

    @property
    def descriptors(self) -> list[int]:
        return [self.channel, self.output, self.status]

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


def run_forever(life: _Life | None) -> NoReturn:
    """Run a process's main function, then the one that it returns, and so on; then exit.

    A forked child returns its own main function, so that it does not run on the stack of its parent's.
    """
    code = 1
    try:
        while life is not None:
            life = life()
        code = 0
    except BaseException:  # noqa: BLE001 - the process's edge: a traceback, and exit code 1
        with suppress(Exception):  # the trainable has replaced stderr
            traceback.print_exc()
    finally:
        flush_output()
        os._exit(code)


def fork_server_main(control_fd: int, supervisor: int) -> _Life | None:
    """Serve each fork request on `control_fd`, until its other side is closed or the supervisor is gone."""
    alive = while_alive(supervisor)
    if os.getppid() != supervisor:
        return None  # the supervisor died before the pidfd was opened
    set_process_name(b"tune-forkserver")
    copy_context().run(rehearse)
    return _serve_forks(socket.socket(fileno=control_fd), alive)


def _serve_forks(control: socket.socket, alive: Collection[int], late: LateImport | None = None) -> _Life | None:
    """Fork a process for each request.

    `late` runs after the first fork if trials are likely to need it, else once one has needed it. Requests wait
    meanwhile, which takes no longer than the same import in their processes.
    """
    adopt_orphans()  # adopts the children of a killed subreaper
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _NOT_FOR_US}
    deaths = sigchld_pipe()
    subreapers: dict[int, socket.socket] = {}
    gc.freeze()  # the children's collections then do not touch, and so do not copy, shared memory pages
    unfit, patience = "", _FIRST_REQUEST_WITHIN if late is not None and late.is_expected else None
    while not (woken := rung([control.fileno(), deaths, *alive], patience)).intersection(alive):
        if deaths in woken:
            _reap(deaths, subreapers)
        if control.fileno() in woken:
            if (request := _next_request(control)) is None:
                break
            if late is not None and late.is_needed():
                unfit, late = _import_late(late, subreapers.values()), None
            if unfit:
                _send(request.status, "unfit", unfit)
                request.close()
                continue
            is_passed_on = _is_passed_on(subreapers.values(), request)
            if not is_passed_on and (line := _new_subreaper(subreapers, request)) is not None:
                _close([control, *subreapers.values()])
                return partial(_subreaper_main, line, request, alive, before)
            request.close()
        if late is not None and late.is_expected:
            unfit, late, patience = _import_late(late, subreapers.values()), None, None
    _outlive(subreapers, deaths)
    control.close()
    return None


def _import_late(late: LateImport, subreapers: Collection[socket.socket]) -> str:
    """Run `late`; have the subreapers, which fork their trials and were forked before it, serve no other trial."""
    unfit = late.run()
    _close(subreapers)
    return unfit


def _close(sockets: Collection[socket.socket]) -> None:
    for each in sockets:
        each.close()


def _next_request(control: socket.socket) -> _ForkRequest | None:
    """Return the next request; None at end of file."""
    message, descriptors, _, _ = socket.recv_fds(control, 16, 3)
    if not message:
        return None
    channel, output, status = descriptors
    return _ForkRequest(channel, output, status, message)


def _is_passed_on(subreapers: Collection[socket.socket], request: _ForkRequest) -> bool:
    """Pass the request to a subreaper that has reported that it is free; return whether there was one."""
    for subreaper in subreapers:
        with suppress(OSError):  # it is busy, or has just exited
            if subreaper.recv(16, socket.MSG_DONTWAIT) == _FREE:
                socket.send_fds(subreaper, [request.word], request.descriptors)
                return True
    return False


def _new_subreaper(subreapers: dict[int, socket.socket], request: _ForkRequest) -> socket.socket | None:
    """Fork a subreaper. In the new process, return its socket to the fork server; in the fork server, None."""
    try:
        theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as error:  # such as too many open files: trials that run must not end for that
        _send(request.status, "failed", error.errno)
        return None
    if (subreaper := _fork(request)) == 0:
        ours.close()
        return theirs
    theirs.close()
    if subreaper > 0:
        subreapers[subreaper] = ours
    else:
        ours.close()
    return None


def _reap(deaths: int, subreapers: dict[int, socket.socket]) -> bool:
    """Reap ended children, and kill what a killed subreaper has left; return whether a child is alive."""
    silence(deaths)
    with suppress(ChildProcessError):
        while (death := os.waitpid(-1, os.WNOHANG))[0]:
            if (line := subreapers.pop(death[0], None)) is not None:
                line.close()
            if line is None or death[1] != 0:
                send_signal(signal.SIGKILL, children_of(os.getpid()) - subreapers.keys())
        return True
    return False


def _outlive(subreapers: dict[int, socket.socket], deaths: int) -> None:
    """Wait until the last subreaper has exited: if one is killed meanwhile, this process ends what it leaves."""
    _close(subreapers.values())  # a free subreaper exits at once
    while _reap(deaths, subreapers) and subreapers:
        rung([deaths])
    _end_strays(deaths)


# ------------------------------------------------------------------------------------------------ the subreaper


def _subreaper_main(
    pool: socket.socket, first: _ForkRequest, alive: Collection[int], before: _Handlers
) -> _Life | None:
    """Supervise one trial process, then take the next request."""
    os.setsid()  # a kill of the fork server's process group must not reach the subreaper
    keep_only(pool.fileno(), *first.descriptors, *alive)
    set_process_name(b"tune-subreaper")
    adopt_orphans()
    deaths, subreaper = sigchld_pipe(), os.getpid()
    request: _ForkRequest | None = first
    while request is not None:
        if (trial := _fork(request)) == 0:
            pool.close()
            return partial(_import_and_fork if request.word == IMPORT else _run_trial, request, subreaper, before)
        os.close(request.channel)
        os.close(request.output)
        is_done = trial < 0 or _look_after(trial, request.status, deaths, alive)
        os.close(request.status)
        request = _next_when_free(pool, alive) if is_done and _has_no_children_left() else None
    pool.close()
    return None


def _look_after(trial: int, status: int, deaths: int, alive: Collection[int]) -> bool:
    """Wait for the trial's end, end its descendants, and report its wait status; return whether it ended by itself.

    If it did not, the supervisor may kill this subreaper for being late, so it must not serve another trial.
    """
    _send(status, "born", os.getpid(), trial)
    by_itself = _ends_by_itself(trial, deaths, [status, *alive])
    _send(status, "ended", _end(trial, deaths))
    return by_itself


def _has_no_children_left() -> bool:
    """Whether no child is left: one that could not be killed must not be confused with the next trial's children."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return False


def _next_when_free(pool: socket.socket, alive: Collection[int]) -> _ForkRequest | None:
    """Report to be free for 0.2 s; return a request that arrives in that time, else None."""
    with suppress(OSError):  # no request, or the fork server is gone
        pool.send(_FREE)
        woken = rung([pool.fileno(), *alive], _SUBREAPERS_STAY)
        if not woken:
            pool.shutdown(socket.SHUT_RD)  # no request can be sent any more; one may have been sent just before
        if not woken.intersection(alive):
            return _next_request(pool)
    return None


def _ends_by_itself(trial: int, deaths: int, ends: Collection[int]) -> bool:
    """Return True when the trial's process is dead; False when a descriptor of `ends` is readable: end of file."""
    while (dead := _first_dead()) != trial:
        if dead is not None:
            os.waitpid(dead, 0)  # an orphaned descendant of the trial
        elif rung([deaths, *ends]).intersection(ends):
            return False
        else:
            silence(deaths)
    return True


def _first_dead() -> int | None:
    """Return the pid of a dead child without reaping it: until it is reaped, the pid is not reused."""
    found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return found.si_pid if found else None


def _end(trial: int, deaths: int) -> int:
    """Kill the trial's process and end its descendants; return the trial's wait status."""
    os.kill(trial, signal.SIGKILL)  # does nothing to a process that is dead already
    _, status = os.waitpid(trial, 0)
    _end_strays(deaths)
    return status


def _end_strays(deaths: int) -> None:
    """End all children: SIGTERM at once, SIGKILL after 0.5 s, give up after 4 s.

    Resource trackers ignore SIGTERM, remove what the other processes have left in shared memory, and exit: they have
    3 s for it.
    """
    began = time.monotonic()
    terminated: set[int] = set()
    while _has_children() and (waited := timedelta(seconds=time.monotonic() - began)) < _STRAYS_DIE_WITHIN:
        left = children_of(os.getpid())  # includes descendants whose parent has just died
        send_signal(signal.SIGTERM, left - terminated)
        terminated |= left
        if waited >= _STRAYS_LEAVE_WITHIN:
            cleaning_up = {each for each in left if waited < _TRACKERS_LEAVE_WITHIN and _TRACKER in command_of(each)}
            send_signal(signal.SIGKILL, left - cleaning_up)
        if rung([deaths], _LOOK_AGAIN):
            silence(deaths)


def _has_children() -> bool:
    """Reap dead children; return whether another child is alive."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    return False


# --------------------------------------------------------------------------------------------- the trial's process


def _run_trial(request: _ForkRequest, subreaper: int, before: _Handlers) -> None:
    """Serve trials."""
    if _is_set_up(request, subreaper, before, b"trial"):
        serve(Connection(request.channel))


def _import_and_fork(request: _ForkRequest, subreaper: int, before: _Handlers) -> _Life | None:
    """Be a template: import a trainable; then, if that is safe, fork its trials as the fork server does."""
    if not _is_set_up(request, subreaper, before, b"tune-template"):
        return None
    ignore_group_signals()
    control = socket.socket(fileno=request.channel)
    _, files, _, _ = socket.recv_fds(control, 16, 1)
    if not files:
        return None  # the supervisor is gone
    with os.fdopen(files[0], "rb") as file:
        importing = ImportRequest.model_validate_json(file.read())
    settle_in(importing.surroundings)
    print_logs_of_run()
    late = import_before_forking(importing)
    if isinstance(late, str):
        control.send(late.encode("utf-8", "replace")[:_REASON_BYTES])
        return None
    control.send(READY.encode())
    return partial(_serve_forks, control, while_alive(importing.supervisor), late)


def _is_set_up(request: _ForkRequest, subreaper: int, before: _Handlers, name: bytes) -> bool:
    """Set the process up as if it had been started by exec; return whether its subreaper is alive."""
    os.setsid()
    die_with_parent()
    if os.getppid() != subreaper:
        return False  # the subreaper died before prctl was called
    set_process_name(name)
    os.dup2(request.output, 1)
    os.dup2(request.output, 2)
    keep_only(request.channel)
    os.set_inheritable(request.channel, False)  # noqa: FBT003 - takes no keyword arguments
    signal.set_wakeup_fd(-1)
    for number, handler in {**before, signal.SIGCHLD: signal.SIG_DFL}.items():
        signal.signal(number, handler)
    return True


def _fork(request: _ForkRequest) -> int:
    """Fork; on failure report it on the request's socket, and return -1.

    A fork beside another thread may hang for ever: such a thread is there if the trainable starts it after its import.
    """
    try:
        child = os.fork()
    except OSError as error:
        _send(request.status, "failed", error.errno)
        return -1
    if child and (threads := running_threads()):
        send_signal(signal.SIGKILL, {child, *children_of(child)})
        os.waitpid(child, 0)
        _send(request.status, "unfit", f"it started threads after its import: {', '.join(threads)}")
        return -1
    return child


def _send(status: int, code: str, *arguments: object) -> None:
    """Send a code and its arguments, as one packet: the last one may be a text."""
    with suppress(OSError):  # the supervisor is gone
        os.write(status, " ".join((code, *map(str, arguments)))[:_REASON_BYTES].encode())


if __name__ == "__main__" and is_copy_for_rank() and sys.argv[2:3] != [str(os.getppid())]:
    train_as_rank()
elif __name__ == "__main__":
    run_forever(partial(fork_server_main, *take_numbers()))
elif __name__ == "__mp_main__":  # in a process that a trial has started by `spawn`
    globals().update(names_for_spawned())
