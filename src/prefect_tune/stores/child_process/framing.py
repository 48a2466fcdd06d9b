"""The protocol between an `IsolatedStore` and its child: frames of one JSON object and raw bytes."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from typing import Any, TypeAlias

from prefect_tune.core.storage.object_store import Buffer
from prefect_tune.stores.deadline import Deadline

Head: TypeAlias = Mapping[str, Any]
_LENGTHS = struct.Struct(">QQ")
_LONGEST_WAIT_SECONDS = 86_400.0  # of one system call; without a deadline the wait is repeated


def send(channel: socket.socket, head: Head, body: Buffer = b"", *, deadline: Deadline) -> None:
    """Send one frame.

    Raises:
        TimeoutError: the deadline passed; a frame may be half sent, so the channel cannot be used again.
        OSError: the other side is gone.
    """
    text = json.dumps(head).encode()
    raw = memoryview(body).cast("B")
    _wait_until(channel, deadline)
    channel.sendall(_LENGTHS.pack(len(text), len(raw)) + text)
    while raw:
        _wait_until(channel, deadline)
        raw = raw[channel.send(raw) :]


def receive(channel: socket.socket, *, deadline: Deadline) -> tuple[Head, bytearray]:
    """Return the next frame.

    Raises:
        TimeoutError: the deadline passed; a frame may be half read, so the channel cannot be used again.
        EOFError: the other side closed.
        OSError: the other side is gone.
    """
    head_length, body_length = _LENGTHS.unpack(_exactly(channel, _LENGTHS.size, deadline))
    head = json.loads(_exactly(channel, head_length, deadline))
    return head, _exactly(channel, body_length, deadline)


def _exactly(channel: socket.socket, length: int, deadline: Deadline) -> bytearray:
    data = bytearray(length)
    view = memoryview(data)
    while view:
        _wait_until(channel, deadline)
        count = channel.recv_into(view)
        if not count:
            raise EOFError("the other side closed the channel")
        view = view[count:]
    return data


def _wait_until(channel: socket.socket, deadline: Deadline) -> None:
    left = deadline.remaining_seconds
    if not left:
        raise TimeoutError("the deadline has passed")
    channel.settimeout(min(left, _LONGEST_WAIT_SECONDS))
