"""When the next entry of an experiment's journal is written, and which actions wait for it."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest

from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.journal_events import (
    Absorbed,
    Event,
    Finished,
    FinishKind,
    Opened,
    Owner,
    Reported,
    Requeued,
    Started,
    StopAsked,
    TrialAdded,
)
from prefect_tune.core.reasons import make_reason
from prefect_tune.core.values import StepReport
from prefect_tune.monitoring.search_observer import SearchObserver
from prefect_tune.tuner.pending_entry import PendingEntry
from tests.fakes.searches.pending_entries import WrittenEntries, pending_entry, random_policy


@pytest.fixture
def written() -> WrittenEntries:
    return WrittenEntries()


@pytest.fixture
def page(written: WrittenEntries) -> PendingEntry:
    """The pending entry of an experiment with one trial, with no write for a while."""
    opened = Opened(experiment="e", generation=1, term=1, owner=Owner(name="me", host="here", pid=1))
    page = pending_entry(written, random_policy(), period=timedelta(minutes=5))
    for event in (opened, TrialAdded(trial="00000", config={}), TrialAdded(trial="00001", config={})):
        page.put(event)
    page.write(may_wait=False)
    written.entries.clear()
    return page


def test_what_nobody_waits_for_has_time_and_an_act_has_not(page: PendingEntry, written: WrittenEntries) -> None:
    page.put(Finished(trial="00000", reason="done"))
    page.write(may_wait=True)
    assert written.entries == []
    acts: list[int] = []
    page.then(lambda: acts.append(len(written.entries)))
    page.write(may_wait=True)
    assert acts == [1], "the action runs once the entry is written"


@pytest.mark.parametrize(
    "event",
    [
        StopAsked(reason="enough", trial="00000", request="w"),
        StopAsked(reason="enough", request="w"),
        StopAsked(reason="enough", request="w", refused=make_reason("request-repeated")),
    ],
)
def test_whoever_asks_for_a_stop_finds_the_answer_at_once(event: StopAsked, page: PendingEntry) -> None:
    page.put(event)
    assert page.write(may_wait=True).stop_requests == ("w",)


def test_whoever_has_asked_for_a_trials_stop_finds_its_end_at_once(page: PendingEntry, written: WrittenEntries) -> None:
    page.put(StopAsked(reason="enough", trial="00000", request="w"))
    page.write(may_wait=True)
    page.put(Finished(trial="00001", reason="done"))
    page.write(may_wait=True)
    assert len(written.entries) == 1
    page.put(Finished(trial="00000", reason="enough", kind=FinishKind.STOPPED))
    assert page.write(may_wait=True).trial("00000").finish_kind is FinishKind.STOPPED
    assert len(written.entries) == 2


def test_observers_receive_once_what_the_experiments_journal_and_a_trials_own_record(written: WrittenEntries) -> None:
    received: list[Event] = []

    class Observer(SearchObserver):
        def applied(self, event: Event, experiment: Experiment) -> None:
            del experiment
            received.append(event)

    page = pending_entry(written, random_policy(), Observer())
    opened = Opened(experiment="e", generation=1, term=1, owner=Owner(name="me", host="here", pid=1))
    started = Started(trial="00000", attempt=1, from_step=0)
    done, more = Finished(trial="00000", reason="step 1"), Requeued(trial="00000", reason="more steps")
    for event in (opened, TrialAdded(trial="00000", config={}, own_journal=True), started, done, more):
        page.put(event)
    again = started.model_copy(update={"attempt": 2})
    page.put(Absorbed(trial="00000", number=1, events=(more, again)))
    assert received[-2:] == [more, Absorbed(trial="00000", number=1, events=(again,))]


class Clock:
    """A clock that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


def test_a_changed_status_is_written_within_two_seconds_and_reports_within_the_sync_period(
    page: PendingEntry, written: WrittenEntries, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    first, second = (Started(trial=trial, attempt=1, from_step=0) for trial in ("00000", "00001"))
    page.put(first)
    clock.now += 1.9
    page.put(second)
    page.write(may_wait=True)
    assert written.entries == []
    clock.now += 0.2
    page.write(may_wait=True)
    assert written.entries == [(first, second)], "both share an entry"
    reported = Reported(trial="00000", report=StepReport(step=1, metrics={}))
    page.put(reported)
    clock.now += 290
    page.write(may_wait=True)
    assert len(written.entries) == 1
    clock.now += 11
    page.write(may_wait=True)
    assert written.entries[1:] == [(reported,)]


def test_a_start_that_a_trials_own_journal_has_brought_counts_as_a_changed_status(
    page: PendingEntry, written: WrittenEntries, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    page.put(Absorbed(trial="00000", number=1, events=(Started(trial="00000", attempt=1, from_step=0),)))
    clock.now += 2.1
    page.write(may_wait=True)
    assert len(written.entries) == 1
