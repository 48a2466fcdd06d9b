"""Collect the garbage of trials: the bytes of retired checkpoints, remains of interrupted saves, old messages.

There is no grace period, and no reachable object is deleted. An unreachable object may be deleted once a barrier of
its trial is journaled after the object's save began; each retirement is a barrier (see `is_deletable_checkpoint`). No
object name is used twice, so a late deletion, by a process or request that seemed lost, cannot delete a newer object.

- **The owner** writes retirements, which are barriers, and deletes the retired checkpoints (`delete_retired_objects`).
- **A non-owner**, such as maintenance, collects whole trials (`collect_experiment_garbage`). While no attempt of a
  trial can save, a non-owner is allowed to write a barrier (`CheckpointsRetired`). The journal orders all entries, so
  the trial's next attempt starts after the barrier. An attempt with an open outbox can save at any time, and writes its
  own barriers. On a target that supports only one writer, non-owners write no entries. They delete only the objects
  that need no new barrier, and `TrialGarbage.kept_reason` says why other objects stay.
- **A clone** is an entry, not an object: it keeps the bytes of its origin, a checkpoint of another trial, even if the
  origin is retired. Once the last clone of a retired origin is retired, the origin is deleted like any other checkpoint
  of its trial (`find_collectable_origins`).
- **Messages.** The posts of trials on other machines, and the answers to them, are also stored on the target. The
  numbers of attempts and outboxes only increase, so the messages of an ended attempt may be deleted at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from prefect_tune.core.checkpoints.manifest import Manifest
from prefect_tune.core.errors import CheckpointCorrupt, CheckpointNotFound, Superseded
from prefect_tune.core.experiment.experiment import Experiment, apply_event
from prefect_tune.core.experiment.retention import Retention, find_quarantined_to_retire, find_sequences_to_retire
from prefect_tune.core.experiment.summary import find_best_trial, objective_from_settings
from prefect_tune.core.experiment.trial_transitions import (
    ENDED_PHASES,
    Trial,
    apply_trial_event,
    is_deletable_checkpoint,
    is_live_checkpoint,
    is_quarantined_checkpoint,
    list_live_checkpoint_keys,
)
from prefect_tune.core.journal.journal import append_as_non_owner, load_experiment
from prefect_tune.core.journal.outbox import list_journaled_posts
from prefect_tune.core.journal_events import CheckpointRef, CheckpointsRetired
from prefect_tune.core.messages.target_messages import list_answers, list_node_objects
from prefect_tune.core.operations.scrub import UnreadableObject, run_or_report_unreadable
from prefect_tune.core.prefect_events import find_best_checkpoints
from prefect_tune.core.restore import OutdatedStateError, raise_damage_or_outdated, read_manifest
from prefect_tune.core.storage.generations import delete_earlier_objects, list_earlier_objects
from prefect_tune.core.storage.layout import CheckpointKey, JournalKey, TrialKey, blob_sequence
from prefect_tune.core.storage.object_store import SINGLE_WRITER_MESSAGE, ListedObject, ObjectStore
from prefect_tune.core.values import WriteStamp

_Result = TypeVar("_Result")


# Find the objects that a trial no longer needs.


def delete_retired_objects(
    store: ObjectStore, trial: TrialKey, state: Trial, to_delete: Collection[CheckpointKey]
) -> int:
    """Delete retired checkpoints of `trial`: first blobs that no other checkpoint needs, then metadata and manifests.

    Returns the number of deleted blobs and manifests. Manifests are deleted last, so that the next call finds and
    finishes an interrupted deletion. Skips checkpoints that must not be deleted yet, and those of other trials.

    If another process has retired and deleted checkpoints that `state` still has, the journal is read again.

    Raises:
        CheckpointCorrupt: the manifest of a live checkpoint, or of a clone's origin, is missing or unreadable.
            Nothing is deleted, because it is unknown which blobs this checkpoint needs.
        Superseded: the experiment is being deleted, or was deleted.
    """

    def read_blob_paths(key: CheckpointKey) -> tuple[CheckpointKey, frozenset[str] | None]:
        try:
            return key, read_manifest(store, key).blob_paths()
        except CheckpointNotFound:
            return key, None  # deleted already
        except CheckpointCorrupt:
            return key, frozenset()  # the manifest is deleted, although unreadable; the blobs become orphans

    while True:
        try:
            keys = [key for key in to_delete if key.trial == trial and is_deletable_checkpoint(state, key)]
            blobs = {key: paths for key, paths in store.map(read_blob_paths, keys) if paths is not None}
            if not blobs:
                return 0
            unneeded = sorted(frozenset().union(*blobs.values()) - _find_reachable_blobs(store, trial, state))
        except OutdatedStateError as outdated:
            state = outdated.current
            continue
        store.delete(unneeded)
        _delete_manifests(store, keys)
        return len(unneeded) + len(blobs)


def _delete_manifests(store: ObjectStore, keys: Collection[CheckpointKey]) -> None:
    if keys:
        store.delete([listed.path for key in keys for listed in store.list(key.metadata_folder)])
        store.delete([key.manifest_path for key in keys])


def find_collectable_origins(experiment: Experiment, retired: Iterable[CheckpointRef]) -> Sequence[CheckpointKey]:
    """Return the deletable origins of the clones in `retired`: origins that are retired and have no other clone."""
    keys = dict.fromkeys(
        CheckpointKey(trial=experiment.trial_key(origin.trial), step=origin.step, sequence=origin.sequence)
        for origin in (ref.origin for ref in retired)
        if origin is not None
    )
    return [key for key in keys if is_deletable_checkpoint(experiment.trial(key.trial.trial), key)]


def find_leftover_manifests(
    store: ObjectStore, trial: TrialKey, state: Trial, listed: Sequence[ListedObject] | None = None
) -> Sequence[CheckpointKey]:
    """Return the keys of manifests of retired checkpoints, and of manifests that no entry of the journal names.

    Includes manifests that clones still need; the caller must keep these. Excludes manifests of saves that began after
    the trial's last barrier, because they may still run. `listed` are the objects in `trial.checkpoints_folder`.
    """
    limit = max(state.adopted_up_to, state.collected_up_to)
    if limit <= 1:
        return []  # sequences begin at 1, so no manifest is old enough
    listed = store.list(trial.checkpoints_folder) if listed is None else listed
    keys = (CheckpointKey.from_manifest_path(trial, manifest.path) for manifest in listed)
    old = (key for key in keys if key and key.sequence < limit and key.sequence not in state.quarantined_sequences)
    return [key for key in old if not (is_live_checkpoint(state, key) or is_quarantined_checkpoint(state, key))]


def find_orphan_blobs(
    store: ObjectStore, trial: TrialKey, state: Trial, listed: Sequence[ListedObject] | None = None
) -> Sequence[ListedObject]:
    """Return the blobs that no live checkpoint and no clone needs, and that no save will reuse.

    An interrupted save, or the deletion of an unreadable manifest, leaves such blobs. They may be deleted at any time.
    Excludes blobs of quarantined checkpoints, which may be reinstated. `listed` are the objects in
    `trial.blobs_folder`, or those of them that are still candidates.

    Raises:
        CheckpointCorrupt: the manifest of a live checkpoint, or of a clone's origin, is missing or unreadable.
        OutdatedStateError: such a checkpoint was retired, so `state` is old: call again with the error's `current`.
        Superseded: the experiment is being deleted, or was deleted.
    """
    if listed is not None and not listed:
        return []
    reachable = _find_reachable_blobs(store, trial, state)
    return [
        blob
        for blob in (store.list(trial.blobs_folder) if listed is None else listed)
        if 0 <= blob_sequence(blob.path) < state.collected_up_to and blob.path not in reachable
    ]


def _find_reachable_blobs(store: ObjectStore, trial: TrialKey, state: Trial) -> set[str]:
    """Return the paths of the blobs that the trial's live or quarantined checkpoints, or other trials' clones, need."""

    def read_needed(key: CheckpointKey) -> Manifest | CheckpointCorrupt:
        try:
            return read_manifest(store, key)
        except CheckpointNotFound as missing:
            return CheckpointCorrupt(f"{missing}, although the journal contains it")
        except CheckpointCorrupt as corrupt:
            return corrupt

    cloned = (CheckpointKey(trial=trial, step=clone.step, sequence=clone.sequence) for clone in state.clones)
    needed = list(
        dict.fromkeys(key for key in (*list_live_checkpoint_keys(trial, state), *cloned) if key.trial == trial)
    )
    manifests = dict(zip(needed, store.map(read_needed, needed), strict=True))
    if bad := {key: result for key, result in manifests.items() if isinstance(result, CheckpointCorrupt)}:
        raise_damage_or_outdated(store, trial, bad)
    blobs = {path for result in manifests.values() if isinstance(result, Manifest) for path in result.blob_paths()}
    quarantined = (trial.checkpoint_key(item.checkpoint) for item in state.quarantined_checkpoints)
    own_quarantined = [key for key in quarantined if key.trial == trial]
    return blobs.union(*store.map(lambda key: _list_quarantined_blobs(store, key), own_quarantined))


def _list_quarantined_blobs(store: ObjectStore, key: CheckpointKey) -> frozenset[str]:
    """Return the blobs of a quarantined checkpoint, or all blobs up to its sequence if its manifest is unreadable."""
    try:
        return read_manifest(store, key).blob_paths()
    except (CheckpointCorrupt, CheckpointNotFound):
        listed = store.list(key.trial.blobs_folder)
        return frozenset(blob.path for blob in listed if blob_sequence(blob.path) <= key.sequence)


# Collect the garbage of whole trials. Any process may do this, not only the experiment's owner.


@dataclass(frozen=True, slots=True)
class TrialGarbage:
    """The garbage of a trial: deleted, or in a dry run only found."""

    trial: str
    checkpoints: tuple[int, ...] = ()
    """The steps of the retired checkpoints that are garbage."""
    orphan_count: int = 0
    orphan_bytes: int = 0
    undecided_count: int = 0
    """The number of manifests that stay, because a clone needs them, or because they may belong to a running save."""
    message_count: int = 0
    """The number of messages: answers to ended attempts, objects of these attempts' nodes, and journaled posts."""
    kept_reason: str | None = None
    """Why some garbage is not deleted; None if all of it is deleted."""
    damage: str | None = None
    """The damage or read error that prevented the deletion; None if there is neither."""

    @property
    def object_count(self) -> int:
        """The number of objects; a checkpoint counts as one object."""
        return len(self.checkpoints) + self.orphan_count + self.message_count


@dataclass(frozen=True, slots=True)
class ExperimentGarbage:
    """The garbage of an experiment: deleted, or in a dry run only found."""

    trials: Sequence[TrialGarbage]
    skipped_count: int
    """The number of trials for which no time was left."""
    earlier_objects: Sequence[ListedObject]
    """Objects of deleted experiments of the same name."""

    @property
    def object_count(self) -> int:
        """The number of objects; a checkpoint counts as one object."""
        return len(self.earlier_objects) + sum(item.object_count for item in self.trials)

    @property
    def size_bytes(self) -> int:
        """The size of the garbage except retired checkpoints and messages, whose sizes are not counted."""
        return sum(item.size_bytes for item in self.earlier_objects) + sum(item.orphan_bytes for item in self.trials)


@dataclass(frozen=True, slots=True)
class _Candidates:
    """The objects of an ended trial that may be garbage after a barrier; they are checked again after the barrier."""

    checkpoints: Sequence[ListedObject]
    blobs: Sequence[ListedObject]
    needs_barrier: bool


def may_still_save(trial: Trial) -> bool:
    """Return whether an attempt of the trial can still save; if not, only a new attempt (`AttemptStarted`) can."""
    return trial.phase not in ENDED_PHASES or trial.outbox is not None


def _find_garbage_candidates(store: ObjectStore, key: TrialKey, trial: Trial) -> _Candidates | None:
    """Return what may be garbage after a barrier; None if no barrier is possible, or if an object is damaged."""
    if may_still_save(trial) or not trial.attempt:
        return None
    try:
        new_state = apply_trial_event(trial, CheckpointsRetired(trial=trial.id, retired_sequences=()), "non-owner")
        checkpoints = store.list(key.checkpoints_folder)
        blobs = find_orphan_blobs(store, key, new_state)
    except (CheckpointCorrupt, OutdatedStateError, Superseded):
        return None
    leftovers = find_leftover_manifests(store, key, new_state, checkpoints)
    deletable = [old for old in leftovers if is_deletable_checkpoint(new_state, old)]
    has_new_checkpoints = not all(is_deletable_checkpoint(trial, old) for old in deletable)
    has_new_blobs = any(blob_sequence(blob.path) >= trial.collected_up_to for blob in blobs)
    return _Candidates(checkpoints, blobs, needs_barrier=has_new_checkpoints or has_new_blobs)


def collect_experiment_garbage(
    store: ObjectStore,
    experiment: Experiment,
    stamp: WriteStamp,
    *,
    only: Collection[str] | None = None,
    dry_run: bool = False,
    has_time: Callable[[], bool] = lambda: True,
) -> ExperimentGarbage:
    """Delete the garbage of an experiment, or of the trials in `only`; return a description of the garbage.

    First writes barriers (`CheckpointsRetired`) for ended trials if this makes more objects deletable, unless the
    target supports only one writer. A dry run writes and deletes nothing, and returns the garbage that would be
    deleted. An unreadable object is reported as damage of its trial; the garbage of other trials is still collected.

    Raises:
        JournalCorrupt, Superseded, UnknownVersion: see `load_experiment`.
        StoreUnavailable, StoreRefused, CommitUnknown: call again.
    """
    names = list(experiment.trials if only is None else only)
    state = experiment

    def map_trials(act: Callable[[TrialKey, Trial], _Result]) -> Sequence[_Result | UnreadableObject | None]:
        def act_if_time(name: str) -> _Result | UnreadableObject | None:
            key = state.trial_key(name)
            if not has_time():
                return None
            return run_or_report_unreadable(store, key, key.folder, lambda: act(key, state.trial(name)))

        return list(store.map(act_if_time, names))

    def make_barriers(state: Experiment) -> Sequence[CheckpointsRetired]:
        ended = (name for name in barrier_names if not may_still_save(state.trial(name)))
        return [CheckpointsRetired(trial=name, retired_sequences=()) for name in ended]

    results = map_trials(lambda key, trial: _find_garbage_candidates(store, key, trial))
    candidates = {n: result for n, result in zip(names, results, strict=True) if isinstance(result, _Candidates)}
    barrier_names = [
        n for n, candidate in candidates.items() if candidate.needs_barrier and store.has_conditional_create
    ]
    if barrier_names and not dry_run:
        state = append_as_non_owner(store, state.key, make_barriers, stamp)
    for barrier in make_barriers(state) if dry_run else ():
        state = apply_event(state, barrier, state.entry_count + 1, "non-owner")
    collected = map_trials(
        lambda key, trial: collect_trial_garbage(store, key, trial, candidates.get(trial.id), dry_run=dry_run)
    )
    delete = list_earlier_objects if dry_run else delete_earlier_objects
    garbage = [
        TrialGarbage(result.trial, damage=result.reason) if isinstance(result, UnreadableObject) else result
        for result in collected
        if result is not None
    ]
    earlier_objects = delete(store, state.name, state.key.generation) if only is None else ()
    return ExperimentGarbage(garbage, collected.count(None), earlier_objects)


def collect_trial_garbage(
    store: ObjectStore, key: TrialKey, trial: Trial, candidates: _Candidates | None = None, *, dry_run: bool = False
) -> TrialGarbage:
    """Delete the garbage of a trial; return a description of the garbage. A dry run deletes nothing.

    Manifests are deleted last, so that the next call can finish an interrupted deletion.

    Raises:
        JournalCorrupt, UnknownVersion: see `load_experiment`.
        StoreUnavailable: call again.
    """
    if not trial.attempt:
        return TrialGarbage(trial.id)  # never started
    lacks_barrier = candidates is not None and candidates.needs_barrier and not store.has_conditional_create
    kept = f"some garbage can be deleted only after a journal entry: {SINGLE_WRITER_MESSAGE}" if lacks_barrier else None
    checkpoints = store.list(key.checkpoints_folder) if candidates is None else candidates.checkpoints
    while True:
        try:
            leftovers = find_leftover_manifests(store, key, trial, checkpoints)
            blobs = find_orphan_blobs(store, key, trial, None if candidates is None else candidates.blobs)
            break
        except OutdatedStateError as outdated:  # the owner has retired checkpoints since `trial` was read
            trial = outdated.current
        except CheckpointCorrupt as corrupt:
            return TrialGarbage(trial.id, damage=str(corrupt))
        except Superseded:
            return TrialGarbage(trial.id, kept_reason="its experiment is being deleted")
    to_delete = [old for old in leftovers if is_deletable_checkpoint(trial, old)]
    last_ended = trial.attempt - 1 if may_still_save(trial) else trial.attempt
    messages = [
        *list_answers(store, key, last_ended),
        *list_node_objects(store, key, last_ended),
        *list_journaled_posts(store, key, trial),
    ]
    if not dry_run:
        store.delete([listed.path for listed in (*blobs, *messages)])
        _delete_manifests(store, to_delete)
    return TrialGarbage(
        trial.id,
        checkpoints=tuple(old.step for old in to_delete),
        orphan_count=len(blobs),
        orphan_bytes=sum(blob.size_bytes for blob in blobs),
        undecided_count=len(leftovers) - len(to_delete),
        message_count=len(messages),
        kept_reason=kept,
    )


# After the end of an experiment, retire the checkpoints that a `Retention` does not keep.


def plan_retirements(experiment: Experiment, policy: Retention) -> Sequence[CheckpointsRetired]:
    """Return the retirements of checkpoints that `policy` does not keep; none while an attempt can still save.

    These always stay: each trial's newest checkpoint, all checkpoints of the best trial, the best checkpoint of all.
    """
    trials = experiment.trials.values()
    if experiment.is_being_deleted or any(may_still_save(trial) for trial in trials):
        return ()
    best = find_best_trial(experiment)
    best_saved = find_best_checkpoints(experiment, objective_from_settings(experiment.settings))
    retirements = []
    for trial in trials:
        quarantined = find_quarantined_to_retire(trial.quarantined_checkpoints, trial.checkpoints, policy)
        unwanted = (*find_sequences_to_retire(trial.checkpoints, policy), *(ref.sequence for ref in quarantined))
        retires = tuple(sequence for sequence in unwanted if sequence != best_saved.get(trial.id))
        if retires and (best is None or trial.id != best.id):
            retirements.append(CheckpointsRetired(trial=trial.id, retired_sequences=retires))
    return retirements


def retire_unkept_checkpoints(
    store: ObjectStore, journal: JournalKey, policy: Retention, stamp: WriteStamp, *, dry_run: bool = False
) -> Sequence[CheckpointsRetired]:
    """Write the retirements of `plan_retirements` in one entry; return them. `collect_trial_garbage` deletes the bytes.

    Retires nothing if a trial runs again meanwhile: then the owner's retention applies. A dry run writes nothing.

    Raises:
        StoreRefused: the target supports only one writer.
        JournalCorrupt, Superseded, UnknownVersion: see `load_experiment`.
        StoreUnavailable, CommitUnknown: call again.
    """
    if dry_run:
        return plan_retirements(load_experiment(store, journal), policy)
    retirements: Sequence[CheckpointsRetired] = ()

    def retirement_events(state: Experiment) -> Sequence[CheckpointsRetired]:
        nonlocal retirements
        retirements = plan_retirements(state, policy)
        return retirements

    append_as_non_owner(store, journal, retirement_events, stamp)
    return retirements
