"""`flock` locks between the processes and threads of one machine; the kernel releases those of a dead process."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Self

from prefect_tune.stores.deadline import Deadline
from prefect_tune.stores.posix_files import as_store_error

_FIRST_PAUSE_SECONDS = 0.002
_LONGEST_PAUSE_SECONDS = 0.05
_open_files: set[int] = set()


class Share(Enum):
    """Shared or exclusive."""

    WITH_READERS = fcntl.LOCK_SH
    ALONE = fcntl.LOCK_EX


def tries(path: Path, deadline: Deadline) -> Iterator[None]:
    """Yield once for each try to take the lock at `path`, with growing pauses (2 to 50 ms) between tries.

    Raises:
        DeadlineExceeded: the deadline passed.
    """
    pause = _FIRST_PAUSE_SECONDS
    while True:
        yield
        deadline.check(f"waiting for {path}, which another process or thread holds")
        time.sleep(min(pause, deadline.remaining_seconds))
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


class FileLock:
    """A held `flock` on a lock file, which is created if it is missing.

    The lock belongs to the open file: threads of one process exclude each other as processes do, and the
    kernel releases the lock when its holder dies. A forked child does not hold its parent's locks.
    """

    def __init__(self, path: Path, file: int) -> None:
        self.path = path
        self._file = file
        self._owner = os.getpid()
        self._is_held = True
        _open_files.add(file)

    @classmethod
    def take(cls, path: Path, share: Share, deadline: Deadline) -> FileLock:
        """Return the lock, waiting while others hold it.

        Raises:
            DeadlineExceeded: others still held it at the deadline.
        """
        for _ in tries(path, deadline):
            if lock := cls.try_take(path, share):
                return lock
        raise AssertionError

    @classmethod
    def try_take(cls, path: Path, share: Share) -> FileLock | None:
        """Return the lock, or None while others hold it."""
        while True:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(file, share.value | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
                return None
            except OSError as error:
                os.close(file)
                raise as_store_error(error, f"lock of {path}", call="lock") from error
            except BaseException:
                os.close(file)
                raise
            if _is_still_at(file, path):
                return cls(path, file)
            os.close(file)  # its last holder removed it meanwhile: the next process would lock a new file

    def release(self) -> None:
        """Release the lock; does nothing if it was released already."""
        if self._is_held and self._owner == os.getpid():
            # Explicitly, because closing does not release it while a child that other code forked has the file open.
            fcntl.flock(self._file, fcntl.LOCK_UN)
            _open_files.discard(self._file)
            os.close(self._file)
        self._is_held = False

    def remove(self) -> None:
        """Remove the lock file and release the lock, which must be held exclusively."""
        self.path.unlink(missing_ok=True)
        self.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def _is_still_at(file: int, path: Path) -> bool:
    try:
        there = path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return False
    ours = os.fstat(file)
    return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)


def _close_in_forked_child() -> None:
    while _open_files:
        os.close(_open_files.pop())


os.register_at_fork(after_in_child=_close_in_forked_child)
