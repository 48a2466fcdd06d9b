"""A trial's death is detected even while a process that it started keeps the channel open; its temporary files."""

from __future__ import annotations

import logging
import socket
import struct
import sys
import tempfile
from collections.abc import Iterator, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from prefect_tune.core.checkpoints.cadence import Cadence
from prefect_tune.core.experiment.trial_stoppers import Never
from prefect_tune.core.messages.process_messages import FromTrial, GoOn, Start, StepDone, TrialEnded
from prefect_tune.supervisor.processes.process_channel import TrialChannel, trial_process
from prefect_tune.supervisor.trial_spec import pickled_or_path

SOON = timedelta(seconds=0.05)


class Body:
    """Trains until it is ended."""

    alive = True

    def is_alive(self) -> bool:
        return self.alive

    def end(self) -> str:
        return "ended by SIGKILL"


@pytest.fixture
def wire() -> Iterator[tuple[Connection, Connection]]:
    """Both ends; the trial's end stays open, as a process that it forked would keep it."""
    ours, theirs = socket.socketpair()
    with Connection(ours.detach()) as near, Connection(theirs.detach()) as far:
        yield near, far


def test_a_dead_trial_is_heard_of_although_what_it_forked_holds_the_channel_open(
    wire: tuple[Connection, Connection],
) -> None:
    near, far = wire
    body = Body()
    channel = TrialChannel(near, body)
    assert channel.receive(SOON) is None
    last = TrialEnded(reason="done")
    far.send_bytes(last.model_dump_json().encode())
    body.alive = False
    assert channel.receive(SOON) == last
    with pytest.raises(EOFError):
        channel.receive(SOON)


def test_what_a_trial_said_in_the_moment_of_its_death_is_heard_first(wire: tuple[Connection, Connection]) -> None:
    """The message arrives after the channel was empty, and before the trial is found dead."""
    near, far = wire
    last = TrialEnded(reason="done")

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


def test_an_answer_that_comes_as_the_channel_closes_need_not_be_heard(wire: tuple[Connection, Connection]) -> None:
    near, _ = wire
    channel = TrialChannel(near, Body())
    near.close()  # as another thread does that ends the trial's process
    channel.tell(GoOn(milestone=None))


def test_the_temporary_files_of_a_trial_are_below_its_scratch_directory(tmp_path: Path) -> None:
    def says_where(_config: Mapping[str, object]) -> Mapping[str, object]:
        return {"temporary": tempfile.gettempdir()}

    start = Start(
        experiment="e",
        trial="t",
        attempt=1,
        trainable=pickled_or_path(says_where),
        stopper=pickled_or_path(Never()),
        import_path=tuple(sys.path),
        config={},
        directory=str(tmp_path),
        staging=str(tmp_path),
        temporary=str(tmp_path),
        restored=None,
        from_step=0,
        trained_seconds=0,
        curve=(),
        cadence=Cadence(),
        overlap=False,
    )
    with trial_process(start, logging.getLogger("trial")) as channel:
        (step_done,) = [each for each in _all_of(channel) if isinstance(each, StepDone)]
    assert step_done.report.metrics == {"temporary": str(tmp_path)}


def _all_of(channel: TrialChannel) -> Iterator[FromTrial]:
    while True:
        message = channel.receive(timedelta(seconds=60))
        if message is not None:
            yield message
        if isinstance(message, TrialEnded):
            return
