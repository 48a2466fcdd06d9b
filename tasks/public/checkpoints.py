"""The public tasks that save, restore and delete a checkpoint of a trial."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from prefect import task
from prefect.runtime import task_run

from prefect_tune.blocks import StorageTarget, SyncConfig, resolve_target
from prefect_tune.core.checkpoints.comparison import has_same_files
from prefect_tune.core.checkpoints.metadata import plain_metadata
from prefect_tune.core.checkpoints.reverification import Reverification
from prefect_tune.core.errors import (
    AlreadyCommitted,
    CheckpointCorrupt,
    CheckpointNotFound,
    ResumeFailed,
    SaveOvertaken,
    StoreRefused,
)
from prefect_tune.core.events.experiment_events import CheckpointRef, Event, Reported, Retired
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.retention import Retention
from prefect_tune.core.experiment.trial_transitions import (
    Trial,
    is_overtaken,
    newest_checkpoint,
    parent_of_next,
    reused_from,
)
from prefect_tune.core.journal.journal import load
from prefect_tune.core.journal.trial_journal import trial_today
from prefect_tune.core.metrics import storable
from prefect_tune.core.models import Stamp, StepReport
from prefect_tune.core.operations.quarantine import quarantine
from prefect_tune.core.recovery.restore import read_manifest
from prefect_tune.core.storage.layout import CheckpointKey, TrialKey
from prefect_tune.stores.local.staging import StagedFiles, transfer_pool
from prefect_tune.supervisor.run_identity import new_write_id
from prefect_tune.task_retries import RETRYING, run_log
from prefect_tune.tasks import checkpoints as engine
from prefect_tune.tasks.commit_entry import about_checkpoint, commit_entry, delete_retired, log_commit, log_damage
from prefect_tune.tasks.public.arguments import Directory, TargetLike, trial_key, valid_step
from prefect_tune.tasks.public.attempts import begin_attempt, trying_again, write
from prefect_tune.tasks.public.ownership import own
from prefect_tune.tasks.public.results import (
    CommittedCheckpoint,
    RestoredCheckpoint,
    committed_checkpoint,
    restored_checkpoint,
)

__all__ = ["delete_checkpoint", "restore_checkpoint", "save_checkpoint"]

_TIMEOUT_SECONDS = 1800.0
_LOOK = timedelta(minutes=2)
_VERIFIED_EVERY = SyncConfig.model_fields["verify_reused_every"].default


@task(name="save-checkpoint", task_run_name="save {trial} step {step}", **RETRYING)
def save_checkpoint(  # noqa: PLR0913 - a form: the place, the content and the rules, each with its default
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
    """Publish a local directory as the checkpoint of a trial's step; on return it is committed, and durable.

    The flow run owns the experiment from its first save on: the saves of any other run are refused from then on, and
    a run that is started again takes over. A save that was killed leaves no checkpoint, or a whole one if only its
    entry in the journal was missing: call `restore_experiment_state` before `restore_checkpoint`, so that it is found.
    The next save sends only the bytes that are missing. Saving a step again with the same files returns its
    checkpoint and sends nothing.

    Save one trial's steps one after another, and different trials as you like (`.map`). With `.submit`, pass
    `wait_for=[the save before]`.

    Args:
        directory: the local directory; all its files are published. It must not change during the save.
        target: where it is stored: a URI such as `s3://bucket/runs`, the `type/name` of a saved block, such as
            `s3-target/prod`, or the block.
        experiment: the experiment's name on the target; it is created if it does not exist.
        trial: the trial's name in the experiment.
        step: how many steps the trial has trained: 1 or more, and more than in the checkpoint before.
        metrics: the metrics of this step, as `show` and results list them. They are stored with the first save of it.
        trained_seconds: the training time up to this step, in seconds, as `show` and the report tell it.
        metadata: other facts, plain JSON, which `pt.Checkpoint.get_metadata` returns.
        retention: which of the trial's checkpoints to keep; the others are deleted after the commit. Default: all.
        timeout_seconds: limit of each try of the upload, in seconds.

    Returns:
        CommittedCheckpoint: the checkpoint's place, step, metrics and size.

    Raises:
        AlreadyCommitted: this step has a checkpoint of other files, or a later step has one. Restore the newest
            checkpoint before you train, or delete it.
        Superseded: another flow run has taken the experiment over. Stop.
        InvalidInput: an argument is invalid, the directory holds something that cannot be saved, or the experiment is
            a search. Nothing was written.
        BadMetric: a metric or metadata value cannot be stored.
        StagedFilesChanged: a file changed during the save.
        ResumeFailed: the experiment exists and cannot be read.
        StoreUnavailable, StoreRefused, CommitUnknown: the target failed for longer than the retries last.
    """
    place, folder = resolve_target(target), trial_key(experiment, trial)
    plain = storable(metrics or {}, "metrics")
    report = StepReport(step=valid_step(step), metrics=plain, trained_seconds=trained_seconds)
    save = _Save(place, folder, Path(directory).absolute(), report, plain_metadata(metadata or {}))
    return trying_again(lambda: save.committed(retention or Retention(), timeout_seconds))


class _Save:
    """One save of a directory, which may need several tries beside other tasks of the flow run."""

    def __init__(
        self,
        target: StorageTarget,
        folder: TrialKey,
        directory: Path,
        report: StepReport,
        metadata: Mapping[str, object],
    ) -> None:
        self._target = target
        self._folder = folder
        self._directory = directory
        self._report = report
        self._metadata = metadata
        self._log = run_log()
        # A retry of the task is the same save: it recognizes what an earlier try wrote and got no reply for.
        self._stamp = Stamp(write_id=task_run.id or new_write_id().write_id, at=new_write_id().at)

    def committed(self, policy: Retention, timeout_seconds: float) -> CommittedCheckpoint:
        """Save and journal the checkpoint; `SaveOvertaken` if another task has changed the trial meanwhile."""
        StagedFiles(self._directory)  # refuses what cannot be saved, before anything is written
        state = own(self._target, self._folder.experiment)
        if (found := self._existing(state)) is not None:
            return committed_checkpoint(self._target, self._folder, found)
        state = begin_attempt(self._target, state, self._folder, self._report.step, self._log)
        began = time.monotonic()
        saved = self._saved(state, timeout_seconds)
        seconds = time.monotonic() - began
        entry = commit_entry(self._target, state, saved, self._report, policy, seconds, self._log)
        state = self._journaled(state, saved.key, [*self._reports(state), *entry.events])
        log_commit(saved, self._log)
        log_damage(saved, entry.quarantined, self._log)
        self._delete(state, entry.retired)
        return committed_checkpoint(self._target, self._folder, entry.committed.checkpoint, saved.sent_bytes)

    def _existing(self, state: Experiment) -> CheckpointRef | None:
        """Return the checkpoint of this step if it has these files; None if the step may be saved.

        Raises:
            AlreadyCommitted: it has other files, or a later step is committed.
        """
        trial = state.trials.get(self._folder.trial)
        step, newest = self._report.step, newest_checkpoint(trial) if trial else None
        if trial is None or newest is None or newest.step < step:
            return None
        same = next((each for each in reversed(trial.checkpoints) if each.step == step), None)
        if same is not None and self._has_these_files(self._folder.checkpoint_key(same)):
            return same
        what = (
            "it is committed with other files"
            if same is not None
            else f"the newest checkpoint is of step {newest.step}"
        )
        raise AlreadyCommitted(
            f"step {step} of trial {trial.trial!r} in experiment {state.name!r} at {self._target.uri}: {what}. Nothing "
            "was written: call pt.restore_checkpoint before the training and continue after the step that it returns; "
            f"or go back by pt.delete_checkpoint(step={newest.step}); or choose another trial name"
        )

    def _has_these_files(self, key: CheckpointKey) -> bool:
        with self._target.open(timeout=_LOOK) as store:
            return has_same_files(read_manifest(store, key), StagedFiles(self._directory))

    def _reports(self, state: Experiment) -> Sequence[Reported]:
        """Return the report of this step, unless it was journaled before its checkpoint."""
        trial = self._folder.trial
        return [Reported(trial=trial, report=self._report)] if state.trial(trial).step < self._report.step else []

    def _saved(self, state: Experiment, timeout_seconds: float) -> engine.SavedCheckpoint:
        trial = state.trial(self._folder.trial)
        reports = [each.report for each in self._reports(state)]
        about = about_checkpoint(self._folder, state, self._report, reports, self._stamp)
        return engine.save_checkpoint.fn(
            self._target,
            CheckpointKey(trial=self._folder, step=self._report.step, sequence=state.number),
            self._directory,
            about.model_copy(update={"metadata": self._metadata}),
            parent=parent_of_next(self._folder, trial),
            collected_up_to=reused_from(trial),
            # The turn is the journal's length: it grows with each commit, and no process has to count them.
            reverification=Reverification(state.number, _VERIFIED_EVERY),
            timeout_seconds=timeout_seconds,
        )

    def _journaled(self, state: Experiment, key: CheckpointKey, events: Sequence[Event]) -> Experiment:
        """Write the commit's entry. If a checkpoint was quarantined meanwhile, this save may share its damage."""
        trial = self._folder.trial
        try:
            return write(self._target, state, trial, events)
        except SaveOvertaken:
            now = own(self._target, self._folder.experiment)
            if is_overtaken(now.trial(trial), key.sequence):
                # From this entry on no owner adopts the save; the next attempt deletes it.
                write(self._target, now, trial, [Retired(trial=trial, retires=())])
            raise

    def _delete(self, state: Experiment, doomed: Sequence[CheckpointKey]) -> None:
        if doomed:
            trial = state.trial(self._folder.trial)
            delete_retired(
                lambda: engine.delete_checkpoint.fn(self._target, self._folder, trial, doomed),
                self._log,
            )


@task(name="restore-checkpoint", task_run_name="restore {trial}", **RETRYING)
def restore_checkpoint(  # noqa: PLR0913 - the place, and where the files go, each with its default
    directory: Directory | None = None,
    *,
    target: TargetLike,
    experiment: str,
    trial: str = "trial",
    step: int | None = None,
    timeout_seconds: float = _TIMEOUT_SECONDS,
) -> RestoredCheckpoint | None:
    """Download a checkpoint of a trial, its newest one by default, and verify every byte; all of it or nothing.

    It reads any experiment, that of a running search too, and takes nothing over. A checkpoint that turns out to be
    damaged is quarantined, and the one before it is restored instead, with an error in the log.

    Args:
        directory: where the files go: a directory that is empty, does not exist yet, or has this checkpoint's files.
            Default: a new directory below the system's directory for temporary files (`TMPDIR`), on the machine where
            the task runs, which other users cannot write to. Either belongs to the caller, and nothing removes it.
        target: where the checkpoint is stored: a URI, the `type/name` of a saved block, or the block.
        experiment: the experiment's name on the target.
        trial: the trial's name in the experiment.
        step: the step of the checkpoint. Default: that of the newest one.
        timeout_seconds: limit of each try, in seconds.

    Returns:
        RestoredCheckpoint: its `directory`, `step` and `metrics`; None if no step was asked for and the trial has no
            checkpoint yet, so that training starts from nothing.

    Raises:
        CheckpointNotFound: the trial has no checkpoint of `step`.
        CheckpointCorrupt: the checkpoint of `step` is damaged, and is quarantined now.
        ResumeFailed: all checkpoints of the trial are damaged. Nothing was restarted from zero.
        JournalCorrupt, UnknownVersion: the experiment cannot be read.
        InvalidInput: an argument is invalid, or `directory` has other content, which is not touched.
        StoreUnavailable, StoreRefused: the target failed for longer than the retries last.
    """
    place, folder = resolve_target(target), trial_key(experiment, trial)
    wanted = None if step is None else valid_step(step)
    found = _trial_at(place, folder)
    for checkpoint in _candidates(found, folder, place, wanted):
        key = folder.checkpoint_key(checkpoint)
        limit = timedelta(seconds=timeout_seconds)
        try:
            path = place.checkpoint(key).to_directory(directory, timeout=limit)
        except (CheckpointCorrupt, CheckpointNotFound) as damage:
            _quarantine(place, key, damage)
            if wanted is not None:
                raise
        else:
            return restored_checkpoint(folder, checkpoint, Path(path))
    if found is None or not (found.checkpoints or found.lost_checkpoints):
        return None
    raise ResumeFailed(
        f"trial {trial!r} of {experiment!r} at {place.uri}: all its committed checkpoints are damaged. Nothing was "
        "restarted from zero: repair the damaged objects and release the checkpoints (prefect-tune verify --release), "
        "or train under another trial name"
    )


def _trial_at(target: StorageTarget, folder: TrialKey) -> Trial | None:
    with target.open(timeout=_LOOK) as store, transfer_pool() as transfers:
        known = load(store, folder.experiment, side_by_side=transfers).trials.get(folder.trial)
        return trial_today(store, folder.experiment, known, side_by_side=transfers) if known else None


def _candidates(
    found: Trial | None, folder: TrialKey, target: StorageTarget, step: int | None
) -> Sequence[CheckpointRef]:
    """Return the checkpoints to try, newest first."""
    newest_first = list(reversed(found.checkpoints)) if found else []
    if step is None:
        return newest_first
    steps = [each.step for each in reversed(newest_first)]
    if step not in steps:
        raise CheckpointNotFound(
            f"trial {folder.trial!r} of experiment {folder.experiment!r} at {target.uri}: no checkpoint of step {step} "
            f"is committed; those that are: {steps or 'none'}"
        )
    return [each for each in newest_first if each.step == step][:1]


def _quarantine(target: StorageTarget, key: CheckpointKey, damage: Exception) -> None:
    """Quarantine a damaged checkpoint for all readers, so that its step can be saved again."""
    log, reason = run_log(), f"{type(damage).__name__}: {damage}"
    log.error("step %d cannot be restored, and is quarantined: %s", key.step, damage)
    try:
        with target.open(timeout=_LOOK) as store, transfer_pool() as transfers:
            quarantine(store, key.trial, {key: reason}, new_write_id(), side_by_side=transfers)
    except StoreRefused as refused:  # credentials that only read
        log.warning("step %d could not be quarantined: %s", key.step, refused)


@task(name="delete-checkpoint", task_run_name="delete {trial} step {step}", **RETRYING)
def delete_checkpoint(
    *,
    target: TargetLike,
    experiment: str,
    trial: str = "trial",
    step: int,
    timeout_seconds: float = _TIMEOUT_SECONDS,
) -> int:
    """Delete the checkpoint of a trial's step: first in the journal, then the bytes that no other checkpoint needs.

    The flow run owns the experiment from then on, as with `save_checkpoint`. Deleting it again deletes nothing. If the
    newest checkpoint is deleted, the trial goes back to the one before it, and may save that step again.

    Args:
        target: where the checkpoint is stored: a URI, the `type/name` of a saved block, or the block.
        experiment: the experiment's name on the target.
        trial: the trial's name in the experiment.
        step: the step of the checkpoint.
        timeout_seconds: limit of each try, in seconds.

    Returns:
        int: how many objects were deleted; 0 if there is no such checkpoint. What a killed deletion leaves is deleted
            by the trial's next attempt, or by `prefect-tune gc`.

    Raises:
        InvalidInput: an argument is invalid, or the experiment is a search.
        Superseded: another flow run has taken the experiment over. Stop.
        CheckpointCorrupt: another manifest of the trial cannot be read, so that no bytes may be deleted.
        StoreUnavailable, StoreRefused, CommitUnknown: the target failed for longer than the retries last.
    """
    place, folder, wanted = resolve_target(target), trial_key(experiment, trial), valid_step(step)

    def retire() -> tuple[Experiment, Sequence[CheckpointKey]]:
        state = own(place, experiment)
        found = state.trials.get(trial)
        going = [each for each in found.checkpoints if each.step == wanted] if found else []
        if not going:
            return state, ()
        event = Retired(trial=trial, retires=tuple(each.sequence for each in going))
        return write(place, state, trial, [event]), [folder.checkpoint_key(each) for each in going]

    state, doomed = trying_again(retire)
    if not doomed:
        return 0
    timeout = timeout_seconds
    return engine.delete_checkpoint.fn(place, folder, state.trial(trial), doomed, timeout_seconds=timeout)
