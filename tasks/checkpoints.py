"""The tasks that save, clone, verify, restore and delete a checkpoint, each with retries and a timeout."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

from prefect import task

from prefect_tune.attempt.attempt_tasks import ClonedCheckpoint, SavedCheckpoint
from prefect_tune.blocks import StorageTarget
from prefect_tune.core.checkpoints.commit import Reverification, alone, commit, reusable
from prefect_tune.core.checkpoints.manifest import About
from prefect_tune.core.checkpoints.parts import PartsOfSave, with_parts
from prefect_tune.core.errors import CheckpointCorrupt, CheckpointNotFound, TuneError, UnknownVersion
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.models import Stamp
from prefect_tune.core.operations.clone import clear, clone, newest_of
from prefect_tune.core.recovery import manifest_if_readable, read_manifest, verify
from prefect_tune.core.storage.layout import CheckpointKey, TrialKey
from prefect_tune.journal_access import new_write_id
from prefect_tune.storage_retries import RETRYING, is_away
from prefect_tune.stores.local.download import fetch_committed, metadata_of_copy
from prefect_tune.stores.local.staging import StagedFiles, transfer_pool

_TIMEOUT_SECONDS = 1800.0
_TIMEOUT, _OF_A_CLONE, _LOOK = timedelta(seconds=_TIMEOUT_SECONDS), timedelta(minutes=2), timedelta(seconds=30)


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
    parts: PartsOfSave | None = None,
    timeout_seconds: float = _TIMEOUT_SECONDS,
) -> SavedCheckpoint:
    """Publish the local `directory` as the checkpoint `key` on `target`; on return it is complete and durable.

    A try that failed or was killed leaves no checkpoint, and the next try reuses its uploaded bytes. `directory`
    must not change during the save.

    Args:
        target: the storage target.
        key: experiment, trial, step and sequence: the checkpoint's name on the target.
        directory: the local directory; all its files are published.
        about: step, metrics, write id and so on. A try with the same write id is the same save.
        parent: the newest live checkpoint, as `trial_transitions.parent_of_next` returns it: its bytes are not sent
            again.
        collected_up_to: the result of `trial_transitions.reused_from`; see `commit.reusable`.
        reverification: which reused blobs are read back first; see `reverification`.
        parts: what other nodes add to the checkpoint, and how long to wait for it.
        timeout_seconds: limit of each try; no upload continues in the background after it.

    Raises:
        AlreadyCommitted: the key holds another save.
        InvalidInput: the directory holds something that cannot be saved.
        PartMissing: a node did not add its part; not retried, and nothing was committed.
        StagedFilesChanged: a file in the directory changed during the save.
        StoreRefused: credentials, permission or bucket; retried within `retrying_refusals`.
        StoreUnavailable, CommitUnknown: all retries failed.
    """
    directory = Path(directory).absolute()
    with target.open(timeout=timedelta(seconds=timeout_seconds)) as store, transfer_pool() as transfers:
        reuse = reusable(store, key.trial, manifest_if_readable(store, parent), collected_up_to)
        staged = StagedFiles(directory)
        complete = partial(with_parts, store, parts) if parts is not None else alone
        done = commit(
            store,
            key,
            staged,
            about,
            reuse=reuse,
            side_by_side=transfers,
            reverification=reverification,
            complete=complete,
        )
        manifest = done.manifest
        return SavedCheckpoint(key, manifest.size_bytes, len(manifest.files), done.sent_bytes, done.damaged)


@task(name="clone-checkpoint", task_run_name="clone {source.trial}", **RETRYING)
def clone_checkpoint(
    target: StorageTarget,
    source: TrialKey | CheckpointKey,
    into: Experiment,
    trial: str,
    stamp: Stamp,
    *,
    last_step: int | None = None,
) -> ClonedCheckpoint:
    """Clone a checkpoint for `trial`, within an experiment or into another one, without copying its bytes.

    The target keeps the bytes as long as the clone needs them, even after the source is deleted. The caller must
    write `Cloned(checkpoint=..., source=...)` with the returned values to the journal of `into`, before any other
    checkpoint of the trial.

    Args:
        source: a checkpoint, or a trial, which means its newest checkpoint that another step follows.
        into: the state of the journal that holds `trial`, opened by the caller.
        stamp: write id and time of this clone. A try with the same stamp is the same clone.
        last_step: the step with which each trial ends at the latest; None if that is not known.

    Raises:
        CheckpointNotFound: the source has no checkpoint, or it was deleted.
        CheckpointCorrupt: its manifest is damaged; not retried.
        StoreRefused: credentials, permission or bucket; retried within `retrying_refusals`.
        StoreUnavailable, CommitUnknown: all retries failed.
    """
    with target.open(timeout=_OF_A_CLONE) as store, transfer_pool() as transfers:
        gone: CheckpointKey | None = None
        while True:
            if isinstance(source, TrialKey):
                key = newest_of(store, source, last_step=last_step, side_by_side=transfers)
            else:
                key = source
            try:
                return ClonedCheckpoint(clone(store, key, into, trial, stamp, side_by_side=transfers), key)
            except CheckpointNotFound:
                if key in (gone, source):
                    raise
                gone = key  # the source has committed a newer checkpoint and deleted this one


def code_of_checkpoint(target: StorageTarget, key: CheckpointKey) -> str:
    """Return the digest of the trainable's source that wrote `key`; empty if it is unknown or cannot be read now."""
    try:
        with target.open(timeout=_LOOK) as store:
            return read_manifest(store, key).about.fingerprint.get("code", "")
    except TuneError:
        return ""


@task(name="verify-checkpoint", task_run_name="verify {key.trial.trial} step {key.step}", **RETRYING)
def damage_of_checkpoint(target: StorageTarget, key: CheckpointKey) -> str:
    """Read every byte of the checkpoint `key` and return a description of its damage; empty if it can be restored.

    Raises:
        StoreRefused: credentials, permission or bucket; retried within `retrying_refusals`.
        StoreUnavailable: all retries failed.
    """
    with target.open(timeout=_TIMEOUT) as store, transfer_pool() as transfers:
        try:
            verify(store, read_manifest(store, key), side_by_side=transfers)
        except (CheckpointCorrupt, CheckpointNotFound, UnknownVersion) as damaged:
            return str(damaged)
    return ""


@task(name="restore-checkpoint", task_run_name="restore {key.trial.trial} step {key.step}", **RETRYING)
def restore_checkpoint(
    target: StorageTarget, key: CheckpointKey, destination: Path, *, timeout_seconds: float = _TIMEOUT_SECONDS
) -> Path:
    """Download the checkpoint `key` into the new directory `destination` and verify every byte; all of it or nothing.

    Args:
        target: the storage target that holds it.
        key: experiment, trial, step and sequence: the checkpoint's name on the target.
        destination: a directory that does not exist yet; its absolute path is returned.
        timeout_seconds: limit of each try.

    Raises:
        CheckpointNotFound: no such checkpoint is committed.
        CheckpointCorrupt: its bytes are missing or altered; not retried.
        StoreRefused: credentials, permission or bucket; retried within `retrying_refusals`.
        StoreUnavailable: all retries failed.
    """
    destination = Path(destination).absolute()
    with target.open(timeout=timedelta(seconds=timeout_seconds)) as store:
        manifest = read_manifest(store, key)
        metadata = metadata_of_copy(store, key.metadata_folder, manifest)
        fetch_committed(store, manifest, destination, metadata=metadata)
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
    """Delete checkpoints that the journal has retired; keep the blobs that a live checkpoint or a clone refers to.

    Idempotent. See `prefect_tune.core.operations.clone.clear`.

    Args:
        target: the storage target that holds them.
        trial: the trial that they belong to.
        state: the trial after the entry that retired them: its live checkpoints are not touched.
        retired: the checkpoints to delete.
        timeout_seconds: limit of each try.

    Returns:
        int: how many objects were deleted.

    Raises:
        CheckpointCorrupt: a live manifest cannot be read, so nothing may be deleted.
        StoreRefused: not retried, even within `retrying_refusals`: the trial's next commit waits for this.
        StoreUnavailable: all retries failed; the next owner of the experiment deletes them.
    """
    with target.open(timeout=timedelta(seconds=timeout_seconds)) as store, transfer_pool() as transfers:
        return clear(store, trial, state, retired, new_write_id(), side_by_side=transfers)
