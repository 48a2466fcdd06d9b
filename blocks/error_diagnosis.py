"""Translate errors of storage services into one sentence that says what to correct in the configuration."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import timedelta

from prefect_tune.core.errors import DeadlineExceeded, StoreUnavailable, TuneError

_MOST_CHARACTERS = 240
_PROBE = re.compile(r"'?\.check/[0-9a-f]{32}(/\w+)?'?")
_NOISE = re.compile(
    r"Generic \w+ error: |Error performing list request: |Error performing (?=[A-Z]+ http)|\?list-type=\S+"
    r"|\?restype=\S+| in [\d.]+.?s(?= - )|Server returned non-2xx status code: "
    r"|: <\?xml [^>]*\?>"
)
_REGION = re.compile(r"expecting '([\w-]+)'")

# The order matters: a message that names the region also contains 403, one of a missing bucket also 404.
_CAUSES: Mapping[str, str] = {
    r"169\.254\.\d+\.\d+|metadata\.google|/latest/api/token|/computeMetadata/|no credentials were given": (
        "no credentials: none in the block, environment or profile, and this machine has none of its own"
    ),
    r"another region|AuthorizationHeaderMalformed|PermanentRedirect|IllegalLocationConstraint": (
        "wrong region: the bucket is in another one; set region to the bucket's own, and correct the endpoint"
    ),
    r"no such bucket|no such container|NoSuchBucket|ContainerNotFound|bucket does not exist": (
        "no such bucket or container: create it, or correct its name"
    ),
    (
        r"InvalidAccessKeyId|SignatureDoesNotMatch|AuthenticationFailed|InvalidToken|ExpiredToken|invalid_grant"
        r"|not know this access key|does not belong to the access key|not accept the credentials|have expired"
        r"|session token is not valid|401 Unauthorized|Authentication failed|530 |Login incorrect"
    ): "wrong credentials: the service does not accept them",
    r"has no TLS": "no TLS: the endpoint is plain http, which the block does not allow",
    r"certificate|UnknownIssuer|tls handshake": (
        "the server's certificate is not trusted: set ca_certificate, or correct the endpoint"
    ),
    r"mounted read-only|Read-only file system": "read-only: the file system refuses writes",
    r"no space left|disk is full|quota": "full: no space is left",
    (
        r"dns error|failed to lookup|Name or service not known|Connection refused|connect error|getaddrinfo"
        r"|error sending request|No route to host|Network is unreachable|Unable to connect"
    ): "unreachable: nothing answers at the endpoint; correct its address, or start the server",
    r"status code: (429|5\d\d)": "failing: the service answers, but with errors; look at its log, or try again",
    r"the root .*does not exist": "missing: the folder does not exist; mount its file system, or create it",
    r"this file system (has no|cannot|does not)": (
        "unsuitable: this file system lacks what a store needs; use a local disk, NFS, S3, GCS or Azure"
    ),
    r"expected a folder, found": "not a folder: a file has the folder's name",
}
_FORBIDDEN = re.compile(
    r"AccessDenied|Access Denied|AuthorizationFailure|AuthorizationPermissionMismatch|403 Forbidden|Forbidden"
    r"|permission|AccountIsDisabled",
    re.IGNORECASE,
)


def diagnosis(step: str, error: TuneError, timeout: timedelta) -> str:
    """Return one line: the cause with its remedy, then the failed step and the service's own message."""
    said = "\n".join(_said(error))
    region = _REGION.search(said)
    hint = f" ({region[1]})" if region else ""
    return f"{_cause(step, error, said, timeout)}{hint} [at: {step}; {_shortened(str(error))}]"


def _cause(step: str, error: TuneError, said: str, timeout: timedelta) -> str:
    for pattern, sentence in _CAUSES.items():
        if re.search(pattern, said, re.IGNORECASE):
            return sentence
    if _FORBIDDEN.search(said):
        return _forbidden(step)
    if isinstance(error, DeadlineExceeded):
        return f"no answer within {timeout.total_seconds():g} s: unreachable, very slow, or behind a firewall"
    if isinstance(error, StoreUnavailable):
        return "unavailable at the moment: try again"
    return "unusable"


def _forbidden(step: str) -> str:
    match step:
        case "write" | "write again" | "write at once":
            return "read-only: listing is permitted, writing is not"
        case "delete":
            return "no permission to delete: old checkpoints could never be removed"
        case _:
            return f"no permission to {step}, or wrong credentials"


def _said(error: BaseException | None) -> Iterator[str]:
    while error is not None:
        yield str(error)
        error = error.__cause__


def _shortened(said: str) -> str:
    line = _NOISE.sub("", _PROBE.sub("a probe", " ".join(said.split())))
    return line if len(line) <= _MOST_CHARACTERS else line[: _MOST_CHARACTERS - 1] + "…"
