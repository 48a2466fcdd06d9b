"""Publish the live status of running trials every few seconds, from a background thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import copy_context
from datetime import timedelta

from prefect_tune.blocks import StorageTarget
from prefect_tune.core.errors import TuneError
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.messages.live_status import LiveStatus, RunningTrial, delete_live_status, write_live_status
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.supervisor.run_identity import new_write_id

_REQUEST = timedelta(seconds=30)
_FIRST = timedelta(seconds=1)
_PATIENCE = timedelta(seconds=1)
_SHARE = 20
"""The pause after a write is at least this multiple of its duration, so that a slow target gets fewer writes."""


class LiveStatusPublisher:
    """Writes what `running` returns: 1 s after the first `begin`, then every `period`. Best effort.

    While the target fails, nothing is written and nothing else fails; the first such error is logged.
    """

    def __init__(
        self,
        target: StorageTarget,
        key: JournalKey,
        period: timedelta | None,
        running: Callable[[], tuple[Experiment, Sequence[RunningTrial]]],
    ) -> None:
        """Prepare to write; no thread runs yet.

        Args:
            target: where the journal is.
            key: the journal whose owner this process is.
            period: the time between two writes; None to write nothing.
            running: returns the state of the journal, and the running attempts. Called in the thread.
        """
        self._target = target
        self._key = key
        self._period = period
        self._running = running
        self._written_count = 0
        self._fails = False
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Start the thread, unless it runs already: an attempt has begun, or its search."""
        if self._thread is None and self._period is not None and not self._closed.is_set():
            loop = (self._run, self._period)
            self._thread = threading.Thread(target=copy_context().run, args=loop, name="live-status", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop; delete the last object if no trial runs any more. Waits at most 1 s for the target."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(_PATIENCE.total_seconds())

    def _run(self, period: timedelta) -> None:
        pause, next_pause = _FIRST, period
        while not self._closed.wait(pause.total_seconds()):
            began = time.monotonic()
            self._write(next_pause)
            pause, next_pause = next_pause, max(period, timedelta(seconds=time.monotonic() - began) * _SHARE)
        self._delete()

    def _write(self, next_pause: timedelta) -> None:
        experiment, running = self._running()
        status = LiveStatus(
            epoch=experiment.epoch,
            owner=experiment.owner,
            number=self._written_count + 1,
            at=new_write_id().at,
            period_seconds=next_pause.total_seconds(),
            trials=tuple(running),
        )
        try:
            with self._target.open(timeout=_REQUEST) as store:
                write_live_status(store, self._key, status)
        except TuneError as error:
            if not self._fails:
                log = logging.getLogger("prefect_tune")
                log.warning("the newest steps of running trials cannot be published; retried later: %s", error)
            self._fails = True
        else:
            self._fails = False
        self._written_count += 1  # also after an error: the target may have written it

    def _delete(self) -> None:
        experiment, running = self._running()
        may_be_left = self._written_count > 0 or experiment.epoch > 1  # this one's, or that of an owner that was killed
        if may_be_left and not running:
            with suppress(TuneError), self._target.open(timeout=_REQUEST) as store:
                delete_live_status(store, self._key, experiment.epoch)
