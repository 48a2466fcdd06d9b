"""`pt.Syncer`: the interface that copies a trial's own files to the target and back; users may subclass it."""

from __future__ import annotations

import math
import random
import time
from abc import ABC, abstractmethod
from datetime import timedelta
from enum import Enum

from prefect_tune.blocks.resolve_target import validate_target
from prefect_tune.core.errors import (
    CheckpointCorrupt,
    CheckpointNotFound,
    DeadlineExceeded,
    InvalidInput,
    StoreRefused,
    Superseded,
    TuneError,
    UnknownVersion,
)
from prefect_tune.storage_retries import may_pass

_LONGEST_PAUSE_SECONDS = 60.0
HOPELESS = (StoreRefused, InvalidInput, CheckpointNotFound, CheckpointCorrupt, UnknownVersion, Superseded)


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
            StoreRefused, InvalidInput, CheckpointNotFound, CheckpointCorrupt, UnknownVersion, Superseded: a retry
                cannot help.
            TuneError: every try failed; its cause is the last error.
        """
        if max_retries < 1 or not backoff_s >= 0:
            raise InvalidInput(f"expected max_retries >= 1 and backoff_s >= 0, found {max_retries} and {backoff_s}")
        last: Exception | None = None
        for attempt in range(max_retries + 1):
            if last is not None:
                self._pause(backoff_s * 2 ** (attempt - 1))
                self.retry()
            try:
                return self.wait()
            except Exception as error:  # noqa: BLE001  a user's syncer may raise anything; the last is raised below
                self.reset()
                last = error
            if isinstance(last, HOPELESS) and not may_pass(last):
                raise last
        raise TuneError(f"sync failed, and {max_retries} retries too: {last}") from last

    def _pause(self, seconds: float) -> None:
        spread = random.uniform(0.5, 1.0)  # noqa: S311  it spreads retries, it keeps no secret
        self._sleep(min(seconds, _LONGEST_PAUSE_SECONDS) * spread)

    def sync_up_if_needed(self, local_dir: str, remote_dir: str, exclude: list[str] | None = None) -> bool | None:
        """Call `sync_up`, unless one began less than `sync_period` ago: then return None.

        A sync that returned False, or is known to have failed, does not count.
        """
        if not self._is_due(Act.UP):
            return None
        now = self._clock()
        is_begun = self.sync_up(local_dir, remote_dir, exclude)
        if is_begun:
            self._note_begun(Act.UP, now)
        return is_begun

    def sync_down_if_needed(self, remote_dir: str, local_dir: str, exclude: list[str] | None = None) -> bool | None:
        """Call `sync_down`, unless one began less than `sync_period` ago: then return None."""
        if not self._is_due(Act.DOWN):
            return None
        now = self._clock()
        is_begun = self.sync_down(remote_dir, local_dir, exclude)
        if is_begun:
            self._note_begun(Act.DOWN, now)
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
