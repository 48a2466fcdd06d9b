"""Delete the bytes of checkpoints that the journal has retired, and no object that is reachable.

Names are never written twice, so a late deletion, from a process believed dead or a request believed
lost, deletes no object that was written since.

A trial's folder has the checkpoints with manifests of their own. A clone has none: it is an entry, which keeps the
bytes of its origin in the folder of another trial, retired or not. When the last clone is retired, too, the origin is
deleted as any other checkpoint of its own trial (`collectable_origins`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial

from prefect_tune.core.checkpoints.manifest import Manifest
from prefect_tune.core.errors import CheckpointCorrupt, CheckpointNotFound
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import Trial, is_collectable, is_live, is_quarantined, live_keys
from prefect_tune.core.journal_events import CheckpointRef
from prefect_tune.core.restore import OutdatedStateError, read_manifest, require_still_needed
from prefect_tune.core.storage.layout import CheckpointKey, TrialKey, blob_sequence
from prefect_tune.core.storage.object_store import Listed, ObjectStore, ParallelMap


def collect(
    store: ObjectStore,
    trial: TrialKey,
    state: Trial,
    doomed: Collection[CheckpointKey],
    *,
    side_by_side: ParallelMap,
) -> int:
    """Delete retired checkpoints of `trial`: blobs that no other checkpoint needs, metadata, then manifests.

    The manifest goes last, so that the next call finds and finishes an interrupted deletion. Checkpoints that
    are not collectable, and those of other trials, are left alone. Returns the number of blobs and manifests deleted.

    If another process has retired and deleted checkpoints that `state` still names, the journal is read again.

    Raises:
        CheckpointCorrupt: a manifest that is live, or that a clone needs, is missing or unreadable, so that the
            blobs it needs are unknown: nothing is deleted.
        Superseded: the experiment is being deleted, or was deleted.
    """
    while True:
        try:
            keys = [key for key in doomed if key.trial == trial and is_collectable(state, key)]
            blobs = {key: paths for key, paths in side_by_side(partial(_blobs_of, store), keys) if paths is not None}
            if not blobs:
                return 0
            unneeded = sorted(frozenset().union(*blobs.values()) - _reachable(store, trial, state, side_by_side))
        except OutdatedStateError as outdated:
            state = outdated.current
            continue
        store.delete(unneeded)
        store.delete([listed.path for key in keys for listed in store.list(key.metadata_folder)])
        store.delete([key.manifest_path for key in blobs])
        return len(unneeded) + len(blobs)


def collectable_origins(experiment: Experiment, retired: Iterable[CheckpointRef]) -> Sequence[CheckpointKey]:
    """Return the origins of the clones among `retired` that may be deleted, being retired and without another clone."""
    origins = (ref.origin for ref in retired if ref.origin is not None)
    keys = (
        CheckpointKey(trial=experiment.trial_key(origin.trial), step=origin.step, sequence=origin.sequence)
        for origin in origins
    )
    return [key for key in dict.fromkeys(keys) if is_collectable(experiment.trial(key.trial.trial), key)]


def leftover(store: ObjectStore, trial: TrialKey, state: Trial) -> Sequence[CheckpointKey]:
    """Return keys of manifests on the target that are not checkpoints: retired and not deleted, or never a commit.

    Those that clones need are included: they are checked again until no clone needs them. Manifests at or beyond the
    trial's limits may belong to a running save, and are not included.
    """
    limit = max(state.settled_from, state.collected_up_to)
    if limit <= 1:
        return []  # sequences begin with 1, so no manifest is old enough
    keys = (CheckpointKey.from_manifest_path(trial, listed.path) for listed in store.list(trial.checkpoints))
    old = (key for key in keys if key and key.sequence < limit and key.sequence not in state.quarantined)
    return [key for key in old if not (is_live(state, key) or is_quarantined(state, key))]


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
        listed
        for listed in store.list(trial.blobs)
        if 0 <= blob_sequence(listed.path) < state.collected_up_to and listed.path not in reachable
    ]


def _blobs_of(store: ObjectStore, key: CheckpointKey) -> tuple[CheckpointKey, frozenset[str] | None]:
    """Return the blobs of a retired checkpoint; None if its manifest is deleted already."""
    try:
        return key, read_manifest(store, key).blob_paths()
    except CheckpointNotFound:
        return key, None
    except CheckpointCorrupt:
        return key, frozenset()  # retired, so its manifest is not needed; its blobs become orphans


def _reachable(store: ObjectStore, trial: TrialKey, state: Trial, side_by_side: ParallelMap) -> set[str]:
    """Return the paths of the trial's blobs that live or quarantined checkpoints, or clones elsewhere, refer to."""
    held = (CheckpointKey(trial=trial, step=clone.step, sequence=clone.sequence) for clone in state.clones)
    needed = dict.fromkeys(key for key in (*live_keys(trial, state), *held) if key.trial == trial)
    manifests = dict(side_by_side(lambda key: (key, _read_needed(store, key)), needed))
    if bad := {key: found for key, found in manifests.items() if isinstance(found, CheckpointCorrupt)}:
        require_still_needed(store, trial, bad, side_by_side=side_by_side)
    blobs = {path for found in manifests.values() if isinstance(found, Manifest) for path in found.blob_paths()}
    quarantined = (trial.checkpoint_key(each.checkpoint) for each in state.quarantined_checkpoints)
    own = [key for key in quarantined if key.trial == trial]
    return blobs.union(*side_by_side(lambda key: _quarantined_blobs(store, key), own))


def _quarantined_blobs(store: ObjectStore, key: CheckpointKey) -> frozenset[str]:
    """Return the blobs of a quarantined checkpoint; if its manifest is unreadable, all blobs up to its sequence."""
    try:
        return read_manifest(store, key).blob_paths()
    except (CheckpointCorrupt, CheckpointNotFound):
        listed = store.list(key.trial.blobs)
        return frozenset(blob.path for blob in listed if blob_sequence(blob.path) <= key.sequence)


def _read_needed(store: ObjectStore, key: CheckpointKey) -> Manifest | CheckpointCorrupt:
    try:
        return read_manifest(store, key)
    except CheckpointNotFound as missing:
        return CheckpointCorrupt(f"{missing}, but the journal says that it is")
    except CheckpointCorrupt as corrupt:
        return corrupt
