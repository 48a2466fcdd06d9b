"""The progress of a running search: counts, best trial, rates, rungs, notes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from prefect_tune.core.experiment.experiment import Experiment, after_event, nothing_yet
from prefect_tune.core.experiment.trial_transitions import Status
from prefect_tune.core.journal_events import (
    AttemptEnded,
    Cause,
    Decided,
    Event,
    Finished,
    GaveUp,
    Paused,
    Reported,
    Started,
    StopAsked,
    TrialAdded,
)
from prefect_tune.core.schedulers.base import Continue, Exploit
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.values import StepReport
from prefect_tune.terminal.time_left import SearchEstimate
from tests.fakes.checkpoints import first_generation
from tests.fakes.searches.tracked_progress import TrackedProgress

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
LOSS = Objective(metrics=("loss",), modes=("min",))


class Search:
    """Sends events to a tracker, as a driver does."""

    def __init__(self, outlook: SearchEstimate, before: Experiment | None = None) -> None:
        self.experiment = before or nothing_yet(first_generation("e"))
        self.now = 0.0
        self.tracker = TrackedProgress(self.experiment, outlook, self.now, NOON)

    def happens(self, *events: Event) -> None:
        for event in events:
            self.experiment = after_event(self.experiment, event, self.experiment.number + 1)
            self.tracker.happens(event, self.experiment, self.now)

    def begins(self, *trials: str) -> None:
        for trial in trials:
            self.happens(TrialAdded(trial=trial, config={"lr": 0.1}), Started(trial=trial, attempt=1, from_step=0))

    def reports(self, trial: str, step: int, loss: float) -> None:
        self.tracker.reported(trial, report(step, loss), self.now)


def report(step: int, loss: float) -> StepReport:
    return StepReport(step=step, metrics={"loss": loss})


@pytest.fixture
def search() -> Search:
    return Search(SearchEstimate("e", LOSS, trial_count=4, step_count=10))


def test_trials_are_counted_by_state(search: Search) -> None:
    search.begins("0", "1", "2")
    search.happens(Finished(trial="0", reason="enough"), GaveUp(trial="1", cause=Cause.USER, message="no"))
    state = search.tracker.state(1.0)
    assert state.counts == {Status.COMPLETED: 1, Status.ERRORED: 1, Status.RUNNING: 1}


def test_the_best_so_far_is_known_as_soon_as_it_is_reported(search: Search) -> None:
    search.begins("0", "1")
    search.reports("0", 1, 0.5)
    search.reports("1", 1, 0.4)
    assert search.tracker.state(1.0).best.trial == "1"
    search.reports("0", 2, 0.3)
    best = search.tracker.state(1.0).best
    assert (best.trial, best.step, best.metrics) == ("0", 2, {"loss": 0.3})


def test_a_report_that_the_journal_tells_again_counts_once(search: Search) -> None:
    search.begins("0")
    search.reports("0", 1, 0.5)
    search.happens(Reported(trial="0", report=report(1, 0.5)), Reported(trial="0", report=report(2, 0.5)))
    assert search.tracker.state(2.0).reports_per_second == pytest.approx(1.0)


def test_the_rate_is_that_of_the_last_seconds(search: Search) -> None:
    search.begins("0")
    for step in range(1, 101):
        search.reports("0", step, 0.5)
    assert search.tracker.state(10.0).reports_per_second == pytest.approx(10.0)
    assert search.tracker.state(20.0).reports_per_second == pytest.approx(0.0)


def test_what_an_attempt_reported_is_forgotten_when_the_next_one_begins(search: Search) -> None:
    search.begins("0")
    search.reports("0", 5, 0.5)
    search.happens(
        AttemptEnded(trial="0", cause=Cause.MACHINE, message="gone\nTraceback"),
        Started(trial="0", attempt=2, from_step=0),
    )
    (running,) = search.tracker.state(1.0).running
    assert running.step < 5
    assert [each.text for each in search.tracker.state(1.0).notes] == [
        "attempt ended: machine: gone",
        "attempt 2, from step 0",
    ]


def test_an_attempt_that_ended_without_a_word_is_forgotten_too(search: Search) -> None:
    search.begins("0")
    search.reports("0", 5, 0.5)
    search.tracker.happens(Started(trial="0", attempt=2, from_step=0), search.experiment, 0.0)
    assert search.tracker.state(1.0).best is None


def test_rungs_tell_how_many_trials_were_judged_where_also_before_this_run(search: Search) -> None:
    search.begins("0", "1")
    for trial, step in (("0", 1), ("1", 1), ("0", 3)):
        search.happens(Decided(trial=trial, report=report(step, 0.5), decision=Continue()))
    assert search.tracker.state(1.0).rungs == {1: 2, 3: 1}
    assert Search(SearchEstimate("e"), search.experiment).tracker.state(0.0).rungs == {1: 2, 3: 1}


def test_each_of_several_equal_failures_is_noted(search: Search) -> None:
    search.begins("0")
    killed = AttemptEnded(trial="0", cause=Cause.MACHINE, message="killed")
    search.happens(killed, Started(trial="0", attempt=2, from_step=0), killed)
    texts = [each.text for each in search.tracker.state(1.0).notes]
    assert texts == ["attempt ended: machine: killed", "attempt 2, from step 0", "attempt ended: machine: killed"]


def test_an_exploit_is_noted(search: Search) -> None:
    search.begins("0", "1")
    exploit = Exploit(source="1", config={"lr": 0.2}, reason="it is better")
    search.happens(Decided(trial="0", report=report(1, 0.5), decision=exploit))
    assert search.tracker.state(1.0).notes[-1].text == "exploits 1"


def test_nothing_takes_longer_than_the_time_budget() -> None:
    search = Search(SearchEstimate("e", LOSS, trial_count=100, time=timedelta(seconds=30)))
    assert search.tracker.state(10.0).left == timedelta(seconds=20)
    search.begins("0")
    search.now = 10.0
    search.happens(Finished(trial="0", reason="enough"))
    assert search.tracker.state(10.0).left == timedelta(seconds=20)
    assert search.tracker.state(40.0).left == timedelta(0)


def test_a_search_that_ends_early_has_no_time_left_that_is_known(search: Search) -> None:
    search.begins("0")
    for search.now in (1.0, 2.0):
        search.reports("0", int(search.now), 0.5)
    assert search.tracker.state(3.0).left is not None
    search.happens(StopAsked(reason="enough"))
    assert (search.tracker.state(3.0).left, search.tracker.state(3.0).ended_because) == (None, "enough")


def test_with_paused_trials_the_time_budget_is_no_least() -> None:
    search = Search(SearchEstimate("e", LOSS, trial_count=2, step_count=100, time=timedelta(seconds=60)))
    search.begins("0", "1")
    search.happens(Paused(trial="1", reason="rung"))
    for search.now in (1.0, 2.0):
        search.reports("0", int(search.now), 0.5)
    shown = search.tracker.state(10.0)
    assert (shown.left, shown.may_take_longer) == (timedelta(seconds=50), False)
    search.reports("0", 98, 0.5)
    assert search.tracker.state(10.0).may_take_longer


def test_the_newest_report_of_an_attempt_elsewhere_is_shown_and_those_before_it_count_when_they_arrive(
    search: Search,
) -> None:
    search.begins("0")
    search.tracker.latest("0", report(9, 0.1), 5.0)
    state = search.tracker.state(10.0)
    assert [(each.step, each.metrics) for each in state.running] == [(9, {"loss": 0.1})]
    assert state.best.trial == "0"
    assert state.reports_per_second == 0
    for step in range(1, 10):
        search.reports("0", step, 1 / step)
    assert search.tracker.state(10.0).reports_per_second == pytest.approx(0.9)
    search.happens(Finished(trial="0", reason="enough"))
    search.tracker.latest("1", report(9, 0.1), 5.0)
    assert not search.tracker.state(10.0).running
