"""What pyarrow's and fsspec's clients mean by the many things that they raise."""

from __future__ import annotations

import re

from prefect_tune.core.errors import StoreRefused, StoreUnavailable
from prefect_tune.stores.object_codes import CODES, ErrorCode, Meaning
from prefect_tune.stores.posix_errors import as_store_error

__all__ = ["as_arrow_error"]

# pyarrow tells a server's answer nowhere but in its text, some codes by names of its own.
_REFUSED = re.compile(
    r"ACCESS_DENIED|NO_SUCH_BUCKET|INVALID_ACCESS_KEY_ID|INVALID_SIGNATURE|SIGNATURE_DOES_NOT_MATCH|"
    r"EXPIRED_TOKEN|INVALID_CLIENT_TOKEN_ID|UNRECOGNIZED_CLIENT|MISSING_AUTHENTICATION_TOKEN|"
    r"HTTP status 40[13]|Bucket '.*' not found"
)
_WORD = re.compile(r"\b[A-Z][\w.]+\w")  # of the documented codes those that no sentence is made of
_PASSES = (Meaning.PASSING, Meaning.UNKNOWN)
_IS_REFUSED = (Meaning.REFUSED, Meaning.NO_BUCKET)
_NEVER_WORKS = (PermissionError, ValueError, TypeError, NotImplementedError, ImportError)


def as_arrow_error(error: Exception, what: str) -> StoreRefused | StoreUnavailable:
    """Return `error`, which a file system's client raised at `what`, as the store error it amounts to.

    What is not known to be final counts as transient: a retry of the caller's is bounded, a wrong
    "no" is not mended by anybody.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return as_store_error(error, what)
    row, said = _documented(str(error)), _said(error)
    if row is not None:
        kind = StoreUnavailable if row.meaning in _PASSES else StoreRefused
        return kind(f"{what}: {row.advice} ({said})" if row.advice else f"{what}: {said}")
    if isinstance(error, _NEVER_WORKS) or _REFUSED.search(str(error)):
        return StoreRefused(f"{what}: {said}")
    return StoreUnavailable(f"{what}: {said}")


def _documented(said: str) -> ErrorCode | None:
    """Return the first code in a client's text that says whether to ask again."""
    rows = (CODES[word] for word in _WORD.findall(said) if word in CODES)
    return next((row for row in rows if row.meaning in _PASSES + _IS_REFUSED), None)


def _said(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
