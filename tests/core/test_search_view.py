"""What is known of a running search: each report counts once, and what an earlier run trained does not."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

import pytest

from prefect_tune.core.experiment.experiment import Experiment, apply_event, make_empty_experiment
from prefect_tune.core.journal_events import (
    AttemptEnded,
    AttemptStarted,
    Cause,
    Event,
    Owner,
    OwnerChanged,
    StepReported,
    TrialAdded,
    TrialFinished,
    TrialPaused,
)
from prefect_tune.core.search_view import AttemptPeriod, RunCounts, SearchView
from prefect_tune.core.values import StepReport
from tests.fakes.checkpoints import first_generation

EARLY, LATE = (datetime.fromisoformat(f"2026-11-23T0{hour}:00:00.000+00:00") for hour in (1, 2))
LOCAL, REMOTE = (Owner(name="o", host=host, pid=1) for host in ("here", "elsewhere"))


class ObservedExperiment:
    """An experiment, and the view that its events are applied to."""

    def __init__(self) -> None:
        self.experiment: Experiment = make_empty_experiment(first_generation("e"))
        self.count = 0
        self.view = SearchView(self.experiment)
        self.apply(OwnerChanged(experiment="e", generation=1, term=1, owner=LOCAL))

    def apply(self, *events: Event, at: datetime = LATE) -> None:
        for event in events:
            self.count += 1
            self.experiment = apply_event(self.experiment, event, self.count)
            self.view.apply_event(event, at, self.experiment)

    def report_step(self, step: int) -> StepReport:
        report = StepReport(step=step, metrics={"loss": 1 / step})
        self.view.apply_report("a", report, LATE)
        return report

    def running_attempts(self) -> Mapping[str, AttemptPeriod]:
        return self.view.take_snapshot().running


@pytest.fixture
def observer() -> ObservedExperiment:
    return ObservedExperiment()


def test_an_attempt_on_another_machine_runs_where_its_supervisor_does(observer: ObservedExperiment) -> None:
    started = AttemptStarted(trial="a", attempt=1, from_step=0, at=EARLY.isoformat(), supervisor=REMOTE)
    observer.apply(TrialAdded(trial="a", config={}, proposed_by_search=True), started)
    (attempt,) = observer.running_attempts().values()
    assert (attempt.attempt, attempt.began_at, attempt.owner) == (1, EARLY, REMOTE)


def test_a_single_training_runs_where_its_experiment_was_opened(observer: ObservedExperiment) -> None:
    observer.apply(TrialAdded(trial="a", config={}), AttemptStarted(trial="a", attempt=1, from_step=0))
    assert observer.running_attempts()["a"].owner == LOCAL


def test_the_newest_report_counts_and_those_of_an_attempt_that_ended_do_not(observer: ObservedExperiment) -> None:
    observer.apply(TrialAdded(trial="a", config={}), AttemptStarted(trial="a", attempt=1, from_step=0))
    observer.report_step(1)
    newest = observer.report_step(7)
    observer.apply(StepReported(trial="a", report=StepReport(step=3, metrics={})))
    assert observer.running_attempts()["a"].report == newest
    assert observer.running_attempts()["a"].reported_at == LATE
    observer.apply(
        AttemptEnded(trial="a", cause=Cause.MACHINE, reason="lost"), AttemptStarted(trial="a", attempt=2, from_step=0)
    )
    assert (observer.running_attempts()["a"].attempt, observer.running_attempts()["a"].report) == (2, None)


@pytest.mark.parametrize(
    "end",
    [
        TrialFinished(trial="a", reason="enough"),
        TrialPaused(trial="a", reason="not among the best"),
        AttemptEnded(trial="a", cause=Cause.PREEMPTED, reason="asked to stop"),
    ],
)
def test_a_trial_that_has_ended_is_not_among_them(end: Event, observer: ObservedExperiment) -> None:
    observer.apply(TrialAdded(trial="a", config={}), AttemptStarted(trial="a", attempt=1, from_step=0))
    observer.apply(end)
    observer.report_step(9)
    assert not observer.running_attempts()
    assert observer.view.take_snapshot().counts.ended_attempts == 1


def test_an_attempt_that_outlived_its_search_runs_on_with_an_unknown_host(observer: ObservedExperiment) -> None:
    observer.apply(TrialAdded(trial="a", config={}), AttemptStarted(trial="a", attempt=1, from_step=0))
    next_run = SearchView(observer.experiment)
    next_run.begin_run(LATE)
    (attempt,) = next_run.take_snapshot().running.values()
    assert (attempt.attempt, attempt.owner, attempt.is_earlier) == (1, None, True)
    for step in (7, 9):
        next_run.apply_report("a", StepReport(step=step, metrics={}), LATE)
    assert next_run.take_snapshot().counts == RunCounts(reports=2, steps=2)


def test_what_an_earlier_run_trained_is_neither_counted_nor_measured() -> None:
    observer = ObservedExperiment()
    observer.apply(TrialAdded(trial="a", config={}, proposed_by_search=True))
    observer.view.begin_run(LATE)
    observer.apply(AttemptStarted(trial="a", attempt=1, from_step=0, supervisor=REMOTE), at=EARLY)
    observer.apply(*(StepReported(trial="a", report=StepReport(step=step, metrics={})) for step in (1, 2, 3)), at=EARLY)
    view = observer.view.take_snapshot()
    assert (view.counts, view.running["a"].report.step) == (RunCounts(), 3)
    observer.apply(AttemptEnded(trial="a", cause=Cause.MACHINE, reason="lost"), at=EARLY)
    view = observer.view.take_snapshot()
    assert (view.counts, view.running) == (RunCounts(), {})
