"""A journal in the hands of the one who owns it: every entry is written through here, and told to whoever listens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from prefect_tune.blocks import StorageTarget
from prefect_tune.core.events import Event
from prefect_tune.core.experiment import Experiment
from prefect_tune.core.values import Stamp

__all__ = ["Book", "Listener", "Writer"]

Writer: TypeAlias = Callable[[StorageTarget, Experiment, Sequence[Event], Stamp | None], Experiment]
Listener: TypeAlias = Callable[[Sequence[Event], Experiment], None]


class Book:
    """The experiment after the last entry that was written, and the next one. Not for two threads at once."""

    def __init__(self, target: StorageTarget, experiment: Experiment, writer: Writer, listener: Listener) -> None:
        self.target = target
        self.experiment = experiment
        self._writer = writer
        self._listener = listener

    def write(self, events: Sequence[Event], stamp: Stamp | None = None) -> Experiment:
        """Write the next entry; when it returns, it is durable, and the journal is still ours.

        Raises:
            Superseded: the journal is somebody else's now.
            StoreUnavailable, CommitUnknown: the retries are spent; written again with the same stamp, it is
                recognized.
        """
        self.experiment = self._writer(self.target, self.experiment, events, stamp)
        self._listener(events, self.experiment)
        return self.experiment
