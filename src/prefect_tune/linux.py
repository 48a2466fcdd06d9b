"""Calls that only Linux has, and the choice between these calls and calls that every POSIX system has.

    on Linux                                              on other systems (macOS)
    trials are forked, each below a child subreaper       each trial is a started process (`SpawnedProcess`)
    the kernel copies files                               this process reads and writes files
    /proc: memory and CPU time of trials, the owner of    memory, CPU time and a server's owner are unknown; a
      a local server, the types of mounts                   folder is judged by its owner and mode, not its mount
    control groups limit CPUs and memory                  the machine limits CPUs and memory

For tests, the environment variable `PREFECT_TUNE_PORTABLE` makes this package act on Linux as on other systems.
Other modules make no Linux-only calls, except the fork server and its client. On other systems, the functions for the
fork server raise, and all other functions of this module work.
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


def uses_linux_calls() -> bool:
    """Return whether to use the calls of Linux."""
    return sys.platform == "linux" and "PREFECT_TUNE_PORTABLE" not in os.environ


def _read_kernel_file(path: str) -> str:
    """Return the text of a kernel file; raise `OSError` if the file is missing, as it is on every other system."""
    if not uses_linux_calls():
        raise FileNotFoundError(path)
    with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123  a third of the time of `Path.read_text`
        return file.read()


# The processes that the fork server forks, and its subreapers (`runtime/processes/fork_server.py`).

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36  # linux/prctl.h
_libc = ctypes.CDLL(None)


def become_subreaper() -> None:
    """Become the parent of every descendant whose parent exits (`PR_SET_CHILD_SUBREAPER`)."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Let the kernel kill this process when the thread that forked it exits (`PR_SET_PDEATHSIG`)."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def set_process_name(name: bytes) -> None:
    """Set the process name that `ps` and `top` show, truncated to 15 bytes."""
    _libc.prctl(_PR_SET_NAME, name)


def open_sigchld_pipe() -> int:
    """Return a descriptor that becomes readable when a child exits (SIGCHLD)."""
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})  # a parent process may have blocked this signal
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    return reading


def drain_pipe(descriptor: int) -> None:
    """Read the bytes in a pipe, so that it is no longer readable."""
    with suppress(BlockingIOError):  # the pipe is empty
        os.read(descriptor, 4096)


def try_open_pidfd(pid: int) -> list[int]:
    """Return a list with a pidfd, which becomes readable when the process exits; an empty list on Linux before 5.3.

    The end of file on the process's socket shows the exit too, unless a fork of the process keeps the socket open.
    """
    with suppress(OSError):
        return [os.pidfd_open(pid)]
    return []


def poll_readable(descriptors: Collection[int], timeout: timedelta | None = None) -> set[int]:
    """Wait up to `timeout` (None: no limit) until a descriptor is readable; return all readable descriptors."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(None if timeout is None else timeout.total_seconds() * 1000)}


def close_other_descriptors(*descriptors: int) -> None:
    """Close all descriptors except these and the standard streams."""
    for descriptor in [int(name) for name in os.listdir("/proc/self/fd")]:  # noqa: PTH208 - names, not paths
        if descriptor > 2 and descriptor not in descriptors:
            with suppress(OSError):  # the listing's own descriptor is already closed
                os.close(descriptor)


def list_descriptors() -> dict[str, str]:
    """Return each open descriptor with the file or object behind it."""
    descriptors = {}
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the listing's own descriptor may be closed
            descriptors[entry.name] = str(entry.readlink())
    return descriptors


def list_other_thread_names() -> list[str]:
    """Return the names of all threads except the first; "" for a thread that only has the name of the process."""
    tasks = [task for task in Path("/proc/self/task").iterdir() if int(task.name) != os.getpid()]
    inherited = Path("/proc/self/comm").read_bytes() if tasks else b""
    names = []
    for task in tasks:
        with suppress(OSError):  # the thread has ended
            name = (task / "comm").read_bytes().removeprefix(inherited)  # cut by the kernel, perhaps in a character
            names.append(name.decode(errors="replace").strip())
    return names


def send_signal(number: signal.Signals, pids: Collection[int]) -> None:
    """Send a signal to each process that exists and that this user may signal."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def find_children(*parents: int) -> set[int]:
    """Return the pids of all children of these processes, including adopted children."""
    pids = {str(pid).encode() for pid in parents}
    children = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):  # the process has ended
                # The file is `pid (name) state parent ...`; the name can contain any bytes, even parentheses.
                _, parent, *_ = (entry / "stat").read_bytes().rpartition(b")")[2].split()
                if parent in pids:
                    children.add(int(entry.name))
    return children


def get_cmdline(pid: int) -> bytes:
    """Return the command line of a process; empty if the process has exited or the system has no /proc."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


# The resources that a trial's processes use, and the resources that this process may use.

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


def iter_process_tree(pid: int) -> Iterator[int]:
    """Yield the pids of a process and its descendants. In /proc, each thread lists only its own children."""
    yield pid
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208  a tenth of the time of `Path.iterdir`
            with suppress(OSError):
                for child in _read_kernel_file(f"/proc/{pid}/task/{thread}/children").split():
                    yield from iter_process_tree(int(child))


def read_process_usage(pid: int) -> tuple[float, int] | None:
    """Return a process's CPU seconds, including its exited children's, and its memory in bytes; None if unknown."""
    with suppress(OSError):
        fields = _read_kernel_file(f"/proc/{pid}/stat").rpartition(")")[2].split()  # the process name may contain ")"
        return sum(map(int, fields[11:15])) / _TICKS_PER_SECOND, int(fields[21]) * _PAGE_BYTES
    return None


def count_available_cpus(root: Path = _CONTROL_GROUPS, own: Path = _OWN_GROUPS) -> int:
    """Return the number of CPUs that this process may use, given its affinity and the quotas of its control groups."""
    counts = [len(os.sched_getaffinity(0)) if uses_linux_calls() else os.cpu_count() or 1]
    with suppress(OSError, ValueError, ArithmeticError):  # the quota of control groups v1, as a container sees it
        quota, period = (int(_read_kernel_file(f"{root}/cpu/cpu.cfs_{name}_us")) for name in ("quota", "period"))
        if quota > 0:
            counts.append(math.ceil(quota / period))
    for folder in iter_control_groups("", root, own):
        with suppress(OSError, ValueError, ArithmeticError):  # "max" (no quota) is not a number
            quota, period = map(int, _read_kernel_file(f"{folder}/cpu.max").split())
            counts.append(math.ceil(quota / period))
    return max(1, min(counts))


class MemoryLimit:
    """Reads the memory limit, the peak usage and the OOM kills of this process's control groups (v2 or v1)."""

    def __init__(self, root: Path = _CONTROL_GROUPS, own: Path = _OWN_GROUPS) -> None:
        self._folders = list(iter_control_groups("memory", root, own))

    def read_limit(self) -> int:
        """Return the lowest limit of the control groups, or the machine's memory if that is lower, in bytes."""
        limits = self._iter_values("memory.max", "memory.limit_in_bytes")
        return min((*limits, _PAGE_BYTES * os.sysconf("SC_PHYS_PAGES")))

    def read_peak_usage(self) -> int:
        """Return the peak memory of the control group in bytes; 0 if the kernel does not count it."""
        return next(self._iter_values("memory.peak", "memory.max_usage_in_bytes"), 0)

    def count_oom_kills(self) -> int:
        """Return the number of OOM kills by the kernel: in the control group or, if that is unknown, on the machine."""
        names = ("memory.events", "memory.oom_control")
        for path in (*(f"{folder}/{name}" for folder in self._folders[:1] for name in names), "/proc/vmstat"):
            with suppress(OSError, ValueError, IndexError):  # no such file, or no such line
                return int(_read_kernel_file(path).partition("oom_kill ")[2].split(maxsplit=1)[0])
        return 0

    def _iter_values(self, *names: str) -> Iterator[int]:
        for folder in self._folders:
            for name in names:
                with suppress(OSError, ValueError):  # "max" (no limit) is not a number
                    yield int(_read_kernel_file(f"{folder}/{name}"))


def iter_control_groups(controller: str, root: Path, own: Path) -> Iterator[Path]:
    """Yield the folders of this process's control group and of its parent groups.

    Args:
        controller: a controller of control groups v1, such as `memory`; if empty, only v2 groups are yielded.
        root: the mount point of control groups.
        own: the file that names the control groups of this process.
    """
    with suppress(OSError, ValueError):
        for line in _read_kernel_file(str(own)).splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", controller):
                top = root / controllers
                group = top / path.lstrip("/")
                yield from (ancestor for ancestor in (group, *group.parents) if ancestor.is_relative_to(top))


# Files, machines and sockets.

_COPY_BYTES = 1024 * 1024
_MOUNTS = "/proc/self/mountinfo"
_LISTEN_STATE = "0A"  # in /proc/net/tcp
_SOCKET_TABLES = (("/proc/net/tcp", ("127.0.0.1", "0.0.0.0")), ("/proc/net/tcp6", ("::ffff:127.0.0.1", "::")))  # noqa: S104 - it is compared, and no socket is bound to it
"""The kernel's socket tables, each with the addresses that accept connections to 127.0.0.1."""


def copy_range(source: int, file: int, length: int, offset: int) -> int:
    """Append up to `length` bytes of `source`, from `offset` on, to `file`; return their number (0 at the end).

    If possible, the kernel or the file server copies the bytes; XFS and Btrfs share the blocks.
    """
    if uses_linux_calls():
        with suppress(OSError):  # the call is not supported; the calls below raise any other error, too
            if count := os.copy_file_range(source, file, length, offset):
                return count
    return os.write(file, os.pread(source, min(length, _COPY_BYTES), offset))


def read_boot_id() -> str:
    """Return the id of this machine's current boot; "any" if the system has no such id."""
    with suppress(OSError):
        return _read_kernel_file("/proc/sys/kernel/random/boot_id").strip()
    return "any"


def read_mount_type(device: int) -> str:
    """Return the type of the file system with this device number; empty if the kernel does not list mounts."""
    number = f"{os.major(device)}:{os.minor(device)}"
    with suppress(FileNotFoundError):
        for line in _read_kernel_file(_MOUNTS).splitlines():
            if line.split(" ")[2:3] == [number]:
                return line.partition(" - ")[2].split(" ")[0]
    return ""


def may_have_acl(path: Path) -> bool:
    """Return whether an ACL may give other users access that the mode bits do not show; True if unknown."""
    try:
        return not uses_linux_calls() or any("acl" in name for name in os.listxattr(path, follow_symlinks=False))
    except OSError:
        return True


def iter_listener_owners(port: int) -> Iterator[int]:
    """Yield the user id of the owner of each socket that may accept connections to 127.0.0.1:`port`, if known."""
    for table, addresses in _SOCKET_TABLES:
        family = socket.AF_INET6 if ":" in addresses[0] else socket.AF_INET
        local = {f"{_format_kernel_address(socket.inet_pton(family, address))}:{port:04X}" for address in addresses}
        with suppress(FileNotFoundError):
            for line in _read_kernel_file(table).splitlines()[1:]:
                _, address, _, state, _, _, _, user, *_ = line.split()
                if address in local and state == _LISTEN_STATE:
                    yield int(user)


def _format_kernel_address(address: bytes) -> str:
    """Return an address in the kernel's format, where every four bytes are a number in this machine's byte order."""
    words = [address[start : start + 4] for start in range(0, len(address), 4)]
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)
