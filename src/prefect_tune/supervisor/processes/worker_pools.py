"""The pools of trial processes in a worker that runs attempts of several searches, such as a Dask or Ray worker."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from prefect_tune.supervisor.processes.process_pool import TrialProcessPool
from prefect_tune.supervisor.trial_spec import Reuse

_IDLE = timedelta(seconds=30)
"""How long a pool outlives its last attempt: the scheduler may send the search's next one to this worker."""


class _SharedPool:
    def __init__(self, reuse: Reuse) -> None:
        self.pool = TrialProcessPool(slots=None, reuse=reuse)
        self.user_count = 0
        self.end: threading.Timer | None = None


_guard = threading.Lock()
_pools: dict[Hashable, _SharedPool] = {}


@contextmanager
def worker_pool(search: Hashable, reuse: Reuse) -> Iterator[TrialProcessPool]:
    """Yield the pool of a run of a search in this process. It stays for 30 s after its last attempt.

    Idle pools of other searches are closed at once, since their processes may hold memory of a GPU.
    """
    with _guard:
        others = [_pools.pop(key) for key, each in [*_pools.items()] if key != search and not each.user_count]
    for each in others:
        each.pool.close()
    with _guard:
        shared = _pools.setdefault(search, _SharedPool(reuse))
        shared.user_count += 1
        if shared.end is not None:
            shared.end.cancel()
    try:
        yield shared.pool
    finally:
        with _guard:
            shared.user_count -= 1
            if not shared.user_count:
                shared.end = threading.Timer(_IDLE.total_seconds(), _close_if_idle, (search, shared))
                shared.end.daemon = True
                shared.end.start()


def _close_if_idle(search: Hashable, shared: _SharedPool) -> None:
    with _guard:
        if shared.user_count or _pools.get(search) is not shared:
            return
        del _pools[search]
    shared.pool.close()


@atexit.register
def _close_all() -> None:
    """Close the pools when the worker exits: they remove their temporary directories."""
    while _pools:
        _pools.popitem()[1].pool.close()
