"""Bytes that a trainable writes to its channel by mistake fail the attempt as its own error, in a bounded message."""

from __future__ import annotations

import struct
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from prefect_tune.attempt.processes.process_pool import TrialProcessPool
from prefect_tune.attempt.trial_spec import TrialSpec
from prefect_tune.blocks import LocalTarget
from prefect_tune.core.journal_events import AttemptEnded, Cause, Outcome
from prefect_tune.core.storage.layout import TrialKey
from tests.attempt.test_supervisor import FakeCommitWorker, line, supervise
from tests.fakes.outcomes import require_failure, require_reason
from tests.fakes.trial_processes import LogRecorder, log_to, messages_of, start_of
from tests.trainables.processes import reporters

LOG = log_to(LogRecorder())


def outcome_of(pool: TrialProcessPool, folder: Path, trainable: object, **config: object) -> Outcome:
    plan = TrialSpec(
        target=LocalTarget(path=str(folder)),
        trial=TrialKey(experiment="e", generation=1, trial="t"),
        trainable="",
        stopper="",
        needs_curve=False,
        silence=timedelta(minutes=10),
    )
    commit_worker: Any = FakeCommitWorker()
    with pool.process(start_of(trainable, folder, config), LOG) as channel:
        return supervise(channel, commit_worker, plan, line())


@pytest.mark.parametrize(
    ("stray", "said"),
    [
        (b"a line of text\n", "expected a length of at most 67108864 bytes, found 1629514857"),
        (struct.pack("!i", 1000) + b"\0" * 8, "expected a JSON object; found"),
        (struct.pack("!i", 16) + b'{"type":"other"}', "expected a message of this prefect-tune: "),
    ],
)
def test_stray_bytes_on_the_channel_end_the_attempt_as_an_error_of_the_trainable(
    pool: TrialProcessPool, tmp_path: Path, stray: bytes, said: str
) -> None:
    outcome = outcome_of(pool, tmp_path, reporters.talks_out_of_turn, bytes=stray.hex())
    assert isinstance(outcome, AttemptEnded)
    assert outcome.cause is Cause.USER
    message = str(outcome.reason)
    assert message.startswith("the channel of the trial's process: ")
    assert said in message
    assert "look for code that writes to a file descriptor" in message
    assert "pydantic" not in message


def test_an_error_that_shows_a_whole_array_is_cut_in_its_middle(pool: TrialProcessPool, tmp_path: Path) -> None:
    with pool.process(start_of(reporters.shows_everything, tmp_path), LOG) as channel:
        reason = require_reason(require_failure(messages_of(channel)[-1]))
    assert str(reason).startswith(r"ValueError: the file \udcff in [0, 0, 0,")
    assert reason.arguments["text"].endswith("0, 0] is not good")
    assert "characters left out" in reason.arguments["text"]
    assert len(str(reason)) < 300_000
