"""The deadline that all operations of an open store share, and locks that are acquired before a deadline."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from weakref import WeakValueDictionary

from prefect_tune.core.errors import DeadlineExceeded


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point in time on this process's monotonic clock: `timeout` after the deadline's creation."""

    timeout: timedelta
    at_seconds: float

    @classmethod
    def after(cls, timeout: timedelta) -> Deadline:
        """Return the deadline `timeout` from now."""
        return cls(timeout, time.monotonic() + timeout.total_seconds())

    @classmethod
    def never(cls) -> Deadline:
        """Return a deadline that never passes."""
        return cls(timedelta.max, math.inf)

    @property
    def remaining_seconds(self) -> float:
        """The seconds left: 0.0 after the deadline, infinity if the deadline never passes."""
        return max(0.0, self.at_seconds - time.monotonic())

    def check(self, operation: str) -> None:
        """Raise `DeadlineExceeded` if the deadline has passed; the message names `operation` and the timeout."""
        if time.monotonic() >= self.at_seconds:
            raise self.exceeded_error(operation)

    def exceeded_error(self, operation: str) -> DeadlineExceeded:
        """Return the error of an `operation` that did not end in time."""
        return DeadlineExceeded(f"{operation}: not done within {self.timeout.total_seconds():g} s; the work was ended")


# Named locks, one for each object: on a target without conditional create, a thread holds the lock while it creates the
# object. The locks need not exclude other processes, because such a target supports only one writer process.

_locks: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()
_locks_guard = threading.Lock()


@contextmanager
def named_lock(name: str, operation: str, deadline: Deadline) -> Iterator[None]:
    """Hold the lock `name`, which only one thread of this process can hold at a time.

    Raises:
        DeadlineExceeded: another thread still held the lock at the deadline, so `operation` did not begin.
    """
    with _locks_guard:
        lock = _locks.setdefault(name, threading.Lock())
    if not lock.acquire(timeout=min(deadline.remaining_seconds, threading.TIMEOUT_MAX)):
        raise deadline.exceeded_error(operation)
    try:
        yield
    finally:
        lock.release()
