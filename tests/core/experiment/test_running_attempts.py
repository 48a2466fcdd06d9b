"""The record of running attempts, derived from the events and reports of a search."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from prefect_tune.core.experiment.experiment import Experiment, after_event, nothing_yet
from prefect_tune.core.experiment.running_attempts import RunningAttempts, RunningTrial
from prefect_tune.core.journal_events import (
    Absorbed,
    AttemptEnded,
    Cause,
    Event,
    Finished,
    Opened,
    Owner,
    Paused,
    Reported,
    Started,
    TrialAdded,
)
from prefect_tune.core.models import StepReport
from tests.fakes.checkpoints import first_generation

AT, LATER = "2026-11-23T01:00:00.000+00:00", "2026-11-23T02:00:00.000+00:00"
HERE, ELSEWHERE = (Owner(name="o", host=host, pid=1) for host in ("here", "elsewhere"))


class ObservedExperiment:
    """An experiment, and the record that receives its events."""

    def __init__(self) -> None:
        self.experiment: Experiment = nothing_yet(first_generation("e"))
        self.count = 0
        self.attempts = RunningAttempts(self.experiment, AT, 0.0)
        self.happens(Opened(experiment="e", generation=1, term=1, owner=HERE))

    def happens(self, *events: Event) -> None:
        for event in events:
            self.count += 1
            self.experiment = after_event(self.experiment, event, self.count)
            self.attempts.applied(event, self.experiment, LATER, 0.0)

    def absorbs(self, *events: Event) -> None:
        number = self.experiment.trial("a").absorbed + 1
        self.happens(Absorbed(trial="a", number=number, events=events, at=AT))

    def reports(self, step: int) -> StepReport:
        report = StepReport(step=step, metrics={"loss": 1 / step})
        self.attempts.reported("a", report, LATER, 0.0)
        return report

    def running(self) -> Mapping[str, RunningTrial]:
        return self.attempts.view().running


@pytest.fixture
def observed() -> ObservedExperiment:
    return ObservedExperiment()


def test_a_trial_with_a_journal_of_its_own_runs_where_that_was_opened(observed: ObservedExperiment) -> None:
    opened = Opened(experiment="e", generation=1, trial="a", term=1, owner=ELSEWHERE)
    observed.happens(TrialAdded(trial="a", config={}, own_journal=True))
    observed.absorbs(opened, Started(trial="a", attempt=1, from_step=0))
    assert observed.running() == {"a": RunningTrial(trial="a", attempt=1, began_at=AT, host="elsewhere")}


def test_a_single_training_runs_where_its_experiment_was_opened(observed: ObservedExperiment) -> None:
    observed.happens(TrialAdded(trial="a", config={}), Started(trial="a", attempt=1, from_step=0))
    assert observed.running()["a"].host == "here"


def test_the_newest_report_counts_and_those_of_an_attempt_that_ended_do_not(observed: ObservedExperiment) -> None:
    observed.happens(TrialAdded(trial="a", config={}), Started(trial="a", attempt=1, from_step=0))
    observed.reports(1)
    newest = observed.reports(7)
    observed.happens(Reported(trial="a", report=StepReport(step=3, metrics={})))
    assert observed.running()["a"].report == newest
    assert observed.running()["a"].reported_at == LATER
    observed.happens(
        AttemptEnded(trial="a", cause=Cause.MACHINE, message="lost"), Started(trial="a", attempt=2, from_step=0)
    )
    assert (observed.running()["a"].attempt, observed.running()["a"].report) == (2, None)


@pytest.mark.parametrize(
    "end",
    [
        Finished(trial="a", reason="enough"),
        Paused(trial="a", reason="not among the best"),
        AttemptEnded(trial="a", cause=Cause.PREEMPTED, message="asked to stop"),
    ],
)
def test_a_trial_that_has_ended_is_not_among_them(end: Event, observed: ObservedExperiment) -> None:
    observed.happens(TrialAdded(trial="a", config={}), Started(trial="a", attempt=1, from_step=0))
    observed.happens(end)
    observed.reports(9)
    assert not observed.running()


def test_an_attempt_that_outlived_its_search_runs_on_with_an_unknown_host(observed: ObservedExperiment) -> None:
    observed.happens(TrialAdded(trial="a", config={}), Started(trial="a", attempt=1, from_step=0))
    next_run = RunningAttempts(observed.experiment, LATER, 0.0)
    assert next_run.view().running == {"a": RunningTrial(trial="a", attempt=1)}


def test_what_an_earlier_run_trained_is_neither_counted_nor_measured() -> None:
    before = ObservedExperiment()
    before.happens(TrialAdded(trial="a", config={}, own_journal=True))
    before.attempts = RunningAttempts(before.experiment, LATER, 5.0)
    opened = Opened(experiment="e", generation=1, trial="a", term=1, owner=ELSEWHERE)
    before.absorbs(opened, Started(trial="a", attempt=1, from_step=0))
    before.absorbs(*(Reported(trial="a", report=StepReport(step=step, metrics={})) for step in (1, 2, 3)))
    view = before.attempts.view()
    assert (view.report_count, [each.step for each in view.times["a"]]) == (0, [3])
    before.absorbs(opened.model_copy(update={"term": 2}))  # its phase changes with the next entry
    assert list(before.attempts.view().times) == ["a"]
    before.absorbs(AttemptEnded(trial="a", cause=Cause.MACHINE, message="lost"))
    view = before.attempts.view()
    assert (view.report_count, view.times, view.running) == (0, {}, {})
