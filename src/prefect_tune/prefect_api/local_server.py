"""Start a Prefect server as a child process that ends with its parent, however the parent ends."""

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from http import HTTPStatus
from importlib import import_module
from typing import IO, TYPE_CHECKING, Literal, TypeAlias
from urllib.error import URLError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

Services: TypeAlias = Literal["all", "few"]

_PATIENCE = timedelta(minutes=3)  # the first start on an empty database runs every migration
_GOODBYE = timedelta(seconds=5)
_AT_ONCE_SECONDS = 1.0
_RECORDER = "prefect.server.services.task_run_recorder"


@dataclass(frozen=True)
class PrefectServer:
    """A started Prefect server, which may not be ready yet. It listens on the loopback interface."""

    url: str
    """The URL of its API, such as `http://127.0.0.1:41234/api`."""
    process: subprocess.Popen[bytes]

    def answers(self) -> bool:
        """Wait until the server is healthy; return False if it has ended, or is not after three minutes."""
        until = time.monotonic() + _PATIENCE.total_seconds()
        while self.process.poll() is None and time.monotonic() < until:
            if _is_healthy(self.url):
                return True
            time.sleep(0.02)
        return False

    def end(self) -> None:
        """Terminate the server: it has 5 s to store the events that it has received, then it is killed."""
        self.process.terminate()
        try:
            self.process.wait(_GOODBYE.total_seconds())
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


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False


def _serve(descriptor: int, services: str) -> None:
    """Serve on the inherited socket until a signal arrives or the parent process is gone."""
    import uvicorn

    threading.Thread(target=_end_with_parent, daemon=True).start()
    gc.disable()  # of the 4.0 s of CPU time that the import takes, 0.7 s is garbage collection that finds nothing
    create_app = import_module("prefect.server.api.server").create_app
    gc.freeze()
    gc.enable()

    def application() -> ASGIApp:
        return RetryOn503Middleware(create_app(ephemeral=services == "few", final=True))

    server = uvicorn.Server(uvicorn.Config(application, factory=True, log_level="error"))
    logging.getLogger(_RECORDER).addFilter(lambda record: not (server.should_exit and is_cut_short(record)))
    server.run(sockets=[socket.socket(fileno=descriptor)])


def is_cut_short(record: logging.LogRecord) -> bool:
    """Whether the log record is about a batch that was cancelled: at shutdown it is written a moment later."""
    return record.exc_info is not None and isinstance(record.exc_info[1], asyncio.CancelledError)


class RetryOn503Middleware:
    """ASGI middleware that retries a request if the application answers 503 within a second.

    SQLite rejects a write at once if the transaction has read before another one wrote. After a start, while old
    events are deleted, this happens to every fourth flow run (with 20,000 old events, on a busy machine, to two of the
    first four). The request has had no effect. Prefect's client would retry it too, but 2 s later.

    To ask upstream: that the server begins writing transactions with `BEGIN IMMEDIATE`, or the client's first pause.
    """

    def __init__(self, app: ASGIApp, pauses_seconds: Sequence[float] = (0.02, 0.05, 0.1, 0.2, 0.4)) -> None:
        self._app = app
        self._pauses_seconds = pauses_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = await _whole_request(receive)
        for pause_seconds in (*self._pauses_seconds, None):
            began = time.monotonic()
            answer, error = await self._answer(scope, request, receive)
            is_busy = bool(answer) and answer[0].get("status") == HTTPStatus.SERVICE_UNAVAILABLE
            if pause_seconds is None or not is_busy or time.monotonic() - began >= _AT_ONCE_SECONDS:
                break
            await asyncio.sleep(pause_seconds)
        for message in answer:
            await send(message)
        if error:
            raise error  # so that the server logs it

    async def _answer(
        self, scope: Scope, request: Sequence[Message], receive: Receive
    ) -> tuple[Sequence[Message], Exception | None]:
        unread = list(request)
        answer: list[Message] = []

        async def read() -> Message:
            return unread.pop(0) if unread else await receive()

        async def write(message: Message) -> None:
            answer.append(message)

        try:
            await self._app(dict(scope), read, write)
        except Exception as error:  # noqa: BLE001  Starlette sends an error response and raises too
            return answer, error
        return answer, None


async def _whole_request(receive: Receive) -> Sequence[Message]:
    """Read a whole request into memory; requests to this server are small."""
    messages = [await receive()]
    while messages[-1].get("more_body"):
        messages.append(await receive())
    return messages


def _end_with_parent() -> None:
    """End the server when its parent is gone: reading stdin then gives end of file, since nothing is written to it."""
    os.read(sys.stdin.fileno(), 1)  # not `sys.stdin.read`: Python cannot exit in order during that
    os.kill(os.getpid(), signal.SIGTERM)  # received events are stored first
    time.sleep(_GOODBYE.total_seconds())
    os._exit(0)  # a server that is still starting would handle the signal only after its start


if __name__ == "__main__":
    _serve(int(sys.argv[1]), sys.argv[2])
