from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast
from uuid import UUID, uuid4

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.settings import PREFECT_API_URL, PREFECT_SERVER_ALLOW_EPHEMERAL_MODE, temporary_settings
from pydantic import Field

from prefect_tune.blocks import (
    AzureTarget,
    FsspecTarget,
    GcsTarget,
    LocalTarget,
    S3Target,
    StorageTarget,
    resolve_existing,
    resolve_target,
    target_reference,
)
from prefect_tune.blocks.resolve_target import current_deployment_id, is_deployment_run
from prefect_tune.core.errors import InvalidInput, StoreUnavailable
from prefect_tune.core.storage.object_store import ObjectStore
from tests.blocks.conftest import save
from tests.fakes.stores.memory_store import MemoryStore

WORKING_FOLDER = Path.cwd()
TARGETS: dict[str, StorageTarget] = {
    "s3://bucket": S3Target(bucket="bucket"),
    "s3://bucket/runs/first/": S3Target(bucket="bucket", prefix="runs/first"),
    "s3a://bucket/runs": S3Target(bucket="bucket", prefix="runs"),
    "s3://bucket/runs?region=eu-west-1": S3Target(bucket="bucket", prefix="runs", region="eu-west-1"),
    "s3://bucket?endpoint_override=minio:9000&scheme=http": S3Target(
        bucket="bucket", endpoint_url="http://minio:9000", allow_http=True
    ),
    "s3://bucket/runs?endpoint_url=https://minio&region=eu&anonymous=true": S3Target(
        bucket="bucket", prefix="runs", endpoint_url="https://minio", region="eu", anonymous=True
    ),
    "gs://bucket/runs?endpoint_url=http://gcs:9000": GcsTarget(
        bucket="bucket", prefix="runs", endpoint_url="http://gcs:9000", allow_http=True
    ),
    "gs://bucket/runs": GcsTarget(bucket="bucket", prefix="runs"),
    "gcs://bucket": GcsTarget(bucket="bucket"),
    "az://container/runs": AzureTarget(container="container", prefix="runs"),
    "abfss://container@acc.dfs.core.windows.net/runs": AzureTarget(
        container="container", prefix="runs", account_name="acc"
    ),
    "file:///runs/with%20space": LocalTarget(path="/runs/with space"),
    "file:///runs/first%231": LocalTarget(path="/runs/first#1"),
    "s3://bucket/50%25/a%231/b%3F": S3Target(bucket="bucket", prefix="50%/a#1/b?"),
    "az://container/a%231": AzureTarget(container="container", prefix="a#1"),
    "/runs/first": LocalTarget(path="/runs/first"),
    "/runs/../first": LocalTarget(path="/first"),
    "~/runs": LocalTarget(path="~/runs"),
    "./runs/first": LocalTarget(path=str(WORKING_FOLDER / "runs/first")),
    "../runs": LocalTarget(path=str(WORKING_FOLDER.parent / "runs")),
    "runs": LocalTarget(path=str(WORKING_FOLDER / "runs")),
    "./$HOME/runs": LocalTarget(path=str(WORKING_FOLDER / "$HOME/runs")),
    "runs/first/second": LocalTarget(path=str(WORKING_FOLDER / "runs/first/second")),
    "memory://runs": FsspecTarget(location="memory://runs"),
    "ftp://me@host/runs": FsspecTarget(location="ftp://me@host/runs"),
}

REFUSED = {
    "": "found an empty string",
    "gopher://host/runs": "unknown scheme 'gopher'",
    "s3:///runs": "expected a bucket",
    "s3://bucket?colour=red": "unknown option 'colour'",
    "s3://bucket/../other": "without empty parts",
    "file://elsewhere/runs": "expected no host",
    "s3://[bucket/runs": "not a valid URI: Invalid IPv6 URL",
    "s3://bucket/ru\nns": "no control characters",
    "s3://bucket/runs#1": "s3://bucket/runs: expected no '#'.* write %23",
    "az://container/runs#1": "expected no '#'",
    "file:///runs/first#1": "expected neither '#' nor '[?]'.* write %23 and %3F",
    "smb://host/runs": "needs a package that is not installed.*smbprotocol",
    "runs/first": r"'runs' is not a type of target block; write './runs/first' for a folder",
    "s3target/prod": "'s3target' is not a type of target block",
    "~nobody-at-all/runs": "this user has no home folder",
    "$HOME/runs": r"variables are not expanded; write os.path.expandvars\('\$HOME/runs'\), or './\$HOME/runs'",
    "s3:/bucket/runs": "expected two slashes after s3:, as in s3://bucket/runs; pass a .*, or './s3:/bucket/runs'",
    "/runs\0/first": "without NUL",
}


@pytest.fixture(autouse=True)
def _stay_in_working_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(WORKING_FOLDER)


@pytest.mark.parametrize("text", TARGETS)
def test_what_people_write_is_read_by_one_rule(text: str) -> None:
    expected = LocalTarget(path="~/runs") if text == "~/runs" else TARGETS[text]  # each test has its own home
    assert resolve_target(text) == expected


@pytest.mark.parametrize("text", REFUSED)
def test_what_cannot_be_read_is_one_clear_error(text: str) -> None:
    with pytest.raises(InvalidInput, match=REFUSED[text]) as caught:
        resolve_target(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("uri", ["s3://me:secret-of-mine@bucket/runs", "sftp://me:secret-of-mine@host/runs"])
def test_a_password_in_a_uri_is_refused_and_not_repeated(uri: str) -> None:
    with pytest.raises(InvalidInput, match=r"credentials|password") as caught:
        resolve_target(uri)
    assert "secret-of-mine" not in str(caught.value)


def test_a_block_is_itself() -> None:
    target = S3Target(bucket="bucket")
    assert resolve_target(target) is target


def test_a_path_object_is_always_a_path(tmp_path: Path) -> None:
    assert resolve_target(tmp_path) == LocalTarget(path=str(tmp_path))
    assert resolve_target(Path("s3-target/prod")) == LocalTarget(path=str(WORKING_FOLDER / "s3-target/prod"))


@pytest.mark.parametrize("value", [None, 3, b"s3://bucket"])
def test_anything_else_is_refused(value: Any) -> None:
    message = "target: expected a block, a 'block-type/name' slug, a URI or a path, found a"
    with pytest.raises(InvalidInput, match=message):
        resolve_target(value)


@pytest.mark.parametrize("text", [uri for uri in TARGETS if "://" in uri])
def test_a_uri_alone_is_handed_to_another_process(text: str) -> None:
    target = TARGETS[text]
    assert resolve_target(target_reference(target)) == target


def test_a_uri_says_where_it_is_and_not_by_whose_keys() -> None:
    keys: dict[str, Any] = {"access_key_id": "id", "secret_access_key": "secret-of-mine"}
    target = S3Target(bucket="bucket", prefix="runs", endpoint_url="http://minio:9000", allow_http=True, **keys)
    assert target.uri == "s3://bucket/runs?endpoint_url=http://minio:9000"
    assert S3Target(bucket="bucket", region="eu-west-1").uri == "s3://bucket?region=eu-west-1"


def test_a_target_that_says_more_than_its_uri_has_to_be_saved_first() -> None:
    target = S3Target(bucket="bucket", access_key_id="id", secret_access_key="secret-of-mine")
    with pytest.raises(InvalidInput, match=r"Save the block with target.save\('name'\), and pass its slug") as caught:
        target_reference(target)
    assert "secret-of-mine" not in str(caught.value)


def test_without_a_server_that_is_said_and_not_that_a_block_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    message = "no Prefect server is set up, but saved blocks are stored on a server: prefect"
    with (
        temporary_settings({PREFECT_SERVER_ALLOW_EPHEMERAL_MODE: False}, restore_defaults={PREFECT_API_URL}),
        pytest.raises(InvalidInput, match=message),
    ):
        resolve_target("s3-target/prod")


@pytest.mark.usefixtures("prefect_server")
def test_a_misspelt_block_is_one_error_that_has_no_chain_of_tracebacks() -> None:
    with pytest.raises(InvalidInput, match=r"no such block is saved on the Prefect server at http") as caught:
        resolve_target("azure-target/prod")
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_a_server_that_does_not_answer_is_named_with_what_needs_none() -> None:
    with (
        temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}),
        pytest.raises(StoreUnavailable, match=r"http://127.0.0.1:9/api.* did not answer.*a URI, such as s3://"),
    ):
        resolve_target("s3-target/prod")


class ShelfTarget(StorageTarget):
    """A user's kind of target."""

    _block_type_slug: ClassVar[str | None] = "shelf-target"
    shelf: str = Field(description="Which.")

    @property
    def uri(self) -> str:
        return f"shelf://{self.shelf}"

    @contextmanager
    def open(self, *, timeout: timedelta) -> Iterator[ObjectStore]:  # noqa: ARG002  a dictionary does not hang
        yield MemoryStore()


@pytest.mark.usefixtures("prefect_server")
def test_a_users_own_kind_of_target_is_loaded_like_the_others() -> None:
    save(ShelfTarget(shelf="third"), "mine")
    loaded = resolve_target("shelf-target/mine")
    assert isinstance(loaded, ShelfTarget)
    assert loaded.check().ok
    assert target_reference(loaded) == "shelf-target/mine"


@pytest.mark.parametrize("relative", ["runs", "./runs/first", "../runs", Path("runs"), "."])
def test_a_run_of_a_deployment_refuses_a_relative_path(
    relative: str | Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", "2b6b9c0e-5a3c-4b0f-9d5e-1f1f5a1b2c3d")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput, match="expected an absolute path or a URI in a run of a deployment"):
        resolve_target(relative)
    assert resolve_target(str(tmp_path)) == LocalTarget(path=str(tmp_path))
    assert resolve_target("~/runs") == LocalTarget(path="~/runs")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("is_subflow_of_one", [False, True])
@pytest.mark.parametrize("deployment", [None, uuid4()])
def test_a_subflow_of_a_run_of_a_deployment_has_none_and_runs_in_one(
    deployment: UUID | None, is_subflow_of_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = FlowRun(flow_id=uuid4(), deployment_id=deployment)
    monkeypatch.setattr(FlowRunContext, "get", lambda: cast("FlowRunContext", SimpleNamespace(flow_run=run)))
    if is_subflow_of_one:
        monkeypatch.setenv("PREFECT__FLOW_RUN_ID", "2b6b9c0e-5a3c-4b0f-9d5e-1f1f5a1b2c3d")
    assert current_deployment_id() == deployment
    assert is_deployment_run() == (deployment is not None or is_subflow_of_one)


def test_a_run_of_a_deployment_may_read_a_relative_folder_that_exists(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", "2b6b9c0e-5a3c-4b0f-9d5e-1f1f5a1b2c3d")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput, match="found a relative path"):
        resolve_existing("./runs")
    (tmp_path / "runs").mkdir()
    assert resolve_existing("./runs") == LocalTarget(path=str(tmp_path / "runs"), must_exist=True)


def test_a_uri_in_a_path_is_refused_since_a_path_keeps_one_slash() -> None:
    with pytest.raises(InvalidInput, match="expected two slashes after s3:"):
        resolve_target(Path("s3://bucket/runs"))
