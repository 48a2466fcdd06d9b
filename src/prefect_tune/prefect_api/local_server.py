"""Start a Prefect server as a child process that ends with its parent, however the parent ends, or find the user's."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from typing import IO, Literal, TypeAlias

import prefect
from prefect.settings import get_current_settings

from prefect_tune.linux import owners_of_listeners

Services: TypeAlias = Literal["all", "few"]

_START_TIMEOUT = timedelta(minutes=3)  # the first start on an empty database runs every migration
_EXIT_TIMEOUT = timedelta(seconds=5)
_RECORDER = "prefect.server.services.task_run_recorder"


@dataclass(frozen=True)
class PrefectServer:
    """A started Prefect server, which may not be ready yet. It listens on the loopback interface."""

    url: str
    """The URL of its API, such as `http://127.0.0.1:41234/api`."""
    process: subprocess.Popen[bytes]

    def answers(self) -> bool:
        """Wait until the server is healthy; return False if it has ended, or is not after three minutes."""
        until = time.monotonic() + _START_TIMEOUT.total_seconds()
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while self.process.poll() is None and time.monotonic() < until:
            with suppress(OSError), opener.open(f"{self.url}/health", timeout=2):
                return True
            time.sleep(0.02)
        return False

    def end(self) -> None:
        """Terminate the server: it has 5 s to store the events that it has received, then it is killed."""
        self.process.terminate()
        try:
            self.process.wait(_EXIT_TIMEOUT.total_seconds())
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.process.communicate()  # reaps it and closes its stdin; not before, since that would end it at once


def start_prefect_server(
    environment: Mapping[str, str], log: IO[bytes] | None = None, services: Services = "all"
) -> PrefectServer:
    """Start a server on a free port.

    Args:
        environment: the environment of its process, with its settings.
        log: receives its output. Default: this process's output.
        services: "few" leaves out the UI, the scheduler and others that only a permanent server needs.
    """
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/api"
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, str(listening.fileno()), services],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=None if log is None else subprocess.STDOUT,
            env={**environment, "PREFECT_SERVER_UI_API_URL": url},  # its UI would call the API at port 4200
            pass_fds=(listening.fileno(),),
            start_new_session=True,  # Ctrl-C must not end it before its parent, which needs it to end in order
        )
        return PrefectServer(url, process)


def _serve(descriptor: int, services: str) -> None:
    """Serve on the inherited socket until a signal arrives or the parent process is gone."""
    import uvicorn

    threading.Thread(target=_end_with_parent, daemon=True).start()
    gc.disable()  # of the 4.0 s of CPU time that the import takes, 0.7 s is garbage collection that finds nothing
    create_app = import_module("prefect.server.api.server").create_app
    gc.freeze()
    gc.enable()

    server = uvicorn.Server(uvicorn.Config(create_app(ephemeral=services == "few", final=True), log_level="error"))
    logging.getLogger(_RECORDER).addFilter(lambda record: not (server.should_exit and is_cut_short(record)))
    server.run(sockets=[socket.socket(fileno=descriptor)])


def is_cut_short(record: logging.LogRecord) -> bool:
    """Whether the log record is about a batch that was cancelled: at shutdown it is written a moment later."""
    return record.exc_info is not None and isinstance(record.exc_info[1], asyncio.CancelledError)


def _end_with_parent() -> None:
    """End the server when its parent is gone: reading stdin then gives end of file, since nothing is written to it."""
    os.read(sys.stdin.fileno(), 1)  # not `sys.stdin.read`: Python cannot exit in order during that
    os.kill(os.getpid(), signal.SIGTERM)  # received events are stored first
    time.sleep(_EXIT_TIMEOUT.total_seconds())
    os._exit(0)  # a server that is still starting would handle the signal only after its start


# Find the Prefect server that this user runs at Prefect's default address: `prefect server start` in another terminal.
#
#     who listens there, says the kernel ──► only this user ──► healthy, and of this version of Prefect ──► use it
#               └─► another user, or nobody: nothing is sent
#
# Never: a request to a process of another user, which would answer too, and get what this user's runs hold; a wait of
# more than three seconds.

LOOPBACK = "127.0.0.1"
_TIMEOUT_SECONDS = 3.0
_MAX_ANSWER_BYTES = 64 * 1024


def find_own_server() -> str | None:
    """Return the URL of the API of this user's server where `prefect server start` listens; None if there is none.

    The port is the setting `PREFECT_SERVER_API_PORT`, 4200 by default. Only Linux says whose a socket is: elsewhere
    there is none.
    """
    settings = get_current_settings().server.api
    path = (settings.base_path or "/api").rstrip("/")
    until = time.monotonic() + _TIMEOUT_SECONDS
    with suppress(OSError):
        if (
            {*owners_of_listeners(settings.port)} == {os.geteuid()}
            and _read_answer(settings.port, f"{path}/health", until) == b"true"
            and _read_answer(settings.port, f"{path}/admin/version", until) == f'"{prefect.__version__}"'.encode()
        ):
            return f"http://{LOOPBACK}:{settings.port}{path}"
    return None


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


if __name__ == "__main__":
    _serve(int(sys.argv[1]), sys.argv[2])
