"""Read whole, validated messages of bounded size from a socket.

Frames are those of `multiprocessing.connection`: four bytes of length (or -1 and eight bytes more), then the message,
which is one JSON object of `prefect_tune.core.messages.process_messages`.
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
from prefect_tune.core.messages.process_messages import FromTrial, StartReceived, ToTrial, to_trial

FROM_TRIAL_BYTES = 64 * 1024**2
"""The longest message of a trial: the metrics of a step, or an error with its traceback."""
_SHORT, _LONG = struct.Struct("!i"), struct.Struct("!Q")
_CHUNK_BYTES = 1024**2
_SHOWN_BYTES = 60
_Message = TypeVar("_Message")


class MalformedMessage(Exception):
    """Invalid bytes arrived. Nothing more can be read from that socket."""


class MessageReader(Generic[_Message]):
    """The reading half of a connection; not thread-safe.

    It never reads beyond a message, so another reader can take over after one. If only a part of a message arrives,
    `read` returns after `patience`, and the next call continues with it.
    """

    def __init__(self, connection: Connection, kind: TypeAdapter[_Message], *, limit_bytes: int) -> None:
        self._connection = connection
        self._kind = kind
        self._limit_bytes = limit_bytes
        self._received = bytearray()
        self._poll = select.poll()
        self._poll.register(connection.fileno(), select.POLLIN)

    def read(self, patience: timedelta | None = None) -> _Message | None:
        """Return the next message; None if it has not arrived completely after `patience` (None: no limit).

        Raises:
            EOFError: the other side has closed the connection.
            OSError: the connection is broken, or closed on this side.
            MalformedMessage: the bytes that arrived are not a valid message.
        """
        ends = None if patience is None else time.monotonic() + patience.total_seconds()
        while missing := self._missing_bytes():
            left_ms = None if ends is None else max(0.0, ends - time.monotonic()) * 1000
            if not self._poll.poll(left_ms):
                return None
            data = os.read(self._connection.fileno(), min(missing, _CHUNK_BYTES))
            if not data:
                raise EOFError("the other side has closed the connection")
            self._received += data
        start = _SHORT.size if self._received[:1] != b"\xff" else _SHORT.size + _LONG.size
        try:
            message = self._kind.validate_json(bytes(memoryview(self._received)[start:]))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            raise self._malformed(f"expected a message of this prefect-tune: {first['msg']}") from None
        self._received = bytearray()
        return message

    def _missing_bytes(self) -> int:
        """Return how many bytes the header, and then the message, still lack."""
        start = _SHORT.size
        if (missing := start - len(self._received)) > 0:
            return missing
        (length,) = _SHORT.unpack_from(self._received)
        if length == -1:
            start += _LONG.size
            if (missing := start - len(self._received)) > 0:
                return missing
            (length,) = _LONG.unpack_from(self._received, _SHORT.size)
        if not 0 < length <= self._limit_bytes:
            raise self._malformed(f"expected a length of at most {self._limit_bytes} bytes, found {length}")
        if not b"{".startswith(self._received[start : start + 1]):
            raise self._malformed("expected a JSON object")
        return start + int(length) - len(self._received)

    def _malformed(self, expected: str) -> MalformedMessage:
        shown = bytes(self._received[:_SHOWN_BYTES])
        return MalformedMessage(f"{expected}; found {len(self._received)} bytes that begin with {shown!r}")


# The trial's end of its connection to the supervisor; closed in processes that the trial forks or executes.

_TO_TRIAL_BYTES: Final = 8 * 1024**3  # the start message holds the pickled trainable, with all that it refers to


class SupervisorConnection:
    """Sends and receives whole messages.

    Processes that the trainable starts cannot use it: a forked child closes its copy, and an executed program does not
    inherit the descriptor.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._reader = MessageReader(connection, to_trial, limit_bytes=_TO_TRIAL_BYTES)
        os.set_inheritable(connection.fileno(), False)  # noqa: FBT003 - takes no keyword arguments
        _open_connections.add(connection)

    def has_message(self) -> bool:
        """Return whether a part of the next message, or end of file, has arrived."""
        return self._connection.poll()

    def receive(self) -> ToTrial:
        """Wait for the next message.

        Raises:
            EOFError: the supervisor is gone.
            OSError: the supervisor is gone, or the connection was closed on this side.
            MalformedMessage: the bytes that arrived are not a valid message.
        """
        try:
            while (message := self._reader.read()) is None:
                pass
        except MalformedMessage as error:
            raise MalformedMessage(f"from the trial's supervisor: {error}") from None
        return message

    def send(self, message: FromTrial | StartReceived) -> None:
        """Send a message.

        Raises:
            InvalidInput: it is longer than 64 MiB.
        """
        data = message.model_dump_json().encode()
        if len(data) > FROM_TRIAL_BYTES:
            raise InvalidInput(
                f"a trial's {message.type} message: expected at most {FROM_TRIAL_BYTES} bytes of metrics or text, "
                f"found {len(data)}; store large values in the checkpoint, or in a file in pt.get_trial().directory"
            )
        self._connection.send_bytes(data)


_open_connections: WeakSet[Connection] = WeakSet()


def _close_connections() -> None:
    for connection in list(_open_connections):
        connection.close()


os.register_at_fork(after_in_child=_close_connections)
