"""Classify an object storage's failed request: which error to raise, and whether to retry."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from prefect_tune.core.errors import StoreRefused, StoreUnavailable, TuneError
from prefect_tune.stores.object_store.error_codes import CODES, ErrorCode, Meaning

# The client has status and kind only in its error text, which ends with a dump of the error's fields.
_STATUS = re.compile(r"\bstatus: (\d{3})\b|DeleteFailed \{[^}]*\bcode: \"(\d{3})\"")
_KIND = re.compile(r"HttpError \{\s*kind: (\w+)")
# XML of S3, Google and Azure; an entry of a batch delete; JSON of Google; JSON of OAuth.
_CODE = re.compile(
    r"<Code>([\w.]+)</Code>|DeleteFailed \{[^}]*\bcode: \"([A-Za-z]\w+)\"|\"reason\": ?\"(\w+)\"|\"error\": ?\"(\w+)\""
)
_BEFORE_ASKING = re.compile(r"\b(InvalidCertificate|BadScheme)\b")  # the client refuses before it sends a request
_INSTANCE_METADATA = re.compile(r"https?://(169\.254\.\d+\.\d+|\[fd00:ec2::254\]|metadata\.google)")
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
        if self.status is None:
            return Meaning.REFUSED if self.kind is None else self._of_connection()
        if self.status in _UNKNOWN_STATUSES or (self.status >= 500 and self.status not in _FINAL_STATUSES):
            return Meaning.UNKNOWN
        if self.status == 412:
            return Meaning.PRESENT
        return Meaning.PASSING if self.status in _PASSING_STATUSES else Meaning.REFUSED

    def _of_connection(self) -> Meaning:
        return Meaning.PASSING if self.kind == "Connect" else Meaning.UNKNOWN

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

    @property
    def says_no_reason(self) -> bool:
        """Whether the server refused without a body that has a code, as in every answer to a HEAD."""
        return self.status is not None and self.code is None and not self.transient

    @property
    def beyond_the_end(self) -> bool:
        """Whether the requested range begins at or after the object's end."""
        return self.status == 416

    @property
    def no_bucket(self) -> bool:
        """Whether the bucket is missing, not the object."""
        return self.meaning is Meaning.NO_BUCKET

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
