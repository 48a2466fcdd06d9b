"""What a search does with the events of attempts on other machines, its slots, and with its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import count, pairwise
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest

import prefect_tune as pt
from prefect_tune import storage_retries
from prefect_tune.attempt.trial_spec import AttemptRequest, TrialSpec
from prefect_tune.blocks import LocalTarget
from prefect_tune.clock import new_write_stamp
from prefect_tune.core.errors import DeadlineExceeded, StoreUnavailable, Superseded
from prefect_tune.core.experiment.trial_transitions import ENDED_PHASES, Phase, Trial, newest_checkpoint
from prefect_tune.core.journal.journal import append_as_non_owner
from prefect_tune.core.journal_events import (
    AttemptEnded,
    AttemptLaunched,
    AttemptStarted,
    Cause,
    CheckpointCloned,
    CheckpointCommitted,
    CheckpointQuarantined,
    Event,
    FinishKind,
    OwnerChanged,
    PostReceived,
    SlotFreed,
    StepReported,
    StopRequested,
    TrialFinished,
)
from prefect_tune.core.messages.process_messages import ContinueTraining, StopTrial
from prefect_tune.core.messages.target_messages import StopRequest
from prefect_tune.core.schedulers.asha import ASHA
from prefect_tune.core.storage.layout import CheckpointKey, JournalKey
from prefect_tune.core.values import StepReport
from prefect_tune.executors.trial_executor import AttemptExited, Message
from prefect_tune.journal_access import (
    OwnershipRequest,
    acquire_and_adopt_with_retries,
    make_process_owner,
    read_experiment,
    write_entry_directly,
)
from prefect_tune.stores.posix_store import PosixStore
from prefect_tune.tuner.search_policy import SearchPolicy
from tests.fakes.checkpoints import commit_files, write_files
from tests.fakes.searches import planned_search
from tests.fakes.searches.instant_executor import InstantExecutor
from tests.fakes.searches.planned_search import STEPS, PlannedSearch, UnreliableExecutor
from tests.fakes.searches.posting_executor import PostingExecutor, RemoteAttempt
from tests.long_cases import long_after
from tests.tuner.altered_journals import load_entries

KEY = JournalKey(experiment="e", generation=1)


@pytest.fixture
def target(tmp_path: Path) -> LocalTarget:
    return LocalTarget(path=str(tmp_path))


class Killed(BaseException):
    """Ends a search like SIGKILL."""


def kill_after(polls: int) -> Callable[[], bool]:
    polls_so_far = count()

    def is_interrupted() -> bool:
        if next(polls_so_far) == polls:
            raise Killed
        return False

    return is_interrupted


def load_events(target: LocalTarget) -> list[tuple[int, Event]]:
    """Return all events of the journal with their entry numbers."""
    return [(entry.number, event) for entry in load_entries(Path(target.path), KEY) for event in entry.events]


def finish(attempt: RemoteAttempt) -> None:
    attempt.post(TrialFinished(trial=attempt.trial, reason="done"))
    attempt.exit()


def train_one_step(attempt: RemoteAttempt) -> None:
    attempt.start()
    attempt.save(attempt.outbox.trial.step + 1)
    finish(attempt)


def run_until_killed(target: LocalTarget, executor: PostingExecutor, polls: int = 3, **options: Any) -> None:
    with pytest.raises(Killed):
        PlannedSearch(target, executor=executor).run(kill_after(polls), num_samples=1, **options)


# Outboxes.


def test_posts_are_received_once_and_in_order_and_each_with_its_events_in_one_entry(target: LocalTarget) -> None:
    def act(attempt: RemoteAttempt) -> None:
        attempt.start()
        attempt.save(1)
        attempt.save(2, 1)
        finish(attempt)

    PlannedSearch(target, executor=PostingExecutor(act)).run(num_samples=1)
    events = [(number, event) for number, event in load_events(target) if getattr(event, "trial", "")]
    kinds = [type(event) for _, event in events]
    assert kinds[1:] == [
        *(
            AttemptLaunched,
            PostReceived,
            AttemptStarted,
            PostReceived,
            StepReported,
            CheckpointCommitted,
            PostReceived,
            StepReported,
            CheckpointCommitted,
        ),
        *(PostReceived, TrialFinished, SlotFreed),
    ]
    assert [event.post for _, event in events if isinstance(event, PostReceived)] == [1, 2, 3, 4]
    for (number, before), (after, event) in pairwise(events[2:-2]):
        assert isinstance(event, PostReceived) or number == after, (before, event)


def test_the_end_of_an_attempt_receives_what_it_posted_unseen_and_closes_its_outbox(target: LocalTarget) -> None:
    def act(attempt: RemoteAttempt) -> None:
        attempt.is_readable = False
        attempt.start()
        attempt.save(1)
        attempt.post(AttemptEnded(trial=attempt.trial, cause=Cause.TRAINABLE, reason="it raised"))
        attempt.exit(StoreUnavailable("its connection is lost"))

    executor = PostingExecutor(act)
    (trial,) = PlannedSearch(target, executor=executor).run(num_samples=1).trials.values()
    assert (trial.phase, trial.step, trial.outbox, len(executor.attempts)) == (Phase.ERRORED, 1, None, 1)
    with pytest.raises(Superseded, match="has ended this attempt"):
        executor.attempts[0].post(CheckpointQuarantined(trial="00000", sequence=1, reason="bad"))


@pytest.mark.parametrize("is_local", [False, True], ids=["task runner", "this machine, after deployments"])
def test_an_attempt_of_a_dead_search_is_fenced_off_before_its_trial_starts_again(
    target: LocalTarget, *, is_local: bool
) -> None:
    first = PostingExecutor(RemoteAttempt.start, attempts_outlive_search=is_local)
    run_until_killed(target, first)
    (orphan,) = first.attempts
    orphan.save(1)
    requests: list[AttemptRequest] = []

    def check_fenced(*_: object) -> None:
        with pytest.raises(Superseded):
            orphan.save(2)
        requests.append(orphan.request)

    def act(attempt: RemoteAttempt) -> None:
        check_fenced()
        assert newest_checkpoint(attempt.request.trial) is not None, "what it saved after the kill is adopted"
        assert attempt.request.trial.outbox == 2
        train_one_step(attempt)

    executor = InstantExecutor(STEPS, check_fenced) if is_local else PostingExecutor(act)
    (trial,) = PlannedSearch(target, executor=executor).run(num_samples=1).trials.values()
    assert (trial.phase, trial.attempt, len(requests)) == (Phase.FINISHED, 2, 1)
    assert trial.checkpoints[0].step == 1


def test_an_attempt_that_has_outlived_its_search_is_found_again_and_trains_on(target: LocalTarget) -> None:
    first = PostingExecutor(RemoteAttempt.start, attempts_outlive_search=True)
    run_until_killed(target, first)

    def act(attempt: RemoteAttempt) -> None:
        assert (attempt.request.trial.phase, attempt.request.trial.outbox) == (Phase.RUNNING, 1)
        first.attempts[0].save(1)
        first.attempts[0].post(TrialFinished(trial=attempt.trial, reason="done"))
        attempt.exit()

    (trial,) = (
        PlannedSearch(target, executor=PostingExecutor(act, attempts_outlive_search=True))
        .run(num_samples=1)
        .trials.values()
    )
    assert (trial.phase, trial.step, trial.attempt) == (Phase.FINISHED, 1, 1)


def test_an_attempt_that_has_posted_for_days_without_a_search_is_read_in_parts_that_are_kept(
    target: LocalTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its posts are more than can be read until the deadline of one opening of the target, however often retried."""
    first = PostingExecutor(RemoteAttempt.start, attempts_outlive_search=True)
    run_until_killed(target, first)
    (orphan,) = first.attempts
    for step in range(1, 451):
        orphan.post(StepReported(trial=orphan.trial, report=StepReport(step=step, metrics={"loss": 1.0})))
    read = PosixStore.read

    def read_until_deadline(store: PosixStore, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        attributes = vars(store)
        attributes["post_count"] = attributes.get("post_count", 0) + ("/outbox/" in path)
        if attributes["post_count"] > 300:
            raise DeadlineExceeded(f"read of {path}: not done in time")
        return read(store, path, offset=offset, length=length)

    def act(attempt: RemoteAttempt) -> None:
        assert (attempt.request.trial.phase, attempt.request.trial.step) == (Phase.RUNNING, 450)
        orphan.post(TrialFinished(trial=orphan.trial, reason="done"))
        attempt.exit()

    monkeypatch.setattr(PosixStore, "read", read_until_deadline)
    monkeypatch.setattr(storage_retries, "_pause", lambda _seconds: None)
    search = PlannedSearch(target, executor=PostingExecutor(act, attempts_outlive_search=True))
    (trial,) = search.run(num_samples=1).trials.values()
    assert (trial.phase, trial.step, trial.attempt) == (Phase.FINISHED, 450, 1)
    entries = {number for number, event in load_events(target) if isinstance(event, PostReceived)}
    assert len(entries) >= 3, "a part is journaled before the next one is read"


def test_a_queued_launch_of_an_earlier_search_is_found_again_and_not_fenced_off(target: LocalTarget) -> None:
    run_until_killed(target, PostingExecutor(lambda _attempt: None, attempts_outlive_search=True))
    executor = PostingExecutor(train_one_step, attempts_outlive_search=True)
    (trial,) = PlannedSearch(target, executor=executor).run(num_samples=1).trials.values()
    assert (executor.attempts[0].request.trial.outbox, trial.phase, trial.attempt) == (1, Phase.FINISHED, 1)
    assert sum(isinstance(event, AttemptLaunched) for _, event in load_events(target)) == 1


def test_an_attempt_whose_end_its_search_did_not_see_is_no_queued_launch(target: LocalTarget) -> None:
    def act(attempt: RemoteAttempt) -> None:
        attempt.start()
        attempt.post(AttemptEnded(trial=attempt.trial, cause=Cause.PREEMPTED, reason="its machine is needed"))

    run_until_killed(target, PostingExecutor(act, attempts_outlive_search=True))
    executor = PostingExecutor(train_one_step, attempts_outlive_search=True)
    (trial,) = PlannedSearch(target, executor=executor).run(num_samples=1).trials.values()
    assert (executor.attempts[0].request.trial.outbox, trial.phase, trial.attempt) == (2, Phase.FINISHED, 2)


def test_a_trial_whose_pause_a_killed_search_had_received_resumes_with_a_new_outbox(target: LocalTarget) -> None:
    losses = {"00000": 0.1, "00001": 0.9}

    def train(attempt: RemoteAttempt, milestone: int | None) -> None:
        attempt.save(milestone or STEPS, loss=losses[attempt.trial])
        attempt.await_decision() if milestone else finish(attempt)

    def act(attempt: RemoteAttempt) -> None:
        attempt.start()
        train(attempt, attempt.request.milestone)

    def answer(attempt: RemoteAttempt, answer_message: ContinueTraining | StopTrial) -> None:
        if isinstance(answer_message, ContinueTraining):
            train(attempt, answer_message.milestone)
            return
        attempt.post(cast("TrialFinished", answer_message.outcome))
        if len(executors) > 1:
            attempt.exit()

    options: dict[str, Any] = {
        "scheduler": pt.ASHA(STEPS, variant="promotion", reduction_factor=2, grace_period=3),
        "num_samples": 2,
    }
    executors = [PostingExecutor(act, answer, attempts_outlive_search=True)]
    with pytest.raises(Killed):
        PlannedSearch(target, slots=1, executor=executors[0]).run(kill_after(6), **options)
    executors.append(PostingExecutor(act, answer, attempts_outlive_search=True))
    state = PlannedSearch(target, slots=1, executor=executors[1]).run(**options)
    outboxes = [attempt.request.trial.outbox for attempt in executors[1].attempts if attempt.trial == "00000"]
    assert (outboxes[0], state.trial("00000").phase) == (2, Phase.FINISHED)


def test_a_clone_is_journaled_before_its_attempt_starts_and_has_the_bytes_of_its_origin(target: LocalTarget) -> None:
    requests: list[tuple[TrialSpec, AttemptRequest]] = []

    class Recording(UnreliableExecutor):
        def start_attempt(self, spec: TrialSpec, request: AttemptRequest) -> None:
            requests.append((spec, request))
            super().start_attempt(spec, request)

    PlannedSearch(target, executor=Recording()).run(scheduler=pt.PBT(2, {"lr": pt.loguniform(1e-4, 1e-1)}))
    clones = [event for _, event in load_events(target) if isinstance(event, CheckpointCloned)]
    assert clones
    for clone in clones:
        spec, request = next(
            (spec, request)
            for spec, request in requests
            if request.trial.id == clone.trial and newest_checkpoint(request.trial) == clone.checkpoint
        )
        origin = clone.checkpoint.origin
        assert origin is not None
        key = spec.trial.checkpoint_key(clone.checkpoint)
        assert (key.trial.trial, key.step) == (origin.trial, request.trial.step)
        assert request.trial.config == clone.config


# Free slots are filled without delaying the answers to the trials that train already.


_STARTS_PER_POLL = 8


class _RecordingExecutor(UnreliableExecutor):
    """Records how many attempts start before each poll, and how long that poll may wait."""

    def __init__(self) -> None:
        super().__init__(steps=1)
        self.starts = 0
        self.polls: list[tuple[int, timedelta]] = []

    def start_attempt(self, spec: TrialSpec, request: AttemptRequest) -> None:
        self.starts += 1
        super().start_attempt(spec, request)

    def poll_messages(self, timeout: timedelta) -> list[Message]:
        self.polls.append((self.starts, timeout))
        self.starts = 0
        return super().poll_messages(timeout)


def test_many_free_slots_are_filled_in_turns_with_the_answers_and_without_waits(tmp_path: Path) -> None:
    executor = _RecordingExecutor()
    search = PlannedSearch(LocalTarget(path=str(tmp_path)), slots=20, executor=executor)
    state = search.run(num_samples=20, stop={"step": 1})

    assert len(state.trials) == 20
    first, second, third = executor.polls[:3]
    assert first == second == (_STARTS_PER_POLL, timedelta(0)), "the slots that are left do not wait for a message"
    assert third[0] == 20 - 2 * _STARTS_PER_POLL
    assert third[1] > timedelta(0), "with no slot left, the search waits for messages"


def test_slots_for_which_there_is_no_trial_do_not_make_the_search_poll_without_a_wait(tmp_path: Path) -> None:
    executor = _RecordingExecutor()
    search = PlannedSearch(LocalTarget(path=str(tmp_path)), slots=20, executor=executor)
    search.run(num_samples=3, stop={"step": 1})
    assert executor.polls[0][0] == 3
    assert all(timeout > timedelta(0) for _, timeout in executor.polls)


def test_an_end_writes_the_snapshot_that_was_lacking(target: LocalTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefect_tune.tuner.driver.is_final_snapshot_due", lambda written: written.entry_count > 1)
    monkeypatch.setattr("prefect_tune.tuner.pending_entry.BackgroundWorker.write_snapshot", write_snapshot := Mock())
    state = PlannedSearch(target).run(num_samples=2)
    write_snapshot.assert_called_once_with(state)


class _BatchExecutor(UnreliableExecutor):
    """Sends all its messages at once."""

    def poll_messages(self, timeout: timedelta) -> list[Message]:
        del timeout
        messages = list(self._inbox)
        self._inbox.clear()
        return messages

    def stop_all(self) -> None:
        """Stop nothing: every attempt has ended."""


def test_a_search_that_fails_waits_for_no_attempt_whose_exit_it_has_received(
    target: LocalTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefect_tune.tuner.decisions.FailureHandler.on_attempt_failed", Mock(side_effect=KeyError))
    executor = _BatchExecutor(failures={f"0000{number}": (Cause.TRAINABLE, 1) for number in range(3)})
    with pytest.raises(KeyError):
        PlannedSearch(target, executor=executor).run(num_samples=3)
    assert len(executor) == 0


def test_a_scheduler_that_fails_at_each_end_loses_no_report_of_the_other_trials(
    target: LocalTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = SearchPolicy.record

    def fail_at_end(policy: SearchPolicy, trial: Trial, event: object) -> None:
        record(policy, trial, event)
        if trial.phase is Phase.FINISHED:
            raise ZeroDivisionError

    monkeypatch.setattr(SearchPolicy, "record", fail_at_end)
    executor = UnreliableExecutor()
    with pytest.raises(ZeroDivisionError):
        PlannedSearch(target, executor=executor).run(num_samples=3)
    trials = read_experiment(target, KEY).trials.values()
    assert [(trial.step, trial.phase) for trial in trials] == [(STEPS, Phase.FINISHED)] * 3
    assert len(executor) == 0


@pytest.mark.parametrize("seed", long_after(1, [4, 3, 0, 1, 2]))
def test_no_trial_gets_a_second_slot_after_a_pause_that_an_interrupt_cut_off(seed: int, tmp_path: Path) -> None:
    """Its open pause is carried out, and the scheduler names it for a promotion, while the same slots are filled."""
    options: dict[str, Any] = {"scheduler": ASHA(STEPS, variant="promotion", reduction_factor=2), "num_samples": 4}
    for poll in range(1, 25):
        target, executor = LocalTarget(path=str(tmp_path / str(poll))), UnreliableExecutor(seed=seed)
        search = PlannedSearch(target, slots=4, executor=executor)
        search.run(_interrupt_after(poll), **options)
        assert all(trial.phase in ENDED_PHASES for trial in search.run(**options).trials.values())


def test_a_paused_trial_whose_stop_a_killed_search_has_journaled_is_stopped(target: LocalTarget) -> None:
    options: dict[str, Any] = {"scheduler": ASHA(STEPS, variant="promotion", reduction_factor=2), "num_samples": 4}
    search = PlannedSearch(target, slots=1)
    state = search.run(_interrupt_after(7), **options)
    (paused,) = [trial for trial in state.trials.values() if trial.phase is Phase.PAUSED]
    write_entry_directly(target, state, [StopRequested(trial=paused.id, reason="enough")])
    stopped = search.run(**options).trial(paused.id)
    assert (stopped.finish_kind, stopped.attempt) == (FinishKind.STOPPED, paused.attempt)


def _interrupt_after(polls: int) -> Callable[[], bool]:
    polls_so_far = count()
    return lambda: next(polls_so_far) > polls


# Outboxes of attempts that outlive their search: a damaged post, an illegal one, a trial that is stopped queued.


@pytest.mark.parametrize("damaged", [1, 2], ids=["its begin", "its save"])
def test_a_damaged_post_ends_an_attempt_that_has_outlived_its_search_and_loses_no_whole_checkpoint(
    target: LocalTarget, tmp_path: Path, caplog: pytest.LogCaptureFixture, damaged: int
) -> None:
    first = PostingExecutor(lambda _: None, attempts_outlive_search=True)
    run_until_killed(target, first, sync={"sync_period_seconds": 0})
    attempt = first.attempts[0]
    attempt.start()
    for step in (1, 2):
        saved = CheckpointKey(trial=attempt.spec.trial, step=step, sequence=attempt.outbox.trial.next_sequence)
        with target.open(timeout=timedelta(minutes=1)) as store:
            commit_files(store, write_files(tmp_path / f"staged-{step}", {"weights": bytes([step])}), saved)
        attempt.save(step)
    path = Path(target.path, KEY.trial_key("00000").post_path(1, damaged))
    path.chmod(0o644)
    path.write_bytes(b"damaged")
    executor = PostingExecutor(train_one_step, attempts_outlive_search=True)
    (trial,) = PlannedSearch(target, executor=executor).run(num_samples=1).trials.values()
    assert (trial.phase, trial.attempt) == (Phase.FINISHED, 2)
    assert [(ref.step, ref.sequence) for ref in trial.checkpoints[:1]] == [(2, saved.sequence)]
    assert str(path.relative_to(target.path)) in caplog.text


def test_an_attempt_whose_post_cannot_follow_the_journal_is_fenced_off(target: LocalTarget) -> None:
    replies: list[str] = []

    def act(attempt: RemoteAttempt) -> None:
        if len(executor.attempts) > 1:
            train_one_step(attempt)
            return
        attempt.start()

    def post_start_twice(attempt: RemoteAttempt) -> None:
        attempt.outbox.trial = attempt.request.trial  # a fault: it posts its start twice
        attempt.start()

    class Faulty(PostingExecutor):
        polls = 0

        def poll_messages(self, timeout: object) -> Sequence[object]:  # type: ignore[override]  # as the fake returns
            self.polls += 1
            first = self.attempts[0]
            if self.polls == 2:
                post_start_twice(first)
            if self.polls == 4:
                try:
                    first.save(1)
                    replies.append("acknowledged")
                except Superseded:
                    replies.append("refused")
                first.exit()
            return super().poll_messages(timeout)  # type: ignore[arg-type]  # as above

    executor = Faulty(act)
    (trial,) = PlannedSearch(target, executor=executor).run(num_samples=1).trials.values()
    assert trial.phase is Phase.FINISHED
    assert replies == ["refused"], "a save was acknowledged that no journal will ever name"


def test_a_queued_attempt_of_a_trial_that_is_stopped_is_fenced_off_though_its_search_ends(
    target: LocalTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ignore_attempt(_: RemoteAttempt) -> None:
        """Do not begin."""

    first = PostingExecutor(ignore_attempt, attempts_outlive_search=True)
    with pytest.raises(Killed):
        PlannedSearch(target, slots=2, executor=first).run(kill_after(3), num_samples=2)
    assert [attempt.trial for attempt in first.attempts] == ["00000", "00001"]

    class StopsOnce(planned_search._InterruptOnly):
        call_count = 0

        def take_requests(self) -> Sequence[StopRequest]:
            self.call_count += 1
            trial_request = StopRequest(write_id="w", at="", reason="by a person", term=2, trial="00001")
            experiment_request = StopRequest(write_id="x", at="", reason="by a person", term=2)
            return [trial_request, experiment_request] if self.call_count == 2 else []

    monkeypatch.setattr(planned_search, "_InterruptOnly", StopsOnce)
    second = PostingExecutor(ignore_attempt, attempts_outlive_search=True)

    def end_all() -> None:
        for attempt in second.attempts:
            if not attempt.messages:
                attempt.exit()

    monkeypatch.setattr(second, "stop_all", end_all)
    PlannedSearch(target, slots=1, executor=second).run(num_samples=2)
    third = PostingExecutor(train_one_step, attempts_outlive_search=True)
    monkeypatch.undo()
    state = PlannedSearch(target, slots=1, executor=third).run(num_samples=2)
    assert state.trial("00001").phase is Phase.FINISHED
    assert {name: trial.outbox for name, trial in state.trials.items()} == {"00000": None, "00001": None}
    with pytest.raises(Superseded):
        first.attempts[1].post(
            AttemptStarted(trial="00001", attempt=1, from_step=0), TrialFinished(trial="00001", reason="x")
        )
    assert read_experiment(target, KEY).trial("00001").outbox is None


# A superseded search that has not noticed it yet takes no trial back from the new owner.


TRIAL = "00000"


class LosingExecutor(UnreliableExecutor):
    """An executor that loses its first attempt; another owner may open the experiment then."""

    def __init__(self, *, is_taken_over: bool) -> None:
        super().__init__()
        self._is_taken_over = is_taken_over
        self.requests: list[AttemptRequest] = []

    def start_attempt(self, spec: TrialSpec, request: AttemptRequest) -> None:
        super().start_attempt(spec, request)
        self.requests.append(request)
        if len(self.requests) > 1:
            return
        if self._is_taken_over:
            with spec.target.open(timeout=timedelta(minutes=1)) as store:  # a non-owner takes nothing over
                quarantine = [CheckpointQuarantined(trial=TRIAL, sequence=1)]
                append_as_non_owner(store, KEY, lambda _: quarantine, new_write_stamp())
            acquire_and_adopt_with_retries(spec.target, KEY, OwnershipRequest(make_process_owner(), new_write_stamp()))
        self._inbox.clear()
        self._inbox.append(AttemptExited(TRIAL, StoreUnavailable("its process is gone")))


def test_a_search_that_was_taken_over_ends_with_the_first_attempt_it_loses_and_starts_none(target: LocalTarget) -> None:
    executor = LosingExecutor(is_taken_over=True)
    with pytest.raises(Superseded, match="took over"):
        PlannedSearch(target, executor=executor).run(num_samples=1)
    assert len(executor.requests) == 1


def test_a_search_that_was_not_taken_over_starts_again_what_it_has_lost(target: LocalTarget) -> None:
    acquire_and_adopt_with_retries(target, KEY, OwnershipRequest(make_process_owner(), new_write_stamp()))
    executor = LosingExecutor(is_taken_over=False)
    state = PlannedSearch(target, executor=executor).run(num_samples=1)
    assert state.trial(TRIAL).phase is Phase.FINISHED
    assert [(request.owner_term, request.attempt) for request in executor.requests] == [(2, 1), (2, 1)]
    events = [event for entry in load_entries(Path(target.path), KEY) for event in entry.events]
    assert sum(isinstance(event, OwnerChanged) for event in events) == 2
