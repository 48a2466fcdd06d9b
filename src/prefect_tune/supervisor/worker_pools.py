"""The pools of trial processes in a worker that runs attempts of several searches, such as a Dask or Ray worker."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from prefect_tune.supervisor.process_pool import TrialProcessPool
from prefect_tune.supervisor.trial_spec import Reuse

__all__ = ["worker_pool"]

_IDLE = timedelta(seconds=30)
"""How long a pool outlives its last attempt: the scheduler may send the search's next one to this worker."""


class _SharedPool:
    def __init__(self, reuse: Reuse) -> None:
        self.pool = TrialProcessPool(slots=None, reuse=reuse)
        self.user_count = 0
        self.use_count = 0


_guard = threading.Lock()
_pools: dict[Hashable, _SharedPool] = {}


@contextmanager
def worker_pool(search: Hashable, reuse: Reuse) -> Iterator[TrialProcessPool]:
    """Yield the pool of a run of a search in this process. It stays for 30 s after its last attempt.

    Idle pools of other searches are closed at once, since their processes may hold memory of a GPU.
    """
    with _guard:
        shared = _pools.setdefault(search, _SharedPool(reuse))
        shared.user_count += 1
        shared.use_count += 1
        idle = [key for key, each in _pools.items() if not each.user_count]
        leaving = [_pools.pop(key) for key in idle]
    for each in leaving:
        each.pool.close()
    try:
        yield shared.pool
    finally:
        with _guard:
            shared.user_count -= 1
        timer = threading.Timer(_IDLE.total_seconds(), _close_if_idle, (search, shared.use_count))
        timer.daemon = True
        timer.start()


def _close_if_idle(search: Hashable, use_count: int) -> None:
    """Close the pool if it is not in use, and was not used since."""
    with _guard:
        shared = _pools.get(search)
        if shared is None or shared.user_count or shared.use_count != use_count:
            return
        del _pools[search]
    shared.pool.close()
