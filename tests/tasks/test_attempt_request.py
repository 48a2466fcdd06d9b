"""Attempt requests that run twice, too late, or for an experiment that was deleted."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.client.schemas.objects import StateType

from prefect_tune.attempt.attempt import Attempt, AttemptResult, log_failure, make_task_state
from prefect_tune.attempt.search_channel import TrialJournal, WritingJournal
from prefect_tune.attempt.trial_spec import AttemptRequest, TrialSpec
from prefect_tune.blocks import LocalTarget
from prefect_tune.clock import new_write_stamp
from prefect_tune.core.errors import Superseded, TrialFailed
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.journal.journal import read_entries
from prefect_tune.core.journal.outbox import close_outbox, read_posts
from prefect_tune.core.journal_events import (
    AttemptEnded,
    AttemptStarted,
    Cause,
    CheckpointsAdopted,
    Event,
    FinishKind,
    Outcome,
    Owner,
    TrialAdded,
    TrialFinished,
    TrialPaused,
)
from prefect_tune.core.messages.process_messages import CheckpointAndStop
from prefect_tune.core.messages.target_messages import UNSOLICITED_STEP, write_answer
from prefect_tune.core.operations.delete_experiment import delete_generation
from prefect_tune.core.reasons import make_reason
from prefect_tune.core.storage.layout import JournalKey, TrialKey
from prefect_tune.executors.remote_executor import RemoteSearchChannel
from prefect_tune.journal_access import (
    JournalWriter,
    OwnershipRequest,
    acquire_and_adopt_with_retries,
    read_experiment_id,
    write_entry_directly,
)
from prefect_tune.tasks import trials
from tests.attempt.direct_tasks import DirectTasks
from tests.fakes.checkpoints import first_generation
from tests.fakes.outcomes import make_failure
from tests.fakes.searches.far_attempts import make_spec

ME = Owner(name="it", host="h", pid=1)
LAUNCHED = Trial(id="00000", config={"x": 1}, outbox=1, outbox_count=1)
_MINUTE = timedelta(minutes=1)


class StubChannel(RemoteSearchChannel):
    """A channel of an attempt whose process cannot be started."""

    journal: TrialJournal | None = None
    """The journal of the attempt's events; None: its outbox."""
    processes = 0

    def make_journal(self, spec: TrialSpec, request: AttemptRequest) -> TrialJournal:
        return self.journal or super().make_journal(spec, request)

    def open_process(self, *_: object) -> object:  # type: ignore[override]  # it opens none
        self.processes += 1
        raise OSError("cannot fork a trial's process")


class Requests:
    """An experiment, and the task that runs attempt requests for a trial of it."""

    def __init__(self, target: LocalTarget) -> None:
        self.target = target
        self.plan = make_spec(target)
        self.channel = StubChannel(target, self.plan.trial, attempt=1)

    def open(self, generation: int = 1, events: Sequence[Event] = (CheckpointsAdopted(),)) -> str:
        """Open the experiment, with these events; return its id."""
        key = JournalKey(experiment="e", generation=generation)
        state = acquire_and_adopt_with_retries(
            self.target, key, OwnershipRequest(ME, new_write_stamp(), lambda _: events)
        )
        if "00000" in state.trials:
            self.channel.journal = WritingJournal("00000", JournalWriter(self.target, state, write_entry_directly))
        return read_experiment_id(self.target, key) or ""

    def run(self, request: AttemptRequest) -> AttemptResult:
        return Attempt(self.plan, request, self.channel, DirectTasks(self.plan), logging.getLogger("tests")).run()

    def list_objects(self) -> Sequence[str]:
        with self.target.open(timeout=_MINUTE) as store:
            return [listed.path for listed in store.list("")]

    def delete(self) -> None:
        with self.target.open(timeout=_MINUTE) as store:
            delete_generation(store, first_generation("e"), ME, new_write_stamp())


@pytest.fixture
def requests(tmp_path: Path) -> Requests:
    return Requests(LocalTarget(path=str(tmp_path / "target")))


def make_request(experiment: str = "", trial: Trial = LAUNCHED) -> AttemptRequest:
    return AttemptRequest(owner_term=1, trial=trial, experiment_id=experiment)


# ------------------------------------------------------------------------------- executed twice, or too late


def test_a_second_execution_of_a_request_stops_before_it_trains_or_writes(requests: Requests) -> None:
    """The machine failed without a reply, or seemed to, and the task runner runs the task again."""
    request = make_request(requests.open())
    with pytest.raises(OSError, match="cannot fork"):
        requests.run(request)
    with requests.target.open(timeout=_MINUTE) as store:
        (started,) = read_posts(store, requests.plan.trial, 1, 0)
    assert isinstance(started.events[0], AttemptStarted)
    before = requests.list_objects()
    with pytest.raises(Superseded, match="another process trains this attempt"):
        requests.run(request)
    assert (requests.list_objects(), requests.channel.processes) == (before, 1)
    for thread in threading.enumerate():
        if thread.name == "commit-worker":
            thread.join(30)
            assert not thread.is_alive()


def test_a_request_whose_outbox_is_closed_stops_before_it_trains_or_writes(requests: Requests) -> None:
    """A user retries the run of an attempt that failed long ago, or another owner took over the search."""
    request = make_request(requests.open())
    with requests.target.open(timeout=_MINUTE) as store:
        close_outbox(store, requests.plan.trial, 1, 0, "the next search", new_write_stamp())
    before = requests.list_objects()
    with pytest.raises(Superseded, match="the next search has ended this attempt"):
        requests.run(request)
    assert (requests.list_objects(), requests.channel.processes) == (before, 0)


@pytest.mark.parametrize(
    "outcome",
    [
        TrialFinished(trial="00000", reason="enough", kind=FinishKind.RETURNED),
        TrialPaused(trial="00000", reason="rung"),
    ],
)
def test_a_trial_that_has_ended_is_not_trained_again_by_a_retry_of_its_task(
    requests: Requests, outcome: Outcome
) -> None:
    started = AttemptStarted(trial="00000", attempt=1, from_step=0)
    requests.open(events=[CheckpointsAdopted(), TrialAdded(trial="00000", config={}), started, outcome])
    before = requests.list_objects()
    assert requests.run(make_request()).outcome == outcome
    assert (requests.list_objects(), requests.channel.processes) == (before, 0)


def test_a_retry_of_a_task_that_failed_within_its_attempt_is_a_further_attempt(requests: Requests) -> None:
    requests.open(events=[CheckpointsAdopted(), TrialAdded(trial="00000", config={})])
    for _ in range(2):
        with suppress(OSError):
            requests.run(make_request())
    with requests.target.open(timeout=_MINUTE) as store:
        entries = read_entries(store, first_generation("e"))
    events = [event for entry in entries for event in entry.events]
    causes = [event.cause for event in events if isinstance(event, AttemptEnded)]
    assert [event.attempt for event in events if isinstance(event, AttemptStarted)] == [1, 2]
    assert causes == [Cause.MACHINE]


def test_a_request_that_waits_for_a_slot_ends_when_its_search_stops(
    requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def wait_for_stop(_limits: Sequence[str], stop: threading.Event) -> Iterator[None]:
        assert stop.wait(30)
        yield

    monkeypatch.setattr(trials, "holding_concurrency_limits", wait_for_stop)
    monkeypatch.setattr(trials, "get_run_logger", logging.getLogger)
    with requests.target.open(timeout=_MINUTE) as store:
        write_answer(store, requests.plan.trial, 1, UNSOLICITED_STEP, CheckpointAndStop())
    state = trials.run_attempt.fn(requests.plan, make_request(requests.open()), requests.channel)
    assert (state.name, requests.channel.processes) == ("Interrupted", 0)


# ------------------------------------------------------------------------- requests of a deleted experiment


def test_a_request_of_an_experiment_that_was_deleted_begins_nothing(requests: Requests) -> None:
    late = make_request(requests.open())
    requests.delete()
    with pytest.raises(Superseded, match="was deleted after it requested"):
        requests.run(late)
    assert requests.list_objects() == ["e/generations/0000000002.json"]


def test_a_request_of_an_experiment_that_was_begun_again_under_its_name_leaves_its_trials_to_the_new_one(
    requests: Requests,
) -> None:
    late = make_request(requests.open())
    requests.delete()
    now = make_request(requests.open(2))
    with pytest.raises(Superseded, match="was deleted after it requested"):
        requests.run(late)
    requests.plan = replace(requests.plan, trial=TrialKey(experiment="e", generation=2, trial="00000"))
    with pytest.raises(OSError, match="cannot fork"):
        requests.run(now)


# The final state of an attempt's task run: its name, color and message in Prefect's UI.


def make_finished(reason: str, kind: FinishKind = FinishKind.CRITERION) -> TrialFinished:
    return TrialFinished(trial="00003", reason=reason, kind=kind)


ERROR = make_failure(
    "lr is too large", trial="00003", type="ValueError", traceback="Traceback (most recent call last):\n  ..."
)
STOPPED = AttemptEnded(trial="00003", cause=Cause.PREEMPTED, reason=make_reason("saved-as-requested"))


@pytest.mark.parametrize(
    ("outcome", "kind", "name", "message"),
    [
        (make_finished("step 9 of 9"), StateType.COMPLETED, "Completed", "step 9 of 9"),
        (make_finished("all steps", FinishKind.ALL_STEPS), StateType.COMPLETED, "Completed", "all steps"),
        (make_finished("rung 3", FinishKind.PRUNED), StateType.COMPLETED, "Pruned", "rung 3"),
        (make_finished("stopped by me", FinishKind.STOPPED), StateType.CANCELLED, "Interrupted", "stopped by me"),
        (TrialPaused(trial="00003", reason="rung 3"), StateType.COMPLETED, "Paused", "rung 3"),
        (STOPPED, StateType.CANCELLED, "Interrupted", "saved, as requested"),
        (ERROR, StateType.FAILED, "Failed", "ValueError: lr is too large"),
        (make_failure("SIGKILL", Cause.MACHINE), StateType.FAILED, "Failed", "SIGKILL"),
    ],
)
def test_each_end_of_an_attempt_has_a_state_that_names_it_and_gives_the_reason_in_one_line(
    outcome: Outcome, kind: StateType, name: str, message: str
) -> None:
    state = make_task_state(outcome)
    assert (state.type, state.name, state.message) == (kind, name, message)


def test_the_result_of_a_failed_attempt_is_its_error() -> None:
    data = make_task_state(ERROR).data
    assert isinstance(data, TrialFailed)
    assert str(data) == "trial 00003: ValueError: lr is too large"


def test_an_error_of_a_deleted_experiment_is_no_reason_to_leave_out_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for generation, trial in ((1, "00000"), (1, "00001"), (2, "00001"), (2, "00002")):
        key = TrialKey(experiment="used-again", generation=generation, trial=trial)
        spec: Any = SimpleNamespace(target=LocalTarget(path="/runs"), trial=key)
        log_failure(ERROR.model_copy(update={"trial": trial}), 1, spec, 1, logging.getLogger("a run"))
    traced = ["Traceback" in message for message in caplog.messages]
    assert traced == [True, False, True, False]
    assert caplog.messages[3].endswith("the same error as trial 00001")
