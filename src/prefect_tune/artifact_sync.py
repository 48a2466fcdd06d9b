"""Artifacts of a trial: `pt.Syncer`, which users may subclass, and the built-in syncer for any target.

The built-in one mirrors a directory in the background: one plain object for each file, only changed ones are sent.

    <directory>/logs/events.out   ──►   <remote>/logs/events.out

A later upload replaces the object. Nothing else on the target depends on artifacts: a reader may see some files of one
sync and others of the one before, and an attempt that was taken for dead may replace a file of its successor.
Never: an object outside the remote folder; a local file outside the directory, whatever a key or a link says.
"""

from __future__ import annotations

import logging
import math
import os
import random
import re
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

from prefect_tune.blocks import StorageTarget
from prefect_tune.blocks.resolve_target import resolve_target, validate_target
from prefect_tune.core.errors import (
    CheckpointCorrupt,
    CheckpointNotFound,
    DeadlineExceeded,
    InvalidInput,
    StoreRefused,
    StoreUnavailable,
    TuneError,
)
from prefect_tune.core.shown_text import is_unicode
from prefect_tune.core.storage.layout import NEVER_ARTIFACTS, is_excluded
from prefect_tune.core.storage.object_store import Buffer, Listed, ObjectStore, is_inside
from prefect_tune.storage_retries import may_pass
from prefect_tune.stores.local.staging import plain_tree
from prefect_tune.stores.open_location import read_uri

_LONGEST_PAUSE_SECONDS = 60.0
HOPELESS = (StoreRefused, InvalidInput, CheckpointNotFound, CheckpointCorrupt)


class SyncTimedOut(DeadlineExceeded, TimeoutError):
    """A sync did not end in time: retry it, or increase the timeout."""


class Act(Enum):
    """What a syncer does, in the words of messages."""

    UP = "sync up"
    DOWN = "sync down"
    DELETE = "delete"


class Syncer(ABC):
    """Copies a directory to a target and back, at most once per period, and retries failed syncs.

    A subclass needs only the three abstract methods, not even a constructor that calls this one. Each attempt of each
    trial uses and closes its own syncer: a given object is copied with `copy.deepcopy`.
    The three methods may do their work before they return, or in the background. A subclass that works in the
    background should override `wait`, to raise the errors, and `retry`.
    """

    sync_period: timedelta = timedelta(seconds=300)
    """The least time between two syncs that `sync_up_if_needed` and `sync_down_if_needed` begin."""
    sync_timeout: timedelta = timedelta(seconds=1800)
    """The most time that one sync may take; `wait` must enforce it."""
    last_sync_up_time: float = -math.inf
    """Start of the last sync up that has not failed, in seconds on this process's monotonic clock."""
    last_sync_down_time: float = -math.inf
    """Start of the last sync down that has not failed, on the same clock."""

    _clock = staticmethod(time.monotonic)
    _sleep = staticmethod(time.sleep)

    def __init__(self, sync_period: timedelta | float = 300, sync_timeout: timedelta | float = 1800) -> None:
        """Store the settings.

        Args:
            sync_period: as a timedelta, or in seconds; 0 for no throttling.
            sync_timeout: as a timedelta, or in seconds.

        Raises:
            InvalidInput: a negative period, or a timeout that is not positive.
        """
        self.sync_period = _time("sync_period", sync_period)
        self.sync_timeout = _time("sync_timeout", sync_timeout)
        if not self.sync_timeout:
            raise InvalidInput("sync_timeout: expected more than 0 seconds, found 0: no sync could ever end in time")

    @abstractmethod
    def sync_up(self, local_dir: str, remote_dir: str, exclude: list[str] | None = None) -> bool:
        """Make the URI `remote_dir` a mirror of `local_dir`, without files that match a pattern in `exclude`.

        Returns whether the sync is done or has begun.
        """

    @abstractmethod
    def sync_down(self, remote_dir: str, local_dir: str, exclude: list[str] | None = None) -> bool:
        """Copy the files of the URI `remote_dir` to `local_dir`, without those that match a pattern in `exclude`.

        Returns whether the sync is done or has begun.
        """

    @abstractmethod
    def delete(self, remote_dir: str) -> bool:
        """Delete the URI `remote_dir` and everything below it. Returns whether that is done or has begun."""

    def retry(self) -> None:  # noqa: B027  a subclass without background work has nothing to retry
        """Run the failed syncs again. Override it in a subclass that works in the background."""

    def wait(self) -> None:  # noqa: B027  nor to wait for
        """Wait for all background work, and raise its error. Override it in a subclass that works in the background."""

    def wait_or_retry(self, max_retries: int = 3, backoff_s: float = 5) -> None:
        """Wait; if that fails, pause, retry and wait again, up to `max_retries` times.

        The pause doubles each time, from `backoff_s` seconds up to a minute, times a random factor of 0.5 to 1.

        Raises:
            InvalidInput: `max_retries` is not positive, or `backoff_s` is negative.
            StoreRefused, InvalidInput, CheckpointNotFound, CheckpointCorrupt: a retry cannot help.
            TuneError: every try failed; its cause is the last error.
        """
        if max_retries < 1 or not backoff_s >= 0:
            raise InvalidInput(f"expected max_retries >= 1 and backoff_s >= 0, found {max_retries} and {backoff_s}")
        last: Exception | None = None
        for attempt in range(max_retries + 1):
            if last is not None:
                pause_seconds = min(backoff_s * 2 ** (attempt - 1), _LONGEST_PAUSE_SECONDS)
                self._sleep(pause_seconds * random.uniform(0.5, 1.0))  # noqa: S311  it spreads retries, it keeps no secret
                self.retry()
            try:
                return self.wait()
            except Exception as error:  # noqa: BLE001  a user's syncer may raise anything; the last is raised below
                self.reset()
                last = error
            if isinstance(last, HOPELESS) and not may_pass(last):
                raise last
        raise TuneError(f"sync failed, and {max_retries} retries too: {last}") from last

    def sync_up_if_needed(self, local_dir: str, remote_dir: str, exclude: list[str] | None = None) -> bool | None:
        """Call `sync_up`, unless one began less than `sync_period` ago: then return None.

        A sync that returned False, or is known to have failed, does not count.
        """
        return self._begin_if_due(Act.UP, lambda: self.sync_up(local_dir, remote_dir, exclude))

    def sync_down_if_needed(self, remote_dir: str, local_dir: str, exclude: list[str] | None = None) -> bool | None:
        """Call `sync_down`, unless one began less than `sync_period` ago: then return None."""
        return self._begin_if_due(Act.DOWN, lambda: self.sync_down(remote_dir, local_dir, exclude))

    def _begin_if_due(self, act: Act, begin: Callable[[], bool]) -> bool | None:
        if not self._is_due(act):
            return None
        now = self._clock()
        if is_begun := begin():
            self._note_begun(act, now)
        return is_begun

    def _is_due(self, act: Act) -> bool:
        last = self.last_sync_up_time if act is Act.UP else self.last_sync_down_time
        return self._clock() - last >= self.sync_period.total_seconds()

    def _note_begun(self, act: Act, at_seconds: float) -> None:
        if act is Act.UP:
            self.last_sync_up_time = at_seconds
        elif act is Act.DOWN:
            self.last_sync_down_time = at_seconds

    def reset(self) -> None:
        """Reset the times of the last syncs, so that the next `..._if_needed` call syncs."""
        self.last_sync_up_time = self.last_sync_down_time = -math.inf

    def close(self) -> None:  # noqa: B027  nor to close
        """Release all resources; no sync begins afterwards."""

    @classmethod
    def validate_upload_dir(cls, upload_dir: str | None) -> bool:
        """Return True if `upload_dir` is a valid target; checked without connecting to it.

        Raises:
            InvalidInput: it is not; the message names the missing package, or the nearest valid value.
        """
        if upload_dir:
            validate_target(upload_dir)
        return True


def _time(name: str, value: timedelta | float) -> timedelta:
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if not 0 <= seconds < math.inf:
        raise InvalidInput(f"{name}: expected a timedelta or seconds, not negative, found {value!r}")
    return timedelta(seconds=seconds)


_MAX_NAMED = 5
_MAX_SHOWN_CHARACTERS = 200
_GRACE = timedelta(seconds=10)  # for a store to end its work after the deadline and to raise
_FIRST_PAUSE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class _Command:
    act: Act
    remote: str
    local: str = ""
    excludes: tuple[str, ...] = ()

    def __str__(self) -> str:
        places = {
            Act.UP: f"{self.local} to {self.remote}",
            Act.DOWN: f"{self.remote} to {self.local}",
            Act.DELETE: self.remote,
        }
        return f"{self.act.value} of {places[self.act]}"

    def replaces(self, failed: _Command) -> bool:
        """Whether this command makes a retry of `failed` unnecessary."""
        writes = (Act.UP, Act.DELETE)
        return self == failed or (self.remote == failed.remote and self.act in writes and failed.act in writes)


class TargetSyncer(Syncer):
    """Syncs directories with a target, in the background, one command at a time and in the order given.

    Commands are queued, never dropped, while another runs; a sync that equals the last queued one of the same remote
    directory is not queued twice, since a sync copies the files that exist when it begins. Each command is ended
    after `sync_timeout`, and the next one begins only after it has ended.

    A sync up sends the files whose size or modification time differs from what this syncer sent or received last, and
    deletes those that it has sent or received and that are deleted locally; a sync down deletes nothing locally. For
    `exclude`, see `prefect_tune.core.storage.layout`. What else a sync leaves out (`ArtifactMirror.send`) is
    logged once.

    `remote_dir` is a URI, or a folder on `target` if one is given. A pickled copy keeps the settings and the commands
    that `retry` runs again; running and queued commands stay with the original.
    """

    def __init__(
        self,
        target: StorageTarget | None = None,
        sync_period: timedelta | float = 300,
        sync_timeout: timedelta | float = 1800,
    ) -> None:
        super().__init__(sync_period, sync_timeout)
        self._target = target
        self._last: _Command | None = None
        self._failed: dict[_Command, Exception | None] = {}
        self._prepare()

    def _prepare(self) -> None:
        self._state = threading.Condition()
        self._queue: deque[_Command] = deque()
        self._running: _Command | None = None
        self._began_seconds = 0.0
        self._mirrors: dict[tuple[str, str], ArtifactMirror] = {}
        self.warn: Callable[[str], None] = logging.getLogger("prefect_tune").warning
        """Reports what a sync up leaves out; a pickled copy logs it, as by default."""
        self._named: set[str] = set()
        self._failures = 0
        self._not_before_seconds = 0.0
        self._is_closed = False

    def __getstate__(self) -> dict[str, Any]:
        with self._state:
            failed = dict.fromkeys([*self._failed, *([self._running] if self._running else []), *self._queue])
        kept = ("sync_period", "sync_timeout", "_target", "_last")
        return {**{name: self.__dict__[name] for name in kept}, "_failed": failed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._prepare()

    def sync_up(self, local_dir: str, remote_dir: str, exclude: list[str] | None = None) -> bool:
        """Queue a sync of the changed files of `local_dir`, and return True.

        Raises:
            InvalidInput: `remote_dir` is not a valid target or folder, or this syncer is closed.
        """
        return self._enqueue(_Command(Act.UP, remote_dir, _absolute(local_dir), _patterns(exclude)))

    def sync_down(self, remote_dir: str, local_dir: str, exclude: list[str] | None = None) -> bool:
        """Queue a download of the files below `remote_dir` into `local_dir`; otherwise as `sync_up`.

        If `remote_dir` has no files, `wait` raises `CheckpointNotFound`, which is a `FileNotFoundError`.
        """
        return self._enqueue(_Command(Act.DOWN, remote_dir, _absolute(local_dir), _patterns(exclude)))

    def delete(self, remote_dir: str) -> bool:
        """Queue the deletion of everything below `remote_dir`; otherwise as `sync_up`."""
        return self._enqueue(_Command(Act.DELETE, remote_dir))

    def retry(self) -> None:
        """Queue all failed commands again that no later one has replaced; if there are none, the last command.

        Raises:
            TuneError: there was no command yet.
        """
        with self._state:
            again = list(self._failed) or ([self._last] if self._last else [])
        if not again:
            raise TuneError("retry: there was no sync yet, so there is none to retry")
        for command in again:
            self._enqueue(command)

    def wait(self, timeout: timedelta | float | None = None) -> None:
        """Wait until all commands are done.

        Args:
            timeout: the longest wait; 0 for none. None: as long as the commands may take.

        Raises:
            SyncTimedOut: not done within `timeout`, or a command was ended by `sync_timeout`; a `TimeoutError` too.
            TuneError: a command failed; the error has the class of its cause. Each `wait` raises it until a retry
                succeeds or a later command replaces it; for a sync down that no retry can help, only once.
        """
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        until = None if seconds is None else self._clock() + seconds
        with self._state:
            while self._running or self._queue:
                now = self._clock()
                ends = self._began_seconds + (self.sync_timeout + _GRACE).total_seconds() if self._running else now + 1
                remaining = min(ends, ends if until is None else until) - now
                if remaining <= 0:
                    late = self._running or self._queue[0]
                    raise SyncTimedOut(f"{late}: not done in time; no other sync begins before it has ended")
                self._state.wait(min(remaining, 1.0))
            for command, error in list(self._failed.items()):
                if command.act is Act.DOWN and isinstance(error, HOPELESS):
                    del self._failed[command]  # no local file is unsaved, and a retry cannot help: raised once
                if error is None:
                    raise TuneError(f"{command}: was under way when this syncer was copied, and may not be done")
                if isinstance(error, TuneError):
                    kind = SyncTimedOut if isinstance(error, DeadlineExceeded) else type(error)
                    raise kind(f"{command}: {error}") from error
                raise TuneError(f"{command}: {error!r}") from error

    def close(self) -> None:
        """Refuse further commands, and wait for the queued ones. Idempotent."""
        with self._state:
            self._is_closed = True
        self.wait()

    def reset(self) -> None:
        """Make the next `..._if_needed` call sync, however recent the last sync or failure is."""
        super().reset()
        with self._state:
            self._not_before_seconds = 0.0

    def _is_due(self, act: Act) -> bool:
        """Count a running sync as the last one; after a failure, wait 2, 4, 8 ... s, up to `sync_period`."""
        with self._state:
            if self._queue or self._clock() < self._not_before_seconds:
                return False
            if self._running and self._running.act is act:
                return self._clock() - self._began_seconds >= self.sync_period.total_seconds()
        return super()._is_due(act)

    def _note_begun(self, act: Act, at_seconds: float) -> None:
        """Do nothing: a sync counts once it has succeeded."""

    def _enqueue(self, command: _Command) -> bool:
        self._place(command.remote)
        with self._state:
            if self._is_closed:
                raise InvalidInput(f"{command}: this syncer is closed")
            self._last = command
            for failed in [failed for failed in self._failed if command.replaces(failed)]:
                del self._failed[failed]
            if command != next((last for last in reversed(self._queue) if last.remote == command.remote), None):
                self._queue.append(command)
            self._begin()
        return True

    def _begin(self) -> None:
        """Begin the next command, if none runs, in a non-daemon thread: the interpreter waits for it at exit."""
        while self._queue and self._running is None:
            command = self._running = self._queue.popleft()
            self._began_seconds = self._clock()
            try:
                threading.Thread(target=self._run, args=(command,), name=f"{command}").start()
            except RuntimeError as error:  # this process may have no more threads
                self._running = None
                self._note(command, error)

    def _run(self, command: _Command) -> None:
        error: Exception | None = TuneError("its thread was ended")
        try:
            mirror = self._mirrors.setdefault((command.local, command.remote), ArtifactMirror(Path(command.local)))
            target, folder = self._place(command.remote)
            with target.open(timeout=self.sync_timeout) as store:
                match command.act:
                    case Act.UP:
                        self._report_left_out(command.local, mirror.send(store, folder, command.excludes))
                    case Act.DOWN:
                        mirror.receive(store, folder, (*command.excludes, *NEVER_ARTIFACTS))
                    case Act.DELETE:
                        self._mirrors.clear()
                        _delete_everything(store, folder)
            error = None
        except Exception as failure:  # noqa: BLE001  it is stored, and raised by `wait`
            error = failure
        finally:
            with self._state:
                self._note(command, error)
                self._running = None
                self._begin()
                self._state.notify_all()

    def _note(self, command: _Command, error: Exception | None) -> None:
        if error is None:
            self._failures, self._not_before_seconds = 0, 0.0
            super()._note_begun(command.act, self._began_seconds)
            return
        if not any(waiting.replaces(command) for waiting in self._queue):
            self._failed[command] = error
        self._failures += 1
        pause_seconds = min(_FIRST_PAUSE_SECONDS * 2**self._failures, self.sync_period.total_seconds())
        self._not_before_seconds = self._clock() + pause_seconds

    def _report_left_out(self, directory: str, left_out: Mapping[str, str]) -> None:
        """Report each path once."""
        new = {path: reason for path, reason in left_out.items() if f"{directory}/{path}" not in self._named}
        if not new:
            return
        self._named.update(f"{directory}/{path}" for path in new)
        half = _MAX_SHOWN_CHARACTERS // 2
        shown = (
            (path if len(path) <= _MAX_SHOWN_CHARACTERS else f"{path[:half]}…{path[-half:]}", reason)
            for path, reason in new.items()
        )
        named = ", ".join(f"{path!r} ({reason})" for path, reason in islice(shown, _MAX_NAMED))
        more = f", and {len(new) - _MAX_NAMED:,} more" if len(new) > _MAX_NAMED else ""
        self.warn(f"left out of the sync of artifacts: {named}{more}")

    def _place(self, remote: str) -> tuple[StorageTarget, str]:
        """Return the target and the folder on it that `remote` names; without a target of its own, the parent's."""
        if self._target is None:
            if "://" not in remote and not remote.startswith(("/", "./", "../", "~")):
                return resolve_target(remote), ""  # a block's slug
            location = read_uri(remote)
            above, _, folder = location.path.rpartition("/")
            return resolve_target(location.at(above).uri), folder
        folder = remote
        if "://" in remote:
            (root, _, options), (place, _, given) = (uri.partition("?") for uri in (self._target.uri, remote))
            folder = place.removeprefix(root)
            if folder == place or not folder.startswith("/") or given not in ("", options):
                raise InvalidInput(f"{remote!r}: expected a folder below {self._target.uri}")
        folder = folder.strip("/")
        if not is_inside(folder):
            raise InvalidInput(f"{remote!r}: expected a folder on {self._target.uri}, without '.' and '..'")
        return self._target, folder


def _absolute(local_dir: str) -> str:
    """Return the absolute path now: the command runs later, when the working directory may be another."""
    return os.path.abspath(local_dir)  # noqa: PTH100  a removed directory's path need not be followed


def _patterns(exclude: list[str] | None) -> tuple[str, ...]:
    """Return the patterns of the user: files that match others are reported."""
    return tuple(pattern for pattern in exclude or () if pattern not in NEVER_ARTIFACTS)


def _delete_everything(store: ObjectStore, folder: str) -> None:
    if not folder:
        raise InvalidInput("delete: expected a folder of the target, found the whole target, which is never deleted")
    while listed := store.list(folder):
        store.delete([each.path for each in listed])


_PIECE_BYTES = 8 * 1024 * 1024
_TICK_NS = 50_000_000  # the clock of a file system on Linux ticks every 10 ms or faster
_MAX_KEY_BYTES = 900  # S3, Google and Azure take 1,024; the rest is for the prefix of the target
_NO_KEY = re.compile(r"[\x00-\x1f\x7f\ufffe\uffff]")  # not in every listing, which is XML
_HALF_RECEIVED = re.compile(r"\.[0-9a-f]{32}\.part")

_Stamp: TypeAlias = tuple[int, int, int]
"""Size, modification time in ns and inode of a file; a later write changes it."""


class ArtifactMirror:
    """A directory and its mirror below a folder of a target. One thread at a time may use it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._mirrored: dict[str, _Stamp | None] = {}
        """By path: the stamp of the local file when it was sent or received; None if the copy may be another one."""

    def send(self, store: ObjectStore, folder: str, excludes: Sequence[str]) -> Mapping[str, str]:
        """Send new and changed files, delete those that are gone, and return by path why the others are left out.

        Only what this mirror has sent or received is deleted. Left out are excluded files and empty folders, files that
        vanish before they are read, and what the result names: links that lead out of the directory or to folders,
        entries that are neither a file nor a folder or cannot be read, names that not every target takes, and
        `NEVER_ARTIFACTS`. What the result names stays on the target as it was, and so does what is below it.

        Raises:
            InvalidInput: the directory does not exist.
            StoreUnavailable, StoreRefused: not all files were sent; the next call sends the others.
        """
        if not self._directory.is_dir():
            raise InvalidInput(f"{self._directory}: expected a directory to sync, found nothing of the kind")
        left_out: dict[str, str] = {}
        settled_ns = time.time_ns() - _TICK_NS
        local = dict(_scan(self._directory, folder, excludes, left_out))
        mirrored = self._mirrored
        if deleted := sorted(path for path in mirrored.keys() - local.keys() if not _is_left_out(path, left_out)):
            store.delete([_key(folder, path) for path in deleted])  # before a file takes the name of a folder
            for path in deleted:
                del mirrored[path]

        def send_file(path: str) -> None:
            try:
                file = (self._directory / path).open("rb", buffering=0)
            except FileNotFoundError:
                return  # deleted since it was listed
            except OSError as error:
                left_out[path] = f"it cannot be read: {error.strerror}"
                return
            mirrored[path] = None
            try:
                with file:
                    store.replace(_key(folder, path), _Pieces(file.fileno()))
            except InvalidInput as unsendable:  # lost by the disk, or of a name that the store reserves
                left_out[path] = str(unsendable)
                del mirrored[path]
                return
            if local[path][1] < settled_ns:  # else the next write may come within the same tick of the clock
                mirrored[path] = local[path]

        for _ in store.map(send_file, [path for path, stamp in local.items() if mirrored.get(path) != stamp]):
            pass
        return left_out

    def receive(self, store: ObjectStore, folder: str, excludes: Sequence[str]) -> None:
        """Download the files below `folder`, in place of local ones of the same names; all others stay.

        Raises:
            CheckpointNotFound: the target has no files there; a `FileNotFoundError` too.
            CheckpointCorrupt: a key would lead out of the directory. Nothing is downloaded.
            InvalidInput: a local link or file has the name of a folder, or a folder that of a file.
        """
        self._mirrored.clear()
        files = [file for file in plain_tree(store, folder).files if not is_excluded(file.path, excludes)]

        def receive_file(file: Listed) -> None:
            local = self._place_of(file.path)
            fresh = local.with_name(f".{uuid.uuid4().hex}.part")
            try:
                with fresh.open("xb") as writing:
                    writing.writelines(_read_pieces(store, _key(folder, file.path), file.size_bytes))
                fresh.replace(local)
            except BaseException:
                fresh.unlink(missing_ok=True)
                raise
            self._mirrored[file.path] = _stamp(local.stat())

        for _ in store.map(receive_file, files):
            pass

    def _place_of(self, path: str) -> Path:
        """Return the local path of `path`, making its folder; refuse links that lead out of the directory."""
        local = self._directory / path
        if not local.parent.resolve().is_relative_to(self._directory.resolve()):
            raise InvalidInput(f"{local}: a local link leads out of {self._directory}: remove it")
        try:
            local.parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as in_the_way:
            raise InvalidInput(f"{local}: expected a local folder, found a file: remove it") from in_the_way
        if local.is_dir():
            raise InvalidInput(f"{local}: expected a local file, found a folder: remove it")
        return local


def _is_left_out(path: str, left_out: Mapping[str, str]) -> bool:
    """Whether a file, one of its folders or the whole directory is left out: then it may still be there."""
    names = path.split("/")
    return any("/".join(names[:depth]) in left_out for depth in range(len(names) + 1))


def _key(folder: str, path: str) -> str:
    return f"{folder}/{path}" if folder else path  # the folder may be the root of a target


def _stamp(status: os.stat_result) -> _Stamp:
    return (status.st_size, status.st_mtime_ns, status.st_ino)


class _Pieces:
    """The bytes of an open file, up to its size when it was opened; a store may read them again."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._size_bytes = os.fstat(file).st_size

    def __iter__(self) -> Iterator[bytes]:
        for offset in range(0, self._size_bytes, _PIECE_BYTES):
            try:
                piece = os.pread(self._file, min(_PIECE_BYTES, self._size_bytes - offset), offset)
            except OSError as error:  # of this disk, not of the target
                raise InvalidInput(f"it cannot be read: {error.strerror}") from error
            yield piece


def _read_pieces(store: ObjectStore, key: str, size_bytes: int) -> Iterator[Buffer]:
    for offset in range(0, size_bytes, _PIECE_BYTES):
        length = min(_PIECE_BYTES, size_bytes - offset)
        data = store.read(key, offset=offset, length=length)
        if len(data) != length:
            raise StoreUnavailable(f"{key} at {offset}: expected {length} bytes, found {len(data)}; try again")
        yield data


def _scan(
    directory: Path, folder: str, excludes: Sequence[str], left_out: dict[str, str]
) -> Iterator[tuple[str, _Stamp]]:
    """Yield the files to send, and note in `left_out` why others are not."""
    below = [""]
    while below:
        above = below.pop()
        try:
            entries = list(os.scandir(directory / above))
        except FileNotFoundError:
            continue  # deleted since its parent was read
        except OSError as error:
            left_out[above] = f"it cannot be read: {error.strerror}"
            continue
        for entry in entries:
            path = f"{above}/{entry.name}" if above else entry.name
            if is_excluded(path, excludes) or _HALF_RECEIVED.fullmatch(entry.name):
                continue
            try:
                if (reason := _unsendable_reason(directory, path, folder, entry)) is not None:
                    left_out[path] = reason
                elif entry.is_dir(follow_symlinks=False):
                    below.append(path)
                else:
                    yield path, _stamp(entry.stat())
            except FileNotFoundError:
                continue  # deleted since the folder was read
            except OSError as error:
                left_out[path] = f"it cannot be read: {error.strerror}"


def _unsendable_reason(directory: Path, path: str, folder: str, entry: os.DirEntry[str]) -> str | None:
    if not is_unicode(path):
        return "its name is not UTF-8"
    if "\\" in path:
        return "its name has a backslash"
    if _NO_KEY.search(path):
        return "its name has control characters"
    if len(_key(folder, path).encode()) > _MAX_KEY_BYTES:
        return f"its path on the target is longer than {_MAX_KEY_BYTES} bytes"
    if is_excluded(path, NEVER_ARTIFACTS):
        return "files of this name are never artifacts"
    if entry.is_symlink() and not (
        entry.is_file() and (directory / path).resolve().is_relative_to(directory.resolve())
    ):
        return "a link to a folder, to nothing, or out of the trial's directory"
    if not entry.is_file() and not entry.is_dir():
        return "neither a file nor a folder"
    return None
