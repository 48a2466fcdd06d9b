"""Every error code of the table, as the real client reports the answer of a server that sends it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from obstore.exceptions import GenericError
from obstore.store import AzureStore, GCSStore, S3Store

from prefect_tune.core.errors import (
    AlreadyExists,
    CommitUnknown,
    ObjectNotFound,
    StoreRefused,
    StoreUnavailable,
    TuneError,
)
from prefect_tune.stores import obstore_store
from prefect_tune.stores.deadline import Deadline
from prefect_tune.stores.obstore_store import CODES, ErrorCode, Fault, Meaning, ObstoreStore, connected
from tests.fakes.servers.canned_http import Canned, answering, s3_error

_PASSES = (Meaning.PASSING, Meaning.UNKNOWN)


@pytest.fixture(autouse=True)
def _asks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(obstore_store, "_REQUEST_PAUSES_SECONDS", (0.0,))


@pytest.fixture(scope="module")
def server() -> Iterator[Canned]:
    with answering(200) as started:
        yield started


def _s3(url: str, times: Any) -> Any:
    return S3Store("bucket", endpoint=url, region="us-east-1", access_key_id="k", secret_access_key="s", **times)


def _gcs(url: str, times: Any) -> Any:
    anybody = {"gcs_base_url": url, "disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
    return GCSStore("bucket", service_account_key=json.dumps(anybody), **times)


def _azure(url: str, times: Any) -> Any:
    return AzureStore("bucket", account_name="account", account_key="aGVsbG8=", endpoint=f"{url}/account", **times)


_CLIENTS: dict[str, Callable[[str, Any], Any]] = {"gcs": _gcs, "oauth": _gcs, "azure": _azure, "entra": _azure}


@contextmanager
def _store(vendor: str, server: Canned) -> Iterator[ObstoreStore]:
    def connect(limit: timedelta) -> Any:
        client = _CLIENTS.get(vendor.partition("-")[0], _s3)
        return connected(lambda **times: client(server.url, times), limit, {"allow_http": True})

    store = ObstoreStore(connect, deadline=Deadline.after(timedelta(seconds=60)))
    server.status, server.body, server.headers = 200, b"", {"etag": '"1"', "x-goog-generation": "1"}
    store.put("there", b"x")
    yield store
    store.close()


def _answer(server: Canned, vendor: str, status: int, code: str) -> None:
    """Answer with this vendor's error: in XML, in JSON of two kinds, and in Azure's header."""
    server.status, server.headers = status, {"content-type": "application/xml"}
    server.body = s3_error(code, "no")
    if vendor == "gcs-json":
        error = {"code": status, "message": "no", "errors": [{"domain": "global", "reason": code, "message": "no"}]}
        server.body = json.dumps({"error": error}).encode()
    elif vendor in ("oauth", "entra"):
        server.body = json.dumps({"error": code, "error_description": "no"}).encode()
    elif vendor.startswith("azure"):
        server.headers = {"content-type": "application/xml", "x-ms-error-code": code}


def _raised(act: Callable[[], object]) -> TuneError:
    with pytest.raises(TuneError) as raised:
        act()
    return raised.value


_STATUSES: Mapping[tuple[str, int], str] = {
    ("s3", 400): "RequestTimeout IncompleteBody BadDigest ConnectionClosedByRequester ResponseInterrupted "
    "IDPCommunicationError ExpiredToken ExpiredTokenException TokenRefreshRequired InvalidToken RequestExpired "
    "AuthorizationHeaderMalformed IllegalLocationConstraintException KMS.DisabledException KMS.NotFoundException "
    "InvalidArgument InvalidRequest EntityTooLarge KeyTooLongError InvalidBucketName",
    ("s3", 403): "InvalidAccessKeyId InvalidClientTokenId SignatureDoesNotMatch AccessDenied RequestTimeTooSkewed "
    "InvalidObjectState",
    ("s3", 404): "NoSuchBucket NoSuchKey",
    ("s3", 405): "MethodNotAllowed",
    ("s3", 409): "ConditionalRequestConflict OperationAborted",
    ("s3", 412): "PreconditionFailed",
    ("s3", 416): "InvalidRange",
    ("s3", 500): "InternalError",
    ("s3", 501): "NotImplemented",
    ("s3", 503): "RequestTimeout SlowDown ServiceUnavailable RequestLimitExceeded",
    ("s3", 301): "PermanentRedirect",
    ("sdk", 400): "RequestTimeoutException TooManyRequestsException Throttling ThrottlingException ThrottledException "
    "RequestThrottled RequestThrottledException RequestLimitExceeded BandwidthLimitExceeded KMS.ThrottlingException",
    ("minio", 400): "XAmzContentSHA256Mismatch XAmzContentChecksumMismatch XMinioAdminBucketQuotaExceeded "
    "XMinioBackendDown",
    ("minio", 429): "TooManyRequests",
    ("minio", 499): "ClientDisconnected",
    ("minio", 503): "SlowDownRead SlowDownWrite",
    ("minio", 507): "XMinioStorageFull",
    ("r2", 400): "ClientDisconnect",
    ("r2", 403): "ObjectLockedByBucketPolicy",
    ("gcs", 400): "CrcMismatch",
    ("gcs", 403): "ObjectUnderActiveHold RetentionPolicyNotMet",
    ("gcs-json", 403): "rateLimitExceeded userRateLimitExceeded forbidden",
    ("gcs-json", 409): "conflict",
    ("oauth", 400): "invalid_grant",
    ("entra", 400): "temporarily_unavailable",
    ("azure", 400): "Md5Mismatch Crc64Mismatch InvalidResourceName",
    ("azure", 403): "AuthenticationFailed InvalidAuthenticationInfo AuthorizationFailure "
    "AuthorizationPermissionMismatch",
    ("azure", 404): "ContainerNotFound",
    ("azure", 409): "ContainerBeingDeleted AccountBeingCreated PendingCopyOperation SystemInUse InvalidBlobType "
    "BlobOperationNotSupported ResourceTypeMismatch BlobImmutableDueToLegalHold BlobImmutableDueToPolicy "
    "SnapshotsPresent BlobArchived BlobBeingRehydrated BlobUsesCustomerSpecifiedEncryption FeatureVersionMismatch "
    "ContainerDisabled BlobAlreadyExists",
    ("azure", 412): "LeaseIdMissing ConditionNotMet",
}
"""By client and status, the codes that come with it."""
_ANSWERS = [
    pytest.param(CODES[code], vendor, status, id=f"{code}-{vendor}-{status}")
    for (vendor, status), codes in _STATUSES.items()
    for code in codes.split()
]


@pytest.mark.parametrize(("row", "vendor", "status"), _ANSWERS)
def test_each_code_of_the_table_is_told_as_what_it_means(
    server: Canned, row: ErrorCode, vendor: str, status: int
) -> None:
    with _store(vendor, server) as store:
        _answer(server, vendor, status, row.code)
        written, created = _raised(lambda: store.put("a", b"x")), _raised(lambda: store.create("a", b"x"))
    if row.meaning in _PASSES:
        assert type(written) is StoreUnavailable
        maybe_done = row.meaning is Meaning.UNKNOWN or status >= 500
        assert type(created) is (CommitUnknown if maybe_done else StoreUnavailable)
    elif row.meaning is Meaning.ABSENT:
        assert type(written) is ObjectNotFound
    elif row.meaning is Meaning.PRESENT:
        assert type(created) is AlreadyExists
    else:
        assert type(written) is type(created) is StoreRefused
        assert row.code in str(written) or status in (301, 307), "the client does not read the body of a redirect"
    if row.meaning not in (Meaning.ABSENT, Meaning.PRESENT):
        assert row.advice in str(written)


def test_each_code_is_answered_once_above_and_a_refusal_says_what_to_do() -> None:
    answered = {code for codes in _STATUSES.values() for code in codes.split()}
    assert answered == CODES.keys() - {"InvalidCertificate", "BadScheme"}
    refused = [row for row in CODES.values() if row.meaning in (Meaning.REFUSED, Meaning.NO_BUCKET)]
    assert all(row.advice for row in refused)


@pytest.mark.parametrize(
    ("passes", "statuses"),
    [
        (False, (400, 401, 403, 405, 501, 505)),
        (True, (408, 409, 423, 425, 429, 499, 500, 502, 503, 504, 507, 509, 520)),
    ],
)
@pytest.mark.parametrize("body", [b"", b"<html>gateway</html>", s3_error("NobodyKnows", "no")])
def test_what_is_not_in_the_table_is_judged_by_its_status(
    server: Canned, statuses: Sequence[int], body: bytes, *, passes: bool
) -> None:
    with _store("s3", server) as store:
        for server.status in statuses:
            server.body = body
            error = _raised(lambda: store.put("a", b"x"))
            assert type(error) is (StoreUnavailable if passes else StoreRefused), error


# ------------------------------------------------------------------------------------- the place of the code


def _deleted(failed: Sequence[tuple[str, str]]) -> bytes:
    errors = "".join(f"<Error><Key>{key}</Key><Code>{code}</Code><Message>no</Message></Error>" for key, code in failed)
    return f"<?xml version='1.0'?><DeleteResult><Deleted><Key>a</Key></Deleted>{errors}</DeleteResult>".encode()


@pytest.mark.parametrize(
    ("code", "kind"),
    [("SlowDown", StoreUnavailable), ("InternalError", StoreUnavailable), ("AccessDenied", StoreRefused)],
)
def test_a_batch_that_failed_for_one_object_says_why(server: Canned, code: str, kind: type[TuneError]) -> None:
    with _store("s3", server) as store:
        server.status, server.body, server.headers = 200, _deleted([("b", code)]), {"content-type": "application/xml"}
        error = _raised(lambda: store.delete(["a", "b"]))
    assert type(error) is kind
    assert CODES[code].advice in str(error)


@pytest.mark.parametrize(("status", "kind"), [(503, StoreUnavailable), (500, StoreUnavailable), (403, StoreRefused)])
def test_a_batch_of_azure_that_failed_for_one_object_says_why(
    server: Canned, status: int, kind: type[TuneError]
) -> None:
    part = (
        f"--batch\r\nContent-Type: application/http\r\nContent-ID: 0\r\n\r\nHTTP/1.1 {status} no\r\n\r\n\r\n--batch--"
    )
    with _store("azure", server) as store:
        server.status, server.body = 202, part.encode()
        server.headers = {"content-type": "multipart/mixed; boundary=batch"}
        assert type(_raised(lambda: store.delete(["a", "b"]))) is kind


def test_a_head_that_is_refused_without_a_reason_is_explained_by_a_listing(server: Canned) -> None:
    with _store("s3", server) as store:
        _answer(server, "s3", 400, "ExpiredToken")
        error = _raised(lambda: store.size("a"))
        assert type(error) is StoreRefused
        assert "have expired" in str(error)
        _answer(server, "s3", 400, "RequestTimeout")
        assert type(_raised(lambda: store.size("a"))) is StoreUnavailable


def test_what_passes_is_asked_again_by_the_store_itself(server: Canned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(obstore_store, "_REQUEST_PAUSES_SECONDS", (0.0, 0.01, 0.01))
    with _store("s3", server) as store:
        _answer(server, "s3", 400, "RequestTimeout")
        before = len(server.asked)
        error = _raised(lambda: store.put("a", b"x"))
    assert len(server.asked) - before == 3
    assert "3 times" in str(error)
    assert "proxies" in str(error)


def test_an_object_of_a_batch_that_is_gone_already_is_fine(server: Canned) -> None:
    with _store("s3", server) as store:
        body = _deleted([("b", "NoSuchKey")]).replace(b"<Deleted><Key>a</Key></Deleted>", b"")
        server.status, server.body, server.headers = 200, body, {"content-type": "application/xml"}
        store.delete(["b"])


_UNSENT = """Generic S3 error: Error performing list request: Error performing GET {url} in 1ms - HTTP error: {said}

Debug source:
Generic {{ inner: Http( HttpError {{
                        kind: {kind},
                        source: reqwest::Error {{ {source} }}, }}, ), }}"""


@pytest.mark.parametrize(
    ("kind", "source", "advice"),
    [
        ("Connect", "kind: InvalidData, error: InvalidCertificate( UnknownIssuer )", "certificate is not trusted"),
        ("Unknown", "kind: Builder, source: BadScheme", "has no TLS"),
    ],
)
def test_what_the_client_would_not_even_ask_is_refused_at_once(kind: str, source: str, advice: str) -> None:
    text = _UNSENT.format(url="https://host/bucket", said="error sending request", kind=kind, source=source)
    fault = Fault.of(GenericError(text))
    assert not fault.transient
    assert not fault.perhaps_done
    error = fault.error("list")
    assert isinstance(error, StoreRefused)
    assert advice in str(error)


@pytest.mark.parametrize(
    ("vendor", "status", "code"),
    [("minio", 403, "RequestNotReadyYet"), ("sdk", 400, "LimitExceededException"), ("gcs", 400, "CloudKmsDisabledKey")],
)
def test_a_code_that_people_seldom_meet_is_as_final_as_its_status(
    server: Canned, vendor: str, status: int, code: str
) -> None:
    with _store(vendor, server) as store:
        _answer(server, vendor, status, code)
        error = _raised(lambda: store.put("a", b"x"))
    assert type(error) is StoreRefused
    assert code in str(error)


def test_a_blob_that_azure_itself_is_using_is_not_taken_for_one_that_is_there(server: Canned) -> None:
    with _store("azure-blob", server) as store:
        _answer(server, "azure-blob", 409, "SystemInUse")
        assert type(_raised(lambda: store.create("a", b"x"))) is StoreUnavailable
