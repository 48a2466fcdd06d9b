"""The clock of the process, and the write ids and times that it stamps on entries and documents."""

import time
from datetime import UTC, datetime, timedelta
from uuid import uuid4

from prefect_tune.core.values import Stamp


def new_write_id() -> Stamp:
    """Return a random write id with the current time."""
    return Stamp(write_id=uuid4().hex, at=utc_now())


def utc_now() -> str:
    """Return the current UTC time: it is shown to people, and decides nothing."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


_run_began: tuple[datetime, float] | None = None  # time of day, monotonic: the last run that this process began


def begin_run_clock() -> None:
    """Let `run_now` count from the present time of day."""
    global _run_began  # noqa: PLW0603 - the clock of the process
    _run_began = datetime.now(UTC), time.monotonic()


def run_now() -> str:
    """Return the time of day at the begin of this process's run plus the seconds of a monotonic clock since then.

    A clock that is set, or a machine that sleeps, does not change it. It is for durations, in the cost; people are
    shown `utc_now`, which a process without a run uses here too.
    """
    if _run_began is None:
        return utc_now()
    at, seconds = _run_began
    return (at + timedelta(seconds=time.monotonic() - seconds)).isoformat(timespec="milliseconds")
