"""Map the exceptions of pyarrow's and fsspec's clients to store errors."""

from __future__ import annotations

import re

from prefect_tune.core.errors import StoreRefused, StoreUnavailable
from prefect_tune.stores.object_store.error_codes import CODES, ErrorCode, Meaning
from prefect_tune.stores.posix.posix_errors import as_store_error

# Where a client's text holds the server's code: pyarrow (S3, Azure, Google), botocore, azure-core, a body in XML.
_CODE = re.compile(
    r"(?:\bAWS Error |\bUnable to parse ExceptionName: |\bAzure Error: \[|\berror_info=\{reason=|"
    r"\bAn error occurred \(|^ErrorCode:|<Code>)([\w.]+)",
    re.MULTILINE,
)
_REFUSED = re.compile(
    r"\bAWS Error (?:UNRECOGNIZED_CLIENT|MISSING_AUTHENTICATION_TOKEN)\b|\(HTTP status 40[13]\)|"
    # pyarrow has no name for S3's own codes from EncryptionTypeMismatch to TooManyParts (in 26.0.1 code 136 is
    # InvalidObjectState, an archived object); all of them are final, and the numbers change with its SDK.
    r"\bAWS Error \[code 1[34]\d\]|"
    r"Bucket '.*' not found|^Forbidden: "  # the last is gcsfs' text of every 403
)
_ROWS = {row.code.upper(): row for row in CODES.values()}  # pyarrow writes SLOW_DOWN for SlowDown
_PASSES = (Meaning.PASSING, Meaning.UNKNOWN)
_IS_REFUSED = (Meaning.REFUSED, Meaning.NO_BUCKET)
_NEVER_WORKS = (PermissionError, ValueError, TypeError, NotImplementedError, ImportError)


def as_arrow_error(error: Exception, what: str) -> StoreRefused | StoreUnavailable:
    """Return the store error for `error`, which a file system's client raised during `what`.

    An error that is not known to be permanent counts as transient: retries are bounded, but an error that is
    wrongly called permanent ends the work.
    """
    row, said = _documented(error), _said(error)
    if row is not None:
        kind = StoreUnavailable if row.meaning in _PASSES else StoreRefused
        return kind(f"{what}: {row.advice} ({said})" if row.advice else f"{what}: {said}")
    if isinstance(error, OSError) and error.errno is not None:
        return as_store_error(error, what)
    if isinstance(error, _NEVER_WORKS) or _REFUSED.search(str(error)):
        return StoreRefused(f"{what}: {said}")
    return StoreUnavailable(f"{what}: {said}")


def _documented(error: BaseException | None) -> ErrorCode | None:
    """Return the first code that says whether to ask again, in the text of `error` or of what caused it.

    s3fs replaces a code by an error number (`EINVAL` for a truncated body): only the cause still has the code.
    """
    while error is not None:
        rows = (_ROWS.get(code.replace("_", "").upper()) for code in _CODE.findall(str(error)))
        if found := next((row for row in rows if row and row.meaning in _PASSES + _IS_REFUSED), None):
            return found
        error = error.__cause__
    return None


def _said(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
