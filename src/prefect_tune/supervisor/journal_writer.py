"""The journal writer: writes each entry of a journal that this process owns, then passes it to a listener."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from prefect_tune.blocks import StorageTarget
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.journal_events.experiment_events import Event
from prefect_tune.core.models import Stamp

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
