"""A target block and a URI reach the same bucket in the same environment: credentials, region, endpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from prefect_tune.blocks import S3Target
from prefect_tune.core.errors import StoreRefused
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.stores.open_location import ambient_access, open_location, parse_uri
from tests.blocks.conftest import SHORT
from tests.fakes.servers.canned_http import canned_server, s3_error

Opened = Callable[[], AbstractContextManager[ObjectStore]]
KEYS = {"AWS_ACCESS_KEY_ID": "ENVIRONMENT", "AWS_SECRET_ACCESS_KEY": "secret"}
IN_FILE = "aws_access_key_id={}\naws_secret_access_key=secret\n"


@pytest.fixture(params=["target", "uri"])
def opened(request: pytest.FixtureRequest) -> Opened:
    """A target block and a URI of the same bucket."""
    ways: dict[str, Opened] = {
        "target": lambda: S3Target(bucket="bucket").open(timeout=SHORT),
        "uri": lambda: open_location(parse_uri("s3://bucket"), timeout=SHORT),
    }
    return ways[request.param]


@pytest.fixture
def aws(tmp_path: Path) -> Path:
    """A folder with keys and a region in files, below a folder that no client reads by default."""
    folder = tmp_path / "aws"
    folder.mkdir()
    (folder / "credentials").write_text(f"[default]\n{IN_FILE.format('DEFAULT')}[team]\n{IN_FILE.format('TEAM')}")
    (folder / "config").write_text(
        f"[default]\n{IN_FILE.format('CONFIG')}region=eu-west-1\n[profile team]\nregion=eu-north-1\n"
    )
    return folder


def _usual(aws: Path) -> dict[str, str]:
    aws.rename(aws.with_name(".aws"))
    return {}


def _signed(opened: Opened, monkeypatch: pytest.MonkeyPatch, environment: Mapping[str, str], endpoint: str) -> str:
    """Return access key and region of the signature that the server of the variable `endpoint` receives."""
    with canned_server(403, s3_error("AccessDenied", "")) as server:
        for name, value in {**environment, endpoint: server.url, "AWS_ALLOW_HTTP": "1"}.items():
            monkeypatch.setenv(name, value)
        with opened() as store, pytest.raises(StoreRefused):
            list(store.list(""))
    return server.request_headers[0]["authorization"].partition("Credential=")[2].partition("/s3/")[0]


@pytest.mark.parametrize(
    ("set_up", "key", "region"),
    [
        (lambda _: KEYS, "ENVIRONMENT", "us-east-1"),
        (lambda _: {**KEYS, "AWS_REGION": "eu-west-3"}, "ENVIRONMENT", "eu-west-3"),
        (lambda _: {**KEYS, "AWS_DEFAULT_REGION": "eu-west-3"}, "ENVIRONMENT", "eu-west-3"),
        (_usual, "DEFAULT", "eu-west-1"),
        (lambda aws: {**_usual(aws), "AWS_PROFILE": "team"}, "TEAM", "eu-north-1"),
        (lambda aws: {**_usual(aws), "AWS_REGION": "eu-west-3"}, "DEFAULT", "eu-west-3"),
        (lambda aws: {**_usual(aws), **KEYS}, "ENVIRONMENT", "us-east-1"),
        (lambda aws: {"AWS_SHARED_CREDENTIALS_FILE": str(aws / "credentials")}, "DEFAULT", "us-east-1"),
        (lambda aws: {"AWS_CONFIG_FILE": str(aws / "config")}, "CONFIG", "eu-west-1"),
    ],
    ids=[
        "keys",
        "region",
        "default region",
        "files",
        "profile",
        "files, region",
        "files, keys",
        "keys' file",
        "config",
    ],
)
def test_a_target_and_a_uri_sign_alike(
    opened: Opened,
    aws: Path,
    monkeypatch: pytest.MonkeyPatch,
    set_up: Callable[[Path], Mapping[str, str]],
    key: str,
    region: str,
) -> None:
    signed = _signed(opened, monkeypatch, set_up(aws), "AWS_ENDPOINT_URL")
    assert re.fullmatch(rf"{key}/\d+/{region}", signed)


def test_a_server_for_s3_alone_comes_before_that_for_everything(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    assert _signed(opened, monkeypatch, {**KEYS, **nowhere}, "AWS_ENDPOINT_URL_S3").startswith("ENVIRONMENT/")


@pytest.mark.parametrize("name", ["AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"])
def test_a_role_that_the_surroundings_give_comes_before_a_profile(
    name: str, aws: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _usual(aws)
    assert ambient_access(os.environ).keys is not None
    monkeypatch.setenv(name, "/anything")
    assert ambient_access(os.environ).keys is None


def test_a_profile_that_there_is_not_is_said(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "taem")
    with pytest.raises(StoreRefused, match=r"profile .*taem"), opened():
        pass


@pytest.mark.parametrize("content", ["[default", "[default]\naws_access_key_id", "[default]\naws_access_key_id = x\n"])
def test_a_file_of_credentials_that_is_being_rewritten_is_a_refusal_of_the_moment(
    content: str, aws: Path, opened: Opened
) -> None:
    """The failure is transient: a run reads the file again."""
    (aws / "credentials").write_text(content)
    (aws / "config").write_text("")
    _usual(aws)
    with pytest.raises(StoreRefused, match=r"profile|credentials"), opened() as store:
        store.size("a")
