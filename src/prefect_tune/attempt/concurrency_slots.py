"""Hold a slot in each of several Prefect global concurrency limits while a block of code runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from datetime import timedelta

import httpx
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.concurrency.sync import concurrency

from prefect_tune.prefect_api.api_errors import is_temporary

_TRY = timedelta(seconds=5)
_LEASE = timedelta(seconds=60)  # the slot of a killed process is free after this time


@contextmanager
def holding_concurrency_limits(limits: Sequence[str], stop: threading.Event) -> Iterator[None]:
    """Wait for a slot in all of `limits` and hold it; enter without one if `stop` is set first.

    While the API is unreachable it waits. If a lease cannot be renewed later, the block continues; if it cannot be
    released at the end, the slot is free a minute later.
    """
    with ExitStack() as held:
        while limits and not stop.is_set():
            slots = concurrency(
                list(limits),
                timeout_seconds=_TRY.total_seconds(),
                lease_duration=_LEASE.total_seconds(),
                raise_on_lease_renewal_failure=False,
            )
            try:
                slots.__enter__()
                held.callback(_release, slots)
                break
            except TimeoutError:
                continue
            except ConcurrencySlotAcquisitionError as error:
                if not is_temporary(error.__cause__):
                    raise
                stop.wait(_TRY.total_seconds())
        yield


def _release(slots: AbstractContextManager[None]) -> None:
    with suppress(httpx.HTTPError):  # an error here must not fail an attempt that has ended
        slots.__exit__(None, None, None)
