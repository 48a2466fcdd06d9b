from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from prefect_tune.blocks import AzureTarget, resolve_target
from prefect_tune.blocks.credentials import parse_connection_string
from tests.blocks.conftest import SHORT
from tests.fakes.servers.azurite import ACCOUNT, KEY, azurite, find_azurite
from tests.fakes.servers.canned_http import canned_server, s3_error

SAS = "sv=2021-08-06&ss=b&srt=sco&sp=rwdlac&se=2099-01-01T00:00:00Z&sig=c2VjcmV0LXNpZ25hdHVyZQ%3D%3D"


def make_target(endpoint: str, **changes: Any) -> AzureTarget:
    fields = {"container": "container", "prefix": "runs", "endpoint_url": endpoint, "allow_http": True}
    return AzureTarget(**{**fields, "account_name": ACCOUNT, "account_key": KEY, **changes})


def test_a_connection_string_says_everything() -> None:
    text = "DefaultEndpointsProtocol=https;AccountName=acc;AccountKey=a2V5==;EndpointSuffix=core.windows.net"
    assert parse_connection_string(text) == {
        "account_name": "acc",
        "account_key": "a2V5==",
        "endpoint": "https://acc.blob.core.windows.net",
    }


def test_a_connection_string_with_a_signature_names_its_account_by_the_endpoint() -> None:
    text = f"BlobEndpoint=https://acc.blob.core.windows.net/;SharedAccessSignature={SAS}"
    options = {"account_name": "acc", "sas_key": SAS, "endpoint": "https://acc.blob.core.windows.net"}
    assert parse_connection_string(text) == options


def test_the_uri_names_the_account_and_no_secret() -> None:
    target = AzureTarget(container="container", prefix="runs", connection_string="AccountName=acc;AccountKey=a2V5==")
    assert target.uri == "abfss://container@acc.dfs.core.windows.net/runs"
    assert resolve_target(target.uri) == AzureTarget(container="container", prefix="runs", account_name="acc")


@pytest.mark.parametrize(
    ("status", "code", "complaint"),
    [
        (403, "AuthenticationFailed", "the server does not accept the credentials"),
        (404, "ContainerNotFound", "there is no such bucket or container"),
        (403, "AuthorizationPermissionMismatch", "the credentials lack the permission"),
    ],
)
def test_what_azure_refuses_is_explained(status: int, code: str, complaint: str) -> None:
    with canned_server(status, s3_error(code, ""), {"x-ms-error-code": code}) as server:
        result = make_target(f"{server.url}/{ACCOUNT}").check(timeout=SHORT)
    assert not result.ok
    assert complaint in result.message


def test_a_signature_in_an_address_is_kept_out_of_the_message() -> None:
    with canned_server(403, s3_error("AuthenticationFailed", "")) as server:
        result = make_target(f"{server.url}/{ACCOUNT}", account_key=None, sas_token=SAS).check(timeout=SHORT)
    assert not result.ok
    assert "c2VjcmV0LXNpZ25hdHVyZQ" not in result.message


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    command = find_azurite()
    if command is None:
        pytest.skip("Azurite is not installed")
    with azurite(command, tmp_path_factory.mktemp("azurite"), "container") as endpoint:
        yield endpoint


@pytest.mark.deep
class TestOnTheEmulator:
    def test_a_good_container_passes(self, emulator: str) -> None:
        result = make_target(emulator).check()
        assert (result.ok, result.conditional_create) == (True, True)

    def test_a_connection_string_is_enough(self, emulator: str) -> None:
        text = f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={emulator};"
        assert AzureTarget(container="container", connection_string=text, allow_http=True).check().ok

    def test_another_key_is_refused(self, emulator: str) -> None:
        result = make_target(emulator, account_key=KEY.replace("Eby8", "Eby9")).check()
        assert not result.ok
        assert "does not accept the credentials" in result.message

    def test_a_missing_container_is_said(self, emulator: str) -> None:
        assert "no such bucket or container" in make_target(emulator, container="never-created").check().message
