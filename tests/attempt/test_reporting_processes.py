"""Reports of several threads arrive one by one; reports from any process but the trial's own are refused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from prefect_tune.attempt.processes.process_channel import TrialChannel, open_trial_thread
from prefect_tune.attempt.processes.process_pool import TrialProcessPool
from prefect_tune.core.journal_events import FinishKind, TrialFinished
from prefect_tune.core.messages.process_messages import (
    CheckpointSaved,
    ContinueTraining,
    FromTrial,
    StepDone,
    TrainableLoaded,
    TrainingEnded,
)
from prefect_tune.core.reasons import make_reason
from tests.fakes.outcomes import make_stop
from tests.fakes.trial_processes import (
    LogRecorder,
    drop_seconds,
    make_log,
    make_start,
    receive_messages,
    receive_metrics,
    started_process,
)
from tests.long_cases import long_after
from tests.trainables.processes import reporters

Opener = Callable[..., AbstractContextManager[TrialChannel]]
_SHORT_TIMEOUT = timedelta(seconds=0.3)
LOG = logging.getLogger("trial")
_TIMEOUT = timedelta(seconds=60)


@pytest.fixture(params=["forked", "started", "in place"])
def open_process(request: pytest.FixtureRequest, pool: TrialProcessPool) -> Opener:
    """Each way to start a trial."""
    ways: Mapping[str, Opener] = {
        "forked": pool.open_process,
        "started": started_process,
        "in place": open_trial_thread,
    }
    return ways[request.param]


def receive_next(channel: TrialChannel) -> FromTrial:
    message = channel.receive(_TIMEOUT)
    assert message is not None, "no message in time"
    return message


def acknowledge_saves(channel: TrialChannel) -> Sequence[FromTrial]:
    """Acknowledge each checkpoint; return all messages."""
    messages: list[FromTrial] = []
    while not (messages and isinstance(messages[-1], TrainingEnded)):
        messages.append(receive_next(channel))
        if isinstance(messages[-1], StepDone) and messages[-1].checkpoint:
            channel.send(CheckpointSaved(step=messages[-1].report.step))
    return messages


def test_reports_of_several_threads_arrive_whole_and_each_as_a_step_of_its_own(
    open_process: Opener, tmp_path: Path
) -> None:
    times = 20
    start = make_start(reporters.report_from_threads, tmp_path, {"times": times})
    with open_process(start, make_log(LogRecorder())) as channel:
        messages = acknowledge_saves(channel)
    steps = [step for step in messages if isinstance(step, StepDone)]
    assert [step.report.step for step in steps] == list(range(1, reporters.THREADS * times + 1))
    reports = [(step.report.metrics["thread"], step.report.metrics["index"]) for step in steps]
    assert sorted(reports) == [(thread, index) for thread in range(reporters.THREADS) for index in range(times)]
    for step in steps:
        metrics = step.report.metrics
        assert bool(step.checkpoint) == (metrics["index"] in range(4, times, 5))
        if step.checkpoint:
            assert Path(step.checkpoint, "said").read_text() == f"{metrics['thread']} {metrics['index']}"
    returned = TrialFinished(trial="t", reason=make_reason("returned"), kind=FinishKind.RETURNED)
    assert drop_seconds(messages[-1]) == TrainingEnded(outcome=returned)


def test_while_one_thread_waits_for_a_decision_no_other_reports(pool: TrialProcessPool, tmp_path: Path) -> None:
    start = make_start(reporters.report_forever_in_threads, tmp_path, milestone=3)
    recorder = LogRecorder()
    with pool.open_process(start, make_log(recorder)) as channel:
        assert isinstance(receive_next(channel), TrainableLoaded)
        assert [receive_next(channel).report.step for _ in range(3)] == [1, 2, 3]  # type: ignore[union-attr]  # each is a step
        assert channel.receive(_SHORT_TIMEOUT) is None
        channel.send(ContinueTraining(milestone=5))
        steps = [receive_next(channel) for _ in range(2)]
        assert [(step.report.step, step.awaits_decision) for step in steps if isinstance(step, StepDone)] == [
            (4, False),
            (5, True),
        ]
        assert channel.receive(_SHORT_TIMEOUT) is None
        stop = make_stop("enough", save=False)
        channel.send(stop)
        assert drop_seconds(receive_next(channel)) == TrainingEnded(outcome=stop.outcome)
        channel.end()
    assert not recorder.lines, "all threads have ended, and printed nothing"


@pytest.mark.parametrize("isolation", ["forked", "in place"])
def test_a_trial_ends_although_only_a_thread_of_it_sees_the_end(
    pool: TrialProcessPool, tmp_path: Path, isolation: str
) -> None:
    config = {"seconds": 2 if isolation == "in place" else 600}
    start = make_start(reporters.leave_reporting_to_thread, tmp_path, config, steps=3)
    open_process: Opener = pool.open_process if isolation == "forked" else open_trial_thread
    with open_process(start, make_log(LogRecorder())) as channel:
        *_, last = receive_messages(channel)
        assert last.outcome.reason == make_reason("step-limit", step=3, limit=3)
        if isolation == "forked":
            assert channel.end().signal == "SIGKILL"


@pytest.mark.parametrize("call", ["report", "report_step", "should_checkpoint"])
def test_what_a_forked_child_reports_or_asks_is_refused_there(
    pool: TrialProcessPool, tmp_path: Path, call: str
) -> None:
    start = make_start(reporters.report_from_child, tmp_path, {"how": "fork", "call": call})
    with pool.open_process(start, make_log(LogRecorder())) as channel:
        messages = receive_messages(channel)
    steps = [message for message in messages if isinstance(message, StepDone)]
    assert [step.report.step for step in steps] == list(range(1, len(steps) + 1))
    errors: Any = steps[-1].report.metrics["said"]
    (error,) = errors
    assert f"{call}: expected process" in error
    assert "trial 't'" in error
    assert "through a queue, a pipe or a pool" in error
    assert {step.report.metrics.get("from") for step in steps[:-1]} == {"the trial"}


def test_a_forked_child_may_look_at_its_trial(open_process: Opener, tmp_path: Path) -> None:
    with open_process(make_start(reporters.read_trial_from_child, tmp_path), make_log(LogRecorder())) as channel:
        assert receive_metrics(channel) == {"found": ["t", 0, True]}


def test_no_process_that_a_trial_starts_has_its_channel(open_process: Opener, tmp_path: Path) -> None:
    with open_process(make_start(reporters.show_sockets, tmp_path), make_log(LogRecorder())) as channel:
        metrics = receive_metrics(channel)
    assert metrics["here"]
    assert metrics["program"] == []
    if open_process is not open_trial_thread:  # its process has other sockets, too
        assert metrics["forked"] == []


@pytest.mark.parametrize(("how", "code"), long_after(1, [("raise", 1), (7, 7), ("return", 0), (0, 0)]))
def test_a_forked_child_that_comes_out_of_the_trainable_ends_and_says_nothing_for_the_trial(
    open_process: Opener, tmp_path: Path, how: object, code: int
) -> None:
    recorder = LogRecorder()
    with open_process(make_start(reporters.leave_from_child, tmp_path, {"how": how}), make_log(recorder)) as channel:
        messages = receive_messages(channel)
        channel.end()
    assert [message.report.metrics for message in messages if isinstance(message, StepDone)] == [
        {"loss": 1.0},
        {"code": code},
    ]
    assert isinstance(messages[-1], TrainingEnded)
    if open_process is not open_trial_thread:
        assert any("the child's own error" in line for line in recorder.lines) == (how == "raise")


_REPORTING_CODE = "import prefect_tune as pt; pt.report({'loss': 1.0})"


def test_a_report_of_a_program_that_a_trial_starts_is_refused_with_where_to_report(
    pool: TrialProcessPool, tmp_path: Path
) -> None:
    config = {"arguments": ["-c", _REPORTING_CODE]}
    with pool.open_process(make_start(reporters.report_from_started_program, tmp_path, config), LOG) as channel:
        metrics = receive_metrics(channel)
    assert metrics["code"] == 1
    assert "InvalidInput: pt.report(): expected process " in metrics["said"]


@pytest.mark.parametrize("way", long_after(1, ["forked", "started"]))
def test_a_launcher_of_ranks_cannot_start_the_trials_process_again(
    pool: TrialProcessPool, tmp_path: Path, way: str
) -> None:
    open_process: Opener = pool.open_process if way == "forked" else started_process
    config = {"environment": {"LOCAL_RANK": "1", "WORLD_SIZE": "2"}}
    with open_process(make_start(reporters.report_from_started_program, tmp_path, config), LOG) as channel:
        error = receive_metrics(channel)["refused"]
    assert "To train a trial with N processes" in error
    assert "devices=1" in error
