"""Emit an experiment's Prefect events, with checkpoints and best models as assets. A Prefect thread sends the events.

Delivery is best effort, because the journal is the source of truth. Events are lost if the Prefect API is unavailable
for a long time, or if this process is killed. The owner of the experiment emits each event once, and emits none for
entries of earlier runs. `prefect_tune.core.prefect_events` defines the events.
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
from prefect_tune.core.experiment.summary import count_by_status
from prefect_tune.core.experiment.trial_transitions import Phase, Trial, newest_checkpoint
from prefect_tune.core.journal_events import (
    AttemptEnded,
    Cause,
    CheckpointCloned,
    CheckpointCommitted,
    CheckpointQuarantined,
    Event,
    TrialErrored,
    TrialEvent,
    TrialFinished,
)
from prefect_tune.core.prefect_events import (
    NOT_EMITTED,
    BestImproved,
    BestModelTracker,
    ExperimentEnded,
    ExperimentEvent,
    ExperimentStarted,
    TokenBucket,
    TrialStalled,
    get_event_name,
    make_event_labels,
    make_event_payload,
    truncate_json,
)
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.storage.layout import JournalKey, TrialKey, join_uri
from prefect_tune.core.values import StepReport
from prefect_tune.monitoring.search_observer import SearchObserver, SearchRecorder
from prefect_tune.prefect_api.artifacts_and_assets import (
    PrefectEvent,
    make_asset,
    make_materialization_event,
    make_reference_event,
    to_related_resource,
)

_MAX_BURST_COUNT, _EVENTS_PER_SECOND = 100, 5
_BEST_INTERVAL = timedelta(seconds=30)
_CHECK_INTERVAL = timedelta(seconds=1)
_FIRST_REPORT_TIMEOUT = timedelta(minutes=30)
_MIN_STALL_TIMEOUT = timedelta(minutes=5)
_STALL_FACTOR = 5
"""An attempt stalls if it is silent for its longest report interval times this, and for `_MIN_STALL_TIMEOUT`."""
NEVER_DROPPED_EVENTS = AttemptEnded | TrialErrored | CheckpointQuarantined
"""Trial events that are emitted even when the rate limit is reached."""
_MAX_SOURCES = 20
_CHECKPOINTS_DESCRIPTION = "The checkpoints of one trial; each commit is a materialization."
_BEST_MODEL_DESCRIPTION = "The best model of an experiment; each better one is a materialization."
RunOutcome: TypeAlias = Literal["finished", "stopped", "superseded", "failed"]
Emit: TypeAlias = Callable[[PrefectEvent], None]


def emit_event_if_configured(event: PrefectEvent) -> None:
    """Pass an event to Prefect's events worker, which sends it later; do nothing if no API is configured."""
    if get_current_settings().api.url is not None:
        related = [dict(resource) for resource in event.related]
        emit_event(event.event, resource=dict(event.resource), related=related, payload=dict(event.payload))


@dataclass(frozen=True, slots=True)
class ExperimentAddress:
    """The stable names of an experiment, its trials and its assets in Prefect events, without credentials."""

    target_uri: str
    experiment: str

    @property
    def redacted_target_uri(self) -> str:
        """The target's URI, without options and password."""
        address = self.target_uri.partition("?")[0].partition("#")[0]
        scheme, separator, rest = address.partition("://")
        rest = rest.rstrip("/") or rest
        authority, slash, path = rest.partition("/")
        user, at, host = authority.rpartition("@")
        return f"{scheme}{separator}{user.partition(':')[0]}{at}{host}{slash}{path}"

    @property
    def experiment_uri(self) -> str:
        """The target's URI, followed by the experiment's name."""
        return join_uri(self.redacted_target_uri, self.experiment)

    @property
    def resource(self) -> Mapping[str, str]:
        """The experiment, as a resource of events."""
        resource_id = f"prefect-tune.experiment.{self.experiment_uri}"
        return {"prefect.resource.id": resource_id, "prefect.resource.name": self.experiment}

    def make_trial_resource(self, trial: str) -> Mapping[str, str]:
        """Return a trial of the experiment, as a resource of events."""
        resource_id = f"prefect-tune.trial.{self.experiment_uri}/{trial}"
        return {"prefect.resource.id": resource_id, "prefect.resource.name": f"{self.experiment}/{trial}"}

    def make_checkpoints_uri(self, trial: TrialKey) -> str:
        """Return the URI of a trial's checkpoints, which is also the key of their asset."""
        return join_uri(self.redacted_target_uri, trial.checkpoints_folder)

    @property
    def best_model_key(self) -> str:
        """The URI that is the key of the best model's asset; the target stores no object under this URI."""
        return f"{self.experiment_uri}/best"


class AssetEventBuilder:
    """Builds the asset events of one experiment; builds none if Prefect rejects the experiment's URI as an asset key.

    The checkpoints of each trial are one asset, and the best model of the experiment is another asset. Each commit is
    a materialization.
    """

    def __init__(self, address: ExperimentAddress, journal: JournalKey) -> None:
        self._address = address
        self._journal = journal
        self._clone_sources: dict[str, str] = {}
        self._referenced_keys: set[str] = set()

    def make_checkpoint_events(
        self, event: CheckpointCommitted | CheckpointCloned, before: Trial | None, after: Trial
    ) -> Iterator[PrefectEvent]:
        """Yield the events of a new checkpoint of a trial: a commit, or a clone of another trial's checkpoint."""
        if isinstance(event, CheckpointCloned):
            self._clone_sources[event.trial] = event.source
        source, folder = self._clone_sources.get(event.trial), self._journal.trial_key(event.trial)
        checkpoint, parent = event.checkpoint, newest_checkpoint(before) if before else None
        fields = checkpoint.model_dump(mode="json", include={"step", "sequence", "metrics", "size_bytes"})
        metadata = {
            "trial": event.trial,
            "attempt": after.attempt,
            **{name: truncate_json(value) for name, value in fields.items()},
            "manifest": folder.checkpoint_key(checkpoint).manifest_path,
            "parent": folder.checkpoint_key(parent).name if parent else None,
            "exploited": source,
        }
        name = f"{self._address.experiment}/{event.trial}: checkpoints"
        asset = make_asset(self._make_asset_key(event.trial), name, _CHECKPOINTS_DESCRIPTION)
        yield from self._make_materialization_events(asset, [self._make_asset_key(source)] if source else [], metadata)

    def make_asset_resources(self, trial: str) -> Sequence[Mapping[str, str]]:
        """Return the asset of a trial's checkpoints as related resources; an empty list if Prefect rejects the key."""
        asset = make_asset(self._make_asset_key(trial))
        return [to_related_resource(asset)] if asset else []

    def make_best_model_events(self, better: BestImproved, experiment: Experiment) -> Iterator[PrefectEvent]:
        """Yield the events of a new best model; yield nothing if the model is not saved.

        The asset's sources are the trial's checkpoints, and the best models of all warm starts and of a fork's origin.
        """
        if better.manifest is None:
            return
        warm_starts = list(experiment.warm_start_locations[:_MAX_SOURCES])
        origin = experiment.origin.experiment if experiment.origin else None
        forked = [ExperimentAddress(self._address.target_uri, origin).best_model_key] if origin else []
        upstream = [self._make_asset_key(better.trial), *forked, *(f"{uri}/best" for uri in warm_starts)]
        metadata = {**make_event_payload(better), "warm_start": warm_starts, "forked_from": origin}
        name = f"{self._address.experiment}: best model"
        best = make_asset(self._address.best_model_key, name, _BEST_MODEL_DESCRIPTION)
        yield from self._make_materialization_events(best, upstream, metadata)

    def _make_asset_key(self, trial: str) -> str:
        return self._address.make_checkpoints_uri(self._journal.trial_key(trial))

    def _make_materialization_events(
        self, asset: Asset | None, upstream: Sequence[str], metadata: Mapping[str, object]
    ) -> Iterator[PrefectEvent]:
        if asset is None:
            return
        sources = [source for key in upstream if (source := make_asset(key)) is not None]
        for source in sources:
            if source.key not in self._referenced_keys:
                self._referenced_keys.add(source.key)
                yield make_reference_event(source)
        yield make_materialization_event(asset, sources, metadata)


class EventEmitter(SearchObserver):
    """Emits the Prefect events of each change of an experiment.

    Trial events are limited to bursts of 100 and an average of 5 per second, because each costs a millisecond of CPU
    time. Events beyond the limit are counted and dropped, except `NEVER_DROPPED_EVENTS` and the experiment's events.
    """

    def __init__(
        self,
        address: ExperimentAddress,
        objective: Objective | None,
        recorder: SearchRecorder,
        log: Log,
        emit: Emit = emit_event_if_configured,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Args: recorder: the recorder of this run, which has not received the run's first entry yet."""
        self.experiment = recorder.read_search_snapshot().experiment
        """The last state that this observer has received."""
        self._address = address
        self._recorder = recorder
        self._log = log
        self._emit = emit
        self._clock = clock
        self._guard = threading.Lock()
        self._best = BestModelTracker(objective, self.experiment)
        self._pending_best: tuple[BestImproved, Experiment] | None = None
        self._began = clock()
        self._best_emitted_at = self._began - _BEST_INTERVAL
        self._asset_events = AssetEventBuilder(address, self.experiment.key)
        self._allowance = TokenBucket(_MAX_BURST_COUNT, _EVENTS_PER_SECOND)
        self._dropped_count = 0
        self._stalls: dict[str, tuple[int, StepReport | None]] = {}  # by trial: attempt and report of its last stall

    def emit_start(self, before: Experiment | None = None) -> None:
        """Emit the start of a run, and the ends of attempts that an earlier owner left running.

        `before` is the state before this run became the owner; None if the takeover ended no attempts.
        """
        after = self.experiment
        self._emit_events([self._make_prefect_event(ExperimentStarted(term=after.term, trials=count_by_status(after)))])
        if before is None:
            return
        for earlier in before.trials.values():
            trial = after.trial(earlier.id)
            if earlier.phase is Phase.RUNNING and trial.phase is Phase.PENDING:
                ended = AttemptEnded(trial=earlier.id, cause=trial.cause or Cause.MACHINE, reason=trial.end_reason)
                self._emit_events(self._convert_journal_event(ended, before, after))

    def on_event(self, event: Event, experiment: Experiment) -> None:
        before, self.experiment = self.experiment, experiment
        self._emit_events(self._convert_journal_event(event, before, experiment))

    def emit_due_events(self) -> None:
        """Emit an event for each newly stalled trial, and the new best model when it is due."""
        now = self._clock()
        for trial, attempt in self._recorder.running.items():
            silence, gap = now - (attempt.reported_at or attempt.began_at), attempt.longest_gap_seconds
            timeout = max(_MIN_STALL_TIMEOUT, timedelta(seconds=_STALL_FACTOR * gap)) if gap else _FIRST_REPORT_TIMEOUT
            if silence > timeout and self._stalls.get(trial) != (attempt.attempt, attempt.report):
                self._stalls[trial] = attempt.attempt, attempt.report
                stalled = TrialStalled(trial=trial, silent_seconds=round(silence.total_seconds(), 1))
                self._emit_events([self._make_prefect_event(stalled)])
        self._emit_events(self._take_best_model_events(now))

    def emit_end(self, outcome: RunOutcome, message: str = "") -> None:
        """Emit the best model if its event is still pending, and the outcome of the run."""
        self._emit_events(self._take_best_model_events(None))
        trials, best = count_by_status(self.experiment), self._best.trial
        ended = ExperimentEnded(end=outcome, message=message, trials=trials, best=best, dropped=self._dropped_count)
        self._emit_events([self._make_prefect_event(ended)])

    def _emit_events(self, events: Iterable[PrefectEvent]) -> None:
        try:
            with self._guard:  # the search and the thread of `emitting_events` both emit
                for event in events:
                    self._emit(event)
        except Exception:  # noqa: BLE001  an event must not end the training
            self._log.exception("an event of this experiment could not be emitted")

    def _convert_journal_event(self, event: Event, before: Experiment, after: Experiment) -> Iterator[PrefectEvent]:
        """Yield the Prefect events of a journal event; `before` and `after` are the states before and after it."""
        name, now = getattr(event, "trial", None), self._clock()
        earlier, trial = (None, None) if name is None else (before.trials.get(name), after.trials.get(name))
        if trial is not None and isinstance(event, CheckpointCommitted | TrialFinished):
            is_commit = isinstance(event, CheckpointCommitted)
            better = self._best.on_commit(trial) if is_commit else self._best.on_trial_ended(trial)
            self._pending_best = (better, after) if better else self._pending_best
        is_limited = isinstance(event, TrialEvent) and not isinstance(event, NEVER_DROPPED_EVENTS)
        has_asset = isinstance(event, CheckpointCommitted | CheckpointCloned)  # if so, an asset event follows
        if event.type in NOT_EMITTED:
            pass
        elif is_limited and not self._allowance.try_take_tokens(1 + has_asset, (now - self._began).total_seconds()):
            self._dropped_count += 1
        else:
            yield self._make_prefect_event(event, trial)
            if trial is not None and isinstance(event, CheckpointCommitted | CheckpointCloned):
                yield from self._asset_events.make_checkpoint_events(event, earlier, trial)
        yield from self._take_best_model_events(now)

    def _take_best_model_events(self, now: datetime | None) -> Iterator[PrefectEvent]:
        """Yield the events of a pending best model, at most every 30 s; at once if `now` is None."""
        if self._pending_best is None or (now is not None and now - self._best_emitted_at < _BEST_INTERVAL):
            return
        better, experiment = self._pending_best
        self._pending_best, self._best_emitted_at = None, now or self._best_emitted_at
        yield self._make_prefect_event(better)
        yield from self._asset_events.make_best_model_events(better, experiment)

    def _make_prefect_event(self, event: Event | ExperimentEvent, trial: Trial | None = None) -> PrefectEvent:
        """Return `event` as a Prefect event; for a journal event, `trial` is the state of its trial after the event."""
        address = self._address
        names = {"target": address.redacted_target_uri, "experiment": address.experiment}
        payload = {**names, **make_event_payload(event, trial)}
        resource: Mapping[str, str] = address.resource
        related: list[Mapping[str, str]] = []
        if isinstance(event, ExperimentEvent):
            name = event.name
            if trial_name := payload.get("trial"):
                related = [{**address.make_trial_resource(str(trial_name)), "prefect.resource.role": "trial"}]
        else:
            name = get_event_name(event)
            if trial is not None:
                related = [{**resource, "prefect.resource.role": "experiment"}]
                resource = address.make_trial_resource(trial.id)
                if isinstance(event, CheckpointCommitted):
                    related += self._asset_events.make_asset_resources(trial.id)
        return PrefectEvent(name, {**resource, **make_event_labels(payload)}, related, payload)


@contextmanager
def emitting_events(
    emitter: EventEmitter, stop: threading.Event, before: Experiment | None = None
) -> Iterator[EventEmitter]:
    """Emit the run's start, due events in the `with` block, and on exit the outcome. `before`: see `emit_start`."""
    ended = threading.Event()

    def emit_until_end() -> None:
        while not ended.wait(_CHECK_INTERVAL.total_seconds()):
            emitter.emit_due_events()

    emitter.emit_start(before)
    threading.Thread(target=copy_context().run, args=(emit_until_end,), name="event-emitter", daemon=True).start()
    try:
        yield emitter
    except Superseded as error:
        emitter.emit_end("superseded", str(error))
        raise
    except BaseException as error:
        emitter.emit_end("failed", f"{type(error).__name__}: {error}")
        raise
    else:
        reason = emitter.experiment.stop_reason or ("asked to stop" if stop.is_set() else "")
        emitter.emit_end("stopped" if reason else "finished", str(reason))
    finally:
        ended.set()
