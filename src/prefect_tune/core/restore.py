"""Read a checkpoint back, every byte verified, and distinguish damage from a stale read or a deletion.

The owner may have retired and deleted the missing objects. Each deletion follows an entry of the journal, and a reader
may know an older state of it. So a missing or altered manifest or blob is damage only if the journal,
read again after that, still needs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from prefect_tune.core.checkpoints.manifest import Manifest, decode_manifest
from prefect_tune.core.checkpoints.verified_reads import NoSink, Sink, fetch, reads
from prefect_tune.core.errors import (
    CheckpointCorrupt,
    CheckpointNotFound,
    ObjectNotFound,
    StoreRefused,
    Superseded,
    TuneError,
    UnknownVersion,
)
from prefect_tune.core.experiment.trial_transitions import Trial, is_collectable, is_held, is_live
from prefect_tune.core.journal.journal import load
from prefect_tune.core.journal_events import CheckpointRef
from prefect_tune.core.storage.documents import read_document
from prefect_tune.core.storage.generations import is_deleted
from prefect_tune.core.storage.layout import CheckpointKey, TrialKey
from prefect_tune.core.storage.object_store import ObjectStore, ParallelMap


class OutdatedStateError(TuneError):
    """Checkpoints that the given state of the trial needs were retired since: repeat with the `current` state."""

    def __init__(self, current: Trial) -> None:
        super().__init__(f"trial {current.trial!r}: its journal has retired checkpoints that this call needed")
        self.current = current


def current_trial(store: ObjectStore, trial: TrialKey, *, side_by_side: ParallelMap) -> Trial:
    """Read the experiment's journal, and return the trial's present state.

    Raises:
        Superseded: its experiment is being deleted, or was deleted.
        JournalCorrupt, UnknownVersion: as `load`.
    """
    state = load(store, trial.of_experiment, side_by_side=side_by_side)
    if state.is_removed or trial.trial not in state.trials:
        raise Superseded(f"{trial.folder}: its experiment is being deleted, or was deleted. Stop here")
    return state.trial(trial.trial)


def require_still_needed(
    store: ObjectStore, trial: TrialKey, bad: Mapping[CheckpointKey, CheckpointCorrupt], *, side_by_side: ParallelMap
) -> None:
    """Raise the damage of the first of the `bad` manifests of the trial that the journal still needs.

    Raises:
        CheckpointCorrupt: that checkpoint is live, or a clone needs its bytes.
        OutdatedStateError: the journal no longer needs any of them.
        Superseded: the experiment is being deleted, or was deleted.
    """
    current = current_trial(store, trial, side_by_side=side_by_side)
    for key, damage in bad.items():
        if is_live(current, key) or is_held(current, key):
            raise damage
    raise OutdatedStateError(current)


def is_live_now(store: ObjectStore, key: CheckpointKey, *, side_by_side: ParallelMap) -> bool:
    """Return whether `key` is live in a trial by the journal, read now. Raises `JournalCorrupt` as `load`."""
    try:
        state = load(store, key.trial.of_experiment, side_by_side=side_by_side)
    except Superseded:
        return False
    return not state.is_removed and any(is_live(trial, key) for trial in state.trials.values())


@contextmanager
def unless_retired(store: ObjectStore, key: CheckpointKey) -> Iterator[None]:
    """When the block raises `CheckpointCorrupt` for `key`, check whether the checkpoint was deleted meanwhile.

    Raises:
        CheckpointNotFound: it was retired, or its experiment is being deleted.
        CheckpointCorrupt: it was not, or the caller may not read its journal: its bytes are damaged.
    """
    try:
        yield
    except CheckpointCorrupt as damage:
        if _was_retired(store, key):
            raise CheckpointNotFound(
                f"{key.folder}: deleted while it was read: its trial has retired it, or its experiment is being "
                "deleted; choose one that is listed"
            ) from damage
        raise


def _was_retired(store: ObjectStore, key: CheckpointKey) -> bool:
    try:
        return _is_retired(store, key)
    except (StoreRefused, UnknownVersion):  # the caller may read the checkpoint only: report the damage
        return False


def _is_retired(store: ObjectStore, key: CheckpointKey) -> bool:
    try:
        state = load(store, key.trial.of_experiment, side_by_side=map)
    except Superseded:  # its experiment was deleted
        return True
    if not state.number:  # a copy without a journal, or a deleted experiment
        return store.size(key.manifest_path) is None or is_deleted(store, key.trial.of_experiment)
    trial = state.trials.get(key.trial.trial)
    return state.is_removed or (trial is not None and is_collectable(trial, key))


# Read a checkpoint back, verifying every byte while it streams; unverified bytes are never returned.


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
    if manifest.key != key:
        raise CheckpointCorrupt(f"{key.manifest_path}: holds the manifest of another checkpoint: {manifest.key.folder}")
    return manifest


def manifest_if_readable(store: ObjectStore, key: CheckpointKey | None) -> Manifest | None:
    """Return the manifest of `key`; None for no key, or if it is damaged: then no save may depend on its bytes."""
    try:
        return read_manifest(store, key) if key else None
    except (CheckpointCorrupt, CheckpointNotFound):
        return None


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


def ref_of(manifest: Manifest) -> CheckpointRef:
    """Return the reference by which the journal names the checkpoint of `manifest`."""
    about = manifest.about
    return CheckpointRef(
        step=manifest.step,
        sequence=manifest.sequence,
        metrics=about.metrics,
        trained_seconds=about.trained_seconds,
        size_bytes=manifest.size_bytes,
    )
