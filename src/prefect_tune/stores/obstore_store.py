"""An object store on S3, Google Cloud Storage and Azure through obstore, a client written in Rust.

It uses obstore's blocking calls, from the caller's threads. They need as much CPU as its asyncio calls for a write,
and a quarter less for a read (one thread collects and frees the reply, so its memory is used again). A blocking
call cannot be interrupted from outside; only the timeout of its client ends it and its connection. Therefore
clients are made for a series of timeouts, and a request goes to the client with the longest timeout that still
ends before the deadline.

Large ranges are read by the same client. A reader of our own, over signed URLs into buffers that are used again, saved
0.25 of 2.0 CPU seconds per GiB restored without TLS and nothing over TLS, and took twice the time (obstore 0.12.1).

The client's own retries are switched off, because they know neither the deadline nor that the outcome of a create
may be unknown. This module retries instead.
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
from prefect_tune.core.storage.object_store import Buffer, Listed, checked_folder, checked_path
from prefect_tune.stores.deadline import Deadline
from prefect_tune.stores.parallel_map import ParallelStore

if TYPE_CHECKING:
    from obstore import GetOptions
    from obstore.store import ObjectStore as Client


# The error codes of object storage that say more than their HTTP status; all others are judged by that status alone.
#
# Three groups are here: codes that are temporary though their status says otherwise, codes that are final though a 409
# or 412 says otherwise, and the refusals that people meet, each with the next move. A code is temporary if its vendor
# says that the request may be repeated, if the request was cut, altered or stalled on the way, or if the server is
# full: room comes back by itself, or by retention. Sources: the lists of error codes of S3, Azure, Google Cloud
# Storage, R2 and MinIO, and botocore's list of what it retries, as of 2026.


class Meaning(Enum):
    """What an error code says about the request."""

    PASSING = "not done; the same request may succeed in a moment"
    UNKNOWN = "perhaps done; the same request may succeed in a moment"
    REFUSED = "not done, and not before a person changes something"
    NO_BUCKET = "refused: there is no such bucket or container"
    ABSENT = "the object is not there"
    PRESENT = "the object is there already"


@dataclass(frozen=True, slots=True)
class ErrorCode:
    """A code, its meaning, and the next move; the latter is empty where there is none."""

    code: str
    meaning: Meaning
    advice: str


_TABLE: Final = """
passing: the network between here and the server cuts or alters requests: look at proxies and firewalls
    RequestTimeout RequestTimeoutException IncompleteBody BadDigest CrcMismatch Md5Mismatch Crc64Mismatch
    XAmzContentSHA256Mismatch XAmzContentChecksumMismatch ConnectionClosedByRequester ResponseInterrupted
passing: the server asks for fewer requests: use fewer trials at once, or more prefixes
    SlowDown SlowDownRead SlowDownWrite TooManyRequests TooManyRequestsException Throttling ThrottlingException
    ThrottledException RequestThrottled RequestThrottledException RequestLimitExceeded BandwidthLimitExceeded
    KMS.ThrottlingException rateLimitExceeded userRateLimitExceeded
passing:
    ConditionalRequestConflict OperationAborted conflict ContainerBeingDeleted AccountBeingCreated
    PendingCopyOperation SystemInUse IDPCommunicationError temporarily_unavailable
passing: the server's disk or quota is full: make room there
    XMinioAdminBucketQuotaExceeded
unknown:
    InternalError ServiceUnavailable XMinioBackendDown
unknown: the network between here and the server cuts or alters requests: look at proxies and firewalls
    ClientDisconnect ClientDisconnected
unknown: the server's disk or quota is full: make room there
    XMinioStorageFull
refused: an object or folder of another kind has this name: use another prefix or container
    InvalidBlobType BlobOperationNotSupported ResourceTypeMismatch
refused: a retention policy, a legal hold, a lease or a snapshot forbids it: lift it, or use another bucket
    BlobImmutableDueToLegalHold BlobImmutableDueToPolicy LeaseIdMissing SnapshotsPresent ObjectUnderActiveHold
    RetentionPolicyNotMet ObjectLockedByBucketPolicy
refused: the object is archived: restore it there, and use a storage class without archiving
    InvalidObjectState BlobArchived BlobBeingRehydrated
refused: the server does not accept this request: see the reason that it gives
    InvalidRequest BlobUsesCustomerSpecifiedEncryption FeatureVersionMismatch ContainerDisabled
refused: the server does not know this access key: correct the credentials
    InvalidAccessKeyId InvalidClientTokenId
refused: the secret does not belong to the access key: correct the credentials
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
absent:
    NoSuchKey
present:
    PreconditionFailed ConditionNotMet BlobAlreadyExists
refused: the server's certificate is not trusted: trust its authority, or correct the endpoint
    InvalidCertificate
refused: the endpoint has no TLS: allow http, or correct the endpoint
    BadScheme
"""


def _rows() -> Iterator[ErrorCode]:
    """Yield a row for each code: a line with a meaning and an advice is followed by its codes."""
    meaning, advice = Meaning.REFUSED, ""
    for line in _TABLE.strip().splitlines():
        if line.startswith(" "):
            yield from (ErrorCode(code, meaning, advice) for code in line.split())
        else:
            name, _, advice = line.partition(":")
            meaning, advice = Meaning[name.upper()], advice.strip()


CODES: Mapping[str, ErrorCode] = MappingProxyType({row.code: row for row in _rows()})


# Classify an object storage's failed request: which error to raise, and whether to retry.

# The client has status and kind only in its error text, which ends with a dump of the error's fields.
_STATUS = re.compile(r"\bstatus: (\d{3})\b|DeleteFailed \{[^}]*\bcode: \"(\d{3})\"")
_KIND = re.compile(r"HttpError \{\s*kind: (\w+)")
# XML of S3, Google and Azure; an entry of a batch delete; JSON of Google; JSON of OAuth.
_CODE = re.compile(
    r"<Code>([\w.]+)</Code>|DeleteFailed \{[^}]*\bcode: \"([A-Za-z]\w+)\"|\"reason\": ?\"(\w+)\"|\"error\": ?\"(\w+)\""
)
_BEFORE_ASKING = re.compile(r"\b(InvalidCertificate|BadScheme)\b")  # the client refuses before it sends a request
_INSTANCE_METADATA = re.compile(
    r"https?://(169\.254\.\d+\.\d+|\[fd00:ec2::254\]|metadata\.google)|/latest/api/token|/computeMetadata/"
)
_PASSING_STATUSES = frozenset({408, 409, 423, 425, 429, 499})
_FINAL_STATUSES = frozenset({501, 505})
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
class Fault:
    """One failed request: the server's status and code, or how the connection failed."""

    status: int | None
    kind: str | None
    code: str | None
    said: str

    @classmethod
    def of(cls, error: Exception) -> Fault:
        """Parse the client's error."""
        text = str(error)
        status, kind = _first(_STATUS, text), _first(_KIND, text)
        code = _first(_CODE, text) or (None if status else _first(_BEFORE_ASKING, text))
        said = text.partition("\n")[0]
        details = [part for part in (kind, code) if part and f">{part}<" not in said]
        return cls(int(status) if status else None, kind, code, f"{said} ({', '.join(details)})" if details else said)

    @property
    def meaning(self) -> Meaning:
        """The documented meaning of the code, or else that of the status, or else of the connection's failure."""
        if row := self._row:
            return row.meaning
        if self.status is None and self.kind is None:
            return Meaning.REFUSED
        if self.status is None:  # the connection failed
            return Meaning.PASSING if self.kind == "Connect" else Meaning.UNKNOWN
        if self.status in _UNKNOWN_STATUSES or (self.status >= 500 and self.status not in _FINAL_STATUSES):
            return Meaning.UNKNOWN
        if self.status == 412:
            return Meaning.PRESENT
        return Meaning.PASSING if self.status in _PASSING_STATUSES else Meaning.REFUSED

    @property
    def _row(self) -> ErrorCode | None:
        return CODES.get(self.code or "")

    @property
    def transient(self) -> bool:
        """Whether to retry: the same request may succeed in a moment."""
        return self.meaning in (Meaning.PASSING, Meaning.UNKNOWN)

    @property
    def perhaps_done(self) -> bool:
        """Whether the server may have carried out the request."""
        return self.meaning is Meaning.UNKNOWN or (self.transient and (self.status or 0) >= 500)

    @property
    def is_present(self) -> bool:
        """Whether a create failed because the object exists; a 409 without a documented code counts as that."""
        return self.meaning is Meaning.PRESENT or (self.status == 409 and self._row is None)

    @property
    def is_absent(self) -> bool:
        """Whether an answered batch request says that one of its objects does not exist."""
        return self.meaning is Meaning.ABSENT and self.status in (None, 200)

    def error(self, doing: str) -> TuneError:
        """Return the error to raise when `doing` is not retried any more."""
        if _INSTANCE_METADATA.search(self.said):
            return StoreRefused(
                f"{doing}: no credentials were given and this machine has none of its own: give keys, a "
                f"credentials block or a profile ({self.said})"
            )
        advice = self._row.advice if self._row else _ADVICE_BY_STATUS.get(self.status or 0, "")
        if self.transient:
            return StoreUnavailable(f"{doing}: {advice} ({self.said})" if advice else f"{doing}: {self.said}")
        if self.status is None and "redirect" in self.said:
            advice = _ADVICE_BY_STATUS[301]
        return StoreRefused(f"{doing}: {advice or 'the client or the server refused'} ({self.said})")


def _first(pattern: re.Pattern[str], text: str) -> str | None:
    found = pattern.search(text)
    return next(filter(None, found.groups()), None) if found else None


_T = TypeVar("_T")
_Faults: TypeAlias = list[Fault]
_REQUEST_PAUSES_SECONDS: Final = (0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)
_SMALL_BYTES: Final = 1 << 20
_PAGE_COUNT: Final = 1000  # what S3 lists, and deletes, in one request
_PART_BYTES: Final = 8 << 20  # S3 takes 10,000 parts of at least 5 MiB
_PARTS_AT_ONCE: Final = 2
_RUNG: Final = 0.8
_SHORTEST_SECONDS: Final = 0.02


def connected(constructor: Callable[..., Client], limit: timedelta, options: Mapping[str, Any]) -> Client:
    """Return a client that does not retry, and ends every request within `limit`.

    Raises:
        ValueError: the client does not accept its settings.
    """
    times = {"timeout": limit, "connect_timeout": min(limit, timedelta(seconds=10))}
    try:
        return constructor(client_options={**times, **options}, retry_config={"max_retries": 0, "retry_timeout": limit})
    except (BaseError, ValueError) as error:
        raise ValueError(str(error).partition("\n")[0]) from error


class ObstoreStore(ParallelStore):
    """An open `ObjectStore` on a bucket, or below a prefix of one.

    `connect` makes a client whose requests end within a time (`connected`); it is called a few times. No
    request takes longer than `request_limit` (a quarter of it for at most 1 MiB), so that a lost request is
    tried again before the deadline: at most eight tries, with growing pauses. Every method, and its connection,
    ends at the deadline.
    """

    def __init__(
        self,
        connect: Callable[[timedelta], Client],
        *,
        deadline: Deadline,
        request_limit: timedelta = timedelta(seconds=60),
        conditional_create: bool = True,
    ) -> None:
        self._deadline = deadline
        self.conditional_create = conditional_create
        self._limit_seconds = request_limit.total_seconds()
        self._clients = _Ladder(connect, min(request_limit, deadline.timeout).total_seconds())
        self._bucket_seen = False

    def close(self) -> None:
        """Close the connections."""
        self._clients.clear()

    def create(self, path: str, data: Buffer) -> None:
        def write(client: Client) -> None:
            try:
                obstore.put(client, checked_path(path), data, mode="create", use_multipart=False)
            except AlreadyExistsError as error:
                if not Fault.of(error).is_present:
                    raise
                raise AlreadyExists(f"{path}: an object with this name exists already") from error

        faults: list[Fault] = []
        try:
            self._ask(f"create {path}", write, moved_bytes=len(data), faults=faults)
        except AlreadyExists:
            raise
        except TuneError as error:
            if any(fault.perhaps_done for fault in faults):
                raise CommitUnknown(f"{error}; the object may have been written: read it back") from error
            raise

    def put(self, path: str, data: Buffer) -> None:
        checked = checked_path(path)
        self._ask(
            f"write {path}",
            lambda client: obstore.put(client, checked, data, use_multipart=False),
            moved_bytes=len(data),
        )

    def copy(self, source: str, path: str) -> None:
        start, end = checked_path(source), checked_path(path)
        self._ask(f"copy {source}", lambda client: obstore.copy(client, start, end), moved_bytes=None)

    def replace(self, path: str, pieces: Iterable[Buffer]) -> None:
        """Several pieces are sent as the parts of one upload; after a fault all of them are sent again.

        The client removes the parts of an upload that failed, but not those of a process that was killed.
        """
        if len(list(islice(pieces, 2))) < 2:
            self.put(path, b"".join(pieces))
            return
        checked = checked_path(path)
        limit_seconds = min(self._limit_seconds, self._deadline.remaining_seconds / 8)

        def check_time() -> None:  # for a part, the request that joins the parts, and the one that removes them
            if self._deadline.remaining_seconds < 3 * limit_seconds:
                raise self._deadline.exceeded(f"write {path}")

        def parts() -> Iterator[Buffer]:
            for piece in pieces:
                check_time()
                yield piece

        def write(client: Client) -> None:
            check_time()
            obstore.put(client, checked, parts(), chunk_size=_PART_BYTES, max_concurrency=_PARTS_AT_ONCE)

        self._ask(f"write {path}", write, limit_seconds=limit_seconds)

    def read(self, path: str, *, offset: int = 0, length: int | None = None) -> Buffer:
        checked = checked_path(path)
        if length == 0:
            if self.size(path) is None:
                raise ObjectNotFound(f"{path}: no such object")
            return b""

        def fetch(client: Client) -> Buffer:
            try:
                if length is not None:
                    return memoryview(obstore.get_range(client, checked, start=offset, length=length))
                options: GetOptions = {"range": {"offset": offset}} if offset else {}
                return memoryview(obstore.get(client, checked, options=options).bytes())
            except BaseError as error:
                if Fault.of(error).status == 416:  # the range begins at or after the end
                    return b""
                raise

        return self._ask(f"read {path}", fetch, moved_bytes=length)

    def size(self, path: str) -> int | None:
        checked = checked_path(path)

        def look_up(client: Client) -> int:
            try:
                return obstore.head(client, checked)["size"]
            except BaseError as error:
                fault = Fault.of(error)
                if fault.status is not None and fault.code is None and not fault.transient:
                    _page(client, count=1)  # the answer to a HEAD has no error code; that to a listing has
                raise

        try:
            return self._ask(f"look up {path}", look_up)
        except ObjectNotFound:
            return None

    def list(self, prefix: str, *, after: str = "") -> Sequence[Listed]:
        folder = checked_folder(prefix)
        found: list[Listed] = []
        while True:  # each page is a request with retries of its own
            page = self._ask(f"list {folder or '/'}", partial(_page, folder=folder, after=after))
            found += (Listed(entry["path"], entry["size"]) for entry in page)
            if len(page) < _PAGE_COUNT:
                return sorted(found, key=attrgetter("path"))
            after = page[-1]["path"]

    def delete(self, paths: Sequence[str]) -> None:
        checked = [checked_path(path) for path in paths]
        for start in range(0, len(checked), _PAGE_COUNT):
            batch = checked[start : start + _PAGE_COUNT]
            try:
                self._delete(batch)
            except ObjectNotFound:  # clouds without a batch request stop at the first missing object
                for path in batch:
                    with suppress(ObjectNotFound):  # deleted already
                        self._delete([path])

    def _delete(self, paths: Sequence[str]) -> None:
        what = paths[0] if len(paths) == 1 else f"{len(paths)} objects from {paths[0]}"
        self._ask(f"delete {what}", lambda client: obstore.delete(client, paths))

    def _ask(
        self,
        doing: str,
        request: Callable[[Client], _T],
        *,
        moved_bytes: int | None = 0,
        limit_seconds: float | None = None,
        faults: _Faults | None = None,
    ) -> _T:
        """Make `request`, and retry after transient faults; every fault is appended to `faults`."""
        if limit_seconds is None:
            small = moved_bytes is not None and moved_bytes <= _SMALL_BYTES
            limit_seconds = self._limit_seconds / 4 if small else self._limit_seconds
        faults = [] if faults is None else faults
        for pause_seconds in _REQUEST_PAUSES_SECONDS:
            if pause_seconds:
                jitter = random.uniform(0.5, 1.5)  # noqa: S311  it spreads retries, it keeps no secret
                time.sleep(min(pause_seconds * jitter, self._deadline.remaining_seconds))
            left_seconds = min(limit_seconds, self._deadline.remaining_seconds)
            if left_seconds < _SHORTEST_SECONDS:
                raise self._deadline.exceeded(str(faults[-1].error(doing)) if faults else doing)
            client = self._clients.within(left_seconds)
            try:
                answer = request(client)
            except FileNotFoundError as absent:
                raise self._absence(doing, Fault.of(absent)) from absent
            except BaseError as error:
                faults.append(Fault.of(error))
                if faults[-1].is_absent:
                    raise self._absence(doing, faults[-1]) from error
                if not faults[-1].transient:
                    raise faults[-1].error(doing) from error
            else:
                self._bucket_seen = True
                return answer
        raise faults[-1].error(f"{doing}, {len(faults)} times")

    def _absence(self, doing: str, fault: Fault) -> TuneError:
        """Return the error for a 404: the object is missing only if the bucket exists, so look that up once."""
        if fault.meaning is Meaning.NO_BUCKET:
            return fault.error(doing)
        if not self._bucket_seen:
            self._ask("list the bucket", lambda client: _page(client, count=1))
        return ObjectNotFound(f"{doing}: no such object")


def _page(client: Client, *, folder: str = "", after: str = "", count: int = _PAGE_COUNT) -> Sequence[Any]:
    stream = obstore.list(client, folder or None, offset=after or None, chunk_size=count)
    return next(stream, ())


class _Ladder:
    """Clients with decreasing timeouts, each 20 % shorter than the one before, made when first needed."""

    def __init__(self, connect: Callable[[timedelta], Client], longest_seconds: float) -> None:
        self._connect = connect
        self._longest_seconds = longest_seconds
        self._clients: dict[int, Client] = {}
        self._lock = threading.Lock()

    def within(self, seconds: float) -> Client:
        """Return a client whose requests end within `seconds`."""
        rung = max(0, math.ceil(math.log(seconds / self._longest_seconds, _RUNG)))
        with self._lock:
            if rung not in self._clients:
                self._clients[rung] = self._connect(timedelta(seconds=self._longest_seconds * _RUNG**rung))
            return self._clients[rung]

    def clear(self) -> None:
        with self._lock:
            self._clients.clear()
