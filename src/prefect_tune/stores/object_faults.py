"""What an object storage's refusal, failure or silence means: what to raise, and whether to ask again."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from prefect_tune.core.errors import StoreRefused, StoreUnavailable, TuneError

__all__ = ["Fault"]

# The client tells status and kind nowhere but in its text, which ends with a dump of the error's fields.
_STATUS = re.compile(r"\bstatus: (\d{3})\b")
_KIND = re.compile(r"HttpError \{\s*kind: (\w+)")
_CODE = re.compile(r"<Code>(\w+)</Code>|\"reason\": ?\"(\w+)\"")
_BEFORE_ASKING = re.compile(r"\b(InvalidCertificate|BadScheme)\b")  # the client itself would not ask
_INSTANCE_METADATA = re.compile(r"https?://(169\.254\.\d+\.\d+|\[fd00:ec2::254\]|metadata\.google)")
_CONFLICTS = frozenset({"ConditionalRequestConflict", "OperationAborted"})
_NO_BUCKET = frozenset({"NoSuchBucket", "ContainerNotFound"})
_ADVICE: Mapping[str, str] = MappingProxyType(
    {
        "NoSuchBucket": "there is no such bucket: create it, or correct the bucket's name or the endpoint",
        "ContainerNotFound": "there is no such container: create it, or correct its name or the account",
        "InvalidAccessKeyId": "the server does not know this access key: correct the credentials",
        "SignatureDoesNotMatch": "the secret does not belong to the access key: correct the credentials",
        "AuthenticationFailed": "the server does not accept the credentials: correct them",
        "ExpiredToken": "the credentials have expired: give fresh ones",
        "InvalidToken": "the session token is not valid: give fresh credentials",
        "TokenRefreshRequired": "the credentials have expired: give fresh ones",
        "AccessDenied": "the credentials lack the permission: allow get, put, list and delete there",
        "AllAccessDisabled": "all access to this bucket is switched off",
        "AuthorizationHeaderMalformed": "the bucket lies in another region: set the region",
        "IllegalLocationConstraintException": "the bucket lies in another region: set the region",
        "PermanentRedirect": "the bucket lies in another region: set the region or the endpoint",
        "RequestTimeTooSkewed": "this machine's clock is wrong: set it",
        "InvalidCertificate": "the server's certificate is not trusted: trust its authority, or correct the endpoint",
        "BadScheme": "the endpoint has no TLS: allow http, or correct the endpoint",
    }
)
_ADVICE_BY_STATUS: Mapping[int, str] = MappingProxyType(
    {
        301: "the bucket lies in another region: set the region or the endpoint",
        307: "the bucket lies in another region: set the region or the endpoint",
        400: "the server does not accept the request: check region, endpoint and credentials",
        401: "the server does not accept the credentials: correct them",
        403: "the credentials lack the permission, or are wrong",
        404: "there is no such bucket: create it, or correct the bucket's name or the endpoint",
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
        """Read the fault out of the client's error."""
        text = str(error)
        status, kind = _STATUS.search(text), _KIND.search(text)
        code = _CODE.search(text) if status else _BEFORE_ASKING.search(text)
        return cls(
            int(status[1]) if status else None,
            kind[1] if kind else None,
            next(filter(None, code.groups()), None) if code else None,
            text.partition("\n")[0] + (f" ({kind[1]})" if kind else ""),
        )

    @property
    def transient(self) -> bool:
        """Whether the same request may succeed in a moment."""
        if self.status is not None:
            return self.status in (408, 429) or (self.status >= 500 and self.status != 501) or self.conflict
        return self.kind is not None and not self.code

    @property
    def conflict(self) -> bool:
        """Whether the server was busy with another write of the same object, and says nothing about ours."""
        return self.status == 409 and self.code in _CONFLICTS

    @property
    def perhaps_done(self) -> bool:
        """Whether the server may have done what was asked."""
        if self.status is not None:
            return self.status >= 500
        return self.kind != "Connect" and not self.code

    @property
    def beyond_the_end(self) -> bool:
        """Whether a range was asked for that begins where the object has ended."""
        return self.status == 416

    @property
    def no_bucket(self) -> bool:
        """Whether it is the bucket that is missing, not the object."""
        return self.code in _NO_BUCKET

    def error(self, doing: str) -> TuneError:
        """Return what to raise when `doing` failed for good."""
        if _INSTANCE_METADATA.search(self.said):
            return StoreRefused(
                f"{doing}: no credentials were given and this machine has none of its own: give keys, a "
                f"credentials block or a profile ({self.said})"
            )
        if self.transient:
            return StoreUnavailable(f"{doing}: {self.said}")
        advice = _ADVICE.get(self.code or "") or _ADVICE_BY_STATUS.get(self.status or 0)
        if self.status is None and "redirect" in self.said:
            advice = _ADVICE_BY_STATUS[301]
        return StoreRefused(f"{doing}: {advice or 'the client or the server will not do it'} ({self.said})")
