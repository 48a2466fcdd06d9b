"""The clock of the process, and the write stamps of journal entries and documents."""

import time
from datetime import UTC, datetime, timedelta
from uuid import uuid4

from prefect_tune.core.values import WriteStamp


def new_write_stamp() -> WriteStamp:
    """Return a random write id with the current time."""
    return WriteStamp(write_id=uuid4().hex, at=utc_now())


def utc_now() -> str:
    """Return the current UTC time as text, for display only. No decision depends on this time."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


_run_start: tuple[datetime, float] | None = None
"""The time of day and the monotonic time at which the last run of this process began."""


def begin_run_clock() -> None:
    """Start the clock of `run_clock_now` at the present time of day."""
    global _run_start  # noqa: PLW0603 - the clock of the process
    _run_start = datetime.now(UTC), time.monotonic()


def run_clock_now() -> str:
    """Return the time of day at which this process's run began, plus the monotonic time since then.

    Use this clock for durations that enter the cost, because neither a change of the system clock nor a suspension of
    the machine affects them. In a process without a run, return `utc_now()`.
    """
    if _run_start is None:
        return utc_now()
    started_at, started_seconds = _run_start
    return (started_at + timedelta(seconds=time.monotonic() - started_seconds)).isoformat(timespec="milliseconds")
