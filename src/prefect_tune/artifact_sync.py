"""The syncers of a trial's artifacts: `pt.Syncer`, which users may subclass, and the built-in syncer for any target.

The built-in syncer mirrors a directory in the background. Each file becomes one object; only changed files are sent.

    <directory>/logs/events.out   ──►   <remote>/logs/events.out

A changed file replaces its object. Nothing else on the target depends on artifacts, so it is acceptable that a reader
can see a mix of two syncs, and that a lost attempt that still runs can replace a file of the next attempt. Even if a
key or a link leads elsewhere, a sync writes no object outside the remote folder, and no file outside the directory.
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
from prefect_tune.core.display_text import is_utf8_encodable
from prefect_tune.core.errors import (
    CheckpointCorrupt,
    CheckpointNotFound,
    DeadlineExceeded,
    InvalidInput,
    StoreRefused,
    StoreUnavailable,
    TuneError,
)
from prefect_tune.core.storage.layout import NON_ARTIFACT_PATTERNS, matches_any_pattern
from prefect_tune.core.storage.object_store import Buffer, ListedObject, ObjectStore, is_normalized_path
from prefect_tune.storage_retries import is_retryable
from prefect_tune.stores.local.staging import list_plain_tree
from prefect_tune.stores.open_location import parse_uri

_MAX_PAUSE_SECONDS = 60.0
NON_RETRYABLE_ERRORS = (StoreRefused, InvalidInput, CheckpointNotFound, CheckpointCorrupt)


class SyncTimedOut(DeadlineExceeded, TimeoutError):
    """A sync did not end in time: retry it, or increase the timeout."""


class SyncAction(Enum):
    """An action of a syncer. Messages contain the values."""

    UP = "sync up"
    DOWN = "sync down"
    DELETE = "delete"


class Syncer(ABC):
    """Copies a directory to a target and back, on request or at most once per period, and retries failed syncs.

    A subclass needs only the three abstract methods, and need not call the constructor of `Syncer`. Each attempt of a
    trial uses and closes its own syncer, a `copy.deepcopy` of the configured object. The three methods can do their
    work before they return, or in the background. A subclass that works in the background must override `retry` and
    `wait`, and its `wait` must raise the errors of the background work.
    """

    sync_period: timedelta = timedelta(seconds=300)
    """The minimum time between two syncs begun by `sync_up_if_needed`, or by `sync_down_if_needed`."""
    sync_timeout: timedelta = timedelta(seconds=1800)
    """The maximum time of one sync; `wait` must enforce it."""
    last_sync_up_time: float = -math.inf
    """The start of the last `sync_up` that did not fail, in seconds on the monotonic clock of this process."""
    last_sync_down_time: float = -math.inf
    """The start of the last `sync_down` that did not fail, on the same clock."""

    _clock = staticmethod(time.monotonic)
    _sleep = staticmethod(time.sleep)

    def __init__(self, sync_period: timedelta | float = 300, sync_timeout: timedelta | float = 1800) -> None:
        """Store the settings.

        Args:
            sync_period: a timedelta, or seconds; 0 for no throttling.
            sync_timeout: a timedelta, or seconds.

        Raises:
            InvalidInput: the period is negative, or the timeout is not positive.
        """
        self.sync_period = _parse_duration("sync_period", sync_period)
        self.sync_timeout = _parse_duration("sync_timeout", sync_timeout)
        if not self.sync_timeout:
            raise InvalidInput("sync_timeout: expected more than 0 seconds, found 0: no sync could ever end in time")

    @abstractmethod
    def sync_up(self, local_dir: str, remote_dir: str, exclude: list[str] | None = None) -> bool:
        """Make the URI `remote_dir` a mirror of `local_dir`, without files that match a pattern in `exclude`.

        Returns whether the sync is done or has begun.
        """

    @abstractmethod
    def sync_down(self, remote_dir: str, local_dir: str, exclude: list[str] | None = None) -> bool:
        """Copy the files of the URI `remote_dir` to `local_dir`, except files that match a pattern in `exclude`.

        Returns whether the sync is done or has begun.
        """

    @abstractmethod
    def delete(self, remote_dir: str) -> bool:
        """Delete the URI `remote_dir` and everything below it. Returns whether the deletion is done or has begun."""

    def retry(self) -> None:  # noqa: B027  a subclass without background work has nothing to retry
        """Run the failed syncs again. Override this method in a subclass that works in the background."""

    def wait(self) -> None:  # noqa: B027  without background work, there is nothing to wait for
        """Wait for all background work, and raise its error. A subclass with background work must override this."""

    def wait_or_retry(self, max_retries: int = 3, backoff_s: float = 5) -> None:
        """Wait; after an error, pause, retry and wait again, up to `max_retries` times.

        The pause doubles each time, from `backoff_s` seconds up to a minute; a random factor of 0.5 to 1 shortens it.

        Raises:
            InvalidInput: `max_retries` is not positive, or `backoff_s` is negative.
            StoreRefused, InvalidInput, CheckpointNotFound, CheckpointCorrupt: a retry cannot help.
            TuneError: every try failed; the cause is the last error.
        """
        if max_retries < 1 or not backoff_s >= 0:
            raise InvalidInput(f"expected max_retries >= 1 and backoff_s >= 0, found {max_retries} and {backoff_s}")
        last_error: Exception | None = None
        for attempt in range(max_retries + 1):
            if last_error is not None:
                pause_seconds = min(backoff_s * 2 ** (attempt - 1), _MAX_PAUSE_SECONDS)
                self._sleep(pause_seconds * random.uniform(0.5, 1.0))  # noqa: S311  it spreads retries, and keeps no secret
                self.retry()
            try:
                return self.wait()
            except Exception as error:  # noqa: BLE001  a user's syncer may raise any error; the last error is raised below
                self.reset()
                last_error = error
            if isinstance(last_error, NON_RETRYABLE_ERRORS) and not is_retryable(last_error):
                raise last_error
        raise TuneError(f"sync failed, and {max_retries} retries too: {last_error}") from last_error

    def sync_up_if_needed(self, local_dir: str, remote_dir: str, exclude: list[str] | None = None) -> bool | None:
        """Call `sync_up`; return None instead if a sync up began less than `sync_period` ago.

        A sync that returned False, or that failed, does not count.
        """
        return self._start_sync_if_due(SyncAction.UP, lambda: self.sync_up(local_dir, remote_dir, exclude))

    def sync_down_if_needed(self, remote_dir: str, local_dir: str, exclude: list[str] | None = None) -> bool | None:
        """Call `sync_down`; return None instead if a sync down began less than `sync_period` ago."""
        return self._start_sync_if_due(SyncAction.DOWN, lambda: self.sync_down(remote_dir, local_dir, exclude))

    def _start_sync_if_due(self, action: SyncAction, start: Callable[[], bool]) -> bool | None:
        if not self._is_sync_due(action):
            return None
        now = self._clock()
        if is_started := start():
            self._record_start(action, now)
        return is_started

    def _is_sync_due(self, action: SyncAction) -> bool:
        last_time = self.last_sync_up_time if action is SyncAction.UP else self.last_sync_down_time
        return self._clock() - last_time >= self.sync_period.total_seconds()

    def _record_start(self, action: SyncAction, at_seconds: float) -> None:
        if action is SyncAction.UP:
            self.last_sync_up_time = at_seconds
        elif action is SyncAction.DOWN:
            self.last_sync_down_time = at_seconds

    def reset(self) -> None:
        """Reset the times of the last syncs, so that the next call of a method `..._if_needed` begins a sync."""
        self.last_sync_up_time = self.last_sync_down_time = -math.inf

    def close(self) -> None:  # noqa: B027  a subclass may have nothing to release
        """Release all resources; no sync begins afterwards."""

    @classmethod
    def validate_upload_dir(cls, upload_dir: str | None) -> bool:
        """Return True if `upload_dir` is a valid target, without connecting to it.

        Raises:
            InvalidInput: `upload_dir` is not valid. The message names the missing package, or the nearest valid value.
        """
        if upload_dir:
            validate_target(upload_dir)
        return True


def _parse_duration(name: str, value: timedelta | float) -> timedelta:
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if not 0 <= seconds < math.inf:
        raise InvalidInput(f"{name}: expected a timedelta or a number of seconds, 0 or more, found {value!r}")
    return timedelta(seconds=seconds)


_MAX_NAMED_PATHS = 5
_MAX_SHOWN_CHARACTERS = 200
_GRACE_PERIOD = timedelta(seconds=10)  # the time that a store gets after its deadline to stop and raise an error
_FIRST_PAUSE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class _Command:
    action: SyncAction
    remote: str
    local: str = ""
    excludes: tuple[str, ...] = ()

    def __str__(self) -> str:
        paths = {
            SyncAction.UP: f"{self.local} to {self.remote}",
            SyncAction.DOWN: f"{self.remote} to {self.local}",
            SyncAction.DELETE: self.remote,
        }
        return f"{self.action.value} of {paths[self.action]}"

    def replaces(self, failed: _Command) -> bool:
        """Return whether this command makes a retry of `failed` unnecessary."""
        writes = (SyncAction.UP, SyncAction.DELETE)
        return self == failed or (self.remote == failed.remote and self.action in writes and failed.action in writes)


class TargetSyncer(Syncer):
    """Syncs directories with a target in the background, one command at a time, in the order of the calls.

    While a command runs, all later commands wait in a queue. A sync that equals the last queued sync of the
    same remote directory is not queued again, because the queued sync will copy the files that exist when it begins. A
    command is stopped after `sync_timeout`; the next command begins only after the stopped command has ended.

    `sync_up` sends the files whose size or modification time changed since this syncer last sent or received them. It
    deletes remote files that this syncer sent or received and that were deleted locally. `sync_down` deletes no local
    files. For `exclude`, see `prefect_tune.core.storage.layout`. `ArtifactMirror.upload` documents which other files a
    sync leaves out; each of these files is logged once.

    `remote_dir` is a URI, or a folder on `target` if the syncer has a target. A pickled copy has the same settings. The
    commands that the original has not finished count as failed in the copy, so that `retry` runs them again.
    """

    def __init__(
        self,
        target: StorageTarget | None = None,
        sync_period: timedelta | float = 300,
        sync_timeout: timedelta | float = 1800,
    ) -> None:
        super().__init__(sync_period, sync_timeout)
        self._target = target
        self._last_command: _Command | None = None
        self._failed_commands: dict[_Command, Exception | None] = {}
        self._init_runtime_state()

    def _init_runtime_state(self) -> None:
        self._state = threading.Condition()
        self._queue: deque[_Command] = deque()
        self._running_command: _Command | None = None
        self._started_at_seconds = 0.0
        self._mirrors: dict[tuple[str, str], ArtifactMirror] = {}
        self.warn: Callable[[str], None] = logging.getLogger("prefect_tune").warning
        """Reports the files that a sync up leaves out. By default, and in each pickled copy, it logs a warning."""
        self._reported_paths: set[str] = set()
        self._failures = 0
        self._next_start_seconds = 0.0
        self._is_closed = False

    def __getstate__(self) -> dict[str, Any]:
        with self._state:
            running = [self._running_command] if self._running_command else []
            failed = dict.fromkeys([*self._failed_commands, *running, *self._queue])
        attributes = ("sync_period", "sync_timeout", "_target", "_last_command")
        return {**{name: self.__dict__[name] for name in attributes}, "_failed_commands": failed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._init_runtime_state()

    def sync_up(self, local_dir: str, remote_dir: str, exclude: list[str] | None = None) -> bool:
        """Queue a sync of the changed files of `local_dir`, and return True.

        Raises:
            InvalidInput: `remote_dir` is not a valid target or folder, or this syncer is closed.
        """
        return self._enqueue_command(
            _Command(SyncAction.UP, remote_dir, _make_absolute(local_dir), _drop_built_in_patterns(exclude))
        )

    def sync_down(self, remote_dir: str, local_dir: str, exclude: list[str] | None = None) -> bool:
        """Queue a download of the files below `remote_dir` into `local_dir`; return and raise like `sync_up`.

        If `remote_dir` has no files, `wait` raises `CheckpointNotFound`, which is a `FileNotFoundError`.
        """
        return self._enqueue_command(
            _Command(SyncAction.DOWN, remote_dir, _make_absolute(local_dir), _drop_built_in_patterns(exclude))
        )

    def delete(self, remote_dir: str) -> bool:
        """Queue the deletion of everything below `remote_dir`; return and raise like `sync_up`."""
        return self._enqueue_command(_Command(SyncAction.DELETE, remote_dir))

    def retry(self) -> None:
        """Queue again all failed commands that no later command replaced; if there are none, the last command.

        Raises:
            TuneError: there was no command yet.
        """
        with self._state:
            commands = list(self._failed_commands) or ([self._last_command] if self._last_command else [])
        if not commands:
            raise TuneError("retry: there was no sync yet, so there is nothing to retry")
        for command in commands:
            self._enqueue_command(command)

    def wait(self, timeout: timedelta | float | None = None) -> None:
        """Wait until all commands are done.

        Args:
            timeout: the maximum wait; 0 to check without waiting; None to wait as long as the commands may take.

        Raises:
            SyncTimedOut: the commands did not end within `timeout`, or `sync_timeout` stopped a command.
            TuneError: a command failed; if it failed with a TuneError, this error has the same class. Each `wait`
                raises the error until a retry succeeds or a later command replaces the failed command. An error of
                `sync_down` that no retry can fix is raised only once.
        """
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        deadline = None if seconds is None else self._clock() + seconds
        with self._state:
            while self._running_command or self._queue:
                now = self._clock()
                limit = (self.sync_timeout + _GRACE_PERIOD).total_seconds()
                ends_at = self._started_at_seconds + limit if self._running_command else now + 1
                remaining = min(ends_at, ends_at if deadline is None else deadline) - now
                if remaining <= 0:
                    late = self._running_command or self._queue[0]
                    raise SyncTimedOut(f"{late}: not done in time; no other sync begins before it has ended")
                self._state.wait(min(remaining, 1.0))
            for command, error in list(self._failed_commands.items()):
                if command.action is SyncAction.DOWN and isinstance(error, NON_RETRYABLE_ERRORS):
                    del self._failed_commands[command]  # raise it only once, because no retry can fix this download
                if error is None:
                    raise TuneError(f"{command}: it was not done when this syncer was copied; `retry` runs it again")
                if isinstance(error, TuneError):
                    kind = SyncTimedOut if isinstance(error, DeadlineExceeded) else type(error)
                    raise kind(f"{command}: {error}") from error
                raise TuneError(f"{command}: {error!r}") from error

    def close(self) -> None:
        """Refuse further commands, and wait for the queued commands. Idempotent."""
        with self._state:
            self._is_closed = True
        self.wait()

    def reset(self) -> None:
        """Let the next call of a method `..._if_needed` begin a sync, even right after a sync or a failure."""
        super().reset()
        with self._state:
            self._next_start_seconds = 0.0

    def _is_sync_due(self, action: SyncAction) -> bool:
        """Count a running sync as the last sync; after failures, wait 2, 4, 8, ... s, at most `sync_period`."""
        with self._state:
            if self._queue or self._clock() < self._next_start_seconds:
                return False
            if self._running_command and self._running_command.action is action:
                return self._clock() - self._started_at_seconds >= self.sync_period.total_seconds()
        return super()._is_sync_due(action)

    def _record_start(self, action: SyncAction, at_seconds: float) -> None:
        """Do nothing, because this syncer counts a sync only after it has succeeded: see `_record_outcome`."""

    def _enqueue_command(self, command: _Command) -> bool:
        self._resolve_folder(command.remote)
        with self._state:
            if self._is_closed:
                raise InvalidInput(f"{command}: this syncer is closed")
            self._last_command = command
            for failed in [failed for failed in self._failed_commands if command.replaces(failed)]:
                del self._failed_commands[failed]
            if command != next((last for last in reversed(self._queue) if last.remote == command.remote), None):
                self._queue.append(command)
            self._start_next_command()
        return True

    def _start_next_command(self) -> None:
        """Start the next command if none runs, in a non-daemon thread, for which the interpreter waits at exit."""
        while self._queue and self._running_command is None:
            command = self._running_command = self._queue.popleft()
            self._started_at_seconds = self._clock()
            try:
                threading.Thread(target=self._run_command, args=(command,), name=f"{command}").start()
            except RuntimeError as error:  # this process cannot start more threads
                self._running_command = None
                self._record_outcome(command, error)

    def _run_command(self, command: _Command) -> None:
        error: Exception | None = TuneError("its thread was ended")
        try:
            mirror = self._mirrors.setdefault((command.local, command.remote), ArtifactMirror(Path(command.local)))
            target, folder = self._resolve_folder(command.remote)
            with target.open(timeout=self.sync_timeout) as store:
                match command.action:
                    case SyncAction.UP:
                        self._report_left_out_files(command.local, mirror.upload(store, folder, command.excludes))
                    case SyncAction.DOWN:
                        mirror.download(store, folder, (*command.excludes, *NON_ARTIFACT_PATTERNS))
                    case SyncAction.DELETE:
                        self._mirrors.clear()
                        if not folder:
                            raise InvalidInput("delete: expected a folder; the whole target is never deleted")
                        while listed := store.list(folder):
                            store.delete([listed_object.path for listed_object in listed])
            error = None
        except Exception as failure:  # noqa: BLE001  it is stored, and `wait` raises it
            error = failure
        finally:
            with self._state:
                self._record_outcome(command, error)
                self._running_command = None
                self._start_next_command()
                self._state.notify_all()

    def _record_outcome(self, command: _Command, error: Exception | None) -> None:
        if error is None:
            self._failures, self._next_start_seconds = 0, 0.0
            super()._record_start(command.action, self._started_at_seconds)
            return
        if not any(waiting.replaces(command) for waiting in self._queue):
            self._failed_commands[command] = error
        self._failures += 1
        pause_seconds = min(_FIRST_PAUSE_SECONDS * 2**self._failures, self.sync_period.total_seconds())
        self._next_start_seconds = self._clock() + pause_seconds

    def _report_left_out_files(self, directory: str, left_out: Mapping[str, str]) -> None:
        """Report each path that is left out, but only once."""
        new = {path: reason for path, reason in left_out.items() if f"{directory}/{path}" not in self._reported_paths}
        if not new:
            return
        self._reported_paths.update(f"{directory}/{path}" for path in new)
        half = _MAX_SHOWN_CHARACTERS // 2
        shown = (
            (path if len(path) <= _MAX_SHOWN_CHARACTERS else f"{path[:half]}…{path[-half:]}", reason)
            for path, reason in new.items()
        )
        listing = ", ".join(f"{path!r} ({reason})" for path, reason in islice(shown, _MAX_NAMED_PATHS))
        more = f", and {len(new) - _MAX_NAMED_PATHS:,} more" if len(new) > _MAX_NAMED_PATHS else ""
        self.warn(f"left out of the sync of artifacts: {listing}{more}")

    def _resolve_folder(self, remote: str) -> tuple[StorageTarget, str]:
        """Return the target and folder of `remote`; if the syncer has no target, the URI's parent is the target."""
        if self._target is None:
            if "://" not in remote and not remote.startswith(("/", "./", "../", "~")):
                return resolve_target(remote), ""  # a block's slug
            location = parse_uri(remote)
            parent, _, folder = location.path.rpartition("/")
            return resolve_target(location.with_path(parent).uri), folder
        folder = remote
        if "://" in remote:
            (root, _, options), (base, _, remote_options) = (uri.partition("?") for uri in (self._target.uri, remote))
            folder = base.removeprefix(root)
            if folder == base or not folder.startswith("/") or remote_options not in ("", options):
                raise InvalidInput(f"{remote!r}: expected a folder below {self._target.uri}")
        folder = folder.strip("/")
        if not is_normalized_path(folder):
            raise InvalidInput(f"{remote!r}: expected a folder on {self._target.uri}, without '.' and '..'")
        return self._target, folder


def _make_absolute(local_dir: str) -> str:
    """Return the absolute path, because the working directory may change before the command runs."""
    return os.path.abspath(local_dir)  # noqa: PTH100  links stay as written


def _drop_built_in_patterns(exclude: list[str] | None) -> tuple[str, ...]:
    """Return only the user's patterns, so that files are reported if a built-in pattern leaves them out."""
    return tuple(pattern for pattern in exclude or () if pattern not in NON_ARTIFACT_PATTERNS)


_PIECE_BYTES = 8 * 1024 * 1024
_CLOCK_TICK_NS = 50_000_000  # longer than a tick of a file system's clock, which takes at most 10 ms on Linux
_MAX_KEY_BYTES = 900  # S3, Google and Azure accept 1,024; the rest is for the target's prefix
_INVALID_KEY_CHARACTER = re.compile(r"[\x00-\x1f\x7f\ufffe\uffff]")  # XML listings cannot show these
_PARTIAL_DOWNLOAD = re.compile(r"\.[0-9a-f]{32}\.part")

_FileStamp: TypeAlias = tuple[int, int, int]
"""Size, modification time in ns and inode of a file; a later write to the file changes its stamp."""


class ArtifactMirror:
    """A directory and its mirror below a folder of a target. Only one thread at a time may use it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._mirrored: dict[str, _FileStamp | None] = {}
        """Maps a path to the local file's stamp when it was sent or received; to None if the remote copy may differ."""

    def upload(self, store: ObjectStore, folder: str, excludes: Sequence[str]) -> Mapping[str, str]:
        """Send new and changed files, delete the objects of deleted files, and return why each path is left out.

        An upload deletes only objects that this mirror sent or received. The result contains links out of the directory
        or to folders, entries that cannot be read or are neither file nor folder, names that some targets reject, and
        matches of `NON_ARTIFACT_PATTERNS`. It contains no excluded files, no empty folders, and no files that vanish
        before they are read. On the target, the paths in the result and all paths below them stay unchanged.

        Raises:
            InvalidInput: the directory does not exist.
            StoreUnavailable, StoreRefused: not all files were sent; the next call sends the rest.
        """
        if not self._directory.is_dir():
            raise InvalidInput(f"{self._directory}: expected a directory to sync, found none")
        left_out: dict[str, str] = {}
        settled_ns = time.time_ns() - _CLOCK_TICK_NS
        local = dict(_scan_files(self._directory, folder, excludes, left_out))
        mirrored = self._mirrored
        if deleted := sorted(path for path in mirrored.keys() - local.keys() if not _is_path_left_out(path, left_out)):
            store.delete([_make_object_key(folder, path) for path in deleted])  # first, as a file may replace a folder
            for path in deleted:
                del mirrored[path]

        def upload_file(path: str) -> None:
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
                    store.replace(_make_object_key(folder, path), _FilePieces(file.fileno()))
            except InvalidInput as unsendable:  # a disk error, or a name that the store reserves
                left_out[path] = str(unsendable)
                del mirrored[path]
                return
            if local[path][1] < settled_ns:  # if it is newer, a write in the same clock tick might not change the stamp
                mirrored[path] = local[path]

        for _ in store.map(upload_file, [path for path, stamp in local.items() if mirrored.get(path) != stamp]):
            pass
        return left_out

    def download(self, store: ObjectStore, folder: str, excludes: Sequence[str]) -> None:
        """Download the files below `folder`; replace local files of the same names, and keep all others.

        Raises:
            CheckpointNotFound: the target has no files below `folder`. The error is also a `FileNotFoundError`.
            CheckpointCorrupt: a key would lead out of the directory. Nothing is downloaded.
            InvalidInput: a local link or file has a remote folder's name, or a local folder has a remote file's name.
        """
        self._mirrored.clear()
        files = [file for file in list_plain_tree(store, folder).files if not matches_any_pattern(file.path, excludes)]

        def download_file(file: ListedObject) -> None:
            local = self._prepare_local_path(file.path)
            partial_file = local.with_name(f".{uuid.uuid4().hex}.part")
            try:
                with partial_file.open("xb") as writing:
                    writing.writelines(_read_pieces(store, _make_object_key(folder, file.path), file.size_bytes))
                partial_file.replace(local)
            except BaseException:
                partial_file.unlink(missing_ok=True)
                raise
            self._mirrored[file.path] = _make_file_stamp(local.stat())

        for _ in store.map(download_file, files):
            pass

    def _prepare_local_path(self, path: str) -> Path:
        """Make the folder of `path`, and return the local path; reject links that lead out of the directory."""
        local = self._directory / path
        if not local.parent.resolve().is_relative_to(self._directory.resolve()):
            raise InvalidInput(f"{local}: a local link leads out of {self._directory}: remove it")
        try:
            local.parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise InvalidInput(f"{local}: expected a local folder, found a file: remove it") from error
        if local.is_dir():
            raise InvalidInput(f"{local}: expected a local file, found a folder: remove it")
        return local


def _is_path_left_out(path: str, left_out: Mapping[str, str]) -> bool:
    """Return whether a file, one of its folders or the directory is left out, and so the file may still exist."""
    names = path.split("/")
    return any("/".join(names[:depth]) in left_out for depth in range(len(names) + 1))


def _make_object_key(folder: str, path: str) -> str:
    return f"{folder}/{path}" if folder else path  # `folder` is empty for the root of a target


def _make_file_stamp(status: os.stat_result) -> _FileStamp:
    return (status.st_size, status.st_mtime_ns, status.st_ino)


class _FilePieces:
    """The bytes of an open file, up to its size at the time of opening; a store may iterate over them repeatedly."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._size_bytes = os.fstat(file).st_size

    def __iter__(self) -> Iterator[bytes]:
        for offset in range(0, self._size_bytes, _PIECE_BYTES):
            try:
                piece = os.pread(self._file, min(_PIECE_BYTES, self._size_bytes - offset), offset)
            except OSError as error:  # an error of this disk, not of the target
                raise InvalidInput(f"it cannot be read: {error.strerror}") from error
            yield piece


def _read_pieces(store: ObjectStore, key: str, size_bytes: int) -> Iterator[Buffer]:
    for offset in range(0, size_bytes, _PIECE_BYTES):
        length = min(_PIECE_BYTES, size_bytes - offset)
        data = store.read(key, offset=offset, length=length)
        if len(data) != length:
            raise StoreUnavailable(f"{key} at {offset}: expected {length} bytes, found {len(data)}; try again")
        yield data


def _scan_files(
    directory: Path, folder: str, excludes: Sequence[str], left_out: dict[str, str]
) -> Iterator[tuple[str, _FileStamp]]:
    """Yield the files to send; add each path that is left out, and the reason, to `left_out`."""
    pending = [""]
    while pending:
        folder_path = pending.pop()
        try:
            entries = list(os.scandir(directory / folder_path))
        except FileNotFoundError:
            continue  # deleted since its parent was read
        except OSError as error:
            left_out[folder_path] = f"it cannot be read: {error.strerror}"
            continue
        for entry in entries:
            path = f"{folder_path}/{entry.name}" if folder_path else entry.name
            if matches_any_pattern(path, excludes) or _PARTIAL_DOWNLOAD.fullmatch(entry.name):
                continue
            try:
                if (reason := _unsendable_reason(directory, path, folder, entry)) is not None:
                    left_out[path] = reason
                elif entry.is_dir(follow_symlinks=False):
                    pending.append(path)
                else:
                    yield path, _make_file_stamp(entry.stat())
            except FileNotFoundError:
                continue  # deleted since the folder was read
            except OSError as error:
                left_out[path] = f"it cannot be read: {error.strerror}"


def _unsendable_reason(directory: Path, path: str, folder: str, entry: os.DirEntry[str]) -> str | None:
    if not is_utf8_encodable(path):
        return "its name is not UTF-8"
    if "\\" in path:
        return "its name has a backslash"
    if _INVALID_KEY_CHARACTER.search(path):
        return "its name has control characters"
    if len(_make_object_key(folder, path).encode()) > _MAX_KEY_BYTES:
        return f"its path on the target is longer than {_MAX_KEY_BYTES} bytes"
    if matches_any_pattern(path, NON_ARTIFACT_PATTERNS):
        return "files of this name are never artifacts"
    if entry.is_symlink() and not (
        entry.is_file() and (directory / path).resolve().is_relative_to(directory.resolve())
    ):
        return "a link to a folder, to nothing, or out of the trial's directory"
    if not entry.is_file() and not entry.is_dir():
        return "neither a file nor a folder"
    return None
