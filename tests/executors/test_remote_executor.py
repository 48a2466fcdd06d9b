"""Remote attempts: the search reads their questions from their journals, and writes its answers to the target."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import pytest

from prefect_tune.attempt.search_link import EntryWritten, LatestReport, StepReported
from prefect_tune.attempt.trial_spec import AttemptRequest
from prefect_tune.blocks import LocalTarget
from prefect_tune.core.errors import StoreRefused, StoreUnavailable
from prefect_tune.core.journal_events import Finished
from prefect_tune.core.messages.live_status import LiveStatus, RunningTrial, write_live_status
from prefect_tune.core.messages.process_messages import Proceed, StopAndSave
from prefect_tune.core.operations.delete_experiment import remove
from prefect_tune.core.schedulers.asha import ASHA
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.core.values import StepReport
from prefect_tune.executors import remote_executor
from prefect_tune.executors.remote_executor import RemoteExecutor
from prefect_tune.executors.trial_executor import AttemptExited, Message, RemoteAttemptStarted
from prefect_tune.journal_access import current_owner, new_write_id
from prefect_tune.stores.posix_store import PosixStore
from tests.fakes.checkpoints import first_generation
from tests.fakes.outcomes import make_leave
from tests.fakes.searches.far_attempts import FarAttempt, FarMachines, plan_at
from tests.fakes.searches.far_searches import FarSearch, nothing

NOW = timedelta(0)


@pytest.fixture
def executor(target: LocalTarget) -> RemoteExecutor:
    """An executor with one running attempt, whose milestone is step 2."""
    executor = RemoteExecutor(target, FarMachines(), look_every=NOW)
    executor.start(plan_at(target), AttemptRequest(milestone=2), 1, absorbed=0)
    return executor


def step_reports(messages: list[Message]) -> list[tuple[int, bool]]:
    return [(each.report.step, each.asks) for each in messages if isinstance(each, StepReported)]


def test_a_target_that_goes_away_in_the_middle_takes_no_question_with_it(
    target: LocalTarget, executor: RemoteExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = FarAttempt(target)
    attempt.starts()
    attempt.reports(1, 2, asks=True)
    read, first_absent = PosixStore.read, f"{attempt.written + 1:010d}.json"

    def fails_once(store: PosixStore, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        if path.endswith(first_absent):
            monkeypatch.undo()
            raise StoreUnavailable("503")
        return read(store, path, offset=offset, length=length)

    monkeypatch.setattr(PosixStore, "read", fails_once)
    messages = [*executor.poll(NOW), *executor.poll(NOW)]
    assert step_reports(messages) == [(1, False), (2, True)]


def test_a_request_to_stop_that_could_not_be_written_is_written_by_the_next_call(
    target: LocalTarget, executor: RemoteExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = FarAttempt(target)
    attempt.starts()

    def refuses(*_: object) -> None:
        raise StoreRefused("403")

    monkeypatch.setattr(PosixStore, "create", refuses)
    with pytest.raises(StoreRefused):
        executor.stop()
    monkeypatch.undo()
    executor.stop()
    assert attempt.answer(0) == StopAndSave()


class RunAgain:
    """A worker has died, and the task runner runs the same task on another one."""

    attempt: FarAttempt

    def __init__(self, target: LocalTarget, reports: Sequence[int] = ()) -> None:
        self._target = target
        self._reports = reports

    def __call__(self) -> None:
        self.attempt = FarAttempt(self._target)
        self.attempt.starts()
        self.attempt.reports(*self._reports, asks=True)


@pytest.mark.parametrize("asks_first", [True, False])
def test_an_attempt_that_is_run_again_with_its_old_request_asks_again_and_gets_the_decision(
    target: LocalTarget, *, asks_first: bool
) -> None:
    search, attempt = (
        FarSearch(target, ASHA(27, grace_period=3, variant="stopping"), survives_search=False),
        FarAttempt(target),
    )
    saved_at = 3 if asks_first else 2

    def goes_on() -> None:
        attempt.saves(saved_at, asks=asks_first)
        if not asks_first:
            attempt.reports(3, asks=True)

    again = RunAgain(target, reports=() if asks_first else (3,))
    state = search.live(nothing, attempt.starts, goes_on, nothing, again, nothing, nothing)
    assert attempt.answer(3) == Proceed(milestone=9)
    assert (again.attempt.trial.attempt, again.attempt.answer(3)) == (2, Proceed(milestone=9))
    decided = [each.report.step for each in state.trial("00000").past if each.what == "decided" and each.report]
    assert decided == [3]


def test_an_attempt_that_begins_where_it_should_be_decided_about_is_asked_about(target: LocalTarget) -> None:
    search, attempt = (
        FarSearch(target, ASHA(27, grace_period=3, variant="stopping"), survives_search=False),
        FarAttempt(target),
    )
    again = RunAgain(target)
    search.live(nothing, attempt.starts, lambda: attempt.saves(4), again, nothing, nothing)
    assert again.attempt.answer(4) == Proceed(milestone=9)


def test_an_attempt_that_resumes_at_its_milestone_is_noticed_though_it_writes_no_report(
    target: LocalTarget,
) -> None:
    attempt, executor = FarAttempt(target), RemoteExecutor(target, FarMachines(), look_every=NOW)
    attempt.starts()
    attempt.saves(2)
    again = FarAttempt(target)
    executor.start(plan_at(target), AttemptRequest(milestone=2), 2, absorbed=again.written)
    again.starts()
    assert RemoteAttemptStarted("00000") in executor.poll(NOW)


def test_an_attempt_that_is_run_again_gets_the_request_to_stop_again(target: LocalTarget) -> None:
    search, attempt = FarSearch(target, samples=2, survives_search=False), FarAttempt(target)
    again = RunAgain(target)
    search.live(nothing, attempt.starts, lambda: search.stop("00000"), nothing, again, nothing, nothing)
    leave = make_leave("enough", save=True, trial="00000")
    assert (attempt.answer(attempt=1), again.attempt.answer()) == (leave, leave)


def test_an_attempt_that_is_run_again_while_all_save_and_end_does_so_too(target: LocalTarget) -> None:
    search, attempt = FarSearch(target, survives_search=False), FarAttempt(target)
    again = RunAgain(target)
    search.live(nothing, attempt.starts, search.stop, nothing, again, nothing, nothing)
    assert (attempt.answer(attempt=1), again.attempt.answer()) == (StopAndSave(), StopAndSave())


def test_orders_name_the_experiment_they_are_of_and_one_begun_again_under_its_name_is_another(
    target: LocalTarget,
) -> None:
    def orders_of(search: FarSearch) -> AttemptRequest:
        search.live(nothing)
        return search.machines.requests[0]

    first, resumed = orders_of(FarSearch(target)), orders_of(FarSearch(target))
    with target.open(timeout=timedelta(seconds=9)) as store:
        remove(store, first_generation("e"), current_owner(), new_write_id(), side_by_side=map)
    again = orders_of(FarSearch(target))
    assert first.experiment_id
    assert resumed.experiment_id == first.experiment_id != again.experiment_id


@pytest.mark.parametrize("kind", [StoreRefused, StoreUnavailable])
def test_a_target_that_refuses_to_be_read_for_a_while_is_read_later_and_reported_once(
    target: LocalTarget,
    executor: RemoteExecutor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: type[Exception],
) -> None:
    attempt = FarAttempt(target)
    attempt.starts()
    attempt.reports(1, 2, asks=True)

    def refuses(*_: object, **__: object) -> bytes:
        raise kind("the credentials have expired")

    with monkeypatch.context() as expired:
        expired.setattr(PosixStore, "read", refuses)
        assert [*executor.poll(NOW), *executor.poll(NOW)] == []
        assert caplog.text.count("are read later: the credentials have expired") == 1
    assert step_reports(executor.poll(NOW)) == [(1, False), (2, True)]
    with monkeypatch.context() as expired:
        expired.setattr(PosixStore, "read", refuses)
        expired.setattr(remote_executor, "_UNREAD", timedelta(0))
        with pytest.raises(kind, match="expired"):
            executor.poll(NOW)


def test_the_newest_report_of_an_attempt_is_known_before_its_journal_has_it(
    target: LocalTarget, executor: RemoteExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt, key = FarAttempt(target), plan_at(target).journal
    attempt.starts()
    after_a_look(executor)

    def publish(number: int, of_attempt: int) -> StepReport:
        report = StepReport(step=59 + number, metrics={"loss": 0.5})
        row = RunningTrial(trial="00000", attempt=of_attempt, report=report, reported_at="now")
        status = LiveStatus(term=1, owner=None, number=number, at="now", period_seconds=5, trials=(row,))
        with target.open(timeout=timedelta(seconds=9)) as store:
            write_live_status(store, key, status)
        return report

    clock = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    report = publish(1, of_attempt=1)
    assert executor.poll(NOW) == [], "it was read a moment ago"
    clock[0] += 6
    assert after_a_look(executor) == [LatestReport("00000", report, "now")]
    publish(2, of_attempt=2)
    clock[0] += 6
    assert after_a_look(executor) == [], "it is of an attempt that its journal does not name yet"


def after_a_look(executor: RemoteExecutor) -> list[Message]:
    """Return the messages once the live statuses that are due have been read."""
    before = executor.poll(NOW)
    for each in threading.enumerate():
        if each.name == "live-status-reader":
            each.join(timeout=60)
    return [*before, *executor.poll(NOW)]


def test_the_newest_reports_of_attempts_are_read_side_by_side_and_delay_no_entry_of_a_journal(
    target: LocalTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, trials = RemoteExecutor(target, FarMachines(), NOW), ("00000", "00001")
    side_by_side, may_read = threading.Barrier(len(trials)), threading.Event()

    def newest(_store: object, key: JournalKey) -> LiveStatus:
        may_read.wait(timeout=60)
        side_by_side.wait(timeout=60)
        row = RunningTrial(trial=str(key.trial), attempt=1, report=StepReport(step=7, metrics={}), reported_at="now")
        return LiveStatus(term=1, owner=None, number=1, at="now", period_seconds=5, trials=(row,))

    monkeypatch.setattr(remote_executor, "newest_live_status", newest)
    for trial in trials:
        executor.start(plan_at(target, trial), AttemptRequest(), 1, 0)
        FarAttempt(target, trial).starts()
    written = executor.poll(NOW)
    assert {each.trial for each in written if isinstance(each, EntryWritten)} == set(trials)
    assert not [each for each in written if isinstance(each, LatestReport)]
    may_read.set()
    assert {each.trial for each in after_a_look(executor) if isinstance(each, LatestReport)} == set(trials)


def test_journals_are_read_and_answers_are_written_side_by_side(
    target: LocalTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an object store each takes a round trip: one after the other, 64 trials would wait for one another."""
    trials = ["00000", "00001", "00002", "00003"]
    executor = RemoteExecutor(target, FarMachines(), look_every=NOW)
    for trial in trials:
        executor.start(plan_at(target, trial), AttemptRequest(milestone=1), 1, absorbed=0)
        attempt = FarAttempt(target, trial)
        attempt.starts()
        attempt.reports(1, asks=True)
    together = threading.Barrier(len(trials), timeout=60)
    for name in ("read", "create"):
        monkeypatch.setattr(PosixStore, name, _after(together, getattr(PosixStore, name)))
    assert step_reports(executor.poll(NOW)) == [(1, True)] * len(trials)
    for trial in trials:
        executor.answer(trial, Proceed(milestone=3), 1)
    executor.poll(NOW)


def _after(together: threading.Barrier, call: Callable[..., object]) -> Callable[..., object]:
    def waits(*given: object, **options: object) -> object:
        together.wait()
        return call(*given, **options)

    return waits


def test_one_journal_that_cannot_be_read_does_not_end_the_search_of_the_others(
    target: LocalTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = RemoteExecutor(target, FarMachines(), NOW)
    for trial in ("00000", "00001"):
        executor.start(plan_at(target, trial), AttemptRequest(), 1, absorbed=0)
        FarAttempt(target, trial).starts()
    read = PosixStore.read

    def refuses_one(store: PosixStore, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        if "/00000/" in path:
            raise StoreRefused("no permission")
        return read(store, path, offset=offset, length=length)

    monkeypatch.setattr(PosixStore, "read", refuses_one)
    monkeypatch.setattr(remote_executor, "_UNREAD", NOW)
    assert {each.trial for each in executor.poll(NOW) if isinstance(each, EntryWritten)} == {"00001"}


def test_the_end_of_an_attempt_is_known_once_its_journal_is_read(
    target: LocalTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines = FarMachines()
    executor, attempt = RemoteExecutor(target, machines, NOW), FarAttempt(target)
    executor.start(plan_at(target), AttemptRequest(), 1, absorbed=0)
    attempt.starts()
    executor.poll(NOW)
    attempt.writes(Finished(trial="00000", reason="enough"))
    machines.end("00000")

    def refuses(*_: object, **__: object) -> bytes:
        raise StoreUnavailable("503")

    with monkeypatch.context() as outage:
        outage.setattr(PosixStore, "read", refuses)
        assert [*executor.poll(NOW), *executor.poll(NOW)] == []
        outage.setattr(remote_executor, "_UNREAD", timedelta(hours=-1))
        with pytest.raises(StoreUnavailable):
            executor.poll(NOW)
    written, over = executor.poll(NOW)
    assert isinstance(written, EntryWritten)
    assert over == AttemptExited("00000")


def test_a_search_that_was_taken_over_does_not_answer_what_the_new_one_started(target: LocalTarget) -> None:
    executor = RemoteExecutor(target, FarMachines(), NOW)
    executor.start(plan_at(target), AttemptRequest(search_term=1), 1, absorbed=0)
    FarAttempt(target).starts()
    executor.poll(NOW)
    executor.stop()
    newer = FarAttempt(target, search_term=2)
    newer.starts()
    newer.reports(1, asks=True)
    executor.poll(NOW)
    executor.poll(NOW)
    assert newer.answer(attempt=2) is None
    assert newer.answer(1, attempt=2) is None
