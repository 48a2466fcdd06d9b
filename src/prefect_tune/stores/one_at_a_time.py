"""Have the threads of this process create an object one after another, where the target does not see to it.

It closes the window within one process, and no other: such a target serves one runner only.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary

from prefect_tune.stores.deadline import Deadline

__all__ = ["one_at_a_time"]

_locks: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()
_guard = threading.Lock()


@contextmanager
def one_at_a_time(place: str, what: str, deadline: Deadline) -> Iterator[None]:
    """Have `place` for oneself among the threads of this process.

    Raises:
        DeadlineExceeded: others had it for too long; `what` was not begun.
    """
    with _guard:
        lock = _locks.setdefault(place, threading.Lock())
    if not lock.acquire(timeout=min(deadline.remaining_seconds, threading.TIMEOUT_MAX)):
        raise deadline.exceeded(what)
    try:
        yield
    finally:
        lock.release()
