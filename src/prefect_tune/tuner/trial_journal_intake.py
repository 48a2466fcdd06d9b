"""Merge the entries of the trials' own journals into the experiment's journal."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from prefect_tune.core.errors import Superseded
from prefect_tune.core.experiment.trial_transitions import Phase
from prefect_tune.core.journal.journal import entries_beyond, next_entry
from prefect_tune.core.journal_events.experiment_events import Absorbed, Event, Opened
from prefect_tune.core.journal_events.journal_entry import Entry
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.stores.local.staging import transfer_pool
from prefect_tune.supervisor.journal_writer import JournalWriter
from prefect_tune.supervisor.run_identity import current_owner, new_write_id
from prefect_tune.supervisor.search_link import EntryWritten
from prefect_tune.tasks.experiment_state import Opening, open_journal
from prefect_tune.tasks.on_target import on_target
from prefect_tune.tuner.pending_entry import PendingEntry
from prefect_tune.tuner.policy import SearchPolicy

_TIMEOUT = timedelta(minutes=5)


class TrialJournalMerger:
    """Merges each entry of each trial's journal, once, in order; a single training has the experiment's only.

    Methods that read or write a journal raise `StoreUnavailable` if the target fails for longer than the retries last.
    """

    def __init__(self, pending_entry: PendingEntry, policy: SearchPolicy, journal_writer: JournalWriter) -> None:
        self._pending_entry = pending_entry
        self._policy = policy
        self._journal_writer = journal_writer

    def absorb(self, wrote: EntryWritten) -> None:
        """Merge an entry that a trial has announced, after any missing entries before it."""
        if wrote.journal is not None and wrote.journal.key == self._pending_entry.state.key:
            self._pending_entry.follow(wrote.events, wrote.journal)
            return
        due = self._pending_entry.state.trial(wrote.trial).absorbed + 1
        if wrote.number > due:
            self.catch_up(wrote.trial)
        elif wrote.number == due:
            self._take_in(wrote.trial, wrote.number, wrote.events, wrote.at)

    def catch_up(self, trial: str) -> None:
        """Merge entries that were not announced here: of an earlier owner, or of a trial that outlived one."""
        if not self._pending_entry.state.trial(trial).apart:
            return  # the experiment's journal holds them
        absorbed = self._pending_entry.state.trial(trial).absorbed

        def read(store: ObjectStore) -> Sequence[Entry]:
            with transfer_pool() as transfers:
                return entries_beyond(store, self._journal(trial), absorbed, side_by_side=transfers)

        for entry in on_target(self._journal_writer.target, read, _TIMEOUT):
            self._take_in(trial, entry.number, entry.events, entry.at)

    def settle(self, trial: str) -> None:
        """End an attempt that died without writing its end, in the trial's journal, and merge what it had saved.

        Raises:
            Superseded: a newer owner of the experiment has opened the trial.
        """
        state = self._pending_entry.state
        if state.trial(trial).phase is Phase.RUNNING:
            owner = current_owner(search_epoch=state.epoch, attempt=state.trial(trial).attempt)
            open_journal(self._journal_writer.target, self._journal(trial), Opening(owner, new_write_id()))
            self.catch_up(trial)

    def require_ours(self) -> None:
        """Check that no other owner has taken the experiment over. One request: call it only on suspicion.

        Raises:
            Superseded: another owner has.
        """
        written, entry = self._journal_writer.experiment, self._beyond(self._journal_writer.experiment.number)
        while entry is not None:
            if entry.epoch != written.epoch:
                owner = next((f", {each.owner}," for each in entry.events if isinstance(each, Opened)), "")
                raise Superseded(
                    f"{written.key}: this process is owner {written.epoch}, and owner {entry.epoch}{owner} took over "
                    f"in entry {entry.number}"
                )
            entry = self._beyond(entry.number)  # an external writer's entry

    def _beyond(self, number: int) -> Entry | None:
        key = self._journal_writer.experiment.key
        return on_target(self._journal_writer.target, lambda store: next_entry(store, key, number), _TIMEOUT)

    def _journal(self, trial: str) -> JournalKey:
        return JournalKey(experiment=self._pending_entry.state.name, trial=trial)

    def _take_in(self, trial: str, number: int, events: Sequence[Event], at: str | None) -> None:
        own = tuple(event for event in events if not isinstance(event, Absorbed))
        self._pending_entry.put(Absorbed(trial=trial, number=number, events=own, at=at))
        self._policy.has_trained(self._pending_entry.state.trial(trial))
