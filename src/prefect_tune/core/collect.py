"""Delete the bytes of checkpoints that the journal has retired, and nothing that is reachable.

Names are never written twice, so a deletion that arrives late, from a process thought dead or a
request thought lost, hits nothing that was written since.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prefect_tune.core.commit import Mapper
from prefect_tune.core.errors import CheckpointNotFound
from prefect_tune.core.layout import CheckpointKey, TrialKey
from prefect_tune.core.manifest import Manifest
from prefect_tune.core.restore import read_manifest
from prefect_tune.core.store import ObjectStore
from prefect_tune.core.trial import Trial

__all__ = ["collect", "leftover"]


def collect(
    store: ObjectStore, trial: TrialKey, state: Trial, doomed: Iterable[CheckpointKey], *, side_by_side: Mapper
) -> int:
    """Delete retired checkpoints: their blobs that no live checkpoint refers to, then their manifests.

    The manifest goes last, so that a deletion cut short is found, and finished, by the next one.
    Returns how many objects were deleted.

    Raises:
        CheckpointCorrupt: a live manifest cannot be read: nothing is deleted on a guess.
    """
    keys = [key for key in doomed if not _is_live(state, key)]
    manifests = [manifest for manifest in side_by_side(lambda key: _read(store, key), keys) if manifest]
    if not manifests:
        return 0
    live = [CheckpointKey(trial=trial, step=each.step, sequence=each.sequence) for each in state.checkpoints]
    reachable = _reachable(side_by_side(lambda key: read_manifest(store, key), live))
    ours = f"{trial.blobs}/"
    blobs = {path for manifest in manifests for path in manifest.blob_paths() if path.startswith(ours)} - reachable
    store.delete(sorted(blobs))
    store.delete([key.manifest_path for key in keys])
    return len(blobs) + len(manifests)


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


def _is_live(state: Trial, key: CheckpointKey) -> bool:
    return any((each.step, each.sequence) == (key.step, key.sequence) for each in state.checkpoints)


def _read(store: ObjectStore, key: CheckpointKey) -> Manifest | None:
    try:
        return read_manifest(store, key)
    except CheckpointNotFound:
        return None  # deleted by an earlier try


def _reachable(manifests: Iterable[Manifest]) -> set[str]:
    return {path for manifest in manifests for path in manifest.blob_paths()}
