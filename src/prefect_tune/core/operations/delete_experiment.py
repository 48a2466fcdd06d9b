"""Delete a whole experiment; refuse while other experiments need its checkpoints, and release what it needs of others.

    every journal sealed ──► no claim left ──► own claims released ──► marker of the next generation ──► first entry
        └──► a claim: cancelled, the experiment lives on                                                  └──► the rest

First the deletion takes over every journal, the experiment's and then its trials' own, and writes a `Deletion` to
each: the old owner's next write fails, the experiment cannot be opened, and its checkpoints cannot be cloned. In each
journal a claim comes either before that entry, and is found, or after it, and is refused. If a claim is found, the
deletion is cancelled. If none is, it ends the generation (`generations`): from then on it cannot be cancelled, the name
is free, and everything below that generation is garbage, which any deletion of the name, or maintenance, collects.

A deletion is bound to the generation that it found. If it is paused, finished by another one, and continues after the
name was used again, it meets the marker or the missing first entry of its generation, and deletes garbage only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from prefect_tune.core.errors import (
    CheckpointCorrupt,
    CheckpointNotFound,
    InvalidInput,
    JournalCorrupt,
    StoreUnavailable,
    Superseded,
    UnknownVersion,
)
from prefect_tune.core.experiment.experiment import Experiment, nothing_yet
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.journal.journal import LoadedJournal, append, earlier_owners, load, read, take_over
from prefect_tune.core.journal_events import Claim, Deletion, Event, Owner
from prefect_tune.core.operations.clone import release_all, settle
from prefect_tune.core.restore import read_manifest
from prefect_tune.core.storage.generations import (
    current_journal,
    delete_objects_before,
    end_generation,
    is_deleted,
    objects_before,
)
from prefect_tune.core.storage.layout import CheckpointKey, JournalKey, TrialKey, number_in
from prefect_tune.core.storage.object_store import ObjectStore, ParallelMap
from prefect_tune.core.values import Stamp

_ROUNDS = 16
_PARTS_OF_A_TRIALS_ENTRY = 6


@dataclass(frozen=True, slots=True)
class _Removal:
    """The arguments of `remove`: the experiment to delete, its store, and the process that deletes it."""

    store: ObjectStore
    key: JournalKey
    owner: Owner
    stamp: Stamp
    side_by_side: ParallelMap


def remove(store: ObjectStore, experiment: JournalKey, owner: Owner, stamp: Stamp, *, side_by_side: ParallelMap) -> int:
    """Delete a generation of an experiment, and what is left of those before; a process that runs it is superseded.

    Returns the number of deleted objects. If it is killed at any time, a second call finishes the deletion. What stays
    is the marker of the next generation, which takes 300 bytes, and some 40 for each run that owned it.

    Raises:
        InvalidInput: other experiments refer to bytes of its checkpoints; nothing was deleted.
        JournalCorrupt: its journal, or that of one of its trials, is corrupt; nothing was deleted.
        Superseded: another process deletes it, too.
        StoreUnavailable, CommitUnknown: call again, with the same stamp.
    """
    removal = _Removal(store, experiment, owner, stamp, side_by_side)
    released = 0
    if not is_deleted(store, experiment):
        if (known := _read(removal, experiment)) is None:
            return 0
        released = _ended(removal, known)
    return released + _collected(removal)


def generation_to_delete(store: ObjectStore, experiment: str) -> JournalKey | None:
    """Return the generation that a deletion of the name would delete; None if there is nothing to delete.

    That is the current one, or, if that has no experiment, the one before it whose deletion has left objects.

    Raises:
        UnknownVersion: as `current_journal`.
    """
    current = current_journal(store, experiment)
    if store.list(current.entries):
        return current
    if objects_before(store, experiment, current.generation):
        return JournalKey(experiment=experiment, generation=current.generation - 1)
    return None


def _ended(removal: _Removal, known: LoadedJournal) -> int:
    """End the generation, after which nothing cancels the deletion; return the number of objects deleted elsewhere."""
    before = [] if known.experiment.is_removed else _with_trials(removal, known)
    _require_unneeded(removal, [each.experiment for each in before])  # before a running owner is superseded
    sealed = _sealed(removal, known, before)
    try:
        _require_unneeded(removal, sealed)
    except InvalidInput:
        _give_up(removal, sealed)
        raise
    _seal_what_has_not_begun(removal, sealed)
    listed = [each.path for each in removal.store.list(removal.key.folder)]
    released = _release_claims(removal, sealed, listed)
    writers = _writers(removal, next(each for each in sealed if each.key == removal.key))
    end_generation(removal.store, removal.key, at=removal.stamp.at, by=str(removal.owner), writers=writers)
    return released


def _writers(removal: _Removal, whole: Experiment) -> Sequence[str]:
    """Return the identities of the experiment's owners, without those of the run that deletes it: it knows of it."""
    by = removal.owner
    try:
        owners = earlier_owners(removal.store, whole, side_by_side=removal.side_by_side)
    except JournalCorrupt:  # an entry of old that segments stand for is damaged, and must not make it undeletable
        return ()
    others = (each for each in owners if (each.host, each.pid) != (by.host, by.pid))
    return [each.identity for each in others if each.flow_run is None or each.flow_run != by.flow_run]


def _collected(removal: _Removal) -> int:
    """Delete every object of dead generations, and those that superseded processes write meanwhile."""
    key, deleted = removal.key, 0
    for _ in range(_ROUNDS):
        if not (found := delete_objects_before(removal.store, key.experiment, key.generation + 1)):
            return deleted
        deleted += len(found)
    raise StoreUnavailable(f"{key}: new objects appeared after each of {_ROUNDS} deletions; try again")


# ------------------------------------------------------------------------------------------------- journals


def _read(removal: _Removal, key: JournalKey) -> LoadedJournal | None:
    """Return the journal; None where there is none."""
    mapper = removal.side_by_side if key == removal.key else map
    found = read(removal.store, key, side_by_side=mapper)
    return found if found.experiment.number else None


def _with_trials(removal: _Removal, known: LoadedJournal) -> Sequence[LoadedJournal]:
    """Return the experiment's journal, and its trials' own journals."""
    keys = [removal.key.of_trial(each.trial) for each in known.experiment.trials.values() if each.own_journal]
    own = removal.side_by_side(lambda key: _read(removal, key), keys)
    return [known, *(each for each in own if each is not None)]


def _sealed(removal: _Removal, known: LoadedJournal, before: Sequence[LoadedJournal]) -> Sequence[Experiment]:
    """Take over every existing journal to delete it. The experiment's comes first: after that no trial is added."""
    whole = _seal(removal, known)
    there = {each.experiment.key: each for each in before}
    keys = _trials_listed(removal)
    own = removal.side_by_side(lambda key: there.get(key) or _read(removal, key), keys)
    found = [each for each in own if each is not None]
    return [whole, *removal.side_by_side(lambda each: _seal(removal, each), found)]


def _trials_listed(removal: _Removal) -> Sequence[JournalKey]:
    """Return the trials' own journals by a listing: the journal of an incomplete fork does not name its trials."""
    listed = (_journal_at(removal, each.path) for each in removal.store.list(f"{removal.key.folder}/trials"))
    return list(dict.fromkeys(key for key in listed if key is not None))


def _journal_at(removal: _Removal, path: str) -> JournalKey | None:
    """Return the journal that `path` is an entry of; None if it is no entry."""
    parts = path.split("/")
    key = removal.key.of_trial(parts[3]) if len(parts) == _PARTS_OF_A_TRIALS_ENTRY else removal.key
    return key if path.startswith(f"{key.entries}/") and number_in(key.entries, path) is not None else None


def _seal(removal: _Removal, known: LoadedJournal) -> Experiment:
    """Take over a journal to delete it. If an earlier try of this call cancelled the deletion, begin it again."""
    key, store, stamp = known.experiment.key, removal.store, removal.stamp
    mapper = removal.side_by_side if key == removal.key else map
    opened = take_over(store, key, removal.owner, stamp, side_by_side=mapper, also=_removal_begun, known=known)
    return opened if opened.is_removed else append(store, opened, [Deletion()], _further(stamp, "again"))


def _removal_begun(found: Experiment) -> Sequence[Event]:
    del found
    return [Deletion()]


def _further(stamp: Stamp, what: str) -> Stamp:
    """Return the stamp of an entry after the opening: another try has the same."""
    return Stamp(write_id=f"{stamp.write_id}-{what}", at=stamp.at)


def _seal_what_has_not_begun(removal: _Removal, sealed: Sequence[Experiment]) -> None:
    """Create the journals of trials not begun yet, marked as removed: a supervisor that opens one later is refused."""
    there = {state.key for state in sealed}
    trials = [
        trial for state in sealed if state.key == removal.key for trial in state.trials.values() if trial.own_journal
    ]
    keys = [key for trial in trials if (key := removal.key.of_trial(trial.trial)) not in there]
    list(removal.side_by_side(partial(_seal_if_not_begun, removal), keys))


def _seal_if_not_begun(removal: _Removal, key: JournalKey) -> None:
    if not removal.store.list(key.entries):  # entries without an opened journal are left of an earlier deletion
        _seal(removal, LoadedJournal(nothing_yet(key)))


def _give_up(removal: _Removal, sealed: Sequence[Experiment]) -> None:
    """Cancel the deletion in every journal, the experiment's last: until then another call cancels it again."""

    def keep(state: Experiment) -> None:
        append(removal.store, state, [Deletion(cancelled=True)], _further(removal.stamp, "kept"))

    list(removal.side_by_side(keep, [state for state in sealed if state.key != removal.key]))
    for state in sealed:
        if state.key == removal.key:
            keep(state)


# --------------------------------------------------------------------------------------------------- claims


def _require_unneeded(removal: _Removal, states: Sequence[Experiment]) -> None:
    trials = [(state.key, trial) for state in states for trial in state.trials.values() if trial.claims]
    recorded_here = [trial for key, trial in trials if key.trial is not None or not trial.own_journal]
    needed = [
        claim for found in removal.side_by_side(lambda trial: _needed(removal, trial), recorded_here) for claim in found
    ]
    if needed:
        others = ", ".join(sorted({repr(claim.clone.trial.experiment) for claim in needed}))
        raise InvalidInput(
            f"{removal.key} holds the bytes of {len(needed)} checkpoints of {others}: delete these first, or keep it"
        )


def _needed(removal: _Removal, trial: Trial) -> Sequence[Claim]:
    """Return the claims of other experiments that are not over."""
    key = removal.key.trial_key(trial.trial)
    theirs = [each for each in trial.claims if each.clone.trial.of_experiment != removal.key]
    if not theirs:
        return ()
    named = [key.checkpoint_key(each) for each in theirs]
    left = settle(removal.store, key, named, removal.stamp, side_by_side=map).claims
    return [each for each in left if each in theirs and not _is_gone(removal.store, each)]


def _is_gone(store: ObjectStore, claim: Claim) -> bool:
    """Return whether the clone's journals no longer exist: they existed before the claim, so they were deleted."""
    journals = (claim.clone.trial.of_experiment, claim.journal)
    return not any(store.list(key.entries) for key in journals)


def _release_claims(removal: _Removal, sealed: Sequence[Experiment], listed: Sequence[str]) -> int:
    """Release this experiment's claims in the experiments that it was forked from.

    Its manifests name them; for clones without a manifest, or with a damaged one, its journal names the origins.
    """
    held = _held_elsewhere(removal, listed)
    trials = [state.key.trial for state in sealed if state.key.trial is not None]
    for origin in _origins(removal, sealed):
        for trial in trials:
            held.setdefault(origin.trial_key(trial), [])
    release = partial(_release_in, removal)
    return sum(removal.side_by_side(release, held.items()))


def _release_in(removal: _Removal, held: tuple[TrialKey, Sequence[CheckpointKey]]) -> int:
    return release_all(removal.store, removal.stamp, held[0], removal.key, held[1])


def _held_elsewhere(removal: _Removal, listed: Sequence[str]) -> dict[TrialKey, list[CheckpointKey]]:
    """Return by trial the checkpoints of other experiments whose bytes this experiment's manifests refer to."""
    held: dict[TrialKey, list[CheckpointKey]] = {}
    for origin in removal.side_by_side(partial(_origin, removal.store), _manifests(removal, listed)):
        if origin is not None and origin.trial.of_experiment != removal.key:
            held.setdefault(origin.trial, []).append(origin)
    return held


def _manifests(removal: _Removal, listed: Sequence[str]) -> Iterator[CheckpointKey]:
    for path in listed:
        if path.startswith(f"{removal.key.folder}/trials/"):
            trial = removal.key.trial_key(path.split("/")[3])
            if (key := CheckpointKey.from_manifest_path(trial, path)) is not None:
                yield key


def _origin(store: ObjectStore, key: CheckpointKey) -> CheckpointKey | None:
    try:
        return read_manifest(store, key).origin
    except (CheckpointNotFound, CheckpointCorrupt):
        return None


def _origins(removal: _Removal, sealed: Sequence[Experiment]) -> Sequence[JournalKey]:
    """Return its origin, the origin's origin, and so on: the bytes may be stored in any of them."""
    found: list[JournalKey] = []
    origin = next((state.origin for state in sealed if state.key == removal.key), None)
    while origin is not None and origin.key not in (removal.key, *found):
        found.append(origin.key)
        try:
            origin = load(removal.store, origin.key, side_by_side=removal.side_by_side).origin
        except (JournalCorrupt, Superseded, UnknownVersion):
            break  # its own origin is unknown then
    return found
