"""Poll the target for requests to stop the experiment, in a thread beside the driver's."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from contextlib import suppress
from contextvars import copy_context
from datetime import timedelta
from typing import Self

from prefect_tune.blocks import StorageTarget
from prefect_tune.core.errors import StoreRefused, StoreUnavailable
from prefect_tune.core.messages.stop_requests import StopRequest, delete_journaled, read_request
from prefect_tune.tuner.stopping.stop_handling import Outside

_SHORTEST_PERIOD, _LONGEST_PERIOD = timedelta(seconds=0.5), timedelta(seconds=5)
_REQUEST = timedelta(seconds=30)
_MOMENT = timedelta(seconds=1)


class StopRequestPoller(Outside):
    """Reads the requests after number `journaled_count`; deletes acknowledged ones.

    It looks with one GET per `sync_period`, at least every 5 s and at most every 0.5 s. Entering it reads the requests
    that are there already, so that no trial starts that was to stop. While the target does not answer or refuses,
    requests are read later; the first such error is logged.
    """

    def __init__(
        self,
        target: StorageTarget,
        experiment: str,
        journaled_count: int,
        sync_period: timedelta,
        interrupted: threading.Event,
    ) -> None:
        super().__init__(interrupted)
        self._target = target
        self._experiment = experiment
        self._read_count = journaled_count
        self._journaled_count = journaled_count
        self._period = min(_LONGEST_PERIOD, max(_SHORTEST_PERIOD, sync_period))
        self._found: queue.SimpleQueue[StopRequest] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._fails = False
        self._thread = threading.Thread(target=copy_context().run, args=(self._watch,), name="stops", daemon=True)

    def __enter__(self) -> Self:
        self._look()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop polling, and delete acknowledged requests; wait at most 1 s for the target."""
        self._closed.set()
        self._thread.join(_MOMENT.total_seconds())

    def take(self) -> Sequence[StopRequest]:
        """Return the requests that were read since the last call."""
        taken: list[StopRequest] = []
        with suppress(queue.Empty):
            while True:
                taken.append(self._found.get_nowait())
        return taken

    def journaled(self, count: int) -> None:
        """Take note that the journal names the first `count` requests."""
        self._journaled_count = count

    def _watch(self) -> None:
        deleted_count = 0
        while not self._closed.wait(self._period.total_seconds()):
            self._look()
            deleted_count = self._forget(deleted_count)
        self._forget(deleted_count)

    def _look(self) -> None:
        try:
            self._read()
        except (StoreUnavailable, StoreRefused) as error:
            if not self._fails:
                logging.getLogger("prefect_tune").warning("stop requests are read later: %s", error)
            self._fails = True
        else:
            self._fails = False

    def _read(self) -> None:
        with self._target.open(timeout=_REQUEST) as store:
            while (request := read_request(store, self._experiment, self._read_count + 1)) is not None:
                self._read_count += 1
                self._found.put(request)

    def _forget(self, deleted_count: int) -> int:
        """Delete newly acknowledged requests; return how many are deleted. After an error a later call deletes them."""
        count = self._journaled_count
        if count == deleted_count:
            return count
        with suppress(StoreUnavailable, StoreRefused), self._target.open(timeout=_REQUEST) as store:
            delete_journaled(store, self._experiment, count)
            return count
        return deleted_count
