"""What observers are told: one that only shows a search cannot end it; the recorder knows earlier runs too."""

from __future__ import annotations

import pytest

from prefect_tune.core.experiment.experiment import Experiment, make_empty_experiment
from prefect_tune.core.experiment.summary import LearningCurves
from prefect_tune.core.journal_events import (
    AttemptEnded,
    AttemptStarted,
    Cause,
    Entry,
    OwnerChanged,
    StepReported,
    TrialAdded,
)
from prefect_tune.core.values import StepReport
from prefect_tune.monitoring.search_observer import CurveCollector, ObserverGroup, SearchObserver, SearchRecorder
from tests.fakes.checkpoints import first_generation
from tests.fakes.searches.journal_builder import STARTED_AT, JournalBuilder
from tests.fakes.trial_processes import LogRecorder, make_log


class Counts(SearchObserver):
    def __init__(self, fails_at: int = 0) -> None:
        self.calls = 0
        self._fails_at = fails_at

    def on_entry_written(self, experiment: Experiment) -> None:
        del experiment
        self.calls += 1
        if self.calls == self._fails_at:
            raise OverflowError("date value out of range")


def test_one_that_fails_is_logged_once_and_called_no_more_while_the_others_are() -> None:
    recorder, state = LogRecorder(), make_empty_experiment(first_generation("e"))
    bad, good = Counts(fails_at=2), Counts()
    group = ObserverGroup([bad, good], make_log(recorder))
    for _ in range(4):
        group.on_entry_written(state)
    assert (bad.calls, good.calls) == (2, 4)
    assert recorder.lines == ["Counts failed and is not called again; the search continues"]


def test_curves_of_which_an_event_is_missing_are_not_published(monkeypatch: pytest.MonkeyPatch) -> None:
    collector = CurveCollector(state := make_empty_experiment(first_generation("e")))
    monkeypatch.setattr(LearningCurves, "add_event", Counts(fails_at=1).on_entry_written)
    ObserverGroup([collector], make_log(LogRecorder())).on_event(TrialAdded(trial="a", config={}), state)
    assert collector.curves is None


def test_what_happened_in_earlier_runs_comes_before_what_this_run_has_recorded_and_counts_no_more() -> None:
    journal = JournalBuilder()
    start = [TrialAdded(trial="a", config={}), AttemptStarted(trial="a", attempt=1, from_step=0)]
    report, owner = StepReported(trial="a", report=StepReport(step=1, metrics={"loss": 1.0})), journal.state.owner
    assert owner is not None
    earlier = [OwnerChanged(experiment="rates", generation=1, term=1, owner=owner), *start, report]
    journal.record(*start, report)
    journal.change_owner("second", after=60)
    journal.record(lost := AttemptEnded(trial="a", cause=Cause.MACHINE, reason="its owner died"))
    recorder = SearchRecorder(journal.state)
    recorder.expect_earlier_entries()
    report_again = StepReported(trial="a", report=StepReport(step=1, metrics={"loss": 0.5}))
    for event in (AttemptStarted(trial="a", attempt=2, from_step=0), report_again):
        journal.record(event)
        recorder.on_event(event, journal.state)
    assert [attempt.attempt for attempt in recorder.read_search_snapshot().attempts] == [2]
    events = (tuple(earlier), (OwnerChanged(experiment="rates", generation=1, term=2, owner=owner), lost))
    recorder.prepend_entries(Entry.model_construct(at=STARTED_AT.isoformat(), events=batch) for batch in events)
    snapshot = recorder.read_search_snapshot(["a"])
    assert [(attempt.attempt, attempt.is_lost, attempt.status) for attempt in snapshot.attempts] == [
        (1, True, "interrupted"),
        (2, False, "running"),
    ]
    assert (snapshot.is_complete, len(snapshot.ownerships), snapshot.counts.reports) == (True, 2, 1)
    assert snapshot.curves["a"]["loss"] == [(1.0, 0.5)]
    assert recorder.best == ("a", (0.5,))


def test_the_best_has_the_best_last_report_that_counts_not_one_that_was_lost() -> None:
    journal = JournalBuilder()
    owner = journal.state.owner
    assert owner is not None
    opened = OwnerChanged(experiment="rates", generation=1, term=1, owner=owner)
    earlier = [
        *(TrialAdded(trial=trial, config={}) for trial in "ab"),
        *(AttemptStarted(trial=trial, attempt=1, from_step=0) for trial in "ab"),
        StepReported(trial="a", report=StepReport(step=1, metrics={"loss": 0.1})),
        StepReported(trial="b", report=StepReport(step=1, metrics={"loss": 0.5})),
        AttemptEnded(trial="a", cause=Cause.MACHINE, reason="its machine died"),
        AttemptStarted(trial="a", attempt=2, from_step=0),
    ]
    journal.record(*earlier)
    recorder = SearchRecorder(journal.state)
    assert recorder.best == ("b", (0.5,))
    recorder.expect_earlier_entries()
    recorder.prepend_entries([Entry.model_construct(at=STARTED_AT.isoformat(), events=(opened, *earlier))])
    assert recorder.best == ("b", (0.5,))
    for step, (trial, loss, best) in enumerate([("a", 0.2, "a"), ("a", 0.9, "b"), ("b", 0.9, "a"), ("b", 0.3, "b")], 2):
        report = StepReported(trial=trial, report=StepReport(step=step, metrics={"loss": loss}))
        journal.record(report)
        recorder.on_event(report, journal.state)
        assert recorder.best[0] == best  # of equal ones the first one
