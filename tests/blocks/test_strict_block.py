"""Blocks refuse bad fields at construction: one error, one line, no secret in it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import cloudpickle
import pytest
from pydantic import ValidationError

from prefect_tune.blocks import AzureTarget, FsspecTarget, GcsTarget, LocalTarget, S3Target, StorageTarget, SyncConfig
from prefect_tune.blocks.storage_target import StrictBlock
from prefect_tune.core.errors import InvalidInput

SECRET = "never-shown-to-anybody"
KEYS: dict[str, Any] = {"access_key_id": "id", "secret_access_key": SECRET}

TARGETS: list[StorageTarget] = [
    LocalTarget(path="/runs"),
    S3Target(bucket="bucket", prefix="runs", **KEYS),
    GcsTarget(bucket="bucket", anonymous=True),
    AzureTarget(container="container", account_name="account", account_key=SECRET),
    FsspecTarget(location="sftp://me@host/runs", secret_options={"password": SECRET}),
]


def make_block(kind: Any, **fields: Any) -> Any:
    """Make a block of fields that a type checker would reject too."""
    return kind(**fields)


BAD_INPUT: dict[str, tuple[Callable[[], StrictBlock], str]] = {
    "a misspelt bucket": (lambda: make_block(S3Target, bukcet="b"), r"no field 'bukcet': did you mean 'bucket'\?"),
    "a misspelt period": (lambda: make_block(SyncConfig, sync_period=3), r"did you mean 'sync_period_seconds'\?"),
    "an unknown field": (
        lambda: make_block(LocalTarget, path="/x", zzz=1),
        "no field 'zzz': it has path, must_exist, may_hang, signing_key",
    ),
    "no bucket": (lambda: make_block(S3Target), "'bucket' is missing"),
    "a URI as a bucket": (lambda: S3Target(bucket="s3://b"), "name alone, found the URI 's3://b'"),
    "a bucket's impossible name": (lambda: S3Target(bucket="b"), "'b' is not a valid name of a bucket"),
    "a container's impossible name": (lambda: AzureTarget(container="A_b"), "'A_b' is not a valid name of a container"),
    "a prefix that climbs out": (lambda: S3Target(bucket="bucket", prefix="a/../../b"), r"without empty parts"),
    "half of a key": (
        lambda: S3Target(bucket="bucket", access_key_id="id"),
        "require each other: set both, or neither",
    ),
    "a token alone": (lambda: S3Target(bucket="bucket", session_token=SECRET), "session_token needs access_key_id"),
    "keys, and none": (
        lambda: S3Target(bucket="bucket", anonymous=True, **KEYS),
        "access_key_id and anonymous contradict",
    ),
    "a plain http endpoint": (
        lambda: S3Target(bucket="bucket", endpoint_url="http://minio:9000"),
        "has no TLS: set allow_http=True if that is intended",
    ),
    "an endpoint with a password": (
        lambda: S3Target(bucket="bucket", endpoint_url=f"https://me:{SECRET}@minio"),
        "use the credential fields instead",
    ),
    "no time for a request": (lambda: S3Target(bucket="bucket", request_timeout_seconds=0), "request_timeout_seconds"),
    "something else than a key file": (
        lambda: GcsTarget(bucket="bucket", service_account_json=SECRET),
        "expected the JSON of a service account's key",
    ),
    "a key and a token": (
        lambda: AzureTarget(container="container", account_key=SECRET, sas_token=SECRET),
        "account_key and sas_token contradict each other",
    ),
    "something else than a connection string": (
        lambda: AzureTarget(container="container", connection_string=SECRET),
        "expected AccountName or BlobEndpoint",
    ),
    "a relative folder": (lambda: LocalTarget(path="runs"), "expected an absolute path or one that starts with '~'"),
    "a NUL in a path": (lambda: LocalTarget(path="/a\0b"), "without NUL"),
    "no URI": (lambda: FsspecTarget(location="host/runs"), "expected 'scheme://...'"),
    "an unknown scheme": (lambda: FsspecTarget(location="gopher://host"), "fsspec does not know the scheme 'gopher'"),
    "a password in a URI": (lambda: FsspecTarget(location=f"sftp://me:{SECRET}@host/runs"), "use secret_options="),
    "a negative period": (lambda: SyncConfig(sync_period_seconds=-1), "sync_period_seconds: .* greater than or equal"),
    "a target without a syncer": (
        lambda: SyncConfig(upload_dir="s3://bucket", syncer=None),
        "upload_dir needs a syncer, but syncer is None",
    ),
    "a syncer without a target": (lambda: SyncConfig(syncer="mine:Syncer"), "needs an upload_dir"),
    "a syncer that is none": (
        lambda: SyncConfig(upload_dir="s3://bucket", syncer="no import string"),
        "expected 'auto', 'package.module:Name' or a Syncer",
    ),
    "a number as a syncer": (lambda: SyncConfig(upload_dir="s3://bucket", syncer=3), "expected 'auto'.*found a int"),
    "a target's misspelt field": (
        lambda: SyncConfig(upload_dir={"block_type_slug": "s3-target", "bukcet": "b"}),
        r"no field 'bukcet': did you mean 'bucket'\?",
    ),
    "a target of no kind": (lambda: SyncConfig(upload_dir={"bucked": "b"}), "with a block_type_slug among"),
    "an unknown way to commit": (lambda: SyncConfig(commit="later"), "commit: .*'sync' or 'async'"),
    "an absolute exclude": (lambda: SyncConfig(artifact_excludes=["/tmp/*"]), "relative to the trial directory"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_gives_one_clear_error_of_one_line(case: str) -> None:
    make, complaint = BAD_INPUT[case]
    with pytest.raises(InvalidInput, match=complaint) as caught:
        make()
    message = str(caught.value)
    assert "\n" not in message
    assert SECRET not in message
    assert message.count(": ") <= 4
    assert caught.value.__cause__ is None


def test_what_pydantic_asks_is_refused_with_the_same_words() -> None:
    with pytest.raises(ValidationError, match="did you mean 'bucket'") as caught:
        S3Target.model_validate({"bukcet": "b", "secret_access_key": SECRET})
    assert SECRET not in str(caught.value)


def test_a_field_that_is_left_empty_in_a_form_is_not_given() -> None:
    empty = S3Target(bucket="bucket", endpoint_url="", region="", access_key_id="", secret_access_key="")
    assert empty == S3Target(bucket="bucket")
    with pytest.raises(InvalidInput, match=r"expected 'scheme://\.\.\.'"):
        FsspecTarget(location="")


def test_a_dump_of_another_kind_of_block_is_refused() -> None:
    with pytest.raises(InvalidInput, match="expected a block of type 's3-target', found 'gcs-target'"):
        S3Target(**GcsTarget(bucket="bucket").model_dump())


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: type(target).__name__)
class TestEachTarget:
    def test_it_never_changes(self, target: StorageTarget) -> None:
        with pytest.raises(ValidationError, match="frozen"):
            setattr(target, next(iter(type(target).model_fields)), "else")

    def test_it_travels_to_another_process(self, target: StorageTarget) -> None:
        assert pickle.loads(pickle.dumps(target)) == target
        assert cloudpickle.loads(cloudpickle.dumps(target)) == target

    def test_its_own_dump_makes_it_again(self, target: StorageTarget) -> None:
        assert type(target)(**target.model_dump(context={"include_secrets": True})) == target

    def test_neither_its_uri_nor_its_text_tells_a_secret(self, target: StorageTarget) -> None:
        text = f"{target.uri} {target!r} {target} {target.model_dump_json()}"
        assert SECRET not in text
        assert list(target.iter_secret_values()) == [] or SECRET in list(target.iter_secret_values())


@pytest.mark.skipif(find_spec("prefect_aws") is not None, reason="prefect-aws is installed")
def test_a_credentials_block_without_its_package_says_what_to_install() -> None:
    with pytest.raises(InvalidInput, match=r"pip install 'prefect-tune\[aws\]'"):
        S3Target(bucket="bucket", credentials={"aws_access_key_id": "id"})
