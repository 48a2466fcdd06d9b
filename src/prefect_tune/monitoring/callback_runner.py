"""Run the callbacks of a search, each in its own thread, so that a slow callback delays no decision.

A callback receives each event at least once, in order. The target stores each callback's state, and the number of the
last journal entry that this callback received in full. After a crash, the next run delivers the later entries.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal, TypeAlias

from prefect.logging import get_logger

from prefect_tune.attempt.processes.process_output import Log
from prefect_tune.blocks import StorageTarget
from prefect_tune.callbacks import Callback, SearchInfo
from prefect_tune.core.display_text import did_you_mean_or_list
from prefect_tune.core.errors import InvalidInput, JournalCorrupt, TuneError
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.journal.journal import read_entries
from prefect_tune.core.journal_events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointCommitted,
    Entry,
    Event,
    StepReported,
    TrialErrored,
    TrialFinished,
)
from prefect_tune.core.storage.documents import Document, read_sealed, seal
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.core.values import validate_name
from prefect_tune.monitoring.search_observer import SearchObserver
from prefect_tune.runtime.load_named import load_object
from prefect_tune.storage_retries import with_retries

CallbackEvent: TypeAlias = (
    AttemptStarted | StepReported | CheckpointCommitted | AttemptEnded | TrialFinished | TrialErrored
)
"""The events that have hooks."""
_TIMEOUT = timedelta(minutes=5)
_STORE_INTERVAL = timedelta(seconds=10)
_MAX_QUEUED_ITEMS = 20_000
_MAX_TRACEBACKS = 3
_LOGGED_ERROR_COUNTS = frozenset(10**exponent for exponent in range(1, 12))


def resolve_callbacks(specs: Sequence[Any] | None) -> Sequence[Callback]:
    """Return a callback for each object, class, function or `"package.module:Name"`; raise InvalidInput otherwise."""
    callbacks = []
    for spec in specs or ():
        loaded = load_object(spec, "callback") if isinstance(spec, str) and ":" in spec else spec
        callback = loaded() if callable(loaded) and not isinstance(loaded, Callback) else loaded
        if not isinstance(callback, Callback):
            raise InvalidInput(
                f"callback {spec!r}: expected a pt.Callback, a class or function that returns one when called without "
                "arguments, or 'package.module:Name' of one of these"
            )
        validate_name(callback.name)
        kind, hooks = type(callback), [name for name in vars(Callback) if name.startswith("on_")]
        for name in dir(kind):  # warn of a misspelt hook, which would never be called
            if name.startswith("on_") and name not in hooks and callable(getattr(kind, name)):
                hint = did_you_mean_or_list(name, hooks)
                get_logger("prefect_tune").warning("callback %s: %s is not a hook: %s", kind.__name__, name, hint)
        callbacks.append(callback)
    return callbacks


class CallbackState(Document):
    """The stored state of one callback of an experiment."""

    format: Literal["prefect-tune/callback"] = "prefect-tune/callback"
    version: Literal[1] = 1
    entry: int
    """The number of the last journal entry that was delivered in full."""
    state: Mapping[str, object] | None = None
    """The return value of the callback's `get_state`."""


@dataclass(frozen=True, slots=True)
class _QueueItem:
    experiment: Experiment
    """The state of the experiment after `event` or, without an event, after the last journaled entry."""
    event: Event | None = None
    """The event to deliver; None if the item only marks that the journal has all earlier events."""
    is_gap: bool = False
    """Whether earlier items were dropped because the queue was full; their events are in the journal."""
    is_last: bool = False


class CallbackThread(SearchObserver):
    """Calls the hooks of one callback in a separate thread. The methods of `SearchObserver` only queue an item.

    If events are missing from the queue, the thread reads these events from the journal.
    """

    _journal: JournalKey

    def __init__(self, callback: Callback, name: str, target: StorageTarget, search: SearchInfo, log: Log) -> None:
        self._callback = callback
        self._name = name
        self._target = target
        self._search = search
        self._log = log
        self._items: queue.Queue[_QueueItem] = queue.Queue(_MAX_QUEUED_ITEMS)
        self._delivered_entry = 0
        self._is_behind = True  # the thread must first read the events of earlier runs
        self._has_unsaved_state = False
        self._error_count = 0
        self._thread = threading.Thread(target=copy_context().run, args=(self._run_thread,), name=name, daemon=True)

    def start(self, experiment: Experiment) -> None:
        """Start the thread, which first delivers the journal entries up to this state."""
        self._journal = experiment.key
        self._queue_item(_QueueItem(experiment))
        self._thread.start()

    def on_event(self, event: Event, experiment: Experiment) -> None:
        self._queue_item(_QueueItem(experiment, event))

    def on_entry_written(self, experiment: Experiment) -> None:
        self._queue_item(_QueueItem(experiment))

    def queue_end(self, experiment: Experiment) -> None:
        """Ask the thread to deliver the remaining events, to call `on_experiment_end`, and to exit."""
        self._queue_item(_QueueItem(experiment, is_last=True))

    def join(self, deadline: float) -> None:
        """Wait for the thread to end; log a warning if it has not ended by `deadline`, a time of `time.monotonic`."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._log.warning("callback %s did not finish in time; the next run delivers the rest", self._name)

    def _queue_item(self, item: _QueueItem) -> None:
        """Queue an item without waiting; if the queue is full, first replace all its items with one `is_gap` item."""
        if self._items.full():
            with suppress(queue.Empty):
                while True:
                    self._items.get_nowait()
            self._items.put_nowait(_QueueItem(item.experiment, is_gap=True))
        self._items.put_nowait(item)

    # ----------------------------------------------------------------------------------- run in the thread

    def _run_thread(self) -> None:
        if not self._set_up_callback():
            return
        stored_at, has_ended = time.monotonic(), False
        while not has_ended:
            with suppress(queue.Empty):
                item = self._items.get(timeout=_STORE_INTERVAL.total_seconds())
                self._handle_item(item)
                has_ended = item.is_last
            if has_ended:
                self._call_hook(partial(self._callback.on_experiment_end, item.experiment.trials))
            if has_ended or time.monotonic() - stored_at >= _STORE_INTERVAL.total_seconds():
                stored_at = time.monotonic()
                if self._has_unsaved_state:
                    self._call_hook(self._store_state)  # after an error, try again after the next interval

    def _set_up_callback(self) -> bool:
        """Set up the callback, and restore its state from an earlier run; return False if the callback fails."""
        try:
            self._callback.setup(self._search)
            if (stored := with_retries(self._read_state)) is not None:
                is_restored = stored.state is None or self._callback.set_state(stored.state) is not False
                self._delivered_entry = stored.entry if is_restored else 0
        except BaseException:  # noqa: BLE001  a callback's error must not end the search
            self._log.exception("callback %s: setup failed; its hooks are not called in this run", self._name)
            return False
        return True

    @property
    def _state_path(self) -> str:
        return f"{self._journal.folder}/callbacks/{validate_name(self._name)}.json"

    def _read_state(self) -> CallbackState | None:
        with self._target.open(timeout=_TIMEOUT) as store:
            return read_sealed(store, CallbackState, self._state_path, JournalCorrupt)

    def _handle_item(self, item: _QueueItem) -> None:
        if item.is_gap:
            self._is_behind = True
        elif item.event is not None:
            if not self._is_behind:  # if the thread is behind, it reads the event from the journal later
                self._deliver_event(item.event, item.experiment)
        elif self._is_behind:
            self._deliver_missed_entries(item.experiment)
        else:
            self._delivered_entry = item.experiment.entry_count

    def _deliver_missed_entries(self, experiment: Experiment) -> None:
        """Deliver the journal entries that the callback has not received; retry later if the journal cannot be read."""

        def read_missed_entries() -> Sequence[Entry]:
            with self._target.open(timeout=_TIMEOUT) as store:
                return read_entries(store, self._journal, self._delivered_entry)

        try:
            entries = with_retries(read_missed_entries)
        except TuneError as error:
            self._log.warning("callback %s: missed events will be delivered later: %s", self._name, error)
            return
        for entry in entries:
            if entry.number <= experiment.entry_count:
                for event in entry.events:
                    self._deliver_event(event, experiment)
                self._delivered_entry = entry.number
        self._is_behind = False

    def _deliver_event(self, event: Event, experiment: Experiment) -> None:
        if isinstance(event, CallbackEvent):
            self._has_unsaved_state = True
            for hook in iter_hook_calls(self._callback, event, experiment.trial(event.trial)):
                self._call_hook(hook)

    def _call_hook(self, hook: Callable[[], object]) -> None:
        """Call the callback's code; log the first three failures with a traceback, then the 10th, 100th, and so on."""
        try:
            hook()
        except BaseException as error:  # noqa: BLE001  a callback's error must not end the search
            self._error_count += 1
            if self._error_count <= _MAX_TRACEBACKS:
                self._log.error("callback %s failed", self._name, exc_info=error)
            elif self._error_count in _LOGGED_ERROR_COUNTS:
                self._log.error("callback %s has failed %d times: %r", self._name, self._error_count, error)

    def _store_state(self) -> None:
        state = CallbackState(entry=self._delivered_entry, state=self._callback.get_state())
        with self._target.open(timeout=_TIMEOUT) as store:
            store.replace(self._state_path, (seal(state),))
        self._has_unsaved_state = False


def iter_hook_calls(callback: Callback, event: CallbackEvent, trial: Trial) -> Iterator[Callable[[], object]]:
    """Yield the hook calls of a trial's event, in order."""
    match event:
        case AttemptStarted():
            if event.from_sequence is not None:
                yield lambda: callback.on_trial_restore(trial, event)
            yield lambda: callback.on_trial_start(trial, event)
        case StepReported(report=report):
            yield lambda: callback.on_trial_result(trial, report)
        case CheckpointCommitted(checkpoint=checkpoint):
            yield lambda: callback.on_trial_save(trial, checkpoint)
            yield lambda: callback.on_checkpoint(trial, checkpoint)
        case AttemptEnded():
            yield lambda: callback.on_trial_recover(trial, event)
        case TrialFinished():
            yield lambda: callback.on_trial_complete(trial, event)
        case TrialErrored():
            yield lambda: callback.on_trial_error(trial, event)


class CallbackRunner:
    """Runs the callbacks of a search. Further callbacks of the same name get the names `name-2`, `name-3`."""

    def __init__(self, callbacks: Sequence[Callback], target: StorageTarget, search: SearchInfo, log: Log) -> None:
        self.threads: list[CallbackThread] = []
        """One thread per callback; each is an observer of the search."""
        counts: Counter[str] = Counter()
        for callback in callbacks:
            counts[callback.name] += 1
            name = callback.name if (number := counts[callback.name]) == 1 else f"{callback.name}-{number}"
            self.threads.append(CallbackThread(callback, name, target, search, log))

    def start(self, experiment: Experiment) -> None:
        """Start the threads; each first delivers the journal entries up to this state."""
        for thread in self.threads:
            thread.start(experiment)

    def finish(self, experiment: Experiment, timeout: timedelta) -> None:
        """Deliver the remaining events, which are all journaled; wait up to `timeout` for all threads together."""
        deadline = time.monotonic() + timeout.total_seconds()
        for thread in self.threads:
            thread.queue_end(experiment)
        for thread in self.threads:
            thread.join(deadline)
