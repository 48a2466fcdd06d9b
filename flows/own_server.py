"""Flows that bring a Prefect server of their own where none is set up, as Prefect does, and sooner.

Prefect loads the whole server into the process that only wants to speak with it: half of what a script waits for
before its first trial, 80 MB that it keeps, and a quarter of all that a short search computes. And it gives the
server 20 s to start, which the first start on a machine, with all its migrations, may not keep.
"""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import prefect
from prefect import Flow
from prefect.context import refresh_global_settings_context
from prefect.logging import get_logger
from prefect.settings import get_current_settings

if TYPE_CHECKING:
    from typing import Self

__all__ = ["FlowWithServer", "flow_with_server"]

_PATIENCE = timedelta(minutes=3)
_GOODBYE = timedelta(seconds=5)
_PREFECTS_OWN = "prefect.server.api.server"
_guard = threading.Lock()
_P = ParamSpec("_P")
_R = TypeVar("_R")


class FlowWithServer(Flow[_P, _R]):
    """A flow that can be called where no API is set up: it starts a server, which serves until the process ends."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Run it, as Prefect does."""
        _have_server()
        return super().__call__(*args, **options)

    def with_options(self, **options: Any) -> Self:
        """Return it with other options, as Prefect does."""
        other: Any = super().with_options(**options)
        other.__class__ = type(self)  # Prefect makes a plain one
        return other  # type: ignore[no-any-return]  # it is of this class now


def flow_with_server(**options: Any) -> Callable[[Callable[_P, _R]], FlowWithServer[_P, _R]]:
    """Make a flow of a function, as `prefect.flow` does."""
    return lambda function: FlowWithServer(function, **options)


def _have_server() -> None:
    """Start a server unless one is set up, none is wanted, or Prefect has loaded its own here already."""
    with _guard:
        settings = get_current_settings()
        if settings.api.url or not settings.server.ephemeral.enabled or _PREFECTS_OWN in sys.modules:
            return
        port = _free_port()
        url = f"http://127.0.0.1:{port}/api"
        get_logger("prefect_tune").info("Starting a Prefect server for this process at %s", url)
        server = _start(port)
        atexit.register(_end, server)
        if _answers(server, port):
            os.environ["PREFECT_API_URL"] = url  # child processes find it too
            refresh_global_settings_context()
        else:
            _end(server)  # Prefect starts its own, and says what is wrong


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _start(port: int) -> subprocess.Popen[bytes]:
    """As `prefect.server.api.server.SubprocessASGIServer`, that cannot be imported without all the rest."""
    command = [sys.executable, "-m", "uvicorn", "--app-dir", str(prefect.__module_path__.parent)]
    return subprocess.Popen(
        [*command, "--factory", f"{_PREFECTS_OWN}:create_app", *_UVICORN, "--port", str(port)],
        env={
            **_IN_BATCHES,
            **os.environ,
            **_EPHEMERAL,
            **get_current_settings().to_environment_variables(exclude_unset=True),
        },
    )


_UVICORN = ("--host", "127.0.0.1", "--log-level", "error", "--lifespan", "on")
# By default each of a task run's three states is a transaction; a second is soon enough for who looks at the UI.
_IN_BATCHES = {
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
}
_EPHEMERAL = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}


def _answers(server: subprocess.Popen[bytes], port: int) -> bool:
    """Wait until it does: it listens only when it is ready."""
    until = time.monotonic() + _PATIENCE.total_seconds()
    while server.poll() is None and time.monotonic() < until:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return True
        time.sleep(0.02)
    return False


def _end(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(_GOODBYE.total_seconds())
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
