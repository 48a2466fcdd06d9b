"""Read the newest reports of attempts on other machines in the background: a slow target does not delay the search."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from contextlib import suppress
from contextvars import copy_context
from datetime import timedelta

from prefect_tune.blocks import StorageTarget
from prefect_tune.core.errors import StoreRefused, StoreUnavailable
from prefect_tune.core.messages.live_status import LiveStatus, RunningTrial, newest_live_status
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.stores.local.staging import transfer_pool

_REQUEST = timedelta(seconds=20)


class LiveStatusReader:
    """Reads live statuses side by side, in a thread for each look; one look at a time. Best effort."""

    def __init__(self, target: StorageTarget) -> None:
        self._target = target
        self._found: queue.SimpleQueue[RunningTrial] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        """Whether the last look is still under way."""
        return self._thread is not None and self._thread.is_alive()

    def look(self, journals: Sequence[JournalKey]) -> None:
        """Begin to read the live statuses of these journals, and return; those that cannot be read are left out."""
        self._thread = threading.Thread(
            target=copy_context().run, args=(self._read, journals), name="live-status-reader", daemon=True
        )
        self._thread.start()

    def found(self) -> Sequence[RunningTrial]:
        """Return the attempts that were read since the last call."""
        found: list[RunningTrial] = []
        with suppress(queue.Empty):
            while True:
                found.append(self._found.get_nowait())
        return found

    def _read(self, journals: Sequence[JournalKey]) -> None:
        with (
            suppress(StoreUnavailable, StoreRefused),
            self._target.open(timeout=_REQUEST) as store,
            transfer_pool() as transfers,
        ):
            for live in transfers(lambda key: _live_status(store, key), journals):
                for each in live.trials if live is not None else ():
                    self._found.put(each)


def _live_status(store: ObjectStore, key: JournalKey) -> LiveStatus | None:
    with suppress(StoreUnavailable, StoreRefused):
        return newest_live_status(store, key)
    return None
