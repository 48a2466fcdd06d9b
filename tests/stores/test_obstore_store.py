"""The store on object storage: deadlines, lost replies, and each error code as the real client reports it."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from moto import settings as moto_settings
from obstore.exceptions import GenericError
from obstore.store import AzureStore, GCSStore, LocalStore, S3Store

from prefect_tune.core.errors import (
    AlreadyExists,
    CommitUnknown,
    DeadlineExceeded,
    ObjectNotFound,
    StoreRefused,
    StoreUnavailable,
    TuneError,
)
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.stores import obstore_store
from prefect_tune.stores.deadline import Deadline
from prefect_tune.stores.obstore_store import ERROR_CODES, ErrorCode, ErrorMeaning, ObstoreStore, make_client
from tests.fakes.servers.canned_http import CannedServer, canned_server, s3_error
from tests.fakes.servers.moto_server import aws_client, moto_server
from tests.fakes.servers.s3_sink import Fault, S3Sink, SinkRequest
from tests.fakes.stores.object_stores import object_store
from tests.fakes.trial_processes import wait_until
from tests.stores.contract import StoreContract


def _operations(store: ObjectStore) -> dict[str, Callable[[], object]]:
    return {
        "create": lambda: store.create("a", b"1"),
        "put": lambda: store.put("a", b"1"),
        "replace": lambda: store.replace("a", [b"1"]),
        "replace by parts": lambda: store.replace("a", [bytes(8 << 20), b"1"]),
        "read": lambda: store.read("a"),
        "read a range": lambda: store.read("a", offset=1, length=1),
        "size": lambda: store.size("a"),
        "list": lambda: store.list("a"),
        "delete": lambda: store.delete(["a"]),
    }


_OPERATIONS = sorted(_operations(None))  # type: ignore[arg-type]  # only the names are used


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    with moto_server() as url:
        yield url


@pytest.fixture
def sink() -> Iterator[S3Sink]:
    with S3Sink() as sink:
        yield sink


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(obstore_store, "_REQUEST_PAUSES_SECONDS", (0.0, 0.01, 0.02, 0.04))


class TestOnARealServer(StoreContract):
    numbers = count()

    @pytest.fixture
    def store(self, moto: str) -> ObstoreStore:
        bucket = f"bucket-{next(self.numbers)}"
        aws_client(moto).create_bucket(Bucket=bucket)
        return object_store(moto, bucket=bucket)

    @pytest.mark.long
    def test_a_listing_has_all_of_more_than_a_thousand_entries(self, store: ObjectStore) -> None:
        super().test_a_listing_has_all_of_more_than_a_thousand_entries(store)


class TestOnTheSink(StoreContract):
    @pytest.fixture
    def store(self, sink: S3Sink) -> ObstoreStore:
        return object_store(sink.endpoint)


def test_a_bucket_that_does_not_exist_is_said_to_be_missing(moto: str) -> None:
    for call in _operations(object_store(moto, bucket="never-created")).values():
        with pytest.raises(StoreRefused, match="no such bucket"):
            call()


def test_what_is_not_there_is_asked_for_once_more_only_until_the_bucket_was_seen(sink: S3Sink) -> None:
    store = object_store(sink.endpoint)
    for _ in range(3):
        assert store.size("a") is None
    assert sink.requests == {"HEAD": 3, "GET": 1}


def test_wrong_credentials_are_refused(moto: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moto_settings, "INITIAL_NO_AUTH_ACTION_COUNT", 0)
    for call in _operations(object_store(moto, bucket="never-created")).values():
        with pytest.raises(StoreRefused, match="credentials"):
            call()


def test_a_refusal_is_final(sink: S3Sink) -> None:
    sink.fault = lambda _request: Fault.REFUSE_403
    for operation, call in _operations(object_store(sink.endpoint)).items():
        before = len(sink.log)
        with pytest.raises(StoreRefused, match="permission"):
            call()
        # The answer to a HEAD has no body: a listing says why.
        assert len(sink.log) - before == (2 if operation == "size" else 1), operation


def test_what_does_not_pass_is_tried_so_many_times(sink: S3Sink) -> None:
    sink.fault = lambda _request: Fault.FAIL_503
    for operation, call in _operations(object_store(sink.endpoint)).items():
        with pytest.raises(CommitUnknown if operation == "create" else StoreUnavailable, match="4 times"):
            call()


def test_a_server_that_is_not_there_has_certainly_written_nothing() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        closed_port = f"http://127.0.0.1:{probe.getsockname()[1]}"
        with pytest.raises(StoreUnavailable):
            object_store(closed_port).create("a", b"1")


def test_a_create_that_got_no_reply_at_all_is_unknown(sink: S3Sink) -> None:
    sink.fault = lambda _request: Fault.STALL
    with pytest.raises(CommitUnknown, match="read it back"):
        object_store(sink.endpoint, seconds=0.5).create("a", b"1")


def test_a_refusal_after_a_lost_reply_leaves_a_create_unknown(sink: S3Sink) -> None:
    faults = iter([Fault.LOSE_REPLY, Fault.REFUSE_403])
    sink.fault = lambda _request: next(faults)
    with pytest.raises(CommitUnknown):
        object_store(sink.endpoint).create("a", b"1")


@pytest.mark.parametrize("operation", _OPERATIONS)
def test_a_server_that_never_answers_is_left_at_the_deadline_with_nothing_behind(sink: S3Sink, operation: str) -> None:
    sink.fault = lambda _request: Fault.STALL
    store = object_store(sink.endpoint, seconds=1)
    before = threading.active_count()
    start = time.monotonic()
    expected = {"create": CommitUnknown, "replace by parts": StoreUnavailable}.get(operation, DeadlineExceeded)
    with pytest.raises(expected):
        _operations(store)[operation]()
    assert time.monotonic() - start < 10  # it never answers
    wait_until(lambda: not sink.connections)
    wait_until(lambda: threading.active_count() <= before)  # the server's threads end with their connections


def test_a_large_range_that_stops_arriving_ends_at_the_deadline(sink: S3Sink) -> None:
    writer = object_store(sink.endpoint, seconds=60)
    writer.put("blob", bytes(3 << 20))
    writer.close()  # else its connection may stay, idle in the pool
    store = object_store(sink.endpoint, seconds=1)
    sink.fault = lambda _request: Fault.STALL_BODY
    start = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        store.read("blob", length=2 << 20)
    assert time.monotonic() - start < 30  # the server never sends the rest
    wait_until(lambda: not sink.connections)


def test_many_writers_into_a_hung_store_all_end_and_none_is_left(sink: S3Sink) -> None:
    sink.fault = lambda _request: Fault.STALL
    store = object_store(sink.endpoint, seconds=1.5, request_timeout=timedelta(seconds=0.5))
    body = bytes(4 << 20)

    def write(number: int) -> TuneError | None:
        try:
            store.put(f"blobs/{number}", body)
        except TuneError as error:
            return error
        return None

    start = time.monotonic()
    with ThreadPoolExecutor(16) as pool:
        outcomes = list(pool.map(write, range(16)))
    assert time.monotonic() - start < 2.5
    assert all(isinstance(outcome, StoreUnavailable) for outcome in outcomes)
    wait_until(lambda: not sink.connections)
    sink.fault = lambda _request: None
    time.sleep(0.2)
    assert sink.names() == []


def test_after_the_deadline_nothing_is_asked(sink: S3Sink) -> None:
    store = object_store(sink.endpoint, seconds=0.05)
    time.sleep(0.1)
    for operation in _OPERATIONS:
        with pytest.raises(DeadlineExceeded):
            _operations(store)[operation]()
    assert not sink.log


def test_a_listing_that_fails_in_the_middle_goes_on_where_it_was(sink: S3Sink) -> None:
    store = object_store(sink.endpoint)
    names = [f"f/{number:04d}" for number in range(2001)]
    for name in names:
        store.put(name, b"")
    sink.reset()
    requests = count()
    sink.fault = lambda _request: Fault.FAIL_500 if next(requests) == 1 else None
    assert [listed.path for listed in store.list("f")] == names
    assert sink.requests == {"GET": 4}


def test_one_request_is_made_for_each_act(sink: S3Sink) -> None:
    store = object_store(sink.endpoint)
    operations = [
        lambda: store.put("a", bytes(16 << 20)),
        lambda: store.create("b", b"1"),
        lambda: store.replace("b", [b"2"]),
        lambda: store.read("a"),
        lambda: store.read("a", offset=5, length=1 << 20),
        lambda: store.size("a"),
        lambda: store.list(""),
        lambda: store.delete(["a", "b"]),
    ]
    for number, operation in enumerate(operations, 1):
        operation()
        assert len(sink.log) == number


def test_an_upload_by_parts_that_fails_leaves_the_object_and_no_part_and_is_tried_again(sink: S3Sink) -> None:
    store = object_store(sink.endpoint)
    store.replace("a", [b"old"])
    pieces = [b"1" * (8 << 20), b"2" * (8 << 20), b"3"]
    sink.fault = lambda request: Fault.REFUSE_403 if "partNumber=3" in request.query else None
    with pytest.raises(StoreRefused):
        store.replace("a", pieces)
    assert bytes(store.read("a")) == b"old"
    faults = {"partNumber=2": Fault.RESET}
    sink.fault = lambda request: faults.pop(request.query.partition("&")[0], None)
    store.replace("a", pieces)
    assert not faults
    assert bytes(store.read("a")) == b"".join(pieces)
    assert sink.upload_count == 0


def test_an_upload_by_parts_that_is_too_slow_ends_before_the_deadline(sink: S3Sink) -> None:
    store = object_store(sink.endpoint, seconds=2)
    sink.latency = timedelta(seconds=0.15)
    start = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        store.replace("a", [bytes(8 << 20)] * 50)
    assert time.monotonic() - start < 2.2
    assert sink.names() == []
    assert sink.upload_count == 0


def test_no_upload_by_parts_begins_that_cannot_end_before_the_deadline(sink: S3Sink) -> None:
    store = object_store(sink.endpoint)

    def fail_late(_request: SinkRequest) -> Fault:
        store._deadline = Deadline.after(timedelta(seconds=5))
        return Fault.FAIL_503

    sink.fault = fail_late
    with pytest.raises(DeadlineExceeded):
        store.replace("a", [bytes(8 << 20), b"1"])
    assert sink.requests == {"POST": 1}


def test_a_missing_object_is_not_there_even_for_no_bytes(sink: S3Sink) -> None:
    with pytest.raises(ObjectNotFound):
        object_store(sink.endpoint).read("a", length=0)


def test_closing_lets_go_of_the_connections(sink: S3Sink) -> None:
    store = object_store(sink.endpoint)
    store.put("a", b"1")
    assert sink.connections
    store.close()
    wait_until(lambda: not sink.connections)


def test_a_bucket_that_was_deleted_meanwhile_is_not_taken_for_an_empty_one(moto: str) -> None:
    client = aws_client(moto)
    client.create_bucket(Bucket="short-lived")
    store = object_store(moto, bucket="short-lived")
    store.put("a", b"1")
    store.delete(["a"])
    client.delete_bucket(Bucket="short-lived")
    with pytest.raises(StoreRefused, match="no such bucket"):
        store.read("a")


def test_where_each_object_is_deleted_by_itself_what_is_gone_does_not_keep_the_rest(tmp_path: Path) -> None:
    deadline = Deadline.after(timedelta(seconds=10))
    store = ObstoreStore(lambda _limit: LocalStore(tmp_path), deadline=deadline)
    for path in ("a", "b", "c"):
        store.put(path, b"1")
    store.delete(["never/there", "a", "gone", "c"])
    assert [listed.path for listed in store.list("")] == ["b"]


_TRANSIENT = (ErrorMeaning.TRANSIENT, ErrorMeaning.UNKNOWN)


@pytest.fixture(scope="module")
def server() -> Iterator[CannedServer]:
    with canned_server(200) as server:
        yield server


def _make_s3(url: str, times: Any) -> Any:
    return S3Store("bucket", endpoint=url, region="us-east-1", access_key_id="k", secret_access_key="s", **times)


def _make_gcs(url: str, times: Any) -> Any:
    account = {"gcs_base_url": url, "disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
    return GCSStore("bucket", service_account_key=json.dumps(account), **times)


def _make_azure(url: str, times: Any) -> Any:
    return AzureStore("bucket", account_name="account", account_key="aGVsbG8=", endpoint=f"{url}/account", **times)


_CLIENTS: dict[str, Any] = {"gcs": _make_gcs, "oauth": _make_gcs, "azure": _make_azure, "entra": _make_azure}


@contextmanager
def _open_store(vendor: str, server: CannedServer, *, tries: int = 1) -> Iterator[ObstoreStore]:
    def connect(limit: timedelta) -> Any:
        client = _CLIENTS.get(vendor.partition("-")[0], _make_s3)
        return make_client(lambda **times: client(server.url, times), limit, {"allow_http": True})

    store = ObstoreStore(connect, deadline=Deadline.after(timedelta(seconds=60)))
    server.status, server.body, server.headers = 200, b"", {"etag": '"1"', "x-goog-generation": "1"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(obstore_store, "_REQUEST_PAUSES_SECONDS", (0.0,) * tries)
        store.put("there", b"x")
        yield store
    store.close()


def _set_answer(server: CannedServer, vendor: str, status: int, code: str) -> None:
    """Answer with the vendor's error: XML, one of two kinds of JSON, or Azure's header."""
    server.status, server.headers = status, {"content-type": "application/xml"}
    server.body = s3_error(code, "no")
    if vendor == "gcs-json":
        error = {"code": status, "message": "no", "errors": [{"domain": "global", "reason": code, "message": "no"}]}
        server.body = json.dumps({"error": error}).encode()
    elif vendor in ("oauth", "entra"):
        server.body = json.dumps({"error": code, "error_description": "no"}).encode()
    elif vendor.startswith("azure"):
        server.headers = {"content-type": "application/xml", "x-ms-error-code": code}


def _catch_error(operation: Callable[[], object]) -> TuneError:
    with pytest.raises(TuneError) as raised:
        operation()
    return raised.value


_CODES: Mapping[tuple[str, int], str] = {
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
"""Error codes by client and status."""


@pytest.mark.parametrize(("vendor", "status"), _CODES)
def test_each_code_of_the_table_is_told_as_what_it_means(server: CannedServer, vendor: str, status: int) -> None:
    with _open_store(vendor, server) as store:
        for code in _CODES[vendor, status].split():
            _set_answer(server, vendor, status, code)
            written, created = _catch_error(lambda: store.put("a", b"x")), _catch_error(lambda: store.create("a", b"x"))
            _require_meaning(ERROR_CODES[code], status, written, created)


def _require_meaning(row: ErrorCode, status: int, written: TuneError, created: TuneError) -> None:
    if row.meaning in _TRANSIENT:
        assert type(written) is StoreUnavailable
        maybe_done = row.meaning is ErrorMeaning.UNKNOWN or status >= 500
        assert type(created) is (CommitUnknown if maybe_done else StoreUnavailable)
    elif row.meaning is ErrorMeaning.NOT_FOUND:
        assert type(written) is ObjectNotFound
    elif row.meaning is ErrorMeaning.EXISTS:
        assert type(created) is AlreadyExists
    else:
        assert type(written) is type(created) is StoreRefused
        assert row.code in str(written) or status in (301, 307), "the client does not read the body of a redirect"
    if row.meaning not in (ErrorMeaning.NOT_FOUND, ErrorMeaning.EXISTS):
        assert row.advice in str(written)


def test_each_code_is_answered_once_above_and_a_refusal_says_what_to_do() -> None:
    answered = {code for codes in _CODES.values() for code in codes.split()}
    assert answered == ERROR_CODES.keys() - {"InvalidCertificate", "BadScheme"}
    refused = [row for row in ERROR_CODES.values() if row.meaning in (ErrorMeaning.REFUSED, ErrorMeaning.NO_BUCKET)]
    assert all(row.advice for row in refused)


@pytest.mark.parametrize(
    ("is_transient", "statuses"),
    [
        (False, (400, 401, 403, 405, 501, 505)),
        (True, (408, 409, 423, 425, 429, 499, 500, 502, 503, 504, 507, 509, 520)),
    ],
)
@pytest.mark.parametrize("body", [b"", b"<html>gateway</html>", s3_error("NobodyKnows", "no")])
def test_what_is_not_in_the_table_is_judged_by_its_status(
    server: CannedServer, statuses: Sequence[int], body: bytes, *, is_transient: bool
) -> None:
    with _open_store("s3", server) as store:
        for server.status in statuses:
            server.body = body
            error = _catch_error(lambda: store.put("a", b"x"))
            assert type(error) is (StoreUnavailable if is_transient else StoreRefused), error
            assert is_transient or b"NobodyKnows" not in body or "NobodyKnows" in str(error)


# ------------------------------------------------------------------------- codes inside other responses


def _format_deletion(failed: Sequence[tuple[str, str]]) -> bytes:
    errors = "".join(f"<Error><Key>{key}</Key><Code>{code}</Code><Message>no</Message></Error>" for key, code in failed)
    return f"<?xml version='1.0'?><DeleteResult><Deleted><Key>a</Key></Deleted>{errors}</DeleteResult>".encode()


@pytest.mark.parametrize(
    ("code", "kind"),
    [("SlowDown", StoreUnavailable), ("InternalError", StoreUnavailable), ("AccessDenied", StoreRefused)],
)
def test_a_batch_that_failed_for_one_object_says_why(server: CannedServer, code: str, kind: type[TuneError]) -> None:
    with _open_store("s3", server) as store:
        body = _format_deletion([("b", code)])
        server.status, server.body, server.headers = 200, body, {"content-type": "application/xml"}
        error = _catch_error(lambda: store.delete(["a", "b"]))
    assert type(error) is kind
    assert ERROR_CODES[code].advice in str(error)


@pytest.mark.parametrize(("status", "kind"), [(503, StoreUnavailable), (500, StoreUnavailable), (403, StoreRefused)])
def test_a_batch_of_azure_that_failed_for_one_object_says_why(
    server: CannedServer, status: int, kind: type[TuneError]
) -> None:
    part = (
        f"--batch\r\nContent-Type: application/http\r\nContent-ID: 0\r\n\r\nHTTP/1.1 {status} no\r\n\r\n\r\n--batch--"
    )
    with _open_store("azure", server) as store:
        server.status, server.body = 202, part.encode()
        server.headers = {"content-type": "multipart/mixed; boundary=batch"}
        assert type(_catch_error(lambda: store.delete(["a", "b"]))) is kind


def test_a_head_that_is_refused_without_a_reason_is_explained_by_a_listing(server: CannedServer) -> None:
    with _open_store("s3", server) as store:
        _set_answer(server, "s3", 400, "ExpiredToken")
        error = _catch_error(lambda: store.size("a"))
        assert type(error) is StoreRefused
        assert "have expired" in str(error)
        _set_answer(server, "s3", 400, "RequestTimeout")
        assert type(_catch_error(lambda: store.size("a"))) is StoreUnavailable


def test_an_object_of_a_batch_that_is_gone_already_is_fine(server: CannedServer) -> None:
    with _open_store("s3", server) as store:
        body = _format_deletion([("b", "NoSuchKey")]).replace(b"<Deleted><Key>a</Key></Deleted>", b"")
        server.status, server.body, server.headers = 200, body, {"content-type": "application/xml"}
        store.delete(["b"])


_UNSENT = """Generic S3 error: Error performing list request: Error performing GET {url} in 1ms - HTTP error: {message}

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
    text = _UNSENT.format(url="https://host/bucket", message="error sending request", kind=kind, source=source)
    failure = obstore_store.RequestFailure.from_exception(GenericError(text))
    assert not failure.is_transient
    assert not failure.may_have_succeeded
    error = failure.store_error("list")
    assert isinstance(error, StoreRefused)
    assert advice in str(error)
