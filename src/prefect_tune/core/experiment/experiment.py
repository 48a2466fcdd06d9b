"""The experiment as the fold of its journal: the same entries always give the same experiment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias, TypeVar

from pydantic import Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema
from rpds import HashTrieMap, HashTrieSet

from prefect_tune.core.errors import IllegalTransition, JournalCorrupt, SaveOvertaken
from prefect_tune.core.experiment.trial_transitions import (
    ENDED,
    PastEvent,
    Phase,
    Trial,
    after,
    is_overtaken,
    with_adopted,
    with_fork,
)
from prefect_tune.core.journal_events import (
    Absorbed,
    Adopted,
    Answered,
    AttemptEnded,
    Committed,
    Configured,
    Decided,
    Deletion,
    Entry,
    Event,
    FinishKind,
    Forked,
    ForkOrigin,
    GuestEvent,
    OneTrialsEvent,
    Opened,
    Owner,
    Quarantined,
    Question,
    Requeued,
    Resumed,
    SlotFreed,
    Started,
    StopAsked,
    TrialAdded,
    Writer,
)
from prefect_tune.core.reasons import AnyReason
from prefect_tune.core.storage.layout import JournalKey, TrialKey, boundaries, is_boundary, level_of
from prefect_tune.core.usage_records import RunRecord, ended_after, seen
from prefect_tune.core.values import Digest, StepReport, TrialId, Value

# A persistent mapping of an experiment's trials: one change costs the same with ten trials and with ten thousand.

_Changed: TypeAlias = "tuple[HashTrieSet[int], ...]"
_NONE: HashTrieSet[int] = HashTrieSet()
_MOST_SHOWN = 10


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class TrialMap(Mapping[str, Trial]):
    """Immutable trials by name, in the order in which they were added. A changed copy shares unchanged trials.

    It also records which trials changed since which segment boundary, for writing segments.
    """

    _numbers: HashTrieMap[str, int]
    """By name, the trial's number in the order in which they were added."""
    _trials: HashTrieMap[int, Trial]
    _changed: _Changed = (_NONE,)
    """Sets of trials' numbers. Those in the first set changed since the last boundary that ends with two zeros, those
    in the second between it and the last one that ends with three, and so on. A superfluous number costs bytes; a
    missing one would lose the change."""

    @classmethod
    def of(cls, trials: Iterable[Trial] = ()) -> TrialMap:
        """Return `trials`, in this order, each marked as changed."""
        found = cls(HashTrieMap(), HashTrieMap())
        for trial in trials:
            found = found.with_trial(trial)
        return found

    def with_trial(self, trial: Trial) -> TrialMap:
        """Return a copy with `trial` replaced, or added at the end if it is new."""
        number = self._numbers.get(trial.trial)
        numbers = self._numbers
        if number is None:
            number = len(numbers)
            numbers = numbers.insert(trial.trial, number)
        lately, *earlier = self._changed
        changed = self._changed if number in lately else (lately.insert(number), *earlier)
        return TrialMap(numbers, self._trials.insert(number, trial), changed)

    def at_boundary(self, number: int) -> TrialMap:
        """Return a copy after entry `number`, which ends a segment: the segments within it are merged into it."""
        changed = [*self._changed, *[_NONE] * (level_of(number) - len(self._changed))]
        for level in range(level_of(number) - 1):
            changed[level + 1] = changed[level + 1].update(changed[level])
            changed[level] = _NONE
        return TrialMap(self._numbers, self._trials, tuple(changed))

    def changed_in(self, number: int) -> Sequence[Trial]:
        """Return the trials for the segment that ends with the last entry, `number`, in the order of addition."""
        return [self._trials[each] for each in sorted(self._changed[level_of(number) - 1])]

    def with_segment(self, number: int, changed: Sequence[Trial]) -> TrialMap:
        """Return a copy after the next segment, the one at `number`, which holds `changed`."""
        numbers, trials = self._numbers, self._trials
        for trial in changed:
            if trial.trial not in numbers:
                numbers = numbers.insert(trial.trial, len(numbers))
            trials = trials.insert(numbers[trial.trial], trial)
        lately = HashTrieSet(numbers[trial.trial] for trial in changed)
        wider = self._changed[level_of(number) :]
        return TrialMap(numbers, trials, (*[_NONE] * (level_of(number) - 1), lately, *wider))

    def __getitem__(self, trial: str) -> Trial:
        return self._trials[self._numbers[trial]]

    def __contains__(self, trial: object) -> bool:
        return trial in self._numbers

    def __iter__(self) -> Iterator[str]:
        return (self._trials[number].trial for number in range(len(self._trials)))

    def __len__(self) -> int:
        return len(self._trials)

    def __eq__(self, other: object) -> bool:
        return self._trials == other._trials if isinstance(other, TrialMap) else dict(self) == other

    __hash__ = None  # type: ignore[assignment]  # as any mapping

    def __repr__(self) -> str:
        shown = [repr(each) for each in islice(self.values(), _MOST_SHOWN)]
        more = [f"and {len(self) - _MOST_SHOWN:,} more"] if len(self) > _MOST_SHOWN else []
        return f"Trials([{', '.join([*shown, *more])}])"

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Read and write JSON as a list of trials."""
        listed = handler.generate_schema(tuple[Trial, ...])
        read = core_schema.no_info_after_validator_function(cls.of, listed)
        return core_schema.json_or_python_schema(
            json_schema=read,
            python_schema=core_schema.union_schema([core_schema.is_instance_schema(cls), read]),
            serialization=core_schema.plain_serializer_function_ser_schema(_listed, return_schema=listed),
        )


def _listed(trials: TrialMap) -> tuple[Trial, ...]:
    return tuple(trials.values())


_Kept = TypeVar("_Kept")


class Experiment(Value):
    """The state of an experiment after the first `number` entries of its journal."""

    key: JournalKey
    """The key of the journal."""
    number: int = 0
    digest: str = ""
    """The digest of the last entry."""
    term: int = 0
    owner: Owner | None = None
    opened_at: int = 0
    """The number of the entry with which the present owner opened the experiment."""
    settled_from: int = 0
    """A manifest with a smaller sequence that no entry names is no checkpoint, and never becomes one."""
    settings: Mapping[str, object] = Field(default_factory=dict)
    """The parameters of the run that opened it last; see `Configured`."""
    extensions: Mapping[str, int] = Field(default_factory=dict)
    """How many samples each run has added, in the order of the runs; see `Configured.extensions`."""
    origin: ForkOrigin | None = None
    """The journal entry that it was forked from; None if it is no fork."""
    is_whole: bool = True
    """Whether the fork is complete; an incomplete one cannot be resumed."""
    is_removed: bool = False
    """Whether its deletion has begun."""
    warm_starts: Mapping[str, int] = Field(default_factory=dict)
    """The experiments that its search warm-starts from, each with the number of the entry that holds their trials."""
    warm_start_places: tuple[str, ...] = ()
    """The places of those experiments as events and assets name them, each once, in the order of their entries."""
    stop_requests: tuple[str, ...] = ()
    """The write ids of the stop requests that the owner has journaled, in order: the first is request 1."""
    stops: Mapping[str, AnyReason] = Field(default_factory=dict)
    """Trials that are asked to stop and have not ended yet, each with the reason."""
    ends: AnyReason = ""
    """Why the present owner stops the experiment early; empty while it does not."""
    restarts: int = 0
    """Restarts of its run in a row, not by a person, without a commit or a decision in between."""
    answers: tuple[Answered, ...] = ()
    """Answers of persons, oldest first."""
    questions: Mapping[TrialId, Question] = Field(default_factory=dict)
    """Questions of trials that are not answered yet."""
    past_count: int = 0
    """The number of events that are replayed to search and scheduler; see `Trial.past`."""
    runs: tuple[RunRecord, ...] = ()
    """When each run owned the experiment, the first one first; see `cost.cost_of`."""
    segment_digests: tuple[tuple[int, Digest], ...] = ()
    """The digests of the entries that end the segments of its history; see `boundaries`."""
    trials: TrialMap = Field(default_factory=TrialMap.of)
    """The trials by name, in the order in which they were added."""

    @property
    def name(self) -> str:
        """The experiment's name, whether this is its journal or that of one of its trials."""
        return self.key.experiment

    def opened_by(self) -> Opened:
        """Return the event with which the present owner opened the journal."""
        if self.owner is None:
            raise IllegalTransition(f"{self.key}: no owner has opened it yet")
        key = self.key
        return Opened(
            experiment=key.experiment,
            generation=key.generation,
            trial=key.trial,
            term=self.term,
            owner=self.owner,
            at=self.runs[-1].began_at if self.runs and self.runs[-1].term == self.term else None,
        )

    def trial_key(self, trial: str) -> TrialKey:
        """Return the key of a trial of the experiment."""
        return self.key.trial_key(trial)

    def trial(self, trial: str) -> Trial:
        """Return the trial; KeyError where there is none."""
        return self.trials[trial]


def nothing_yet(journal: JournalKey) -> Experiment:
    """Return the experiment of an empty journal: a fresh start is a resume from here."""
    return Experiment(key=journal)


def apply(
    experiment: Experiment,
    entry: Entry,
    digest: Digest,
    fold: Callable[[Experiment, Event, int, Writer], Experiment] | None = None,
) -> Experiment:
    """Return the experiment after `entry`, whose bytes have this digest.

    `fold` is called with each event in place of `after_event`.

    Raises:
        JournalCorrupt: the entry does not follow the last one, or one of its events is impossible.
    """
    _require_writer(experiment, entry)
    _require_successor(experiment, entry)
    next_of = fold or after_event
    try:
        for event in entry.events:
            experiment = next_of(experiment, event, entry.number, entry.writer)
    except IllegalTransition as impossible:
        raise JournalCorrupt(f"{experiment.key}, entry {entry.number}: {impossible}") from impossible
    experiment = experiment.model_copy(update={"number": entry.number, "digest": digest})
    return _at_boundary(experiment) if is_boundary(entry.number) else experiment


def following(experiment: Experiment, entry: Entry, digest: Digest) -> Experiment:
    """As `apply`, for an entry that is about to be written.

    Raises:
        SaveOvertaken: the entry commits a save that began before a checkpoint of its trial was quarantined.
    """
    _require_not_overtaken(experiment, entry)
    return apply(experiment, entry, digest)


def _require_not_overtaken(experiment: Experiment, entry: Entry) -> None:
    """Checked before writing only: reading takes a journal as it was written."""
    for event in entry.events:
        trial = experiment.trials.get(event.trial) if isinstance(event, Committed) else None
        if trial is not None and isinstance(event, Committed) and is_overtaken(trial, event.checkpoint.sequence):
            raise SaveOvertaken(
                f"{experiment.key}: step {event.checkpoint.step} of trial {trial.trial!r} was saved while a checkpoint "
                "was quarantined, and may share its damaged blobs: save it again"
            )


def _at_boundary(experiment: Experiment) -> Experiment:
    known = {**dict(experiment.segment_digests), experiment.number: experiment.digest}
    return experiment.model_copy(
        update={
            "segment_digests": tuple((number, known[number]) for number in boundaries(experiment.number)),
            "trials": experiment.trials.at_boundary(experiment.number),
        }
    )


def _require_successor(experiment: Experiment, entry: Entry) -> None:
    opens = bool(entry.events) and isinstance(entry.events[0], Opened)
    expected = (experiment.number + 1, experiment.digest, experiment.term + opens)
    found = (entry.number, entry.previous, entry.term)
    if found != expected:
        raise JournalCorrupt(
            f"{experiment.key}, entry {entry.number}: expected number, predecessor and term "
            f"{expected}, found {found}: an entry was lost, altered or copied from another journal"
        )


def _require_writer(experiment: Experiment, entry: Entry) -> None:
    """A guest's entry holds only what a guest may write: whoever can write to the target cannot end another's trial."""
    if entry.writer == "guest":
        found = [each.type for each in entry.events if not isinstance(each, GuestEvent) or _blames(each)]
        if found or not entry.events:
            raise JournalCorrupt(
                f"{experiment.key}, entry {entry.number}: expected events that a guest may write, found "
                f"{', '.join(found) or 'none'}"
            )


def _blames(event: GuestEvent) -> bool:
    return isinstance(event, Quarantined) and event.kills


def after_event(experiment: Experiment, event: Event, number: int, writer: Writer = "owner") -> Experiment:
    """Return the experiment after `event`, which `writer` has written, or will write, to entry `number`.

    Raises:
        IllegalTransition: the event is impossible in this state.
    """
    match event:
        case Opened():
            return _opened(experiment, event, number)
        case Adopted():
            return _adopted(experiment, event)
        case Configured():
            return _configured(experiment, event, number)
        case Forked():
            return _forked(experiment, event)
        case Deletion():
            return experiment.model_copy(update={"is_removed": not event.cancelled})
        case StopAsked():
            return _asked_to_stop(experiment, event)
        case Answered():
            return _answered(experiment, event)
        case TrialAdded():
            return _added(experiment, event)
        case Absorbed():
            return _absorbed(experiment, event)
        case _:
            trial = _known(experiment, event.trial)
            return _noted(experiment, trial, event, after(trial, event, number, writer))


def _opened(experiment: Experiment, event: Opened, number: int) -> Experiment:
    opens = JournalKey(experiment=event.experiment, generation=event.generation, trial=event.trial)
    if (opens, event.term) != (experiment.key, experiment.term + 1):
        raise IllegalTransition(f"it opens {opens} for owner {event.term}")
    restarts = experiment.restarts + 1 if _is_restart(experiment.owner, event.owner) else 0
    opened = {"term": event.term, "owner": event.owner, "opened_at": number, "ends": "", "restarts": restarts}
    if event.at is not None:
        run = RunRecord(term=event.term, began_at=event.at, slots=event.owner.slots)
        opened["runs"] = (*experiment.runs, run)
    return experiment.model_copy(update=opened)


def _is_restart(before: Owner | None, now: Owner) -> bool:
    """Return whether the same flow run was started again, and not by a person."""
    again = before is not None and now.flow_run is not None and now.flow_run == before.flow_run
    return again and not now.by_hand


def _answered(experiment: Experiment, event: Answered) -> Experiment:
    """Keep the answer, also to a question that is not open."""
    answered = (event.trial, event.key)
    open_ones = {name: each for name, each in experiment.questions.items() if (name, each.key) != answered}
    return experiment.model_copy(update={"answers": (*experiment.answers, event), "questions": open_ones})


def _configured(experiment: Experiment, event: Configured, number: int) -> Experiment:
    if known := event.extensions.keys() & experiment.extensions.keys():
        raise IllegalTransition(f"run {min(known)} has added its samples before")
    places = (each.place for each in event.warm_starts if each.place is not None)
    return experiment.model_copy(
        update={
            "settings": event.settings,
            "extensions": {**experiment.extensions, **event.extensions},
            "warm_starts": {**experiment.warm_starts, **{each.source: number for each in event.warm_starts}},
            "warm_start_places": tuple(dict.fromkeys((*experiment.warm_start_places, *places))),
        }
    )


def _asked_to_stop(experiment: Experiment, event: StopAsked) -> Experiment:
    if event.request is not None:
        experiment = experiment.model_copy(update={"stop_requests": (*experiment.stop_requests, event.request)})
    if event.refused is not None:
        return experiment
    if event.trial is None:
        return experiment.model_copy(update={"ends": event.reason})
    if _known(experiment, event.trial).phase in ENDED:
        raise IllegalTransition(f"trial {event.trial!r} has ended: it cannot be asked to stop")
    return experiment.model_copy(update={"stops": {**experiment.stops, event.trial: event.reason}})


def _adopted(experiment: Experiment, event: Adopted) -> Experiment:
    """From this entry on, only manifests of the present owner can be commits."""
    for name in {**event.checkpoints, **event.reached}:
        trial = _known(experiment, name)
        experiment = _with(experiment, with_adopted(trial, event, has_own_journal=trial.own_journal))
    runs = seen(experiment.runs, event.seen_at)
    return experiment.model_copy(update={"settled_from": experiment.opened_at, "runs": runs})


def _forked(experiment: Experiment, event: Forked) -> Experiment:
    if event.trials is None:
        if experiment.trials or experiment.origin is not None:
            raise IllegalTransition(f"it cannot become a fork of {event.origin}: it has trials or an origin already")
        return experiment.model_copy(update={"origin": event.origin, "is_whole": False})
    for name, forked in event.trials.items():
        experiment = _with(experiment, with_fork(_known(experiment, name), forked))
    return experiment.model_copy(update={"is_whole": True})


def _added(experiment: Experiment, event: TrialAdded) -> Experiment:
    if event.trial in experiment.trials:
        raise IllegalTransition(f"trial {event.trial!r} was added before")
    fields = event.model_dump(include={"trial", "config", "fingerprint", "own_journal"})
    new = Trial.model_validate(fields)
    return _with_past(experiment, new, PastEvent(order=experiment.past_count + 1, what="added"))


def _absorbed(experiment: Experiment, event: Absorbed) -> Experiment:
    """Apply an entry of the trial's own journal; its configuration, owners and deletion are known here already."""
    trial = _known(experiment, event.trial)
    if event.number != trial.absorbed + 1:
        raise IllegalTransition(
            f"trial {trial.trial!r}: expected entry {trial.absorbed + 1} of its journal, found entry {event.number}"
        )
    for each in event.events:
        trial = experiment.trial(trial.trial)
        match each:
            case Opened(owner=owner):
                experiment = _with(experiment, trial.model_copy(update={"search_term": owner.search_term}))
            case TrialAdded() | Deletion():
                continue
            case Adopted():
                experiment = _with(experiment, with_adopted(trial, each))
            case _ if each.trial != event.trial:
                raise IllegalTransition(f"trial {event.trial!r}: its journal has an event of trial {each.trial!r}")
            case _:
                experiment = _noted(experiment, trial, each, after(trial, each, event.number, event.writer))
    return _with(experiment, experiment.trial(trial.trial).model_copy(update={"absorbed": event.number}))


def _noted(experiment: Experiment, before: Trial, event: OneTrialsEvent, now: Trial) -> Experiment:
    """Record what is replayed to search and scheduler when the experiment is resumed, and an open question."""
    if isinstance(event, AttemptEnded) and event.question is not None:  # in place of an older one
        experiment = experiment.model_copy(update={"questions": {**experiment.questions, event.trial: event.question}})
    order = experiment.past_count + 1
    match event:
        case Decided(report=report, decision=decision):
            past_event = PastEvent(order=order, what="decided", report=report, decision=decision)
        case Resumed():
            past_event = PastEvent(order=order, what="resumed")
        case Requeued() if before.phase in ENDED:
            past_event = PastEvent(order=order, what="added")
        case _ if now.phase in ENDED and before.phase not in ENDED:
            last = StepReport(step=now.step, metrics=now.metrics, trained_seconds=now.trained_seconds)
            past_event = PastEvent(
                order=order,
                what="ended",
                report=last if now.step else None,
                failed=now.phase is Phase.ERRORED,
                stopped=now.phase is Phase.FINISHED and now.finish_kind is FinishKind.PRUNED,
            )
        case Committed():
            return _progressed(_with(experiment, now))
        case Started():
            return _with(experiment, _with_record(now, event.attempt, term=now.search_term or experiment.term))
        case SlotFreed(attempt=attempt, since=since, seconds=seconds):
            runs = ended_after(experiment.runs, since, seconds)
            freed = _with_record(now, attempt, slot_term=experiment.term)
            return _with(experiment, freed).model_copy(update={"runs": runs})
        case _:
            return _with(experiment, now)
    noted = _with_past(experiment, now, past_event)
    return _progressed(noted) if past_event.what in ("decided", "ended") else noted


def _with_record(trial: Trial, attempt: int, **terms: int) -> Trial:
    records = tuple(each.model_copy(update=terms) if each.attempt == attempt else each for each in trial.records)
    return trial.model_copy(update={"records": records})


def _progressed(experiment: Experiment) -> Experiment:
    return experiment.model_copy(update={"restarts": 0}) if experiment.restarts else experiment


def _with_past(experiment: Experiment, trial: Trial, past_event: PastEvent) -> Experiment:
    past = (*trial.past, past_event)
    return _with(experiment, trial.model_copy(update={"past": past})).model_copy(
        update={"past_count": past_event.order}
    )


def _known(experiment: Experiment, trial: str) -> Trial:
    if trial not in experiment.trials:
        raise IllegalTransition(f"trial {trial!r} was never added")
    return experiment.trials[trial]


def _with(experiment: Experiment, trial: Trial) -> Experiment:
    changed: dict[str, object] = {"trials": experiment.trials.with_trial(trial)}
    if trial.trial in experiment.stops and trial.phase in ENDED:
        changed["stops"] = _but_for(trial.trial, experiment.stops)
    if trial.trial in experiment.questions and trial.phase in ENDED:
        changed["questions"] = _but_for(trial.trial, experiment.questions)
    return experiment.model_copy(update=changed)


def _but_for(trial: str, named: Mapping[str, _Kept]) -> dict[str, _Kept]:
    return {name: kept for name, kept in named.items() if name != trial}
