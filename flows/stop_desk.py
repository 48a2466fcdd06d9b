"""Who looks on the target whether somebody asks the experiment to stop: off the driver's way, and cheaply."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from contextlib import suppress
from contextvars import copy_context
from datetime import timedelta
from typing import Self

from prefect_tune.blocks import StorageTarget
from prefect_tune.core.errors import StoreRefused, StoreUnavailable
from prefect_tune.core.requests import StopRequest, forget_heard, read_request

__all__ = ["StopDesk"]

_REQUEST = timedelta(seconds=30)
_MOMENT = timedelta(seconds=1)


class StopDesk:
    """Reads the requests after the `heard_count`th, one GET each `look_every`; deletes those that were heard.

    Entering it reads those that are there already, so that nothing is begun that somebody wanted stopped.
    A target that is away is asked later.
    """

    def __init__(
        self,
        target: StorageTarget,
        experiment: str,
        heard_count: int,
        look_every: timedelta,
        interrupted: threading.Event,
    ) -> None:
        self._target = target
        self._experiment = experiment
        self._read_count = heard_count
        self._heard_count = heard_count
        self._look_every = look_every
        self._interrupted = interrupted
        self._found: queue.SimpleQueue[StopRequest] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=copy_context().run, args=(self._watch,), name="stop-desk", daemon=True)

    def __enter__(self) -> Self:
        self._look()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Look no more, and delete what was heard; a target that hangs is not waited for."""
        self._closed.set()
        self._thread.join(_MOMENT.total_seconds())

    def is_interrupted(self) -> bool:
        """Whether the process is to end."""
        return self._interrupted.is_set()

    def take(self) -> Sequence[StopRequest]:
        """Return what was asked since."""
        taken: list[StopRequest] = []
        with suppress(queue.Empty):
            while True:
                taken.append(self._found.get_nowait())
        return taken

    def heard(self, count: int) -> None:
        """Take note that the journal names the first `count` requests."""
        self._heard_count = count

    def _watch(self) -> None:
        deleted_count = 0
        while not self._closed.wait(self._look_every.total_seconds()):
            self._look()
            deleted_count = self._forget(deleted_count)
        self._forget(deleted_count)

    def _look(self) -> None:
        with suppress(StoreUnavailable, StoreRefused), self._target.open(timeout=_REQUEST) as store:
            while (request := read_request(store, self._experiment, self._read_count + 1)) is not None:
                self._read_count += 1
                self._found.put(request)

    def _forget(self, deleted_count: int) -> int:
        """Delete what was heard since; what cannot be deleted now is left to whoever hears the next request."""
        count = self._heard_count
        if count == deleted_count:
            return count
        with suppress(StoreUnavailable, StoreRefused), self._target.open(timeout=_REQUEST) as store:
            forget_heard(store, self._experiment, count)
            return count
        return deleted_count
