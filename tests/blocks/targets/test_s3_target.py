from __future__ import annotations

import json
import re
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from moto import settings as moto_settings

from prefect_tune.blocks import S3Target, resolve_target
from prefect_tune.core.errors import InvalidInput
from tests.blocks.conftest import KEYS, SHORT
from tests.fakes.servers.canned_http import canned_server, s3_error
from tests.fakes.servers.moto_server import aws_client
from tests.fakes.servers.processes import free_port

BRIEF = timedelta(seconds=1)


def make_target(url: str, **changes: Any) -> S3Target:
    fields: dict[str, Any] = {"bucket": "bucket", "prefix": "runs/first", "endpoint_url": url, "allow_http": True}
    return S3Target(**{**fields, **KEYS, **changes})


def test_a_good_bucket_passes_and_is_left_as_it_was(moto: str) -> None:
    result = make_target(moto).check()
    assert (result.ok, result.conditional_create) == (True, True)
    uri = f"s3://bucket/runs/first?endpoint_url={moto}"
    assert result.message.startswith(f"{uri}: a probe was written, read back, listed and deleted")
    assert "Contents" not in aws_client(moto).list_objects_v2(Bucket="bucket")


def test_objects_lie_below_the_prefix(moto: str) -> None:
    with make_target(moto).open(timeout=SHORT) as store:
        store.create("a", b"bytes")
    assert aws_client(moto).get_object(Bucket="bucket", Key="runs/first/a")["Body"].read() == b"bytes"
    with make_target(moto).open(timeout=SHORT) as store:
        store.delete(["a"])


@pytest.fixture
def strict_moto(moto: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, dict[str, str]]]:
    """Make moto check credentials and policies; yield users' keys by their permissions."""
    iam = aws_client(moto, "iam")
    policies = {
        "all": ["s3:*"],
        "read": ["s3:Get*", "s3:List*"],
        "all but delete": ["s3:Get*", "s3:List*", "s3:Put*"],
        "nothing": ["sqs:*"],
    }
    keys = {name: _create_user(iam, name.replace(" ", "-"), actions) for name, actions in policies.items()}
    monkeypatch.setattr(moto_settings, "INITIAL_NO_AUTH_ACTION_COUNT", 0)
    yield keys
    monkeypatch.undo()
    for name, key in keys.items():
        user = name.replace(" ", "-")
        iam.delete_access_key(UserName=user, AccessKeyId=key["access_key_id"])
        iam.delete_user_policy(UserName=user, PolicyName="only")
        iam.delete_user(UserName=user)


def _create_user(iam: Any, name: str, actions: list[str]) -> dict[str, str]:
    iam.create_user(UserName=name)
    policy = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": actions, "Resource": "*"}]}
    iam.put_user_policy(UserName=name, PolicyName="only", PolicyDocument=json.dumps(policy))
    key = iam.create_access_key(UserName=name)["AccessKey"]
    return {"access_key_id": key["AccessKeyId"], "secret_access_key": key["SecretAccessKey"]}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({}, None),
        ({"access_key_id": "AKIAUNKNOWN"}, "the server does not know this access key"),
        ({"secret_access_key": "not-the-secret-of-it"}, "the secret does not match the access key"),
    ],
    ids=["right", "unknown key", "wrong secret"],
)
def test_credentials_are_told_right_from_wrong(
    moto: str, strict_moto: dict[str, dict[str, str]], changes: dict[str, str], complaint: str | None
) -> None:
    result = make_target(moto, **{**strict_moto["all"], **changes}).check()
    assert result.ok is (complaint is None)
    assert (complaint or "a probe was written") in result.message
    assert "not-the-secret-of-it" not in result.message


@pytest.mark.parametrize(
    ("user", "complaint"),
    [
        ("read", "read-only: listing is permitted, writing is not"),
        ("all but delete", "old checkpoints could never be removed; could not delete: "),
        ("nothing", "could not list: "),
    ],
)
def test_a_permission_that_is_missing_is_named(
    moto: str, strict_moto: dict[str, dict[str, str]], user: str, complaint: str
) -> None:
    result = make_target(moto, **strict_moto[user]).check()
    assert not result.ok
    assert complaint in result.message


def test_a_server_that_fails_is_told_from_one_that_is_not_there() -> None:
    with canned_server(503, s3_error("SlowDown", "reduce your request rate")) as server:
        result = make_target(server.url).check(timeout=BRIEF)
    assert "503" in result.message
    absent = make_target(f"http://127.0.0.1:{free_port()}").check(timeout=BRIEF)
    assert re.search("could not list: .*(not done within|Connect)", absent.message)
    assert result.may_be_temporary
    assert absent.may_be_temporary


def test_a_check_of_a_server_that_never_answers_ends_in_time() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        start = time.monotonic()
        result = make_target(f"http://127.0.0.1:{listener.getsockname()[1]}").check(timeout=BRIEF)
    assert not result.ok
    assert "not done within 1 s" in result.message
    assert time.monotonic() - start < 3


def test_a_server_without_conditional_writes_is_found_out(rclone_s3: str) -> None:
    result = make_target(rclone_s3).check()
    assert (result.ok, result.conditional_create) == (False, False)
    assert "NO CONDITIONAL WRITES" in result.message
    assert "set conditional_writes=False" in result.message


def test_a_server_without_conditional_writes_serves_one_runner_when_that_is_said(rclone_s3: str) -> None:
    target = make_target(rclone_s3, conditional_writes=False)
    result = target.check()
    assert (result.ok, result.conditional_create) == (True, False)
    assert "ONE RUNNER ONLY" in result.message
    with target.open(timeout=SHORT) as store:
        assert not store.has_conditional_create


# ------------------------------------------------------------------------------------------ ambient credentials


def test_a_uri_uses_the_credentials_of_the_environment(
    moto: str, strict_moto: dict[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = resolve_target(f"s3://bucket/runs?endpoint_url={moto}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", strict_moto["all"]["access_key_id"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", strict_moto["all"]["secret_access_key"])
    assert target.check().ok


def test_a_uri_uses_a_profile(moto: str, strict_moto: dict[str, dict[str, str]], tmp_path: Path) -> None:
    keys = strict_moto["all"]
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(
        f"[default]\naws_access_key_id={keys['access_key_id']}\naws_secret_access_key={keys['secret_access_key']}\n"
    )
    assert resolve_target(f"s3://bucket/runs?endpoint_url={moto}").check().ok


def test_no_credentials_anywhere_is_said(moto: str) -> None:
    result = resolve_target(f"s3://bucket/runs?endpoint_url={moto}").check(timeout=BRIEF)
    assert not result.ok
    assert "no credentials given, and this machine has none: set keys, a credentials" in result.message


def test_the_environments_token_is_not_mixed_with_the_blocks_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of-another-user")
    with canned_server(404, s3_error("NoSuchBucket", "")) as server:
        make_target(server.url).check(timeout=SHORT)
        make_target(server.url, session_token="my-own").check(timeout=SHORT)
    assert {request.get("x-amz-security-token") for request in server.request_headers} == {None, "my-own"}


def test_an_endpoint_from_the_environment_needs_tls_or_consent(moto: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto)
    target = S3Target(bucket="bucket", **KEYS)
    with pytest.raises(InvalidInput, match="has no TLS: set allow_http=True"), target.open(timeout=SHORT):
        pass
    assert S3Target(bucket="bucket", allow_http=True, **KEYS).check().ok


# --------------------------------------------------------------------------------------------- signed requests


@pytest.mark.parametrize(("mode", "is_signed"), [("without-tls", True), ("never", False), ("always", True)], ids=str)
def test_the_signature_covers_the_bytes_where_tls_does_not(mode: str, is_signed: bool) -> None:
    with (
        canned_server(403, s3_error("AccessDenied", "")) as server,
        make_target(server.url, payload_signing=mode).open(timeout=SHORT) as store,
    ):
        with pytest.raises(Exception, match="permission"):
            store.put("a", b"bytes")
        (request,) = server.request_headers
    assert (request["x-amz-content-sha256"] != "UNSIGNED-PAYLOAD") is is_signed


# ---------------------------------------------------------------------------------------------------------- TLS


@dataclass(frozen=True)
class Certificates:
    authority: str
    server: Path
    """The server's certificate and its key, in one file."""


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    authority, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    root = _make_certificate("loopback authority", authority, "loopback authority", authority, is_authority=True)
    server = _make_certificate("localhost", key, "loopback authority", authority, is_authority=False)
    encoding, private_format = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    private_key = key.private_bytes(encoding, private_format, serialization.NoEncryption())
    file = tmp_path_factory.mktemp("tls") / "server.pem"
    file.write_bytes(server + private_key)
    return Certificates(root.decode(), file)


def _make_certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: str,
    issuer_key: ec.EllipticCurvePrivateKey,
    *,
    is_authority: bool,
) -> bytes:
    subject, issuer_name = (x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, n)]) for n in (name, issuer))
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(issuer_name, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .sign(issuer_key, hashes.SHA256())
    )
    return certificate.public_bytes(serialization.Encoding.PEM)


@pytest.mark.parametrize(
    ("trust", "text"),
    [
        ("none", "the server's certificate is not trusted"),
        ("its authority", "no such bucket"),
        ("anybody", "no such bucket"),
    ],
)
def test_a_certificate_is_believed_only_from_who_is_trusted(certificates: Certificates, trust: str, text: str) -> None:
    trusted: dict[str, dict[str, Any]] = {
        "none": {},
        "its authority": {"ca_certificate": certificates.authority},
        "anybody": {"verify_tls": False},
    }
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificates.server)
    with canned_server(404, s3_error("NoSuchBucket", ""), tls=tls) as server:
        result = make_target(server.url, allow_http=False, **trusted[trust]).check(timeout=BRIEF)
    assert re.search(text, result.message)
