"""The engine's tasks that publish, download and delete a checkpoint, and the public tasks for users' own flows.

The engine's tasks take a `CheckpointKey` or `TrialKey`. Besides the errors in their docstrings, they raise
`StoreRefused` (wrong credentials, permission or bucket; retried within `retrying_refusals`), and `StoreUnavailable` or
`CommitUnknown` if all retries failed. The public tasks take names, and call the engine's functions. To save or delete,
they take ownership of the experiment (see `prefect_tune.ownership`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from prefect import task
from prefect.runtime import task_run

from prefect_tune.attempt.commit_worker import (
    delete_or_warn,
    find_leftover_checkpoints,
    log_commit,
    log_damage,
    make_checkpoint_metadata,
    make_commit_events,
)
from prefect_tune.attempt.trial_spec import TrialSpec
from prefect_tune.blocks import StorageTarget, SyncConfig
from prefect_tune.clock import new_write_stamp
from prefect_tune.core.checkpoints.commit import (
    ExpectedParts,
    Reverification,
    SaveResult,
    commit_checkpoint,
    find_reusable_bytes,
    merge_parts,
)
from prefect_tune.core.checkpoints.manifest import CheckpointMetadata
from prefect_tune.core.display_text import did_you_mean_or_list
from prefect_tune.core.errors import (
    AlreadyCommitted,
    CheckpointCorrupt,
    CheckpointNotFound,
    InvalidInput,
    ResumeFailed,
    SaveOvertaken,
    StoreRefused,
)
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.retention import Retention
from prefect_tune.core.experiment.trial_transitions import (
    Trial,
    is_deletable_checkpoint,
    is_live_checkpoint,
    min_reusable_sequence,
    newest_checkpoint,
    parent_of_next_save,
)
from prefect_tune.core.journal_events import CheckpointRef, CheckpointsRetired, Event, StepReported
from prefect_tune.core.operations.scrub import quarantine_in_journal
from prefect_tune.core.operations.trial_gc import delete_retired_objects
from prefect_tune.core.restore import read_manifest, read_manifest_or_none
from prefect_tune.core.storage.layout import CheckpointKey, TrialKey
from prefect_tune.core.values import WriteStamp
from prefect_tune.journal_access import (
    missing_experiment_message,
    read_experiment_by_name,
    read_experiment_raising_refusals,
)
from prefect_tune.ownership import (
    MAX_WRITE_RACES,
    ensure_ownership,
    make_attempt_start_events,
    make_rollback_events,
    retry_on_conflict,
    write_if_unchanged,
)
from prefect_tune.parameters.forms import TargetLike
from prefect_tune.prefect_api.task_runs import public_task, run_task_inline, skip_prefect_introspection
from prefect_tune.storage_retries import (
    READ_TIMEOUT,
    REFUSAL_RETRY_OPTIONS,
    TASK_RETRY_OPTIONS,
    get_run_log,
    should_retry_unless_refused,
)
from prefect_tune.stores.local.staging import (
    StagedFiles,
    add_metadata_file,
    fetch_checkpoint,
    has_same_files,
    read_copy_metadata,
)
from prefect_tune.task_values import (
    CommittedCheckpoint,
    DeleteArguments,
    Directory,
    RestoreArguments,
    RestoredCheckpoint,
    SaveArguments,
    format_misspelling_warning,
    make_committed_checkpoint,
)

_TIMEOUT_SECONDS = 1800.0


@task(name="save-checkpoint", task_run_name="save {key.trial.trial} step {key.step}", **TASK_RETRY_OPTIONS)
def publish_checkpoint(
    target: StorageTarget,
    key: CheckpointKey,
    directory: Path,
    metadata: CheckpointMetadata,
    before: Trial | None = None,
    *,
    reverification: Reverification | None = None,
    parts: ExpectedParts | None = None,
    timeout_seconds: float = _TIMEOUT_SECONDS,
) -> SaveResult:
    """Publish the local `directory` as the checkpoint `key` on `target`, complete and durable on return.

    A try that failed or was killed leaves no incomplete checkpoint, and the next try reuses the bytes that it uploaded.
    `directory` must not change during the save.

    Args:
        metadata: step, metrics, write id and so on. Tries with the same write id count as one save.
        before: the state of the trial before the save; bytes of its newest live checkpoint are not sent again.
        reverification: selects the reused blobs that are read back before the commit.
        parts: the parts that other nodes add to the checkpoint, and the time to wait for these parts.
        timeout_seconds: limit of each try, after which no upload continues in the background.

    Raises:
        AlreadyCommitted: another save has committed a checkpoint with this key.
        InvalidInput: the directory has an entry that cannot be saved.
        PartMissing: a node did not add its part; not retried, and nothing was committed.
        StagedFilesChanged: a file in the directory changed during the save.
    """
    with target.open(timeout=timedelta(seconds=timeout_seconds)) as store:
        parent = read_manifest_or_none(store, parent_of_next_save(key.trial, before) if before else None)
        reuse = find_reusable_bytes(store, key.trial, parent, min_reusable_sequence(before) if before else 0)
        return commit_checkpoint(
            store,
            key,
            StagedFiles(Path(directory).absolute()),
            metadata,
            reuse=reuse,
            reverification=reverification,
            finalize_manifest=partial(merge_parts, store, parts) if parts is not None else None,
        )


@task(name="restore-checkpoint", task_run_name="restore {key.trial.trial} step {key.step}", **TASK_RETRY_OPTIONS)
def download_checkpoint(
    target: StorageTarget, key: CheckpointKey, destination: Path, *, timeout_seconds: float = _TIMEOUT_SECONDS
) -> Path:
    """Download the checkpoint `key` to the new directory `destination` and verify every byte; all files or none appear.

    `destination` must not exist; its absolute path is returned. Each try is limited to `timeout_seconds`.

    Raises:
        CheckpointNotFound: the checkpoint is not committed.
        CheckpointCorrupt: bytes of the checkpoint are missing or altered; not retried.
    """
    destination = Path(destination).absolute()
    with target.open(timeout=timedelta(seconds=timeout_seconds)) as store:
        manifest = read_manifest(store, key)
        metadata = read_copy_metadata(store, key.metadata_folder, manifest)
        fetch_checkpoint(store, manifest, destination, metadata=metadata)
        return destination


@task(
    name="delete-checkpoint",
    task_run_name="delete retired of {trial.trial}",
    **{**TASK_RETRY_OPTIONS, "retry_condition_fn": should_retry_unless_refused},
)
def delete_retired_checkpoints(
    target: StorageTarget,
    trial: TrialKey,
    state: Trial,
    retired: Sequence[CheckpointKey],
    *,
    timeout_seconds: float = _TIMEOUT_SECONDS,
) -> int:
    """Delete checkpoints that the journal has retired; keep the blobs that a live checkpoint or a clone refers to.

    Idempotent; see `delete_retired_objects`. Returns the number of deleted objects.

    Args:
        state: the trial after the entry that retired the checkpoints. Its live checkpoints stay.
        timeout_seconds: limit of each try.

    Raises:
        CheckpointCorrupt: a live manifest cannot be read, so nothing may be deleted.
        StoreRefused: not retried, even within `retrying_refusals`, because the trial's next commit waits for this task.
        StoreUnavailable: all retries failed; the next owner of the experiment deletes the checkpoints.
    """
    with target.open(timeout=timedelta(seconds=timeout_seconds)) as store:
        return delete_retired_objects(store, trial, state, retired)


@dataclass(frozen=True, slots=True)
class PrefectAttemptTasks:
    """Implements `AttemptTasks` for one trial: each call runs as a separate task run inside the calling task run."""

    spec: TrialSpec

    def save_checkpoint(
        self,
        key: CheckpointKey,
        directory: Path,
        metadata: CheckpointMetadata,
        before: Trial,
        reverification: Reverification,
        parts: ExpectedParts | None = None,
    ) -> SaveResult:
        return run_task_inline(
            publish_checkpoint,
            self.spec.target,
            key,
            directory,
            metadata,
            before,
            reverification=reverification,
            parts=parts,
            timeout_seconds=self.spec.sync.sync_timeout_seconds,
        )

    def restore_checkpoint(self, key: CheckpointKey, destination: Path) -> Path:
        timeout_seconds = self.spec.sync.sync_timeout_seconds
        return download_checkpoint(self.spec.target, key, destination, timeout_seconds=timeout_seconds)

    def delete_checkpoints(self, state: Trial, retired: Sequence[CheckpointKey]) -> None:
        delete_retired_checkpoints(self.spec.target, self.spec.trial, skip_prefect_introspection(state), retired)


# The public tasks, for users' own flows.


@public_task(name="save-checkpoint", task_run_name="save {trial} step {step}", **REFUSAL_RETRY_OPTIONS)
def save_checkpoint(
    directory: Directory,
    *,
    target: TargetLike,
    experiment: str,
    trial: str = "trial",
    step: int,
    metrics: Mapping[str, Any] | None = None,
    trained_seconds: float = 0.0,
    metadata: Mapping[str, Any] | None = None,
    retention: Retention | None = None,
    timeout_seconds: float = _TIMEOUT_SECONDS,
) -> CommittedCheckpoint:
    """Publish a local directory as the checkpoint of a trial's step, committed and durable on return.

    From its first save on, the flow run owns the experiment, so saves of other runs fail. A run that is started again
    takes the experiment over. A killed save leaves no checkpoint, or a complete checkpoint without a journal entry.
    `restore_experiment_state` adopts such a checkpoint, so call it before `restore_checkpoint`. The next save
    sends only the missing bytes. A step whose save failed can be saved again, with the same files or with others.
    Saving a committed step again with the same files returns the existing checkpoint and sends nothing.

    Save one trial's steps one after the other; different trials may save at the same time (`.map`). With `.submit`,
    pass `wait_for=[the previous save]`.

    ```python
    pt.save_checkpoint("model", target="runs", experiment="descent", step=1, metrics={"loss": 0.5})
    ```

    Args:
        directory: the local directory, with at least one file; all its files are published. It must not change
            during the save.
        target: where to store: a URI such as `s3://bucket/runs`, the `type/name` of a saved block, or the block.
        experiment: the experiment's name on the target; it is created if it does not exist.
        trial: the trial's name in the experiment.
        step: the number of steps that the trial has trained: 1 or more, and more than in its previous checkpoint.
        metrics: the metrics of this step, for `show` and results. They are stored with the step's first save.
        trained_seconds: the training time up to this step; `show` and the report print it, unless it is 0.
        metadata: other facts as plain JSON; `pt.Checkpoint.get_metadata` returns them.
        retention: which of the trial's checkpoints to keep; others are deleted after the commit. Default: all.
        timeout_seconds: limit of each try of the upload, in seconds.

    Returns:
        CommittedCheckpoint: the checkpoint's location, step, metrics and size.

    Raises:
        AlreadyCommitted: this step has a checkpoint with other files, or a later step has a checkpoint. Restore the
            newest checkpoint before you train, or delete it.
        Superseded: another flow run has taken the experiment over. Stop.
        InvalidInput: an argument is invalid, the directory has no files or an entry that cannot be saved, or the
            experiment is a search. Nothing was written.
        BadMetric: a metric or metadata value cannot be stored.
        StagedFilesChanged: a file changed during the save.
        ResumeFailed: the experiment exists and cannot be read.
        StoreUnavailable, StoreRefused, CommitUnknown: the target failed for longer than the retries last.
    """
    args = SaveArguments(**locals())
    if not StagedFiles(args.directory).files:
        raise InvalidInput(
            f"checkpoint directory {args.directory}: expected at least one file, found none. Nothing was written: "
            "save the state into it first, or use pt.sync_experiment_state(reports=...) to journal a step that has no "
            "checkpoint"
        )
    return retry_on_conflict(_CheckpointSave(args).save_and_journal)


class _CheckpointSave:
    """One save of a directory. It needs several tries if other tasks of the flow run write at the same time."""

    def __init__(self, args: SaveArguments) -> None:
        self._args, self._target, self._report, self._log = args, args.target, args.report, get_run_log()
        # A retry of the task has the same write id, so it recognizes a write of an earlier try whose reply was lost.
        self._stamp = WriteStamp(write_id=task_run.id or new_write_stamp().write_id, at=new_write_stamp().at)

    def save_and_journal(self) -> CommittedCheckpoint:
        """Save and journal the checkpoint.

        Raises:
            SaveOvertaken: another task changed the trial during the save; or another checkpoint was quarantined, and
                so was the new checkpoint, because it may have the same damage.
        """
        state = ensure_ownership(self._target, self._args.experiment)
        self._folder = state.trial_key(self._args.trial)
        if (existing := self._find_existing_checkpoint(state)) is not None:
            return make_committed_checkpoint(self._target, self._folder, existing)
        name = self._folder.trial
        if start_events := make_attempt_start_events(state.trials.get(name), name, self._report.step):
            state = write_if_unchanged(self._target, state, name, start_events)
            leftovers = find_leftover_checkpoints(self._target, self._folder, state.trial(name), self._log)
            self._delete_retired_checkpoints(state, leftovers)  # a new attempt deletes what earlier attempts retired
        started_at, trial = time.monotonic(), state.trial(name)
        save = self._publish_directory(state)
        committed, quarantined, retired = make_commit_events(
            self._target, trial, save, self._args.retention or Retention(), time.monotonic() - started_at, self._log
        )
        events: list[Event] = [*self._make_report_events(state), committed, *quarantined]
        state = write_if_unchanged(self._target, state, trial.id, events)
        if not is_live_checkpoint(state.trial(trial.id), save.manifest.key):
            raise SaveOvertaken(f"step {self._report.step}: a checkpoint was quarantined during the save")
        log_commit(save, self._log)
        log_damage(save, quarantined, self._log)
        self._delete_retired_checkpoints(state, retired)
        return make_committed_checkpoint(self._target, self._folder, committed.checkpoint, save.sent_bytes)

    def _find_existing_checkpoint(self, state: Experiment) -> CheckpointRef | None:
        """Return the checkpoint of this step if it has the files of this save; None if the step can be saved.

        Raises:
            AlreadyCommitted: this step's checkpoint has other files, or a later step is committed.
        """
        trial = state.trials.get(self._folder.trial)
        step, newest = self._report.step, newest_checkpoint(trial) if trial else None
        if trial is None or newest is None or newest.step < step:
            return None
        existing = next((checkpoint for checkpoint in reversed(trial.checkpoints) if checkpoint.step == step), None)
        if existing is not None:
            key = self._folder.checkpoint_key(existing)
            with self._target.open(timeout=READ_TIMEOUT) as store:
                manifest, staged = read_manifest(store, key), StagedFiles(self._args.directory)
                # The directory may be a restored copy, which also has the metadata that was set since the commit.
                copy = add_metadata_file(manifest, read_copy_metadata(store, key.metadata_folder, manifest))
                if has_same_files(manifest, staged) or has_same_files(copy, staged):
                    return existing
        problem = "it is committed with other files" if existing else f"the newest checkpoint is of step {newest.step}"
        raise AlreadyCommitted(
            f"step {step} of trial {trial.id!r} in experiment {state.name!r} at {self._target.uri}: {problem}. "
            "Nothing was written: call pt.restore_checkpoint first and continue after the step that it returns; "
            f"or go back with pt.delete_checkpoint(step={newest.step}); or choose another trial name"
        )

    def _make_report_events(self, state: Experiment) -> Sequence[StepReported]:
        """Return the event that reports this step; an empty list if a report of the step is already journaled."""
        trial = self._folder.trial
        return [StepReported(trial=trial, report=self._report)] if state.trial(trial).step < self._report.step else []

    def _publish_directory(self, state: Experiment) -> SaveResult:
        """Publish the directory as a checkpoint, which the caller must then name in the next journal entry.

        Raises:
            SaveOvertaken: an earlier save of the step was published, but failed before its entry was written. The
                earlier save may have other files, so it is abandoned, and this save needs another name.
        """
        trial, reports = state.trial(self._folder.trial), [event.report for event in self._make_report_events(state)]
        metadata = make_checkpoint_metadata(self._folder, trial, state.term, self._report, reports, self._stamp)
        try:
            return publish_checkpoint.fn(
                self._target,
                CheckpointKey(trial=self._folder, step=self._report.step, sequence=trial.next_sequence),
                self._args.directory,
                metadata.model_copy(update={"user_metadata": self._args.metadata}),
                trial,
                # The sequence serves as the count of commits, since it grows with each commit.
                reverification=Reverification(trial.next_sequence, SyncConfig().verify_reused_every),
                timeout_seconds=self._args.timeout_seconds,
            )
        except AlreadyCommitted as error:
            # After this entry, no owner adopts the earlier save; the trial's next attempt deletes that save.
            retired = CheckpointsRetired(trial=trial.id, retired_sequences=())
            write_if_unchanged(self._target, state, trial.id, [retired])
            raise SaveOvertaken(f"step {self._report.step}: an earlier save of this step was not journaled") from error

    def _delete_retired_checkpoints(self, state: Experiment, keys: Sequence[CheckpointKey]) -> None:
        if keys:
            trial = state.trial(self._folder.trial)
            delete_or_warn(lambda: delete_retired_checkpoints.fn(self._target, self._folder, trial, keys), self._log)


class _RetiredDuringRestoreError(Exception):
    """The checkpoint is not damaged, but retired, because its trial has newer checkpoints."""


@public_task(name="restore-checkpoint", task_run_name="restore {trial}", **TASK_RETRY_OPTIONS)
def restore_checkpoint(
    directory: Directory | None = None,
    *,
    target: TargetLike,
    experiment: str,
    trial: str = "trial",
    step: int | None = None,
    timeout_seconds: float = _TIMEOUT_SECONDS,
) -> RestoredCheckpoint | None:
    """Download a checkpoint of a trial, by default the newest, and verify every byte; all files or none appear.

    The task reads any experiment, even a running search, and takes no ownership. It quarantines a damaged checkpoint,
    logs an error, and restores the previous checkpoint. If the experiment or trial does not exist, but one with a
    similar name does, the task logs a warning. For other arguments, such as `timeout_seconds`, see `save_checkpoint`.

    ```python
    restored = pt.restore_checkpoint(target="runs", experiment="descent")
    ```

    Args:
        directory: the destination: a directory that is empty, does not exist yet, or has this checkpoint's files.
            Default: a new directory that only this user can write to, below the temporary directory (`TMPDIR`) of the
            machine where the task runs. The directory belongs to the caller; nothing removes it.
        step: the step of the checkpoint. Default: the newest checkpoint.

    Returns:
        RestoredCheckpoint: its `directory`, `step` and `metrics`; None if `step` is None and the trial has no
            checkpoint yet, so that training starts from step 0.

    Raises:
        CheckpointNotFound: the trial has no checkpoint of `step`.
        CheckpointCorrupt: the checkpoint of `step` is damaged, and is quarantined now.
        ResumeFailed: all checkpoints of the trial are damaged. Nothing was restarted from zero.
        JournalCorrupt, UnknownVersion: the experiment cannot be read.
        InvalidInput: an argument is invalid, or `directory` has other content, which stays unchanged.
        StoreUnavailable: the target failed for longer than the retries last.
        StoreRefused: the target refused access, for example because credentials expired; not retried.
    """
    args = RestoreArguments(**locals())
    for _ in range(MAX_WRITE_RACES):
        state = read_experiment_by_name(args.target, args.experiment)
        with suppress(_RetiredDuringRestoreError):
            restored = _restore_newest_intact(args, state, state.trials.get(args.trial))
            if restored is None and (missing := format_misspelling_warning(args.target, state, args.trial)):
                get_run_log().warning("Nothing was restored. %s", missing)
            return restored
    raise CheckpointNotFound(
        f"trial {trial!r} of {experiment!r} at {args.target.uri}: the trial's run deleted the checkpoint during the "
        f"download {MAX_WRITE_RACES} times. Keep more checkpoints (retention=pt.Retention(last=2)), or wait for the run"
    )


def _restore_newest_intact(args: RestoreArguments, state: Experiment, trial: Trial | None) -> RestoredCheckpoint | None:
    folder, timeout = state.trial_key(args.trial), timedelta(seconds=args.timeout_seconds)
    for checkpoint in _list_restore_candidates(args, state, trial):
        key = folder.checkpoint_key(checkpoint)
        try:
            path = args.target.checkpoint(key).to_directory(args.directory, timeout=timeout)
        except (CheckpointCorrupt, CheckpointNotFound) as damage:
            _quarantine_checkpoint(args, key, damage)
            if args.step is not None:
                raise
        else:
            return RestoredCheckpoint(
                directory=Path(path),
                experiment=args.experiment,
                trial=args.trial,
                step=checkpoint.step,
                metrics=checkpoint.metrics,
            )
    if trial is None or not (trial.checkpoints or trial.lost_checkpoint_count):
        return None
    raise ResumeFailed(
        f"trial {args.trial!r} of {args.experiment!r} at {args.target.uri}: all its committed checkpoints are "
        "damaged. Nothing was restarted from zero: repair the damaged objects and release the checkpoints "
        "(prefect-tune verify --release), or train under another trial name"
    )


def _list_restore_candidates(args: RestoreArguments, state: Experiment, trial: Trial | None) -> Sequence[CheckpointRef]:
    """Return the checkpoints to try, newest first."""
    newest_first = list(reversed(trial.checkpoints)) if trial else []
    if args.step is None:
        return newest_first
    steps = [checkpoint.step for checkpoint in reversed(newest_first)]
    if args.step not in steps:
        hint = "" if trial else format_misspelling_warning(args.target, state, args.trial)
        raise CheckpointNotFound(
            f"trial {args.trial!r} of experiment {args.experiment!r} at {args.target.uri}: no checkpoint of step "
            f"{args.step} is committed; committed steps: {steps or 'none'}{hint and f'. {hint}'}"
        )
    return [checkpoint for checkpoint in newest_first if checkpoint.step == args.step][:1]


def _quarantine_checkpoint(args: RestoreArguments, key: CheckpointKey, damage: Exception) -> None:
    """Quarantine a damaged checkpoint for all readers, so that its step can be saved again.

    Raises:
        _RetiredDuringRestoreError: the checkpoint is not damaged, but retired since the journal was read.
    """
    log, reason = get_run_log(), f"{type(damage).__name__}: {damage}"
    try:
        with args.target.open(timeout=READ_TIMEOUT) as store:
            is_quarantined = quarantine_in_journal(store, key.trial.journal_key, {key: reason}, new_write_stamp())
    except StoreRefused as refused:  # e.g. the credentials permit only reads, or the target supports only one writer
        log.warning("step %d cannot be restored (%s), and could not be quarantined: %s", key.step, damage, refused)
        return
    if not is_quarantined:
        raise _RetiredDuringRestoreError
    log.error("step %d cannot be restored, and is quarantined: %s", key.step, damage)


@public_task(name="delete-checkpoint", task_run_name="delete {trial} step {step}", **REFUSAL_RETRY_OPTIONS)
def delete_checkpoint(
    *, target: TargetLike, experiment: str, trial: str = "trial", step: int, timeout_seconds: float = _TIMEOUT_SECONDS
) -> int:
    """Delete the checkpoint of a trial's step: first in the journal, then the bytes that no other checkpoint needs.

    The flow run then owns the experiment, as after `save_checkpoint`. A quarantined checkpoint of the step is deleted
    too, and can no longer be released. A repeated call deletes nothing. If the newest checkpoint is deleted, the trial
    goes back to the previous checkpoint, and can save the step again. If the trial is running, the journal records at
    once that the trial's next attempt starts from the previous checkpoint, so `show` and results show this checkpoint.
    For `timeout_seconds`, see `save_checkpoint`.

    ```python
    pt.delete_checkpoint(target="runs", experiment="descent", step=1)
    ```

    Args:
        step: the step of the checkpoint.

    Returns:
        int: the number of deleted objects; 0 if there is no such checkpoint. If a deletion was killed, the next call,
            the trial's next attempt or `prefect-tune gc` deletes the remaining objects.

    Raises:
        InvalidInput: an argument is invalid, the experiment or the trial does not exist, or the experiment is a search.
            Nothing was written.
        Superseded: another flow run has taken the experiment over. Stop.
        CheckpointCorrupt: another manifest of the trial is unreadable, so no bytes may be deleted.
        StoreUnavailable, StoreRefused, CommitUnknown: the target failed for longer than the retries last.
    """
    args = DeleteArguments(**locals())

    def retire_checkpoints() -> tuple[Experiment, Sequence[CheckpointKey]]:
        """Retire the step's checkpoints; return the checkpoints to delete, which an earlier call may have retired."""
        state = ensure_ownership(args.target, args.experiment)
        current, folder = state.trial(args.trial), state.trial_key(args.trial)
        checkpoints = (*current.checkpoints, *(lost.checkpoint for lost in current.quarantined_checkpoints))
        if to_retire := [checkpoint for checkpoint in checkpoints if checkpoint.step == args.step]:
            sequences = tuple(checkpoint.sequence for checkpoint in to_retire)
            retired = CheckpointsRetired(trial=args.trial, retired_sequences=sequences)
            state = write_if_unchanged(
                args.target, state, args.trial, [retired, *make_rollback_events(current, to_retire)]
            )
            return state, [folder.checkpoint_key(checkpoint) for checkpoint in to_retire]
        with args.target.open(timeout=READ_TIMEOUT) as store:
            paths = [listed.path for listed in store.list(folder.checkpoints_folder)]
        keys = [CheckpointKey.from_manifest_path(folder, path) for path in paths]
        return state, [key for key in keys if key and key.step == args.step and is_deletable_checkpoint(current, key)]

    # Read before taking ownership, which would create the experiment.
    existing = read_experiment_raising_refusals(args.target, args.experiment)
    if not existing.entry_count:
        raise InvalidInput(f"{missing_experiment_message(args.target, args.experiment)}. Nothing was deleted")
    if args.trial not in existing.trials:
        where = f"experiment {args.experiment!r} at {args.target.uri}"
        hint = did_you_mean_or_list(args.trial, existing.trials)
        raise InvalidInput(f"{where} has no trial {args.trial!r}; {hint}. Nothing was deleted")
    state, to_delete = retry_on_conflict(retire_checkpoints)
    if not to_delete:
        return 0
    folder, current = state.trial_key(args.trial), state.trial(args.trial)
    return delete_retired_checkpoints.fn(args.target, folder, current, to_delete, timeout_seconds=args.timeout_seconds)
