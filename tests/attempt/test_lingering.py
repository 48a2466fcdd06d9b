"""Code that keeps running after a step or a trial: forks, threads, a cleanup that hangs."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

from prefect_tune.attempt.processes.process_pool import TrialProcessPool
from prefect_tune.core.messages.process_messages import StepDone, TrialEnded
from prefect_tune.core.shown_text import first_line
from tests.fakes.outcomes import require_failure
from tests.fakes.trial_processes import LogRecorder, family, log_to, messages_of, metrics_of, start_of
from tests.trainables.processes.lingering import ForksInAStep, LateThread, NeverCleansUp, reports_a_pipe
from tests.trainables.witness import acts_of

LOG = log_to(LogRecorder())


def test_a_fork_that_exits_in_a_step_does_not_clean_up_what_the_trial_still_uses(tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    with family(), TrialProcessPool(slots=1) as made:
        start = start_of(ForksInAStep, tmp_path, {"witness": str(witness)}, steps=3)
        with made.process(start, LOG) as channel:
            found = metrics_of(channel)
            channel.end()
    assert found["code"] == 7
    assert [each.step for each in acts_of(witness) if each.act == "cleanup"] == [found["pid"]]


def test_a_thread_of_an_earlier_trial_cannot_report_to_the_next_one(tmp_path: Path) -> None:
    with family(), TrialProcessPool(slots=1) as made:
        for _ in range(2):
            with made.process(start_of(LateThread, tmp_path, steps=2), LOG) as channel:
                *said, ended = messages_of(channel)
                assert isinstance(ended, TrialEnded), ended
                channel.end()
    metrics = [each.report.metrics for each in said if isinstance(each, StepDone)]
    assert [each["loss"] for each in metrics] == [1.0, 1.0]
    assert "an earlier trial of this process" in str(metrics[-1]["became"])


def test_processes_whose_cleanup_hangs_are_waited_for_all_at_once(tmp_path: Path) -> None:
    with family(), ExitStack() as pool:
        made = pool.enter_context(TrialProcessPool(slots=4))
        with ExitStack() as trials:
            start = start_of(NeverCleansUp, tmp_path, {"gate": str(tmp_path / "never")}, steps=1)
            for channel in [trials.enter_context(made.process(start, LOG)) for _ in range(4)]:
                assert isinstance(messages_of(channel)[-1], TrialEnded)
        began = time.monotonic()
        pool.close()
        assert time.monotonic() - began < 15  # one by one it takes 20


def test_a_checkpoint_with_a_named_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    directory, staging = tmp_path / "checkpoint", tmp_path / "staging"
    directory.mkdir()
    start = start_of(reports_a_pipe, tmp_path, {"directory": str(directory)}, staging=str(staging), overlap=True)
    with family(), TrialProcessPool(slots=1) as made, made.process(start, LOG) as channel:
        failure = require_failure(messages_of(channel, seconds=30)[-1])
    refused = f"InvalidInput: {directory / 'pipe'}: neither a file nor a directory, so it cannot be saved"
    assert first_line(failure.reason) == refused
