"""The event emitter: emits an experiment's Prefect events from its own thread, delaying no training and no decision.

Delivery is best effort, since the journal is the truth: if the Prefect API is unavailable for long, or a process dies,
some events are never emitted. The run that owns the experiment emits each event once, and none for entries journaled
before it began. `prefect_tune.core.prefect_events` defines the events.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, TypeAlias
from uuid import UUID, uuid5

from prefect.events import emit_event
from prefect.runtime import flow_run
from prefect.settings import get_current_settings

from prefect_tune.attempt.processes.process_output import Log
from prefect_tune.attempt.search_link import LatestReport, StepReported
from prefect_tune.core.errors import Superseded
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.stoppers import Stopper, TimeBudget, TrialBudget, of_experiment
from prefect_tune.core.experiment.summary import counted
from prefect_tune.core.experiment.trial_transitions import ENDED, Phase, Trial
from prefect_tune.core.journal_events import (
    Absorbed,
    AttemptEnded,
    Cause,
    Cloned,
    Committed,
    Event,
    Finished,
    GaveUp,
    Paused,
    Quarantined,
    Reported,
    Started,
    TrialEvent,
    events_in,
)
from prefect_tune.core.prefect_events import (
    Allowance,
    BestImproved,
    BestSoFar,
    Budget,
    ExperimentEnded,
    ExperimentEvent,
    ExperimentStarted,
    HealthMonitor,
    HealthThresholds,
    emitted_in,
    event_name,
    labels_of,
    payload_of,
)
from prefect_tune.core.search.objective import Objective
from prefect_tune.monitoring.assets import ExperimentAddress, Lineage
from prefect_tune.monitoring.search_observer import SearchObserver
from prefect_tune.prefect_api.artifacts_and_assets import PrefectEvent

# Build Prefect events from changes of an experiment, with a rate limit on the events of trials.

_AT_ONCE, _PER_SECOND = 100, 5
_BEST_EVERY_SECONDS = 30.0
_BEYOND_A_SYNC_SECONDS = 120.0
URGENT = AttemptEnded | GaveUp | Quarantined
"""Events of trials that are emitted even when the rate limit is reached."""
End: TypeAlias = Literal["finished", "stopped", "superseded", "failed"]


@dataclass(frozen=True)
class EventContext:
    """The experiment that events describe, with the settings that health checks need."""

    place: ExperimentAddress
    objective: Objective | None = None
    budgets: Sequence[Budget] = ()
    sync_period: timedelta = timedelta(minutes=5)
    run: UUID | None = None
    """The flow run. A run that is killed and retried emits an event of the same entry again with the same id."""

    @property
    def patience(self) -> HealthThresholds:
        """The thresholds after which a health event is emitted."""
        return HealthThresholds(for_the_journal=self.sync_period.total_seconds() + _BEYOND_A_SYNC_SECONDS)


class EventBuilder:
    """Returns the Prefect events of each change. Not thread-safe; `now` is in seconds of a monotonic clock.

    Events of trials are limited to bursts of 100 and 5 a second on average; those beyond are counted and dropped.
    `URGENT` ones and events of the experiment are never dropped.
    """

    def __init__(self, context: EventContext, experiment: Experiment, now: float) -> None:
        self._context = context
        self._place = context.place
        self._best = BestSoFar(context.objective, experiment)
        self._pending_best: tuple[BestImproved, Experiment] | None = None
        self._best_emitted_at = now - _BEST_EVERY_SECONDS
        self._lineage = Lineage(context.place, experiment.key)
        self._allowance = Allowance(_AT_ONCE, _PER_SECOND)
        self._dropped_count = 0
        self._trained_seconds = sum(each.trained_seconds for each in experiment.trials.values())
        self._ended = sum(each.phase in ENDED for each in experiment.trials.values())
        self.health = HealthMonitor(now, context.budgets, context.patience)
        """The health monitor; the emitter also passes reports to it directly."""
        for each in experiment.trials.values():
            if each.phase is Phase.RUNNING:  # the attempt has outlived its search
                self.health.started(each.trial, each.step, now)

    def start_events(self, experiment: Experiment) -> Iterator[PrefectEvent]:
        """Return the event of the start of a run."""
        yield self._named(ExperimentStarted(term=experiment.term, trials=counted(experiment)))

    def events_of(self, event: Event, before: Experiment, after: Experiment, now: float) -> Iterator[PrefectEvent]:
        """Return the Prefect events of a journal event, from the states before and after it."""
        name = getattr(event, "trial", None)
        was, trial = (None, None) if name is None else (before.trials.get(name), after.trials.get(name))
        if trial is not None:
            self._count(was, trial)
        for index, each in enumerate(emitted_in(event)):
            if trial is not None:
                self._track_health(each, trial, now)
                self._compare(each, trial, after)
            is_limited = isinstance(each, TrialEvent) and not isinstance(each, URGENT)
            if not is_limited or self._allowance.take(_cost(each), now):
                yield self._journaled(each, trial, self._id_of(event, index))
                if trial is not None and isinstance(each, Committed | Cloned):
                    yield from self._lineage.added(each, was, trial)
            else:
                self._dropped_count += 1
        if trial is not None and any(isinstance(each, Reported) for each in events_in(event)):
            self.health.journaled(trial.trial, trial.step)
        yield from self._best_events(now)

    def due_events(self, now: float) -> Iterator[PrefectEvent]:
        """Return the health events that are due by now, and a new best model if it is due."""
        for each in self.health.look(now, self._trained_seconds, self._ended):
            yield self._named(each)
        yield from self._best_events(now)

    def end_events(self, end: End, experiment: Experiment, message: str = "") -> Iterator[PrefectEvent]:
        """Return the last events: a best model that is not yet emitted, and how the run ended.

        Args:
            end: how the run ended.
            experiment: its present state.
            message: why the run ended early; empty if the experiment is finished.
        """
        yield from self._best_events(None)
        trials, best = counted(experiment), self._best.trial
        yield self._named(
            ExperimentEnded(end=end, message=message, trials=trials, best=best, dropped=self._dropped_count)
        )

    def _count(self, before: Trial | None, after: Trial) -> None:
        self._trained_seconds += after.trained_seconds - (before.trained_seconds if before else 0.0)
        self._ended += (after.phase in ENDED) - (before is not None and before.phase in ENDED)

    def _track_health(self, event: Event, trial: Trial, now: float) -> None:
        match event:
            case Started():
                self.health.started(trial.trial, trial.step, now)
            case AttemptEnded() | GaveUp() | Finished() | Paused():
                self.health.ended(trial.trial)
            case Committed():
                self.health.committed(trial.trial, now)
            case _:
                pass

    def _compare(self, event: Event, trial: Trial, experiment: Experiment) -> None:
        match event:
            case Committed():
                better = self._best.committed(trial)
            case Finished():
                better = self._best.ended(trial)
            case _:
                return
        if better is not None:
            self._pending_best = (better, experiment)

    def _best_events(self, now: float | None) -> Iterator[PrefectEvent]:
        """Return the events of a new best model, at most one every 30 s; at once if `now` is None."""
        if self._pending_best is None or (now is not None and now - self._best_emitted_at < _BEST_EVERY_SECONDS):
            return
        better, experiment = self._pending_best
        self._pending_best, self._best_emitted_at = None, self._best_emitted_at if now is None else now
        yield self._named(better)
        yield from self._lineage.best(better, experiment)

    def _named(self, event: ExperimentEvent) -> PrefectEvent:
        payload = self._payload(event, None)
        trial = payload.get("trial")
        related = [{**self._place.trial_resource(str(trial)), "prefect.resource.role": "trial"}] if trial else []
        return PrefectEvent(event.name, {**self._place.resource, **labels_of(payload)}, related, payload)

    def _journaled(self, event: Event, trial: Trial | None, identity: UUID | None) -> PrefectEvent:
        payload = self._payload(event, trial)
        if trial is None:
            resource, related = self._place.resource, []
        else:
            asset = self._lineage.related(trial.trial) if isinstance(event, Committed) else []
            resource, related = self._place.trial_resource(trial.trial), [self._place.related, *asset]
        return PrefectEvent(event_name(event), {**resource, **labels_of(payload)}, related, payload, identity)

    def _payload(self, event: Event | ExperimentEvent, trial: Trial | None) -> dict[str, object]:
        return {"target": self._place.target, "experiment": self._place.experiment, **payload_of(event, trial)}

    def _id_of(self, event: Event, index: int) -> UUID | None:
        """Return a stable id for an event of a trial's own journal, whose entry number identifies it; else None."""
        if self._context.run is None or not isinstance(event, Absorbed):
            return None
        return uuid5(self._context.run, f"{self._place.uri}/{event.trial}/{event.number}/{index}")


def budgets_of(stopper: Stopper, *, time: timedelta | None, trial_count: int | None) -> Sequence[Budget]:
    """Return the budgets of training time, time and trials of a run.

    Args:
        stopper: the experiment's.
        time: the time budget of the run; None: no budget.
        trial_count: the number of trials that the search will propose; None if it is not known.
    """
    stoppers = of_experiment(stopper)
    counts = [each.trials for each in stoppers if isinstance(each, TrialBudget)]
    most = min([*counts, *([] if trial_count is None else [trial_count])], default=None)
    found = [Budget("training-time", each.time.total_seconds()) for each in stoppers if isinstance(each, TimeBudget)]
    found += [] if time is None else [Budget("time", time.total_seconds())]
    return [*found, *([] if most is None else [Budget("trials", most)])]


def _cost(event: Event) -> int:
    """Return how many Prefect events a trial's event counts as: two if a materialization follows it."""
    return 2 if isinstance(event, Committed | Cloned) else 1


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
class _Applied:
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
        self._items: queue.SimpleQueue[_Applied | _End] = queue.SimpleQueue()
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
                ended = AttemptEnded(trial=trial.trial, cause=cause, reason=trial.end_reason)
                self._put(_Applied(ended, before, experiment))

    def applied(self, event: Event, experiment: Experiment) -> None:
        before, self._experiment = self._experiment, experiment
        self._builder.health.queued(time.monotonic())
        self._put(_Applied(event, before, experiment))

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

    def _put(self, applied: _Applied) -> None:
        if self._items.qsize() < _MOST_WAITING:
            self._items.put(applied)

    # -------------------------------------------------------------------------------------- the thread's own

    def _run(self) -> None:
        self._emit_all(self._builder.start_events(self._experiment))
        checked_at = time.monotonic()
        while True:
            item, now = self._next(), time.monotonic()
            match item:
                case _Applied(event=event, before=before, after=after):
                    self._emit_all(self._builder.events_of(event, before, after, now))
                case _End(end=end, message=message):
                    self._emit_all(self._builder.end_events(end, self._experiment, message))
                    return
                case None:
                    pass
            if now - checked_at >= _CHECK_EVERY.total_seconds():
                checked_at = now
                self._emit_all(self._builder.due_events(now))

    def _next(self) -> _Applied | _End | None:
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
        emitter.end("stopped" if reason else "finished", str(reason))


def this_run() -> UUID | None:
    """Return the id of the present flow run; None outside of one."""
    return UUID(flow_run.id) if flow_run.id else None
