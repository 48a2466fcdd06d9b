"""A place in each of Prefect's global concurrency limits, for as long as something runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta

import httpx
from prefect.concurrency.sync import concurrency

__all__ = ["place_held"]

_TRY = timedelta(seconds=5)
_LEASE = timedelta(seconds=60)  # after which the place of one that died is free again


@contextmanager
def place_held(limits: Sequence[str], stop: threading.Event) -> Iterator[None]:
    """Wait until there is a place in all of `limits`, and hold it; or until `stop` is set, and hold none.

    An API that is away is waited for. Once held, a place that cannot be renewed ends nothing.
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
