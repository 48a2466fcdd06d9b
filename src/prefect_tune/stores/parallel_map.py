"""A `map` that makes several calls at once, in threads: what `ObjectStore.map` is for stores with latency."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

_In = TypeVar("_In")
_Out = TypeVar("_Out")


class _ThisThread(threading.local):
    is_worker = False

    def become_worker(self) -> None:
        self.is_worker = True


_this_thread = _ThisThread()


def parallel_map(function: Callable[[_In], _Out], items: Iterable[_In], *, workers: int = 8) -> Iterator[_Out]:
    """Call `function` with each item, up to `workers` calls at once, and yield the results in the order of the items.

    At most `2 * workers` calls are submitted ahead of the result that is awaited. The first error cancels the calls
    that have not begun, and is raised when the others have ended. Within a call of another `parallel_map`, the calls
    are made one after the other, so that nested maps do not multiply the threads.
    """
    remaining = iter(items)
    first = list(islice(remaining, 2 * workers))
    if _this_thread.is_worker or len(first) <= 1:  # for a single call, a thread costs more than it saves
        yield from map(function, first)
        yield from map(function, remaining)
        return
    with ThreadPoolExecutor(workers, "transfer", _this_thread.become_worker) as pool:
        running: list[Future[_Out]] = []
        try:
            running.extend(_submit(pool, function, item) for item in first)
            while running:
                yield running.pop(0).result()
                running.extend(_submit(pool, function, item) for item in islice(remaining, 1))
        finally:
            for future in running:
                future.cancel()


def _submit(pool: ThreadPoolExecutor, function: Callable[[_In], _Out], item: _In) -> Future[_Out]:
    """Begin a call in the pool; make it here where no thread can be started, as after the end of the main thread."""
    try:
        return pool.submit(function, item)
    except RuntimeError:
        done: Future[_Out] = Future()
        done.set_result(function(item))
        return done


class ParallelStore:
    """The `map` of an `ObjectStore` that works on several calls at once."""

    def map(self, function: Callable[[_In], _Out], items: Iterable[_In]) -> Iterator[_Out]:
        """Call `function` with each item, several at once; see `parallel_map`."""
        return parallel_map(function, items)
