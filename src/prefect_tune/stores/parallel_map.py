"""A `map` that makes several calls at once, in threads. Stores whose calls wait for I/O use it as `ObjectStore.map`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from itertools import islice
from typing import TypeVar

_In = TypeVar("_In")
_Out = TypeVar("_Out")


_is_worker: ContextVar[bool] = ContextVar("prefect_tune_is_transfer_worker", default=False)


def parallel_map(function: Callable[[_In], _Out], items: Iterable[_In], *, workers: int = 8) -> Iterator[_Out]:
    """Call `function` with each item, up to `workers` calls at once; yield the results in the order of the items.

    The first `2 * workers` calls are submitted at once, and another one after each result that the caller takes. The
    first error cancels all calls that have not begun, and is raised when the running calls have ended. A `parallel_map`
    within a call makes its own calls one after the other, so that nested maps do not multiply the threads.
    """
    remaining = iter(items)
    first = list(islice(remaining, 2 * workers))
    if _is_worker.get() or len(first) <= 1:  # for a single call, a thread costs more than it saves
        yield from map(function, first)
        yield from map(function, remaining)
        return
    with ThreadPoolExecutor(workers, "transfer", _is_worker.set, (True,)) as pool:
        running: list[Future[_Out]] = []
        try:
            running.extend(_submit_or_call(pool, function, item) for item in first)
            while running:
                yield running.pop(0).result()
                running.extend(_submit_or_call(pool, function, item) for item in islice(remaining, 1))
        finally:
            for future in running:
                future.cancel()


def _submit_or_call(pool: ThreadPoolExecutor, function: Callable[[_In], _Out], item: _In) -> Future[_Out]:
    """Submit a call to the pool; if no thread can start (e.g. after the main thread's end), call it in this thread."""
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
