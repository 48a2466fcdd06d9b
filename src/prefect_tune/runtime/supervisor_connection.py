"""The trial's end of its connection to the supervisor; closed in processes that the trial forks or executes."""

from __future__ import annotations

import os
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Final
from weakref import WeakSet

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.messages.process_messages import IMPORTED, FromTrial, StartReceived, ToTrial, to_trial
from prefect_tune.runtime.message_stream import FROM_TRIAL_BYTES, MalformedMessage, MessageReader

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

    def send_imported(self) -> None:
        """Send that a `Preload` is done, to a pool that waits for it; no message of a trial precedes it."""
        with suppress(OSError):  # the supervisor is gone
            self._connection.send_bytes(IMPORTED)


_open_connections: WeakSet[Connection] = WeakSet()


def _close_in_a_forked_child() -> None:
    for each in list(_open_connections):
        each.close()


os.register_at_fork(after_in_child=_close_in_a_forked_child)
