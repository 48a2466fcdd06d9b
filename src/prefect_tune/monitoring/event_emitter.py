"""The event emitter: emits an experiment's Prefect events from its own thread, delaying no training and no decision.

Delivery is best effort, since the journal is the truth: if the Prefect API is unavailable for long, or a process dies,
some events are never emitted. The run that owns the experiment emits each event once, and none for entries journaled
before it began. `prefect_tune.core.notifications.prefect_events` defines the events.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias
from uuid import UUID

from prefect.events import emit_event
from prefect.runtime import flow_run
from prefect.settings import get_current_settings

from prefect_tune.core.errors import Superseded
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import Phase
from prefect_tune.core.journal_events.experiment_events import AttemptEnded, Cause, Event
from prefect_tune.monitoring.event_builder import End, EventBuilder, EventContext
from prefect_tune.monitoring.search_observer import SearchObserver
from prefect_tune.prefect_api.asset_events import PrefectEvent
from prefect_tune.supervisor.processes.process_output import Log
from prefect_tune.supervisor.search_link import LatestReport, StepReported

_MOST_WAITING = 10_000
_CHECK_EVERY = timedelta(seconds=1)
_PATIENCE = timedelta(seconds=5)

Emit: TypeAlias = Callable[[PrefectEvent], None]


def emit(event: PrefectEvent) -> None:
    """Queue an event in Prefect's events worker, which sends it when it can; do nothing if no API is configured."""
    if get_current_settings().api.url is None:
        return
    emit_event(
        event.event,
        resource=dict(event.resource),
        related=[dict(each) for each in event.related],
        payload=dict(event.payload),
        id=event.identity,
    )


@dataclass(frozen=True, slots=True)
class _Happened:
    event: Event
    before: Experiment
    after: Experiment


@dataclass(frozen=True, slots=True)
class _End:
    end: End
    message: str


class EventEmitter(SearchObserver):
    """A listener whose methods only queue; a thread of its own emits the events, in the flow run's context."""

    def __init__(self, context: EventContext, experiment: Experiment, log: Log, emit: Emit = emit) -> None:
        """Args: experiment: its state before this run has written anything."""
        self._experiment = experiment
        self._log = log
        self._emit = emit
        self._items: queue.SimpleQueue[_Happened | _End] = queue.SimpleQueue()
        self._builder = EventBuilder(context, experiment, time.monotonic())
        self._thread = threading.Thread(target=copy_context().run, args=(self._run,), name="event-emitter", daemon=True)

    @property
    def experiment(self) -> Experiment:
        """The last state that the listener received."""
        return self._experiment

    def start(self) -> None:
        """Start the thread, which emits the event of the run's start first."""
        self._thread.start()

    def opened(self, experiment: Experiment) -> None:
        """Queue an event for each attempt that an earlier owner left running and that opening has ended."""
        before, self._experiment = self._experiment, experiment
        for trial in experiment.trials.values():
            was = before.trials.get(trial.trial)
            if was is not None and was.phase is Phase.RUNNING and trial.phase is Phase.PENDING:
                cause = trial.cause or Cause.MACHINE
                ended = AttemptEnded(trial=trial.trial, cause=cause, message=trial.reason)
                self._put(_Happened(ended, before, experiment))

    def happened(self, event: Event, experiment: Experiment) -> None:
        before, self._experiment = self._experiment, experiment
        self._builder.health.happened(time.monotonic())
        self._put(_Happened(event, before, experiment))

    def reported(self, step: StepReported, experiment: Experiment) -> None:
        del experiment
        self._builder.health.reported(step.trial, step.report.step, time.monotonic())

    def latest(self, newest: LatestReport) -> None:
        self._builder.health.reported(newest.trial, newest.report.step, time.monotonic())

    def wrote(self, experiment: Experiment) -> None:
        del experiment
        self._builder.health.wrote()

    def end(self, end: End, message: str = "") -> None:
        """Emit the queued events and the final one; give up after 5 s."""
        self._items.put(_End(end, message))
        self._thread.join(_PATIENCE.total_seconds())

    def _put(self, happened: _Happened) -> None:
        if self._items.qsize() < _MOST_WAITING:
            self._items.put(happened)

    # -------------------------------------------------------------------------------------- the thread's own

    def _run(self) -> None:
        self._emit_all(self._builder.start_events(self._experiment))
        checked_at = time.monotonic()
        while True:
            item, now = self._next(), time.monotonic()
            match item:
                case _Happened(event=event, before=before, after=after):
                    self._emit_all(self._builder.events_of(event, before, after, now))
                case _End(end=end, message=message):
                    self._emit_all(self._builder.end_events(end, self._experiment, message))
                    return
                case None:
                    pass
            if now - checked_at >= _CHECK_EVERY.total_seconds():
                checked_at = now
                self._emit_all(self._builder.due_events(now))

    def _next(self) -> _Happened | _End | None:
        try:
            return self._items.get(timeout=_CHECK_EVERY.total_seconds())
        except queue.Empty:
            return None

    def _emit_all(self, events: Iterable[PrefectEvent]) -> None:
        try:
            for each in events:
                self._emit(each)
        except Exception:  # noqa: BLE001  an event must not end a training
            self._log.exception("an event of this experiment could not be emitted")


@contextmanager
def emitting_events(emitter: EventEmitter, stop: threading.Event) -> Iterator[EventEmitter]:
    """Start the event emitter of a run and yield it; on exit, emit how the run ended.

    Args:
        emitter: not started.
        stop: set if the run was asked to stop.
    """
    emitter.start()
    try:
        yield emitter
    except Superseded as error:
        emitter.end("superseded", str(error))
        raise
    except BaseException as error:
        emitter.end("failed", f"{type(error).__name__}: {error}")
        raise
    else:
        reason = emitter.experiment.ends or ("asked to stop" if stop.is_set() else "")
        emitter.end("stopped" if reason else "finished", reason)


def this_run() -> UUID | None:
    """Return the id of the present flow run; None outside of one."""
    return UUID(flow_run.id) if flow_run.id else None
