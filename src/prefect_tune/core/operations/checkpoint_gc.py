"""Delete the bytes of checkpoints that the journal has retired, and no object that is reachable.

Names are never written twice, so a late deletion, from a process believed dead or a request believed
lost, deletes no object that was written since.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from prefect_tune.core.checkpoints.manifest import Manifest
from prefect_tune.core.errors import CheckpointCorrupt, CheckpointNotFound
from prefect_tune.core.experiment.trial_transitions import Trial, is_collectable, is_live
from prefect_tune.core.journal_events import QuarantinedCheckpoint
from prefect_tune.core.restore import OutdatedStateError, read_manifest, require_still_needed
from prefect_tune.core.storage.layout import CheckpointKey, CheckpointName, TrialKey, blob_sequence
from prefect_tune.core.storage.object_store import Listed, ObjectStore, ParallelMap

Release: TypeAlias = Callable[[CheckpointKey, CheckpointKey], int]
"""Called with a clone and its origin before the clone is deleted; returns the number of objects it deleted itself."""


@dataclass(frozen=True, slots=True)
class _Doomed:
    """A retired checkpoint whose objects still exist."""

    key: CheckpointKey
    blobs: frozenset[str] = frozenset()
    origin: CheckpointKey | None = None


def release_nothing(clone: CheckpointKey, origin: CheckpointKey) -> int:
    """Release nothing: the owner of the origin finds the claim to be over."""
    del clone, origin
    return 0


def collect(
    store: ObjectStore,
    trial: TrialKey,
    state: Trial,
    doomed: Collection[CheckpointKey],
    *,
    side_by_side: ParallelMap,
    release: Release = release_nothing,
) -> int:
    """Delete retired checkpoints: blobs that no other checkpoint needs, metadata, then manifests.

    The manifest goes last, so that the next call finds and finishes an interrupted deletion. Checkpoints that
    are not collectable are left alone. Returns the number of blobs and manifests deleted.

    If another process has retired and deleted checkpoints that `state` still names, the journal is read again.

    Raises:
        CheckpointCorrupt: a manifest that is live, or that a clone needs, is missing or unreadable, so that the
            blobs it needs are unknown: nothing is deleted.
        Superseded: the experiment is being deleted, or was deleted.
    """
    while True:
        try:
            return _collected(store, trial, state, doomed, side_by_side, release)
        except OutdatedStateError as outdated:
            state = outdated.current


def _collected(
    store: ObjectStore,
    trial: TrialKey,
    state: Trial,
    doomed: Iterable[CheckpointKey],
    side_by_side: ParallelMap,
    release: Release,
) -> int:
    keys = [key for key in doomed if is_collectable(state, key)]
    found = [each for each in side_by_side(lambda key: _doomed(store, key), keys) if each is not None]
    if not found:
        return 0
    blobs = {path for each in found for path in each.blobs} - _reachable(store, trial, state, side_by_side)
    ours = sorted(path for path in blobs if path.startswith(f"{trial.blobs}/"))
    store.delete(ours)
    store.delete([each.path for key in keys for each in store.list(key.metadata_folder)])
    store.delete([each.key.manifest_path for each in found if each.origin is None])
    released = [_release(store, each.key, each.origin, release) for each in found if each.origin is not None]
    return len(ours) + len(found) + sum(released)


def _release(store: ObjectStore, clone: CheckpointKey, origin: CheckpointKey, release: Release) -> int:
    deleted = release(clone, origin)
    store.delete([clone.manifest_path])
    return deleted


def leftover(store: ObjectStore, trial: TrialKey, state: Trial, settled_from: int) -> Sequence[CheckpointKey]:
    """Return keys of manifests on the target that are not checkpoints: retired and not deleted, or never a commit.

    Those that clones need are included: they are checked again until no clone needs them.
    `settled_from` is the experiment's: manifests with that or a larger sequence may belong to a running save.
    """
    if settled_from <= 1:
        return []  # sequences begin with 1, so no manifest is old enough
    keys = (CheckpointKey.from_manifest_path(trial, each.path) for each in store.list(trial.checkpoints))
    return [
        key
        for key in keys
        if key and not is_live(state, key) and key.sequence not in state.quarantined and key.sequence < settled_from
    ]


def orphans(store: ObjectStore, trial: TrialKey, state: Trial, *, side_by_side: ParallelMap) -> Sequence[Listed]:
    """Return the blobs that neither a live checkpoint nor a clone refers to, and that no save will ever reuse.

    Interrupted saves leave them, and so do deletions of unreadable manifests. They may be deleted at any time.
    Blobs of checkpoints that were quarantined are not among them: these may be reinstated.

    Raises:
        CheckpointCorrupt: a manifest that is live, or that a clone needs, is missing or unreadable.
        OutdatedStateError: `state` is outdated, those manifests are retired: repeat with the error's `current`.
        Superseded: the experiment is being deleted, or was deleted.
    """
    reachable = _reachable(store, trial, state, side_by_side)
    return [
        each
        for each in store.list(trial.blobs)
        if 0 <= blob_sequence(each.path) < state.collected_up_to and each.path not in reachable
    ]


def _doomed(store: ObjectStore, key: CheckpointKey) -> _Doomed | None:
    """Return the blobs of a retired checkpoint; None if its manifest is deleted already."""
    try:
        manifest = read_manifest(store, key)
    except CheckpointNotFound:
        return None
    except CheckpointCorrupt:
        return _Doomed(key)  # retired, so its manifest is not needed; its blobs become orphans
    return _Doomed(key, manifest.blob_paths(), manifest.origin)


def _reachable(store: ObjectStore, trial: TrialKey, state: Trial, side_by_side: ParallelMap) -> set[str]:
    """Return the paths of blobs of checkpoints that are live, that a clone needs, or that were quarantined."""
    needed: Sequence[CheckpointName] = (*state.checkpoints, *state.claims)
    keys = dict.fromkeys(trial.checkpoint_key(each) for each in needed)
    found = dict(side_by_side(lambda key: (key, _needed(store, key)), keys))
    if bad := {key: each for key, each in found.items() if isinstance(each, CheckpointCorrupt)}:
        require_still_needed(store, trial, bad, side_by_side=side_by_side)
    blobs = {path for each in found.values() if isinstance(each, Manifest) for path in each.blob_paths()}
    return blobs.union(
        *side_by_side(lambda each: _quarantined_blobs(store, trial, each), state.quarantined_checkpoints)
    )


def _quarantined_blobs(store: ObjectStore, trial: TrialKey, quarantined: QuarantinedCheckpoint) -> frozenset[str]:
    """Return the blobs of a quarantined checkpoint; if its manifest is unreadable, all blobs up to its sequence."""
    ref = quarantined.checkpoint
    try:
        return read_manifest(store, trial.checkpoint_key(ref)).blob_paths()
    except (CheckpointCorrupt, CheckpointNotFound):
        return frozenset(each.path for each in store.list(trial.blobs) if blob_sequence(each.path) <= ref.sequence)


def _needed(store: ObjectStore, key: CheckpointKey) -> Manifest | CheckpointCorrupt:
    try:
        return read_manifest(store, key)
    except CheckpointNotFound as missing:
        return CheckpointCorrupt(f"{missing}, but the journal says that it is")
    except CheckpointCorrupt as corrupt:
        return corrupt
