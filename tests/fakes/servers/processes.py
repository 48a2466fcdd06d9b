"""Third-party servers, as child processes of the test that starts them."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_START_SECONDS = 60


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def running_server(command: Sequence[str], port: int, log: Path) -> Iterator[None]:
    """Run `command` until the block is left; it is entered once something listens on `port`."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        _wait_until_listening(port, process, log)
        yield
    finally:
        process.kill()
        process.wait()


def _wait_until_listening(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise RuntimeError(f"{process.args!r} did not listen on {port}: {log.read_text()[-2000:]}")


def wait_until_mounted(folder: Path, process: subprocess.Popen[bytes], *, seconds: float = 30) -> bool:
    """Wait until something is mounted at `folder`; False where `process`, which mounts it, ends instead."""
    deadline = time.monotonic() + seconds
    while not folder.is_mount() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return folder.is_mount()
