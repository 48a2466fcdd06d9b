"""A Prefect server for the duration of the demo, with a database of its own and without output."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from prefect_tune.core.errors import TuneError
from prefect_tune.prefect_api.local_server import PrefectServer, start_prefect_server


@dataclass(frozen=True)
class TemporaryServer:
    """A server that has been started, and may not be ready yet."""

    server: PrefectServer
    log: Path
    environment: Mapping[str, str]
    """What a process needs to use this server, and no Prefect setting of the user's."""

    def wait_until_ready(self) -> None:
        """Return once it answers.

        Raises:
            TuneError: it ended, or did not answer for three minutes; its last output is in the message.
        """
        if not self.server.answers():
            said = self.log.read_text(errors="replace")[-2000:]
            raise TuneError(f"the demo's Prefect server at {self.server.url} did not start; its last output:\n{said}")


@contextmanager
def temporary_server(home: Path) -> Iterator[TemporaryServer]:
    """Start a server with everything it writes below `home`; end it with the block, or with this process."""
    home.mkdir()
    environment = {
        **without_prefect(os.environ),
        "PREFECT_HOME": str(home),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_EPHEMERAL_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }
    with (home / "server.log").open("wb") as log:
        server = start_prefect_server({**environment, "PREFECT_UI_ENABLED": "0"}, log)
    try:
        yield TemporaryServer(server, home / "server.log", {**environment, "PREFECT_API_URL": server.url})
    finally:
        server.end()


def without_prefect(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` without Prefect's settings, and with the loopback spared from proxies."""
    spared = ",".join(filter(None, (environment.get("NO_PROXY"), "127.0.0.1,localhost")))
    kept = {name: value for name, value in environment.items() if not name.startswith("PREFECT_")}
    return {**kept, "NO_PROXY": spared, "no_proxy": spared}
