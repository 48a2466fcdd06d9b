"""Every error code that an object storage documents for what a store asks of it, and what it means.

The one table. A code that several vendors share has one row, with the statuses of all of them. What no vendor
documents is judged by its HTTP status alone: see `object_faults`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final

__all__ = ["CODES", "SOURCES", "ErrorCode", "Meaning"]

SOURCES: Mapping[str, str] = MappingProxyType(
    {
        "s3": "https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html",
        "sts": "https://docs.aws.amazon.com/STS/latest/APIReference/API_AssumeRoleWithWebIdentity.html",
        "sdk": "https://docs.aws.amazon.com/sdkref/latest/guide/feature-retry-behavior.html",
        "kms": "https://docs.aws.amazon.com/kms/latest/APIReference/CommonErrors.html",
        "gcs": "https://cloud.google.com/storage/docs/xml-api/reference-status",
        "gcs-json": "https://cloud.google.com/storage/docs/json_api/v1/status-codes",
        "oauth": "https://datatracker.ietf.org/doc/html/rfc6749#section-5.2",
        "azure": "https://learn.microsoft.com/rest/api/storageservices/common-rest-api-error-codes",
        "azure-blob": "https://learn.microsoft.com/rest/api/storageservices/blob-service-error-codes",
        "r2": "https://developers.cloudflare.com/r2/api/error-codes/",
        "minio": "https://github.com/minio/minio/blob/master/cmd/api-errors.go",
        "client": "https://docs.rs/rustls/latest/rustls/enum.Error.html",
    }
)
"""Where each vendor documents its codes."""


class Meaning(Enum):
    """What a client that has asked for something is to make of the answer."""

    PASSING = "not done; the same request may succeed in a moment"
    UNKNOWN = "perhaps done; the same request may succeed in a moment"
    REFUSED = "not done, and not before a person changes something"
    NO_BUCKET = "refused: there is no such bucket or container"
    ABSENT = "the object is not there"
    PRESENT = "the object is there already"


@dataclass(frozen=True, slots=True)
class ErrorCode:
    """A row: the statuses that a code comes with, who documents it, its meaning, and what a person can do."""

    code: str
    statuses: tuple[int, ...]
    vendors: tuple[str, ...]
    meaning: Meaning
    advice: str


_ADVICE: Mapping[str, str] = MappingProxyType(
    {
        "key": "the server does not know this access key: correct the credentials",
        "secret": "the secret does not belong to the access key: correct the credentials",
        "credentials": "the server does not accept the credentials: correct them",
        "expired": "the credentials have expired: give fresh ones",
        "token": "the session token is not valid: give fresh credentials",
        "permission": "the credentials lack the permission: allow get, put, list and delete there",
        "off": "all access to this account or bucket is switched off: ask its owner",
        "region": "the bucket lies in another region: set the region",
        "endpoint": "the bucket lies in another region: set the region or the endpoint",
        "clock": "this machine's clock is wrong: set it",
        "bucket": "there is no such bucket: create it, or correct the bucket's name or the endpoint",
        "container": "there is no such container: create it, or correct its name or the account",
        "name": "the bucket's name or the endpoint is not valid: correct them",
        "not_this": "the server does not know this request: correct the endpoint, or use another target",
        "limit": "the object is too large for this server: use another target",
        "locked": "a retention policy, a legal hold or a lease forbids it: lift it, or use another bucket",
        "billing": "the account is not paid for or not entitled to it: mend the billing",
        "archived": "the object lies in an archive: restore it there, and use a storage class without archiving",
        "network": "the network between here and the server cuts or alters requests: look at proxies and firewalls",
        "slower": "the server asks for fewer requests: use fewer trials at once, or more prefixes",
        "full": "the server's disk or quota is full: make room there",
        "signed": "the server does not take this way to sign: correct credentials and endpoint",
        "encryption": "the bucket's encryption key cannot be used: enable it, and allow these credentials to use it",
        "tls": "the server's certificate is not trusted: trust its authority, or correct the endpoint",
        "plain": "the endpoint has no TLS: allow http, or correct the endpoint",
    }
)

# code, statuses, vendors, meaning, advice
_TABLE: Final = """
RequestTimeout                          400,408,503  s3,gcs,minio           passing    network
UploadTimeout                           408          gcs                    passing    network
RequestTimeoutException                 400          sdk                    passing    network
IncompleteBody                          400          s3,gcs,r2,minio        passing    network
BadDigest                               400          s3,gcs,r2,minio        passing    network
XAmzContentSHA256Mismatch               400          s3,minio               passing    network
Md5Mismatch                             400          azure                  passing    network
Crc64Mismatch                           400          azure-blob             passing    network
XMinioRequestBodyParse                  400          minio                  passing    network
SlowDown                                429,503      s3,gcs,minio           passing    slower
TooManyRequests                         429          s3,gcs,r2              passing    slower
TooManyRequestsException                400,429      sdk                    passing    slower
Throttling                              400          sdk                    passing    slower
ThrottlingException                     400          sdk                    passing    slower
ThrottledException                      400          sdk                    passing    slower
RequestThrottled                        400          sdk                    passing    slower
RequestThrottledException               400          sdk                    passing    slower
RequestLimitExceeded                    400,503      sdk                    passing    slower
BandwidthLimitExceeded                  400,509      sdk                    passing    slower
LimitExceededException                  400          sdk                    passing    slower
ProvisionedThroughputExceededException  400          sdk                    passing    slower
PriorRequestNotComplete                 400          sdk                    passing    slower
KMS.ThrottlingException                 400          s3,kms                 passing    slower
rateLimitExceeded                       403,429      gcs-json               passing    slower
userRateLimitExceeded                   403,429      gcs-json               passing    slower
SlowDownRead                            503          minio                  passing    slower
SlowDownWrite                           503          minio                  passing    slower
Busy                                    503          minio                  passing    slower
ConditionalRequestConflict              409          s3                     passing    -
OperationAborted                        409          s3,gcs                 passing    -
conflict                                409          gcs-json               passing    -
TransactionInProgressException          400          sdk                    passing    -
ContainerBeingDeleted                   409          azure-blob             passing    -
AccountBeingCreated                     409          azure                  passing    -
PendingCopyOperation                    409          azure-blob             passing    -
IDPCommunicationError                   400          sts                    passing    -
temporarily_unavailable                 400,503      oauth                  passing    -
RequestNotReadyYet                      403          minio                  passing    -
InternalError                           500          s3,gcs,azure,r2,minio  unknown    -
ServiceUnavailable                      503          s3,gcs,r2              unknown    -
ServerBusy                              503          azure                  unknown    -
OperationTimedOut                       500          azure                  unknown    -
InternalFailure                         500          sts                    unknown    -
backendError                            500,503      gcs-json               unknown    -
internalError                           500          gcs-json               unknown    -
GatewayTimeout                          504          gcs                    unknown    -
server_error                            500          oauth                  unknown    -
ClientDisconnect                        400          r2                     unknown    -
ClientDisconnected                      499          minio                  unknown    -
ConnectionClosedByRequester             400          s3                     unknown    -
XMinioServerNotInitialized              503          minio                  unknown    -
XMinioIAMNotInitialized                 503          minio                  unknown    -
XMinioBucketMetadataNotInitialized      503          minio                  unknown    -
XMinioBackendDown                       503          minio                  unknown    -
XMinioReadQuorum                        503          minio                  unknown    -
XMinioWriteQuorum                       503          minio                  unknown    -
InsufficientCapacity                    503          s3                     unknown    full
XMinioStorageFull                       507          minio                  unknown    full
XMinioAdminBucketQuotaExceeded          400          minio                  refused    full
quotaExceeded                           403          gcs-json               refused    full
dailyLimitExceeded                      403          gcs-json               refused    full
InvalidAccessKeyId                      403          s3,gcs,minio           refused    key
SignatureDoesNotMatch                   403          s3,gcs,r2,minio        refused    secret
ExpiredToken                            400,403      s3,sts,minio           refused    expired
ExpiredTokenException                   400,403      sts                    refused    expired
TokenRefreshRequired                    400          s3                     refused    expired
ExpiredRequest                          400          r2                     refused    expired
RequestExpired                          400,403      s3                     refused    expired
InvalidToken                            400,403      s3,gcs,sts             refused    token
InvalidTokenId                          403          minio                  refused    token
InvalidIdentityToken                    400          sts                    refused    token
AuthenticationFailed                    403          azure                  refused    credentials
InvalidAuthenticationInfo               400,401      azure                  refused    credentials
NoAuthenticationInformation             401          azure                  refused    credentials
AuthenticationRequired                  401          gcs                    refused    credentials
Unauthorized                            401          r2                     refused    credentials
authError                               401          gcs-json               refused    credentials
required                                401          gcs-json               refused    credentials
invalid_grant                           400,401      oauth                  refused    credentials
invalid_client                          400,401      oauth                  refused    credentials
unauthorized_client                     400          oauth                  refused    credentials
InvalidSecurity                         403          s3,gcs                 refused    credentials
NotSignedUp                             403          s3                     refused    credentials
AuthorizationHeaderMalformed            400          s3,minio               refused    region
IllegalLocationConstraintException      400          s3                     refused    region
InvalidRegion                           400          minio                  refused    region
PermanentRedirect                       301          s3,gcs                 refused    endpoint
TemporaryRedirect                       307          s3,gcs                 refused    endpoint
Redirect                                307          s3,gcs                 refused    endpoint
AccessDenied                            401,403      s3,sts,gcs,r2,minio    refused    permission
forbidden                               403          gcs-json               refused    permission
insufficientPermissions                 403          gcs-json               refused    permission
AuthorizationFailure                    403          azure                  refused    permission
AuthorizationPermissionMismatch         403          azure-blob             refused    permission
AuthorizationProtocolMismatch           403          azure                  refused    permission
AuthorizationResourceTypeMismatch       403          azure                  refused    permission
AuthorizationServiceMismatch            403          azure                  refused    permission
AuthorizationSourceIPMismatch           403          azure                  refused    permission
InsufficientAccountPermissions          403          azure                  refused    permission
AllAccessDisabled                       403          s3,minio               refused    off
AccountProblem                          403          s3,gcs                 refused    off
AccountIsDisabled                       403          azure                  refused    off
ContainerDisabled                       409          azure-blob             refused    off
ReadOnlyAccount                         403          azure                  refused    off
UserProjectAccountProblem               403          gcs                    refused    billing
UserProjectAccessDenied                 403          gcs                    refused    permission
UserProjectMissing                      400          gcs                    refused    billing
accountDisabled                         403          gcs-json               refused    billing
NotEntitled                             403          r2                     refused    billing
RequestTimeTooSkewed                    403          s3,gcs,minio           refused    clock
KMS.DisabledException                   400          s3,kms                 refused    encryption
KMS.InvalidStateException               400          s3,kms                 refused    encryption
KMS.KMSInvalidStateException            400          s3,kms                 refused    encryption
KMS.InvalidKeyUsageException            400          s3,kms                 refused    encryption
KMS.NotFoundException                   400          s3,kms                 refused    encryption
KMS.AccessDeniedException               400,403      kms                    refused    encryption
KMSNotConfigured                        501          minio                  refused    encryption
AccessControlListNotSupported           400          s3                     refused    signed
AuthorizationQueryParametersError       400          s3,minio               refused    signed
CredentialsNotSupported                 400          s3                     refused    signed
InvalidRequest                          400          s3,minio               refused    signed
MissingSecurityHeader                   400          s3,gcs,minio           refused    signed
MissingSecurityElement                  400          s3,gcs                 refused    signed
MissingRequiredHeader                   400          azure                  refused    signed
UnsupportedSignature                    400          s3                     refused    signed
EntityTooLarge                          400,413      s3,gcs,r2,minio        refused    limit
RequestBodyTooLarge                     413          azure                  refused    limit
KeyTooLongError                         400          s3,minio               refused    limit
KeyTooLong                              400          gcs                    refused    limit
MaxMessageLengthExceeded                400          s3,gcs                 refused    limit
MethodNotAllowed                        405          s3,gcs,r2,minio        refused    not_this
UnsupportedHttpVerb                     405          azure                  refused    not_this
NotImplemented                          501          s3,r2,minio            refused    not_this
InvalidArgument                         400          s3,gcs,minio           refused    not_this
InvalidDigest                           400          s3,gcs,r2,minio        refused    not_this
InvalidHeaderValue                      400          azure                  refused    not_this
InvalidInput                            400          azure                  refused    not_this
InvalidQueryParameterValue              400          azure                  refused    not_this
InvalidURI                              400          s3,gcs                 refused    not_this
InvalidUri                              400          azure                  refused    not_this
MalformedXML                            400          s3,gcs,minio           refused    not_this
MissingContentLength                    411          s3,gcs,r2,minio        refused    not_this
MissingContentLengthHeader              411          azure                  refused    not_this
FeatureVersionMismatch                  409          azure-blob             refused    not_this
InvalidBlobType                         409          azure-blob             refused    not_this
UnsupportedHeader                       400          azure                  refused    not_this
InvalidBucketName                       400          s3,gcs,r2,minio        refused    name
InvalidResourceName                     400          azure                  refused    name
InvalidObjectName                       400          r2                     refused    name
XMinioInvalidObjectName                 400          minio                  refused    name
XMinioObjectExistsAsDirectory           409          minio                  refused    name
XMinioParentIsObject                    400          minio                  refused    name
BlobImmutableDueToLegalHold             409          azure-blob             refused    locked
BlobImmutableDueToPolicy                409          azure-blob             refused    locked
LeaseIdMissing                          412          azure-blob             refused    locked
LeaseIdMismatchWithBlobOperation        412          azure-blob             refused    locked
ObjectUnderActiveHold                   403          gcs                    refused    locked
RetentionPolicyNotMet                   403          gcs                    refused    locked
ObjectLockedByBucketPolicy              403          r2                     refused    locked
ObjectLocked                            400          minio                  refused    locked
InvalidObjectState                      403          s3,minio               refused    archived
BlobArchived                            409          azure-blob             refused    archived
BlobBeingRehydrated                     409          azure-blob             refused    archived
NoSuchBucket                            404          s3,gcs,r2,minio        no_bucket  bucket
ContainerNotFound                       404          azure-blob             no_bucket  container
ResourceNotFound                        404          azure                  absent     -
NoSuchKey                               404          s3,gcs,r2,minio        absent     -
NoSuchVersion                           404          s3,minio               absent     -
BlobNotFound                            404          azure-blob             absent     -
notFound                                404          gcs-json               absent     -
PreconditionFailed                      412          s3,gcs,r2,minio        present    -
conditionNotMet                         412          gcs-json               present    -
ConditionNotMet                         412          azure                  present    -
TargetConditionNotMet                   412          azure-blob             present    -
BlobAlreadyExists                       409          azure-blob             present    -
InvalidCertificate                      -            client                 refused    tls
BadScheme                               -            client                 refused    plain
"""


def _rows() -> Iterator[ErrorCode]:
    for line in _TABLE.strip().splitlines():
        code, statuses, vendors, meaning, advice = line.split()
        yield ErrorCode(
            code,
            tuple(int(status) for status in statuses.split(",") if status != "-"),
            tuple(vendors.split(",")),
            Meaning[meaning.upper()],
            _ADVICE[advice] if advice != "-" else "",
        )


CODES: Mapping[str, ErrorCode] = MappingProxyType({row.code: row for row in _rows()})
