"""The process that trials' processes are forked from: `python -m prefect_tune.nursery`, without Prefect.

It has imported what every trial needs and nothing of the user's, and it has one thread, so that a fork of it is
whole whatever the supervisor is doing. Between it and each trial's process stands a nanny:

    supervisor <- nursery <- nanny <- trial's process <- whatever that starts

The nanny is a child subreaper: what the trial starts stays below her, in whatever session. When the supervisor says so
or is gone, and when the trial's process has ended, she ends all of it, and says how the trial ended. Then she may look
after another one. The nursery is a child subreaper too, in a session of its own: it ends what a nanny leaves who was
killed. A nursery that is killed takes nothing along; its nannies finish their work. Only `kill -9` of both leaves
processes alive, those of the trial that are not the trial's own: Linux kills that one with its nanny.
"""

from __future__ import annotations

import ctypes
import gc
import os
import select
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
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from prefect_tune import checkpoint  # noqa: F401 - for the trials: `pt.Checkpoint`
from prefect_tune.trial_process import flush_output, rehearse, serve

__all__ = ["live", "nursery"]

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36  # linux/prctl.h
# Sent to all processes of a job by schedulers and terminals, to tell the training something: not these two.
_NOT_FOR_US = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGXCPU,
)
_STRAYS_LEAVE_WITHIN = timedelta(seconds=0.5)  # resource trackers clear away in milliseconds
_STRAYS_DIE_WITHIN = timedelta(seconds=2)
_LOOK_AGAIN = timedelta(seconds=0.05)
_NANNIES_STAY = timedelta(seconds=0.2)  # where another trial follows, its process is asked for at once
_FREE = b"free"
_libc = ctypes.CDLL(None)
_Handlers = Mapping[signal.Signals, Any]
_Life: TypeAlias = "Callable[[], _Life | None]"


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a supervisor sends along with its wish for a process."""

    channel: int
    output: int
    status: int
    """A socket on which the nanny says `born <nanny> <trial>`, then `ended <wait status>`; or else `failed <errno>`."""

    @property
    def descriptors(self) -> list[int]:
        return [self.channel, self.output, self.status]

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


def live(life: _Life | None) -> NoReturn:
    """A process's life, and after it the next: a fork does not stand on the stack of what its parent was doing."""
    code = 1
    try:
        while life is not None:
            life = life()
        code = 0
    except BaseException:  # noqa: BLE001 - the process's edge: its last words, and its exit code
        traceback.print_exc()
    finally:
        flush_output()
        os._exit(code)


def nursery(control_fd: int, supervisor: int) -> _Life | None:
    """Fork a nanny for each message on `control_fd`, until its other side is closed or the supervisor is gone."""
    _be_called(b"trial-nursery")
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)  # of what a killed nanny was to look after
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _NOT_FOR_US}
    deaths, alive = _bell_for_deaths(), _while_alive(supervisor)
    if os.getppid() != supervisor:
        return None  # it died before the line above
    control = socket.socket(fileno=control_fd)
    nannies: dict[int, socket.socket] = {}
    copy_context().run(rehearse)
    gc.freeze()  # what all children share is not touched, and so not copied, by their collections
    while not (rung := _rung([control_fd, deaths, *alive])).intersection(alive):
        if deaths in rung:
            _bury(deaths, nannies)
        if control_fd in rung:
            if (asked := _next_asked(control)) is None:
                break
            if not _is_given(nannies.values(), asked) and (line := _new_nannys_line(nannies, asked)) is not None:
                _close([control, *nannies.values()])
                return partial(_nanny, line, asked, alive, before)
            asked.close()
    _outlive(nannies, deaths)
    control.close()
    return None


def _close(sockets: Collection[socket.socket]) -> None:
    for each in sockets:
        each.close()


def _next_asked(control: socket.socket) -> _Asked | None:
    """Return what is asked for next; None when nothing will be."""
    message, descriptors, _, _ = socket.recv_fds(control, 16, 3)
    return _Asked(*descriptors) if message else None


def _is_given(nannies: Collection[socket.socket], asked: _Asked) -> bool:
    """Whether a nanny who has said that she is free has it."""
    for nanny in nannies:
        with suppress(OSError):  # she is busy, or has just left
            if nanny.recv(16, socket.MSG_DONTWAIT) == _FREE:
                socket.send_fds(nanny, [b"fork"], asked.descriptors)
                return True
    return False


def _new_nannys_line(nannies: dict[int, socket.socket], asked: _Asked) -> socket.socket | None:
    """Fork a nanny; return, in her process, what she hears the nursery on."""
    hers, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if (nanny := _fork(asked)) == 0:
        ours.close()
        return hers
    hers.close()
    if nanny > 0:
        nannies[nanny] = ours
    else:
        ours.close()
    return None


def _bury(deaths: int, nannies: dict[int, socket.socket]) -> bool:
    """Forget the nannies that have ended, and kill what one who was killed has left; return whether a child lives."""
    _silence(deaths)
    with suppress(ChildProcessError):
        while (death := os.waitpid(-1, os.WNOHANG))[0]:
            if (line := nannies.pop(death[0], None)) is not None:
                line.close()
            if line is None or death[1] != 0:
                _send(signal.SIGKILL, _children() - nannies.keys())
        return True
    return False


def _outlive(nannies: dict[int, socket.socket], deaths: int) -> None:
    """Stay until the last nanny has left: what one leaves who is killed meanwhile is not to live on."""
    for line in nannies.values():
        line.close()  # who is free leaves at once
    while _bury(deaths, nannies) and nannies:
        _rung([deaths])
    _end_strays(deaths)


# ---------------------------------------------------------------------------------------------------- the nanny


def _nanny(nursery: socket.socket, first: _Asked, alive: Collection[int], before: _Handlers) -> _Life | None:
    """Look after one trial's process, and then after the next that she is asked for."""
    os.setsid()  # a kill of the nursery's group is none of hers
    _keep_only(nursery.fileno(), *first.descriptors, *alive)
    _be_called(b"trial-nanny")
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    deaths, nanny = _bell_for_deaths(), os.getpid()
    asked: _Asked | None = first
    while asked is not None:
        if (trial := _fork(asked)) == 0:
            nursery.close()
            return partial(_trial, asked, nanny, before)
        os.close(asked.channel)
        os.close(asked.output)
        is_done = trial < 0 or _look_after(trial, asked.status, deaths, alive)
        os.close(asked.status)
        asked = _next_when_free(nursery, alive) if is_done and _has_nobody_left() else None
    nursery.close()
    return None


def _look_after(trial: int, status: int, deaths: int, alive: Collection[int]) -> bool:
    """See to it that the trial's process and all it has started end, and say how; return whether by itself.

    Who was told to end it may be killed for not having done so in time, and then must have nobody else.
    """
    _say(status, f"born {os.getpid()} {trial}")
    by_itself = _ends_by_itself(trial, deaths, [status, *alive])
    _say(status, f"ended {_end(trial, deaths)}")
    return by_itself


def _has_nobody_left() -> bool:
    """What could not be killed must not be taken for what the next trial has started."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return False


def _next_when_free(nursery: socket.socket, alive: Collection[int]) -> _Asked | None:
    """Be free for a moment; return what is asked for meanwhile."""
    with suppress(OSError):  # nothing is, or the nursery has gone
        nursery.send(_FREE)
        rung = _rung([nursery.fileno(), *alive], _NANNIES_STAY)
        if not rung:
            nursery.shutdown(socket.SHUT_RD)  # nothing is sent from here on; it may have been just before
        if not rung.intersection(alive):
            return _next_asked(nursery)
    return None


def _ends_by_itself(trial: int, deaths: int, ends: Collection[int]) -> bool:
    """Return when the trial's process is dead, or one of `ends` rings: no word ever comes on them."""
    while (dead := _first_dead()) != trial:
        if dead is not None:
            os.waitpid(dead, 0)  # an orphan of the trial's
        elif _rung([deaths, *ends]).intersection(ends):
            return False
        else:
            _silence(deaths)
    return True


def _first_dead() -> int | None:
    """Return a child that has died, and leave it: as long as it is not buried, its number is nobody else's."""
    found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return found.si_pid if found else None


def _end(trial: int, deaths: int) -> int:
    """Kill the trial's process, end all that it has left; return the trial's wait status."""
    os.kill(trial, signal.SIGKILL)  # changes nothing about one that is dead already
    _, status = os.waitpid(trial, 0)
    _end_strays(deaths)
    return status


def _end_strays(deaths: int) -> None:
    """End what the trial has left: by SIGTERM first, for what clears away after the others ignores that, and leaves."""
    kill_at = time.monotonic() + _STRAYS_LEAVE_WITHIN.total_seconds()
    give_up_at = kill_at + _STRAYS_DIE_WITHIN.total_seconds()
    asked: set[int] = set()
    while _has_children() and (now := time.monotonic()) < give_up_at:
        left = _children()  # those whose parent has died since are among them
        _send(signal.SIGTERM, left - asked) if now < kill_at else _send(signal.SIGKILL, left)
        asked |= left
        if _rung([deaths], _LOOK_AGAIN):
            _silence(deaths)


def _has_children() -> bool:
    """Bury the dead; return whether another child lives."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    return False


# --------------------------------------------------------------------------------------------- the trial's process


def _trial(asked: _Asked, nanny: int, before: _Handlers) -> None:
    """Become a process like one that was started by itself, and serve."""
    os.setsid()
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != nanny:
        return  # it died before the line above
    _be_called(b"trial")
    os.dup2(asked.output, 1)
    os.dup2(asked.output, 2)
    _keep_only(asked.channel)
    os.set_inheritable(asked.channel, False)  # noqa: FBT003 - its only way to be called
    signal.set_wakeup_fd(-1)
    for number, handler in {**before, signal.SIGCHLD: signal.SIG_DFL}.items():
        signal.signal(number, handler)
    serve(Connection(asked.channel))


# ----------------------------------------------------------------------------------------------------- the kernel


def _be_called(name: bytes) -> None:
    """What `ps` and `top` show, cut to 15 bytes."""
    _libc.prctl(_PR_SET_NAME, name)


def _bell_for_deaths() -> int:
    """Return a descriptor that rings when a child dies."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    return reading


def _silence(bell: int) -> None:
    with suppress(BlockingIOError):  # it has not rung
        os.read(bell, 4096)


def _while_alive(pid: int) -> list[int]:
    """Return a descriptor that rings when the process dies; none where Linux is older than 5.3.

    A socket's end says the same, unless a fork of that process holds it open.
    """
    try:
        return [os.pidfd_open(pid)]
    except OSError:
        return []


def _rung(bells: Collection[int], patience: timedelta | None = None) -> set[int]:
    """Wait until one rings, or `patience` is over; return those that do."""
    poll = select.poll()
    for bell in bells:
        poll.register(bell, select.POLLIN)
    return {bell for bell, _ in poll.poll(None if patience is None else patience.total_seconds() * 1000)}


def _keep_only(*descriptors: int) -> None:
    """Close every other descriptor but the standard streams."""
    for descriptor in [int(name) for name in os.listdir("/proc/self/fd")]:  # noqa: PTH208 - names, not paths
        if descriptor > 2 and descriptor not in descriptors:
            with suppress(OSError):  # the listing's own
                os.close(descriptor)


def _children() -> set[int]:
    """Return the processes whose parent this one is, be it because theirs has died."""
    me = str(os.getpid()).encode()
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):  # it has ended
                # pid (name) state parent ...; the name may hold anything, and be no text
                _, parent, *_ = (entry / "stat").read_bytes().rpartition(b")")[2].split()
                if parent == me:
                    found.add(int(entry.name))
    return found


def _send(number: signal.Signals, pids: Collection[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _fork(asked: _Asked) -> int:
    """Fork; where that cannot be, say so, and return -1."""
    try:
        return os.fork()
    except OSError as error:
        _say(asked.status, f"failed {error.errno}")
        return -1


def _say(status: int, words: str) -> None:
    with suppress(OSError):  # whoever asked has gone
        os.write(status, words.encode())


if __name__ == "__main__":
    live(partial(nursery, int(sys.argv[1]), int(sys.argv[2])))
