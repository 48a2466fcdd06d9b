"""What the running attempts of a search have reported: the one record behind its table, its live status and its report.

A report reaches the search's process up to three times: as the newest one of an attempt on another machine, then in
the order of the steps as soon as its step is known, then in an event of the journal. It counts once.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial import Status
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
from prefect_tune.core.models import StepReport, TrialId, Value


@dataclass
class AttemptTimes:
    """The times of one attempt's reports, in seconds of a monotonic clock."""

    began: float
    from_step: int
    first: tuple[float, int] | None = None
    """The time and the step of the first report; the last one of those that arrived at the same time."""
    last: tuple[float, int] | None = None
    ended: float | None = None

    def report(self, step: int, now: float) -> None:
        """Take in a report; one that is not newer than the last is known already."""
        if step <= self.step:
            return
        if self.first is None or self.first[0] == now:
            self.first = now, step
        self.last = now, step

    @property
    def step(self) -> int:
        """The last step."""
        return self.last[1] if self.last else self.from_step

    def between_reports(self) -> tuple[float, int]:
        """Return the time between the first and the last report, and the number of steps in it."""
        if self.first is None or self.last is None:
            return 0.0, 0
        return self.last[0] - self.first[0], self.last[1] - self.first[1]

    def until_first_report(self) -> tuple[float, int]:
        """Return the time until the first report, and the number of steps in it."""
        return (self.first[0] - self.began, self.first[1] - self.from_step) if self.first else (0.0, 0)


class RunningTrial(Value):
    """A running attempt of a trial, with its newest report, as the live status holds it."""

    trial: TrialId
    attempt: int
    began_at: str | None = None
    """The time of day; None if an earlier owner started the attempt."""
    host: str | None = None
    """The machine of its supervisor; None if an earlier owner started the attempt."""
    report: StepReport | None = None
    """None before its first step."""
    reported_at: str | None = None


@dataclass(frozen=True, slots=True)
class RunningAttemptsView:
    """The running attempts at one moment, with the state of the journal at that moment."""

    experiment: Experiment
    running: Mapping[str, RunningTrial]
    times: Mapping[str, Sequence[AttemptTimes]]
    """By trial, its attempts in this run; of a running trial the last one is the present one."""
    report_count: int
    """The number of reports in this run."""

    def newest(self, trial: str) -> StepReport | None:
        """Return the newest report of a running attempt; None if there is none."""
        return self.running[trial].report if trial in self.running else None


class RunningAttempts:
    """Records starts, reports and ends of attempts, in the search's thread; `view` may be called from another one.

    The caller passes the times: the time of day as in the journal, and seconds of a monotonic clock.
    """

    def __init__(self, experiment: Experiment, at: str, now: float) -> None:
        """Begin with the attempts that have outlived an earlier run of the search."""
        running = [each for each in experiment.trials.values() if each.status is Status.RUNNING]
        self._guard = threading.Lock()
        self._began_at = at
        self._experiment = experiment
        self._running = {each.trial: RunningTrial(trial=each.trial, attempt=each.attempt) for each in running}
        self._steps = {each.trial: each.step for each in running}  # of the last report in the order of the steps
        self._times = {each.trial: [AttemptTimes(now, each.step)] for each in running}
        self._hosts: dict[str, str] = {}
        self._report_count = 0

    @property
    def experiment(self) -> Experiment:
        """The state of the journal at this moment."""
        return self._experiment

    def applied(self, event: Event, experiment: Experiment, at: str, now: float) -> None:
        """Take in a journaled event and the state after it."""
        written_at = (event.at if isinstance(event, Absorbed) else None) or at
        with self._guard:
            self._experiment, count = experiment, self._report_count
            for each in events_in(event):
                self._receive(each, written_at, now)
            if isinstance(event, Absorbed) and written_at < self._began_at:
                self._report_count = count
                self._measure_from(event.trial, now)

    def reported(self, trial: str, report: StepReport, at: str, now: float) -> None:
        """Take in a step's report as soon as the step is known to be trained."""
        with self._guard:
            self._reported(trial, report, at, now)

    def latest(self, trial: str, report: StepReport, at: str, now: float) -> None:
        """Take in the newest report of an attempt, before those that precede it."""
        with self._guard:
            self._renew(trial, report, at, now)

    def wrote(self, experiment: Experiment) -> None:
        """Take in the state as written: entries of guests may be in it."""
        with self._guard:
            self._experiment = experiment

    def view(self) -> RunningAttemptsView:
        """Return the attempts at this moment."""
        with self._guard:
            times = {trial: tuple(attempts) for trial, attempts in self._times.items()}
            return RunningAttemptsView(self._experiment, dict(self._running), times, self._report_count)

    def _receive(self, event: Event, at: str, now: float) -> None:
        match event:
            case Opened(trial=str(trial), owner=owner):
                self._hosts[trial] = owner.host
                self._end(trial, now)
            case Started():
                self._begin(event, at, now)
            case Reported(trial=trial, report=report):
                self._reported(trial, report, at, now)
            case AttemptEnded(trial=trial) | Finished(trial=trial) | GaveUp(trial=trial) | Paused(trial=trial):
                self._end(trial, now)
            case _:
                pass

    def _begin(self, event: Started, at: str, now: float) -> None:
        trial, owner = event.trial, self._experiment.owner
        host = self._hosts.get(trial) or (owner.host if owner else None)
        self._running[trial] = RunningTrial(trial=trial, attempt=event.attempt, began_at=at, host=host)
        self._steps[trial] = event.from_step
        self._times.setdefault(trial, []).append(AttemptTimes(now, event.from_step))

    def _reported(self, trial: str, report: StepReport, at: str, now: float) -> None:
        if trial in self._running and report.step > self._steps[trial]:
            self._steps[trial] = report.step
            self._report_count += 1
            self._renew(trial, report, at, now)

    def _renew(self, trial: str, report: StepReport, at: str, now: float) -> None:
        attempt = self._running.get(trial)
        if attempt is not None and (attempt.report is None or report.step > attempt.report.step):
            self._running[trial] = attempt.model_copy(update={"report": report, "reported_at": at})
            self._times[trial][-1].report(report.step, now)

    def _end(self, trial: str, now: float) -> None:
        if self._running.pop(trial, None) is not None:
            self._times[trial][-1].ended = now

    def _measure_from(self, trial: str, now: float) -> None:
        """Measure the trial's present attempt from now on: its entry is older than this run, which learns of it now."""
        earlier = self._times.pop(trial, None)
        if earlier and self._experiment.trial(trial).status is Status.RUNNING:
            self._times[trial] = [AttemptTimes(now, earlier[-1].step)]
