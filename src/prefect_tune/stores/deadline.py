"""The point in time by which all operations of an open store must have ended, and a lock that is awaited until then."""

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
    """A moment on the monotonic clock of this process, and the timeout it was made from."""

    timeout: timedelta
    at_seconds: float

    @classmethod
    def after(cls, timeout: timedelta) -> Deadline:
        """Return the deadline that is `timeout` from now."""
        return cls(timeout, time.monotonic() + timeout.total_seconds())

    @classmethod
    def never(cls) -> Deadline:
        """Return a deadline that never passes."""
        return cls(timedelta.max, math.inf)

    @property
    def remaining_seconds(self) -> float:
        """Seconds left: 0.0 after the deadline, infinity for `never`."""
        return max(0.0, self.at_seconds - time.monotonic())

    def check(self, doing: str) -> None:
        """Do nothing before the deadline.

        Raises:
            DeadlineExceeded: the deadline has passed; the message names `doing` and the timeout.
        """
        if time.monotonic() >= self.at_seconds:
            raise self.exceeded(doing)

    def exceeded(self, doing: str) -> DeadlineExceeded:
        """Return the error to raise when `doing` did not end in time."""
        return DeadlineExceeded(f"{doing}: not done within {self.timeout.total_seconds():g} s; the work was ended")


# A lock by name among the threads of this process, for creates on a target without conditional create.
#
# It does not exclude other processes: such a target is safe for one writer process only.

_locks: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()
_guard = threading.Lock()


@contextmanager
def one_at_a_time(place: str, what: str, deadline: Deadline) -> Iterator[None]:
    """Hold the lock named `place`, which one thread of this process can hold at a time.

    Raises:
        DeadlineExceeded: other threads still held it at the deadline; `what` was not begun.
    """
    with _guard:
        lock = _locks.setdefault(place, threading.Lock())
    if not lock.acquire(timeout=min(deadline.remaining_seconds, threading.TIMEOUT_MAX)):
        raise deadline.exceeded(what)
    try:
        yield
    finally:
        lock.release()
