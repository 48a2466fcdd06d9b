"""A Prefect server as a process that ends with whoever started it, however that ends."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from typing import IO
from urllib.error import URLError

__all__ = ["PrefectServer", "start_prefect_server"]

_PATIENCE = timedelta(minutes=3)  # the first start on an empty database runs every migration
_GOODBYE = timedelta(seconds=5)


@dataclass(frozen=True)
class PrefectServer:
    """A server that has been started, and may not be ready yet. It listens on the loopback."""

    url: str
    """Of its API: `http://127.0.0.1:41234/api`."""
    process: subprocess.Popen[bytes]

    def answers(self) -> bool:
        """Wait until it does; return False when it has ended, or three minutes have gone by."""
        until = time.monotonic() + _PATIENCE.total_seconds()
        while self.process.poll() is None and time.monotonic() < until:
            if _is_healthy(self.url):
                return True
            time.sleep(0.02)
        return False

    def end(self) -> None:
        """Ask it to end, and see to it that it does: it records what it has heard of, for some seconds at most."""
        self.process.terminate()
        try:
            self.process.wait(_GOODBYE.total_seconds())
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.process.communicate()  # buries it, and closes its standard input: not before, or it would leave at once


def start_prefect_server(environment: Mapping[str, str], log: IO[bytes] | None = None) -> PrefectServer:
    """Start one on a free port, with `environment` for its settings; what it prints goes to `log`, or here."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/api"
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, str(listening.fileno())],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=None if log is None else subprocess.STDOUT,
            env={**environment, "PREFECT_SERVER_UI_API_URL": url},  # its UI would look for the API at port 4200
            pass_fds=(listening.fileno(),),
            start_new_session=True,  # Ctrl-C is for who started it, who still needs it to end in order
        )
        return PrefectServer(url, process)


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False


def _serve(descriptor: int) -> None:
    """Serve on the inherited socket until asked to end, or until whoever started this is gone."""
    import uvicorn

    threading.Thread(target=_end_with_parent, daemon=True).start()
    gc.disable()  # a fifth of the start goes into looking for garbage among what stays
    create_app = import_module("prefect.server.api.server").create_app
    gc.freeze()
    gc.enable()
    config = uvicorn.Config(create_app, factory=True, log_level="error")
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=descriptor)])


def _end_with_parent() -> None:
    """Nobody ever writes to the standard input: reading it ends when the other side is closed."""
    os.read(sys.stdin.fileno(), 1)  # not through `sys.stdin`: Python cannot end in order while it is being read
    os.kill(os.getpid(), signal.SIGTERM)  # what it has heard of is recorded first
    time.sleep(_GOODBYE.total_seconds())
    os._exit(0)  # a server that is still starting would hear the signal only when it has started


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
