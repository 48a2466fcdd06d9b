"""An object store on S3, Google Cloud Storage and Azure through obstore, a client written in Rust.

The store makes obstore's blocking calls in the caller's threads. Compared with obstore's asyncio calls, a write needs
the same CPU time, and a read needs a quarter less, because the thread that receives a reply also frees the reply's
memory, which is then reused. A blocking call cannot be interrupted; only the client's timeout ends the call. So the
store has clients with different timeouts; a request uses the client with the longest timeout that the deadline allows.

Large ranges are read by obstore, too, not by a reader of our own (signed URLs, reused buffers). In a measurement with
obstore 0.12.1, such a reader took twice as long, but saved 0.25 of 2.0 CPU seconds per GiB without TLS, none with TLS.

The clients' own retries are off, because they ignore the deadline, and hide that the outcome of a create is unknown.
This module retries instead.
"""

from __future__ import annotations

import math
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from functools import partial
from itertools import islice
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError

from prefect_tune.core.errors import (
    AlreadyExists,
    CommitUnknown,
    ObjectNotFound,
    StoreRefused,
    StoreUnavailable,
    TuneError,
)
from prefect_tune.core.storage.object_store import Buffer, ListedObject, validate_folder, validate_path
from prefect_tune.stores.deadline import Deadline
from prefect_tune.stores.parallel_map import ParallelStore

if TYPE_CHECKING:
    from obstore import GetOptions
    from obstore.store import ObjectStore as Client


# Error codes of object storages that say more than the HTTP status. For any other code, only the status counts.
#
# There are three groups: temporary errors with the status of a permanent error, permanent errors with status 409 or
# 412 (which usually mean a conflict), and common refusals with advice. An error is temporary if the vendor
# says that the request may be repeated, if the request was cut, altered or stalled on the way, or if the server is
# full, since space can become free, for example by retention. Sources: the lists of error codes of S3, Azure, Google
# Cloud Storage, R2 and MinIO, and botocore's list of retried errors, as of 2026.


class ErrorMeaning(Enum):
    """What an error code says about the request."""

    TRANSIENT = "not done; a retry may succeed"
    UNKNOWN = "perhaps done; a retry may succeed"
    REFUSED = "not done; a retry fails too until the user changes something"
    NO_BUCKET = "refused: there is no such bucket or container"
    NOT_FOUND = "the object does not exist"
    EXISTS = "the object exists already"


@dataclass(frozen=True, slots=True)
class ErrorCode:
    """A code, its meaning, and advice to the user, which may be empty."""

    code: str
    meaning: ErrorMeaning
    advice: str


_ERROR_CODE_TEXT: Final = """
transient: the network between here and the server cuts or alters requests: look at proxies and firewalls
    RequestTimeout RequestTimeoutException IncompleteBody BadDigest CrcMismatch Md5Mismatch Crc64Mismatch
    XAmzContentSHA256Mismatch XAmzContentChecksumMismatch ConnectionClosedByRequester ResponseInterrupted
transient: the server asks for fewer requests: use fewer trials at once, or more prefixes
    SlowDown SlowDownRead SlowDownWrite TooManyRequests TooManyRequestsException Throttling ThrottlingException
    ThrottledException RequestThrottled RequestThrottledException RequestLimitExceeded BandwidthLimitExceeded
    KMS.ThrottlingException rateLimitExceeded userRateLimitExceeded
transient:
    ConditionalRequestConflict OperationAborted conflict ContainerBeingDeleted AccountBeingCreated
    PendingCopyOperation SystemInUse IDPCommunicationError temporarily_unavailable
transient: the server's disk or quota is full: make room there
    XMinioAdminBucketQuotaExceeded
unknown:
    InternalError ServiceUnavailable XMinioBackendDown
unknown: the network between here and the server cuts or alters requests: look at proxies and firewalls
    ClientDisconnect ClientDisconnected
unknown: the server's disk or quota is full: make room there
    XMinioStorageFull
refused: an object or folder of another kind has this name: use another prefix or container
    InvalidBlobType BlobOperationNotSupported ResourceTypeMismatch
refused: a retention policy, a legal hold, a lease or a snapshot forbids this: remove it, or use another bucket
    BlobImmutableDueToLegalHold BlobImmutableDueToPolicy LeaseIdMissing SnapshotsPresent ObjectUnderActiveHold
    RetentionPolicyNotMet ObjectLockedByBucketPolicy
refused: the object is archived: restore it there, and use a storage class without archiving
    InvalidObjectState BlobArchived BlobBeingRehydrated
refused: the server does not accept this request: see its reason
    InvalidRequest BlobUsesCustomerSpecifiedEncryption FeatureVersionMismatch ContainerDisabled
refused: the server does not know this access key: correct the credentials
    InvalidAccessKeyId InvalidClientTokenId
refused: the secret does not match the access key: correct the credentials
    SignatureDoesNotMatch
refused: the credentials have expired: give fresh ones
    ExpiredToken ExpiredTokenException TokenRefreshRequired InvalidToken RequestExpired
refused: the server does not accept the credentials: correct them
    AuthenticationFailed InvalidAuthenticationInfo invalid_grant
refused: the credentials lack the permission: allow get, put, list and delete there
    AccessDenied AuthorizationFailure AuthorizationPermissionMismatch forbidden
refused: the bucket is in another region: set the region or the endpoint
    AuthorizationHeaderMalformed IllegalLocationConstraintException PermanentRedirect
refused: this machine's clock is wrong: set it
    RequestTimeTooSkewed
refused: the bucket's encryption key cannot be used: enable it, and allow these credentials to use it
    KMS.DisabledException KMS.NotFoundException
refused: the server does not know this request: correct the endpoint, or use another target
    MethodNotAllowed NotImplemented InvalidArgument
refused: the server does not accept an object of this size or a name of this length: use another target
    EntityTooLarge KeyTooLongError
refused: the bucket's name or the endpoint is not valid: correct them
    InvalidBucketName InvalidResourceName
refused: the object ends before this range: it was replaced or cut, restore it or use another checkpoint
    InvalidRange
no_bucket: there is no such bucket or container: correct its name or the endpoint, or create it
    NoSuchBucket ContainerNotFound
not_found:
    NoSuchKey
exists:
    PreconditionFailed ConditionNotMet BlobAlreadyExists
refused: the server's certificate is not trusted: trust its authority, or correct the endpoint
    InvalidCertificate
refused: the endpoint has no TLS: allow http, or correct the endpoint
    BadScheme
"""


def _parse_error_codes() -> Iterator[ErrorCode]:
    """Parse `_ERROR_CODE_TEXT`. A line `meaning: advice` applies to the codes in the indented lines below it."""
    meaning, advice = ErrorMeaning.REFUSED, ""
    for line in _ERROR_CODE_TEXT.strip().splitlines():
        if line.startswith(" "):
            yield from (ErrorCode(code, meaning, advice) for code in line.split())
        else:
            name, _, advice = line.partition(":")
            meaning, advice = ErrorMeaning[name.upper()], advice.strip()


ERROR_CODES: Mapping[str, ErrorCode] = MappingProxyType({row.code: row for row in _parse_error_codes()})


# Classify a failed request: which error to raise, and whether to retry.

# The client's exceptions have no fields for status and kind, so both are parsed from the text of an exception.
_STATUS = re.compile(r"\bstatus: (\d{3})\b|DeleteFailed \{[^}]*\bcode: \"(\d{3})\"")
_KIND = re.compile(r"HttpError \{\s*kind: (\w+)")
# A code can be in XML of S3, Google and Azure, in an entry of a batch delete, in JSON of Google, or in JSON of OAuth.
_CODE = re.compile(
    r"<Code>([\w.]+)</Code>|DeleteFailed \{[^}]*\bcode: \"([A-Za-z]\w+)\"|\"reason\": ?\"(\w+)\"|\"error\": ?\"(\w+)\""
)
_CLIENT_REJECTION = re.compile(r"\b(InvalidCertificate|BadScheme)\b")  # with these errors, the client sent no request
_INSTANCE_METADATA = re.compile(
    r"https?://(169\.254\.\d+\.\d+|\[fd00:ec2::254\]|metadata\.google)|/latest/api/token|/computeMetadata/"
)
_TRANSIENT_STATUSES = frozenset({408, 409, 423, 425, 429, 499})
_PERMANENT_STATUSES = frozenset({501, 505})
_UNKNOWN_STATUSES = frozenset({499})
_ADVICE_BY_STATUS: Mapping[int, str] = MappingProxyType(
    {
        301: "the bucket is in another region: set the region or the endpoint",
        307: "the bucket is in another region: set the region or the endpoint",
        400: "the server does not accept the request: check region, endpoint and credentials",
        401: "the server does not accept the credentials: correct them",
        403: "the credentials lack the permission, or are wrong",
        404: "there is no such bucket: correct the bucket's name or the endpoint, or create it",
    }
)


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """One failed request: the server's status and code, or how the connection failed."""

    status: int | None
    kind: str | None
    code: str | None
    message: str

    @classmethod
    def from_exception(cls, error: Exception) -> RequestFailure:
        """Parse the client's error."""
        text = str(error)
        status, kind = _find_group(_STATUS, text), _find_group(_KIND, text)
        code = _find_group(_CODE, text) or (None if status else _find_group(_CLIENT_REJECTION, text))
        line = text.partition("\n")[0]
        details = [part for part in (kind, code) if part and f">{part}<" not in line]
        return cls(int(status) if status else None, kind, code, f"{line} ({', '.join(details)})" if details else line)

    @property
    def meaning(self) -> ErrorMeaning:
        """The documented meaning of the code; if there is none, the meaning of the status or the connection error."""
        if row := self._error_code:
            return row.meaning
        if self.status is None and self.kind is None:
            return ErrorMeaning.REFUSED
        if self.status is None:  # the connection failed
            return ErrorMeaning.TRANSIENT if self.kind == "Connect" else ErrorMeaning.UNKNOWN
        if self.status in _UNKNOWN_STATUSES or (self.status >= 500 and self.status not in _PERMANENT_STATUSES):
            return ErrorMeaning.UNKNOWN
        if self.status == 412:
            return ErrorMeaning.EXISTS
        return ErrorMeaning.TRANSIENT if self.status in _TRANSIENT_STATUSES else ErrorMeaning.REFUSED

    @property
    def _error_code(self) -> ErrorCode | None:
        return ERROR_CODES.get(self.code or "")

    @property
    def is_transient(self) -> bool:
        """Whether the same request may succeed soon, so that it is retried."""
        return self.meaning in (ErrorMeaning.TRANSIENT, ErrorMeaning.UNKNOWN)

    @property
    def may_have_succeeded(self) -> bool:
        """Whether the server may have carried out the request."""
        return self.meaning is ErrorMeaning.UNKNOWN or (self.is_transient and (self.status or 0) >= 500)

    @property
    def reports_existing_object(self) -> bool:
        """Whether a create failed because the object exists; a 409 without a documented code means this, too."""
        return self.meaning is ErrorMeaning.EXISTS or (self.status == 409 and self._error_code is None)

    @property
    def reports_missing_object(self) -> bool:
        """Whether the reply to a batch request says that an object of the batch does not exist."""
        return self.meaning is ErrorMeaning.NOT_FOUND and self.status in (None, 200)

    def store_error(self, operation: str) -> TuneError:
        """Return the error to raise if `operation` is not retried."""
        if _INSTANCE_METADATA.search(self.message):
            advice = "no credentials given, and this machine has none: set keys, a credentials block or a profile"
            return StoreRefused(f"{operation}: {advice} ({self.message})")
        advice = self._error_code.advice if self._error_code else _ADVICE_BY_STATUS.get(self.status or 0, "")
        if self.is_transient:
            reason = f"{advice} ({self.message})" if advice else self.message
            return StoreUnavailable(f"{operation}: {reason}")
        if self.status is None and "redirect" in self.message:
            advice = _ADVICE_BY_STATUS[301]
        return StoreRefused(f"{operation}: {advice or 'the client or the server refused'} ({self.message})")


def _find_group(pattern: re.Pattern[str], text: str) -> str | None:
    match = pattern.search(text)
    return next(filter(None, match.groups()), None) if match else None


_T = TypeVar("_T")
_Failures: TypeAlias = list[RequestFailure]
_REQUEST_PAUSES_SECONDS: Final = (0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)
_MAX_SMALL_BYTES: Final = 1 << 20
_PAGE_SIZE: Final = 1000  # S3's limit for one list or delete request
_PART_BYTES: Final = 8 << 20  # S3 accepts at most 10,000 parts, each of at least 5 MiB
_MAX_CONCURRENT_PARTS: Final = 2
_TIMEOUT_RATIO: Final = 0.8
_MIN_REQUEST_SECONDS: Final = 0.02


def make_client(constructor: Callable[..., Client], timeout: timedelta, options: Mapping[str, Any]) -> Client:
    """Return a client without retries that ends every request within `timeout`; raise `ValueError` for bad settings."""
    timeouts = {"timeout": timeout, "connect_timeout": min(timeout, timedelta(seconds=10))}
    try:
        retries = {"max_retries": 0, "retry_timeout": timeout}
        return constructor(client_options={**timeouts, **options}, retry_config=retries)
    except (BaseError, ValueError) as error:
        raise ValueError(str(error).partition("\n")[0]) from error


class ObstoreStore(ParallelStore):
    """An open `ObjectStore` on a bucket, or on a prefix in a bucket.

    `connect(timeout)` makes a client whose requests end within `timeout`, see `make_client`. Clients are reused. The
    time limit of a request is `request_timeout`, or a quarter of this if the request transfers at most 1 MiB. So a lost
    request is retried before the deadline, up to seven times, with growing pauses. Each method ends by the deadline.
    """

    def __init__(
        self,
        connect: Callable[[timedelta], Client],
        *,
        deadline: Deadline,
        request_timeout: timedelta = timedelta(seconds=60),
        conditional_create: bool = True,
    ) -> None:
        self._deadline = deadline
        self.has_conditional_create = conditional_create
        self._request_limit_seconds = request_timeout.total_seconds()
        self._clients = _ClientsByTimeout(connect, min(request_timeout, deadline.timeout).total_seconds())
        self._bucket_exists = False

    def close(self) -> None:
        self._clients.clear()

    def create(self, path: str, data: Buffer) -> None:
        def put_object(client: Client) -> None:
            try:
                obstore.put(client, validate_path(path), data, mode="create", use_multipart=False)
            except AlreadyExistsError as error:
                if not RequestFailure.from_exception(error).reports_existing_object:
                    raise
                raise AlreadyExists(f"{path}: an object with this name exists already") from error

        failures: list[RequestFailure] = []
        try:
            self._request(f"create {path}", put_object, transfer_bytes=len(data), failures=failures)
        except AlreadyExists:
            raise
        except TuneError as error:
            if any(failure.may_have_succeeded for failure in failures):
                raise CommitUnknown(f"{error}; the object may have been written: read it back") from error
            raise

    def put(self, path: str, data: Buffer) -> None:
        put_object = partial(obstore.put, path=validate_path(path), file=data, use_multipart=False)
        self._request(f"write {path}", put_object, transfer_bytes=len(data))

    def copy(self, source: str, path: str) -> None:
        copy_object = partial(obstore.copy, from_=validate_path(source), to=validate_path(path))
        self._request(f"copy {source}", copy_object, transfer_bytes=None)

    def replace(self, path: str, pieces: Iterable[Buffer]) -> None:
        """Upload several pieces in parts, which appear as one object at the end; a retry sends all parts again.

        If the upload fails, the client removes the parts that were sent, unless this process is killed before that.
        """
        if len(list(islice(pieces, 2))) < 2:
            self.put(path, b"".join(pieces))
            return
        checked = validate_path(path)
        limit_seconds = min(self._request_limit_seconds, self._deadline.remaining_seconds / 8)

        def check_remaining_time() -> None:  # time must remain to send a part, to join the parts, and to remove them
            if self._deadline.remaining_seconds < 3 * limit_seconds:
                raise self._deadline.exceeded_error(f"write {path}")

        def iter_parts() -> Iterator[Buffer]:
            for piece in pieces:
                check_remaining_time()
                yield piece

        def put_parts(client: Client) -> None:
            check_remaining_time()
            obstore.put(client, checked, iter_parts(), chunk_size=_PART_BYTES, max_concurrency=_MAX_CONCURRENT_PARTS)

        self._request(f"write {path}", put_parts, limit_seconds=limit_seconds)

    def read(self, path: str, *, offset: int = 0, length: int | None = None) -> Buffer:
        checked = validate_path(path)
        if length == 0:
            if self.size(path) is None:
                raise ObjectNotFound(f"{path}: no such object")
            return b""

        def get_bytes(client: Client) -> Buffer:
            try:
                if length is not None:
                    return memoryview(obstore.get_range(client, checked, start=offset, length=length))
                options: GetOptions = {"range": {"offset": offset}} if offset else {}
                return memoryview(obstore.get(client, checked, options=options).bytes())
            except BaseError as error:
                if RequestFailure.from_exception(error).status == 416:  # the range begins at or after the object's end
                    return b""
                raise

        return self._request(f"read {path}", get_bytes, transfer_bytes=length)

    def size(self, path: str) -> int | None:
        checked = validate_path(path)

        def get_size(client: Client) -> int:
            try:
                return obstore.head(client, checked)["size"]
            except BaseError as error:
                failure = RequestFailure.from_exception(error)
                if failure.status is not None and failure.code is None and not failure.is_transient:
                    _list_page(client, count=1)  # an error of HEAD has no code; this may raise an error with a code
                raise

        try:
            return self._request(f"look up {path}", get_size)
        except ObjectNotFound:
            return None

    def list(self, prefix: str, *, after: str = "") -> Sequence[ListedObject]:
        folder = validate_folder(prefix)
        objects: list[ListedObject] = []
        while True:  # each page is one request with its own retries
            page = self._request(f"list {folder or '/'}", partial(_list_page, folder=folder, after=after))
            objects += (ListedObject(entry["path"], entry["size"]) for entry in page)
            if len(page) < _PAGE_SIZE:
                return sorted(objects, key=attrgetter("path"))
            after = page[-1]["path"]

    def delete(self, paths: Sequence[str]) -> None:
        checked = [validate_path(path) for path in paths]
        for start in range(0, len(checked), _PAGE_SIZE):
            batch = checked[start : start + _PAGE_SIZE]
            try:
                self._delete_batch(batch)
            except ObjectNotFound:  # without batch requests, obstore stops at a missing object, so delete one by one
                for path in batch:
                    with suppress(ObjectNotFound):  # deleted already
                        self._delete_batch([path])

    def _delete_batch(self, paths: Sequence[str]) -> None:
        description = paths[0] if len(paths) == 1 else f"{len(paths)} objects from {paths[0]}"
        self._request(f"delete {description}", lambda client: obstore.delete(client, paths))

    def _request(
        self,
        operation: str,
        request: Callable[[Client], _T],
        *,
        transfer_bytes: int | None = 0,
        limit_seconds: float | None = None,
        failures: _Failures | None = None,
    ) -> _T:
        """Call `request` with a client, and retry transient failures; append each failure to `failures`, if given."""
        if limit_seconds is None:
            is_small = transfer_bytes is not None and transfer_bytes <= _MAX_SMALL_BYTES
            limit_seconds = self._request_limit_seconds / 4 if is_small else self._request_limit_seconds
        failures = [] if failures is None else failures
        for pause_seconds in _REQUEST_PAUSES_SECONDS:
            if pause_seconds:
                jitter = random.uniform(0.5, 1.5)  # noqa: S311  it spreads retries, it keeps no secret
                time.sleep(min(pause_seconds * jitter, self._deadline.remaining_seconds))
            timeout_seconds = min(limit_seconds, self._deadline.remaining_seconds)
            if timeout_seconds < _MIN_REQUEST_SECONDS:
                raise self._deadline.exceeded_error(str(failures[-1].store_error(operation)) if failures else operation)
            client = self._clients.get_client(timeout_seconds)
            try:
                result = request(client)
            except FileNotFoundError as missing:
                raise self._not_found_error(operation, RequestFailure.from_exception(missing)) from missing
            except BaseError as error:
                failures.append(RequestFailure.from_exception(error))
                if failures[-1].reports_missing_object:
                    raise self._not_found_error(operation, failures[-1]) from error
                if not failures[-1].is_transient:
                    raise failures[-1].store_error(operation) from error
            else:
                self._bucket_exists = True
                return result
        raise failures[-1].store_error(f"{operation}, {len(failures)} times")

    def _not_found_error(self, operation: str, failure: RequestFailure) -> TuneError:
        """Return the error for status 404; if it is not known yet whether the bucket exists, check that first."""
        if failure.meaning is ErrorMeaning.NO_BUCKET:
            return failure.store_error(operation)
        if not self._bucket_exists:
            self._request("list the bucket", lambda client: _list_page(client, count=1))
        return ObjectNotFound(f"{operation}: no such object")


def _list_page(client: Client, *, folder: str = "", after: str = "", count: int = _PAGE_SIZE) -> Sequence[Any]:
    return next(obstore.list(client, folder or None, offset=after or None, chunk_size=count), ())


class _ClientsByTimeout:
    """Clients with different timeouts, each 20 % shorter than the next longer one. Clients are created on first use."""

    def __init__(self, connect: Callable[[timedelta], Client], max_seconds: float) -> None:
        self._connect = connect
        self._max_seconds = max_seconds
        self._clients: dict[int, Client] = {}
        self._lock = threading.Lock()

    def get_client(self, seconds: float) -> Client:
        """Return a client whose requests end within `seconds`."""
        index = max(0, math.ceil(math.log(seconds / self._max_seconds, _TIMEOUT_RATIO)))
        with self._lock:
            if index not in self._clients:
                self._clients[index] = self._connect(timedelta(seconds=self._max_seconds * _TIMEOUT_RATIO**index))
            return self._clients[index]

    def clear(self) -> None:
        with self._lock:
            self._clients.clear()
