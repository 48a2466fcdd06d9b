"""The live status of a search's running attempts: kept from its events, and published every few seconds."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import copy_context
from datetime import timedelta
from typing import Self

from prefect_tune.attempt.search_link import LatestReport, StepReported
from prefect_tune.blocks import StorageTarget
from prefect_tune.core.errors import Superseded, TuneError
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import Status
from prefect_tune.core.journal_events import (
    Absorbed,
    AttemptEnded,
    Event,
    Finished,
    GaveUp,
    Opened,
    Paused,
    Reported,
    Started,
    events_in,
)
from prefect_tune.core.messages.live_status import LiveStatus, RunningTrial, delete_live_status, write_live_status
from prefect_tune.core.models import StepReport
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.journal_access import new_write_id
from prefect_tune.monitoring.search_observer import SearchObserver

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
            term=experiment.term,
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
        may_be_left = self._written_count > 0 or experiment.term > 1  # this one's, or that of an owner that was killed
        if may_be_left and not running:
            with suppress(TuneError), self._target.open(timeout=_REQUEST) as store:
                delete_live_status(store, self._key, experiment.term)


# A listener that keeps the running attempts of a search, and publishes them as its live status.


class LiveStatusObserver(SearchObserver):
    """Records starts, reports and ends of attempts in microseconds; the publisher's thread writes them."""

    def __init__(
        self,
        target: StorageTarget,
        experiment: Experiment,
        period: timedelta | None,
        is_run_here: Callable[[str], bool] = lambda _: True,
    ) -> None:
        """Args: is_run_here: whether this owner runs a trial; others, which an earlier one left, are not published."""
        self._guard = threading.Lock()
        self._is_run_here = is_run_here
        self._experiment = experiment
        running = (each for each in experiment.trials.values() if each.status is Status.RUNNING)
        self._attempts = {each.trial: RunningTrial(trial=each.trial, attempt=each.attempt) for each in running}
        self._reports: dict[str, tuple[StepReport, str]] = {}
        self._hosts: dict[str, str] = {}
        self._publisher = LiveStatusPublisher(target, experiment.key, period, self._running)

    def applied(self, event: Event, experiment: Experiment) -> None:
        at = (event.at if isinstance(event, Absorbed) else None) or new_write_id().at
        with self._guard:
            self._experiment = experiment
            for each in events_in(event):
                self._receive(each, at)

    def reported(self, step: StepReported, experiment: Experiment) -> None:
        del experiment
        with self._guard:
            self._report(step.trial, step.report, new_write_id().at)

    def latest(self, newest: LatestReport) -> None:
        with self._guard:
            self._report(newest.trial, newest.report, newest.at)

    def __enter__(self) -> Self:
        """Publish also while no trial runs: `delete` takes an experiment whose live status is recent for running."""
        self._publisher.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Stop publishing. After `Superseded` another process publishes: then what this one wrote is deleted."""
        if kind is not None and issubclass(kind, Superseded):
            with self._guard:
                self._attempts.clear()
        self.close()

    def close(self) -> None:
        """Stop publishing; waits at most 1 s for the target."""
        self._publisher.close()

    def _receive(self, event: Event, at: str) -> None:
        match event:
            case Opened(trial=str(trial), owner=owner):
                self._hosts[trial] = owner.host
                self._forget(trial)
            case Started():
                self._begin(event, at)
            case Reported(trial=trial, report=report):
                self._report(trial, report, at)
            case AttemptEnded(trial=trial) | Finished(trial=trial) | GaveUp(trial=trial) | Paused(trial=trial):
                self._forget(trial)
            case _:
                pass

    def _begin(self, started: Started, at: str) -> None:
        owner = self._experiment.owner
        host = self._hosts.get(started.trial) or (owner.host if owner else None)
        self._forget(started.trial)
        self._attempts[started.trial] = RunningTrial(
            trial=started.trial, attempt=started.attempt, began_at=at, host=host
        )
        self._publisher.begin()

    def _report(self, trial: str, report: StepReport, at: str) -> None:
        known = self._reports.get(trial)
        if trial in self._attempts and (known is None or report.step > known[0].step):
            self._reports[trial] = report, at
            self._publisher.begin()  # of an attempt that an earlier run has started

    def _forget(self, trial: str) -> None:
        self._attempts.pop(trial, None)
        self._reports.pop(trial, None)

    def _running(self) -> tuple[Experiment, Sequence[RunningTrial]]:
        with self._guard:
            experiment, reports = self._experiment, dict(self._reports)
            attempts = [each for name, each in self._attempts.items() if self._is_run_here(name)]
        return experiment, [_with_report(each, reports.get(each.trial)) for each in attempts]


def _with_report(attempt: RunningTrial, newest: tuple[StepReport, str] | None) -> RunningTrial:
    if newest is None:
        return attempt
    return attempt.model_copy(update={"report": newest[0], "reported_at": newest[1]})
