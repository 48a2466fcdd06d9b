"""A lock by name among the threads of this process, for creates on a target without conditional create.

It does not exclude other processes: such a target is safe for one writer process only.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary

from prefect_tune.stores.deadline import Deadline

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
