"""The channel of a trial detects the trial's death, and rejects stray bytes."""

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

from prefect_tune.attempt.processes.process_channel import RankGroup, TrialChannel, open_trial_thread
from prefect_tune.attempt.processes.process_pool import TrialProcessPool
from prefect_tune.attempt.trial_spec import TrialSpec
from prefect_tune.blocks import LocalTarget
from prefect_tune.core.journal_events import Cause, TrialFinished
from prefect_tune.core.messages.process_messages import ContinueTraining, TrainingEnded
from prefect_tune.core.reasons import ProcessEnd
from prefect_tune.core.storage.layout import TrialKey
from tests.attempt.test_supervisor import supervise
from tests.fakes.trial_processes import LogRecorder, make_log, make_start, receive_metrics, started_process
from tests.trainables.processes import reporters

LOG = make_log(LogRecorder())
SHORT_TIMEOUT = timedelta(seconds=0.05)


class FakeProcess:
    """Trains until it is ended."""

    alive = True

    def is_alive(self) -> bool:
        return self.alive

    def end(self) -> ProcessEnd:
        return ProcessEnd(signal="SIGKILL")


@pytest.fixture
def wire() -> Iterator[tuple[Connection, Connection]]:
    """Both ends; the trial's end stays open, as in a child process of the trial."""
    supervisor_socket, trial_socket = socket.socketpair()
    with Connection(supervisor_socket.detach()) as near, Connection(trial_socket.detach()) as far:
        yield near, far


def test_the_death_of_a_trial_is_noticed_although_its_child_holds_the_channel_open(
    wire: tuple[Connection, Connection],
) -> None:
    near, far = wire
    process = FakeProcess()
    channel = TrialChannel(near, process)
    assert channel.receive(SHORT_TIMEOUT) is None
    last = TrainingEnded(outcome=TrialFinished(trial="t", reason="done"))
    far.send_bytes(last.model_dump_json().encode())
    process.alive = False
    assert channel.receive(SHORT_TIMEOUT) == last
    with pytest.raises(EOFError):
        channel.receive(SHORT_TIMEOUT)


def test_a_message_sent_in_the_moment_of_a_trials_death_is_received_first(wire: tuple[Connection, Connection]) -> None:
    """The message arrives between the read of the empty channel and the check of the process."""
    near, far = wire
    last = TrainingEnded(outcome=TrialFinished(trial="t", reason="done"))

    class DiesWhileSending(FakeProcess):
        def is_alive(self) -> bool:
            if self.alive:
                far.send_bytes(last.model_dump_json().encode())
                self.alive = False
            return self.alive

    channel = TrialChannel(near, DiesWhileSending())
    assert channel.receive(SHORT_TIMEOUT) == last
    with pytest.raises(EOFError):
        channel.receive(SHORT_TIMEOUT)


def test_a_trial_that_was_killed_in_the_middle_of_a_message_is_gone(wire: tuple[Connection, Connection]) -> None:
    near, far = wire
    with socket.socket(fileno=far.fileno()) as raw:
        raw.sendall(struct.pack("!i", 100) + b'{"type":"step-d')
        raw.shutdown(socket.SHUT_RDWR)
        raw.detach()
    with pytest.raises(EOFError):
        TrialChannel(near, FakeProcess()).receive(SHORT_TIMEOUT)


def test_an_answer_that_is_sent_as_the_channel_closes_is_dropped(wire: tuple[Connection, Connection]) -> None:
    near, _ = wire
    channel = TrialChannel(near, FakeProcess())
    near.close()  # another thread ends the trial's process
    channel.send(ContinueTraining(milestone=None))


@pytest.mark.parametrize("open_process", [started_process, open_trial_thread])
@pytest.mark.timeout(60)
def test_a_trainable_that_refers_to_much_data_is_sent_to_its_trial(
    open_process: Callable[..., Any], tmp_path: Path
) -> None:
    weights = bytes(3_000_000)
    with open_process(make_start(lambda _config: {"size": len(weights)}, tmp_path), LOG) as channel:
        assert receive_metrics(channel) == {"size": 3_000_000}


def test_a_started_process_has_the_environment_of_its_trial_and_removes_its_temporary_files(tmp_path: Path) -> None:
    def look_around(_config: Mapping[str, object]) -> Mapping[str, object]:
        kept = Path(tempfile.gettempdir(), "kept")
        kept.touch()
        return {"kept": str(kept), "device": os.environ["CUDA_VISIBLE_DEVICES"], "leads": os.getpid() == os.getsid(0)}

    with started_process(make_start(look_around, tmp_path), LOG, {"CUDA_VISIBLE_DEVICES": "3"}) as channel:
        metrics = receive_metrics(channel)
    assert (metrics["device"], metrics["leads"]) == ("3", True)
    assert not Path(metrics["kept"]).parent.exists()


@pytest.mark.parametrize(
    ("stray", "expected"),
    [
        (b"a line of text\n", "expected a length of at most 67108864 bytes, found 1629514857"),
        (struct.pack("!i", 1000) + b"\0" * 8, "expected a JSON object; found"),
        (struct.pack("!i", 16) + b'{"type":"other"}', "expected a prefect-tune message: "),
    ],
)
def test_stray_bytes_on_the_channel_end_the_attempt_as_an_error_of_the_trainable(
    pool: TrialProcessPool, tmp_path: Path, stray: bytes, expected: str
) -> None:
    spec = TrialSpec(
        target=LocalTarget(path=str(tmp_path)),
        trial=TrialKey(experiment="e", generation=1, trial="t"),
        trainable="",
        stopper="",
        needs_history=False,
        silence_timeout=timedelta(minutes=10),
    )
    start = make_start(reporters.write_to_sockets, tmp_path, {"bytes": stray.hex()})
    with pool.open_process(start, LOG) as channel:
        outcome = supervise(channel, spec)
    assert outcome.cause is Cause.TRAINABLE
    message = str(outcome.reason)
    assert message.startswith("the channel of the trial's process: ")
    assert expected in message
    assert "look for code that writes to a file descriptor" in message
    assert "pydantic" not in message


def test_one_thread_sends_all_messages_to_a_rank(wire: tuple[Connection, Connection]) -> None:
    near, far = wire
    group, threads = (
        RankGroup([TrialChannel(near, FakeProcess()), TrialChannel(near, FakeProcess())]),
        set(threading.enumerate()),
    )
    for _ in range(20):
        group.send_to_rank(1, ContinueTraining(milestone=None))
    assert all(far.recv_bytes() for _ in range(20))
    assert [thread.name for thread in set(threading.enumerate()) - threads] == ["rank-sender"]
    group.close()
