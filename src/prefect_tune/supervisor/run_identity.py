"""Read the clock, draw a random write id, and identify this process."""

from __future__ import annotations

import os
import socket
from datetime import UTC, datetime
from uuid import uuid4

from prefect.runtime import flow_run, task_run

from prefect_tune.core.events.experiment_events import Owner
from prefect_tune.core.models import Stamp

__all__ = ["current_owner", "new_write_id"]


def new_write_id() -> Stamp:
    """Return a random write id with the current UTC time; the time is only shown to people and decides nothing."""
    return Stamp(write_id=uuid4().hex, at=datetime.now(UTC).isoformat(timespec="milliseconds"))


def current_owner(*, search_epoch: int = 0, attempt: int = 0) -> Owner:
    """Return the identity of this process and its request, for the messages of owners that it supersedes."""
    return Owner(
        name=flow_run.name or "a script",
        host=socket.gethostname(),
        pid=os.getpid(),
        flow_run=flow_run.id,
        task_run=task_run.id,
        search_epoch=search_epoch,
        attempt=attempt,
    )
