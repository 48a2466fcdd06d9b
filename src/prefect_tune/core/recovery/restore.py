"""Read a checkpoint back, verifying every byte while it streams; unverified bytes are never returned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prefect_tune.core.checkpoints.commit import ParallelMap
from prefect_tune.core.checkpoints.manifest import Manifest, decode_manifest
from prefect_tune.core.checkpoints.verified_reads import NoSink, Sink, fetch, reads
from prefect_tune.core.errors import CheckpointCorrupt, CheckpointNotFound, ObjectNotFound
from prefect_tune.core.recovery.stale_reads import unless_retired
from prefect_tune.core.storage.documents import read_document
from prefect_tune.core.storage.layout import CheckpointKey
from prefect_tune.core.storage.object_store import ObjectStore


def read_manifest(store: ObjectStore, key: CheckpointKey) -> Manifest:
    """Return the manifest of `key`, after checking that it is the manifest of that checkpoint.

    Raises:
        CheckpointNotFound: the target answered that there is no manifest.
        CheckpointCorrupt: the manifest is torn, altered or another checkpoint's.
    """
    try:
        manifest = decode_manifest(read_document(store, key.manifest_path, CheckpointCorrupt), key.manifest_path)
    except ObjectNotFound as absent:
        raise CheckpointNotFound(f"{key.manifest_path}: no such checkpoint is committed") from absent
    found = (manifest.experiment, manifest.trial, manifest.step, manifest.sequence)
    if found != (key.trial.experiment, key.trial.trial, key.step, key.sequence):
        raise CheckpointCorrupt(f"{key.manifest_path}: holds the manifest of another checkpoint: {found}")
    return manifest


def checkpoints_with(
    store: ObjectStore, keys: Iterable[CheckpointKey], blobs: Mapping[str, str], *, side_by_side: ParallelMap
) -> Mapping[CheckpointKey, str]:
    """Return the checkpoints that refer to one of the damaged `blobs` (path to damage), each with that damage.

    Checkpoints whose manifest cannot be read are left out: a restore reports those.
    """

    def found(key: CheckpointKey) -> tuple[CheckpointKey, str | None]:
        try:
            paths = read_manifest(store, key).blob_paths()
        except (CheckpointCorrupt, CheckpointNotFound):
            return key, None
        return key, next((damage for path, damage in blobs.items() if path in paths), None)

    return {key: damage for key, damage in side_by_side(found, keys) if damage is not None}


def restore(store: ObjectStore, manifest: Manifest, sink: Sink, *, side_by_side: ParallelMap) -> None:
    """Write every byte of `manifest` to `sink`, each chunk verified before it is written.

    Raises:
        CheckpointCorrupt: bytes are missing or differ from their digest, in a second read too.
        CheckpointNotFound: the checkpoint was retired, and bytes of it were deleted, during the read.
    """
    with unless_retired(store, manifest.key):
        for _ in side_by_side(lambda read: fetch(store, manifest, read, sink), reads(manifest)):
            pass


def verify(store: ObjectStore, manifest: Manifest, *, side_by_side: ParallelMap) -> None:
    """Read and verify every byte of `manifest`, without storing it. Raises as `restore` does."""
    restore(store, manifest, NoSink(), side_by_side=side_by_side)
