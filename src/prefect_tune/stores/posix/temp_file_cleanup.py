"""Remove hidden files that killed writers left, while other writers are active."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta

from prefect_tune.stores.posix.syscalls import FileSystemCalls

LEFTOVER_AFTER = timedelta(minutes=15)
_THOUGH_LOCKED = timedelta(days=7)  # for file systems without locks, or that keep the locks of dead processes
_EVERY = timedelta(minutes=1)


class Sweeps:
    """When each root was last swept, so that stores opened in quick succession do not all sweep."""

    def __init__(self) -> None:
        self._next: dict[str, float] = {}

    def is_due(self, root: str) -> bool:
        """Return True at most about once a minute per root; a race only makes two sweeps."""
        now = time.monotonic()
        if now < self._next.get(root, 0.0):
            return False
        self._next[root] = now + _EVERY.total_seconds()
        return True


def remove_leftovers(calls: FileSystemCalls, folder: int, now_ns: int, *, older_than: timedelta) -> int:
    """Remove the files in an open folder that are `older_than` and whose writer is dead; return their number.

    A writer holds a lock on its file, which the kernel releases when the writer dies. Correctness does not
    depend on the lock: a writer whose file was removed fails to link it, and publishes nothing.
    """
    removed = 0
    is_synced = False
    for name in calls.names(folder):
        with suppress(OSError):  # another writer removed it first, or it belongs to another user
            status = calls.status_of(name, folder)
            age = timedelta(microseconds=(now_ns - status.modified_ns) / 1000)
            if age < older_than or not _is_abandoned(calls, name, folder, age):
                continue
            if status.links > 1 and not is_synced:
                # Published, but perhaps not synced: only the second link shows that. Sync before removing it.
                calls.sync()
                is_synced = True
            calls.unlink(name, folder)
            removed += 1
    return removed


def _is_abandoned(calls: FileSystemCalls, name: str, folder: int, age: timedelta) -> bool:
    if age >= _THOUGH_LOCKED:
        return True
    file = calls.open_file(name, folder)
    try:
        return calls.try_lock(file)
    finally:
        calls.close(file)
