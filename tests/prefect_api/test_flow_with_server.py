"""A flow without a configured Prefect server starts its own, for the lifetime of its process."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from prefect.context import FlowRunContext
from prefect.settings import PREFECT_API_URL, get_current_settings, temporary_settings

import prefect_tune as pt
from prefect_tune.prefect_api import flow_with_server
from tests.fakes.servers.prefect_database import migrated_database

MODULE = """
import os
import prefect_tune as pt

with open(os.path.join(os.path.dirname(__file__), "imports"), "a") as file:
    file.write(f"{os.getpid()}\\n")

def train(config):
    pt.report({"loss": 1.0})
"""
SCRIPT = """
import json, os, sys
import prefect_tune as pt

sys.path.insert(0, sys.argv[1])
space = {"x": pt.grid_search([1, 2, 3])}
target = os.path.join(sys.argv[1], "target")
results = pt.tune("imported_once:train", space, target=target, experiment="e", metric="loss", num_samples=1)
print(json.dumps({
    "url": os.environ["PREFECT_API_URL"],
    "whole server loaded here": "prefect.server.api.server" in sys.modules,
    "statuses": [str(each.status) for each in results.trials.values()],
}))
"""


def make_environment(home: Path, database: Path) -> dict[str, str]:
    """Return the environment of a user without settings; the database is migrated already."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return environment | {
        "PREFECT_HOME": str(home),
        "PREFECT_SERVER_API_PORT": os.environ["PREFECT_SERVER_API_PORT"],
        "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{database}",
        "DO_NOT_TRACK": "1",
    }


def read_rows(database: Path, query: str) -> list[tuple[str, ...]]:
    with closing(sqlite3.connect(database)) as connection:
        return connection.execute(query).fetchall()


# With heartbeats each flow would end up to a second later; a server that sends telemetry begins with a session.
HEARTBEATS = "select * from events where event = 'prefect.flow-run.heartbeat'"
TELEMETRY_SESSIONS = "select * from configuration where key = 'TELEMETRY_SESSION'"
COMPLETED_TRAININGS = "select name from task_run where state_type = 'COMPLETED' and name like 'train %'"


@pytest.mark.long
def test_a_script_brings_its_own_server_which_records_every_trial_and_ends_with_it(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    database = tmp_path / "prefect.db"
    shutil.copy(migrated_database(pytestconfig), database)
    (tmp_path / "imported_once.py").write_text(MODULE)
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        env=make_environment(tmp_path / "home", database),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    output = json.loads(process.stdout.splitlines()[-1])
    assert output["statuses"] == ["completed"] * 3
    assert output["whole server loaded here"] is False
    assert len((tmp_path / "imports").read_text().split()) == 1  # by the pool that started while the server did
    trainings = read_rows(database, COMPLETED_TRAININGS)
    assert sorted(trainings) == [(f"train 0000{trial} · attempt 1",) for trial in range(3)]
    assert f"Starting a Prefect server for this process at {output['url']}. This takes some seconds" in process.stderr
    assert "telemetry" not in process.stderr
    assert read_rows(database, TELEMETRY_SESSIONS) == read_rows(database, HEARTBEATS) == []
    port = int(output["url"].rpartition(":")[2].partition("/")[0])
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_where_a_server_is_set_up_none_is_started(prefect_server: str, tmp_path: Path) -> None:
    before = dict(os.environ)
    options = {"target": str(tmp_path), "experiment": "e", "num_samples": 1, "isolation": "thread"}
    pt.tune(lambda config: {"loss": config["x"]}, {"x": 1.0}, **options)
    assert dict(os.environ) == before
    assert str(get_current_settings().api.url) == prefect_server


def test_a_flow_with_other_options_still_brings_its_server() -> None:
    assert type(pt.tune.with_options(name="other")) is type(pt.tune)


CUT_SHORT = """
import os
import prefect_tune as pt
from prefect_tune.prefect_api import flow_with_server as own_server

class NeverReady:
    url, has_ended = "http://127.0.0.1:9/api", False

    def wait_until_healthy(self):
        assert os.environ["PREFECT_API_URL"] == self.url
        raise KeyboardInterrupt

    def terminate(self):
        self.has_ended = True

server = NeverReady()
own_server.start_prefect_server = lambda environment, services: server
try:
    pt.tune(print, target="./runs", metric="loss")
except KeyboardInterrupt:
    print(server.has_ended, "PREFECT_API_URL" in os.environ, own_server.get_current_settings().api.url)
"""


@pytest.mark.long
def test_a_start_that_is_cut_short_leaves_nothing_set_up(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-c", CUT_SHORT],
        cwd=tmp_path,
        env=make_environment(tmp_path / "home", tmp_path / "prefect.db"),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert process.stdout == "True False None\n", process.stderr


def find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


@pytest.mark.parametrize("url", ["http://nowhere.invalid/api"])
def test_a_url_of_no_server_is_refused(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow_with_server, "_RESTART_TIMEOUT_SECONDS", 0.0)
    with temporary_settings({PREFECT_API_URL: url}), pytest.raises(pt.InvalidInput, match="no Prefect server answers"):
        pt.durable_trainable(print, {}, target=str(tmp_path))


def test_a_server_that_restarts_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    port, listening = find_free_port(), []
    monkeypatch.setattr("time.sleep", lambda _: listening.append(socket.create_server(("", port))))
    flow_with_server._wait_for_server(f"http://127.0.0.1:{port}/api")
    listening[0].close()


def test_a_call_within_a_flow_run_does_not_look_for_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow_with_server, "_wait_for_server", pytest.fail)
    with FlowRunContext.model_construct(), temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        flow_with_server._ensure_server(ExitStack())


def test_behind_a_proxy_only_prefect_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow_with_server, "_RESTART_TIMEOUT_SECONDS", 0.0)
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    flow_with_server._wait_for_server("https://nowhere.invalid/api")
