"""A Prefect server for the time of the demo: on a free loopback port, on a database of its own, silent."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from urllib.error import URLError

from prefect_tune.core.errors import TuneError

__all__ = ["TemporaryServer", "temporary_server"]

_PATIENCE = timedelta(minutes=3)  # the first start on an empty database runs every migration
_GOODBYE = timedelta(seconds=5)


@dataclass(frozen=True)
class TemporaryServer:
    """A server that has been started, and may not be ready yet."""

    url: str
    home: Path
    process: subprocess.Popen[bytes]

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to use this server, in place of every `PREFECT_` variable of its own."""
        return {"PREFECT_API_URL": f"{self.url}/api", **_private(self.home)}

    def wait_until_ready(self) -> None:
        """Return once it answers.

        Raises:
            TuneError: it ended, or did not answer for three minutes; its last output is in the message.
        """
        give_up_at = time.monotonic() + _PATIENCE.total_seconds()
        while not _answers(f"{self.url}/api/health"):
            if self.process.poll() is not None or time.monotonic() > give_up_at:
                said = (self.home / "server.log").read_text(errors="replace")[-2000:]
                raise TuneError(f"the demo's Prefect server at {self.url} did not start; it said:\n{said}")
            time.sleep(0.1)


@contextmanager
def temporary_server(home: Path) -> Iterator[TemporaryServer]:
    """Start a server with everything it writes below `home`; end it with the block, or with this process."""
    home.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as listening, (home / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "prefect_tune.demo.server", str(listening.fileno())],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**without_prefect(os.environ), **_private(home), "PREFECT_UI_ENABLED": "0"},
            pass_fds=(listening.fileno(),),
            start_new_session=True,  # Ctrl-C is for the demo, which then ends it
        )
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    try:
        yield TemporaryServer(url, home, process)
    finally:
        _end(process)


def without_prefect(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` without Prefect's settings, and with the loopback spared from proxies."""
    spared = ",".join(filter(None, (environment.get("NO_PROXY"), "127.0.0.1,localhost")))
    kept = {name: value for name, value in environment.items() if not name.startswith("PREFECT_")}
    return {**kept, "NO_PROXY": spared, "no_proxy": spared}


def _private(home: Path) -> dict[str, str]:
    return {
        "PREFECT_HOME": str(home),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_EPHEMERAL_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }


def _answers(url: str) -> bool:
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.communicate(timeout=_GOODBYE.total_seconds())
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def _serve(descriptor: int) -> None:
    """Serve on the inherited socket until asked to end, or until whoever started this is gone."""
    import uvicorn

    threading.Thread(target=_end_with_parent, daemon=True).start()
    config = uvicorn.Config("prefect.server.api.server:create_app", factory=True, log_level="error")
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=descriptor)])


def _end_with_parent() -> None:
    """Nobody ever writes to the standard input: reading it ends when the other side is closed."""
    sys.stdin.buffer.read()
    os._exit(0)  # at once: a server that is still starting would hear a signal only when it has started


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
