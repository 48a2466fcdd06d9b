"""The journal writer: writes each entry of a journal that this process owns, then passes it to a listener."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TypeAlias
from uuid import uuid4

from prefect.runtime import flow_run, task_run

from prefect_tune.blocks import StorageTarget
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.journal_events.experiment_events import Event, Owner
from prefect_tune.core.models import Stamp

# Read the clock, draw a random write id, and identify this process.

_PROCESS = uuid4().hex[:8]
"""Tells the processes of scripts apart, which have no flow run."""


def new_write_id() -> Stamp:
    """Return a random write id with the current UTC time; the time is only shown to people and decides nothing."""
    return Stamp(write_id=uuid4().hex, at=datetime.now(UTC).isoformat(timespec="milliseconds"))


def current_owner(*, search_term: int = 0, attempt: int = 0) -> Owner:
    """Return the identity of this process and its request, for the messages of owners that it supersedes."""
    return Owner(
        name=flow_run.name or "a script",
        host=socket.gethostname(),
        pid=os.getpid(),
        flow_run=flow_run.id,
        task_run=task_run.id,
        search_term=search_term,
        attempt=attempt,
    )


def is_gone(owner: Owner) -> bool:
    """Whether an owner was a process of this machine that has ended; False if its number is in use again."""
    if owner.host != socket.gethostname():
        return False
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def this_writer() -> Owner:
    """Return the identity of the flow run that calls a public task, for all its tasks, in whatever process they run.

    `attempt` is the run count, which a retry raises: the retried run supersedes the one before. Without a flow run
    the writer is this process.
    """
    owner = current_owner(attempt=flow_run.run_count or 0)
    name = owner.name if owner.flow_run else f"script {_PROCESS}"
    return owner.model_copy(update={"name": name, "task_run": None})


def is_same_writer(one: Owner | None, other: Owner) -> bool:
    """Return whether two owners from `this_writer` are the same run of a flow, or the same process without one."""
    if one is None or (one.flow_run, one.attempt) != (other.flow_run, other.attempt):
        return False
    return one.flow_run is not None or one.name == other.name


Writer: TypeAlias = Callable[[StorageTarget, Experiment, Sequence[Event], Stamp | None], Experiment]
EntryListener: TypeAlias = Callable[[Sequence[Event], Experiment], None]


class JournalWriter:
    """Writes journal entries and holds the state after the last one. Not thread-safe."""

    def __init__(self, target: StorageTarget, experiment: Experiment, writer: Writer, listener: EntryListener) -> None:
        self.target = target
        self.experiment = experiment
        self._writer = writer
        self._listener = listener

    def write(self, events: Sequence[Event], stamp: Stamp | None = None) -> Experiment:
        """Write the next entry and return the state after it: durable, with this process still the owner.

        Raises:
            Superseded: another process owns the journal now.
            StoreUnavailable, CommitUnknown: all retries failed; writing the same entry again with the same stamp
                is safe.
        """
        return self.follow(events, self._writer(self.target, self.experiment, events, stamp))

    def follow(self, events: Sequence[Event], experiment: Experiment) -> Experiment:
        """Take over `experiment`, the state after an entry of this owner, which another writer may have written."""
        self.experiment = experiment
        self._listener(events, experiment)
        return experiment
