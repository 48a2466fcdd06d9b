"""Check by writing and reading probe objects whether a target can store checkpoints."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from threading import Barrier
from typing import Protocol

from prefect_tune.core.errors import AlreadyExists, CommitUnknown, DeadlineExceeded, StoreUnavailable, TuneError
from prefect_tune.core.storage.object_store import ObjectStore, create_or_recognize

# Translate errors of storage services into one sentence that says what to correct in the configuration.

_MOST_CHARACTERS = 240
_PROBE = re.compile(r"'?\.check/[0-9a-f]{32}(/\w+)?'?")
_NOISE = re.compile(
    r"Generic \w+ error: |Error performing list request: |Error performing (?=[A-Z]+ http)|\?list-type=\S+"
    r"|\?restype=\S+| in [\d.]+.?s(?= - )|Server returned non-2xx status code: "
    r"|: <\?xml [^>]*\?>|no credentials were given[^(]*"
)
_REGION = re.compile(r"expecting '([\w-]+)'")

# The order matters: a message that names the region also contains 403, one of a missing bucket also 404.
_CAUSES: Mapping[str, str] = {
    r"169\.254\.\d+\.\d+|metadata\.google|/latest/api/token|/computeMetadata/|no credentials were given": (
        "no credentials: none in the block, environment or profile, and this machine has none of its own; give keys, a "
        "credentials block or a profile"
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


_FOLDER = ".check"  # not a valid experiment name, so a probe is never read as a checkpoint
_RACERS = 4
_SHORTEST_SECRET = 6  # a secret such as "s" would mask half of the message


@dataclass(frozen=True, slots=True)
class TargetCheck:
    """The result of `check()`.

    `ok` is whether checkpoints can be committed there. `message` describes in one line the error, or the probes that
    succeeded. Without `conditional_create` two runners could both commit, so the target serves one runner only.
    """

    ok: bool
    message: str
    conditional_create: bool
    may_pass: bool = False
    """Whether the error may be temporary: the target did not answer, or not in time."""


class _Target(Protocol):
    @property
    def uri(self) -> str: ...
    def open(self, *, timeout: timedelta) -> AbstractContextManager[ObjectStore]: ...
    def secret_values(self) -> Iterator[str]: ...


class _ProbeFailed(Exception):
    def __init__(self, step: str, error: TuneError) -> None:
        super().__init__(step)
        self.step, self.error = step, error


def check_target(target: _Target, *, timeout: timedelta) -> TargetCheck:
    """Try every operation that checkpoints need, in a folder with a unique name, and return the result."""
    try:
        with _step("open"), target.open(timeout=timeout) as store:
            claims, refuses = store.conditional_create, _refuses_a_second_create(store)
    except _ProbeFailed as failure:
        message = diagnosis(failure.step, failure.error, timeout)
        may_pass = isinstance(failure.error, StoreUnavailable | CommitUnknown)
        return TargetCheck(ok=False, message=_line(target, message), conditional_create=False, may_pass=may_pass)
    return _verdict(target, claims=claims, refuses=refuses)


def _verdict(target: _Target, *, claims: bool, refuses: bool) -> TargetCheck:
    if claims and refuses:
        done = "a probe was written, read back, listed and deleted, and a second create was refused"
        return TargetCheck(ok=True, message=_line(target, done), conditional_create=True)
    if claims:
        wrong = (
            "NO CONDITIONAL WRITES: a second create of the same object was accepted, so two runners could "
            "both commit; to use it with ONE RUNNER ONLY, set conditional_writes=False"
        )
        return TargetCheck(ok=False, message=_line(target, wrong), conditional_create=False)
    loud = (
        "ONE RUNNER ONLY: a probe was written, read back, listed and deleted, but there is no atomic "
        "create-if-absent, so nothing stops a second runner of the same experiment from committing too"
    )
    return TargetCheck(ok=True, message=_line(target, loud), conditional_create=False)


def _line(target: _Target, message: str) -> str:
    for secret in target.secret_values():
        if len(secret) >= _SHORTEST_SECRET:
            message = message.replace(secret, "********")
    return f"{target.uri}: {' '.join(message.split())}"


def _refuses_a_second_create(store: ObjectStore) -> bool:
    folder = f"{_FOLDER}/{uuid.uuid4().hex}"
    written = [f"{folder}/probe", f"{folder}/race"]
    try:
        refuses = _round_trip(store, folder, written[0]) and _race(store, written[1])
    except _ProbeFailed:
        with suppress(TuneError):  # the first error is the one to report
            store.delete(written)
        raise
    with _step("delete"):
        store.delete(written)
        _same([found.path for found in store.list(folder)], [], "deleted, then listed")
    return refuses


def _round_trip(store: ObjectStore, folder: str, path: str) -> bool:
    data = os.urandom(64)
    with _step("list"):  # before any write, so that an error here is not one of the permission to write
        _same([found.path for found in store.list(folder)], [], "listed, before writing")
    with _step("write"):
        create_or_recognize(store, path, data)
    with _step("read back"):
        _same(bytes(store.read(path)), data, "read back")
        _same(store.size(path), len(data), "asked for the size of")
    with _step("list"):
        _same([found.path for found in store.list(folder)], [path], "listed")
    with _step("write again"):
        return not _creates(store, path, os.urandom(64))


def _race(store: ObjectStore, path: str) -> bool:
    """Return whether exactly one of several simultaneous creates succeeded."""
    start = Barrier(_RACERS)

    def create(data: bytes) -> bool:
        start.wait()
        return _creates(store, path, data)

    with _step("write at once"), ThreadPoolExecutor(_RACERS) as racers:
        return sum(racers.map(create, [os.urandom(64) for _ in range(_RACERS)])) == 1


def _creates(store: ObjectStore, path: str, data: bytes) -> bool:
    try:
        create_or_recognize(store, path, data)
    except AlreadyExists:
        return False
    return True


def _same(found: object, wanted: object, act: str) -> None:
    if found != wanted:
        raise TuneError(f"{act} a probe: expected {wanted!r}, found {found!r}")


@contextmanager
def _step(name: str) -> Iterator[None]:
    try:
        yield
    except TuneError as error:
        raise _ProbeFailed(name, error) from error
