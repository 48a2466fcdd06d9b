"""Fork an experiment: a new one continues from any entry of its journal, without copying the bytes of checkpoints.

A fork begins with the state of the origin's journal at that entry. Of a trial, that is what the experiment's journal
had absorbed by then: later entries of the trial's own journal, and earlier ones not absorbed yet, are not part of
it. The origin is only written to as a guest, so it may be running.

The first entry of the fork's journal names the origin. Then each trial gets a journal of its own, with its history
and clones of its checkpoints. The last entry holds all the origin's events and completes the fork. An incomplete
fork cannot be used; forking again under the same name completes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from prefect_tune.core.errors import CheckpointCorrupt, CheckpointNotFound, InvalidInput
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import Trial, is_held, is_live
from prefect_tune.core.journal.journal import append, as_of, history, load, take_over
from prefect_tune.core.journal.segments import write_due_segment
from prefect_tune.core.journal_events import (
    Absorbed,
    Adopted,
    CheckpointRef,
    Cloned,
    Configured,
    Deletion,
    Event,
    Forked,
    ForkedTrial,
    ForkOrigin,
    Opened,
    Owner,
    StopAsked,
    WarmStart,
)
from prefect_tune.core.operations.clone import clone
from prefect_tune.core.storage.layout import CheckpointKey, JournalKey
from prefect_tune.core.storage.object_store import ObjectStore, ParallelMap, require_conditional_create
from prefect_tune.core.values import Stamp

# A stop request that was not carried out by then was meant for the origin.
_NOT_OF_THE_PAST = Opened | Adopted | Configured | StopAsked | Deletion
_NOT_OF_A_TRIALS_PAST = Opened | Absorbed | Deletion


@dataclass(frozen=True, slots=True)
class Past:
    """The state of an experiment after an entry of its journal, and the events of its trials up to it."""

    experiment: Experiment
    events: Sequence[Event]
    settings: Mapping[str, object]
    """The parameters of the fork."""
    warm_starts: Sequence[WarmStart]

    @property
    def origin(self) -> ForkOrigin:
        """The entry that is forked."""
        found = self.experiment
        return ForkOrigin(
            experiment=found.name, generation=found.key.generation, number=found.number, digest=found.digest
        )

    @property
    def configured(self) -> Configured:
        """The event that has the parameters of the fork, and all samples and warm starts of the origin."""
        known = self.experiment.extensions
        return Configured(settings=self.settings, extensions=known, warm_starts=tuple(self.warm_starts))


@dataclass(frozen=True, slots=True)
class Fork:
    """A complete fork, and the checkpoints of its past that the origin had deleted already."""

    experiment: Experiment
    lost: Mapping[str, Sequence[CheckpointRef]] = field(default_factory=dict)
    """By trial, oldest first."""


def past_of(store: ObjectStore, experiment: JournalKey, number: int | None, *, side_by_side: ParallelMap) -> Past:
    """Return the past of `experiment` up to entry `number` (None: up to its last entry).

    Raises:
        InvalidInput: there is no such entry, the experiment is being deleted, is an incomplete fork, or has trials
            without journals of their own.
        JournalCorrupt: its journal is inconsistent.
    """
    found, entries = as_of(store, experiment, number, side_by_side=side_by_side)
    if found.is_removed:
        raise InvalidInput(f"{experiment} is being deleted: there is nothing to fork")
    if not found.is_whole:
        raise InvalidInput(f"{experiment} is an incomplete fork: fork its origin, or complete it first")
    if not all(trial.own_journal for trial in found.trials.values()):
        raise InvalidInput(f"{experiment} is not a search: only searches can be forked")
    events = [event for entry in entries for event in entry.events]
    warm_starts = [each for event in events if isinstance(event, Configured) for each in event.warm_starts]
    return Past(found, list(filter(_is_of_the_past, events)), found.settings, warm_starts)


def _is_of_the_past(event: Event) -> bool:
    """Return whether a fork copies the event of its origin, which may be a fork itself."""
    return not isinstance(event, _NOT_OF_THE_PAST) and not (isinstance(event, Forked) and event.trials is None)


def deleted_since(
    store: ObjectStore, past: Past, *, side_by_side: ParallelMap
) -> Mapping[str, Sequence[CheckpointRef]]:
    """Return by trial the checkpoints of the past that the origin has retired since."""
    saved = [trial for trial in past.experiment.trials.values() if trial.checkpoints]
    gone = side_by_side(lambda trial: (trial.trial, _gone(store, past.experiment.key, trial)), saved)
    return {trial: refs for trial, refs in gone if refs}


def _gone(store: ObjectStore, origin: JournalKey, then: Trial) -> Sequence[CheckpointRef]:
    folder = origin.trial_key(then.trial)
    now = load(store, folder.journal, side_by_side=map).trial(then.trial)
    keys = [(ref, folder.checkpoint_key(ref)) for ref in then.checkpoints]
    return [ref for ref, key in keys if not (is_live(now, key) or is_held(now, key))]


def begin_fork(
    store: ObjectStore, into: JournalKey, origin: ForkOrigin, owner: Owner, stamp: Stamp, *, side_by_side: ParallelMap
) -> Experiment:
    """Open the experiment `into` to make it a fork of `origin`, or because it is one already.

    A second call for an incomplete fork opens the same fork.

    Raises:
        InvalidInput: the name belongs to another experiment, or to a fork of another entry, or is being deleted.
        StoreRefused: the target supports one writer only, but a fork has to write to the origin's journals.
        Superseded: another process makes the same fork.
    """
    require_conditional_create(store, origin.key)

    def also(found: Experiment) -> Sequence[Event]:
        if not found.number:
            return [Forked(origin=origin)]
        if found.is_removed:
            raise InvalidInput(f"{into} is being deleted: use another name, or finish the deletion first")
        if found.origin != origin:
            what = f"a fork of {found.origin}" if found.origin else "no fork"
            raise InvalidInput(f"{into}: expected a fork of {origin}, found {what}: use another name")
        return []

    return take_over(store, into, owner, stamp, side_by_side=side_by_side, also=also)


def fork(store: ObjectStore, past: Past, into: Experiment, stamp: Stamp, *, side_by_side: ParallelMap) -> Fork:
    """Make the experiment that `begin_fork` opened a fork of `past`, and return the complete fork.

    If it is killed at any time, call `begin_fork` and this again: what exists already is kept.

    Raises:
        InvalidInput: a trial's folder holds remains of another experiment, or the origin is being deleted.
        Superseded: another process makes the same fork.
        StoreUnavailable, CommitUnknown: call again, with the same stamp.
    """
    if into.is_whole:
        return Fork(into)
    trials = list(past.experiment.trials.values())
    histories = _histories(past.events)
    made = list(side_by_side(lambda trial: _forked(store, past, into, trial, histories, stamp), trials))
    _require_stays(store, past, into, side_by_side)
    names = list(past.experiment.trials)
    forked = Forked(origin=past.origin, trials={name: each for name, (each, _) in zip(names, made, strict=True)})
    whole = append(store, into, [past.configured, *past.events, forked], stamp)
    write_due_segment(store, whole)
    return Fork(whole, {name: lost for name, (_, lost) in zip(names, made, strict=True) if lost})


def _require_stays(store: ObjectStore, past: Past, into: Experiment, side_by_side: ParallelMap) -> None:
    """Raise if the origin is being deleted.

    A deletion first journals itself, then looks for claims; a fork first claims, then calls this: one sees the other.
    """
    origin = past.experiment.key
    now = load(store, origin, side_by_side=side_by_side)
    if now.is_removed or now.number < past.experiment.number:
        raise InvalidInput(f"{origin} is being deleted: {into.name!r} is no fork of it; delete {into.name!r}, too")


def _histories(events: Sequence[Event]) -> Mapping[str, Sequence[Event]]:
    """Return by trial the absorbed events of its own journal."""
    found: dict[str, list[Event]] = {}
    for event in events:
        if isinstance(event, Absorbed):
            own = (each for each in event.events if not isinstance(each, _NOT_OF_A_TRIALS_PAST))
            found.setdefault(event.trial, []).extend(own)
        elif isinstance(event, Forked):
            for trial, forked in (event.trials or {}).items():
                found.setdefault(trial, []).append(Forked(origin=event.origin, trials={trial: forked}))
    return found


def _forked(
    store: ObjectStore,
    past: Past,
    into: Experiment,
    trial: Trial,
    histories: Mapping[str, Sequence[Event]],
    stamp: Stamp,
) -> tuple[ForkedTrial, Sequence[CheckpointRef]]:
    """Give a trial its own journal, if it had one; return its checkpoints in the fork, and those that were lost."""
    if not trial.absorbed:
        return ForkedTrial(), ()
    begins = Forked(origin=past.origin, trials={trial.trial: ForkedTrial()})
    state = _opened(store, into, trial.trial, (*histories[trial.trial], begins), stamp)
    lost: list[CheckpointRef] = []
    for ref, source in _missing(store, past.experiment.key, trial, state):
        inherited = _inherited(store, ref, source, state, _numbered(stamp, state))
        if inherited is None:
            lost.append(ref)
            continue
        state = append(store, state, [inherited], _numbered(stamp, state))
        write_due_segment(store, state)
    there = state.trial(trial.trial)
    return ForkedTrial(checkpoints=there.checkpoints, absorbed=state.number), lost


def _opened(store: ObjectStore, into: Experiment, trial: str, first: Sequence[Event], stamp: Stamp) -> Experiment:
    if into.owner is None:
        raise InvalidInput(f"{into.key}: no owner has opened it")
    key = into.key.of_trial(trial)
    also = partial(_unless_there, first=first)
    opened = take_over(store, key, into.owner, stamp, side_by_side=map, also=also)
    entry = history(store, key, side_by_side=map)[0] if opened.term > 1 else None
    if entry is not None and entry.events[1:] != first:
        raise InvalidInput(f"{key.folder}: holds remains of another experiment: use another name for the fork")
    return opened


def _unless_there(found: Experiment, *, first: Sequence[Event]) -> Sequence[Event]:
    return () if found.number else first


def _missing(
    store: ObjectStore, origin: JournalKey, trial: Trial, state: Experiment
) -> Iterator[tuple[CheckpointRef, CheckpointKey]]:
    """Yield the checkpoints of the origin's trial that the fork's trial has not inherited yet, oldest first."""
    entries = history(store, state.key, side_by_side=map) if state.number > 1 else ()
    events = (event for entry in entries for event in entry.events)
    there = {event.source for event in events if isinstance(event, Cloned) and event.inherited}
    folder = origin.trial_key(trial.trial)
    for ref in trial.checkpoints:
        source = folder.checkpoint_key(ref)
        if source not in there:
            yield ref, source


def _inherited(
    store: ObjectStore, ref: CheckpointRef, source: CheckpointKey, state: Experiment, stamp: Stamp
) -> Cloned | None:
    """Clone a checkpoint; None where its bytes are deleted or damaged."""
    trial = source.trial.trial
    try:
        copy = clone(store, source, state, trial, stamp, side_by_side=map)
    except (CheckpointNotFound, CheckpointCorrupt):
        return None
    copy = copy.model_copy(update={"pinned": ref.pinned})
    return Cloned(trial=trial, checkpoint=copy, source=source, inherited=True)


def _numbered(stamp: Stamp, state: Experiment) -> Stamp:
    """Return the stamp of the next entry: different for each entry, the same for another try."""
    return Stamp(write_id=f"{stamp.write_id}-{state.number}", at=stamp.at)
