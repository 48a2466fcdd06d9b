"""The journal's next entry: events apply to the state at once, actions run after the entry is written."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from prefect_tune.core.experiment.experiment import Experiment, after_event
from prefect_tune.core.experiment.trial_transitions import repeats
from prefect_tune.core.journal_events import Absorbed, Event
from prefect_tune.journal_access import JournalWriter
from prefect_tune.monitoring.search_observer import SearchObserver
from prefect_tune.tuner.search_policy import SearchPolicy

_STATUS_DELAY = timedelta(seconds=2)
"""How long a changed status of a trial waits at most: long enough for the starts of all slots to share an entry."""


class PendingEntry:
    """The state of the experiment with its unwritten events, and the actions that wait for their write."""

    def __init__(
        self, journal_writer: JournalWriter, policy: SearchPolicy, listener: SearchObserver, sync_period: timedelta
    ) -> None:
        self._journal_writer = journal_writer
        self._policy = policy
        self._listener = listener
        self._sync_period = sync_period
        self.state = journal_writer.experiment
        self._unwritten: list[Event] = []
        self._then: list[Callable[[], None]] = []
        self._is_asked_after = False
        self._synced_at = time.monotonic()
        self._status_changed_at: float | None = None  # the first change that is not written yet

    @property
    def is_awaited(self) -> bool:
        """Whether an action waits for the next write."""
        return bool(self._then)

    def put(self, event: Event) -> None:
        """Add `event` to the next entry; pass it to the listener, the search and the scheduler now."""
        earlier, before = self.state, self.state.past_count
        self.state = after_event(self.state, event, self._journal_writer.experiment.number + 1)
        # The sender of a stop request looks in the journal for the answer, and then for the end.
        self._is_asked_after |= self.state.stop_requests != earlier.stop_requests or self.state.stops != earlier.stops
        if self._status_changed_at is None and _changes_status(event, earlier, self.state):
            self._status_changed_at = time.monotonic()
        self._unwritten.append(event)
        self._listener.applied(_news_in(event, earlier), self.state)
        if self.state.past_count > before:
            trial = self.state.trial(str(getattr(event, "trial", "")))
            for past_event in trial.past[before - self.state.past_count :]:
                self._policy.record(trial, past_event)

    def lost(self, trial: str, why: str) -> None:
        """Pass on to the listener that an attempt of `trial` ended without journaling its end."""
        self._listener.lost(self.state.trial(trial), why)

    def follow(self, events: Sequence[Event], experiment: Experiment) -> None:
        """Take over an entry that the attempt of a single training has written to this journal.

        While such an attempt runs, nothing else is put: an entry has one writer.

        Args:
            events: the events of the entry.
            experiment: the state after it, which may hold entries of guests before it, too.
        """
        for event in events[:-1]:
            self.state = after_event(self.state, event, experiment.number)
            self._listener.applied(event, self.state)
        self.state = self._journal_writer.follow(events, experiment)
        for event in events[-1:]:
            self._listener.applied(event, self.state)
        self._listener.wrote(self.state)

    def then(self, act: Callable[[], None]) -> None:
        """Call `act` once every event so far is written."""
        self._then.append(act)

    def write(self, *, may_wait: bool) -> Experiment:
        """Write the pending events as one entry, then run the waiting actions; return the experiment as written.

        Args:
            may_wait: whether events that no action and no stop request waits for may stay unwritten until
                `sync_period` has passed since the last write, or 2 s since a trial's status changed.
        """
        is_awaited = self._then or self._is_asked_after
        if self._unwritten and (is_awaited or not may_wait or self._is_due()):
            self._journal_writer.write(self._unwritten)
            self.state, self._unwritten = self._journal_writer.experiment, []
            self._is_asked_after = False
            self._status_changed_at = None
            self._listener.wrote(self.state)
            self._synced_at = time.monotonic()
        acts, self._then = self._then, []
        for act in acts:
            act()
        return self._journal_writer.experiment

    def _is_due(self) -> bool:
        now, changed_at = time.monotonic(), self._status_changed_at
        if changed_at is not None and now - changed_at >= _STATUS_DELAY.total_seconds():
            return True
        return now - self._synced_at >= self._sync_period.total_seconds()


def _news_in(event: Event, before: Experiment) -> Event:
    """Return the event for observers: of an absorbed entry without what the experiment's journal says already."""
    if not isinstance(event, Absorbed):
        return event
    trial = before.trials.get(event.trial)
    return event.model_copy(update={"events": tuple(each for each in event.events if not repeats(each, trial))})


def _changes_status(event: Event, before: Experiment, after: Experiment) -> bool:
    """Return whether a trial starts, ends or changes its status otherwise: readers of the journal wait for that."""
    name = str(getattr(event, "trial", ""))
    earlier, now = before.trials.get(name), after.trials.get(name)
    return now is not None and (earlier is None or earlier.status is not now.status)
