"""Messages on a socket arrive whole and in order, however their bytes are split; invalid bytes are rejected."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection

import pytest

from prefect_tune.core.journal_events import TrialFinished
from prefect_tune.core.messages.process_messages import (
    CheckpointSaved,
    FromTrial,
    StepDone,
    TrainingEnded,
    from_trial_adapter,
)
from prefect_tune.core.values import StepReport
from prefect_tune.runtime.message_stream import MalformedMessage, MessageReader, SupervisorConnection

Ends = tuple[Connection, socket.socket]
Reader = MessageReader[FromTrial]
_NO_WAIT = timedelta(0)
_SHORT_WAIT = timedelta(seconds=0.05)
_LIMIT_BYTES = 1024**2


@pytest.fixture
def ends() -> Iterator[Ends]:
    """The reader's end of a socket pair, and the writer's end."""
    ours, theirs = socket.socketpair()
    with Connection(ours.detach()) as near, theirs:
        yield near, theirs


@pytest.fixture
def reader(ends: Ends) -> Reader:
    return MessageReader(ends[0], from_trial_adapter, limit_bytes=_LIMIT_BYTES)


def frame_message(message: FromTrial | CheckpointSaved) -> bytes:
    data = message.model_dump_json().encode()
    return struct.pack("!i", len(data)) + data


LAST = TrainingEnded(outcome=TrialFinished(trial="t", reason="dönë"))


def test_a_message_that_comes_byte_by_byte_is_read_when_it_is_whole(ends: Ends, reader: Reader) -> None:
    for _ in range(2):
        *head, last = frame_message(LAST)
        for byte in head:
            ends[1].sendall(bytes([byte]))
            assert reader.read(_NO_WAIT) is None
        ends[1].sendall(bytes([last]))
        assert reader.read(_NO_WAIT) == LAST


def test_a_message_that_stops_half_way_holds_up_its_reader_for_no_longer_than_it_said(
    ends: Ends, reader: Reader
) -> None:
    ends[1].sendall(frame_message(LAST)[:-1])
    start = time.monotonic()
    assert reader.read(_SHORT_WAIT) is None
    assert time.monotonic() - start < 30
    ends[1].close()
    with pytest.raises(EOFError):
        reader.read(_SHORT_WAIT)


def test_no_byte_is_read_beyond_a_message(ends: Ends) -> None:
    """The process may serve another trial next, whose supervisor uses a new reader."""
    ends[1].sendall(frame_message(LAST) * 3)
    for _ in range(3):
        assert MessageReader(ends[0], from_trial_adapter, limit_bytes=_LIMIT_BYTES).read(_NO_WAIT) == LAST


def test_a_message_may_be_as_long_as_the_limit_and_no_longer(ends: Ends, reader: Reader) -> None:
    def make_step(text: str) -> StepDone:
        return StepDone(report=StepReport(step=1, metrics={"text": text}, trained_seconds=0.0))

    def make_step_of_length(length: int) -> StepDone:
        return make_step("x" * (length - len(make_step("").model_dump_json())))

    sending = threading.Thread(target=ends[1].sendall, args=(frame_message(make_step_of_length(_LIMIT_BYTES)),))
    sending.start()
    assert reader.read(timedelta(seconds=60)) == make_step_of_length(_LIMIT_BYTES)
    sending.join()
    ends[1].sendall(frame_message(make_step_of_length(_LIMIT_BYTES + 1))[:100])
    with pytest.raises(MalformedMessage, match="expected a length of at most 1048576 bytes, found 1048577"):
        reader.read(_NO_WAIT)


def test_the_long_form_of_a_length_is_understood(ends: Ends, reader: Reader) -> None:
    """`multiprocessing` writes the long form in front of messages of two gigabytes and more."""
    data = LAST.model_dump_json().encode()
    ends[1].sendall(struct.pack("!iQ", -1, len(data)) + data)
    assert reader.read(_NO_WAIT) == LAST


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"hello, world\n", "expected a length of at most"),
        (b"\x00\x00\x00\x00", "expected a length of at most"),
        (b"\x80\x00\x00\x00", "expected a length of at most"),
        (struct.pack("!iQ", -1, 2**60), "expected a length of at most"),
        (struct.pack("!i", 1000) + frame_message(LAST), "expected a JSON object"),
        (struct.pack("!i", 5) + b"hello", "expected a JSON object"),
        (struct.pack("!i", 5) + b'{"x":', "expected a prefect-tune message: "),
        (struct.pack("!i", 16) + b'{"type":"other"}', "expected a prefect-tune message: "),
        (struct.pack("!i", 28) + b'{"type":"milestone-reached"}', "expected a prefect-tune message: Field required"),
        (struct.pack("!i", 4) + b"{\xff\xfe}", "expected a prefect-tune message: "),
    ],
)
def test_bytes_that_are_no_message_are_refused_as_soon_as_they_are_there(
    ends: Ends, reader: Reader, data: bytes, expected: str
) -> None:
    ends[1].sendall(data)
    for _ in range(2):
        with pytest.raises(MalformedMessage) as error:
            reader.read(_NO_WAIT)
        assert str(error.value).startswith(expected)
        assert len(str(error.value)) < 500


def test_a_trial_that_reads_what_is_no_message_says_that_its_supervisor_sent_it(ends: Ends) -> None:
    connection = SupervisorConnection(ends[0])
    ends[1].sendall(frame_message(CheckpointSaved(step=1)))
    assert connection.receive() == CheckpointSaved(step=1)
    ends[1].sendall(frame_message(LAST))
    with pytest.raises(MalformedMessage, match="from the trial's supervisor: expected a prefect-tune message"):
        connection.receive()


def test_a_report_that_is_too_long_is_refused_before_it_is_sent(ends: Ends) -> None:
    step = StepDone(report=StepReport(step=1, metrics={"x": "y" * 64 * 1024**2}, trained_seconds=0.0))
    with pytest.raises(ValueError, match=r"expected at most 67108864 bytes .*store large values in the checkpoint"):
        SupervisorConnection(ends[0]).send(step)
    ends[1].setblocking(False)
    with pytest.raises(BlockingIOError):
        ends[1].recv(1)
