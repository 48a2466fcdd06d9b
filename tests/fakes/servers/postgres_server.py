"""A PostgreSQL server on an empty cluster of its own: Debian's `postgresql`, without the system's cluster."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.fakes.servers.processes import free_port

_USER = "postgres"
_START_SECONDS = 120
Command = Callable[[Sequence[str]], Sequence[str]]


def is_postgres_installed() -> bool:
    """Return whether this machine has the server: `apt-get install postgresql`."""
    return bool(_program_folders())


@contextmanager
def postgres_server(inside: Command = lambda command: command) -> Iterator[str]:
    """Run a server with an empty database, and yield the URL that Prefect connects to it by.

    PostgreSQL refuses to run as root: then it runs as the user `postgres`, in a folder of that user.

    Args:
        inside: returns the command to run for the server's command, for example inside a control group.
    """
    folder, port = Path(tempfile.mkdtemp(prefix="postgres-")), free_port()
    if not os.geteuid():
        shutil.chown(folder, _USER, _USER)
    data = folder / "data"
    try:
        _run(["initdb", "-D", str(data), "-U", _USER, "--auth=trust", "--encoding=UTF8", "--locale=C.UTF-8"])
        command = _as_postgres(["postgres", "-D", str(data), "-p", str(port), "-k", str(folder), "-h", "127.0.0.1"])
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(inside(command), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            _wait_until_ready(port, process, folder / "log")
            yield f"postgresql+asyncpg://{_USER}@127.0.0.1:{port}/{_USER}"
        finally:
            process.send_signal(signal.SIGINT)  # ends its sessions, and itself in order
            process.wait(60)
    finally:
        shutil.rmtree(folder)


def _program_folders() -> Sequence[Path]:
    """Return where its programs are, the newest version first: Debian does not put them on the PATH."""
    return sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name), reverse=True)


def _as_postgres(command: Sequence[str]) -> Sequence[str]:
    program = [str(_program_folders()[0] / command[0]), *command[1:]]
    if os.geteuid():
        return program
    return ["setpriv", f"--reuid={_USER}", f"--regid={_USER}", "--clear-groups", *program]


def _run(command: Sequence[str]) -> None:
    process = subprocess.run(_as_postgres(command), cwd="/", capture_output=True, text=True, check=False)
    if process.returncode:
        raise RuntimeError(f"{command[0]}: {process.stdout}{process.stderr}")


def _wait_until_ready(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    ready = [str(_program_folders()[0] / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(port)]
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if subprocess.run(ready, check=False).returncode == 0:
            return
        time.sleep(0.1)
    raise RuntimeError(f"PostgreSQL did not listen on {port}: {log.read_text()[-2000:]}")
