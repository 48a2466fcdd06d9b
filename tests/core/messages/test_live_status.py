"""The live status: only the newest object is kept, only the present owner's counts, and the journal prevails."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from prefect_tune.core.errors import StoreUnavailable
from prefect_tune.core.experiment.experiment import Experiment, after_event, nothing_yet
from prefect_tune.core.journal_events import (
    AttemptEnded,
    Cause,
    Event,
    Opened,
    Owner,
    Started,
    TrialAdded,
)
from prefect_tune.core.messages.target_messages import (
    LastKnown,
    LiveStatus,
    RunningTrial,
    delete_live_status,
    last_known_reports,
    newest_live_status,
    view_of,
    write_live_status,
)
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.core.storage.object_store import Buffer
from prefect_tune.core.values import StepReport
from tests.fakes.checkpoints import first_generation
from tests.fakes.stores.memory_store import MemoryStore

KEY = JournalKey(experiment="e", generation=1)
WRITTEN = "2026-11-23T01:00:00+00:00"
LATER = "2026-11-23T01:02:20+00:00"


OWNER = Owner(name="o", host="h", pid=1)


def running(*events: Event, term: int = 1) -> Experiment:
    state = nothing_yet(first_generation("e"))
    opened = (Opened(experiment="e", generation=1, term=each, owner=OWNER) for each in range(1, term + 1))
    started = Started(trial="a", attempt=1, from_step=0)
    for number, event in enumerate((*opened, TrialAdded(trial="a", config={}), started, *events), 1):
        state = after_event(state, event, number)
    return state


def status(number: int, *, term: int = 1, attempt: int = 1, step: int = 59, owner: Owner = OWNER) -> LiveStatus:
    report = StepReport(step=step, metrics={"loss": 0.5})
    trial = RunningTrial(trial="a", attempt=attempt, began_at=WRITTEN, host="h", report=report, reported_at=LATER)
    return LiveStatus(term=term, owner=owner, number=number, at=LATER, period_seconds=5, trials=(trial,))


@pytest.mark.parametrize("seconds", [0, 24 * 3600 + 1, float("inf")])
def test_a_period_that_no_owner_has_is_refused(seconds: float) -> None:
    with pytest.raises(ValidationError):
        LiveStatus(term=1, owner=OWNER, number=1, at=LATER, period_seconds=seconds, trials=())


def test_only_the_newest_object_stays_at_one_put_and_one_delete_each() -> None:
    store = MemoryStore()
    write_live_status(store, KEY, status(1))
    store.operations.clear()
    for number in range(2, 12):
        write_live_status(store, KEY, status(number))
    assert store.operations == {"put": 10, "delete": 10}
    assert list(store.objects) == ["e/1/live/0000000001-0000000011.json"]
    assert newest_live_status(store, KEY) == status(11)


def test_a_new_owner_deletes_what_a_killed_one_has_left_and_counts_from_its_first_object_on() -> None:
    store = MemoryStore()
    for term, number in ((0, 2), (1, 6), (1, 7)):
        store.put(KEY.live_status_path(term, number), b"left by a kill")
    for name in (".keep", "notes.txt"):
        store.put(f"{KEY.live}/{name}", b"a foreign file")
    write_live_status(store, KEY, status(1, term=2))
    assert newest_live_status(store, KEY) == status(1, term=2)
    assert len(store.objects) == 3
    write_live_status(store, KEY, status(8, term=1))  # a paused machine resumes
    assert newest_live_status(store, KEY) == status(1, term=2)


def test_the_end_of_an_owner_deletes_its_own_and_earlier_ones_and_no_later_ones() -> None:
    store = MemoryStore()
    for term in (1, 2, 3):
        store.put(KEY.live_status_path(term, 4), b"")
    delete_live_status(store, KEY, 2)
    assert list(store.objects) == [KEY.live_status_path(3, 4)]


def test_a_view_has_the_newest_step_its_host_and_its_time() -> None:
    store = MemoryStore()
    write_live_status(store, KEY, status(1))
    view = view_of(store, running(), WRITTEN)
    assert (view.experiment.trial("a").step, view.experiment.trial("a").metrics) == (59, {"loss": 0.5})
    assert (view.as_of, view.running("a")) == (LATER, status(1).trials[0])


@pytest.mark.parametrize(
    ("state", "written"),
    [
        (running(term=2), status(1)),  # of an earlier owner
        (running(), status(1, owner=Owner(name="o", host="h", pid=2))),  # of a deleted experiment of this name
        (running(), status(1, attempt=2)),  # of an attempt that the journal does not name yet
        (running(AttemptEnded(trial="a", cause=Cause.MACHINE, reason="lost")), status(1)),
    ],
)
def test_the_journal_decides_which_attempts_run(state: Experiment, written: LiveStatus) -> None:
    store = MemoryStore()
    write_live_status(store, KEY, written)
    view = view_of(store, state, WRITTEN)
    assert view.running("a") is None
    assert view.experiment == state


def test_an_attempt_that_has_ended_is_not_running_while_another_trial_is() -> None:
    store = MemoryStore()
    write_live_status(store, KEY, status(1))
    another = (TrialAdded(trial="b", config={}), Started(trial="b", attempt=1, from_step=0))
    state = running(AttemptEnded(trial="a", cause=Cause.MACHINE, reason="lost"), *another)
    view = view_of(store, state, WRITTEN)
    assert view.live is not None
    assert (view.running("a"), view.experiment.trial("a").step) == (None, 0)


def test_a_step_that_the_journal_knows_is_not_replaced_by_an_older_one() -> None:
    store = MemoryStore()
    write_live_status(store, KEY, status(1, step=3))
    state = running()
    state = state.model_copy(
        update={"trials": state.trials.with_trial(state.trial("a").model_copy(update={"step": 4}))}
    )
    assert view_of(store, state, WRITTEN).experiment.trial("a").step == 4


def test_the_last_steps_that_a_killed_owner_has_left_are_known_to_the_next_one() -> None:
    store = MemoryStore()
    assert last_known_reports(store, running(term=2)) == LastKnown()
    write_live_status(store, KEY, status(1))
    last = last_known_reports(store, running(term=2))
    assert ({name: each.step for name, each in last.reports.items()}, last.at) == ({"a": 59}, status(1).at)
    ended = running(AttemptEnded(trial="a", cause=Cause.MACHINE, reason="lost"))
    assert last_known_reports(store, ended) == LastKnown()


@pytest.mark.parametrize("damage", [b"torn", b'{"format":"prefect-tune/live-status","version":9}'])
def test_one_that_cannot_be_read_leaves_the_journals_view(damage: bytes) -> None:
    store = MemoryStore()
    store.put(KEY.live_status_path(1, 1), damage)
    view = view_of(store, running(), WRITTEN)
    assert (view.as_of, view.live) == (WRITTEN, None)


def test_an_experiment_without_a_running_trial_costs_no_request() -> None:
    store = MemoryStore()
    ended = running(AttemptEnded(trial="a", cause=Cause.MACHINE, reason="lost"))
    assert view_of(store, ended, WRITTEN).experiment == ended
    assert not store.operations


def test_one_that_is_replaced_while_it_is_read_is_read_again() -> None:
    class Replaced(MemoryStore):
        def read(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
            if path == KEY.live_status_path(1, 1):
                write_live_status(self, KEY, status(2))
            return super().read(path, offset=offset, length=length)

    store = Replaced()
    write_live_status(store, KEY, status(1))
    assert newest_live_status(store, KEY) == status(2)


def test_a_write_that_the_target_refuses_leaves_the_one_before() -> None:
    class Full(MemoryStore):
        def put(self, path: str, data: Buffer) -> None:
            if self.objects:
                raise StoreUnavailable(f"{path}: full")
            super().put(path, data)

    store = Full()
    write_live_status(store, KEY, status(1))
    with pytest.raises(StoreUnavailable):
        write_live_status(store, KEY, status(2))
    assert newest_live_status(store, KEY) == status(1)
