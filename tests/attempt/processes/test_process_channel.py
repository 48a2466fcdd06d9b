"""The channel of a trial: its death is detected, stray bytes fail the attempt; its temporary files."""

from __future__ import annotations

import os
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from prefect_tune.attempt.processes.process_channel import RankGroup, TrialChannel, trial_in_thread
from prefect_tune.attempt.processes.process_pool import TrialProcessPool
from prefect_tune.attempt.trial_spec import TrialSpec
from prefect_tune.blocks import LocalTarget
from prefect_tune.core.journal_events import Cause, Outcome, TrialFinished
from prefect_tune.core.messages.process_messages import ContinueTraining, TrialEnded
from prefect_tune.core.reasons import ProcessEnd
from prefect_tune.core.storage.layout import TrialKey
from tests.attempt.test_supervisor import FakeCommitWorker, line, supervise
from tests.fakes.trial_processes import LogRecorder, make_log, make_start, receive_metrics, started_process
from tests.trainables.processes import reporters

LOG = make_log(LogRecorder())
SOON = timedelta(seconds=0.05)


class Body:
    """Trains until it is ended."""

    alive = True

    def is_alive(self) -> bool:
        return self.alive

    def end(self) -> ProcessEnd:
        return ProcessEnd(signal="SIGKILL")


@pytest.fixture
def wire() -> Iterator[tuple[Connection, Connection]]:
    """Both ends; the trial's end stays open, as a process that it forked would keep it."""
    ours, theirs = socket.socketpair()
    with Connection(ours.detach()) as near, Connection(theirs.detach()) as far:
        yield near, far


def test_the_death_of_a_trial_is_noticed_although_its_child_holds_the_channel_open(
    wire: tuple[Connection, Connection],
) -> None:
    near, far = wire
    body = Body()
    channel = TrialChannel(near, body)
    assert channel.receive(SOON) is None
    last = TrialEnded(outcome=TrialFinished(trial="t", reason="done"))
    far.send_bytes(last.model_dump_json().encode())
    body.alive = False
    assert channel.receive(SOON) == last
    with pytest.raises(EOFError):
        channel.receive(SOON)


def test_a_message_sent_in_the_moment_of_a_trials_death_is_received_first(wire: tuple[Connection, Connection]) -> None:
    """The message arrives after the channel was empty, and before the trial is found dead."""
    near, far = wire
    last = TrialEnded(outcome=TrialFinished(trial="t", reason="done"))

    class DiesTalking(Body):
        def is_alive(self) -> bool:
            if self.alive:
                far.send_bytes(last.model_dump_json().encode())
                self.alive = False
            return self.alive

    channel = TrialChannel(near, DiesTalking())
    assert channel.receive(SOON) == last
    with pytest.raises(EOFError):
        channel.receive(SOON)


def test_a_trial_that_was_killed_in_the_middle_of_a_message_is_gone(wire: tuple[Connection, Connection]) -> None:
    near, far = wire
    with socket.socket(fileno=far.fileno()) as raw:
        raw.sendall(struct.pack("!i", 100) + b'{"type":"step-d')
        raw.shutdown(socket.SHUT_RDWR)
        raw.detach()
    with pytest.raises(EOFError):
        TrialChannel(near, Body()).receive(SOON)


def test_an_answer_that_is_sent_as_the_channel_closes_is_dropped(wire: tuple[Connection, Connection]) -> None:
    near, _ = wire
    channel = TrialChannel(near, Body())
    near.close()  # as another thread does that ends the trial's process
    channel.send(ContinueTraining(decision_step=None))


@pytest.mark.parametrize("opened", [started_process, trial_in_thread])
@pytest.mark.timeout(60)
def test_a_trainable_that_refers_to_much_data_is_sent_to_its_trial(opened: Callable[..., Any], tmp_path: Path) -> None:
    weights = bytes(3_000_000)
    with opened(make_start(lambda _config: {"size": len(weights)}, tmp_path), LOG) as channel:
        assert receive_metrics(channel) == {"size": 3_000_000}


def test_a_started_process_has_the_environment_of_its_trial_and_removes_its_temporary_files(tmp_path: Path) -> None:
    def looks(_config: Mapping[str, object]) -> Mapping[str, object]:
        kept = Path(tempfile.gettempdir(), "kept")
        kept.touch()
        return {"kept": str(kept), "device": os.environ["CUDA_VISIBLE_DEVICES"], "leads": os.getpid() == os.getsid(0)}

    with started_process(make_start(looks, tmp_path), LOG, {"CUDA_VISIBLE_DEVICES": "3"}) as channel:
        found = receive_metrics(channel)
    assert (found["device"], found["leads"]) == ("3", True)
    assert not Path(found["kept"]).parent.exists()


# Bytes that a trainable writes to its channel by mistake fail the attempt as its own error, in a bounded message.


def outcome_of(pool: TrialProcessPool, folder: Path, trainable: object, **config: object) -> Outcome:
    plan = TrialSpec(
        target=LocalTarget(path=str(folder)),
        trial=TrialKey(experiment="e", generation=1, trial="t"),
        trainable="",
        stopper="",
        needs_history=False,
        silence_timeout=timedelta(minutes=10),
    )
    commit_worker: Any = FakeCommitWorker()
    with pool.open_process(make_start(trainable, folder, config), LOG) as channel:
        return supervise(channel, commit_worker, plan, line())


@pytest.mark.parametrize(
    ("stray", "said"),
    [
        (b"a line of text\n", "expected a length of at most 67108864 bytes, found 1629514857"),
        (struct.pack("!i", 1000) + b"\0" * 8, "expected a JSON object; found"),
        (struct.pack("!i", 16) + b'{"type":"other"}', "expected a prefect-tune message: "),
    ],
)
def test_stray_bytes_on_the_channel_end_the_attempt_as_an_error_of_the_trainable(
    pool: TrialProcessPool, tmp_path: Path, stray: bytes, said: str
) -> None:
    outcome = outcome_of(pool, tmp_path, reporters.write_to_sockets, bytes=stray.hex())
    assert outcome.cause is Cause.TRAINABLE
    message = str(outcome.reason)
    assert message.startswith("the channel of the trial's process: ")
    assert said in message
    assert "look for code that writes to a file descriptor" in message
    assert "pydantic" not in message


def test_one_thread_sends_all_messages_to_a_rank(wire: tuple[Connection, Connection]) -> None:
    near, far = wire
    group, threads = RankGroup([TrialChannel(near, Body()), TrialChannel(near, Body())]), set(threading.enumerate())
    for _ in range(20):
        group.send_to_rank(1, ContinueTraining(decision_step=None))
    assert all(far.recv_bytes() for _ in range(20))
    assert [thread.name for thread in set(threading.enumerate()) - threads] == ["tune-outbox"]
    group.close()
