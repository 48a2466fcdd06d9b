"""Without a configured API, only this user's server at Prefect's default address is used."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from inspect import signature
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import prefect
import pytest
from prefect import flow_engine
from prefect.settings import PREFECT_API_URL, PREFECT_SERVER_API_PORT, temporary_settings

import prefect_tune as pt
from prefect_tune.prefect_api import flow_with_server, local_server
from prefect_tune.prefect_api.local_server import find_user_server, reports_cancelled_batch

ANSWERS = {"/api/health": "true", "/api/admin/version": json.dumps(prefect.__version__)}
NOBODY_UID = 65534


def respond(body: str, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()


def respond_as_prefect(path: str) -> bytes:
    return respond(ANSWERS[path])


def refuse_version(path: str) -> bytes:
    return respond("{}", "401 Unauthorized") if "version" in path else respond_as_prefect(path)


def serve(listening: socket.socket, answer: Callable[[str], bytes | None]) -> None:
    """Answer each request by `answer(path)`; None: keep the connection open without a response."""
    idle_connections = []
    with suppress(OSError):  # it was closed
        while True:
            connection, _ = listening.accept()
            path = connection.recv(4096).decode().split()[1]
            if (response := answer(path)) is None:
                idle_connections.append(connection)
                continue
            with connection, suppress(OSError):
                connection.sendall(response)


@contextmanager
def serving(answer: Callable[[str], bytes | None], host: str = "127.0.0.1") -> Iterator[int]:
    """Serve in this process, on the port in Prefect's settings."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family, dualstack_ipv6=family == socket.AF_INET6) as listening:
        threading.Thread(target=serve, args=(listening, answer), daemon=True).start()
        port = listening.getsockname()[1]
        with temporary_settings({PREFECT_SERVER_API_PORT: port}):
            yield port
        listening.shutdown(socket.SHUT_RDWR)  # ends `accept`


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::"])
def test_a_healthy_server_of_this_user_is_found(host: str) -> None:
    with serving(respond_as_prefect, host) as port:
        assert find_user_server() == f"http://127.0.0.1:{port}/api"


def test_a_real_server_is_found(prefect_server: str) -> None:
    with temporary_settings({PREFECT_SERVER_API_PORT: urlsplit(prefect_server).port}):
        assert find_user_server() == prefect_server


def test_where_nothing_listens_none_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with temporary_settings({PREFECT_SERVER_API_PORT: port}):
        assert find_user_server() is None


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(lambda path: respond('"3.0.0"' if "version" in path else "true"), id="another version of Prefect"),
        pytest.param(lambda _: respond("true"), id="true to everything"),
        pytest.param(lambda path: respond("false") if "health" in path else respond_as_prefect(path), id="not healthy"),
        pytest.param(refuse_version, id="a password"),
        pytest.param(lambda path: respond("", f"302 Found\r\nlocation: {path}"), id="a redirect"),
        pytest.param(lambda _: b"SSH-2.0-OpenSSH_9.2\r\n", id="no HTTP"),
        pytest.param(lambda _: b"", id="closed at once"),
        pytest.param(lambda _: respond("1" * 200_000), id="too much"),
        pytest.param(lambda _: respond("[" * 50_000), id="too deep"),
        pytest.param(lambda _: None, id="no answer"),
    ],
)
def test_what_is_no_healthy_server_of_this_version_is_not_used(
    answer: Callable[[str], bytes | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_server, "_FIND_TIMEOUT_SECONDS", 0.5)
    with serving(answer):
        assert find_user_server() is None


def test_a_server_that_drips_is_left_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_server, "_FIND_TIMEOUT_SECONDS", 0.5)
    stop = threading.Event()

    def drip(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection, suppress(OSError):
            while not stop.wait(0.05):
                connection.sendall(b"H")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=drip, args=(listening,), daemon=True).start()
        with temporary_settings({PREFECT_SERVER_API_PORT: listening.getsockname()[1]}):
            assert find_user_server() is None
    stop.set()


def serve_as(user: int, port: Connection, requests: Connection) -> None:
    """Become `user` in a process of its own, serve as Prefect does, and send each request's path."""
    os.setresuid(user, user, user)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port.send(listening.getsockname()[1])

        def answer(path: str) -> bytes:
            requests.send(path)
            return respond_as_prefect(path)

        serve(listening, answer)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_nothing_is_sent_to_a_server_of_another_user() -> None:
    context = get_context("fork")
    (port, its_port), (requests, its_requests) = context.Pipe(duplex=False), context.Pipe(duplex=False)
    server = context.Process(target=serve_as, args=(NOBODY_UID, its_port, its_requests), daemon=True)
    server.start()
    try:
        with temporary_settings({PREFECT_SERVER_API_PORT: port.recv()}):
            assert find_user_server() is None
        assert not requests.poll(0.2)
    finally:
        server.kill()
        server.join()


def test_a_server_that_has_ended_since_the_last_call_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "http://127.0.0.1:9/api"
    set_up: list[str | None] = []
    started: list[object] = []
    monkeypatch.setattr(flow_with_server, "_user_server_urls", {url})
    monkeypatch.setattr(flow_with_server, "_SERVER_MODULE", "not loaded")
    monkeypatch.setattr(flow_with_server, "_set_api_url", set_up.append)
    monkeypatch.setattr(flow_with_server, "_start_own_server", lambda *parts: started.append(parts))
    with temporary_settings({PREFECT_API_URL: url, PREFECT_SERVER_API_PORT: 9}):
        flow_with_server._ensure_server(ExitStack())
    assert (set_up, len(started)) == ([None], 1)


def test_only_our_flow_runs_end_without_a_wait_for_the_thread_of_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pt.tune.name == "tune"  # it is a flow of ours once it is imported
    assert [*signature(flow_engine._send_heartbeats).parameters] == ["engine", "join_on_exit"]
    joined: list[bool] = []
    monkeypatch.setattr(flow_engine, "_send_heartbeats", lambda _, join_on_exit: joined.append(join_on_exit))
    for _ in range(2):  # each call of a flow does so
        flow_with_server._skip_heartbeat_joins()
    for name in ("tune", "mine"):
        flow_engine._send_heartbeats(SimpleNamespace(flow=SimpleNamespace(name=name)))
    assert joined == [False, True]


SCRIPT = """
import os, sys
import prefect_tune as pt
options = {"target": sys.argv[1], "experiment": "e", "metric": "loss", "num_samples": 1, "isolation": "thread"}
results = pt.tune(lambda config: {"loss": 1.0}, **options)
print(os.environ["PREFECT_API_URL"], [str(each.status) for each in results.trials.values()])
"""


def test_a_script_without_a_configured_api_uses_it(prefect_server: str, tmp_path: Path) -> None:
    port = str(urlsplit(prefect_server).port)
    (tmp_path / "script.py").write_text(SCRIPT)
    process = subprocess.run(
        [sys.executable, "script.py", str(tmp_path / "runs")],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
        | {"PREFECT_SERVER_API_PORT": port, "HTTP_PROXY": "http://127.0.0.1:9", "NO_PROXY": "host.example"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert process.stdout == f"{prefect_server} ['completed']\n", process.stderr
    assert process.stderr.count(f"Using your Prefect server at {prefect_server}") == 1
    assert "Starting a Prefect server" not in process.stderr


# The log of the package's own Prefect server.


@pytest.mark.parametrize(("error", "is_reported"), [(asyncio.CancelledError, False), (OSError, True)])
def test_a_batch_that_the_end_cuts_short_is_no_error(
    error: type[BaseException], is_reported: bool, caplog: pytest.LogCaptureFixture
) -> None:
    try:
        raise error
    except error:
        logging.getLogger("recorder").exception("Error flushing 35 events (35 to retry, 0 dropped)")
    logging.getLogger("recorder").error("without an exception")
    assert [not reports_cancelled_batch(record) for record in caplog.records] == [is_reported, True]
