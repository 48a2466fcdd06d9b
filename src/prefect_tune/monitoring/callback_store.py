"""Store one callback's delivery position and state, and read the journal entries that it has not received."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

from prefect_tune.blocks import StorageTarget
from prefect_tune.callbacks import SearchInfo
from prefect_tune.core.errors import CommitUnknown, TuneError
from prefect_tune.core.experiment.experiment import Entry
from prefect_tune.core.journal.journal import entries_beyond
from prefect_tune.core.notifications.callback_state import CallbackState, keep_state, newest_state
from prefect_tune.core.notifications.delivery_cursor import DeliveryPosition
from prefect_tune.retry_policy import with_retries
from prefect_tune.stores.local.staging import transfer_pool
from prefect_tune.supervisor.run_identity import new_write_id

__all__ = ["CallbackStore"]

_TIMEOUT = timedelta(minutes=5)


class CallbackStore:
    """Stores and loads one callback's state on the target, and reads the experiment's journal for it."""

    def __init__(self, target: StorageTarget, search: SearchInfo, name: str) -> None:
        self.name = name
        self.search = search
        self._target = target
        self._number = 0

    def newest(self) -> CallbackState | None:
        """Return the newest state that an earlier run stored; None if there is none."""

        def read() -> CallbackState | None:
            with self._target.open(timeout=_TIMEOUT) as store:
                return newest_state(store, self.search.experiment, self.name)

        found = with_retries(read)
        self._number = found.number if found else 0
        return found

    def keep(self, heard: DeliveryPosition, state: Mapping[str, object] | None) -> None:
        """Store the delivery position and the state. Raises what `keep_state` raises."""
        self._number += 1
        kept = CallbackState(number=self._number, write_id=new_write_id().write_id, heard=heard, state=state)
        try:
            with self._target.open(timeout=_TIMEOUT) as store:
                keep_state(store, self.search.experiment, self.name, kept)
        except CommitUnknown:
            raise  # the number may be taken: the next call uses the next one
        except TuneError:
            self._number -= 1
            raise

    def entries(self, beyond: int) -> Sequence[Entry]:
        """Return the entries of the experiment's journal after number `beyond`."""

        def read() -> Sequence[Entry]:
            with self._target.open(timeout=_TIMEOUT) as store, transfer_pool() as transfers:
                return entries_beyond(store, self.search.experiment, beyond, side_by_side=transfers)

        return with_retries(read)
