"""Publishes the live status of a journal's running attempts every few seconds."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from datetime import timedelta
from typing import Self

from prefect_tune.blocks import StorageTarget
from prefect_tune.core.errors import Superseded, TuneError
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.messages.live_status import (
    LiveStatus,
    RunningTrial,
    delete_live_status,
    write_live_status,
)
from prefect_tune.core.search_view import AttemptPeriod, SearchSnapshot
from prefect_tune.journal_access import run_now, utc_now

_REQUEST = timedelta(seconds=30)
_FIRST = timedelta(seconds=1)
_PATIENCE = timedelta(seconds=1)
_SHARE = 20
"""The pause after a write is at least this multiple of its duration, so that a slow target gets fewer writes."""


class LiveStatusPublisher:
    """Writes the running attempts: 1 s after the first `begin`, then every `period`. Best effort.

    While the target fails, nothing is written and nothing else fails; the first such error is logged.
    """

    def __init__(
        self,
        target: StorageTarget,
        read: Callable[[], SearchSnapshot],
        period: timedelta | None,
        is_run_here: Callable[[str], bool] = lambda _: True,
    ) -> None:
        """Prepare to write; no thread runs yet.

        Args:
            target: where the journal is.
            read: returns what is known of the journal whose owner this process is.
            period: the time between two writes; None to write nothing.
            is_run_here: whether this owner runs a trial; others, which an earlier one left, are not published.
        """
        self._target = target
        self._read = read
        self._period = period
        self._is_run_here = is_run_here
        self._written_count = 0
        self._fails = False
        self._is_superseded = False
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        """Publish also while no trial runs: `delete` takes an experiment whose live status is recent for running."""
        self.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Stop publishing. After `Superseded` another process publishes: then what this one wrote is deleted."""
        self._is_superseded = kind is not None and issubclass(kind, Superseded)
        self.close()

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
            term=experiment.term,
            owner=experiment.owner,
            number=self._written_count + 1,
            at=utc_now(),
            run_at=run_now(),
            period_seconds=next_pause.total_seconds(),
            trials=running,
        )
        try:
            with self._target.open(timeout=_REQUEST) as store:
                write_live_status(store, experiment.key, status)
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
        may_be_left = self._written_count > 0 or experiment.term > 1  # this one's, or that of an owner that was killed
        if may_be_left and (self._is_superseded or not running):
            with suppress(TuneError), self._target.open(timeout=_REQUEST) as store:
                delete_live_status(store, experiment.key, experiment.term)

    def _running(self) -> tuple[Experiment, tuple[RunningTrial, ...]]:
        snapshot = self._read()
        running = (as_running_trial(each) for name, each in snapshot.running.items() if self._is_run_here(name))
        return snapshot.experiment, tuple(running)


def as_running_trial(attempt: AttemptPeriod) -> RunningTrial:
    """Return a running attempt as the live status holds it."""
    is_ours = not attempt.is_earlier
    return RunningTrial(
        trial=attempt.trial,
        attempt=attempt.attempt,
        began_at=attempt.began.isoformat(timespec="milliseconds") if is_ours else None,
        host=attempt.owner.host if is_ours and attempt.owner else None,
        report=attempt.report,
        reported_at=attempt.reported_at.isoformat(timespec="milliseconds") if attempt.reported_at else None,
    )
