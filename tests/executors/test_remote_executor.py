"""Attempts on other machines: the search reads their posts and journals them, and its answers reach the trials."""

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

from prefect_tune.attempt.search_channel import Answer, DecisionAwaited, Outbox
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
from prefect_tune.core.messages.target_messages import UNSOLICITED_STEP, send_answer
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
from prefect_tune.journal_access import current_owner, read_experiment
from prefect_tune.runtime.trainable import Reuse
from prefect_tune.stores.posix_store import PosixStore
from tests.fakes.checkpoints import commit_files, first_generation, write_files
from tests.fakes.outcomes import make_stop
from tests.fakes.searches.far_attempts import FarAttempt, FarMachines, plan_at
from tests.fakes.searches.far_searches import Death, FarSearch, nothing
from tests.fakes.searches.pending_entries import limits_of
from tests.fakes.trial_processes import wait_until

NOW = timedelta(0)
TRIAL = "00000"
MINUTE = timedelta(minutes=1)
REPORT = StepReport(step=1, metrics={"loss": 1.0})


@pytest.fixture
def executor(target: LocalTarget) -> RemoteExecutor:
    """An executor with one running attempt, whose milestone is step 2."""
    executor = RemoteExecutor(target, FarMachines(), poll_interval=NOW)
    executor.start_attempt(plan_at(target), attempt_request(milestone=2))
    return executor


def attempt_request(trial: str = TRIAL, *, milestone: int | None = None, outbox: int = 1) -> AttemptRequest:
    """Return the request for an attempt that posts to the trial's outbox of this number."""
    launched = Trial(id=trial, config={}, attempt=outbox - 1, outbox=outbox, outbox_count=outbox)
    return AttemptRequest(search_term=1, trial=launched, decision_step=milestone)


def steps_of(messages: Sequence[Message]) -> list[tuple[str, int]]:
    """Return the trials and steps of the reports in posts."""
    posts = [each for each in messages if isinstance(each, PostArrived)]
    return [
        (post.trial, event.report.step) for post in posts for event in post.events if isinstance(event, StepReported)
    ]


def test_a_target_that_goes_away_in_the_middle_takes_no_question_with_it(
    target: LocalTarget, executor: RemoteExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = FarAttempt(target)
    attempt.start()
    attempt.report(1, 2, awaits_decision=True)
    read, first_absent = PosixStore.read, f"{attempt.post_count + 1:010d}.json"

    def fails_once(store: PosixStore, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        if path.endswith(first_absent):
            monkeypatch.undo()
            raise StoreUnavailable("503")
        return read(store, path, offset=offset, length=length)

    monkeypatch.setattr(PosixStore, "read", fails_once)
    messages = [*executor.poll_messages(NOW), *executor.poll_messages(NOW)]
    assert steps_of(messages) == [(TRIAL, 1), (TRIAL, 2)]
    assert messages[-1] == DecisionAwaited(TRIAL, StepReport(step=2, metrics={"loss": 0.5}, trained_seconds=2.0))
    assert [each.number for each in messages if isinstance(each, PostArrived)] == [1, 2, 3]
    assert executor.poll_messages(NOW) == []


def test_a_request_to_stop_that_could_not_be_written_is_written_by_the_next_call(
    target: LocalTarget, executor: RemoteExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = FarAttempt(target)
    attempt.start()

    def refuses(*_: object) -> None:
        raise StoreRefused("403")

    monkeypatch.setattr(PosixStore, "create", refuses)
    with pytest.raises(StoreRefused):
        executor.stop_all()
    monkeypatch.undo()
    executor.stop_all()
    assert attempt.read_answer(0) == CheckpointAndStop()


def test_a_next_attempt_that_begins_where_it_should_be_decided_about_is_asked_about(target: LocalTarget) -> None:
    search, attempt = FarSearch(target, ASHA(27, grace_period=3, variant="stopping")), FarAttempt(target)
    again: list[FarAttempt] = []

    def ends() -> None:
        attempt.save(4)
        attempt.report(5)
        search.machines.end(TRIAL)

    def begins() -> None:
        again.append(FarAttempt(target))
        again[0].start()

    search.simulate(nothing, attempt.start, ends, nothing, begins, nothing, nothing)
    assert (again[0].trial.attempt, again[0].trial.outbox) == (2, 2)
    assert again[0].read_answer(4) == ContinueTraining(decision_step=9)


def test_orders_name_the_experiment_they_are_of_and_one_begun_again_under_its_name_is_another(
    target: LocalTarget,
) -> None:
    def orders_of(search: FarSearch) -> AttemptRequest:
        search.simulate(nothing)
        return search.machines.requests[0]

    first, resumed = orders_of(FarSearch(target)), orders_of(FarSearch(target))
    with target.open(timeout=timedelta(seconds=9)) as store:
        delete_generation(store, first_generation("e"), current_owner(), new_write_stamp())
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
    attempt.start()
    attempt.report(1, 2, awaits_decision=True)

    def refuses(*_: object, **__: object) -> bytes:
        raise kind("the credentials have expired")

    with monkeypatch.context() as expired:
        expired.setattr(PosixStore, "read", refuses)
        assert [*executor.poll_messages(NOW), *executor.poll_messages(NOW)] == []
        assert caplog.text.count("outboxes of trials; retrying: the credentials have expired") == 1
    assert steps_of(executor.poll_messages(NOW)) == [(TRIAL, 1), (TRIAL, 2)]
    with monkeypatch.context() as expired:
        expired.setattr(PosixStore, "read", refuses)
        expired.setattr(remote_executor, "_MAX_READ_OUTAGE", timedelta(0))
        with pytest.raises(kind, match="expired"):
            executor.poll_messages(NOW)


def test_outboxes_are_read_and_answers_are_written_side_by_side(
    target: LocalTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an object store each takes a round trip: one after the other, 64 trials would wait for one another."""
    trials = ["00000", "00001", "00002", "00003"]
    executor = RemoteExecutor(target, FarMachines(), poll_interval=NOW)
    for trial in trials:
        executor.start_attempt(plan_at(target, trial), attempt_request(trial, milestone=1))
        attempt = FarAttempt(target, trial)
        attempt.start()
        attempt.report(1, awaits_decision=True)
    together = threading.Barrier(len(trials), timeout=60)
    for name in ("read", "create"):
        monkeypatch.setattr(PosixStore, name, _after(together, getattr(PosixStore, name)))
    assert steps_of(executor.poll_messages(NOW)) == [(trial, 1) for trial in trials]
    for trial in trials:
        executor.send_decision(trial, ContinueTraining(decision_step=3), 1)
    executor.poll_messages(NOW)


def _after(together: threading.Barrier, call: Callable[..., object]) -> Callable[..., object]:
    def waits(*given: object, **options: object) -> object:
        together.wait()
        return call(*given, **options)

    return waits


def test_one_outbox_that_cannot_be_read_does_not_end_the_search_of_the_others(
    target: LocalTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = RemoteExecutor(target, FarMachines(), NOW)
    for trial in ("00000", "00001"):
        executor.start_attempt(plan_at(target, trial), attempt_request(trial))
        FarAttempt(target, trial).start()
    read = PosixStore.read

    def refuses_one(store: PosixStore, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        if "/00000/" in path:
            raise StoreRefused("no permission")
        return read(store, path, offset=offset, length=length)

    monkeypatch.setattr(PosixStore, "read", refuses_one)
    monkeypatch.setattr(remote_executor, "_MAX_READ_OUTAGE", NOW)
    assert {each.trial for each in executor.poll_messages(NOW)} == {"00001"}


def test_the_end_of_an_attempt_is_known_once_its_outbox_is_read(
    target: LocalTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines = FarMachines()
    executor, attempt = RemoteExecutor(target, machines, NOW), FarAttempt(target)
    executor.start_attempt(plan_at(target), attempt_request())
    attempt.start()
    executor.poll_messages(NOW)
    attempt.post(TrialFinished(trial="00000", reason="enough"))
    machines.end("00000")

    def refuses(*_: object, **__: object) -> bytes:
        raise StoreUnavailable("503")

    with monkeypatch.context() as outage:
        outage.setattr(PosixStore, "read", refuses)
        assert [*executor.poll_messages(NOW), *executor.poll_messages(NOW)] == []
        outage.setattr(remote_executor, "_MAX_READ_OUTAGE", timedelta(hours=-1))
        with pytest.raises(StoreUnavailable):
            executor.poll_messages(NOW)
    received, over = executor.poll_messages(NOW)
    assert isinstance(received, PostArrived)
    assert over == AttemptExited("00000")


def test_an_outbox_with_very_many_posts_is_read_in_parts_and_the_end_of_its_attempt_follows_the_last(
    target: LocalTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines = FarMachines()
    executor, attempt = RemoteExecutor(target, machines, NOW), FarAttempt(target)
    executor.start_attempt(plan_at(target), attempt_request())
    attempt.start()
    for step in range(1, 450):
        attempt.post(StepReported(trial=TRIAL, report=StepReport(step=step, metrics={})))
    machines.end(TRIAL)
    read = PosixStore.read

    def read_until_deadline(store: PosixStore, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        counted = vars(store)
        counted["post_count"] = counted.get("post_count", 0) + ("/outbox/" in path)
        if counted["post_count"] > 300:
            raise StoreUnavailable("not done in time")
        return read(store, path, offset=offset, length=length)

    monkeypatch.setattr(PosixStore, "read", read_until_deadline)
    messages = [message for _ in range(4) for message in executor.poll_messages(NOW)]
    assert [each.number for each in messages[:-1] if isinstance(each, PostArrived)] == list(range(1, 451))
    assert messages[-1] == AttemptExited(TRIAL)


def test_a_search_that_was_taken_over_does_not_answer_what_the_new_one_started(
    target: LocalTarget, executor: RemoteExecutor
) -> None:
    old = FarAttempt(target)
    old.start()
    executor.poll_messages(NOW)
    executor.stop_all()
    with target.open(timeout=MINUTE) as store:
        close_outbox(store, plan_at(target).trial, 1, 1, "the new one", new_write_stamp())
    newer = Outbox(target, plan_at(target).trial, attempt_request(outbox=2).trial)
    newer.write(
        [
            AttemptStarted(trial=TRIAL, attempt=2, from_step=0),
            StepReported(trial=TRIAL, report=REPORT, awaits_decision=True),
        ]
    )
    assert [*executor.poll_messages(NOW), *executor.poll_messages(NOW)] == []
    assert [old.read_answer(step, attempt=2) for step in (0, 1)] == [None, None]


class Deletions:
    """The deletions on a target, each with the trial in the experiment's journal at that moment."""

    def __init__(self, target: LocalTarget, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[tuple[str, Trial]] = []
        self.error: TuneError | None = None
        delete = PosixStore.delete

        def note(store: PosixStore, paths: Sequence[str]) -> None:
            trial = read_experiment(target, first_generation("e")).trial(TRIAL)
            self.done += [(path, trial) for path in paths]
            if self.error is not None:
                raise self.error
            delete(store, paths)

        monkeypatch.setattr(PosixStore, "delete", note)

    def in_folder(self, name: str) -> list[tuple[str, Trial]]:
        return [(Path(path).stem, trial) for path, trial in self.done if f"/{name}/" in path]


@pytest.fixture
def deletions(target: LocalTarget, monkeypatch: pytest.MonkeyPatch) -> Deletions:
    return Deletions(target, monkeypatch)


def posts_of(target: LocalTarget) -> list[int]:
    with target.open(timeout=MINUTE) as store:
        return [int(Path(each.path).stem) for each in store.list(plan_at(target).trial.outboxes_folder)]


def received(target: LocalTarget) -> list[int]:
    with target.open(timeout=MINUTE) as store:
        entries = read_entries(store, first_generation("e"))
    return [event.post for entry in entries for event in entry.events if isinstance(event, PostReceived)]


def test_posts_are_received_in_order_each_once_and_then_deleted_except_the_first(
    target: LocalTarget, deletions: Deletions
) -> None:
    attempt = FarAttempt(target)
    search = FarSearch(target, period=NOW)
    search.simulate(nothing, attempt.start, lambda: attempt.report(1, 2), nothing, lambda: attempt.report(3), nothing)
    wait_until(lambda: posts_of(target) == [1])
    assert received(target) == [1, 2, 3, 4]
    FarSearch(target, period=NOW).simulate(nothing, lambda: attempt.report(4), nothing)
    wait_until(lambda: posts_of(target) == [1])
    assert received(target) == [1, 2, 3, 4, 5]
    assert all(int(name) <= trial.last_post for name, trial in deletions.in_folder("outbox"))


def test_a_post_that_the_last_search_has_not_journaled_is_received_by_the_next(target: LocalTarget) -> None:
    attempt = FarAttempt(target)
    FarSearch(target).simulate(nothing, attempt.start, nothing, lambda: attempt.report(1, 2), nothing)
    attempt.report(3)
    posts = len(received(target))
    state = FarSearch(target).simulate(nothing, nothing)
    assert (posts, received(target), state.trial(TRIAL).step) == (0, [1, 2, 3, 4], 3)


def test_what_a_remote_attempt_retires_is_deleted_once_that_is_journaled(
    target: LocalTarget, deletions: Deletions, tmp_path: Path
) -> None:
    attempt, key = FarAttempt(target), plan_at(target).trial
    for sequence in (1, 2):
        staged = write_files(tmp_path / f"{sequence}", {"weights": bytes([sequence])})
        with target.open(timeout=MINUTE) as store:
            commit_files(store, staged, CheckpointKey(trial=key, step=sequence, sequence=sequence))

    def retires() -> None:
        report = StepReported(trial=TRIAL, report=StepReport(step=2, metrics={}))
        attempt.post(
            report,
            CheckpointCommitted(trial=TRIAL, checkpoint=CheckpointRef(step=2, sequence=2), retired_sequences=(1,)),
        )

    FarSearch(target).simulate(nothing, attempt.start, lambda: attempt.save(1), nothing, retires, nothing, nothing)
    FarSearch(target, period=NOW).simulate(nothing, nothing)
    wait_until(lambda: deletions.in_folder("0000000001-0000000001"))
    (deleted,) = deletions.in_folder("0000000001-0000000001")
    assert [each.sequence for each in deleted[1].checkpoints] == [2]
    assert not deletions.in_folder("0000000002-0000000002")


def test_deletions_that_fail_do_not_end_the_search(target: LocalTarget, deletions: Deletions) -> None:
    attempt, deletions.error = FarAttempt(target), StoreRefused("s3:DeleteObject")

    def tries_to_delete_the_last() -> None:
        wait_until(lambda: "0000000003" in dict(deletions.in_folder("outbox")))

    happens = [partial(attempt.report, step) for step in (1, 2)]
    FarSearch(target, period=NOW).simulate(nothing, attempt.start, *happens, nothing, tries_to_delete_the_last, nothing)
    assert (received(target), posts_of(target)) == ([1, 2, 3], [1, 2, 3])


# The answers that a remote trial receives through the target, also while the target fails.


KEY = TrialKey(experiment="e", generation=1, trial="00000")
PROCEED = ContinueTraining(decision_step=9)
LEAVE = make_stop("enough", save=True, trial=KEY.trial)


class Ends:
    """Both ends of a link: the answers on the target, and those that the trial received."""

    def __init__(self, target: LocalTarget) -> None:
        self.target = target
        self.link = RemoteSearchChannel(target, KEY, attempt=1)
        self.received: list[Answer] = []
        self.link.subscribe(self.received.append)

    def say(self, said: ContinueTraining | StopTrial | CheckpointAndStop, step: int = UNSOLICITED_STEP) -> None:
        with self.target.open(timeout=timedelta(seconds=9)) as store:
            send_answer(store, KEY, 1, step, said)

    def ask(self, step: int) -> None:
        self.link.request_decision(StepReport(step=step, metrics={}))


@pytest.fixture
def ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    monkeypatch.setattr(remote_executor, "_UNSOLICITED_POLL_SECONDS", 0.02)
    made = Ends(LocalTarget(path=str(tmp_path)))
    yield made
    made.link.close()


def test_a_trial_whose_reads_are_refused_for_a_while_gets_the_answer_later_and_warns_once(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read, refusals = PosixStore.read, [StoreRefused("AccessDenied")] * 5

    def refuses(store: PosixStore, path: str, **part: int) -> Buffer:
        if refusals:
            raise refusals.pop()
        return read(store, path, **part)

    with caplog.at_level(logging.WARNING, logger="prefect_tune"):
        monkeypatch.setattr(PosixStore, "read", refuses)
        ends.ask(3)
        wait_until(lambda: not refusals)
        ends.say(PROCEED, 3)
        wait_until(lambda: ends.received)
    assert ends.received == [PROCEED]
    assert [each.getMessage() for each in caplog.records if each.name == "prefect_tune"] == [
        "trial 00000 cannot read decisions from the target: StoreRefused: AccessDenied"
    ]


@pytest.mark.parametrize("damaged", [b"junk", b'{"version":2}'])
def test_a_trial_whose_answer_cannot_be_read_saves_and_ends(ends: Ends, damaged: bytes) -> None:
    path = Path(ends.target.path) / KEY.answer_path(1, 3)
    path.parent.mkdir(parents=True)
    path.write_bytes(damaged)
    ends.ask(3)
    wait_until(ends.link.stop.is_set)
    assert ends.received == []


def test_a_trial_that_waits_for_a_search_whose_successor_has_ended_its_attempt_saves_and_ends(ends: Ends) -> None:
    """A search of a task runner was killed: the next one trains the trial elsewhere, and never answers this attempt."""
    trial = Trial(id=KEY.trial, config={}, outbox=1, outbox_count=1)
    ends.link.make_journal(plan_at(ends.target), AttemptRequest(search_term=1, trial=trial))
    ends.ask(3)
    with ends.target.open(timeout=timedelta(seconds=9)) as store:
        close_outbox(store, KEY, 1, 0, "the next owner", new_write_stamp())
    wait_until(ends.link.stop.is_set)
    assert ends.received == []


def test_a_trial_gets_its_answers_after_an_error_of_its_machine(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    read, errors = PosixStore.read, [OSError(24, "Too many open files")] * 3

    def fails(store: PosixStore, path: str, **part: int) -> Buffer:
        if errors:
            raise errors.pop()
        return read(store, path, **part)

    monkeypatch.setattr(PosixStore, "read", fails)
    ends.ask(3)
    ends.say(PROCEED, 3)
    wait_until(lambda: ends.received == [PROCEED])


def test_a_retry_of_the_task_gets_answers_through_the_link_that_was_closed(ends: Ends) -> None:
    ends.ask(2)
    ends.link.close()
    ends.link.start_polling()
    ends.ask(3)
    ends.say(PROCEED, 3)
    wait_until(lambda: ends.received == [PROCEED])


def test_an_answer_without_a_question_is_delivered_once(ends: Ends) -> None:
    ends.say(LEAVE)
    wait_until(lambda: ends.received)
    ends.ask(3)
    time.sleep(0.2)
    ends.say(PROCEED, 3)
    wait_until(lambda: PROCEED in ends.received)
    assert ends.received == [LEAVE, PROCEED]


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
        link = RemoteSearchChannel(LocalTarget(path=str(tmp_path)), key, 1, search_term=1)
        with link.open_process(start, log, {}):
            link.close()
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
    FarSearch(target, samples=2).simulate(nothing, *(each.start for each in attempts), nothing)
    resumed = FarSearch(target, samples=2, limits=limits_of(1))
    resumed.simulate(nothing, resumed.stop, nothing)
    assert [each.read_answer() for each in attempts] == [CheckpointAndStop()] * 2
    assert resumed.machines.is_withdrawn


@pytest.mark.parametrize(
    ("before", "now", "reports", "answer", "decided"),
    [
        (ASHA(27, grace_period=3, variant="stopping"), FIFO(), [2, 3], ContinueTraining(decision_step=None), []),
        (
            ASHA(27, grace_period=3, variant="stopping"),
            ASHA(27, grace_period=5, variant="stopping"),
            [2, 3],
            ContinueTraining(decision_step=5),
            [],
        ),
        (
            ASHA(27, grace_period=5, variant="stopping"),
            ASHA(27, grace_period=3, variant="stopping"),
            [2, 3, 4, 5],
            ContinueTraining(decision_step=9),
            [5],
        ),
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
    assert [each.report.step for each in state.trial(TRIAL).policy_events if each.report] == decided


class Exploiting(Scheduler):
    """A scheduler by which a trial exploits another one at step 2."""

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
    def dies(*_: object) -> None:
        raise Death

    monkeypatch.setattr(RemoteExecutor, "send_decision", dies)
    died = FarSearch(target, Exploiting()).simulate(
        nothing, attempt.start, lambda: attempt.save(2, awaits_decision=True), nothing
    )
    assert (died.trial(TRIAL).pending_exploit is not None, attempt.read_answer(2)) == (True, None)
    monkeypatch.undo()
    FarSearch(target, Exploiting()).simulate(nothing, nothing)
    assert attempt.read_answer(2) == StopTrial(outcome=TrialPaused(trial=TRIAL, reason="better"), save=False)


def test_one_that_ends_by_what_was_enough_before_goes_on_where_more_is_wanted_today(
    target: LocalTarget, attempt: FarAttempt
) -> None:
    FarSearch(target).simulate(nothing, attempt.start, lambda: attempt.save(1), nothing)
    limits = limits_of(2, meets_stop_criterion=lambda trial: trial.step >= 4)
    resumed = FarSearch(target, limits=limits)

    def ends() -> None:
        attempt.save(2)
        attempt.post(TrialFinished(trial=TRIAL, reason="2 steps are done"))
        resumed.machines.end(TRIAL)

    state = resumed.simulate(nothing, ends, nothing, nothing)
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
