"""Reports of several threads are taken one by one; reports from any process but the trial's own are refused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from prefect_tune.attempt.processes.process_channel import TrialChannel, trial_in_thread
from prefect_tune.attempt.processes.process_pool import TrialProcessPool
from prefect_tune.core.journal_events import FinishKind, TrialFinished
from prefect_tune.core.messages.process_messages import (
    CheckpointSaved,
    ContinueTraining,
    FromTrial,
    StepDone,
    TrainableLoaded,
    TrialEnded,
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

Opened = Callable[..., AbstractContextManager[TrialChannel]]
_SOON = timedelta(seconds=0.3)
LOG = logging.getLogger("trial")
_IN_TIME = timedelta(seconds=60)


@pytest.fixture(params=["forked", "started", "in place"])
def opened(request: pytest.FixtureRequest, pool: TrialProcessPool) -> Opened:
    """Each way to train."""
    ways: Mapping[str, Opened] = {"forked": pool.open_process, "started": started_process, "in place": trial_in_thread}
    return ways[request.param]


def next_of(channel: TrialChannel) -> FromTrial:
    message = channel.receive(_IN_TIME)
    assert message is not None, "no message in time"
    return message


def served(channel: TrialChannel) -> Sequence[FromTrial]:
    """Acknowledge each checkpoint; return all messages."""
    messages: list[FromTrial] = []
    while not (messages and isinstance(messages[-1], TrialEnded)):
        messages.append(next_of(channel))
        if isinstance(messages[-1], StepDone) and messages[-1].checkpoint:
            channel.send(CheckpointSaved(step=messages[-1].report.step))
    return messages


def test_reports_of_several_threads_arrive_whole_and_each_as_a_step_of_its_own(opened: Opened, tmp_path: Path) -> None:
    times = 20
    start = make_start(reporters.report_from_threads, tmp_path, {"times": times})
    with opened(start, make_log(LogRecorder())) as channel:
        messages = served(channel)
    steps = [each for each in messages if isinstance(each, StepDone)]
    assert [each.report.step for each in steps] == list(range(1, reporters.THREADS * times + 1))
    of_threads = [(each.report.metrics["thread"], each.report.metrics["index"]) for each in steps]
    assert sorted(of_threads) == [(thread, index) for thread in range(reporters.THREADS) for index in range(times)]
    for each in steps:
        metrics = each.report.metrics
        assert bool(each.checkpoint) == (metrics["index"] in range(4, times, 5))
        if each.checkpoint:
            assert Path(each.checkpoint, "said").read_text() == f"{metrics['thread']} {metrics['index']}"
    returned = TrialFinished(trial="t", reason=make_reason("returned"), kind=FinishKind.RETURNED)
    assert drop_seconds(messages[-1]) == TrialEnded(outcome=returned)


def test_while_one_thread_waits_for_a_decision_no_other_reports(pool: TrialProcessPool, tmp_path: Path) -> None:
    start = make_start(reporters.report_forever_in_threads, tmp_path, decision_step=3)
    recorder = LogRecorder()
    with pool.open_process(start, make_log(recorder)) as channel:
        assert isinstance(next_of(channel), TrainableLoaded)
        assert [next_of(channel).report.step for _ in range(3)] == [1, 2, 3]  # type: ignore[union-attr]  # each is a step
        assert channel.receive(_SOON) is None
        channel.send(ContinueTraining(decision_step=5))
        asks = [next_of(channel) for _ in range(2)]
        assert [(each.report.step, each.awaits_decision) for each in asks if isinstance(each, StepDone)] == [
            (4, False),
            (5, True),
        ]
        assert channel.receive(_SOON) is None
        leave = make_stop("enough", save=False)
        channel.send(leave)
        assert drop_seconds(next_of(channel)) == TrialEnded(outcome=leave.outcome)
        channel.end()
    assert not recorder.lines, "each thread has left, and printed nothing"


@pytest.mark.parametrize("isolation", ["forked", "in place"])
def test_a_trial_ends_although_only_a_thread_of_it_sees_the_end(
    pool: TrialProcessPool, tmp_path: Path, isolation: str
) -> None:
    start = make_start(
        reporters.leave_reporting_to_thread, tmp_path, {"seconds": 2 if isolation == "in place" else 600}, steps=3
    )
    opened: Opened = pool.open_process if isolation == "forked" else trial_in_thread
    with opened(start, make_log(LogRecorder())) as channel:
        *_, ended = receive_messages(channel)
        assert ended.outcome.reason == make_reason("step-limit", step=3, limit=3)
        if isolation == "forked":
            assert channel.end().signal == "SIGKILL"


@pytest.mark.parametrize("call", ["report", "report_step", "should_checkpoint"])
def test_what_a_forked_child_reports_or_asks_is_refused_there(
    pool: TrialProcessPool, tmp_path: Path, call: str
) -> None:
    start = make_start(reporters.report_from_child, tmp_path, {"how": "fork", "call": call})
    with pool.open_process(start, make_log(LogRecorder())) as channel:
        messages = receive_messages(channel)
    steps = [each for each in messages if isinstance(each, StepDone)]
    assert [each.report.step for each in steps] == list(range(1, len(steps) + 1))
    found: Any = steps[-1].report.metrics["said"]
    (said,) = found
    assert f"{call}: expected process" in said
    assert "trial 't'" in said
    assert "through a queue, a pipe or a pool" in said
    assert {each.report.metrics.get("from") for each in steps[:-1]} == {"the trial"}


def test_a_forked_child_may_look_at_its_trial(opened: Opened, tmp_path: Path) -> None:
    with opened(make_start(reporters.read_trial_from_child, tmp_path), make_log(LogRecorder())) as channel:
        assert receive_metrics(channel) == {"found": ["t", 0, True]}


def test_no_process_that_a_trial_starts_has_its_channel(opened: Opened, tmp_path: Path) -> None:
    with opened(make_start(reporters.show_sockets, tmp_path), make_log(LogRecorder())) as channel:
        found = receive_metrics(channel)
    assert found["here"]
    assert found["program"] == []
    if opened is not trial_in_thread:  # there the supervisor's end, and other sockets of its process, are among them
        assert found["forked"] == []


@pytest.mark.parametrize(("how", "code"), long_after(1, [("raise", 1), (7, 7), ("return", 0), (0, 0)]))
def test_a_forked_child_that_comes_out_of_the_trainable_ends_and_says_nothing_for_the_trial(
    opened: Opened, tmp_path: Path, how: object, code: int
) -> None:
    recorder = LogRecorder()
    with opened(make_start(reporters.leave_from_child, tmp_path, {"how": how}), make_log(recorder)) as channel:
        messages = receive_messages(channel)
        channel.end()
    assert [each.report.metrics for each in messages if isinstance(each, StepDone)] == [{"loss": 1.0}, {"code": code}]
    assert isinstance(messages[-1], TrialEnded)
    if opened is not trial_in_thread:
        assert any("the child's own error" in line for line in recorder.lines) == (how == "raise")


_REPORTS = "import prefect_tune as pt; pt.report({'loss': 1.0})"


def test_a_report_of_a_program_that_a_trial_starts_is_refused_with_where_to_report(
    pool: TrialProcessPool, tmp_path: Path
) -> None:
    config = {"arguments": ["-c", _REPORTS]}
    with pool.open_process(make_start(reporters.report_from_started_program, tmp_path, config), LOG) as channel:
        found = receive_metrics(channel)
    assert found["code"] == 1
    assert "InvalidInput: pt.report(): expected process " in found["said"]


@pytest.mark.parametrize("way", long_after(1, ["forked", "started"]))
def test_a_launcher_of_ranks_cannot_start_the_trials_process_again(
    pool: TrialProcessPool, tmp_path: Path, way: str
) -> None:
    opened: Opened = pool.open_process if way == "forked" else started_process
    config = {"environment": {"LOCAL_RANK": "1", "WORLD_SIZE": "2"}}
    with opened(make_start(reporters.report_from_started_program, tmp_path, config), LOG) as channel:
        said = receive_metrics(channel)["refused"]
    assert "To train a trial with N processes" in said
    assert "devices=1" in said
