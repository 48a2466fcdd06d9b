"""The state of an experiment, computed from its journal: the same entries always give the same state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from pydantic import Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema
from rpds import HashTrieMap

from prefect_tune.core.errors import IllegalTransition, JournalCorrupt
from prefect_tune.core.experiment.trial_transitions import (
    ENDED_PHASES,
    Clone,
    Phase,
    ReplayEvent,
    Trial,
    apply_adoption,
    apply_fork,
    apply_trial_event,
)
from prefect_tune.core.journal_events import (
    AnyTrialEvent,
    AttemptLaunched,
    AttemptStarted,
    CheckpointCommitted,
    CheckpointQuarantined,
    CheckpointRef,
    CheckpointsAdopted,
    DecisionMade,
    DeletionStarted,
    Entry,
    Event,
    ExperimentConfigured,
    ExperimentForked,
    FinishKind,
    ForkOrigin,
    FormAnswered,
    NonOwnerEvent,
    Owner,
    OwnerChanged,
    SlotFreed,
    StopRequested,
    TrialAdded,
    TrialRequeued,
    TrialResumed,
    Writer,
)
from prefect_tune.core.reasons import AnyReason
from prefect_tune.core.storage.layout import JournalKey, TrialKey
from prefect_tune.core.usage_records import RunRecord, extend_last_run, extend_previous_run
from prefect_tune.core.values import Digest, StepReport, Value


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class TrialMap(Mapping[str, Trial]):
    """An immutable mapping of names to trials, in the order in which the trials were added.

    A changed copy shares the unchanged trials, so the cost of a change does not depend on the number of trials.
    """

    _numbers: HashTrieMap[str, int]
    """The position of each trial, by name."""
    _trials: HashTrieMap[int, Trial]

    @classmethod
    def from_trials(cls, trials: Iterable[Trial] = ()) -> TrialMap:
        """Return a map of `trials`, in this order."""
        trial_map = cls(HashTrieMap(), HashTrieMap())
        for trial in trials:
            trial_map = trial_map.with_trial(trial)
        return trial_map

    def with_trial(self, trial: Trial) -> TrialMap:
        """Return a copy in which `trial` replaces the trial of the same name, or is added at the end if it is new."""
        number = self._numbers.get(trial.id, len(self._numbers))
        return TrialMap(self._numbers.insert(trial.id, number), self._trials.insert(number, trial))

    def __getitem__(self, trial: str) -> Trial:
        return self._trials[self._numbers[trial]]

    def __contains__(self, trial: object) -> bool:
        return trial in self._numbers

    def __iter__(self) -> Iterator[str]:
        return (self._trials[number].id for number in range(len(self._trials)))

    def __len__(self) -> int:
        return len(self._trials)

    def __eq__(self, other: object) -> bool:
        return self._trials == other._trials if isinstance(other, TrialMap) else dict(self) == other

    __hash__ = None  # type: ignore[assignment]  # like other mappings

    def __repr__(self) -> str:
        first_trials = [repr(trial) for trial in islice(self.values(), 10)]
        more = [f"and {len(self) - 10:,} more"] if len(self) > 10 else []
        return f"Trials([{', '.join([*first_trials, *more])}])"

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return a schema with which pydantic reads and writes the map as a JSON list of trials."""
        list_schema = handler.generate_schema(tuple[Trial, ...])
        read_schema = core_schema.no_info_after_validator_function(cls.from_trials, list_schema)
        return core_schema.json_or_python_schema(
            json_schema=read_schema,
            python_schema=core_schema.union_schema([core_schema.is_instance_schema(cls), read_schema]),
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda trials: tuple(trials.values()), return_schema=list_schema
            ),
        )


class Experiment(Value):
    """The state of an experiment after the first `entry_count` entries of its journal."""

    key: JournalKey
    """The key of the journal."""
    entry_count: int = 0
    digest: str = ""
    """The digest of the last entry."""
    term: int = 0
    owner: Owner | None = None
    owner_since_entry: int = 0
    """The number of the entry whose `OwnerChanged` named the present owner; 0 if there is no owner."""
    last_adopting_term: int = 0
    """The last term whose owner adopted the checkpoints that the previous owner had not journaled."""
    settings: Mapping[str, object] = Field(default_factory=dict)
    """The parameters of the last run that took over the experiment; see `ExperimentConfigured`."""
    extensions: Mapping[str, int] = Field(default_factory=dict)
    """The number of samples that each run added, in the order of the runs; see `ExperimentConfigured.extensions`."""
    origin: ForkOrigin | None = None
    """The journal entry from which the experiment was forked; None if it is not a fork."""
    is_complete: bool = True
    """False while the experiment is an incomplete fork, which cannot be resumed."""
    is_being_deleted: bool = False
    """Whether the deletion of the experiment has started."""
    warm_starts: Mapping[str, int] = Field(default_factory=dict)
    """The experiments from which the search warm-starts; for each, the number of the entry that copied its trials."""
    warm_start_locations: tuple[str, ...] = ()
    """The known locations of `warm_starts`, for events and assets: without duplicates, in the order of the entries."""
    stop_requests: tuple[str, ...] = ()
    """The write ids of the journaled stop requests, in the order of the requests' numbers, which begin at 1."""
    pending_stops: Mapping[str, AnyReason] = Field(default_factory=dict)
    """The trials that must stop and have not ended yet, each with the reason for its stop."""
    stop_reason: AnyReason = ""
    """Why the present owner stops the experiment early; empty if the owner does not stop it."""
    restarts: int = 0
    """How many times in a row the owner's flow run restarted automatically, with no commit or decision in between."""
    answers: tuple[FormAnswered, ...] = ()
    """The users' answers to forms, oldest first."""
    policy_event_count: int = 0
    """The number of events that a resume replays to the search and the scheduler; see `Trial.policy_events`."""
    runs: tuple[RunRecord, ...] = ()
    """When each run owned the experiment, oldest first; see `cost.compute_cost`."""
    trials: TrialMap = Field(default_factory=TrialMap.from_trials)
    """The trials by name, in the order in which they were added."""

    @property
    def name(self) -> str:
        """The experiment's name."""
        return self.key.experiment

    def trial_key(self, trial: str) -> TrialKey:
        """Return the key of a trial of the experiment."""
        return self.key.trial_key(trial)

    def trial(self, trial: str) -> Trial:
        """Return the trial with this name. Raises `KeyError` if there is no such trial."""
        return self.trials[trial]


def make_empty_experiment(journal: JournalKey) -> Experiment:
    """Return the state of an experiment whose journal is still empty."""
    return Experiment(key=journal)


def apply_entry(
    experiment: Experiment,
    entry: Entry,
    digest: Digest,
    apply_one: Callable[[Experiment, Event, int, Writer], Experiment] | None = None,
) -> Experiment:
    """Return the experiment after `entry`, whose bytes have the digest `digest`.

    `apply_one` applies each event; by default, `apply_event` does.

    Raises:
        JournalCorrupt: the entry does not follow the last entry, or one of its events is impossible.
    """
    where = f"{experiment.key}, entry {entry.number}"
    if entry.writer == "non-owner":  # write access to the target alone must not let users end others' trials
        misplaced = [
            event.type
            for event in entry.events
            if not isinstance(event, NonOwnerEvent)
            or (isinstance(event, CheckpointQuarantined) and event.crashes_trainable)
        ]
        if misplaced or not entry.events:
            names = ", ".join(misplaced) or "none"
            raise JournalCorrupt(f"{where}: expected events that a non-owner may write, found {names}")
    changes_owner = bool(entry.events) and isinstance(entry.events[0], OwnerChanged)
    expected = (experiment.entry_count + 1, experiment.digest, experiment.term + changes_owner)
    if (entry.number, entry.previous, entry.term) != expected:
        raise JournalCorrupt(
            f"{where}: expected number, predecessor and term {expected}, found "
            f"{(entry.number, entry.previous, entry.term)}: an entry was lost, altered or copied from another journal"
        )
    try:
        for event in entry.events:
            experiment = (apply_one or apply_event)(experiment, event, entry.number, entry.writer)
    except IllegalTransition as error:
        raise JournalCorrupt(f"{where}: {error}") from error
    return experiment.model_copy(update={"entry_count": entry.number, "digest": digest})


def apply_event(experiment: Experiment, event: Event, number: int, writer: Writer = "owner") -> Experiment:
    """Return the experiment after `event` of entry `number`; `writer` is the writer of this entry.

    Raises:
        IllegalTransition: the event cannot occur in this state.
    """
    match event:
        case OwnerChanged():
            return _apply_owner_change(experiment, event, number)
        case CheckpointsAdopted():
            # After this, no save of an attempt that ended with its owner can become a checkpoint, except adopted saves.
            for name in {**event.checkpoints, **event.last_known_steps}:
                experiment = _replace_trial(experiment, apply_adoption(_require_trial(experiment, name), event))
            runs = extend_previous_run(experiment.runs, event.last_seen_at)
            return experiment.model_copy(update={"last_adopting_term": experiment.term, "runs": runs})
        case ExperimentConfigured():
            if repeated := event.extensions.keys() & experiment.extensions.keys():
                raise IllegalTransition(f"run {min(repeated)} has already added its samples")
            sources = {start.source: number for start in event.warm_starts}
            locations = (start.location for start in event.warm_starts if start.location is not None)
            changes = {
                "settings": event.settings,
                "extensions": {**experiment.extensions, **event.extensions},
                "warm_starts": {**experiment.warm_starts, **sources},
                "warm_start_locations": tuple(dict.fromkeys((*experiment.warm_start_locations, *locations))),
            }
            return experiment.model_copy(update=changes)
        case ExperimentForked():
            return _apply_fork_event(experiment, event)
        case DeletionStarted():
            return experiment.model_copy(update={"is_being_deleted": True})
        case StopRequested():
            return _apply_stop_request(experiment, event)
        case FormAnswered():
            return experiment.model_copy(update={"answers": (*experiment.answers, event)})
        case TrialAdded():
            if event.trial in experiment.trials:
                raise IllegalTransition(f"trial {event.trial!r} was already added")
            past = ReplayEvent(order=experiment.policy_event_count + 1, kind="added")
            fields = event.model_dump(include={"config", "fingerprint", "proposed_by_search"})
            trial = Trial.model_validate({"id": event.trial, **fields, "policy_events": (past,)})
            return _replace_trial(experiment, trial, policy_event_count=past.order)
        case _:
            return _apply_trial_event(experiment, event, writer)


def _apply_owner_change(experiment: Experiment, event: OwnerChanged, number: int) -> Experiment:
    key = JournalKey(experiment=event.experiment, generation=event.generation)
    if (key, event.term) != (experiment.key, experiment.term + 1):
        raise IllegalTransition(f"term {event.term} of {key} cannot follow term {experiment.term} of {experiment.key}")
    previous, flow_run = experiment.owner, event.owner.flow_run
    is_same_run = previous is not None and flow_run is not None and flow_run == previous.flow_run
    changes = {"term": event.term, "owner": event.owner, "owner_since_entry": number, "stop_reason": ""}
    changes["restarts"] = experiment.restarts + 1 if is_same_run and not event.owner.is_manual else 0
    if event.at is not None:
        run = RunRecord(term=event.term, began_at=event.at, slots=event.owner.slots)
        changes["runs"] = (*experiment.runs, run)
    return experiment.model_copy(update=changes)


def _apply_fork_event(experiment: Experiment, event: ExperimentForked) -> Experiment:
    if event.trials is None:
        if experiment.trials or experiment.origin is not None:
            raise IllegalTransition(f"a fork of {event.origin} must be new, but it already has trials or an origin")
        return experiment.model_copy(update={"origin": event.origin, "is_complete": False})
    for name, forked in event.trials.items():
        experiment = _replace_trial(experiment, apply_fork(_require_trial(experiment, name), forked))
    return experiment.model_copy(update={"is_complete": True})


def _apply_stop_request(experiment: Experiment, event: StopRequested) -> Experiment:
    if event.request is not None:
        experiment = experiment.model_copy(update={"stop_requests": (*experiment.stop_requests, event.request)})
    if event.refused is not None:
        return experiment
    if event.trial is None:
        return experiment.model_copy(update={"stop_reason": event.reason})
    if _require_trial(experiment, event.trial).phase in ENDED_PHASES:
        raise IllegalTransition(f"trial {event.trial!r} has ended and cannot be stopped")
    return experiment.model_copy(update={"pending_stops": {**experiment.pending_stops, event.trial: event.reason}})


def _apply_trial_event(experiment: Experiment, event: AnyTrialEvent, writer: Writer) -> Experiment:
    """Apply an event to its trial, and record the event if a resume must replay it to the search and the scheduler."""
    before = _require_trial(experiment, event.trial)
    trial, changes = apply_trial_event(before, event, writer), dict[str, object]()
    match event:
        case AttemptStarted(attempt=attempt):
            term = experiment.term if trial.outbox is None else trial.launch_term
            trial = _set_record_terms(trial, attempt, term=term)
        case AttemptLaunched():
            trial = trial.model_copy(update={"launch_term": experiment.term})
        case SlotFreed(attempt=attempt, since=since, seconds=seconds):
            trial = _set_record_terms(trial, attempt, slot_term=experiment.term)
            changes["runs"] = extend_last_run(experiment.runs, since, seconds)
        case _:
            pass
    past = _make_replay_event(experiment.policy_event_count + 1, before, event, trial)
    if past is not None:
        trial = trial.model_copy(update={"policy_events": (*trial.policy_events, past)})
        changes["policy_event_count"] = past.order
    if isinstance(event, CheckpointCommitted) or (past is not None and past.kind in ("decided", "ended")):
        changes["restarts"] = 0
    return _replace_trial(experiment, trial, **changes)


def _make_replay_event(order: int, before: Trial, event: AnyTrialEvent, changed: Trial) -> ReplayEvent | None:
    match event:
        case DecisionMade(report=report, decision=decision):
            return ReplayEvent(order=order, kind="decided", report=report, decision=decision)
        case TrialResumed():
            return ReplayEvent(order=order, kind="resumed")
        case TrialRequeued() if before.phase in ENDED_PHASES:
            return ReplayEvent(order=order, kind="added")
        case _ if changed.phase in ENDED_PHASES and before.phase not in ENDED_PHASES:
            return ReplayEvent(
                order=order,
                kind="ended",
                report=last_report(changed) if changed.step else None,
                failed=changed.phase is Phase.ERRORED,
                stopped=changed.phase is Phase.FINISHED and changed.finish_kind is FinishKind.PRUNED,
            )
        case _:
            return None


def last_report(trial: Trial) -> StepReport:
    """Return the last journaled report of a trial."""
    return StepReport(step=trial.step, metrics=trial.metrics, trained_seconds=trial.trained_seconds)


def _set_record_terms(trial: Trial, attempt: int, **terms: int) -> Trial:
    records = trial.attempt_records
    changed = (record.model_copy(update=terms) if record.attempt == attempt else record for record in records)
    return trial.model_copy(update={"attempt_records": tuple(changed)})


def _require_trial(experiment: Experiment, trial: str) -> Trial:
    if trial not in experiment.trials:
        raise IllegalTransition(f"trial {trial!r} was never added")
    return experiment.trials[trial]


def _replace_trial(experiment: Experiment, trial: Trial, **changes: object) -> Experiment:
    stops = experiment.pending_stops
    if trial.id in stops and trial.phase in ENDED_PHASES:
        changes["pending_stops"] = {name: reason for name, reason in stops.items() if name != trial.id}
    return experiment.model_copy(update={"trials": _update_clone_lists(experiment.trials, trial), **changes})


def _update_clone_lists(trials: TrialMap, trial: Trial) -> TrialMap:
    """Return `trials` with the new state of `trial`; the trials whose checkpoints its clones copy list these clones.

    Raises:
        IllegalTransition: no checkpoint or other clone keeps the bytes of a new clone, so they may have been deleted.
    """
    before, trials = trials.get(trial.id), trials.with_trial(trial)
    live, quarantined = trial.checkpoints, trial.quarantined_checkpoints
    if before is not None and before.checkpoints is live and before.quarantined_checkpoints is quarantined:
        return trials
    old, new = _list_clones(before), _list_clones(trial)
    for origin, clone in old - new:
        holder = trials[origin]
        remaining = tuple(other for other in holder.clones if other != clone)
        trials = trials.with_trial(holder.model_copy(update={"clones": remaining}))
    for origin, clone in new - old:
        if (source := trials.get(origin)) is not None:
            refs: Sequence[CheckpointRef | Clone] = (*_list_stored_refs(source), *source.clones)
        if source is None or (clone.step, clone.sequence) not in {(ref.step, ref.sequence) for ref in refs}:
            raise IllegalTransition(
                f"trial {trial.id!r}: cannot clone step {clone.step} (sequence {clone.sequence}) of trial "
                f"{origin!r}, because it is no longer a checkpoint"
            )
        trials = trials.with_trial(source.model_copy(update={"clones": (*source.clones, clone)}))
    return trials


def _list_stored_refs(trial: Trial) -> Sequence[CheckpointRef]:
    """Return the checkpoints whose bytes are kept, including quarantined ones, since the owner may be cloning one."""
    return (*trial.checkpoints, *(quarantined.checkpoint for quarantined in trial.quarantined_checkpoints))


def _list_clones(trial: Trial | None) -> set[tuple[str, Clone]]:
    """Return the trial's clones of other trials' checkpoints, each with the trial whose checkpoint was cloned."""
    if trial is None:
        return set()
    return {
        (old.trial, Clone(step=old.step, sequence=old.sequence, trial=trial.id, clone_sequence=ref.sequence))
        for ref in _list_stored_refs(trial)
        if (old := ref.origin) is not None
    }
