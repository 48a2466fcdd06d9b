"""The table of object storage error codes that say more than their HTTP status, with the meaning of each.

A row stands for a code that a write, a read, a listing or a deletion can return. A code that several vendors share
has one row, with the statuses of all of them. A code without a row is judged by its HTTP status alone (see
`obstore_errors`); codes for which that gives the same meaning and advice have no row.

A code is `passing` if its vendor says that the request may be repeated, or if the request was cut, altered or stalled
on the way, or if the server is full (as ENOSPC and EDQUOT are: room comes back by itself, or by retention). It is
`refused` if a person has to change something.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final

SOURCES: Mapping[str, str] = MappingProxyType(
    {
        "s3": "https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html#ErrorCodeList",
        "s3-put": "https://docs.aws.amazon.com/AmazonS3/latest/API/API_PutObject.html#API_PutObject_Errors",
        "sts": "https://docs.aws.amazon.com/STS/latest/APIReference/API_AssumeRoleWithWebIdentity.html",
        "aws": "https://docs.aws.amazon.com/kms/latest/APIReference/CommonErrors.html",
        "sdk": "https://docs.aws.amazon.com/boto3/latest/guide/retries.html#standard-retry-mode",
        "gcs": "https://cloud.google.com/storage/docs/xml-api/reference-status",
        "gcs-unread": "https://cloud.google.com/storage/docs/xml-api/reference-status#http-status-and-error-codes",
        "gcs-json": "https://cloud.google.com/storage/docs/json_api/v1/status-codes",
        "oauth": "https://datatracker.ietf.org/doc/html/rfc6749#section-5.2",
        "entra": "https://learn.microsoft.com/entra/identity-platform/v2-oauth2-auth-code-flow",
        "azure": "https://learn.microsoft.com/rest/api/storageservices/common-rest-api-error-codes",
        "azure-blob": "https://learn.microsoft.com/rest/api/storageservices/blob-service-error-codes",
        "azure-sdk": "https://github.com/Azure/azure-sdk-for-go/blob/main/sdk/storage/azblob/bloberror/error_codes.go",
        "azure-emulator": "https://github.com/Azure/Azurite/blob/main/src/blob/errors/StorageErrorFactory.ts",
        "r2": "https://developers.cloudflare.com/r2/api/error-codes/",
        "minio": "https://github.com/minio/minio/blob/7aac2a2c5b7c882e68c1ce017d8256be2feea27f/cmd/api-errors.go",
        "rustls": "https://docs.rs/rustls/latest/rustls/enum.Error.html",
        "reqwest": "https://github.com/seanmonstar/reqwest/blob/master/src/error.rs",
    }
)
"""The documents with which the rows were compared, in 2026.

"gcs-unread" is weaker than the rest: it is the part of Google's page after its first codes of status 400, of which no
copy was available. Its rows rest on quoted answers of the service, on Google's `gsutil` and on a copy of 2012.
"azure-sdk" and "sdk" name codes without a status; the statuses are those that were observed with them.
"""


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
    """A row: a code, the statuses it comes with, the documents that list it, its meaning, and the next move."""

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
        "region": "the bucket is in another region: set the region",
        "endpoint": "the bucket is in another region: set the region or the endpoint",
        "clock": "this machine's clock is wrong: set it",
        "bucket": "there is no such bucket: correct the bucket's name or the endpoint, or create it",
        "container": "there is no such container: correct its name or the account, or create it",
        "name": "the bucket's name or the endpoint is not valid: correct them",
        "not_this": "the server does not know this request: correct the endpoint, or use another target",
        "limit": "the server does not accept an object of this size or a name of this length: use another target",
        "locked": "a retention policy, a legal hold or a lease forbids it: lift it, or use another bucket",
        "billing": "the account is not paid for or not entitled to it: correct its billing",
        "kind": "an object or folder of another kind has this name: use another prefix or container",
        "snapshots": "the blob has snapshots: delete them, or use another container",
        "versions": "the bucket keeps too many versions of one object: let a lifecycle rule delete old versions",
        "range": "the object ends before this range: it was replaced or cut, restore it or use another checkpoint",
        "archived": "the object is archived: restore it there, and use a storage class without archiving",
        "network": "the network between here and the server cuts or alters requests: look at proxies and firewalls",
        "slower": "the server asks for fewer requests: use fewer trials at once, or more prefixes",
        "full": "the server's disk or quota is full: make room there",
        "signed": "the server does not accept this signature method: correct credentials and endpoint",
        "request": "the server does not accept this request: see the reason that it gives",
        "encryption": "the bucket's encryption key cannot be used: enable it, and allow these credentials to use it",
        "tls": "the server's certificate is not trusted: trust its authority, or correct the endpoint",
        "https": "the server asks for TLS: begin the endpoint with https://",
        "plain": "the endpoint has no TLS: allow http, or correct the endpoint",
    }
)

# code, statuses, vendors, meaning, advice
_TABLE: Final = """
RequestTimeout                                400,503  s3,minio                      passing    network
RequestTimeoutException                       400      sdk                           passing    network
IncompleteBody                                400      s3,gcs-unread,r2,minio        passing    network
BadDigest                                     400      s3,gcs,r2,minio               passing    network
CrcMismatch                                   400      gcs                           passing    network
XAmzContentSHA256Mismatch                     400      minio                         passing    network
XAmzContentChecksumMismatch                   400      minio                         passing    network
Md5Mismatch                                   400      azure                         passing    network
Crc64Mismatch                                 400      azure-sdk                     passing    network
ConnectionClosedByRequester                   400      s3                            passing    network
ResponseInterrupted                           400      s3                            passing    network
SlowDown                                      429,503  s3,gcs-unread                 passing    slower
TooManyRequests                               429      r2,minio                      passing    slower
TooManyRequestsException                      400,429  sdk                           passing    slower
Throttling                                    400      sdk                           passing    slower
ThrottlingException                           400      sdk,aws                       passing    slower
ThrottledException                            400      sdk                           passing    slower
RequestThrottled                              400      sdk                           passing    slower
RequestThrottledException                     400      sdk                           passing    slower
RequestLimitExceeded                          400,503  sdk                           passing    slower
BandwidthLimitExceeded                        400,509  sdk                           passing    slower
KMS.ThrottlingException                       400      aws                           passing    slower
rateLimitExceeded                             403,429  gcs-json                      passing    slower
userRateLimitExceeded                         403      gcs-json                      passing    slower
SlowDownRead                                  503      minio                         passing    slower
SlowDownWrite                                 503      minio                         passing    slower
ConditionalRequestConflict                    409      s3                            passing    -
OperationAborted                              409      s3                            passing    -
conflict                                      409      gcs-json                      passing    -
ContainerBeingDeleted                         409      azure-blob                    passing    -
AccountBeingCreated                           409      azure                         passing    -
PendingCopyOperation                          409      azure-blob                    passing    -
SystemInUse                                   409      azure-blob                    passing    -
IDPCommunicationError                         400      sts                           passing    -
temporarily_unavailable                       400,503  entra                         passing    -
XMinioAdminBucketQuotaExceeded                400      minio                         passing    full
InternalError                                 500      s3,gcs-unread,azure,r2,minio  unknown    -
ServiceUnavailable                            503      s3,r2                         unknown    -
ClientDisconnect                              400      r2                            unknown    network
ClientDisconnected                            499      minio                         unknown    network
XMinioServerNotInitialized                    503      minio                         unknown    -
XMinioIAMNotInitialized                       503      minio                         unknown    -
XMinioBucketMetadataNotInitialized            503      minio                         unknown    -
XMinioBackendDown                             400      minio                         unknown    -
XMinioStorageFull                             507      minio                         unknown    full
InvalidAccessKeyId                            403      s3,gcs-unread,minio           refused    key
InvalidClientTokenId                          403      aws                           refused    key
SignatureDoesNotMatch                         403      s3,gcs-unread,r2,minio        refused    secret
InvalidSignature                              400      s3                            refused    secret
ExpiredToken                                  400      s3,minio                      refused    expired
ExpiredTokenException                         400      sts                           refused    expired
TokenRefreshRequired                          400      s3                            refused    expired
ExpiredRequest                                400      r2                            refused    expired
RequestExpired                                400      aws                           refused    expired
InvalidToken                                  400      s3                            refused    token
InvalidTokenId                                403      minio                         refused    token
InvalidIdentityToken                          400      sts                           refused    token
AuthenticationFailed                          403      azure                         refused    credentials
InvalidAuthenticationInfo                     400,401  azure                         refused    credentials
invalid_grant                                 400      oauth                         refused    credentials
invalid_client                                400,401  oauth                         refused    credentials
unauthorized_client                           400      oauth                         refused    credentials
InvalidSecurity                               403      s3,gcs-unread                 refused    credentials
IDPRejectedClaim                              403      sts                           refused    credentials
NotSignedUp                                   403      s3                            refused    billing
AuthorizationHeaderMalformed                  400      s3,minio                      refused    region
IllegalLocationConstraintException            400      s3                            refused    region
InvalidRegion                                 400,403  s3,minio                      refused    region
IncorrectEndpoint                             400      s3                            refused    endpoint
EndpointNotFound                              400      s3                            refused    endpoint
PermanentRedirect                             301      s3,gcs                        refused    endpoint
TemporaryRedirect                             307      s3,gcs                        refused    endpoint
Redirect                                      307      s3,gcs                        refused    endpoint
AccessDenied                                  400,403  s3,gcs-unread,r2,minio        refused    permission
forbidden                                     403      gcs-json                      refused    permission
insufficientPermissions                       403      gcs-json                      refused    permission
AuthorizationFailure                          403      azure-emulator                refused    permission
AuthorizationPermissionMismatch               403      azure-emulator                refused    permission
AuthorizationProtocolMismatch                 403      azure-emulator                refused    https
AuthorizationResourceTypeMismatch             403      azure-emulator                refused    permission
AuthorizationServiceMismatch                  403      azure-emulator                refused    permission
AuthorizationSourceIPMismatch                 403      azure-emulator                refused    permission
InsufficientAccountPermissions                403      azure                         refused    permission
UnauthorizedBlobOverwrite                     403      azure-blob                    refused    permission
AllAccessDisabled                             403      s3,minio                      refused    off
InvalidPayer                                  403      s3                            refused    off
AccountProblem                                403      s3,gcs-unread                 refused    off
AccountIsDisabled                             403      azure                         refused    off
ContainerDisabled                             409      azure-blob                    refused    off
UserProjectAccountProblem                     403      gcs-json                      refused    billing
UserProjectAccessDenied                       403      gcs-json                      refused    permission
UserProjectMissing                            400      gcs-unread                    refused    billing
accountDisabled                               403      gcs-json                      refused    billing
NotEntitled                                   403      r2                            refused    billing
RequestTimeTooSkewed                          403      s3,gcs-unread,minio           refused    clock
KMS.DisabledException                         400      s3                            refused    encryption
KMS.KMSInvalidStateException                  400      s3                            refused    encryption
KMS.InvalidKeyUsageException                  400      s3                            refused    encryption
KMS.NotFoundException                         400      s3,minio                      refused    encryption
EncryptionTypeMismatch                        400      s3-put                        refused    encryption
CloudKmsBadKey                                400      gcs                           refused    encryption
CloudKmsDecryptionKeyNotFound                 400      gcs                           refused    encryption
CloudKmsDisabledKey                           400      gcs                           refused    encryption
CloudKmsEncryptionKeyNotFound                 400      gcs                           refused    encryption
CloudKmsKeyLocationNotAllowed                 400      gcs                           refused    encryption
ResourceIsEncryptedWithCustomerEncryptionKey  400      gcs-unread                    refused    encryption
KeyVaultAccessTokenCannotBeAcquired           403      azure                         refused    encryption
KeyVaultEncryptionKeyNotFound                 403      azure                         refused    encryption
KeyVaultVaultNotFound                         403      azure                         refused    encryption
BlobUsesCustomerSpecifiedEncryption           409      azure-sdk                     refused    encryption
AuthorizationQueryParametersError             400      s3,minio                      refused    signed
CredentialsNotSupported                       400      s3,gcs                        refused    signed
MissingSecurityHeader                         400      s3,gcs-unread,minio           refused    signed
MissingRequiredHeader                         400      azure                         refused    signed
UnsupportedSignature                          400      s3                            refused    signed
InvalidRequest                                400      s3,minio                      refused    request
EntityTooLarge                                400      s3,gcs-unread,r2,minio        refused    limit
EntityTooSmall                                400      s3,gcs-unread,r2,minio        refused    limit
RequestBodyTooLarge                           413      azure                         refused    limit
KeyTooLongError                               400      s3,minio                      refused    limit
KeyTooLong                                    400      gcs-unread                    refused    limit
OutOfRangeInput                               400      azure                         refused    limit
MaxMessageLengthExceeded                      400      s3,gcs-unread                 refused    limit
MaxVersionsExceeded                           400      minio                         refused    versions
InvalidRange                                  416      s3,gcs-unread,azure,r2,minio  refused    range
MethodNotAllowed                              405      s3,gcs-unread,minio           refused    not_this
UnsupportedHttpVerb                           405      azure                         refused    not_this
NotImplemented                                501      s3,minio                      refused    not_this
InvalidArgument                               400      s3,gcs-unread,minio           refused    not_this
InvalidDigest                                 400      s3,gcs-unread,r2,minio        refused    not_this
InvalidHeaderValue                            400      azure                         refused    not_this
InvalidInput                                  400      azure                         refused    not_this
InvalidQueryParameterValue                    400      azure                         refused    not_this
InvalidURI                                    400      s3,gcs-unread                 refused    not_this
InvalidUri                                    400      azure                         refused    not_this
MalformedXML                                  400      s3,gcs-unread,minio           refused    not_this
MissingContentLength                          411      s3,gcs-unread,r2,minio        refused    not_this
MissingContentLengthHeader                    411      azure                         refused    not_this
FeatureVersionMismatch                        409      azure-blob                    refused    not_this
UnsupportedHeader                             400      azure                         refused    not_this
InvalidBucketName                             400      s3,gcs-unread,r2,minio        refused    name
InvalidResourceName                           400      azure                         refused    name
InvalidObjectName                             400      r2                            refused    name
XMinioInvalidObjectName                       400      minio                         refused    name
XMinioObjectExistsAsDirectory                 400      minio                         refused    kind
InvalidBlobType                               409      azure-blob                    refused    kind
BlobOperationNotSupported                     409      azure-blob                    refused    kind
ResourceTypeMismatch                          409      azure                         refused    kind
SnapshotsPresent                              409      azure-blob                    refused    snapshots
BlobImmutableDueToLegalHold                   409      azure-blob                    refused    locked
BlobImmutableDueToPolicy                      409      azure-blob                    refused    locked
LeaseIdMissing                                412      azure-blob                    refused    locked
ObjectUnderActiveHold                         403      gcs-unread                    refused    locked
RetentionPolicyNotMet                         403      gcs-unread                    refused    locked
ObjectLockedByBucketPolicy                    403      r2                            refused    locked
InvalidObjectState                            403      s3,minio                      refused    archived
BlobArchived                                  409      azure-emulator                refused    archived
BlobBeingRehydrated                           409      azure-sdk                     refused    archived
XMinioInsecureClientRequest                   400      minio                         refused    https
NoSuchBucket                                  404      s3,gcs-unread,r2,minio        no_bucket  bucket
ContainerNotFound                             404      azure-blob                    no_bucket  container
NoSuchKey                                     404      s3,gcs-unread,r2,minio        absent     -
PreconditionFailed                            412      s3,gcs-unread,r2,minio        present    -
ConditionNotMet                               412      azure                         present    -
BlobAlreadyExists                             409      azure-blob                    present    -
InvalidCertificate                            -        rustls                        refused    tls
BadScheme                                     -        reqwest                       refused    plain
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
