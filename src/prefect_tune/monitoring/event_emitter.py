"""The event emitter: emits an experiment's Prefect events, which Prefect's own thread sends.

Delivery is best effort, since the journal is the truth: if the Prefect API is unavailable for long, or a process dies,
some events are never emitted. The run that owns the experiment emits each event once, and none for entries journaled
before it began. `prefect_tune.core.prefect_events` defines the events.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal, TypeAlias

from prefect.events import emit_event
from prefect.settings import get_current_settings

from prefect_tune.attempt.processes.process_output import Log
from prefect_tune.core.errors import Superseded
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.summary import counted
from prefect_tune.core.experiment.trial_transitions import Phase, Trial
from prefect_tune.core.journal_events import (
    AttemptEnded,
    Cause,
    Cloned,
    Committed,
    Event,
    Finished,
    GaveUp,
    Quarantined,
    TrialEvent,
)
from prefect_tune.core.prefect_events import (
    NOT_EMITTED,
    Allowance,
    BestImproved,
    BestSoFar,
    ExperimentEnded,
    ExperimentEvent,
    ExperimentStarted,
    TrialStalled,
    event_name,
    labels_of,
    payload_of,
)
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.values import StepReport
from prefect_tune.monitoring.assets import ExperimentAddress, Lineage
from prefect_tune.monitoring.search_observer import SearchObserver, SearchRecorder
from prefect_tune.prefect_api.artifacts_and_assets import PrefectEvent

_BURST_COUNT, _PER_SECOND = 100, 5
_BEST_INTERVAL = timedelta(seconds=30)
_CHECK_INTERVAL = timedelta(seconds=1)
_FIRST_REPORT_TIMEOUT = timedelta(minutes=30)
_MIN_STALL = timedelta(minutes=5)
_STALL_FACTOR = 5
"""An attempt is stalled after this multiple of its longest time between two reports, and `_MIN_STALL`."""
URGENT = AttemptEnded | GaveUp | Quarantined
"""Events of trials that are emitted even when the rate limit is reached."""
End: TypeAlias = Literal["finished", "stopped", "superseded", "failed"]
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
    )


@dataclass(frozen=True)
class EventContext:
    """The experiment that events describe."""

    place: ExperimentAddress
    objective: Objective | None = None


class EventEmitter(SearchObserver):
    """Emits the Prefect events of each change; Prefect's own thread queues and sends them.

    Events of trials are limited to bursts of 100 and 5 a second on average, since one costs a millisecond of CPU time;
    those beyond are counted and dropped. `URGENT` ones and events of the experiment are never dropped.
    """

    def __init__(
        self,
        context: EventContext,
        recorder: SearchRecorder,
        log: Log,
        emit: Emit = emit,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Args: recorder: of this run, which has written nothing yet."""
        self.experiment = recorder.read().experiment
        """The last state that this observer received."""
        self._context = context
        self._place = context.place
        self._recorder = recorder
        self._log = log
        self._emit = emit
        self._clock = clock
        self._guard = threading.Lock()
        self._best = BestSoFar(context.objective, self.experiment)
        self._pending_best: tuple[BestImproved, Experiment] | None = None
        self._began = clock()
        self._best_emitted_at = self._began - _BEST_INTERVAL
        self._lineage = Lineage(context.place, self.experiment.key)
        self._allowance = Allowance(_BURST_COUNT, _PER_SECOND)
        self._dropped_count = 0
        self._stalled: dict[str, tuple[int, StepReport | None]] = {}  # the attempt and its last report, by trial

    def start(self, before: Experiment | None = None) -> None:
        """Emit the start of a run, and the ends of attempts that an earlier owner left running.

        Args:
            before: the experiment before this run opened it, if opening it has ended them.
        """
        after = self.experiment
        self._emit_all([self._named(ExperimentStarted(term=after.term, trials=counted(after)))])
        if before is None:
            return
        for was in before.trials.values():
            trial = after.trial(was.trial)
            if was.phase is Phase.RUNNING and trial.phase is Phase.PENDING:
                ended = AttemptEnded(trial=was.trial, cause=trial.cause or Cause.MACHINE, reason=trial.end_reason)
                self._emit_all(self._events_of(ended, before, after))

    def applied(self, event: Event, experiment: Experiment) -> None:
        before, self.experiment = self.experiment, experiment
        self._emit_all(self._events_of(event, before, experiment))

    def emit_due(self) -> None:
        """Emit that a trial is stalled, and a new best model if it is due."""
        now = self._clock()
        for trial, attempt in self._recorder.read().running.items():
            silent, longest = now - (attempt.reported_at or attempt.began), attempt.longest_gap_seconds
            limit = max(_MIN_STALL, timedelta(seconds=_STALL_FACTOR * longest)) if longest else _FIRST_REPORT_TIMEOUT
            if silent > limit and self._stalled.get(trial) != (attempt.attempt, attempt.report):
                self._stalled[trial] = attempt.attempt, attempt.report
                stalled = TrialStalled(trial=trial, silent_seconds=round(silent.total_seconds(), 1))
                self._emit_all([self._named(stalled)])
        self._emit_all(self._best_events(now))

    def end(self, end: End, message: str = "") -> None:
        """Emit a best model that is not emitted yet, and how the run ended."""
        self._emit_all(self._best_events(None))
        trials, best = counted(self.experiment), self._best.trial
        ended = ExperimentEnded(end=end, message=message, trials=trials, best=best, dropped=self._dropped_count)
        self._emit_all([self._named(ended)])

    def _emit_all(self, events: Iterable[PrefectEvent]) -> None:
        try:
            with self._guard:  # a search and the thread of `emitting_events`
                for event in events:
                    self._emit(event)
        except Exception:  # noqa: BLE001  an event must not end a training
            self._log.exception("an event of this experiment could not be emitted")

    def _events_of(self, event: Event, before: Experiment, after: Experiment) -> Iterator[PrefectEvent]:
        """Yield the Prefect events of a journal event, from the states before and after it."""
        name, now = getattr(event, "trial", None), self._clock()
        was, trial = (None, None) if name is None else (before.trials.get(name), after.trials.get(name))
        if trial is not None and isinstance(event, Committed | Finished):
            better = self._best.committed(trial) if isinstance(event, Committed) else self._best.ended(trial)
            self._pending_best = (better, after) if better else self._pending_best
        is_limited = isinstance(event, TrialEvent) and not isinstance(event, URGENT)
        has_asset = isinstance(event, Committed | Cloned)  # whose materialization is a second event
        if event.type in NOT_EMITTED:
            pass
        elif is_limited and not self._allowance.take(1 + has_asset, (now - self._began).total_seconds()):
            self._dropped_count += 1
        else:
            yield self._journaled(event, trial)
            if trial is not None and isinstance(event, Committed | Cloned):
                yield from self._lineage.added(event, was, trial)
        yield from self._best_events(now)

    def _best_events(self, now: datetime | None) -> Iterator[PrefectEvent]:
        """Yield the events of a new best model, at most one every 30 s; at once if `now` is None."""
        if self._pending_best is None or (now is not None and now - self._best_emitted_at < _BEST_INTERVAL):
            return
        better, experiment = self._pending_best
        self._pending_best, self._best_emitted_at = None, now or self._best_emitted_at
        yield self._named(better)
        yield from self._lineage.best(better, experiment)

    def _named(self, event: ExperimentEvent) -> PrefectEvent:
        payload = self._payload(event, None)
        trial = payload.get("trial")
        related = [{**self._place.trial_resource(str(trial)), "prefect.resource.role": "trial"}] if trial else []
        return PrefectEvent(event.name, {**self._place.resource, **labels_of(payload)}, related, payload)

    def _journaled(self, event: Event, trial: Trial | None) -> PrefectEvent:
        payload = self._payload(event, trial)
        if trial is None:
            resource, related = self._place.resource, []
        else:
            asset = self._lineage.related(trial.trial) if isinstance(event, Committed) else []
            resource, related = self._place.trial_resource(trial.trial), [self._place.related, *asset]
        return PrefectEvent(event_name(event), {**resource, **labels_of(payload)}, related, payload)

    def _payload(self, event: Event | ExperimentEvent, trial: Trial | None) -> dict[str, object]:
        return {"target": self._place.target, "experiment": self._place.experiment, **payload_of(event, trial)}


@contextmanager
def emitting_events(
    emitter: EventEmitter, stop: threading.Event, before: Experiment | None = None
) -> Iterator[EventEmitter]:
    """Emit the start of a run and what is due while it lasts; on exit, emit how it ended.

    Args:
        emitter: not started.
        stop: set if the run was asked to stop.
        before: as in `EventEmitter.start`.
    """
    ended = threading.Event()

    def emit_due() -> None:
        while not ended.wait(_CHECK_INTERVAL.total_seconds()):
            emitter.emit_due()

    emitter.start(before)
    threading.Thread(target=copy_context().run, args=(emit_due,), name="event-emitter", daemon=True).start()
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
    finally:
        ended.set()
