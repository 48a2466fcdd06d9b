"""An attempt journals its events through the driver in its process, or by posts to an outbox."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from logging import getLogger
from pathlib import Path
from typing import cast

import pytest

from prefect_tune import storage_retries
from prefect_tune.attempt import search_channel
from prefect_tune.attempt.attempt import Attempt, make_attempt_started
from prefect_tune.attempt.processes.process_pool import TrialProcessPool
from prefect_tune.attempt.search_channel import EventsSubmitted, SearchChannel, SubmittingJournal
from prefect_tune.attempt.trial_spec import AttemptRequest, TrialSpec
from prefect_tune.blocks import LocalTarget, StorageTarget, SyncConfig
from prefect_tune.core.errors import CommitUnknown, StoreUnavailable
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import Phase, Trial
from prefect_tune.core.journal import outbox
from prefect_tune.core.journal_events import (
    AttemptEnded,
    AttemptStarted,
    Cause,
    CheckpointCommitted,
    CheckpointRef,
    Event,
    StepReported,
    TrialFinished,
)
from prefect_tune.core.storage.layout import TrialKey
from prefect_tune.core.storage.object_store import Buffer
from prefect_tune.core.values import StepReport, WriteStamp
from prefect_tune.executors import trial_executor
from prefect_tune.executors.trial_executor import LocalExecutor, Message, OnAttemptEnd
from prefect_tune.journal_access import write_entry_directly
from prefect_tune.prefect_api import task_runs
from prefect_tune.stores.posix_store import PosixStore
from tests.attempt.direct_tasks import DirectTasks
from tests.fakes.searches.far_attempts import FarAttempt
from tests.fakes.searches.far_searches import Death, FarSearch
from tests.fakes.searches.pending_entries import make_limits
from tests.fakes.trial_processes import wait_until

TRIAL = TrialKey(experiment="e", generation=1, trial="00000")
REPORTED = StepReported(trial=TRIAL.trial, report=StepReport(step=1, metrics={"loss": 1.0}))
COMMITTED = CheckpointCommitted(trial=TRIAL.trial, checkpoint=CheckpointRef(step=1, sequence=1, metrics={"loss": 1.0}))
MINUTE = timedelta(minutes=1)


class Search(FarSearch):
    """A search of one trial, whose attempt is the function `attempt` in a thread."""

    def __init__(self, folder: Path, attempt: Callable[[SubmittingJournal], None]) -> None:
        self.executor = LocalExecutor(cast("TrialProcessPool", None), launch=self._launch)
        super().__init__(LocalTarget(path=str(folder)), executor=self.executor, limits=make_limits(1))
        self.driver, self.iteration_count = self._driver, 0
        self._journal_writer._writer = self._write
        self._attempt, self._thread = attempt, threading.Thread()
        self.error: BaseException | None = None
        """The exception of the attempt."""
        self.entries: list[Sequence[Event]] = []
        self.failing_event: type[Event] | None = None
        self.should_interrupt: Callable[[], bool] = lambda: False

    def run(self) -> None:
        try:
            self.driver.run(self)
        finally:
            self._thread.join(timeout=10)
            assert not self._thread.is_alive(), "the attempt hangs"

    def is_interrupted(self) -> bool:
        self.iteration_count += 1
        if self.should_interrupt():
            raise Death
        return False

    def has_started(self) -> bool:
        return bool(self.entries) and AttemptStarted in map(type, self.entries[-1])

    def _launch(self, spec: TrialSpec, request: AttemptRequest, channel: SearchChannel, on_end: OnAttemptEnd) -> None:
        journal = channel.make_journal(spec, request)
        assert isinstance(journal, SubmittingJournal)

        def run() -> None:
            try:
                journal.write([make_attempt_started(request.trial)])
                self._attempt(journal)
            except BaseException as error:  # noqa: BLE001 - checked by the tests
                self.error = error
            on_end(self.error)

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def _write(
        self, target: StorageTarget, state: Experiment, events: Sequence[Event], stamp: WriteStamp | None
    ) -> Experiment:
        if any(type(event) is self.failing_event for event in events):
            raise StoreUnavailable("503")
        self.entries.append(events)
        return write_entry_directly(target, state, events, stamp)


def test_a_commit_returns_once_its_entry_is_written_and_reports_wait_for_it(tmp_path: Path) -> None:
    observed: list[tuple[bool, Sequence[StepReport]]] = []

    def attempt(journal: SubmittingJournal) -> None:
        journal.add_report(REPORTED)
        wait_until(lambda: search.driver._experiment.trial(TRIAL.trial).step == 1)
        iteration = search.iteration_count
        wait_until(lambda: search.iteration_count > iteration + 1)
        observed.append((REPORTED in search.entries[-1], journal.list_unjournaled_reports(1)))
        journal.write([COMMITTED])
        observed.append((tuple(search.entries[-1][:2]) == (REPORTED, COMMITTED), journal.list_unjournaled_reports(1)))
        assert (journal.trial.step, journal.trial.next_sequence) == (1, 2)
        journal.write([TrialFinished(trial=TRIAL.trial, reason="enough")])

    search = Search(tmp_path, attempt)
    search.run()
    assert search.error is None
    assert observed == [(False, [REPORTED.report]), (True, [])]


def test_an_attempt_whose_entry_cannot_be_written_gets_the_error(tmp_path: Path) -> None:
    search = Search(tmp_path, lambda journal: journal.write([COMMITTED]))
    search.failing_event = CheckpointCommitted
    with pytest.raises(StoreUnavailable):
        search.run()
    assert isinstance(search.error, StoreUnavailable)


def test_what_an_attempt_waits_for_when_its_search_fails_is_written(tmp_path: Path) -> None:
    """The search fails between the receipt of the events and their entry."""
    search = Search(tmp_path, lambda journal: journal.write([REPORTED, COMMITTED]))
    search.should_interrupt = lambda: search.driver._pending_entry.has_unfinished_work and search.has_started()
    with pytest.raises(Death):
        search.run()
    assert (search.error, tuple(search.entries[-1])) == (None, (REPORTED, COMMITTED))


def test_what_attempts_have_submitted_beside_a_message_that_fails_the_search_is_written(tmp_path: Path) -> None:
    def ask_and_commit(journal: SubmittingJournal) -> None:
        search.executor._channels[TRIAL.trial].expect_decision(REPORTED.report)
        journal.write([REPORTED, COMMITTED])

    def poll(timeout: timedelta) -> Sequence[object]:
        if search.has_started() and next(is_first_poll, False):
            wait_until(lambda: search.executor._inbox.qsize() == 2)
        return receive(timeout)

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    search = Search(tmp_path, ask_and_commit)
    receive, is_first_poll = search.executor.poll_messages, iter([True])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search.executor, "poll_messages", poll)
        patch.setattr(search.driver._decision_handler, "answer_report", fail)
        with pytest.raises(ZeroDivisionError):
            search.run()
    assert (search.error, tuple(search.entries[-1])) == (None, (REPORTED, COMMITTED))


def test_events_that_fail_the_scheduler_are_not_acknowledged(tmp_path: Path) -> None:
    def fail(_trial: str, _trained_seconds: float) -> None:
        if search.driver._experiment.trial(TRIAL.trial).step:
            raise ZeroDivisionError

    search = Search(tmp_path, lambda journal: journal.write([REPORTED, COMMITTED]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search.driver._policy, "record_training_time", fail)
        with pytest.raises(ZeroDivisionError):
            search.run()
    assert isinstance(search.error, ZeroDivisionError)


def test_what_an_attempt_saves_when_its_failed_search_stops_it_is_written(tmp_path: Path) -> None:
    stopped = AttemptEnded(trial=TRIAL.trial, cause=Cause.PREEMPTED, reason="saved, as requested")

    def attempt(journal: SubmittingJournal) -> None:
        assert search.executor._channels[TRIAL.trial].run_stop.wait(20)
        journal.write([stopped])

    search = Search(tmp_path, attempt)
    search.should_interrupt = search.has_started
    with pytest.raises(Death):
        search.run()
    assert (search.error, search.entries[-1][0]) == (None, stopped)


@pytest.mark.timeout(60)
def test_trials_that_all_wait_for_a_slot_end_with_the_run_and_none_has_lost_an_attempt(target: LocalTarget) -> None:
    waiting = set[str]()

    def launch(spec: TrialSpec, request: AttemptRequest, channel: SearchChannel, on_end: OnAttemptEnd) -> None:
        @contextmanager
        def slot(**_options: object) -> Iterator[None]:
            waiting.add(request.trial.id)
            if not channel.run_stop.wait(0.01):
                raise TimeoutError
            yield

        def run() -> None:
            with task_runs._holding_slots(["gpu"], channel.run_stop, slot):
                Attempt(spec, request, channel, DirectTasks(spec), getLogger(__name__)).run()
            on_end(None)

        threading.Thread(target=run, daemon=True).start()

    executor = LocalExecutor(cast("TrialProcessPool", None), launch=launch)
    search = FarSearch(target, samples=3, executor=executor, limits=make_limits(3))
    vars(search)["is_interrupted"] = lambda: len(waiting) == 3
    assert {(item.phase, item.attempt) for item in search._driver.run(search).trials.values()} == {(Phase.PENDING, 0)}


def test_reports_whose_entry_could_not_be_written_are_not_taken_for_journaled() -> None:
    """The manifest of the next save has them, so that the next owner can adopt them without an entry."""
    submitted: list[EventsSubmitted] = []
    journal = SubmittingJournal(Trial(id=TRIAL.trial, config={}), submitted.append)
    second = REPORTED.model_copy(update={"report": StepReport(step=2, metrics={"loss": 0.5})})
    journal.add_report(REPORTED)
    submitted[0].entry_written.set_exception(StoreUnavailable("503"))
    journal.add_report(second)
    assert journal.list_unjournaled_reports(2) == [REPORTED.report, second.report]


def test_a_report_looks_at_few_of_those_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[object] = []
    monkeypatch.setattr(search_channel, "_is_durable", checked.append)
    journal = SubmittingJournal(Trial(id=TRIAL.trial, config={}), lambda _: None)
    for step in range(1, 101):
        journal.add_report(StepReported(trial=TRIAL.trial, report=StepReport(step=step, metrics={})))
    assert len(checked) < 100


def test_events_after_the_end_of_a_search_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def attempt(journal: SubmittingJournal) -> None:
        wait_until(lambda: search.executor._is_closed)
        journal.write([REPORTED, COMMITTED])

    monkeypatch.setattr(trial_executor, "_FINAL_WRITE_TIMEOUT", timedelta(0))
    search = Search(tmp_path, attempt)
    search.driver._spec = replace(search.driver._spec, grace_period=timedelta(0))
    search.should_interrupt = search.has_started
    with pytest.raises(Death):
        search.run()
    assert isinstance(search.error, CommitUnknown)


def test_events_that_a_failed_search_has_received_and_lost_are_refused() -> None:
    executor = LocalExecutor(cast("TrialProcessPool", None), launch=lambda *_: None)
    events = EventsSubmitted(TRIAL.trial, (COMMITTED,), is_awaited=True)
    executor._on_message(events)
    assert executor.poll_messages(timedelta(0)) == [events]
    executor.reject_events()
    assert isinstance(events.entry_written.exception(0), CommitUnknown)


def test_events_that_are_submitted_while_the_search_ends_are_refused_too() -> None:
    executor = LocalExecutor(cast("TrialProcessPool", None), launch=lambda *_: None)
    reject = threading.Thread(target=executor.reject_events)

    class Inbox(queue.SimpleQueue[Message]):
        def put(self, item: Message, block: bool = True, timeout: float | None = None) -> None:
            reject.start()
            reject.join(0.2)
            super().put(item, block, timeout)

    executor._inbox = Inbox()
    submitted = EventsSubmitted(TRIAL.trial, (COMMITTED,), is_awaited=True)
    executor._on_message(submitted)
    reject.join()
    assert isinstance(submitted.entry_written.exception(timeout=9), CommitUnknown)


@pytest.fixture
def target(tmp_path: Path) -> LocalTarget:
    return LocalTarget(path=str(tmp_path))


@pytest.fixture
def attempt(target: LocalTarget) -> FarAttempt:
    """An attempt that has posted its start."""
    attempt = FarAttempt(target)
    attempt.start()
    return attempt


def read_posts(target: LocalTarget) -> Sequence[outbox.Post]:
    with target.open(timeout=MINUTE) as store:
        return outbox.read_posts(store, TRIAL, 1, 0)


def test_an_attempt_whose_posts_no_search_receives_posts_seldom_until_one_does(
    target: LocalTarget, attempt: FarAttempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search_channel, "_MAX_UNREAD_POSTS", 3)
    sync, periods = SyncConfig(live_period_seconds=5, sync_period_seconds=6), list[timedelta | None]()
    for step in range(1, 6):
        attempt.report(step)
        periods.append(attempt.journal.get_flush_interval(sync))
    assert periods == [sync.live_period] * 4 + [sync.sync_period]
    with target.open(timeout=MINUTE) as store:
        outbox.delete_posts(store, [(TRIAL, 1, number) for number in range(2, 7)])
    attempt.report(6)
    assert attempt.journal.get_flush_interval(sync) == sync.live_period


@pytest.mark.parametrize("is_written", [True, False])
def test_a_post_whose_reply_is_lost_is_written_once_and_before_the_next(
    target: LocalTarget, attempt: FarAttempt, monkeypatch: pytest.MonkeyPatch, *, is_written: bool
) -> None:
    def create_without_reply(store: PosixStore, path: str, data: Buffer) -> None:
        if is_written:
            create(store, path, data)
        raise CommitUnknown("no reply")

    def fail_to_read(*_: object, **__: object) -> bytes:
        raise StoreUnavailable("503")

    create = PosixStore.create
    monkeypatch.setattr(storage_retries, "_pause", lambda _: None)
    with monkeypatch.context() as outage:
        outage.setattr(PosixStore, "create", create_without_reply)
        outage.setattr(PosixStore, "read", fail_to_read)
        with pytest.raises(CommitUnknown):
            attempt.save(1)
    assert [report.step for report in attempt.journal.list_unjournaled_reports(1)] == [1]
    attempt.report(2)
    assert attempt.journal.list_unjournaled_reports(2) == []
    assert [[type(event) for event in post.events] for post in read_posts(target)] == [
        [AttemptStarted],
        [StepReported, CheckpointCommitted],
        [StepReported],
    ]
