"""The error codes of object storage that say more than their HTTP status; all others are judged by that status alone.

Three groups are here: codes that are temporary though their status says otherwise, codes that are final though a 409 or
412 says otherwise, and the refusals that people meet, each with the next move. A code is temporary if its vendor says
that the request may be repeated, if the request was cut, altered or stalled on the way, or if the server is full: room
comes back by itself, or by retention. Sources: the lists of error codes of S3, Azure, Google Cloud Storage, R2 and
MinIO, and botocore's list of what it retries, as of 2026.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final


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
