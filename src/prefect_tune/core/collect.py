"""Delete the bytes of checkpoints that the journal has retired, and nothing that is reachable.

Names are never written twice, so a deletion that arrives late, from a process thought dead or a
request thought lost, hits nothing that was written since.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prefect_tune.core.commit import Mapper
from prefect_tune.core.errors import CheckpointCorrupt, CheckpointNotFound
from prefect_tune.core.layout import CheckpointKey, TrialKey, blob_sequence
from prefect_tune.core.manifest import Manifest
from prefect_tune.core.restore import read_manifest
from prefect_tune.core.store import Listed, ObjectStore
from prefect_tune.core.trial import Trial

__all__ = ["collect", "leftover", "orphans"]


def collect(
    store: ObjectStore,
    trial: TrialKey,
    state: Trial,
    doomed: Iterable[CheckpointKey],
    *,
    side_by_side: Mapper,
) -> int:
    """Delete retired checkpoints: blobs that no live one refers to, what was said of them, then manifests.

    The manifest goes last, so that a deletion cut short is found, and finished, by the next one.
    Only what was begun before the last retirement that `state` knows of is deleted: no save reuses
    that any more, here or in a process that takes over while the deletion is on its way. The rest of
    `doomed` is left alone until its retirement is journaled too. Returns how many blobs
    and manifests were deleted.

    Raises:
        CheckpointCorrupt: a live manifest is missing or unreadable: nothing is deleted on a guess.
    """
    keys = [key for key in doomed if not _is_live(state, key) and key.sequence < state.collected_up_to]
    found = [each for each in side_by_side(lambda key: _doomed(store, key), keys) if each is not None]
    if not found:
        return 0
    blobs = {path for each in found for path in each} - _reachable(store, trial, state, side_by_side)
    ours = sorted(path for path in blobs if path.startswith(f"{trial.blobs}/"))
    store.delete(ours)
    store.delete([each.path for key in keys for each in store.list(key.metadata_folder)])
    store.delete([key.manifest_path for key in keys])
    return len(ours) + len(found)


def leftover(store: ObjectStore, trial: TrialKey, state: Trial, settled_from: int) -> Sequence[CheckpointKey]:
    """Return checkpoints on the target that are none: retired and not yet deleted, or never a commit.

    `settled_from` is the experiment's: manifests from there on may belong to a save that is under way.
    """
    keys = (CheckpointKey.from_manifest_path(trial, each.path) for each in store.list(trial.checkpoints))
    return [
        key
        for key in keys
        if key and not _is_live(state, key) and key.sequence not in state.quarantined and key.sequence < settled_from
    ]


def orphans(store: ObjectStore, trial: TrialKey, state: Trial, *, side_by_side: Mapper) -> Sequence[Listed]:
    """Return the blobs that no live checkpoint refers to and that no save will ever reuse.

    Saves that were cut short leave them, and so do deletions of manifests that cannot be read. They
    may be deleted at any time; blobs of quarantined checkpoints are among them.

    Raises:
        CheckpointCorrupt: a live manifest is missing or unreadable.
    """
    reachable = _reachable(store, trial, state, side_by_side)
    return [
        each
        for each in store.list(trial.blobs)
        if 0 <= blob_sequence(each.path) < state.collected_up_to and each.path not in reachable
    ]


def _is_live(state: Trial, key: CheckpointKey) -> bool:
    return any((each.step, each.sequence) == (key.step, key.sequence) for each in state.checkpoints)


def _doomed(store: ObjectStore, key: CheckpointKey) -> frozenset[str] | None:
    """Return the blobs that a retired checkpoint names; None if it is gone already."""
    try:
        return read_manifest(store, key).blob_paths()
    except CheckpointNotFound:
        return None
    except CheckpointCorrupt:
        return frozenset()  # it is no checkpoint any more, whatever it said; its blobs become orphans


def _reachable(store: ObjectStore, trial: TrialKey, state: Trial, side_by_side: Mapper) -> set[str]:
    live = [CheckpointKey(trial=trial, step=each.step, sequence=each.sequence) for each in state.checkpoints]
    return {path for each in side_by_side(lambda key: _live(store, key), live) for path in each.blob_paths()}


def _live(store: ObjectStore, key: CheckpointKey) -> Manifest:
    try:
        return read_manifest(store, key)
    except CheckpointNotFound as missing:
        raise CheckpointCorrupt(f"{missing}, and the journal says that it was") from missing
