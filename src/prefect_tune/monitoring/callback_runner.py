"""Run the callbacks of a search, each in its own thread, so that a slow callback delays no decision."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import copy_context
from datetime import timedelta
from typing import Any

from prefect.logging import get_logger

from prefect_tune.blocks import StorageTarget
from prefect_tune.callbacks import Callback, SearchInfo
from prefect_tune.core.did_you_mean import did_you_mean_or_has
from prefect_tune.core.errors import AlreadyExists, InvalidInput, TuneError
from prefect_tune.core.events.experiment_events import (
    AttemptEnded,
    Committed,
    Event,
    Finished,
    GaveUp,
    OneTrialsEvent,
    Reported,
    Started,
)
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.models import valid_name
from prefect_tune.core.notifications.callback_state import CallbackState
from prefect_tune.core.notifications.delivery_cursor import DeliveryTracker
from prefect_tune.monitoring.callback_queue import (
    BoundedQueue,
    DroppedItems,
    EndItem,
    EntryItem,
    EventItem,
    QueueItem,
    ReportItem,
)
from prefect_tune.monitoring.callback_store import CallbackStore
from prefect_tune.monitoring.listener import ObserverGroup
from prefect_tune.runtime.trial_process import load_trainable
from prefect_tune.supervisor import search_link
from prefect_tune.supervisor.process_channel import Log

__all__ = ["CallbackThread", "Callbacks", "callbacks_for"]

_KEEP_PERIOD = timedelta(seconds=10)
_TRACES = 3
_MILESTONES = frozenset(10**exponent for exponent in range(1, 12))


def callbacks_for(given: Sequence[Any] | None) -> Sequence[Callback]:
    """Return callback objects from objects, classes, or `"package.module:Name"` of either.

    Raises:
        InvalidInput: an element is none of these.
    """
    return [_callback(each) for each in given or ()]


def _callback(given: Any) -> Callback:
    named = load_trainable(given) if isinstance(given, str) and ":" in given else given
    made = named() if callable(named) and not isinstance(named, Callback) else named
    if isinstance(made, Callback):
        valid_name(made.name)
        _warn_of_unheard(type(made))
        return made
    raise InvalidInput(
        f"callback {given!r}: expected a pt.Callback, a class or function that makes one without arguments, or "
        "'package.module:Name' of one"
    )


def _warn_of_unheard(kind: type[Callback]) -> None:
    """Log a warning for each method `on_...` that is not a hook: a misspelt hook is never called."""
    hooks = [name for name in vars(Callback) if name.startswith("on_")]
    for name in dir(kind):
        if name.startswith("on_") and name not in hooks and callable(getattr(kind, name)):
            hint = did_you_mean_or_has(name, hooks)
            get_logger("prefect_tune").warning("callback %s: %s is not a hook: %s", kind.__name__, name, hint)


class CallbackThread:
    """Calls one callback's hooks in a thread of its own. The listener's methods only queue, and return at once."""

    def __init__(self, callback: Callback, desk: CallbackStore, log: Log, inbox: BoundedQueue | None = None) -> None:
        self._callback = callback
        self._desk = desk
        self._log = log
        self._inbox = inbox or BoundedQueue()
        self._telling = DeliveryTracker()
        self._is_behind = True  # what happened before this run is in the journal
        self._has_news = False
        self._is_owner = True
        self._errors = 0
        self._kept_at = time.monotonic()
        self._thread = threading.Thread(target=copy_context().run, args=(self._run,), name=desk.name, daemon=True)

    def start(self, experiment: Experiment) -> None:
        """Start the thread; it first delivers what the journal holds up to this state."""
        self._inbox.put(EntryItem(experiment))
        self._thread.start()

    def happened(self, event: Event, experiment: Experiment) -> None:
        self._inbox.put(EventItem(event, experiment))

    def told(self, told: search_link.StepReported, experiment: Experiment) -> None:
        self._inbox.put(ReportItem(told.trial, told.report, experiment))

    def wrote(self, experiment: Experiment) -> None:
        self._inbox.put(EntryItem(experiment))

    def end(self, experiment: Experiment) -> None:
        """Queue the end: the thread delivers what is left, calls `on_experiment_end`, and ends."""
        self._inbox.put(EndItem(experiment))

    def join(self, until: float) -> None:
        """Wait for the thread until `until`, a time of `time.monotonic`; log a warning if it is still busy then."""
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self._log.warning("callback %s did not finish in time: the next run delivers the rest", self._desk.name)

    # -------------------------------------------------------------------------------------- the thread's own

    def _run(self) -> None:
        if not self._is_set_up():
            return
        while True:
            item = self._inbox.take(_KEEP_PERIOD)
            if item is not None:
                self._take(item)
            if isinstance(item, EndItem):
                break
            if time.monotonic() - self._kept_at >= _KEEP_PERIOD.total_seconds():
                self._keep()
        self._call(lambda: self._callback.on_experiment_end(item.experiment.trials))
        self._keep()

    def _is_set_up(self) -> bool:
        try:
            self._callback.setup(self._desk.search)
            if (kept := self._desk.newest()) is not None:
                self._telling = DeliveryTracker(kept.heard if self._takes_up(kept) else None)
        except BaseException:  # noqa: BLE001  a callback's error must not end the search
            self._log.exception("callback %s: setup failed; this run does not call its hooks", self._desk.name)
            return False
        return True

    def _takes_up(self, kept: CallbackState) -> bool:
        return kept.state is None or self._callback.set_state(kept.state) is not False

    def _take(self, item: QueueItem) -> None:
        match item:
            case DroppedItems():
                self._is_behind = True
            case EntryItem(experiment=experiment) | EndItem(experiment=experiment):
                self._written(experiment)
            case EventItem(event=event, experiment=experiment) if not self._is_behind:
                self._tell(self._telling.news(event), experiment)
            case ReportItem() if not self._is_behind:
                self._tell_report(item)
            case _:
                pass  # catching up will read it from the journal

    def _written(self, experiment: Experiment) -> None:
        if self._is_behind:
            self._is_behind = not self._caught_up(experiment)
        else:
            self._telling.written(experiment.number)

    def _caught_up(self, experiment: Experiment) -> bool:
        """Deliver the journal entries that this callback has not received; return whether the journal was read."""
        try:
            entries = self._desk.entries(self._telling.number)
        except TuneError as error:
            self._log.warning("callback %s: missed events will be delivered later: %s", self._desk.name, error)
            return False
        for entry in entries:
            if entry.number <= experiment.number:
                self._tell(self._telling.replay(entry), experiment)
        return True

    def _tell(self, news: Iterable[OneTrialsEvent], experiment: Experiment) -> None:
        for event in news:
            self._has_news = True
            for hook in hooks_for(self._callback, event, experiment.trial(event.trial)):
                self._call(hook)

    def _tell_report(self, told: ReportItem) -> None:
        if self._telling.report(told.trial, told.report):
            self._has_news = True
            trial = told.experiment.trial(told.trial)
            self._call(lambda: self._callback.on_trial_result(trial, told.report))

    def _call(self, hook: Callable[[], object]) -> None:
        try:
            hook()
        except BaseException as error:  # noqa: BLE001  a callback's error must not end the search
            self._complain(error)

    def _complain(self, error: BaseException) -> None:
        """Log a failure of the callback: the first three with a traceback, then only each power of ten."""
        self._errors += 1
        if self._errors <= _TRACES:
            self._log.error("callback %s failed", self._desk.name, exc_info=error)
        elif self._errors in _MILESTONES:
            self._log.error("callback %s has failed %d times: %r", self._desk.name, self._errors, error)

    def _keep(self) -> None:
        """Store the delivery position and the callback's state, if something was delivered since the last time."""
        self._kept_at = time.monotonic()
        if not (self._has_news and self._is_owner):
            return
        try:
            self._desk.keep(self._telling.heard, self._callback.get_state())
            self._has_news = False
        except AlreadyExists:
            self._is_owner = False
            self._log.warning("callback %s: another run stores its state now; this run no longer does", self._desk.name)
        except BaseException as error:  # noqa: BLE001  as in `_call`; the next period tries again
            self._complain(error)


def hooks_for(callback: Callback, event: OneTrialsEvent, trial: Trial) -> Iterator[Callable[[], object]]:
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
        case _:
            pass


class Callbacks(ObserverGroup):
    """The callbacks of a search, as one listener."""

    def __init__(self, callbacks: Sequence[Callback], target: StorageTarget, search: SearchInfo, log: Log) -> None:
        names = _distinct([each.name for each in callbacks])
        self._threads = [
            CallbackThread(callback, CallbackStore(target, search, name), log)
            for callback, name in zip(callbacks, names, strict=True)
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
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return found
