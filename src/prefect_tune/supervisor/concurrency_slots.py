"""Hold a slot in each of several Prefect global concurrency limits while a block of code runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta

import httpx
from prefect.concurrency.sync import concurrency

_TRY = timedelta(seconds=5)
_LEASE = timedelta(seconds=60)  # the slot of a killed process is free after this time


@contextmanager
def holding_concurrency_limits(limits: Sequence[str], stop: threading.Event) -> Iterator[None]:
    """Wait for a slot in all of `limits` and hold it; enter without one if `stop` is set first.

    While the API is unreachable it waits. If a lease cannot be renewed later, the block continues.
    """
    with ExitStack() as held:
        while limits and not stop.is_set():
            try:
                held.enter_context(_place(limits))
                break
            except TimeoutError:
                continue
            except httpx.TransportError:
                stop.wait(_TRY.total_seconds())
        yield


@contextmanager
def _place(limits: Sequence[str]) -> Iterator[None]:
    with concurrency(
        list(limits),
        timeout_seconds=_TRY.total_seconds(),
        lease_duration=_LEASE.total_seconds(),
        raise_on_lease_renewal_failure=False,
    ):
        yield
