"""Find the Prefect server that this user runs at Prefect's default address: `prefect server start` in another terminal.

    who listens there, says the kernel ──► only this user ──► healthy, and of this version of Prefect ──► use it
              └─► another user, or nobody: nothing is sent

Never: a request to a process of another user, which would answer too, and get what this user's runs hold; a wait of
more than three seconds.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import prefect
from prefect.settings import get_current_settings

LOOPBACK = "127.0.0.1"
_TIMEOUT_SECONDS = 3.0
_MAX_ANSWER_BYTES = 64 * 1024
_LISTENING = "0A"  # in /proc/net/tcp
_TABLES = (("/proc/net/tcp", ("127.0.0.1", "0.0.0.0")), ("/proc/net/tcp6", ("::ffff:127.0.0.1", "::")))  # noqa: S104 - it is compared, and no socket is bound to it
"""The kernel's tables of sockets, each with the addresses that take connections to 127.0.0.1."""


def find_own_server() -> str | None:
    """Return the URL of the API of this user's server where `prefect server start` listens; None if there is none.

    The port is the setting `PREFECT_SERVER_API_PORT`, 4200 by default. Without `/proc/net/tcp` there is none.
    """
    settings = get_current_settings().server.api
    path = (settings.base_path or "/api").rstrip("/")
    until = time.monotonic() + _TIMEOUT_SECONDS
    with suppress(OSError):
        if (
            {*_owners_of_listeners(settings.port)} == {os.geteuid()}
            and _read_answer(settings.port, f"{path}/health", until) == b"true"
            and _read_answer(settings.port, f"{path}/admin/version", until) == f'"{prefect.__version__}"'.encode()
        ):
            return f"http://{LOOPBACK}:{settings.port}{path}"
    return None


def _owners_of_listeners(port: int) -> Iterator[int]:
    """Yield the user of each socket that may take connections to this port of 127.0.0.1."""
    for table, addresses in _TABLES:
        family = socket.AF_INET6 if ":" in addresses[0] else socket.AF_INET
        local = {f"{_kernel_hex(socket.inet_pton(family, address))}:{port:04X}" for address in addresses}
        for line in Path(table).read_text().splitlines()[1:] if Path(table).exists() else ():
            _, address, _, state, _, _, _, user, *_ = line.split()
            if address in local and state == _LISTENING:
                yield int(user)


def _kernel_hex(address: bytes) -> str:
    """Return an address as the kernel prints it: each word of four bytes as a number of this machine."""
    words = [address[start : start + 4] for start in range(0, len(address), 4)]
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)


def _read_answer(port: int, path: str, until: float) -> bytes | None:
    """Return the body of the answer to a GET request; None if its status is not 200, or it is too long.

    Raises:
        OSError: it has not ended at `until`, whatever the server does.
    """
    received = b""
    with socket.create_connection((LOOPBACK, port), timeout=max(until - time.monotonic(), 1e-3)) as connection:
        connection.sendall(f"GET {path} HTTP/1.0\r\nHost: {LOOPBACK}:{port}\r\n\r\n".encode())
        while len(received) <= _MAX_ANSWER_BYTES:
            connection.settimeout(max(until - time.monotonic(), 1e-3))  # 0 would be without a limit
            if not (part := connection.recv(4096)):
                head, _, body = received.partition(b"\r\n\r\n")
                return body if head.split(maxsplit=2)[1:2] == [b"200"] else None
            received += part
    return None
