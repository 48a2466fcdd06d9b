"""When the next entry of an experiment's journal is written, and which actions and attempts wait for it."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from prefect_tune import journal_access, ownership
from prefect_tune.attempt.search_channel import EventsSubmitted
from prefect_tune.blocks import LocalTarget
from prefect_tune.clock import new_write_stamp
from prefect_tune.core.checkpoints.commit import ReusableBytes, commit_checkpoint
from prefect_tune.core.checkpoints.manifest import CheckpointMetadata
from prefect_tune.core.errors import CommitUnknown, IllegalTransition, StoreUnavailable
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.journal_events import (
    AttemptEnded,
    AttemptEvent,
    AttemptStarted,
    Cause,
    CheckpointCommitted,
    CheckpointRef,
    FinishKind,
    Owner,
    OwnerChanged,
    StepReported,
    StopRequested,
    TrialAdded,
    TrialFinished,
)
from prefect_tune.core.operations.scrub import quarantine_in_journal
from prefect_tune.core.reasons import make_reason
from prefect_tune.core.restore import make_adoption_events
from prefect_tune.core.storage.layout import CheckpointKey, JournalKey, TrialKey
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.core.values import StepReport
from prefect_tune.executors.trial_executor import Message
from prefect_tune.journal_access import read_experiment
from prefect_tune.ownership import ensure_ownership, make_attempt_start_events, write_if_unchanged
from prefect_tune.storage_retries import with_store
from prefect_tune.stores.posix_store import PosixStore
from prefect_tune.tuner.pending_entry import BackgroundWorker, PendingEntry
from tests.fakes.searches.pending_entries import WrittenEntries, make_pending_entry, make_random_policy
from tests.fakes.searches.planned_search import PlannedSearch
from tests.fakes.searches.posting_executor import PostingExecutor, RemoteAttempt
from tests.fakes.stores.memory_files import MemoryFiles
from tests.fakes.trial_processes import wait_until


@pytest.fixture
def journal() -> WrittenEntries:
    return WrittenEntries()


@pytest.fixture
def entry(journal: WrittenEntries) -> PendingEntry:
    """The pending entry of an experiment with two trials and a long sync period."""
    owner_change = OwnerChanged(experiment="e", generation=1, term=1, owner=Owner(name="me", host="here", pid=1))
    entry = make_pending_entry(journal, make_random_policy(), period=timedelta(minutes=5))
    for event in (owner_change, TrialAdded(trial="00000", config={}), TrialAdded(trial="00001", config={})):
        entry.add_event(event)
    entry.write(may_defer=False)
    journal.entries.clear()
    return entry


def test_what_nobody_waits_for_has_time_and_an_act_has_not(entry: PendingEntry, journal: WrittenEntries) -> None:
    entry.add_event(TrialFinished(trial="00000", reason="done"))
    entry.write(may_defer=True)
    assert journal.entries == []
    actions: list[int] = []
    entry.run_after_forced_write(lambda: actions.append(len(journal.entries)))
    entry.write(may_defer=True)
    assert actions == [1], "the action runs once the entry is written"


@pytest.mark.parametrize(
    "event",
    [
        StopRequested(reason="enough", trial="00000", request="w"),
        StopRequested(reason="enough", request="w"),
        StopRequested(reason="enough", request="w", refused=make_reason("request-repeated")),
    ],
)
def test_whoever_asks_for_a_stop_finds_the_answer_at_once(event: StopRequested, entry: PendingEntry) -> None:
    entry.add_event(event)
    assert entry.write(may_defer=True).stop_requests == ("w",)


def test_whoever_has_asked_for_a_trials_stop_finds_its_end_at_once(
    entry: PendingEntry, journal: WrittenEntries
) -> None:
    entry.add_event(StopRequested(reason="enough", trial="00000", request="w"))
    entry.write(may_defer=True)
    entry.add_event(TrialFinished(trial="00001", reason="done"))
    entry.write(may_defer=True)
    assert len(journal.entries) == 1
    entry.add_event(TrialFinished(trial="00000", reason="enough", kind=FinishKind.STOPPED))
    assert entry.write(may_defer=True).trial("00000").finish_kind is FinishKind.STOPPED
    assert len(journal.entries) == 2


class Clock:
    """A clock that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


def test_a_changed_status_is_written_within_two_seconds_and_reports_within_the_sync_period(
    entry: PendingEntry, journal: WrittenEntries, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    first, second = (AttemptStarted(trial=trial, attempt=1, from_step=0) for trial in ("00000", "00001"))
    entry.add_event(first)
    clock.now += 1.9
    entry.add_event(second)
    entry.write(may_defer=True)
    assert journal.entries == []
    clock.now += 0.2
    entry.write(may_defer=True)
    assert journal.entries == [(first, second)], "both share an entry"
    report = StepReported(trial="00000", report=StepReport(step=1, metrics={}))
    entry.add_event(report)
    clock.now += 290
    entry.write(may_defer=True)
    assert len(journal.entries) == 1
    clock.now += 11
    entry.write(may_defer=True)
    assert journal.entries[1:] == [(report,)]


# Attempts submit events, and wait for the entry that holds them.


def submit_events(entry: PendingEntry, *events: AttemptEvent) -> Future[Experiment]:
    """Submit the events of an attempt, which waits for them unless they are reports."""
    is_awaited = any(not isinstance(event, StepReported) for event in events)
    group = EventsSubmitted(events[0].trial, events, is_awaited=is_awaited)
    entry.add_submitted(group)
    return group.entry_written


def start(trial: str) -> AttemptStarted:
    return AttemptStarted(trial=trial, attempt=1, from_step=0)


def report(trial: str, step: int = 1) -> StepReported:
    return StepReported(trial=trial, report=StepReport(step=step, metrics={}))


def test_one_entry_serves_all_attempts_that_wait(entry: PendingEntry, journal: WrittenEntries) -> None:
    first, second = (submit_events(entry, start(trial)) for trial in ("00000", "00001"))
    assert not first.done()
    state = entry.write(may_defer=True)
    assert journal.entries == [(start("00000"), start("00001"))]
    assert first.result() is second.result() is state


def test_a_report_alone_waits_for_the_sync_period_and_else_for_an_entry_with_another_cause(
    entry: PendingEntry, journal: WrittenEntries, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    submit_events(entry, start("00000"))
    submit_events(entry, start("00001"))
    entry.write(may_defer=True)
    first = submit_events(entry, report("00000"))
    entry.write(may_defer=True)
    assert not first.done()
    save = CheckpointCommitted(trial="00001", checkpoint=CheckpointRef(step=1, sequence=1))
    submit_events(entry, report("00001"), save)
    entry.write(may_defer=True)
    assert journal.entries[1:] == [(report("00000"), report("00001"), save)]
    second = submit_events(entry, report("00000", 2))
    clock.now += 301
    entry.write(may_defer=True)
    assert (first.done(), second.done()) == (True, True)


def test_impossible_events_are_refused_together_and_leave_the_state(
    entry: PendingEntry, journal: WrittenEntries
) -> None:
    before, impossible = (entry.state, submit_events(entry, start("00000"), report("00000"), report("00000")))
    possible = submit_events(entry, start("00001"))
    assert isinstance(impossible.exception(0), IllegalTransition)
    assert entry.state.trial("00000") == before.trial("00000")
    entry.write(may_defer=True)
    assert journal.entries == [(start("00001"),)]
    assert possible.done()


@pytest.mark.parametrize(
    ("error", "expected"), [(StoreUnavailable("away"), StoreUnavailable), (KeyboardInterrupt(), CommitUnknown)]
)
def test_a_write_that_fails_fails_for_all_attempts_that_wait_and_raises(
    error: BaseException, expected: type[Exception], entry: PendingEntry, journal: WrittenEntries
) -> None:
    groups = [submit_events(entry, start(trial)) for trial in ("00000", "00001")]
    journal.error = error
    with pytest.raises(type(error)):
        entry.write(may_defer=True)
    assert [type(group.exception(0)) for group in groups] == [expected] * 2


def test_a_write_that_may_have_arrived_is_repeated_as_it_was_before_what_came_since(
    entry: PendingEntry, journal: WrittenEntries
) -> None:
    submit_events(entry, start("00000"))
    journal.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        entry.write(may_defer=True)
    submit_events(entry, start("00001"))
    journal.error = None
    entry.write(may_defer=True)
    assert journal.entries == [(start("00000"),), (start("00001"),)]
    assert journal.stamps[-3] == journal.stamps[-2] != journal.stamps[-1]


def test_dropped_actions_are_not_called_and_attempts_are_still_served(
    entry: PendingEntry, journal: WrittenEntries
) -> None:
    actions: list[str] = []
    group = submit_events(entry, start("00000"))
    entry.run_after_forced_write(lambda: actions.append("then"))
    entry.run_after_write(lambda: actions.append("after entry"))
    entry.drop_actions()
    entry.write(may_defer=True)
    assert (actions, group.done(), len(journal.entries)) == ([], True, 1)


def test_an_action_after_an_entry_asks_for_none_and_precedes_those_that_do(
    entry: PendingEntry, journal: WrittenEntries
) -> None:
    actions: list[str] = []
    entry.add_event(TrialFinished(trial="00000", reason="done"))
    entry.run_after_write(lambda: actions.append("delete"))
    entry.write(may_defer=True)
    assert (actions, journal.entries) == ([], [])
    entry.run_after_forced_write(lambda: actions.append("start"))
    entry.write(may_defer=True)
    assert actions == ["delete", "start"]


def test_all_posts_that_wait_are_deleted_by_one_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    openings, may_open, open_target = list[timedelta](), threading.Event(), LocalTarget.open
    requests, delete = list[Sequence[str]](), PosixStore.delete

    @contextmanager
    def open_counted(target: LocalTarget, *, timeout: timedelta) -> Iterator[ObjectStore]:
        openings.append(timeout)
        assert may_open.wait(60)
        with open_target(target, timeout=timeout) as store:
            yield store

    def delete_counted(store: PosixStore, paths: Sequence[str]) -> None:
        requests.append(paths)
        delete(store, paths)

    monkeypatch.setattr(LocalTarget, "open", open_counted)
    monkeypatch.setattr(PosixStore, "delete", delete_counted)
    key = TrialKey(experiment="e", generation=1, trial="00000")
    posts = [tmp_path / key.post_path(1, number) for number in range(2, 10)]
    posts[0].parent.mkdir(parents=True)
    for path in posts:
        path.touch()
    janitor = BackgroundWorker(LocalTarget(path=str(tmp_path)))
    for number in range(2, 10):
        janitor.delete_post(key, 1, number)
    may_open.set()
    wait_until(lambda: not any(path.exists() for path in posts), seconds=60, what=lambda: "the deletion of all posts")
    janitor.close()
    assert (len(openings), len(requests)) == (1, 1)


# A search beside other writers of its journal.


KEY = JournalKey(experiment="e", generation=1)
TRIAL = KEY.trial_key("00000")
Script = Callable[[RemoteAttempt], Iterator[None]]


class ScriptedExecutor(PostingExecutor):
    """Carries out the next part of a script with each poll, once the journal has all posts before it."""

    def __init__(self, script: Script) -> None:
        super().__init__(self._begin)
        self._script = script
        self._parts: Iterator[None] = iter(())

    def _begin(self, attempt: RemoteAttempt) -> None:
        self._parts = self._script(attempt)

    def poll_messages(self, timeout: timedelta) -> list[Message]:
        next(self._parts, None)
        return super().poll_messages(timeout)


def save_checkpoint(attempt: RemoteAttempt, step: int, *retired: int) -> CheckpointKey:
    """Publish a checkpoint that shares no bytes, and post it."""
    report = StepReport(step=step, metrics={"loss": 1.0})
    trial = attempt.outbox.trial
    key = CheckpointKey(trial=attempt.spec.trial, step=step, sequence=trial.next_sequence)
    metadata = CheckpointMetadata(
        attempt=trial.attempt, term=1, write_id=f"{key.name}", created_at="now", metrics=report.metrics
    )
    files = MemoryFiles({"head": f"step {step}".encode()})
    with_store(attempt.spec.target, lambda store: commit_checkpoint(store, key, files, metadata, reuse=ReusableBytes()))
    ref = CheckpointRef(sequence=key.sequence, **report.model_dump())
    attempt.post(
        StepReported(trial=attempt.trial, report=report),
        CheckpointCommitted(trial=attempt.trial, checkpoint=ref, retired_sequences=retired),
    )
    return key


def quarantine_as_non_owner(target: LocalTarget, key: CheckpointKey) -> None:
    with_store(target, lambda store: quarantine_in_journal(store, KEY, {key: "damaged"}, new_write_stamp()))


def require_live_checkpoints(target: LocalTarget, state: Experiment) -> None:
    for trial in state.trials.values():
        for ref in trial.checkpoints:
            path = state.trial_key(trial.id).checkpoint_key(ref).manifest_path
            assert with_store(target, lambda store, path=path: store.size(path)) is not None, (
                f"{path} is live in the journal, and deleted"
            )


def test_what_a_post_does_not_retire_since_a_guest_was_faster_is_not_deleted(tmp_path: Path) -> None:
    target = LocalTarget(path=str(tmp_path))

    def script(attempt: RemoteAttempt) -> Iterator[None]:
        attempt.start()
        save_checkpoint(attempt, 1)
        second = save_checkpoint(attempt, 2)
        yield
        while len(read_experiment(target, KEY).trial("00000").checkpoints) < 2:
            yield
        quarantine_as_non_owner(target, second)
        save_checkpoint(attempt, 3, 1)  # Retention(last=2): the attempt does not know of the quarantine
        yield
        attempt.post(AttemptEnded(trial=attempt.trial, cause=Cause.PREEMPTED, reason="x"))
        attempt.exit()

    executor = ScriptedExecutor(script)
    state = PlannedSearch(target, executor=executor, slots=1).run(
        lambda: len(executor.attempts) > 0 and not len(executor), num_samples=1, sync={"sync_period_seconds": 0.01}
    )
    trial = state.trial("00000")
    assert [ref.step for ref in trial.checkpoints] == [1], "the save of step 3 was overtaken, and retired nothing"
    time.sleep(2)  # the janitor works in the background
    require_live_checkpoints(target, state)


# Several processes of one flow run begin an experiment at once; and a task is retried that died while it began it.


def test_two_processes_of_a_flow_run_begin_an_experiment_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = LocalTarget(path=str(tmp_path))
    monkeypatch.setattr(ownership, "_write_locks", defaultdict(threading.RLock))  # two processes have no common lock
    calls: list[int] = []

    def start_attempt_first(*arguments: Any, **options: Any) -> Any:
        if not calls:
            calls.append(1)
            state = ensure_ownership(target, "e")
            write_if_unchanged(target, state, "b", make_attempt_start_events(None, "b", 1))
        return make_adoption_events(*arguments, **options)

    monkeypatch.setattr(journal_access, "make_adoption_events", start_attempt_first)
    assert "b" in ensure_ownership(target, "e").trials


def test_a_retried_task_adopts_what_its_first_try_had_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = LocalTarget(path=str(tmp_path))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(journal_access, "append_entry", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ensure_ownership(target, "e")
    state = ensure_ownership(target, "e")
    assert state.last_adopting_term == state.term
