"""What the fork server needs of Linux: prctl, pidfds, SIGCHLD as a descriptor, and /proc."""

from __future__ import annotations

import ctypes
import os
import select
import signal
from collections.abc import Collection
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36  # linux/prctl.h
_libc = ctypes.CDLL(None)


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent dies (`PR_SET_CHILD_SUBREAPER`)."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that forked it dies (`PR_SET_PDEATHSIG`)."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def set_process_name(name: bytes) -> None:
    """Set the process name that `ps` and `top` show, cut to 15 bytes."""
    _libc.prctl(_PR_SET_NAME, name)


def sigchld_pipe() -> int:
    """Return a descriptor that becomes readable when a child dies (SIGCHLD)."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})  # as the script that started this may have blocked it
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    return reading


def drain_pipe(descriptor: int) -> None:
    """Read what is written on a descriptor, so that it is not readable any more."""
    with suppress(BlockingIOError):  # it is empty
        os.read(descriptor, 4096)


def while_alive(pid: int) -> list[int]:
    """Return a pidfd, which becomes readable when the process dies; none on Linux older than 5.3.

    End of file on a socket shows the same, unless a fork of that process holds it open.
    """
    try:
        return [os.pidfd_open(pid)]
    except OSError:
        return []


def poll_readable(descriptors: Collection[int], patience: timedelta | None = None) -> set[int]:
    """Wait up to `patience` (None: without limit) until one is readable; return all that are."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(None if patience is None else patience.total_seconds() * 1000)}


def keep_only(*descriptors: int) -> None:
    """Close every other descriptor but the standard streams."""
    for descriptor in [int(name) for name in os.listdir("/proc/self/fd")]:  # noqa: PTH208 - names, not paths
        if descriptor > 2 and descriptor not in descriptors:
            with suppress(OSError):  # the listing's own
                os.close(descriptor)


def send_signal(number: signal.Signals, pids: Collection[int]) -> None:
    """Send a signal to each process that is there and may be signalled."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


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


def command_of(pid: int) -> bytes:
    """Return the command line of a process; empty if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""
