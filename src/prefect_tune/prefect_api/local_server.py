"""Start a Prefect server as a child process that always exits with its parent, or find a server that this user runs."""

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

from prefect_tune.linux import iter_listener_owners

Services: TypeAlias = Literal["all", "few"]

_START_TIMEOUT = timedelta(minutes=3)  # long, because the first start on an empty database runs every migration
_EXIT_TIMEOUT = timedelta(seconds=5)
_RECORDER_MODULE = "prefect.server.services.task_run_recorder"


@dataclass(frozen=True)
class PrefectServer:
    """A started Prefect server, which may not be ready yet; it listens on the loopback interface."""

    url: str
    """The URL of its API, such as `http://127.0.0.1:41234/api`."""
    process: subprocess.Popen[bytes]

    def wait_until_healthy(self) -> bool:
        """Wait until the server is healthy; return False if it exits, or is not healthy after three minutes."""
        deadline = time.monotonic() + _START_TIMEOUT.total_seconds()
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while self.process.poll() is None and time.monotonic() < deadline:
            with suppress(OSError), opener.open(f"{self.url}/health", timeout=2):
                return True
            time.sleep(0.02)
        return False

    def terminate(self) -> None:
        """Terminate the server, which has 5 s to store the received events before it is killed."""
        self.process.terminate()
        try:
            self.process.wait(_EXIT_TIMEOUT.total_seconds())
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.process.communicate()  # closes the server's stdin; closing it earlier would end the server


def start_prefect_server(
    environment: Mapping[str, str], log: IO[bytes] | None = None, services: Services = "all"
) -> PrefectServer:
    """Start a server on a free port.

    Args:
        environment: the environment variables of the server process, including its Prefect settings.
        log: receives the output of the server. Default: the output of this process.
        services: "few" omits the UI, the scheduler and other services that only a permanent server needs.
    """
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/api"
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, str(listening.fileno()), services],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=None if log is None else subprocess.STDOUT,
            env={**environment, "PREFECT_SERVER_UI_API_URL": url},  # by default, the UI would call the API at port 4200
            pass_fds=(listening.fileno(),),
            start_new_session=True,  # Ctrl-C must not end the server, which its parent needs until the end
        )
        return PrefectServer(url, process)


def _run_server(descriptor: int, services: str) -> None:
    """Serve on the inherited socket until a signal arrives or the parent process exits."""
    import uvicorn

    threading.Thread(target=_exit_with_parent, daemon=True).start()
    gc.disable()  # garbage collection finds nothing during the import, but takes 0.7 s of its 4.0 s CPU time
    create_app = import_module("prefect.server.api.server").create_app
    gc.freeze()
    gc.enable()

    server = uvicorn.Server(uvicorn.Config(create_app(ephemeral=services == "few", final=True), log_level="error"))
    recorder_log = logging.getLogger(_RECORDER_MODULE)
    recorder_log.addFilter(lambda record: not (server.should_exit and reports_cancelled_batch(record)))
    server.run(sockets=[socket.socket(fileno=descriptor)])


def reports_cancelled_batch(record: logging.LogRecord) -> bool:
    """Return whether a record reports a cancelled batch; at its shutdown, the server writes that batch nevertheless."""
    return record.exc_info is not None and isinstance(record.exc_info[1], asyncio.CancelledError)


def _exit_with_parent() -> None:
    """End the server as soon as its stdin ends. The parent writes nothing to stdin; the parent's exit closes stdin."""
    os.read(sys.stdin.fileno(), 1)  # not `sys.stdin.read`, during which Python cannot shut down cleanly
    os.kill(os.getpid(), signal.SIGTERM)  # the server first stores the received events
    time.sleep(_EXIT_TIMEOUT.total_seconds())
    os._exit(0)  # ends a server that is still starting, since it would handle the signal only after its start


# Find the Prefect server that this user runs at Prefect's default address with `prefect server start`.
#
#     ask the kernel who listens there ──► this user only ──► healthy, and the same version of Prefect ──► use it
#               └─► another user, or no process: send nothing
#
# No request is sent to another user's process, since that process could answer and then receive the data of this user's
# runs. All this takes at most three seconds.

LOOPBACK = "127.0.0.1"
_FIND_TIMEOUT_SECONDS = 3.0
_MAX_RESPONSE_BYTES = 64 * 1024


def find_user_server() -> str | None:
    """Return the API URL of this user's server at the address of `prefect server start`; None if there is none.

    The port is the setting `PREFECT_SERVER_API_PORT`, 4200 by default. On systems other than Linux, the result is None,
    because these systems do not tell which user a socket belongs to.
    """
    settings = get_current_settings().server.api
    path = (settings.base_path or "/api").rstrip("/")
    deadline = time.monotonic() + _FIND_TIMEOUT_SECONDS
    with suppress(OSError):
        if (
            {*iter_listener_owners(settings.port)} == {os.geteuid()}
            and _fetch_body(settings.port, f"{path}/health", deadline) == b"true"
            and _fetch_body(settings.port, f"{path}/admin/version", deadline) == f'"{prefect.__version__}"'.encode()
        ):
            return f"http://{LOOPBACK}:{settings.port}{path}"
    return None


def _fetch_body(port: int, path: str, deadline: float) -> bytes | None:
    """Return the response body of a GET request; None if the status is not 200, or if the response is too long.

    Raises:
        OSError: the response is incomplete at `deadline`, even if the server still sends bytes.
    """
    received = b""
    with socket.create_connection((LOOPBACK, port), timeout=max(deadline - time.monotonic(), 1e-3)) as connection:
        connection.sendall(f"GET {path} HTTP/1.0\r\nHost: {LOOPBACK}:{port}\r\n\r\n".encode())
        while len(received) <= _MAX_RESPONSE_BYTES:
            connection.settimeout(max(deadline - time.monotonic(), 1e-3))  # 0 would mean no timeout
            if not (part := connection.recv(4096)):
                head, _, body = received.partition(b"\r\n\r\n")
                return body if head.split(maxsplit=2)[1:2] == [b"200"] else None
            received += part
    return None


if __name__ == "__main__":
    _run_server(int(sys.argv[1]), sys.argv[2])
