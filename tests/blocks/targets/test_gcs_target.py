from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from prefect_tune.blocks import GcsTarget, resolve_target
from tests.blocks.conftest import SHORT
from tests.fakes.servers.gcs_server import GcsServer, gcs_server, service_account
from tests.fakes.servers.processes import free_port

KEY_FILE, PUBLIC_KEY = service_account()


@pytest.fixture
def emulator() -> Iterator[GcsServer]:
    with gcs_server("bucket") as server:
        yield server


@pytest.fixture
def strict_server() -> Iterator[GcsServer]:
    with gcs_server("bucket", public_key=PUBLIC_KEY) as server:
        yield server


def make_target(server: GcsServer, **changes: Any) -> GcsTarget:
    fields = {"bucket": "bucket", "prefix": "runs", "endpoint_url": server.url, "allow_http": True}
    return GcsTarget(**{**fields, **changes})


def test_an_emulator_needs_no_credentials_when_that_is_said(emulator: GcsServer) -> None:
    target = make_target(emulator, anonymous=True)
    result = target.check()
    assert (result.ok, result.conditional_create) == (True, True)
    assert emulator.objects == {}
    with target.open(timeout=SHORT) as store:
        store.create("a", b"bytes")
    assert emulator.objects == {"bucket/runs/a": b"bytes"}


def test_a_uri_reaches_an_emulator(emulator: GcsServer) -> None:
    assert resolve_target(f"gs://bucket/runs?endpoint_url={emulator.url}&anonymous=true").check().ok


def test_a_service_account_signs_what_it_asks(strict_server: GcsServer) -> None:
    assert make_target(strict_server, service_account_json=KEY_FILE).check().ok


def test_another_service_account_is_refused(strict_server: GcsServer) -> None:
    result = make_target(strict_server, service_account_json=service_account()[0]).check()
    assert not result.ok
    assert "the server does not accept the credentials" in result.message
    assert "PRIVATE KEY" not in result.message


def test_the_machines_own_key_file_is_found(
    strict_server: GcsServer, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path_factory.mktemp("gcp") / "key.json"
    file.write_text(KEY_FILE)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    assert make_target(strict_server).check().ok


def test_a_missing_bucket_is_said(emulator: GcsServer) -> None:
    result = make_target(emulator, bucket="never-created", anonymous=True).check()
    assert not result.ok
    assert "there is no such bucket or container" in result.message


def test_a_server_that_is_not_there_is_said(emulator: GcsServer) -> None:
    target = make_target(emulator, endpoint_url=f"http://127.0.0.1:{free_port()}", anonymous=True)
    assert target.check(timeout=SHORT / 10).may_be_temporary
