"""One Prefect server for all workers of a test run, started by the first test that asks for it.

Its import takes 7 CPU seconds, and an idle one takes 2 a minute. The process that runs the tests, or hands them out to
its workers, listens at a socket; a worker connects, and reads the address of the server's API once it answers.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import threading
from pathlib import Path

import pytest

from tests.fakes.servers.prefect_database import IN_MEMORY, migrated_database

_PATIENCE_SECONDS = 300


class SharedPrefectServer:
    """Listens for those who need the server; `close` ends it. It ends as well if its process is killed."""

    def __init__(self, config: pytest.Config, folder: Path) -> None:
        self._config = config
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(_address(folder)))
        self._listening.listen(64)
        self._server: object | None = None
        self._memory: str | None = None
        threading.Thread(target=self._answer_all, daemon=True).start()

    def close(self) -> None:
        self._listening.close()
        if self._server is not None:
            self._server.end()  # type: ignore[attr-defined]  # named where it is imported
        if self._memory is not None:
            shutil.rmtree(self._memory, ignore_errors=True)

    def _answer_all(self) -> None:
        while True:
            try:
                asking, _ = self._listening.accept()
            except OSError:  # closed
                return
            with asking:
                asking.sendall(self._url().encode())

    def _url(self) -> str:
        from prefect_tune.prefect_api.local_server import PrefectServer, start_prefect_server

        if self._server is None:
            self._memory = tempfile.mkdtemp(dir=IN_MEMORY)
            database = Path(self._memory, "prefect.db")
            shutil.copy(migrated_database(self._config), database)
            environment = {**os.environ, "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{database}"}
            with Path(self._memory, "server.log").open("wb") as log:
                self._server = start_prefect_server(environment, log)
        assert isinstance(self._server, PrefectServer)
        return self._server.url if self._server.answers() else ""


def url_of_shared_server(folder: Path) -> str:
    """Return the address of the API of the server that the process of this folder starts."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_PATIENCE_SECONDS)
        connection.connect(str(_address(folder)))
        url = b"".join(iter(lambda: connection.recv(1024), b"")).decode()
    assert url, "the Prefect server of the tests did not start"
    return url


def _address(folder: Path) -> Path:
    return folder / "prefect-server.socket"
