"""The running attempts that a search publishes, derived from its events and reports."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path

import pytest

from prefect_tune.attempt.search_link import StepReported
from prefect_tune.blocks import LocalTarget
from prefect_tune.core.errors import StoreUnavailable, Superseded, TuneError
from prefect_tune.core.experiment.experiment import Experiment, after_event, nothing_yet
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
from prefect_tune.core.messages.live_status import RunningTrial
from prefect_tune.core.models import StepReport
from prefect_tune.monitoring import live_status
from prefect_tune.monitoring.live_status import LiveStatusObserver
from tests.fakes.checkpoints import first_generation

AT = "2026-11-23T01:00:00+00:00"
HERE, ELSEWHERE = (Owner(name="o", host=host, pid=1) for host in ("here", "elsewhere"))


class ObservedExperiment:
    """An experiment, and the observer that receives its events."""

    def __init__(self, target: LocalTarget) -> None:
        self.experiment: Experiment = nothing_yet(first_generation("e"))
        self.count = 0
        self.target = target
        self.observer = LiveStatusObserver(target, self.experiment, timedelta(hours=1))
        self.happens(Opened(experiment="e", generation=1, term=1, owner=HERE))

    def happens(self, *events: Event) -> None:
        for event in events:
            self.count += 1
            self.experiment = after_event(self.experiment, event, self.count)
            self.observer.applied(event, self.experiment)

    def absorbs(self, *events: Event) -> None:
        number = self.experiment.trial("a").absorbed + 1
        self.happens(Absorbed(trial="a", number=number, events=events, at=AT))

    def reports(self, step: int) -> StepReport:
        report = StepReport(step=step, metrics={"loss": 1 / step})
        self.observer.reported(StepReported("a", report, asks=False), self.experiment)
        return report

    def running(self) -> Mapping[str, RunningTrial]:
        return {each.trial: each for each in self.observer._running()[1]}


def test_a_trial_that_an_earlier_owner_left_running_is_published_only_while_it_is_run_here(tmp_path: Path) -> None:
    experiment = nothing_yet(first_generation("e"))
    for number, event in enumerate((TrialAdded(trial="a", config={}), Started(trial="a", attempt=1, from_step=0)), 1):
        experiment = after_event(experiment, event, number)
    run_here: set[str] = set()
    target = LocalTarget(path=str(tmp_path))
    observer = LiveStatusObserver(target, experiment, timedelta(hours=1), run_here.__contains__)
    assert observer._running()[1] == []
    run_here.add("a")
    assert observer._running()[1] == [RunningTrial(trial="a", attempt=1)]


@pytest.fixture
def observed(tmp_path: Path) -> Iterator[ObservedExperiment]:
    made = ObservedExperiment(LocalTarget(path=str(tmp_path)))
    yield made
    made.observer.close()


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
    assert observed.running()["a"].reported_at
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
    next_run = LiveStatusObserver(observed.target, observed.experiment, None)
    assert next_run._running() == (observed.experiment, [RunningTrial(trial="a", attempt=1)])


@pytest.mark.parametrize("error", [Superseded("by another run"), StoreUnavailable("gone")])
def test_what_a_superseded_run_wrote_is_deleted_and_what_another_error_ends_stays(
    error: TuneError, observed: ObservedExperiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_status, "_FIRST", timedelta(0))
    written = Path(observed.target.path, "e", "1", "live")

    def searches() -> None:
        with observed.observer:
            observed.happens(TrialAdded(trial="a", config={}), Started(trial="a", attempt=1, from_step=0))
            while not list(written.glob("*.json")):
                time.sleep(0.005)  # the test's timeout ends it
            raise error

    with pytest.raises(type(error)):
        searches()
    assert bool(list(written.glob("*.json"))) is not isinstance(error, Superseded)
