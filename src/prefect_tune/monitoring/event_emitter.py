"""Emit an experiment's Prefect events, with checkpoints and best models as assets; Prefect's own thread sends them.

Delivery is best effort, since the journal is the truth: if the Prefect API is unavailable for long, or a process dies,
some events are never emitted. The run that owns the experiment emits each event once, and none for entries journaled
before it began. `prefect_tune.core.prefect_events` defines the events.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal, TypeAlias

from prefect.assets import Asset
from prefect.events import emit_event
from prefect.settings import get_current_settings

from prefect_tune.attempt.processes.process_output import Log
from prefect_tune.core.errors import Superseded
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.summary import counted
from prefect_tune.core.experiment.trial_transitions import Phase, Trial, newest_checkpoint
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
    abbreviated,
    event_name,
    labels_of,
    payload_of,
)
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.storage.layout import JournalKey, TrialKey
from prefect_tune.core.values import StepReport
from prefect_tune.monitoring.search_observer import SearchObserver, SearchRecorder
from prefect_tune.prefect_api.artifacts_and_assets import PrefectEvent, as_related, asset_of, materialized, referenced

_BURST_COUNT, _PER_SECOND = 100, 5
_BEST_INTERVAL = timedelta(seconds=30)
_CHECK_INTERVAL = timedelta(seconds=1)
_FIRST_REPORT_TIMEOUT = timedelta(minutes=30)
_MIN_STALL = timedelta(minutes=5)
_STALL_FACTOR = 5
"""An attempt is stalled after this multiple of its longest time between two reports, and `_MIN_STALL`."""
URGENT = AttemptEnded | GaveUp | Quarantined
"""Events of trials that are emitted even when the rate limit is reached."""
_MAX_SOURCES = 20
_OF_A_TRIAL = "The checkpoints of one trial; each commit is a materialization."
_OF_AN_EXPERIMENT = "The best model of an experiment; each better one is a materialization."
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


@dataclass(frozen=True, slots=True)
class ExperimentAddress:
    """The names of an experiment and its parts in events and assets: stable, and without credentials."""

    target_uri: str
    experiment: str

    @property
    def target(self) -> str:
        """The target's URI, without the options and the password that it may carry."""
        address = self.target_uri.partition("?")[0].partition("#")[0]
        scheme, separator, rest = address.partition("://")
        rest = rest.rstrip("/") or rest
        authority, slash, path = rest.partition("/")
        user, at, host = authority.rpartition("@")
        return f"{scheme}{separator}{user.partition(':')[0]}{at}{host}{slash}{path}"

    @property
    def uri(self) -> str:
        """The experiment's URI: the target's, and the experiment's name."""
        return _within(self.target, self.experiment)

    @property
    def resource(self) -> Mapping[str, str]:
        """The experiment, as a resource of events."""
        return {"prefect.resource.id": f"prefect-tune.experiment.{self.uri}", "prefect.resource.name": self.experiment}

    def trial_resource(self, trial: str) -> Mapping[str, str]:
        """Return a trial of the experiment, as a resource of events."""
        name = f"{self.experiment}/{trial}"
        return {"prefect.resource.id": f"prefect-tune.trial.{self.uri}/{trial}", "prefect.resource.name": name}

    @property
    def related(self) -> Mapping[str, str]:
        """The experiment, as a related resource of a trial's events."""
        return {**self.resource, "prefect.resource.role": "experiment"}

    def checkpoints(self, trial: TrialKey) -> str:
        """Return the URI of a trial's checkpoints, which is the key of their asset."""
        return _within(self.target, trial.checkpoints)

    @property
    def best(self) -> str:
        """The key of the best model's asset: a name only; no object is stored there."""
        return f"{self.uri}/best"


def _within(target: str, experiment: str) -> str:
    return f"{target if target.endswith('/') else f'{target}/'}{experiment}"


class Lineage:
    """Builds the asset events of one experiment; none if Prefect refuses its URI as an asset key.

    There is one asset for each trial's checkpoints, and one for the experiment's best model; a commit is a
    materialization.
    """

    def __init__(self, address: ExperimentAddress, journal: JournalKey) -> None:
        self._address = address
        self._journal = journal
        self._exploited: dict[str, str] = {}
        self._referenced: set[str] = set()

    def on_checkpoint(self, event: Committed | Cloned, before: Trial | None, after: Trial) -> Iterator[PrefectEvent]:
        """Yield the events of a new checkpoint of a trial: a commit, or a clone of another trial's checkpoint."""
        if isinstance(event, Cloned):
            self._exploited[event.trial] = event.source
        source, folder = self._exploited.get(event.trial), self._journal.trial_key(event.trial)
        checkpoint, parent = event.checkpoint, newest_checkpoint(before) if before else None
        known = checkpoint.model_dump(mode="json", include={"step", "sequence", "metrics", "size_bytes"})
        metadata = {
            "trial": event.trial,
            "attempt": after.attempt,
            **{name: abbreviated(value) for name, value in known.items()},
            "manifest": folder.checkpoint_key(checkpoint).manifest_path,
            "parent": folder.checkpoint_key(parent).name if parent else None,
            "exploited": source,
        }
        name = f"{self._address.experiment}/{event.trial}: checkpoints"
        asset = asset_of(self._checkpoints_of(event.trial), name, _OF_A_TRIAL)
        yield from self._materialize(asset, [self._checkpoints_of(source)] if source else [], metadata)

    def related(self, trial: str) -> Sequence[Mapping[str, str]]:
        """Return the asset of a trial's checkpoints, as a related resource of a commit."""
        asset = asset_of(self._checkpoints_of(trial))
        return [as_related(asset)] if asset else []

    def on_best(self, better: BestImproved, experiment: Experiment) -> Iterator[PrefectEvent]:
        """Yield the events of a better model; none if it is not saved.

        Its sources are the trial's checkpoints, and the best models of the fork's origin and of warm-start experiments.
        """
        if better.manifest is None:
            return
        warm_starts = list(experiment.warm_start_places[:_MAX_SOURCES])
        origin = experiment.origin.experiment if experiment.origin else None
        forked = [ExperimentAddress(self._address.target_uri, origin).best] if origin else []
        upstream = [self._checkpoints_of(better.trial), *forked, *(f"{uri}/best" for uri in warm_starts)]
        metadata = {**payload_of(better), "warm_start": warm_starts, "forked_from": origin}
        best = asset_of(self._address.best, f"{self._address.experiment}: best model", _OF_AN_EXPERIMENT)
        yield from self._materialize(best, upstream, metadata)

    def _checkpoints_of(self, trial: str) -> str:
        return self._address.checkpoints(self._journal.trial_key(trial))

    def _materialize(
        self, asset: Asset | None, upstream: Sequence[str], metadata: Mapping[str, object]
    ) -> Iterator[PrefectEvent]:
        if asset is None:
            return
        sources = [source for key in upstream if (source := asset_of(key)) is not None]
        for source in sources:
            if source.key not in self._referenced:
                self._referenced.add(source.key)
                yield referenced(source)
        yield materialized(asset, sources, metadata)


class EventEmitter(SearchObserver):
    """Emits the Prefect events of each change; Prefect's own thread queues and sends them.

    Events of trials are limited to bursts of 100 and 5 a second on average, since one costs a millisecond of CPU time;
    those beyond are counted and dropped. `URGENT` ones and events of the experiment are never dropped.
    """

    def __init__(
        self,
        address: ExperimentAddress,
        objective: Objective | None,
        recorder: SearchRecorder,
        log: Log,
        emit: Emit = emit,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Args: recorder: of this run, which has written nothing yet."""
        self.experiment = recorder.read().experiment
        """The last state that this observer received."""
        self._address = address
        self._recorder = recorder
        self._log = log
        self._emit = emit
        self._clock = clock
        self._guard = threading.Lock()
        self._best = BestSoFar(objective, self.experiment)
        self._pending_best: tuple[BestImproved, Experiment] | None = None
        self._began = clock()
        self._best_emitted_at = self._began - _BEST_INTERVAL
        self._lineage = Lineage(address, self.experiment.key)
        self._allowance = Allowance(_BURST_COUNT, _PER_SECOND)
        self._dropped_count = 0
        self._stalled: dict[str, tuple[int, StepReport | None]] = {}  # the attempt and its last report, by trial

    def start(self, before: Experiment | None = None) -> None:
        """Emit the start of a run, and the ends of attempts that an earlier owner left running.

        Args:
            before: the experiment before this run opened it, if opening it has ended them.
        """
        after = self.experiment
        self._emit_all([self._prefect_event(ExperimentStarted(term=after.term, trials=counted(after)))])
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
        for trial, attempt in self._recorder.running.items():
            silent, longest = now - (attempt.reported_at or attempt.began), attempt.longest_gap_seconds
            limit = max(_MIN_STALL, timedelta(seconds=_STALL_FACTOR * longest)) if longest else _FIRST_REPORT_TIMEOUT
            if silent > limit and self._stalled.get(trial) != (attempt.attempt, attempt.report):
                self._stalled[trial] = attempt.attempt, attempt.report
                stalled = TrialStalled(trial=trial, silent_seconds=round(silent.total_seconds(), 1))
                self._emit_all([self._prefect_event(stalled)])
        self._emit_all(self._best_events(now))

    def end(self, end: End, message: str = "") -> None:
        """Emit a best model that is not emitted yet, and how the run ended."""
        self._emit_all(self._best_events(None))
        trials, best = counted(self.experiment), self._best.trial
        ended = ExperimentEnded(end=end, message=message, trials=trials, best=best, dropped=self._dropped_count)
        self._emit_all([self._prefect_event(ended)])

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
            yield self._prefect_event(event, trial)
            if trial is not None and isinstance(event, Committed | Cloned):
                yield from self._lineage.on_checkpoint(event, was, trial)
        yield from self._best_events(now)

    def _best_events(self, now: datetime | None) -> Iterator[PrefectEvent]:
        """Yield the events of a new best model, at most one every 30 s; at once if `now` is None."""
        if self._pending_best is None or (now is not None and now - self._best_emitted_at < _BEST_INTERVAL):
            return
        better, experiment = self._pending_best
        self._pending_best, self._best_emitted_at = None, now or self._best_emitted_at
        yield self._prefect_event(better)
        yield from self._lineage.on_best(better, experiment)

    def _prefect_event(self, event: Event | ExperimentEvent, trial: Trial | None = None) -> PrefectEvent:
        """Return the Prefect event of an event of the journal, with the `trial` after it, or of the experiment."""
        address = self._address
        payload = {"target": address.target, "experiment": address.experiment, **payload_of(event, trial)}
        resource: Mapping[str, str] = address.resource
        related: list[Mapping[str, str]] = []
        if isinstance(event, ExperimentEvent):
            name = event.name
            if of_trial := payload.get("trial"):
                related = [{**address.trial_resource(str(of_trial)), "prefect.resource.role": "trial"}]
        else:
            name = event_name(event)
            if trial is not None:
                asset = self._lineage.related(trial.trial) if isinstance(event, Committed) else []
                resource, related = address.trial_resource(trial.trial), [address.related, *asset]
        return PrefectEvent(name, {**resource, **labels_of(payload)}, related, payload)


@contextmanager
def emitting_events(
    emitter: EventEmitter, stop: threading.Event, before: Experiment | None = None
) -> Iterator[EventEmitter]:
    """Emit the start of a run and what is due while it lasts; on exit, emit how it ended. See `EventEmitter.start`."""
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
