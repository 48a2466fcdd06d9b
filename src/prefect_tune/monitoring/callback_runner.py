"""Run the callbacks of a search, each in its own thread, so that a slow callback delays no decision.

A callback receives events in their order, at least once. With its state, the target has the number of the last entry of
the journal that it has received completely: after a crash the next run delivers what comes after that entry.
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
from typing import Any, Literal, TypeAlias

from prefect.logging import get_logger

from prefect_tune.attempt.processes.process_output import Log
from prefect_tune.blocks import StorageTarget
from prefect_tune.callbacks import Callback, SearchInfo
from prefect_tune.core.errors import InvalidInput, JournalCorrupt, TuneError
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.journal.journal import entries_beyond
from prefect_tune.core.journal_events import (
    AttemptEnded,
    Committed,
    Entry,
    Event,
    Finished,
    GaveUp,
    Reported,
    Started,
)
from prefect_tune.core.shown_text import did_you_mean_or_has
from prefect_tune.core.storage.documents import Document, read_sealed, seal
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.core.values import valid_name
from prefect_tune.monitoring.search_observer import ObserverGroup, SearchObserver
from prefect_tune.runtime.load_named import load_named
from prefect_tune.storage_retries import with_retries
from prefect_tune.stores.local.staging import transfer_pool

Delivered: TypeAlias = Started | Reported | Committed | AttemptEnded | Finished | GaveUp
"""The events for which callbacks have hooks."""
_TIMEOUT = timedelta(minutes=5)
_KEEP_PERIOD = timedelta(seconds=10)
_MOST_WAITING = 20_000
_TRACES = 3
_MILESTONES = frozenset(10**exponent for exponent in range(1, 12))


def callbacks_for(given: Sequence[Any] | None) -> Sequence[Callback]:
    """Return callback objects from objects, classes, or `"package.module:Name"` of either.

    Raises:
        InvalidInput: an element is none of these.
    """
    return [_callback(each) for each in given or ()]


def _callback(given: Any) -> Callback:
    named = load_named(given, "callback") if isinstance(given, str) and ":" in given else given
    made = named() if callable(named) and not isinstance(named, Callback) else named
    if isinstance(made, Callback):
        valid_name(made.name)
        _warn_of_misspelt_hooks(type(made))
        return made
    raise InvalidInput(
        f"callback {given!r}: expected a pt.Callback, a class or function that makes one without arguments, or "
        "'package.module:Name' of one"
    )


def _warn_of_misspelt_hooks(kind: type[Callback]) -> None:
    """Log a warning for each method `on_...` that is not a hook: a misspelt hook is never called."""
    hooks = [name for name in vars(Callback) if name.startswith("on_")]
    for name in dir(kind):
        if name.startswith("on_") and name not in hooks and callable(getattr(kind, name)):
            hint = did_you_mean_or_has(name, hooks)
            get_logger("prefect_tune").warning("callback %s: %s is not a hook: %s", kind.__name__, name, hint)


class CallbackState(Document):
    """The stored state of one callback of an experiment."""

    format: Literal["prefect-tune/callback"] = "prefect-tune/callback"
    version: Literal[1] = 1
    entry: int
    """The last entry of the experiment's journal that was delivered completely."""
    state: Mapping[str, object] | None = None
    """The value that its `get_state` returned."""


@dataclass(frozen=True, slots=True)
class _Item:
    experiment: Experiment
    """Its state after this item."""
    news: Event | None = None
    """None: the journal holds everything before this item."""
    is_gap: bool = False
    """Whether items before this one were dropped, since the queue was full: the journal has them."""
    is_last: bool = False


class CallbackThread(SearchObserver):
    """Calls one callback's hooks in a thread of its own. The listener's methods only queue, and return at once.

    What the callback has not received is read from the journal.
    """

    _journal: JournalKey

    def __init__(self, callback: Callback, name: str, target: StorageTarget, search: SearchInfo, log: Log) -> None:
        self._callback = callback
        self._name = name
        self._target = target
        self._search = search
        self._log = log
        self._items: queue.Queue[_Item] = queue.Queue(_MOST_WAITING)
        self._delivered_entry = 0
        self._is_behind = True  # what happened before this run is in the journal
        self._has_news = False
        self._errors = 0
        self._kept_at = time.monotonic()
        self._thread = threading.Thread(target=copy_context().run, args=(self._run,), name=name, daemon=True)

    def start(self, experiment: Experiment) -> None:
        """Start the thread; it first delivers what the journal holds up to this state."""
        self._journal = experiment.key
        self._put(_Item(experiment))
        self._thread.start()

    def applied(self, event: Event, experiment: Experiment) -> None:
        self._put(_Item(experiment, event))

    def wrote(self, experiment: Experiment) -> None:
        self._put(_Item(experiment))

    def end(self, experiment: Experiment) -> None:
        """Queue the end: the thread delivers what is left, calls `on_experiment_end`, and ends."""
        self._put(_Item(experiment, is_last=True))

    def join(self, until: float) -> None:
        """Wait for the thread until `until`, a time of `time.monotonic`; log a warning if it is still busy then."""
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self._log.warning("callback %s did not finish in time: the next run delivers the rest", self._name)

    def _put(self, item: _Item) -> None:
        """Queue an item without waiting; drop all items of a full queue."""
        if self._items.full():
            with suppress(queue.Empty):
                while True:
                    self._items.get_nowait()
            self._items.put_nowait(_Item(item.experiment, is_gap=True))
        self._items.put_nowait(item)

    # -------------------------------------------------------------------------------------- the thread's own

    def _run(self) -> None:
        if not self._is_set_up():
            return
        is_over = False
        while not is_over:
            with suppress(queue.Empty):
                item = self._items.get(timeout=_KEEP_PERIOD.total_seconds())
                self._take(item)
                is_over = item.is_last
            if time.monotonic() - self._kept_at >= _KEEP_PERIOD.total_seconds():
                self._keep()
        self._call(lambda: self._callback.on_experiment_end(item.experiment.trials))
        self._keep()

    def _is_set_up(self) -> bool:
        try:
            self._callback.setup(self._search)
            if (kept := with_retries(self._read_state)) is not None:
                is_restored = kept.state is None or self._callback.set_state(kept.state) is not False
                self._delivered_entry = kept.entry if is_restored else 0
        except BaseException:  # noqa: BLE001  a callback's error must not end the search
            self._log.exception("callback %s: setup failed; this run does not call its hooks", self._name)
            return False
        return True

    @property
    def _state_path(self) -> str:
        return f"{self._journal.folder}/callbacks/{valid_name(self._name)}.json"

    def _read_state(self) -> CallbackState | None:
        with self._target.open(timeout=_TIMEOUT) as store:
            return read_sealed(store, CallbackState, self._state_path, JournalCorrupt)

    def _take(self, item: _Item) -> None:
        news = item.news
        if item.is_gap:
            self._is_behind = True
        elif news is None:
            self._written(item.experiment)
        elif self._is_behind:
            pass  # catching up reads it from the journal
        else:
            self._deliver(news, item.experiment)

    def _written(self, experiment: Experiment) -> None:
        if self._is_behind:
            self._is_behind = not self._caught_up(experiment)
        else:
            self._delivered_entry = experiment.number

    def _caught_up(self, experiment: Experiment) -> bool:
        """Deliver the journal entries that this callback has not received; return whether the journal was read."""
        try:
            entries = with_retries(self._missed_entries)
        except TuneError as error:
            self._log.warning("callback %s: missed events will be delivered later: %s", self._name, error)
            return False
        for entry in entries:
            if entry.number <= experiment.number:
                for event in entry.events:
                    self._deliver(event, experiment)
                self._delivered_entry = entry.number
        return True

    def _missed_entries(self) -> Sequence[Entry]:
        with self._target.open(timeout=_TIMEOUT) as store, transfer_pool() as transfers:
            return entries_beyond(store, self._journal, self._delivered_entry, side_by_side=transfers)

    def _deliver(self, event: Event, experiment: Experiment) -> None:
        if isinstance(event, Delivered):
            self._has_news = True
            for hook in hooks_for(self._callback, event, experiment.trial(event.trial)):
                self._call(hook)

    def _call(self, hook: Callable[[], object]) -> None:
        try:
            hook()
        except BaseException as error:  # noqa: BLE001  a callback's error must not end the search
            self._complain(error)

    def _complain(self, error: BaseException) -> None:
        """Log a failure of the callback: the first three with a traceback, then only each power of ten."""
        self._errors += 1
        if self._errors <= _TRACES:
            self._log.error("callback %s failed", self._name, exc_info=error)
        elif self._errors in _MILESTONES:
            self._log.error("callback %s has failed %d times: %r", self._name, self._errors, error)

    def _keep(self) -> None:
        """Store the callback's state, if something was delivered since the last time."""
        self._kept_at = time.monotonic()
        if not self._has_news:
            return
        try:
            state = CallbackState(entry=self._delivered_entry, state=self._callback.get_state())
            with self._target.open(timeout=_TIMEOUT) as store:
                store.replace(self._state_path, (seal(state),))
            self._has_news = False
        except BaseException as error:  # noqa: BLE001  as in `_call`; the next period tries again
            self._complain(error)


def hooks_for(callback: Callback, event: Delivered, trial: Trial) -> Iterator[Callable[[], object]]:
    """Yield the hook calls of a trial's event, in order."""
    match event:
        case Started():
            if event.from_sequence is not None:
                yield lambda: callback.on_trial_restore(trial, event)
            yield lambda: callback.on_trial_start(trial, event)
        case Reported(report=report):
            yield lambda: callback.on_trial_result(trial, report)
        case Committed(checkpoint=checkpoint):
            yield lambda: callback.on_trial_save(trial, checkpoint)
            yield lambda: callback.on_checkpoint(trial, checkpoint)
        case AttemptEnded():
            yield lambda: callback.on_trial_recover(trial, event)
        case Finished():
            yield lambda: callback.on_trial_complete(trial, event)
        case GaveUp():
            yield lambda: callback.on_trial_error(trial, event)


class Callbacks(ObserverGroup):
    """The callbacks of a search, as one listener."""

    def __init__(self, callbacks: Sequence[Callback], target: StorageTarget, search: SearchInfo, log: Log) -> None:
        names = _distinct([each.name for each in callbacks])
        self._threads = [
            CallbackThread(callback, name, target, search, log) for callback, name in zip(callbacks, names, strict=True)
        ]
        super().__init__(self._threads)

    def start(self, experiment: Experiment) -> None:
        """Start the threads; each first delivers what the journal holds up to this state."""
        for each in self._threads:
            each.start(experiment)

    def end(self, experiment: Experiment, patience: timedelta) -> None:
        """Deliver what is left, all of it in the journal by now; wait up to `patience` for all threads together."""
        until = time.monotonic() + patience.total_seconds()
        for each in self._threads:
            each.end(experiment)
        for each in self._threads:
            each.join(until)


def _distinct(names: Sequence[str]) -> list[str]:
    """Number names that occur again: `name`, `name-2`, `name-3`."""
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return found
