"""Attempts on other machines: the search journals their posts, and its answers reach the trials."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from prefect_tune.attempt.search_channel import Answer, DecisionAwaited, OutboxJournal
from prefect_tune.attempt.trial_spec import AttemptRequest
from prefect_tune.blocks import LocalTarget
from prefect_tune.clock import new_write_stamp
from prefect_tune.core.errors import StoreRefused, StoreUnavailable, TuneError
from prefect_tune.core.experiment.trial_transitions import Phase, Trial
from prefect_tune.core.journal.journal import read_entries
from prefect_tune.core.journal.outbox import close_outbox
from prefect_tune.core.journal_events import (
    AttemptStarted,
    CheckpointCommitted,
    CheckpointRef,
    PostReceived,
    StepReported,
    TrialFinished,
    TrialPaused,
)
from prefect_tune.core.messages.process_messages import CheckpointAndStop, ContinueTraining, Start, StopTrial
from prefect_tune.core.messages.target_messages import UNSOLICITED_STEP, write_answer
from prefect_tune.core.operations.delete_experiment import delete_generation
from prefect_tune.core.schedulers.asha import ASHA
from prefect_tune.core.schedulers.base import FIFO, Decision, Exploit, Schedule, Scheduler, TrialReport
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.storage.layout import CheckpointKey, TrialKey
from prefect_tune.core.storage.object_store import Buffer
from prefect_tune.core.values import StepReport
from prefect_tune.executors import remote_executor
from prefect_tune.executors.remote_executor import RemoteExecutor, RemoteSearchChannel
from prefect_tune.executors.trial_executor import AttemptExited, Message, PostArrived
from prefect_tune.journal_access import make_process_owner, read_experiment
from prefect_tune.runtime.trainable import Reuse
from prefect_tune.stores.posix_store import PosixStore
from tests.fakes.checkpoints import commit_files, first_generation, write_files
from tests.fakes.outcomes import make_stop
from tests.fakes.searches.far_attempts import FarAttempt, FarMachines, make_spec
from tests.fakes.searches.far_searches import Death, FarSearch, nothing
from tests.fakes.searches.pending_entries import make_limits
from tests.fakes.trial_processes import wait_until

NO_WAIT = timedelta(0)
TRIAL = "00000"
MINUTE = timedelta(minutes=1)
REPORT = StepReport(step=1, metrics={"loss": 1.0})
ASHA_3, ASHA_5 = (ASHA(27, grace_period=period, variant="stopping") for period in (3, 5))


@pytest.fixture
def executor(target: LocalTarget) -> RemoteExecutor:
    """An executor with one running attempt, whose milestone is step 2."""
    executor = RemoteExecutor(target, FarMachines(), poll_interval=NO_WAIT)
    executor.start_attempt(make_spec(target), make_attempt_request(milestone=2))
    return executor


def make_attempt_request(trial: str = TRIAL, *, milestone: int | None = None, outbox: int = 1) -> AttemptRequest:
    """Return the request for an attempt that posts to this outbox of the trial."""
    state = Trial(id=trial, config={}, attempt=outbox - 1, outbox=outbox, outbox_count=outbox)
    return AttemptRequest(owner_term=1, trial=state, milestone=milestone)


def list_reported_steps(messages: Sequence[Message]) -> list[tuple[str, int]]:
    """Return the trials and steps of the reports in posts."""
    posts = [message for message in messages if isinstance(message, PostArrived)]
    return [
        (post.trial, event.report.step) for post in posts for event in post.events if isinstance(event, StepReported)
    ]


def test_a_target_that_goes_away_in_the_middle_takes_no_question_with_it(
    target: LocalTarget, executor: RemoteExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = FarAttempt(target)
    attempt.start()
    attempt.report(1, 2, awaits_decision=True)
    read, next_post = PosixStore.read, f"{attempt.post_count + 1:010d}.json"

    def fail_once(store: PosixStore, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        if path.endswith(next_post):
            monkeypatch.undo()
            raise StoreUnavailable("503")
        return read(store, path, offset=offset, length=length)

    monkeypatch.setattr(PosixStore, "read", fail_once)
    messages = [*executor.poll_messages(NO_WAIT), *executor.poll_messages(NO_WAIT)]
    assert list_reported_steps(messages) == [(TRIAL, 1), (TRIAL, 2)]
    assert messages[-1] == DecisionAwaited(TRIAL, StepReport(step=2, metrics={"loss": 0.5}, trained_seconds=2.0))
    assert [message.number for message in messages if isinstance(message, PostArrived)] == [1, 2, 3]
    assert executor.poll_messages(NO_WAIT) == []


def test_a_request_to_stop_that_could_not_be_written_is_written_by_the_next_call(
    target: LocalTarget, executor: RemoteExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = FarAttempt(target)
    attempt.start()

    def refuse(*_: object) -> None:
        raise StoreRefused("403")

    monkeypatch.setattr(PosixStore, "create", refuse)
    with pytest.raises(StoreRefused):
        executor.stop_all()
    monkeypatch.undo()
    executor.stop_all()
    assert attempt.read_answer(0) == CheckpointAndStop()


def test_a_next_attempt_that_begins_where_it_should_be_decided_about_is_asked_about(target: LocalTarget) -> None:
    search, attempt = FarSearch(target, ASHA_3), FarAttempt(target)
    next_attempts: list[FarAttempt] = []

    def end_attempt() -> None:
        attempt.save(4)
        attempt.report(5)
        search.machines.end(TRIAL)

    def start_next() -> None:
        next_attempts.append(FarAttempt(target))
        next_attempts[0].start()

    search.simulate(nothing, attempt.start, end_attempt, nothing, start_next, nothing, nothing)
    assert (next_attempts[0].trial.attempt, next_attempts[0].trial.outbox) == (2, 2)
    assert next_attempts[0].read_answer(4) == ContinueTraining(milestone=9)


def test_orders_name_the_experiment_they_are_of_and_one_begun_again_under_its_name_is_another(
    target: LocalTarget,
) -> None:
    def run_search(search: FarSearch) -> AttemptRequest:
        search.simulate(nothing)
        return search.machines.requests[0]

    first, resumed = run_search(FarSearch(target)), run_search(FarSearch(target))
    with target.open(timeout=timedelta(seconds=9)) as store:
        delete_generation(store, first_generation("e"), make_process_owner(), new_write_stamp())
    recreated = run_search(FarSearch(target))
    assert first.experiment_id
    assert resumed.experiment_id == first.experiment_id != recreated.experiment_id


@pytest.mark.parametrize("error", [StoreRefused, StoreUnavailable])
def test_a_target_that_refuses_to_be_read_for_a_while_is_read_later_and_reported_once(
    target: LocalTarget,
    executor: RemoteExecutor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: type[Exception],
) -> None:
    attempt = FarAttempt(target)
    attempt.start()
    attempt.report(1, 2, awaits_decision=True)

    def refuse(*_: object, **__: object) -> bytes:
        raise error("the credentials have expired")

    with monkeypatch.context() as expired:
        expired.setattr(PosixStore, "read", refuse)
        assert [*executor.poll_messages(NO_WAIT), *executor.poll_messages(NO_WAIT)] == []
        assert caplog.text.count("outboxes of trials; retrying: the credentials have expired") == 1
    assert list_reported_steps(executor.poll_messages(NO_WAIT)) == [(TRIAL, 1), (TRIAL, 2)]
    with monkeypatch.context() as expired:
        expired.setattr(PosixStore, "read", refuse)
        expired.setattr(remote_executor, "_MAX_READ_OUTAGE", timedelta(0))
        with pytest.raises(error, match="expired"):
            executor.poll_messages(NO_WAIT)


def test_outboxes_are_read_and_answers_are_written_side_by_side(
    target: LocalTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an object store each takes a round trip, for which 64 trials would wait in turn."""
    trials = ["00000", "00001", "00002", "00003"]
    executor = RemoteExecutor(target, FarMachines(), poll_interval=NO_WAIT)
    for trial in trials:
        executor.start_attempt(make_spec(target, trial), make_attempt_request(trial, milestone=1))
        attempt = FarAttempt(target, trial)
        attempt.start()
        attempt.report(1, awaits_decision=True)
    barrier = threading.Barrier(len(trials), timeout=60)
    for name in ("read", "create"):
        monkeypatch.setattr(PosixStore, name, _wait_and_call(barrier, getattr(PosixStore, name)))
    assert list_reported_steps(executor.poll_messages(NO_WAIT)) == [(trial, 1) for trial in trials]
    for trial in trials:
        executor.send_answer(trial, ContinueTraining(milestone=3), 1)
    executor.poll_messages(NO_WAIT)


def _wait_and_call(barrier: threading.Barrier, call: Callable[..., object]) -> Callable[..., object]:
    def wait_and_call(*args: object, **options: object) -> object:
        barrier.wait()
        return call(*args, **options)

    return wait_and_call


def test_one_outbox_that_cannot_be_read_does_not_end_the_search_of_the_others(
    target: LocalTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = RemoteExecutor(target, FarMachines(), NO_WAIT)
    for trial in ("00000", "00001"):
        executor.start_attempt(make_spec(target, trial), make_attempt_request(trial))
        FarAttempt(target, trial).start()
    read = PosixStore.read

    def refuse_one(store: PosixStore, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        if "/00000/" in path:
            raise StoreRefused("no permission")
        return read(store, path, offset=offset, length=length)

    monkeypatch.setattr(PosixStore, "read", refuse_one)
    monkeypatch.setattr(remote_executor, "_MAX_READ_OUTAGE", NO_WAIT)
    assert {message.trial for message in executor.poll_messages(NO_WAIT)} == {"00001"}


def test_the_end_of_an_attempt_is_known_once_its_outbox_is_read(
    target: LocalTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines = FarMachines()
    executor, attempt = RemoteExecutor(target, machines, NO_WAIT), FarAttempt(target)
    executor.start_attempt(make_spec(target), make_attempt_request())
    attempt.start()
    executor.poll_messages(NO_WAIT)
    attempt.post(TrialFinished(trial="00000", reason="enough"))
    machines.end("00000")

    def refuse(*_: object, **__: object) -> bytes:
        raise StoreUnavailable("503")

    with monkeypatch.context() as outage:
        outage.setattr(PosixStore, "read", refuse)
        assert [*executor.poll_messages(NO_WAIT), *executor.poll_messages(NO_WAIT)] == []
        outage.setattr(remote_executor, "_MAX_READ_OUTAGE", timedelta(hours=-1))
        with pytest.raises(StoreUnavailable):
            executor.poll_messages(NO_WAIT)
    post, exited = executor.poll_messages(NO_WAIT)
    assert isinstance(post, PostArrived)
    assert exited == AttemptExited("00000")


def test_an_outbox_with_very_many_posts_is_read_in_parts_and_the_end_of_its_attempt_follows_the_last(
    target: LocalTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines = FarMachines()
    executor, attempt = RemoteExecutor(target, machines, NO_WAIT), FarAttempt(target)
    executor.start_attempt(make_spec(target), make_attempt_request())
    attempt.start()
    for step in range(1, 450):
        attempt.post(StepReported(trial=TRIAL, report=StepReport(step=step, metrics={})))
    machines.end(TRIAL)
    read = PosixStore.read

    def read_until_deadline(store: PosixStore, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        counts = vars(store)
        counts["post_count"] = counts.get("post_count", 0) + ("/outbox/" in path)
        if counts["post_count"] > 300:
            raise StoreUnavailable("not done in time")
        return read(store, path, offset=offset, length=length)

    monkeypatch.setattr(PosixStore, "read", read_until_deadline)
    messages = [message for _ in range(4) for message in executor.poll_messages(NO_WAIT)]
    assert [message.number for message in messages[:-1] if isinstance(message, PostArrived)] == list(range(1, 451))
    assert messages[-1] == AttemptExited(TRIAL)


def test_a_search_that_was_taken_over_does_not_answer_what_the_new_one_started(
    target: LocalTarget, executor: RemoteExecutor
) -> None:
    old = FarAttempt(target)
    old.start()
    executor.poll_messages(NO_WAIT)
    executor.stop_all()
    with target.open(timeout=MINUTE) as store:
        close_outbox(store, make_spec(target).trial, 1, 1, "the new one", new_write_stamp())
    new = OutboxJournal(target, make_spec(target).trial, make_attempt_request(outbox=2).trial)
    reported = StepReported(trial=TRIAL, report=REPORT, awaits_decision=True)
    new.write([AttemptStarted(trial=TRIAL, attempt=2, from_step=0), reported])
    assert [*executor.poll_messages(NO_WAIT), *executor.poll_messages(NO_WAIT)] == []
    assert [old.read_answer(step, attempt=2) for step in (0, 1)] == [None, None]


class Deletions:
    """Records each deletion on a target, with the trial in the journal at that moment."""

    def __init__(self, target: LocalTarget, monkeypatch: pytest.MonkeyPatch) -> None:
        self.deleted: list[tuple[str, Trial]] = []
        self.error: TuneError | None = None
        delete = PosixStore.delete

        def record_and_delete(store: PosixStore, paths: Sequence[str]) -> None:
            trial = read_experiment(target, first_generation("e")).trial(TRIAL)
            self.deleted += [(path, trial) for path in paths]
            if self.error is not None:
                raise self.error
            delete(store, paths)

        monkeypatch.setattr(PosixStore, "delete", record_and_delete)

    def filter_by_folder(self, name: str) -> list[tuple[str, Trial]]:
        return [(Path(path).stem, trial) for path, trial in self.deleted if f"/{name}/" in path]


@pytest.fixture
def deletions(target: LocalTarget, monkeypatch: pytest.MonkeyPatch) -> Deletions:
    return Deletions(target, monkeypatch)


def list_posts(target: LocalTarget) -> list[int]:
    with target.open(timeout=MINUTE) as store:
        return [int(Path(post.path).stem) for post in store.list(make_spec(target).trial.outboxes_folder)]


def read_received_posts(target: LocalTarget) -> list[int]:
    with target.open(timeout=MINUTE) as store:
        entries = read_entries(store, first_generation("e"))
    return [event.post for entry in entries for event in entry.events if isinstance(event, PostReceived)]


def test_posts_are_received_in_order_each_once_and_then_deleted_except_the_first(
    target: LocalTarget, deletions: Deletions
) -> None:
    attempt = FarAttempt(target)
    search = FarSearch(target, period=NO_WAIT)
    search.simulate(nothing, attempt.start, lambda: attempt.report(1, 2), nothing, lambda: attempt.report(3), nothing)
    wait_until(lambda: list_posts(target) == [1])
    assert read_received_posts(target) == [1, 2, 3, 4]
    FarSearch(target, period=NO_WAIT).simulate(nothing, lambda: attempt.report(4), nothing)
    wait_until(lambda: list_posts(target) == [1])
    assert read_received_posts(target) == [1, 2, 3, 4, 5]
    assert all(int(name) <= trial.last_post for name, trial in deletions.filter_by_folder("outbox"))


def test_a_post_that_the_last_search_has_not_journaled_is_received_by_the_next(target: LocalTarget) -> None:
    attempt = FarAttempt(target)
    FarSearch(target).simulate(nothing, attempt.start, nothing, lambda: attempt.report(1, 2), nothing)
    attempt.report(3)
    posts = len(read_received_posts(target))
    state = FarSearch(target).simulate(nothing, nothing)
    assert (posts, read_received_posts(target), state.trial(TRIAL).step) == (0, [1, 2, 3, 4], 3)


def test_what_a_remote_attempt_retires_is_deleted_once_that_is_journaled(
    target: LocalTarget, deletions: Deletions, tmp_path: Path
) -> None:
    attempt, key = FarAttempt(target), make_spec(target).trial
    for sequence in (1, 2):
        staged = write_files(tmp_path / f"{sequence}", {"weights": bytes([sequence])})
        with target.open(timeout=MINUTE) as store:
            commit_files(store, staged, CheckpointKey(trial=key, step=sequence, sequence=sequence))

    def retire_first() -> None:
        reported = StepReported(trial=TRIAL, report=StepReport(step=2, metrics={}))
        ref = CheckpointRef(step=2, sequence=2)
        attempt.post(reported, CheckpointCommitted(trial=TRIAL, checkpoint=ref, retired_sequences=(1,)))

    FarSearch(target).simulate(nothing, attempt.start, lambda: attempt.save(1), nothing, retire_first, nothing, nothing)
    FarSearch(target, period=NO_WAIT).simulate(nothing, nothing)
    wait_until(lambda: deletions.filter_by_folder("0000000001-0000000001"))
    (deleted,) = deletions.filter_by_folder("0000000001-0000000001")
    assert [checkpoint.sequence for checkpoint in deleted[1].checkpoints] == [2]
    assert not deletions.filter_by_folder("0000000002-0000000002")


def test_deletions_that_fail_do_not_end_the_search(target: LocalTarget, deletions: Deletions) -> None:
    attempt, deletions.error = FarAttempt(target), StoreRefused("s3:DeleteObject")

    def wait_for_last_deletion() -> None:
        wait_until(lambda: "0000000003" in dict(deletions.filter_by_folder("outbox")))

    actions = [partial(attempt.report, step) for step in (1, 2)]
    FarSearch(target, period=NO_WAIT).simulate(
        nothing, attempt.start, *actions, nothing, wait_for_last_deletion, nothing
    )
    assert (read_received_posts(target), list_posts(target)) == ([1, 2, 3], [1, 2, 3])


# The answers that a remote trial receives through the target, also while the target fails.

KEY = TrialKey(experiment="e", generation=1, trial="00000")
CONTINUE = ContinueTraining(milestone=9)
STOP = make_stop("enough", save=True, trial=KEY.trial)


class RemoteTrial:
    """A trial whose channel records the answers that it receives through the target."""

    def __init__(self, target: LocalTarget) -> None:
        self.target = target
        self.channel = RemoteSearchChannel(target, KEY, attempt=1)
        self.received: list[Answer] = []
        self.channel.subscribe(self.received.append)

    def send_answer(
        self, answer: ContinueTraining | StopTrial | CheckpointAndStop, step: int = UNSOLICITED_STEP
    ) -> None:
        with self.target.open(timeout=timedelta(seconds=9)) as store:
            write_answer(store, KEY, 1, step, answer)

    def expect_decision(self, step: int) -> None:
        self.channel.expect_decision(StepReport(step=step, metrics={}))


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteTrial]:
    monkeypatch.setattr(remote_executor, "_UNSOLICITED_POLL_SECONDS", 0.02)
    remote = RemoteTrial(LocalTarget(path=str(tmp_path)))
    yield remote
    remote.channel.close()


def test_a_trial_whose_reads_are_refused_for_a_while_gets_the_answer_later_and_warns_once(
    remote: RemoteTrial, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read, refusals = PosixStore.read, [StoreRefused("AccessDenied")] * 5

    def refuse(store: PosixStore, path: str, **part: int) -> Buffer:
        if refusals:
            raise refusals.pop()
        return read(store, path, **part)

    with caplog.at_level(logging.WARNING, logger="prefect_tune"):
        monkeypatch.setattr(PosixStore, "read", refuse)
        remote.expect_decision(3)
        wait_until(lambda: not refusals)
        remote.send_answer(CONTINUE, 3)
        wait_until(lambda: remote.received)
    assert remote.received == [CONTINUE]
    assert [record.getMessage() for record in caplog.records if record.name == "prefect_tune"] == [
        "trial 00000 cannot read decisions from the target: StoreRefused: AccessDenied"
    ]


@pytest.mark.parametrize("damaged", [b"junk", b'{"version":2}'])
def test_a_trial_whose_answer_cannot_be_read_saves_and_ends(remote: RemoteTrial, damaged: bytes) -> None:
    path = Path(remote.target.path) / KEY.answer_path(1, 3)
    path.parent.mkdir(parents=True)
    path.write_bytes(damaged)
    remote.expect_decision(3)
    wait_until(remote.channel.run_stop.is_set)
    assert remote.received == []


def test_a_trial_that_waits_for_a_search_whose_successor_has_ended_its_attempt_saves_and_ends(
    remote: RemoteTrial,
) -> None:
    """After a killed search of a task runner, the next one trains the trial elsewhere."""
    state = Trial(id=KEY.trial, config={}, outbox=1, outbox_count=1)
    remote.channel.make_journal(make_spec(remote.target), AttemptRequest(owner_term=1, trial=state))
    remote.expect_decision(3)
    with remote.target.open(timeout=timedelta(seconds=9)) as store:
        close_outbox(store, KEY, 1, 0, "the next owner", new_write_stamp())
    wait_until(remote.channel.run_stop.is_set)
    assert remote.received == []


def test_a_trial_gets_its_answers_after_an_error_of_its_machine(
    remote: RemoteTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, errors = PosixStore.read, [OSError(24, "Too many open files")] * 3

    def fail(store: PosixStore, path: str, **part: int) -> Buffer:
        if errors:
            raise errors.pop()
        return read(store, path, **part)

    monkeypatch.setattr(PosixStore, "read", fail)
    remote.expect_decision(3)
    remote.send_answer(CONTINUE, 3)
    wait_until(lambda: remote.received == [CONTINUE])


def test_a_retry_of_the_task_gets_answers_through_the_link_that_was_closed(remote: RemoteTrial) -> None:
    remote.expect_decision(2)
    remote.channel.close()
    remote.channel.start_polling()
    remote.expect_decision(3)
    remote.send_answer(CONTINUE, 3)
    wait_until(lambda: remote.received == [CONTINUE])


def test_an_answer_without_a_question_is_delivered_once(remote: RemoteTrial) -> None:
    remote.send_answer(STOP)
    wait_until(lambda: remote.received)
    remote.expect_decision(3)
    time.sleep(0.2)
    remote.send_answer(CONTINUE, 3)
    wait_until(lambda: CONTINUE in remote.received)
    assert remote.received == [STOP, CONTINUE]


def test_a_search_of_the_same_name_after_a_deletion_imports_the_trainable_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[object] = []

    @contextmanager
    def worker_pool(search: Hashable, _reuse: Reuse) -> Iterator[Any]:
        pools.append(search)
        yield SimpleNamespace(open_process=lambda *_: nullcontext())

    monkeypatch.setattr(remote_executor, "shared_pool", worker_pool)
    start, log = cast("Start", None), logging.getLogger("a run")
    for generation, trial in ((1, "00000"), (1, "00001"), (2, "00000")):
        key = TrialKey(experiment="e", generation=generation, trial=trial)
        channel = RemoteSearchChannel(LocalTarget(path=str(tmp_path)), key, 1, owner_term=1)
        with channel.open_process(start, log, {}):
            channel.close()
    assert pools[0] == pools[1] != pools[2]


# Attempts that outlive their search: the next owner finds them, answers their questions, and can stop them.


@pytest.fixture
def attempt(target: LocalTarget) -> FarAttempt:
    return FarAttempt(target)


def test_one_that_has_reported_nothing_yet_gets_a_request_to_stop(target: LocalTarget, attempt: FarAttempt) -> None:
    FarSearch(target).simulate(nothing, attempt.start, nothing)
    resumed = FarSearch(target)
    resumed.simulate(nothing, lambda: resumed.stop(TRIAL), nothing)
    assert resumed.machines.started == [(TRIAL, 1, None)]
    assert attempt.read_answer() == make_stop("enough", save=True, trial=TRIAL)


def test_one_that_was_to_stop_while_no_search_ran_gets_the_request_and_ends_by_itself(
    target: LocalTarget, attempt: FarAttempt
) -> None:
    FarSearch(target).simulate(nothing, attempt.start, lambda: attempt.report(1), nothing)
    resumed = FarSearch(target)
    resumed.stop(TRIAL)
    running = resumed.simulate(nothing, lambda: attempt.report(2), nothing)
    assert attempt.read_answer() == make_stop("enough", save=True, trial=TRIAL)
    assert (running.trial(TRIAL).phase, running.trial(TRIAL).step) == (Phase.RUNNING, 2)


def test_they_are_all_found_and_stopped_with_the_search_however_few_slots_there_are_now(target: LocalTarget) -> None:
    attempts = [FarAttempt(target, trial) for trial in ("00000", "00001")]
    FarSearch(target, samples=2).simulate(nothing, *(attempt.start for attempt in attempts), nothing)
    resumed = FarSearch(target, samples=2, limits=make_limits(1))
    resumed.simulate(nothing, resumed.stop, nothing)
    assert [attempt.read_answer() for attempt in attempts] == [CheckpointAndStop()] * 2
    assert resumed.machines.is_withdrawn


@pytest.mark.parametrize(
    ("before", "now", "reports", "answer", "decided"),
    [
        (ASHA_3, FIFO(), [2, 3], ContinueTraining(milestone=None), []),
        (ASHA_3, ASHA_5, [2, 3], ContinueTraining(milestone=5), []),
        (ASHA_5, ASHA_3, [2, 3, 4, 5], ContinueTraining(milestone=9), [5]),
    ],
    ids=["asked-no-more", "asked-later", "asked-earlier"],
)
def test_one_that_asks_where_an_earlier_owner_wanted_it_to_is_answered_by_todays_scheduler(
    target: LocalTarget,
    attempt: FarAttempt,
    before: Scheduler,
    now: Scheduler,
    reports: list[int],
    answer: ContinueTraining,
    decided: list[int],
) -> None:
    FarSearch(target, before).simulate(nothing, attempt.start, lambda: attempt.report(1), nothing)
    resumed = FarSearch(target, now)
    state = resumed.simulate(nothing, lambda: attempt.report(*reports, awaits_decision=True), nothing, nothing)
    assert attempt.read_answer(reports[-1]) == answer
    assert [event.report.step for event in state.trial(TRIAL).policy_events if event.report] == decided


class ExploitingScheduler(Scheduler):
    """A scheduler with which a trial exploits another one at step 2."""

    def begin(self, objective: Objective, seed: int) -> Schedule:
        del objective, seed
        return _ExploitingSchedule()


class _ExploitingSchedule(Schedule):
    saves_first = True

    def on_trial_added(self, trial: str, config: Mapping[str, object]) -> None:
        del trial, config

    def next_milestone(self, trial: str, step: int) -> int | None:
        del trial
        return step + 2

    def decide(self, report: TrialReport) -> Decision:
        del report
        return Exploit(source="00001", config={}, reason="better")

    def on_trial_ended(self, trial: str) -> None:
        del trial


def test_one_that_was_to_exploit_another_and_got_no_answer_leaves_for_it(
    target: LocalTarget, attempt: FarAttempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object) -> None:
        raise Death

    monkeypatch.setattr(RemoteExecutor, "send_answer", die)
    state = FarSearch(target, ExploitingScheduler()).simulate(
        nothing, attempt.start, lambda: attempt.save(2, awaits_decision=True), nothing
    )
    assert (state.trial(TRIAL).pending_exploit is not None, attempt.read_answer(2)) == (True, None)
    monkeypatch.undo()
    FarSearch(target, ExploitingScheduler()).simulate(nothing, nothing)
    assert attempt.read_answer(2) == StopTrial(outcome=TrialPaused(trial=TRIAL, reason="better"), save=False)


@pytest.mark.parametrize("has_begun", [True, False])
def test_one_that_ends_by_what_was_enough_before_goes_on_where_more_is_wanted_today(
    has_begun: bool, target: LocalTarget, attempt: FarAttempt
) -> None:
    FarSearch(target).simulate(nothing, *([attempt.start, lambda: attempt.save(1)] if has_begun else []), nothing)

    def stays_finished(trial: Trial) -> bool:
        assert read_experiment(target, first_generation("e")).trial(TRIAL).step == trial.step, (
            "its reports are in the journal"
        )
        return trial.step >= 4

    resumed = FarSearch(target, limits=make_limits(2, stays_finished=stays_finished))

    def end_attempt() -> None:
        if not has_begun:
            attempt.start()
            attempt.save(1)
        attempt.save(2)
        attempt.post(TrialFinished(trial=TRIAL, reason="2 steps are done"))
        resumed.machines.end(TRIAL)

    state = resumed.simulate(nothing, end_attempt, nothing, nothing)
    assert resumed.machines.started == [(TRIAL, 1, None), (TRIAL, 2, None)]
    assert (state.trial(TRIAL).phase, state.trial(TRIAL).step) == (Phase.PENDING, 2)


def test_one_that_had_not_begun_when_its_search_was_stopped_is_stopped_no_more_when_that_goes_on(
    target: LocalTarget, attempt: FarAttempt
) -> None:
    search = FarSearch(target)
    search.simulate(nothing, search.stop, nothing)
    assert attempt.read_answer(attempt=1) == CheckpointAndStop()
    resumed = FarSearch(target)
    resumed.simulate(nothing)
    assert resumed.machines.started == [(TRIAL, 1, None)]
    assert attempt.read_answer(attempt=1) is None
