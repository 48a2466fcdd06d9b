"""A trial's death is detected even while a process that it started keeps the channel open; its temporary files."""

from __future__ import annotations

import socket
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from prefect_tune.attempt.processes.process_channel import TrialChannel, trial_in_place, trial_process
from prefect_tune.core.journal_events import Finished
from prefect_tune.core.messages.process_messages import Proceed, TrialEnded
from prefect_tune.core.reasons import ProcessEnd
from tests.fakes.trial_processes import LogRecorder, log_to, metrics_of, start_of

LOG = log_to(LogRecorder())
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
    last = TrialEnded(outcome=Finished(trial="t", reason="done"))
    far.send_bytes(last.model_dump_json().encode())
    body.alive = False
    assert channel.receive(SOON) == last
    with pytest.raises(EOFError):
        channel.receive(SOON)


def test_a_message_sent_in_the_moment_of_a_trials_death_is_received_first(wire: tuple[Connection, Connection]) -> None:
    """The message arrives after the channel was empty, and before the trial is found dead."""
    near, far = wire
    last = TrialEnded(outcome=Finished(trial="t", reason="done"))

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


# ----------------------------------------------------------------------------------------- in a real process


def test_an_answer_that_is_sent_as_the_channel_closes_is_dropped(wire: tuple[Connection, Connection]) -> None:
    near, _ = wire
    channel = TrialChannel(near, Body())
    near.close()  # as another thread does that ends the trial's process
    channel.tell(Proceed(milestone=None))


@pytest.mark.parametrize("opened", [trial_process, trial_in_place])
@pytest.mark.timeout(60)
def test_a_trainable_that_refers_to_much_data_is_sent_to_its_trial(opened: Callable[..., Any], tmp_path: Path) -> None:
    weights = bytes(3_000_000)
    with opened(start_of(lambda _config: {"size": len(weights)}, tmp_path), LOG) as channel:
        assert metrics_of(channel) == {"size": 3_000_000}


def test_the_temporary_files_of_a_trial_are_below_its_scratch_directory(tmp_path: Path) -> None:
    def says_where(_config: Mapping[str, object]) -> Mapping[str, object]:
        return {"temporary": tempfile.gettempdir()}

    with trial_process(start_of(says_where, tmp_path), LOG) as channel:
        assert metrics_of(channel) == {"temporary": str(tmp_path)}
