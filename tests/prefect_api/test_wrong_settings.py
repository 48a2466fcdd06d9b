"""Settings that do not lead to a Prefect API: an error names the setting before anything starts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_CSRF_SUPPORT_ENABLED, temporary_settings

import prefect_tune as pt
from prefect_tune.prefect_api.api_client import open_server_client
from tests.fakes.servers.canned_http import CannedServer, canned_server

HTML = b"<!doctype html><title>Log in</title>"


@pytest.fixture
def api() -> Iterator[CannedServer]:
    with (
        canned_server(200) as canned,
        temporary_settings({PREFECT_API_URL: f"{canned.url}/api", PREFECT_CLIENT_CSRF_SUPPORT_ENABLED: False}),
    ):
        yield canned


@pytest.mark.parametrize(
    ("status", "body", "setting"),
    [
        (401, b'{"detail": "Unauthorized"}', "PREFECT_API_KEY"),
        (403, b"", "PREFECT_API_KEY"),
        (404, b'{"detail": "Not Found"}', "PREFECT_API_URL"),
        (405, b"", "PREFECT_API_URL"),
        (200, HTML, "PREFECT_API_URL"),
        (404, HTML, "PREFECT_API_URL"),
    ],
)
def test_an_answer_that_is_not_that_of_prefects_api_names_the_setting(
    api: CannedServer, status: int, body: bytes, setting: str
) -> None:
    api.status, api.body = status, body
    with pytest.raises(pt.InvalidInput, match=setting) as flow:
        pt.tune("module:Name", {}, target="/runs")
    with pytest.raises(pt.InvalidInput, match=setting) as verb, open_server_client("deployments"):
        pass
    assert str(flow.value) == str(verb.value)
    assert "\n" not in str(flow.value)
    assert api.url in str(flow.value)


NO_URLS = ["127.0.0.1:4200/api", "localhost", "http://127.0.0.1:port/api", "ftp://127.0.0.1/api"]


@pytest.mark.parametrize("url", NO_URLS)
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with (
        temporary_settings({PREFECT_API_URL: url}),
        pytest.raises(pt.InvalidInput, match=r"PREFECT_API_URL=.*expected"),
    ):
        pt.tune("module:Name", {}, target="/runs")


def test_the_address_of_a_server_without_api_is_refused(prefect_server: str) -> None:
    with (
        temporary_settings({PREFECT_API_URL: prefect_server.removesuffix("/api")}),
        pytest.raises(pt.InvalidInput, match="ends with /api"),
    ):
        pt.tune("module:Name", {}, target="/runs")


def test_a_server_that_fails_is_no_wrong_setting(api: CannedServer) -> None:
    api.status = 500
    with pytest.raises(pt.TuneError, match=r"did not answer|rejected"), open_server_client("deployments") as client:
        client.read_flows(limit=1)
