"""What pyarrow's and fsspec's clients mean by the many things that they raise."""

from __future__ import annotations

import re

from prefect_tune.core.errors import StoreRefused, StoreUnavailable
from prefect_tune.stores.posix_errors import as_store_error

__all__ = ["as_arrow_error"]

# pyarrow tells an S3 server's answer nowhere but in its text.
_REFUSED = re.compile(
    r"ACCESS_DENIED|NO_SUCH_BUCKET|INVALID_ACCESS_KEY_ID|INVALID_SIGNATURE|SIGNATURE_DOES_NOT_MATCH|"
    r"EXPIRED_TOKEN|INVALID_CLIENT_TOKEN_ID|UNRECOGNIZED_CLIENT|MISSING_AUTHENTICATION_TOKEN|"
    r"NoSuchBucket|AccessDenied|ExpiredToken|InvalidAccessKeyId|SignatureDoesNotMatch|"
    r"HTTP status 40[13]|Bucket '.*' not found"
)
_NEVER_WORKS = (PermissionError, ValueError, TypeError, NotImplementedError, ImportError)


def as_arrow_error(error: Exception, what: str) -> StoreRefused | StoreUnavailable:
    """Return `error`, which a file system's client raised at `what`, as the store error it amounts to.

    What is not known to be final counts as transient: a retry of the caller's is bounded, a wrong
    "no" is not mended by anybody.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return as_store_error(error, what)
    if isinstance(error, _NEVER_WORKS) or _REFUSED.search(str(error)):
        return StoreRefused(f"{what}: {_said(error)}")
    return StoreUnavailable(f"{what}: {_said(error)}")


def _said(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
