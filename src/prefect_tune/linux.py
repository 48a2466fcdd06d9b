"""What this package asks of Linux alone, and the one switch between that and what every POSIX system has.

    on Linux                                              on other systems (macOS)
    trials are forked, each below a child subreaper       each trial is a started process (`StartedProcess`)
    the kernel copies files                               files are read and written
    /proc: memory and processor time of trials, who       no figures; no server is found; a folder is judged by its
      owns the server at a port, the types of mounts        owner and mode alone
    control groups limit processors and memory            the machine limits them

With the environment variable `PREFECT_TUNE_PORTABLE`, Linux does the same as other systems: for tests.
Never: a call that only Linux has in another module, but for the fork server and its client; a function that raises on
another system, but for those of the fork server.
"""

from __future__ import annotations

import ctypes
import math
import os
import select
import signal
import socket
import sys
from collections.abc import Collection, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path


def is_linux() -> bool:
    """Whether the calls of Linux are used."""
    return sys.platform == "linux" and "PREFECT_TUNE_PORTABLE" not in os.environ


def _read(path: str) -> str:
    """Return the text of a file of the kernel. Raises `OSError` if it is not there: elsewhere none is."""
    if not is_linux():
        raise FileNotFoundError(path)
    with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123  a third of the time of `Path.read_text`
        return file.read()


# The processes that the fork server forks, and its subreapers (`runtime/processes/fork_server.py`).

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
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
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
    with suppress(OSError):
        return [os.pidfd_open(pid)]
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


def open_descriptors() -> dict[str, str]:
    """Return what each open descriptor refers to."""
    descriptors = {}
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the listing's own
            descriptors[entry.name] = str(entry.readlink())
    return descriptors


def other_thread_names() -> list[str]:
    """Return the names of the threads besides the first; "" for each of a library that has not named it."""
    tasks = [task for task in Path("/proc/self/task").iterdir() if int(task.name) != os.getpid()]
    inherited = Path("/proc/self/comm").read_bytes() if tasks else b""
    names = []
    for task in tasks:
        with suppress(OSError):  # it has ended
            name = (task / "comm").read_bytes().removeprefix(inherited)  # 15 bytes, maybe a part of a character
            names.append(name.decode(errors="replace").strip())
    return names


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
    """Return the command line of a process; empty if it has ended, and where that cannot be read."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


# What the processes of a trial use, and what this one may use.

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")
_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


def process_tree(pid: int) -> Iterator[int]:
    """Yield the process and its descendants. Each thread lists the children that it has started."""
    yield pid
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208  a tenth of the time of `Path.iterdir`
            with suppress(OSError):
                for child in _read(f"/proc/{pid}/task/{thread}/children").split():
                    yield from process_tree(int(child))


def process_use(pid: int) -> tuple[float, int] | None:
    """Return the processor time of a process, that of its children that have ended included, and its memory."""
    with suppress(OSError):
        fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()  # the name before it may contain anything
        return sum(map(int, fields[11:15])) / _TICKS, int(fields[21]) * _PAGE_BYTES
    return None


def cpu_count_here(root: Path = _CONTROL_GROUPS, own: Path = _OWN_GROUPS) -> int:
    """Return the number of processors that this process may use, by its affinity and the quota of its container."""
    available = len(os.sched_getaffinity(0)) if is_linux() else os.cpu_count() or 1
    return max(1, min([available, *map(math.ceil, _quotas(root, own))]))


def _quotas(root: Path, own: Path) -> Iterator[float]:
    """Yield the processors that each control group of this process allows: cgroup v2, or v1 in a container."""
    with suppress(OSError, ValueError, ArithmeticError):
        quota, period = (int(_read(f"{root}/cpu/cpu.cfs_{each}_us")) for each in ("quota", "period"))
        if quota > 0:
            yield quota / period
    for folder in control_groups("", root, own):
        with suppress(OSError, ValueError, ArithmeticError):  # "max" is no quota
            quota, period = map(int, _read(f"{folder}/cpu.max").split())
            yield quota / period


class MemoryLimit:
    """The memory limit of this process: that of its control groups (version 2, or 1), or all memory of the machine."""

    def __init__(self, root: Path = _CONTROL_GROUPS, own: Path = _OWN_GROUPS) -> None:
        self._folders = list(control_groups("memory", root, own))

    def limit_bytes(self) -> int:
        """Return the lowest limit."""
        limits = self._numbers("memory.max", "memory.limit_in_bytes")
        return min((*limits, _PAGE_BYTES * os.sysconf("SC_PHYS_PAGES")))

    def peak_bytes(self) -> int:
        """Return the highest memory of the group; 0 if that is not counted."""
        return next(self._numbers("memory.peak", "memory.max_usage_in_bytes"), 0)

    def kills(self) -> int:
        """Return how many processes the kernel has killed in it for memory; without a count, on the whole machine."""
        names = ("memory.events", "memory.oom_control")
        for path in (*(f"{folder}/{name}" for folder in self._folders[:1] for name in names), "/proc/vmstat"):
            with suppress(OSError, ValueError, IndexError):  # it is not there, or has no such line
                return int(_read(path).partition("oom_kill ")[2].split(maxsplit=1)[0])
        return 0

    def _numbers(self, *names: str) -> Iterator[int]:
        for folder in self._folders:
            for name in names:
                with suppress(OSError, ValueError):  # "max" is no limit
                    yield int(_read(f"{folder}/{name}"))


def control_groups(controller: str, root: Path, own: Path) -> Iterator[Path]:
    """Yield the folders of this process's control group and of all that contain it.

    Args:
        controller: the name of a controller of version 1; empty for version 2 alone.
        root: where control groups are mounted.
        own: the file that names those of this process.
    """
    with suppress(OSError, ValueError):
        for line in _read(str(own)).splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", controller):
                top = root / controllers
                group = top / path.lstrip("/")
                yield from (each for each in (group, *group.parents) if each.is_relative_to(top))


# Files, machines and sockets.

_COPY_BYTES = 1024 * 1024
_MOUNTS = "/proc/self/mountinfo"
_LISTENING = "0A"  # in /proc/net/tcp
_TABLES = (("/proc/net/tcp", ("127.0.0.1", "0.0.0.0")), ("/proc/net/tcp6", ("::ffff:127.0.0.1", "::")))  # noqa: S104 - it is compared, and no socket is bound to it
"""The kernel's tables of sockets, each with the addresses that take connections to 127.0.0.1."""


def copy_range(source: int, file: int, length: int, offset: int) -> int:
    """Append up to `length` bytes of an open file, from `offset` on, to another; return how many, 0 at its end.

    They are copied in the kernel or on the file server, where that is supported; XFS and Btrfs share them.
    """
    if is_linux():
        with suppress(OSError):  # not supported; any other error the call below raises too
            if count := os.copy_file_range(source, file, length, offset):
                return count
    return os.write(file, os.pread(source, min(length, _COPY_BYTES), offset))


def boot_id() -> str:
    """Return what identifies this machine since its last start; "any" where nothing does."""
    with suppress(OSError):
        return _read("/proc/sys/kernel/random/boot_id").strip()
    return "any"


def mount_type(device: int) -> str:
    """Return the type of the file system with this number; empty where the kernel does not list its mounts."""
    number = f"{os.major(device)}:{os.minor(device)}"
    with suppress(FileNotFoundError):
        for line in _read(_MOUNTS).splitlines():
            if line.split(" ")[2:3] == [number]:
                return line.partition(" - ")[2].split(" ")[0]
    return ""


def may_have_access_list(path: Path) -> bool:
    """Whether the group's bits of the mode may be those of other users; also where that cannot be read."""
    try:
        return not is_linux() or any("acl" in name for name in os.listxattr(path, follow_symlinks=False))
    except OSError:
        return True


def owners_of_listeners(port: int) -> Iterator[int]:
    """Yield the user of each socket that may take connections to this port of 127.0.0.1; elsewhere none is known."""
    for table, addresses in _TABLES:
        family = socket.AF_INET6 if ":" in addresses[0] else socket.AF_INET
        local = {f"{_kernel_hex(socket.inet_pton(family, address))}:{port:04X}" for address in addresses}
        with suppress(FileNotFoundError):
            for line in _read(table).splitlines()[1:]:
                _, address, _, state, _, _, _, user, *_ = line.split()
                if address in local and state == _LISTENING:
                    yield int(user)


def _kernel_hex(address: bytes) -> str:
    """Return an address as the kernel prints it: each word of four bytes as a number of this machine."""
    words = [address[start : start + 4] for start in range(0, len(address), 4)]
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)
