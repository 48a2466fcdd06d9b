"""Save, restore and delete a checkpoint: one retryable, timed act each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from prefect import task

from prefect_tune.blocks import StorageTarget
from prefect_tune.core.clone import clear, clone, newest_of
from prefect_tune.core.collect import leftover
from prefect_tune.core.commit import commit, reusable
from prefect_tune.core.errors import CheckpointCorrupt, CheckpointNotFound, TuneError, UnknownVersion
from prefect_tune.core.events import CheckpointRef
from prefect_tune.core.experiment import Experiment
from prefect_tune.core.layout import CheckpointKey, TrialKey
from prefect_tune.core.manifest import About, Manifest
from prefect_tune.core.restore import checkpoints_with, read_manifest, restore, verify
from prefect_tune.core.reverification import Reverification
from prefect_tune.core.store import ObjectStore
from prefect_tune.core.trial import Trial
from prefect_tune.core.values import Stamp
from prefect_tune.stores.staging import DirectorySink, StagedFiles, side_by_side
from prefect_tune.tasks.stamp import new_stamp
from prefect_tune.tasks.transient import RETRYING, is_away, retrying

__all__ = [
    "ClonedCheckpoint",
    "SavedCheckpoint",
    "clone_checkpoint",
    "code_of_checkpoint",
    "damage_of_checkpoint",
    "delete_checkpoint",
    "find_damaged",
    "find_leftovers",
    "restore_checkpoint",
    "save_checkpoint",
]

_TIMEOUT_SECONDS = 1800.0
_LOOK = timedelta(seconds=30)


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint that is on the target, and what it cost to bring it there."""

    key: CheckpointKey
    size_bytes: int
    file_count: int
    sent_bytes: int
    """New bytes; the rest was on the target already."""
    damaged: Mapping[str, str] = field(default_factory=dict)
    """By path, what is wrong with blobs of earlier checkpoints that were read back; this one does not refer to them."""


@task(name="save-checkpoint", task_run_name="save {key.trial.trial} step {key.step}", **RETRYING)
def save_checkpoint(
    target: StorageTarget,
    key: CheckpointKey,
    directory: Path,
    about: About,
    *,
    parent: CheckpointKey | None = None,
    collected_up_to: int = 0,
    reverification: Reverification | None = None,
    timeout_seconds: float = _TIMEOUT_SECONDS,
) -> SavedCheckpoint:
    """Publish the local `directory` as the checkpoint `key` on `target`: when it returns, it is there, whole.

    A try that failed or was killed leaves no checkpoint, and what it sent is not sent again. Nobody
    may write to `directory` meanwhile.

    Args:
        target: where it goes.
        key: experiment, trial, step and sequence: its name there.
        directory: what is published: all of it.
        about: step, metrics, write id and the like. A try with the same write id is the same save.
        parent: the newest live checkpoint, where `core.trial.parent_of_next` names it: what it holds is not sent.
        collected_up_to: what `core.trial.reused_from` says of the trial; see `core.commit.reusable`.
        reverification: which blobs that it reuses are read back first; see `core.reverification`.
        timeout_seconds: by then it has ended, one way or the other, and nothing goes on in the background.

    Raises:
        AlreadyCommitted: the key holds another save.
        InvalidInput: the directory holds what cannot be saved.
        StagedFilesChanged: somebody wrote to the directory.
        StoreRefused: credentials, permission or bucket; retried within `retrying_refusals`.
        StoreUnavailable, CommitUnknown: the retries are spent.
    """
    directory = Path(directory).absolute()
    with target.open(timeout=timedelta(seconds=timeout_seconds)) as store, side_by_side() as transfers:
        reuse = reusable(store, key.trial, _if_readable(store, parent), collected_up_to)
        staged = StagedFiles(directory)
        done = commit(store, key, staged, about, reuse=reuse, side_by_side=transfers, reverification=reverification)
        manifest = done.manifest
        return SavedCheckpoint(key, manifest.size_bytes, len(manifest.files), done.sent_bytes, done.damaged)


def find_damaged(
    target: StorageTarget,
    keys: Sequence[CheckpointKey],
    blobs: Mapping[str, str],
    *,
    timeout_seconds: float = 120.0,
) -> Mapping[CheckpointKey, str]:
    """Return which of the checkpoints refer to one of the damaged `blobs`; see `core.restore.checkpoints_with`."""

    def look() -> Mapping[CheckpointKey, str]:
        with target.open(timeout=timedelta(seconds=timeout_seconds)) as store, side_by_side() as transfers:
            return checkpoints_with(store, keys, blobs, side_by_side=transfers)

    return retrying(look)


def find_leftovers(
    target: StorageTarget, trial: TrialKey, state: Trial, settled_from: int, *, timeout_seconds: float = 120.0
) -> Sequence[CheckpointKey]:
    """Return the checkpoints on `target` that are none any more, or never were; see `core.collect.leftover`."""
    with target.open(timeout=timedelta(seconds=timeout_seconds)) as store:
        return leftover(store, trial, state, settled_from)


def _if_readable(store: ObjectStore, parent: CheckpointKey | None) -> Manifest | None:
    """A parent that is damaged only means that everything is sent: the new checkpoint does not depend on it."""
    try:
        return read_manifest(store, parent) if parent else None
    except (CheckpointCorrupt, CheckpointNotFound):
        return None


@dataclass(frozen=True, slots=True)
class ClonedCheckpoint:
    """A clone that is on the target, and is a checkpoint once its trial's journal says so; see `Cloned`."""

    checkpoint: CheckpointRef
    source: CheckpointKey


@task(name="clone-checkpoint", task_run_name="clone {source.trial}", **RETRYING)
def clone_checkpoint(
    target: StorageTarget,
    source: TrialKey | CheckpointKey,
    into: Experiment,
    trial: str,
    stamp: Stamp,
    *,
    timeout_seconds: float = 120.0,
) -> ClonedCheckpoint:
    """Clone a checkpoint for `trial`, within an experiment or into another one; no byte of it is copied.

    Its bytes stay for as long as the clone needs them, whatever becomes of it where it was. Journal
    `Cloned(checkpoint=..., source=...)` with what this returns, in the journal that `into` is the state of: its
    next entry, or at least before another checkpoint.

    Args:
        source: a trial, whose newest checkpoint is meant, or one checkpoint.
        into: the journal that tells of `trial`, opened by the caller.
        stamp: of this clone. A try with the same stamp is the same clone.
        timeout_seconds: for each try.

    Raises:
        CheckpointNotFound: there is none, or not any more.
        CheckpointCorrupt: its manifest is damaged; not retried.
        StoreRefused: credentials, permission or bucket; retried within `retrying_refusals`.
        StoreUnavailable, CommitUnknown: the retries are spent.
    """
    with target.open(timeout=timedelta(seconds=timeout_seconds)) as store, side_by_side() as transfers:
        gone: CheckpointKey | None = None
        while True:
            key = newest_of(store, source, side_by_side=transfers) if isinstance(source, TrialKey) else source
            try:
                return ClonedCheckpoint(clone(store, key, into, trial, stamp, side_by_side=transfers), key)
            except CheckpointNotFound:
                if key in (gone, source):
                    raise
                gone = key  # the source has gone on meanwhile, and has a newer one


def code_of_checkpoint(target: StorageTarget, key: CheckpointKey) -> str:
    """Return the digest of the source that trained up to `key`; empty where it is not known, or not to be had now."""
    try:
        with target.open(timeout=_LOOK) as store:
            return read_manifest(store, key).about.fingerprint.get("code", "")
    except TuneError:
        return ""


@task(name="verify-checkpoint", task_run_name="verify {key.trial.trial} step {key.step}", **RETRYING)
def damage_of_checkpoint(
    target: StorageTarget, key: CheckpointKey, *, timeout_seconds: float = _TIMEOUT_SECONDS
) -> str:
    """Read every byte of the checkpoint `key`, and say what is wrong with it; empty where it can be restored.

    Raises:
        StoreRefused: credentials, permission or bucket; retried within `retrying_refusals`.
        StoreUnavailable: the retries are spent.
    """
    with target.open(timeout=timedelta(seconds=timeout_seconds)) as store, side_by_side() as transfers:
        try:
            verify(store, read_manifest(store, key), side_by_side=transfers)
        except (CheckpointCorrupt, CheckpointNotFound, UnknownVersion) as damaged:
            return str(damaged)
    return ""


@task(name="restore-checkpoint", task_run_name="restore {key.trial.trial} step {key.step}", **RETRYING)
def restore_checkpoint(
    target: StorageTarget, key: CheckpointKey, destination: Path, *, timeout_seconds: float = _TIMEOUT_SECONDS
) -> Path:
    """Bring the checkpoint `key` into the new directory `destination`: every byte verified, all of it or nothing.

    Args:
        target: where it lies.
        key: experiment, trial, step and sequence: its name there.
        destination: a directory that is not there yet; it is returned.
        timeout_seconds: by then it has ended, one way or the other.

    Raises:
        CheckpointNotFound: no such checkpoint is committed.
        CheckpointCorrupt: its bytes are missing or altered; not retried.
        StoreRefused: credentials, permission or bucket; retried within `retrying_refusals`.
        StoreUnavailable: the retries are spent.
    """
    destination = Path(destination).absolute()
    with target.open(timeout=timedelta(seconds=timeout_seconds)) as store, side_by_side() as transfers:
        manifest = read_manifest(store, key)
        with DirectorySink(manifest, destination) as sink:
            restore(store, manifest, sink, side_by_side=transfers)
        return destination


@task(
    name="delete-checkpoint",
    task_run_name="delete retired of {trial.trial}",
    **{**RETRYING, "retry_condition_fn": is_away},
)
def delete_checkpoint(
    target: StorageTarget,
    trial: TrialKey,
    state: Trial,
    retired: Sequence[CheckpointKey],
    *,
    timeout_seconds: float = _TIMEOUT_SECONDS,
) -> int:
    """Delete checkpoints that the journal has retired; blobs that a live one, or a clone, refers to stay.

    Deleting twice is deleting once. See `prefect_tune.core.clone.clear`.

    Args:
        target: where they lie.
        trial: whose they are.
        state: the trial after the entry that retired them: whatever it lists as live is left alone.
        retired: which.
        timeout_seconds: by then it has ended, one way or the other.

    Returns:
        int: how many objects were deleted.

    Raises:
        CheckpointCorrupt: a live manifest cannot be read, so that nothing may be deleted.
        StoreRefused: not retried, even within `retrying_refusals`: the trial's next commit waits for this.
        StoreUnavailable: the retries are spent; the next owner of the experiment goes on with it.
    """
    with target.open(timeout=timedelta(seconds=timeout_seconds)) as store, side_by_side() as transfers:
        return clear(store, trial, state, retired, new_stamp(), side_by_side=transfers)
