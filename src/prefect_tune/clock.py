"""The clock of the process, and write ids and times for journal entries and documents."""

import time
from datetime import UTC, datetime, timedelta
from uuid import uuid4

from prefect_tune.core.values import WriteStamp


def new_write_stamp() -> WriteStamp:
    """Return a random write id with the current time."""
    return WriteStamp(write_id=uuid4().hex, at=utc_now())


def utc_now() -> str:
    """Return the current UTC time, for display only: it decides nothing."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


_run_start: tuple[datetime, float] | None = None  # time of day and monotonic clock when this process's last run began


def begin_run_clock() -> None:
    """Start the clock of `run_clock_now` at the present time of day."""
    global _run_start  # noqa: PLW0603 - the clock of the process
    _run_start = datetime.now(UTC), time.monotonic()


def run_clock_now() -> str:
    """Return the time of day when this process's run began, plus the monotonic time since then.

    Setting the clock, or a sleeping machine, does not change it. It is for durations in the cost; `utc_now` is for
    display, and the result of this function in a process without a run.
    """
    if _run_start is None:
        return utc_now()
    started_at, started_seconds = _run_start
    return (started_at + timedelta(seconds=time.monotonic() - started_seconds)).isoformat(timespec="milliseconds")
