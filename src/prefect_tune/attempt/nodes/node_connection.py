"""The TCP connection between node 0 and another node: each message is one JSON document, validated as it is read.

A node is lost when its connection is closed, or carries nothing for `SILENCE_TIMEOUT`. Never: `recv`, which unpickles.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from datetime import timedelta
from multiprocessing.connection import Connection

from prefect_tune.core.messages.node_messages import NodeAlive, NodeMessage, node_message
from prefect_tune.core.reasons import Reason, make_reason
from prefect_tune.runtime.message_stream import FROM_TRIAL_BYTES, MalformedMessage, MessageReader

ALIVE_INTERVAL = timedelta(seconds=5)
"""How often a node says that it is alive."""
SILENCE_TIMEOUT = timedelta(seconds=40)
_CLOSE_TIMEOUT = timedelta(seconds=20)
_ENVELOPE_BYTES = 1024


def read_from(connection: Connection) -> MessageReader[NodeMessage]:
    """Return a reader of the messages of another node."""
    return MessageReader(connection, node_message, limit_bytes=FROM_TRIAL_BYTES + _ENVELOPE_BYTES)


class NodeConnection:
    """Sends messages to another node in order, and hands over those that arrive, each in a thread."""

    def __init__(
        self, connection: Connection, node: int, receive: Callable[[NodeMessage], None], lose: Callable[[Reason], None]
    ) -> None:
        self._connection, self._node, self._receive, self._lose = connection, node, receive, lose
        self._messages: queue.SimpleQueue[NodeMessage | None] = queue.SimpleQueue()
        self._is_closing = threading.Event()
        with self._link() as link:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sender = self._start(self._send_messages)
        self._start(self._read_messages)

    def send(self, message: NodeMessage) -> None:
        """Queue a message; if the other node is gone it is dropped."""
        self._messages.put(message)

    def close(self) -> None:
        """Send what is queued, for 20 s at most, and hand over nothing more."""
        self._is_closing.set()
        self._messages.put(None)
        self._sender.join(_CLOSE_TIMEOUT.total_seconds())

    def _link(self) -> socket.socket:
        return socket.socket(fileno=os.dup(self._connection.fileno()))

    def _start(self, work: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=copy_context().run, args=(work,), name=f"node-{self._node}", daemon=True)
        thread.start()
        return thread

    def _next_message(self) -> NodeMessage | None:
        try:
            return self._messages.get(timeout=ALIVE_INTERVAL.total_seconds())
        except queue.Empty:
            return NodeAlive()

    def _send_messages(self) -> None:
        with suppress(OSError):  # the reader sees it too
            while (message := self._next_message()) is not None:
                self._connection.send_bytes(message.model_dump_json().encode())
            # The other side reads what was sent, and closes: if this side did, what still arrives would discard that.
            with self._link() as link:
                link.shutdown(socket.SHUT_WR)

    def _read_messages(self) -> None:
        reader = read_from(self._connection)
        reason = make_reason("node-silent", node=self._node, seconds=SILENCE_TIMEOUT.total_seconds())
        try:
            while (message := reader.read(SILENCE_TIMEOUT)) is not None:
                if not self._is_closing.is_set():
                    self._receive(message)
        except (EOFError, OSError):
            pass
        except MalformedMessage as error:
            reason = make_reason("node-unreadable", node=self._node, error=str(error))
        if not self._is_closing.is_set():
            self._lose(reason)
        self._messages.put(None)
        with suppress(OSError), self._link() as link:
            link.shutdown(socket.SHUT_RDWR)  # ends a send that waits
        self._sender.join()
        self._connection.close()
