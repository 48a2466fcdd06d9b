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
from prefect_tune.stores.open_location import find_ambient_access, open_location, parse_uri
from tests.blocks.conftest import SHORT
from tests.fakes.checkpoints import write_files
from tests.fakes.servers.canned_http import canned_server, s3_error

Opener = Callable[[], AbstractContextManager[ObjectStore]]
KEYS = {"AWS_ACCESS_KEY_ID": "ENVIRONMENT", "AWS_SECRET_ACCESS_KEY": "secret"}
KEYS_IN_FILE = "aws_access_key_id={}\naws_secret_access_key=secret\n"


@pytest.fixture(params=["target", "uri"])
def opener(request: pytest.FixtureRequest) -> Opener:
    """Opens the bucket by a target block or by a URI."""
    openers: dict[str, Opener] = {
        "target": lambda: S3Target(bucket="bucket").open(timeout=SHORT),
        "uri": lambda: open_location(parse_uri("s3://bucket"), timeout=SHORT),
    }
    return openers[request.param]


@pytest.fixture
def aws(tmp_path: Path) -> Path:
    """A folder with files of keys and regions, which no client reads by default."""
    default, team, config = (KEYS_IN_FILE.format(key).encode() for key in ("DEFAULT", "TEAM", "CONFIG"))
    files = {
        "credentials": b"[default]\n" + default + b"[team]\n" + team,
        "config": b"[default]\n" + config + b"region=eu-west-1\n[profile team]\nregion=eu-north-1\n",
    }
    return write_files(tmp_path / "aws", files)


def _move_to_default_folder(aws: Path) -> dict[str, str]:
    aws.rename(aws.with_name(".aws"))
    return {}


def _sign(opener: Opener, monkeypatch: pytest.MonkeyPatch, environment: Mapping[str, str], endpoint: str) -> str:
    """Return key, date and region of the signature sent to the server that the variable `endpoint` names."""
    with canned_server(403, s3_error("AccessDenied", "")) as server:
        for name, value in {**environment, endpoint: server.url, "AWS_ALLOW_HTTP": "1"}.items():
            monkeypatch.setenv(name, value)
        with opener() as store, pytest.raises(StoreRefused):
            list(store.list(""))
    return server.request_headers[0]["authorization"].partition("Credential=")[2].partition("/s3/")[0]


@pytest.mark.parametrize(
    ("set_up", "key", "region"),
    [
        (lambda _: KEYS, "ENVIRONMENT", "us-east-1"),
        (lambda _: {**KEYS, "AWS_REGION": "eu-west-3"}, "ENVIRONMENT", "eu-west-3"),
        (lambda _: {**KEYS, "AWS_DEFAULT_REGION": "eu-west-3"}, "ENVIRONMENT", "eu-west-3"),
        (_move_to_default_folder, "DEFAULT", "eu-west-1"),
        (lambda aws: {**_move_to_default_folder(aws), "AWS_PROFILE": "team"}, "TEAM", "eu-north-1"),
        (lambda aws: {**_move_to_default_folder(aws), "AWS_REGION": "eu-west-3"}, "DEFAULT", "eu-west-3"),
        (lambda aws: {**_move_to_default_folder(aws), **KEYS}, "ENVIRONMENT", "us-east-1"),
        (lambda aws: {"AWS_SHARED_CREDENTIALS_FILE": str(aws / "credentials")}, "DEFAULT", "us-east-1"),
        (lambda aws: {"AWS_CONFIG_FILE": str(aws / "config")}, "CONFIG", "eu-west-1"),
    ],
    ids=["keys", "region", "default region", "files", "profile", "files, region", "files, keys", "key file", "config"],
)
def test_a_target_and_a_uri_sign_alike(
    opener: Opener,
    aws: Path,
    monkeypatch: pytest.MonkeyPatch,
    set_up: Callable[[Path], Mapping[str, str]],
    key: str,
    region: str,
) -> None:
    signature = _sign(opener, monkeypatch, set_up(aws), "AWS_ENDPOINT_URL")
    assert re.fullmatch(rf"{key}/\d+/{region}", signature)


def test_a_server_for_s3_alone_comes_before_that_for_everything(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {**KEYS, "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    assert _sign(opener, monkeypatch, environment, "AWS_ENDPOINT_URL_S3").startswith("ENVIRONMENT/")


@pytest.mark.parametrize("name", ["AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"])
def test_a_role_that_the_surroundings_give_comes_before_a_profile(
    name: str, aws: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _move_to_default_folder(aws)
    assert find_ambient_access(os.environ).key_provider is not None
    monkeypatch.setenv(name, "/anything")
    assert find_ambient_access(os.environ).key_provider is None


def test_a_profile_that_there_is_not_is_said(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "taem")
    with pytest.raises(StoreRefused, match=r"profile .*taem"), opener():
        pass


@pytest.mark.parametrize("content", ["[default", "[default]\naws_access_key_id", "[default]\naws_access_key_id = x\n"])
def test_a_file_of_credentials_that_is_being_rewritten_is_a_refusal_of_the_moment(
    content: str, aws: Path, opener: Opener
) -> None:
    """The failure is transient: the flow run reads the file again."""
    (aws / "credentials").write_text(content)
    (aws / "config").write_text("")
    _move_to_default_folder(aws)
    with pytest.raises(StoreRefused, match=r"profile|credentials"), opener() as store:
        store.size("a")
