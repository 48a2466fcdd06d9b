"""Garbage-collect trials: the bytes of retired checkpoints, remains of interrupted saves, old messages.

There are no waiting periods, and no reachable object is deleted: an object may be deleted once the journal holds a
limit of its trial after it, that is a retirement (see `is_collectable`). Names are never written twice, so a late
deletion, from a process believed dead or a request believed lost, deletes no object that was written since.

- **The owner** writes a limit with each retirement, and deletes what it has retired (`collect`).
- **A guest**, such as maintenance, collects whole trials (`collect_experiment`). When a trial has ended, no save is
  running, and the guest may write a limit (`Retired`): the journal is one sequence, so that a process that starts the
  trial again comes after that entry. A trial with an open outbox has not ended: its attempt may save at any time, and
  counts its limits itself. On a target that supports one writer only, no guest's entry is written: only objects that
  need no new limit are deleted, and `Collected.kept` says why the rest stays.
- **A clone** is an entry, and no object: it keeps the bytes of its origin in the folder of another trial, retired or
  not. When the last clone is retired, too, the origin is deleted as any other checkpoint of its own trial
  (`collectable_origins`).
- **Messages.** The replies and posts of trials on other machines are stored on the target, too. Attempts and outboxes
  are numbered upwards, so that those of an attempt that is over may be deleted at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from prefect_tune.core.checkpoints.manifest import Manifest
from prefect_tune.core.errors import CheckpointCorrupt, CheckpointNotFound, Superseded
from prefect_tune.core.experiment.experiment import Experiment, after_event
from prefect_tune.core.experiment.retention import Retention, retired, retired_quarantined
from prefect_tune.core.experiment.summary import best_of, objective_in
from prefect_tune.core.experiment.trial_transitions import (
    ENDED,
    Trial,
    after,
    is_collectable,
    is_live,
    is_quarantined,
    live_keys,
)
from prefect_tune.core.journal.journal import append_as_guest, load
from prefect_tune.core.journal.outbox import received_posts
from prefect_tune.core.journal_events import CheckpointRef, Retired
from prefect_tune.core.messages.target_messages import answers_up_to, node_objects_up_to
from prefect_tune.core.operations.scrub import Unreadable, unless_unreadable
from prefect_tune.core.prefect_events import best_checkpoints
from prefect_tune.core.restore import OutdatedStateError, read_manifest, require_still_needed
from prefect_tune.core.storage.generations import delete_objects_before, objects_before
from prefect_tune.core.storage.layout import CheckpointKey, JournalKey, TrialKey, blob_sequence
from prefect_tune.core.storage.object_store import ONE_WRITER, Listed, ObjectStore
from prefect_tune.core.values import Stamp

_Result = TypeVar("_Result")


# What a trial keeps, and what it does not.


def collect(store: ObjectStore, trial: TrialKey, state: Trial, doomed: Collection[CheckpointKey]) -> int:
    """Delete retired checkpoints of `trial`: blobs that no other checkpoint needs, metadata, then manifests.

    The manifest goes last, so that the next call finds and finishes an interrupted deletion. Checkpoints that
    are not collectable, and those of other trials, are left alone. Returns the number of blobs and manifests deleted.

    If another process has retired and deleted checkpoints that `state` still names, the journal is read again.

    Raises:
        CheckpointCorrupt: a manifest that is live, or that a clone needs, is missing or unreadable, so that the
            blobs it needs are unknown: nothing is deleted.
        Superseded: the experiment is being deleted, or was deleted.
    """

    def blobs_of(key: CheckpointKey) -> tuple[CheckpointKey, frozenset[str] | None]:
        try:
            return key, read_manifest(store, key).blob_paths()
        except CheckpointNotFound:
            return key, None  # deleted already
        except CheckpointCorrupt:
            return key, frozenset()  # retired, so its manifest is not needed; its blobs become orphans

    while True:
        try:
            keys = [key for key in doomed if key.trial == trial and is_collectable(state, key)]
            blobs = {key: paths for key, paths in store.map(blobs_of, keys) if paths is not None}
            if not blobs:
                return 0
            unneeded = sorted(frozenset().union(*blobs.values()) - _reachable(store, trial, state))
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


def collectable_origins(experiment: Experiment, retired: Iterable[CheckpointRef]) -> Sequence[CheckpointKey]:
    """Return the origins of the clones among `retired` that may be deleted, being retired and without another clone."""
    keys = dict.fromkeys(
        CheckpointKey(trial=experiment.trial_key(origin.trial), step=origin.step, sequence=origin.sequence)
        for origin in (ref.origin for ref in retired)
        if origin is not None
    )
    return [key for key in keys if is_collectable(experiment.trial(key.trial.trial), key)]


def leftover(
    store: ObjectStore, trial: TrialKey, state: Trial, listed: Sequence[Listed] | None = None
) -> Sequence[CheckpointKey]:
    """Return keys of manifests on the target that are not checkpoints: retired and not deleted, or never a commit.

    Those that clones need are included: they are checked again until no clone needs them. Manifests at or beyond the
    trial's limits may belong to a running save, and are not included. `listed` is what `trial.checkpoints` holds.
    """
    limit = max(state.settled_from, state.collected_up_to)
    if limit <= 1:
        return []  # sequences begin with 1, so no manifest is old enough
    listed = store.list(trial.checkpoints) if listed is None else listed
    keys = (CheckpointKey.from_manifest_path(trial, each.path) for each in listed)
    old = (key for key in keys if key and key.sequence < limit and key.sequence not in state.quarantined)
    return [key for key in old if not (is_live(state, key) or is_quarantined(state, key))]


def orphans(
    store: ObjectStore, trial: TrialKey, state: Trial, listed: Sequence[Listed] | None = None
) -> Sequence[Listed]:
    """Return the blobs that neither a live checkpoint nor a clone refers to, and that no save will ever reuse.

    Interrupted saves leave them, and so do deletions of unreadable manifests. They may be deleted at any time.
    Blobs of checkpoints that were quarantined are not among them: these may be reinstated. `listed` is `trial.blobs`,
    or what is still in question of it.

    Raises:
        CheckpointCorrupt: a manifest that is live, or that a clone needs, is missing or unreadable.
        OutdatedStateError: `state` is outdated, those manifests are retired: repeat with the error's `current`.
        Superseded: the experiment is being deleted, or was deleted.
    """
    if listed is not None and not listed:
        return []
    reachable = _reachable(store, trial, state)
    return [
        blob
        for blob in (store.list(trial.blobs) if listed is None else listed)
        if 0 <= blob_sequence(blob.path) < state.collected_up_to and blob.path not in reachable
    ]


def _reachable(store: ObjectStore, trial: TrialKey, state: Trial) -> set[str]:
    """Return the paths of the trial's blobs that live or quarantined checkpoints, or clones elsewhere, refer to."""

    def read_needed(key: CheckpointKey) -> Manifest | CheckpointCorrupt:
        try:
            return read_manifest(store, key)
        except CheckpointNotFound as missing:
            return CheckpointCorrupt(f"{missing}, but the journal says that it is")
        except CheckpointCorrupt as corrupt:
            return corrupt

    held = (CheckpointKey(trial=trial, step=clone.step, sequence=clone.sequence) for clone in state.clones)
    needed = list(dict.fromkeys(key for key in (*live_keys(trial, state), *held) if key.trial == trial))
    manifests = dict(zip(needed, store.map(read_needed, needed), strict=True))
    if bad := {key: found for key, found in manifests.items() if isinstance(found, CheckpointCorrupt)}:
        require_still_needed(store, trial, bad)
    blobs = {path for found in manifests.values() if isinstance(found, Manifest) for path in found.blob_paths()}
    quarantined = (trial.checkpoint_key(each.checkpoint) for each in state.quarantined_checkpoints)
    own = [key for key in quarantined if key.trial == trial]
    return blobs.union(*store.map(lambda key: _quarantined_blobs(store, key), own))


def _quarantined_blobs(store: ObjectStore, key: CheckpointKey) -> frozenset[str]:
    """Return the blobs of a quarantined checkpoint; if its manifest is unreadable, all blobs up to its sequence."""
    try:
        return read_manifest(store, key).blob_paths()
    except (CheckpointCorrupt, CheckpointNotFound):
        listed = store.list(key.trial.blobs)
        return frozenset(blob.path for blob in listed if blob_sequence(blob.path) <= key.sequence)


# Collect the garbage of whole trials, from outside their owner.


@dataclass(frozen=True, slots=True)
class Collected:
    """The garbage of a trial: found, or deleted."""

    trial: str
    checkpoints: tuple[int, ...] = ()
    """The steps of retired checkpoints."""
    orphan_count: int = 0
    orphan_bytes: int = 0
    undecided_count: int = 0
    """Manifests that are kept for now: a running save may need them (until the trial's next retirement or end), or a
    clone does."""
    answer_count: int = 0
    """Replies to attempts that are over, messages between their nodes, and posts that the journal has."""
    kept: str | None = None
    """Why some garbage stays; None where none does."""
    damage: str | None = None
    """The damage, or the failure to read, for which nothing of the trial may be deleted; None where there is none."""

    @property
    def object_count(self) -> int:
        """The number of objects, with a checkpoint as one."""
        return len(self.checkpoints) + self.orphan_count + self.answer_count


@dataclass(frozen=True, slots=True)
class Garbage:
    """The garbage of an experiment: found, or deleted."""

    trials: Sequence[Collected]
    skipped_count: int
    """The number of trials for which there was no time."""
    dead: Sequence[Listed]
    """Objects that deleted experiments of the same name have left."""

    @property
    def object_count(self) -> int:
        """The number of objects, with a checkpoint as one."""
        return len(self.dead) + sum(each.object_count for each in self.trials)

    @property
    def size_bytes(self) -> int:
        """The size of what was listed; that of retired checkpoints is not known."""
        return sum(each.size_bytes for each in self.dead) + sum(each.orphan_bytes for each in self.trials)


@dataclass(frozen=True, slots=True)
class _Candidates:
    """The objects of an ended trial that are garbage if it gets a limit now; after that entry they are judged again."""

    checkpoints: Sequence[Listed]
    blobs: Sequence[Listed]
    need_limit: bool


def has_ended(trial: Trial) -> bool:
    """Return whether no attempt of the trial can save before its next `Started` entry."""
    return trial.phase in ENDED and trial.outbox is None


def _find_candidates(store: ObjectStore, key: TrialKey, trial: Trial) -> _Candidates | None:
    """List a trial's objects; None where a guest writes no limit, or where `collect_from` finds damage and says so."""
    if not has_ended(trial) or not trial.attempt:
        return None
    try:
        limited = after(trial, Retired(trial=trial.trial, retires=()), "guest")
        checkpoints = store.list(key.checkpoints)
        blobs = orphans(store, key, limited)
    except (CheckpointCorrupt, OutdatedStateError, Superseded):
        return None
    left = leftover(store, key, limited, checkpoints)
    need_limit = any(is_collectable(limited, old) and not is_collectable(trial, old) for old in left) or any(
        blob_sequence(blob.path) >= trial.collected_up_to for blob in blobs
    )
    return _Candidates(checkpoints, blobs, need_limit)


def collect_experiment(
    store: ObjectStore,
    experiment: Experiment,
    stamp: Stamp,
    *,
    only: Collection[str] | None = None,
    dry_run: bool = False,
    has_time: Callable[[], bool] = lambda: True,
) -> Garbage:
    """Delete the garbage of an experiment, or of `only` these trials, and return it.

    First it writes a `Retired` entry for the trials that have ended where that frees garbage; on a target that supports
    one writer only it writes none. A dry run writes and deletes nothing, and returns what a run would delete. An object
    that cannot be read is reported as its trial's damage, and does not stop the others.

    Raises:
        JournalCorrupt, Superseded, UnknownVersion: as `load`.
        StoreUnavailable, StoreRefused, CommitUnknown: call again.
    """
    names = list(experiment.trials if only is None else only)
    state = experiment

    def for_each(act: Callable[[TrialKey, Trial], _Result]) -> Sequence[_Result | Unreadable | None]:
        def act_in_time(name: str) -> _Result | Unreadable | None:
            key = state.trial_key(name)
            if not has_time():
                return None
            return unless_unreadable(store, key, key.folder, lambda: act(key, state.trial(name)))

        return list(store.map(act_in_time, names))

    def limits(state: Experiment) -> Sequence[Retired]:
        return [Retired(trial=name, retires=()) for name in limited if has_ended(state.trial(name))]

    looked = for_each(lambda key, trial: _find_candidates(store, key, trial))
    found = {name: each for name, each in zip(names, looked, strict=True) if isinstance(each, _Candidates)}
    limited = [name for name, each in found.items() if each.need_limit and store.conditional_create]
    if limited and not dry_run:
        state = append_as_guest(store, state.key, limits, stamp)
    for limit in limits(state) if dry_run else ():
        state = after_event(state, limit, state.number + 1, "guest")
    collected = for_each(lambda key, trial: collect_from(store, key, trial, found.get(trial.trial), dry_run=dry_run))
    delete = objects_before if dry_run else delete_objects_before
    return Garbage(
        [
            Collected(each.trial, damage=each.why) if isinstance(each, Unreadable) else each
            for each in collected
            if each is not None
        ],
        collected.count(None),
        delete(store, state.name, state.key.generation) if only is None else (),
    )


def collect_from(
    store: ObjectStore, key: TrialKey, trial: Trial, found: _Candidates | None = None, *, dry_run: bool = False
) -> Collected:
    """Delete the garbage of a trial, and return what was deleted. The next call finishes an interrupted one.

    Blobs go first and manifests last, so that it finds them. A dry run deletes nothing.

    Raises:
        JournalCorrupt, UnknownVersion: as `load`.
        StoreUnavailable: call again.
    """
    if not trial.attempt:
        return Collected(trial.trial)  # it was added, and not started
    needs_entry = found is not None and found.need_limit and not store.conditional_create
    kept = f"more could be deleted after an entry in its journal: {ONE_WRITER}" if needs_entry else None
    checkpoints = store.list(key.checkpoints) if found is None else found.checkpoints
    while True:
        try:
            left = leftover(store, key, trial, checkpoints)
            blobs = orphans(store, key, trial, None if found is None else found.blobs)
            break
        except OutdatedStateError as outdated:  # the owner retires checkpoints meanwhile
            trial = outdated.current
        except CheckpointCorrupt as corrupt:
            return Collected(trial.trial, damage=str(corrupt))
        except Superseded:
            return Collected(trial.trial, kept="its experiment is being deleted")
    doomed = [old for old in left if is_collectable(trial, old)]
    over = trial.attempt if has_ended(trial) else trial.attempt - 1
    messages = [
        *answers_up_to(store, key, over),
        *node_objects_up_to(store, key, over),
        *received_posts(store, key, trial),
    ]
    if not dry_run:
        store.delete([listed.path for listed in (*blobs, *messages)])
        _delete_manifests(store, doomed)
    return Collected(
        trial.trial,
        checkpoints=tuple(old.step for old in doomed),
        orphan_count=len(blobs),
        orphan_bytes=sum(blob.size_bytes for blob in blobs),
        undecided_count=len(left) - len(doomed),
        answer_count=len(messages),
        kept=kept,
    )


# Retire the checkpoints of a finished experiment that a policy does not keep.


def prunable(experiment: Experiment, policy: Retention) -> Sequence[Retired]:
    """Return the retirements of what `policy` does not keep; none while a trial has not ended.

    The newest checkpoint of each trial and pinned ones stay, and so do the best trial and the best checkpoint of all.
    """
    trials = experiment.trials.values()
    if experiment.is_removed or not all(has_ended(trial) for trial in trials):
        return ()
    best, best_saved = best_of(experiment), best_checkpoints(experiment, objective_in(experiment.settings))
    retirements = []
    for trial in trials:
        quarantined = retired_quarantined(trial.quarantined_checkpoints, trial.checkpoints, policy)
        unwanted = (*retired(trial.checkpoints, policy), *(ref.sequence for ref in quarantined))
        retires = tuple(sequence for sequence in unwanted if sequence != best_saved.get(trial.trial))
        if retires and (best is None or trial.trial != best.trial):
            retirements.append(Retired(trial=trial.trial, retires=retires))
    return retirements


def prune(
    store: ObjectStore, journal: JournalKey, policy: Retention, stamp: Stamp, *, dry_run: bool = False
) -> Sequence[Retired]:
    """Retire what is `prunable` in one entry, and return the retirements. Their bytes are deleted by `collect_from`.

    If a trial is running again by then, none is retired: its owner has a policy. A dry run writes nothing.

    Raises:
        StoreRefused: the target supports one writer only.
        JournalCorrupt, Superseded, UnknownVersion: as `load`.
        StoreUnavailable, CommitUnknown: call again.
    """
    if dry_run:
        return prunable(load(store, journal), policy)
    retirements: Sequence[Retired] = ()

    def events(state: Experiment) -> Sequence[Retired]:
        nonlocal retirements
        retirements = prunable(state, policy)
        return retirements

    append_as_guest(store, journal, events, stamp)
    return retirements
