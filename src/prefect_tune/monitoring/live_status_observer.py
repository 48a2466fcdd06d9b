"""A listener that keeps the running attempts of a search, and publishes them as its live status."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Self

from prefect_tune.blocks import StorageTarget
from prefect_tune.core.errors import Superseded
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import Status
from prefect_tune.core.journal_events.experiment_events import (
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
from prefect_tune.core.messages.live_status import RunningTrial
from prefect_tune.core.models import StepReport
from prefect_tune.monitoring.search_observer import SearchObserver
from prefect_tune.supervisor.live_status_publisher import LiveStatusPublisher
from prefect_tune.supervisor.run_identity import new_write_id
from prefect_tune.supervisor.search_link import LatestReport, StepReported


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

    def happened(self, event: Event, experiment: Experiment) -> None:
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
