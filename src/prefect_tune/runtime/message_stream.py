"""Read complete, validated messages of bounded size from a socket.

A message is sent as its length, followed by one JSON object (see `prefect_tune.core.messages.process_messages`). The
length has four bytes; if their value is -1, the next eight bytes are the length, as in `multiprocessing.connection`.
"""

from __future__ import annotations

import os
import select
import struct
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Final, Generic, TypeVar
from weakref import WeakSet

from pydantic import TypeAdapter, ValidationError

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.messages.process_messages import FromTrial, StartReceived, ToTrial, to_trial_adapter

MAX_TRIAL_MESSAGE_BYTES = 64 * 1024**2
"""The size limit of a message from a trial, such as the metrics of a step, or an error with its traceback."""
_SHORT_LENGTH, _LONG_LENGTH = struct.Struct("!i"), struct.Struct("!Q")
_CHUNK_BYTES = 1024**2
_MAX_SHOWN_BYTES = 60
_Message = TypeVar("_Message")


class MalformedMessage(Exception):
    """Invalid bytes arrived; the socket cannot be read any further."""


class MessageReader(Generic[_Message]):
    """The reading half of a connection; not thread-safe.

    It never reads beyond the end of a message, so another reader can take over between two messages. If only a part of
    a message has arrived after `timeout`, `read` returns None, and the next `read` continues with the rest.
    """

    def __init__(self, connection: Connection, adapter: TypeAdapter[_Message], *, limit_bytes: int) -> None:
        self._connection = connection
        self._adapter = adapter
        self._limit_bytes = limit_bytes
        self._received = bytearray()
        self._poller = select.poll()
        self._poller.register(connection.fileno(), select.POLLIN)

    def read(self, timeout: timedelta | None = None) -> _Message | None:
        """Return the next message; None if it is incomplete after `timeout`. By default, wait until it is complete.

        Raises:
            EOFError: the other side has closed the connection.
            OSError: the connection is broken, or closed on this side.
            MalformedMessage: the received bytes are not a valid message.
        """
        deadline = None if timeout is None else time.monotonic() + timeout.total_seconds()
        while missing := self._count_missing_bytes():
            left_ms = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
            if not self._poller.poll(left_ms):
                return None
            data = os.read(self._connection.fileno(), min(missing, _CHUNK_BYTES))
            if not data:
                raise EOFError("the other side has closed the connection")
            self._received += data
        start = _SHORT_LENGTH.size if self._received[:1] != b"\xff" else _SHORT_LENGTH.size + _LONG_LENGTH.size
        try:
            message = self._adapter.validate_json(bytes(memoryview(self._received)[start:]))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            raise self._message_error(f"expected a prefect-tune message: {first['msg']}") from None
        self._received = bytearray()
        return message

    def _count_missing_bytes(self) -> int:
        """Return how many bytes are missing: of the header, or of the message if the header is complete."""
        start = _SHORT_LENGTH.size
        if (missing := start - len(self._received)) > 0:
            return missing
        (length,) = _SHORT_LENGTH.unpack_from(self._received)
        if length == -1:
            start += _LONG_LENGTH.size
            if (missing := start - len(self._received)) > 0:
                return missing
            (length,) = _LONG_LENGTH.unpack_from(self._received, _SHORT_LENGTH.size)
        if not 0 < length <= self._limit_bytes:
            raise self._message_error(f"expected a length of at most {self._limit_bytes} bytes, found {length}")
        if not b"{".startswith(self._received[start : start + 1]):
            raise self._message_error("expected a JSON object")
        return start + int(length) - len(self._received)

    def _message_error(self, expected: str) -> MalformedMessage:
        shown = bytes(self._received[:_MAX_SHOWN_BYTES])
        return MalformedMessage(f"{expected}; found {len(self._received)} bytes that begin with {shown!r}")


# The trial's end of the connection to the supervisor.

_MAX_SUPERVISOR_MESSAGE_BYTES: Final = 8 * 1024**3  # large, because the start message contains the pickled trainable


class SupervisorConnection:
    """The trial's connection to its supervisor; sends and receives complete messages.

    Processes that the trainable starts cannot use the connection: a forked child closes its copy, and an executed
    program does not inherit the descriptor.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._reader = MessageReader(connection, to_trial_adapter, limit_bytes=_MAX_SUPERVISOR_MESSAGE_BYTES)
        os.set_inheritable(connection.fileno(), False)  # noqa: FBT003 - takes no keyword arguments
        _open_connections.add(connection)

    def is_readable(self) -> bool:
        """Return whether bytes of the next message have arrived, or the supervisor has closed the connection."""
        return self._connection.poll()

    def receive(self) -> ToTrial:
        """Wait for the next message, and return it.

        Raises:
            EOFError: the supervisor has exited.
            OSError: the supervisor has exited, or the connection was closed on this side.
            MalformedMessage: the received bytes are not a valid message.
        """
        try:
            while (message := self._reader.read()) is None:
                pass
        except MalformedMessage as error:
            raise MalformedMessage(f"from the trial's supervisor: {error}") from None
        return message

    def send(self, message: FromTrial | StartReceived) -> None:
        """Send a message. Raise InvalidInput if it is longer than 64 MiB."""
        data = message.model_dump_json().encode()
        if len(data) > MAX_TRIAL_MESSAGE_BYTES:
            raise InvalidInput(
                f"a trial's {message.type} message: expected at most {MAX_TRIAL_MESSAGE_BYTES} bytes of metrics or "
                f"text, found {len(data)}; store large values in the checkpoint or a file in pt.get_trial().directory"
            )
        self._connection.send_bytes(data)


_open_connections: WeakSet[Connection] = WeakSet()


def _close_connections_in_child() -> None:
    for connection in list(_open_connections):
        connection.close()


os.register_at_fork(after_in_child=_close_connections_in_child)
