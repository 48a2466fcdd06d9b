"""What follows a failed attempt, and a decision that was journaled and not carried out."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest

from prefect_tune.attempt.attempt import make_attempt_started
from prefect_tune.core.errors import CommitUnknown, StoreRefused, StoreUnavailable
from prefect_tune.core.experiment.experiment import make_empty_experiment
from prefect_tune.core.experiment.failure_policy import FailurePolicy
from prefect_tune.core.experiment.trial_transitions import Phase, ReplayEvent, Trial
from prefect_tune.core.journal_events import (
    AttemptEnded,
    Cause,
    CheckpointCommitted,
    CheckpointQuarantined,
    CheckpointRef,
    Owner,
    OwnerChanged,
    TrialAdded,
)
from prefect_tune.core.messages.target_messages import StopRequest, write_stop_request
from prefect_tune.core.reasons import AnyReason, make_reason
from prefect_tune.core.schedulers.asha import ASHA
from prefect_tune.core.schedulers.base import Continue, Decision, Pause, Stop
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.search.random_search import RandomSearch
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.core.values import StepReport
from prefect_tune.monitoring.search_observer import SearchObserver
from prefect_tune.tuner.decisions import FailureHandler
from prefect_tune.tuner.search_policy import SearchPolicy, pending_decision
from prefect_tune.tuner.stop_requests import StopHandler, StopRequestPoller, StopSource, stop
from tests.fakes.artifacts import BUCKETS, Bucket, BucketTarget
from tests.fakes.checkpoints import first_generation
from tests.fakes.searches.experiments import write_search
from tests.fakes.searches.instant_executor import InstantExecutor
from tests.fakes.searches.pending_entries import WrittenEntries, make_limits, make_pending_entry, make_random_policy
from tests.fakes.trial_processes import wait_until

_LOG = logging.getLogger("tests")
_TRIAL = "00000"


class _LossRecorder(SearchObserver):
    def __init__(self, reasons: list[str]) -> None:
        self._reasons = reasons

    def on_attempt_lost(self, trial: Trial, reason: str) -> None:
        del trial
        self._reasons.append(reason)


class FailingTrial:
    """One trial whose attempts are lost, with its failure handler."""

    def __init__(self) -> None:
        policy = make_random_policy()
        limits = make_limits(1, failures=FailurePolicy(max_machine_failures=2))
        self.loss_reasons: list[str] = []
        self.entry = make_pending_entry(WrittenEntries(), policy, _LossRecorder(self.loss_reasons))
        self.ready_queue: deque[str] = deque()
        stop_handler = StopHandler(limits, policy, InstantExecutor(9), self.entry, lambda _: None, _LOG)
        self.failure_handler = FailureHandler(limits, self.entry, stop_handler, self.ready_queue, _LOG)
        self.entry.add_event(
            OwnerChanged(experiment="e", generation=1, term=1, owner=Owner(name="me", host="here", pid=1))
        )
        self.entry.add_event(TrialAdded(trial=_TRIAL, config={}))
        self.error: BaseException | None = None

    def lose_attempt(self, *, saves: bool = False) -> Phase:
        """Lose an attempt, start the next one if the handler retries; return the trial's phase."""
        self.entry.add_event(make_attempt_started(self.entry.state.trial(_TRIAL)))
        if saves:
            sequence = self.entry.state.trial(_TRIAL).next_sequence
            self.entry.add_event(
                CheckpointCommitted(trial=_TRIAL, checkpoint=CheckpointRef(step=sequence, sequence=sequence))
            )
        self.failure_handler.retry_lost_attempt(_TRIAL, self.error)
        if self.ready_queue:
            self.ready_queue.clear()
            self.entry.add_event(AttemptEnded(trial=_TRIAL, cause=Cause.MACHINE, reason=make_reason("owner-vanished")))
        return self.entry.state.trial(_TRIAL).phase

    def spend_machine_budget(self, reason: AnyReason) -> None:
        """Lose two attempts by the failure handler, and one more that ended for `reason`."""
        for _ in range(2):
            self.lose_attempt()
        self.entry.add_event(make_attempt_started(self.entry.state.trial(_TRIAL)))
        self.entry.add_event(AttemptEnded(trial=_TRIAL, cause=Cause.MACHINE, reason=reason))


def test_a_trial_that_commits_in_between_may_lose_as_many_attempts_as_it_likes() -> None:
    failing = FailingTrial()
    assert {failing.lose_attempt(saves=True) for _ in range(12)} == {Phase.PENDING}


@pytest.mark.parametrize("committed_before", [0, 5])
def test_a_trial_that_loses_too_many_in_a_row_is_given_up(committed_before: int) -> None:
    failing = FailingTrial()
    for _ in range(committed_before):
        failing.lose_attempt(saves=True)
    assert [failing.lose_attempt() for _ in range(3 - bool(committed_before))][-1] is Phase.ERRORED
    lost = make_reason("attempts-lost", count=3, error=make_reason("no-result"))
    assert failing.entry.state.trial(_TRIAL).end_reason == lost
    tried_again = failing.loss_reasons[committed_before:]
    assert tried_again == ["the attempt ended without writing a result"] * (2 - bool(committed_before))


def test_a_checkpoint_that_is_put_aside_is_no_commit() -> None:
    failing = FailingTrial()
    failing.lose_attempt(saves=True)
    failing.lose_attempt()
    failing.entry.add_event(CheckpointQuarantined(trial=_TRIAL, sequence=1, reason="damaged"))
    assert failing.lose_attempt() is Phase.ERRORED


@pytest.mark.parametrize("error_type", [StoreRefused, StoreUnavailable, CommitUnknown])
def test_a_target_that_fails_for_too_long_ends_the_search_and_not_the_trial(error_type: type[Exception]) -> None:
    failing = FailingTrial()
    failing.error = error_type("the credentials have expired")
    assert [failing.lose_attempt() for _ in range(2)] == [Phase.PENDING] * 2
    with pytest.raises(error_type, match="expired"):
        failing.lose_attempt()
    assert failing.entry.state.trial(_TRIAL).phase is Phase.RUNNING, "the next run of the search continues it"


@pytest.mark.parametrize("error_type", [StoreRefused, StoreUnavailable, CommitUnknown])
def test_a_target_that_fails_after_the_end_was_journaled_ends_the_search_and_not_the_trial(
    error_type: type[Exception],
) -> None:
    failing = FailingTrial()
    failing.error = error_type("the credentials have expired")
    failing.spend_machine_budget("not written")
    with pytest.raises(error_type, match="expired"):
        failing.failure_handler.on_attempt_failed(failing.entry.state.trial(_TRIAL), Cause.MACHINE, failing.error)
    assert failing.entry.state.trial(_TRIAL).phase is Phase.PENDING


def test_an_error_of_a_trial_gives_the_terminal_no_commands(caplog: pytest.LogCaptureFixture) -> None:
    failing = FailingTrial()
    failing.entry.add_event(make_attempt_started(failing.entry.state.trial(_TRIAL)))
    failing.entry.add_event(AttemptEnded(trial=_TRIAL, cause=Cause.MACHINE, reason="gone\x1b]0;title\x07"))
    failing.failure_handler.on_attempt_failed(failing.entry.state.trial(_TRIAL), Cause.MACHINE)
    assert "gone\\x1b]0;title\\x07" in caplog.text
    assert "\x1b" not in caplog.text


def test_a_trial_whose_machine_budget_an_earlier_run_has_spent_is_tried_again_with_a_fresh_one() -> None:
    failing = FailingTrial()
    failing.spend_machine_budget("not written")
    failing.failure_handler.recover_failed_trial(failing.entry.state.trial(_TRIAL), Cause.MACHINE)
    assert list(failing.ready_queue) == [_TRIAL]
    trial = failing.entry.state.trial(_TRIAL)
    assert (trial.phase, trial.machine_failures) == (Phase.PENDING, 0)


def test_a_trial_with_which_run_after_run_vanishes_is_given_up_in_the_end() -> None:
    failing = FailingTrial()
    failing.spend_machine_budget(make_reason("owner-vanished"))
    failing.failure_handler.recover_failed_trial(failing.entry.state.trial(_TRIAL), Cause.MACHINE)
    assert list(failing.ready_queue) == []
    assert failing.entry.state.trial(_TRIAL).phase is Phase.ERRORED, "it would kill its machine again and again"


# A journaled decision about a trial still holds if the search died before it acted on it.


LOSS = Objective(metrics=("loss",), modes=("min",))
ADDED = ReplayEvent(order=1, kind="added")
PHASES = [Phase.PENDING, Phase.RUNNING, Phase.PAUSED, Phase.FINISHED]


def decide(decision: Decision) -> ReplayEvent:
    return ReplayEvent(order=2, kind="decided", report=StepReport(step=3, metrics={"loss": 1.0}), decision=decision)


def make_policy(trial: Trial) -> SearchPolicy:
    schedule = ASHA(max_t=27, grace_period=3, reduction_factor=3, variant="stopping").begin(LOSS, 0)
    policy = SearchPolicy(RandomSearch(1).begin({}, LOSS, 0), schedule)
    for event in trial.policy_events:
        policy.record(trial, event) if event.report is None else policy.decide(trial, event.report)
    return policy


@pytest.mark.parametrize("decision", [Stop(reason="slow"), Pause(reason="waits")])
@pytest.mark.parametrize("phase", PHASES)
def test_one_to_leave_stands_until_the_trial_has_left(decision: Decision, phase: Phase) -> None:
    trial = Trial(id="00000", config={}, phase=phase, policy_events=(ADDED, decide(decision)))
    pending = pending_decision(trial)
    if phase in (Phase.PENDING, Phase.RUNNING):
        assert pending is not None
        assert pending.decision == decision
        assert make_policy(trial).next_milestone(trial) == 3
    else:
        assert pending is None
        assert make_policy(trial).next_milestone(trial) == 9


@pytest.mark.parametrize(
    "events",
    [(ADDED,), (ADDED, decide(Continue())), (ADDED, decide(Pause(reason="")), ReplayEvent(order=3, kind="resumed"))],
)
def test_nothing_else_stands(events: tuple[ReplayEvent, ...]) -> None:
    trial = Trial(id="00000", config={}, policy_events=events)
    assert pending_decision(trial) is None
    assert make_policy(trial).next_milestone(trial) == (3 if events == (ADDED,) else 9)


# Stop requests with unusual texts and numbers, from a target that does not always answer.


@pytest.mark.parametrize("trial", [None, "00000", "00001"], ids=["all", "one", "refused"])
def test_a_reason_gives_the_terminal_no_commands(trial: str | None, caplog: pytest.LogCaptureFixture) -> None:
    class RequestSource(StopSource):
        def take_requests(self) -> Sequence[StopRequest]:
            return [StopRequest(write_id="w", at="", reason="enough\x1b]0;title\x07", term=0, trial=trial)]

    policy = make_random_policy()
    pending = make_pending_entry(WrittenEntries(), policy)
    pending.add_event(TrialAdded(trial="00000", config={}))
    StopHandler(
        make_limits(1), policy, InstantExecutor(9), pending, lambda _: None, logging.getLogger("a run")
    ).check_stop_causes(RequestSource(threading.Event()))
    assert "\\x1b]0;title\\x07" in caplog.text
    assert "\x1b" not in caplog.text


@pytest.mark.timeout(60)
def test_a_wait_that_is_no_number_is_no_endless_one(tmp_path: Path) -> None:
    write_search(tmp_path, "e", {"a": 0.5})
    assert stop("e", target=str(tmp_path), wait_seconds=float("nan")).status == "unanswered"


# Reading requests to stop from a target that does not always answer.


class AwayBucket(Bucket):
    """A bucket whose reads fail while it is away."""

    is_there = False
    reads = 0

    def read(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        self.reads += 1
        if not self.is_there:
            raise StoreUnavailable("no route to the bucket")
        return super().read(path, offset=offset, length=length)


def test_an_outage_is_logged_once_and_the_request_is_read_after_it(caplog: pytest.LogCaptureFixture) -> None:
    interval = timedelta(milliseconds=5)
    BUCKETS["away"] = bucket = AwayBucket()
    request = StopRequest(write_id="w", at="now", reason="enough", term=0, trial=None)
    write_stop_request(bucket, make_empty_experiment(JournalKey(experiment="e", generation=1)), request)
    stop = threading.Event()
    with (
        caplog.at_level(logging.WARNING, "prefect_tune"),
        StopRequestPoller(BucketTarget(name="away"), first_generation("e"), 0, interval, stop) as poller,
    ):
        wait_until(lambda: bucket.reads > 3, seconds=60, what=lambda: "further reads")
        assert poller.take_requests() == []
        bucket.is_there = True
        wait_until(lambda: not poller._unhandled_requests.empty(), seconds=60, what=lambda: "the request")
        assert poller.take_requests() == [request]
    assert caplog.messages == ["stop requests are read later: no route to the bucket"]
