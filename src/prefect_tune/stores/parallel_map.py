"""A `map` with several concurrent calls, in threads: the `ObjectStore.map` of stores with latency."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

_In = TypeVar("_In")
_Out = TypeVar("_Out")


class _ThreadState(threading.local):
    is_worker = False

    def mark_as_worker(self) -> None:
        self.is_worker = True


_thread_state = _ThreadState()


def parallel_map(function: Callable[[_In], _Out], items: Iterable[_In], *, workers: int = 8) -> Iterator[_Out]:
    """Call `function` with each item, up to `workers` calls at once; yield the results in the order of the items.

    At most `2 * workers` calls are submitted ahead of the next result. The first error cancels all calls that have not
    begun, and is raised when the running calls have ended. A nested `parallel_map` makes its calls one after the other,
    so that nested maps do not multiply the threads.
    """
    remaining = iter(items)
    first = list(islice(remaining, 2 * workers))
    if _thread_state.is_worker or len(first) <= 1:  # for a single call, a thread costs more than it saves
        yield from map(function, first)
        yield from map(function, remaining)
        return
    with ThreadPoolExecutor(workers, "transfer", _thread_state.mark_as_worker) as pool:
        running: list[Future[_Out]] = []
        try:
            running.extend(_submit_call(pool, function, item) for item in first)
            while running:
                yield running.pop(0).result()
                running.extend(_submit_call(pool, function, item) for item in islice(remaining, 1))
        finally:
            for future in running:
                future.cancel()


def _submit_call(pool: ThreadPoolExecutor, function: Callable[[_In], _Out], item: _In) -> Future[_Out]:
    """Submit a call to the pool; make it in this thread if no thread can start, e.g. after the main thread's end."""
    try:
        return pool.submit(function, item)
    except RuntimeError:
        done: Future[_Out] = Future()
        done.set_result(function(item))
        return done


class ParallelStore:
    """A base class with an `ObjectStore.map` that makes several calls at once."""

    def map(self, function: Callable[[_In], _Out], items: Iterable[_In]) -> Iterator[_Out]:
        """Call `function` with each item, several at once; see `parallel_map`."""
        return parallel_map(function, items)
