"""Check by writing and reading probe objects whether a target can store checkpoints."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from threading import Barrier
from typing import Protocol

from prefect_tune.blocks.error_diagnosis import diagnosis
from prefect_tune.core.errors import AlreadyExists, CommitUnknown, StoreUnavailable, TuneError
from prefect_tune.core.storage.conditional_create import create_or_recognize
from prefect_tune.core.storage.object_store import ObjectStore

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
