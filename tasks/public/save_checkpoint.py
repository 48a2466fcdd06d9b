"""The public task that saves a checkpoint of a trial."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from prefect.runtime import task_run

from prefect_tune.blocks import SyncConfig
from prefect_tune.core.checkpoints.comparison import has_same_files
from prefect_tune.core.checkpoints.reverification import Reverification
from prefect_tune.core.errors import AlreadyCommitted, InvalidInput, SaveOvertaken
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.retention import Retention
from prefect_tune.core.experiment.trial_transitions import is_overtaken, newest_checkpoint, parent_of_next, reused_from
from prefect_tune.core.journal_events.experiment_events import CheckpointRef, Event, Reported, Retired
from prefect_tune.core.models import Stamp
from prefect_tune.core.recovery.restore import read_manifest
from prefect_tune.core.storage.layout import CheckpointKey
from prefect_tune.parameters.form_schema import TargetLike
from prefect_tune.prefect_api.task_runs.public_task import public_task
from prefect_tune.storage_retries import RETRYING_REFUSALS, run_log
from prefect_tune.stores.local.download import manifest_of_copy, metadata_of_copy
from prefect_tune.stores.local.staging import StagedFiles
from prefect_tune.supervisor.run_identity import new_write_id
from prefect_tune.tasks import checkpoints as engine
from prefect_tune.tasks.commit_entry import about_checkpoint, commit_entry, delete_retired, log_commit, log_damage
from prefect_tune.tasks.public.arguments import Directory, SaveArguments
from prefect_tune.tasks.public.attempts import begin_attempt, trying_again, write
from prefect_tune.tasks.public.ownership import own
from prefect_tune.tasks.public.results import CommittedCheckpoint, committed_checkpoint

__all__ = ["save_checkpoint"]

_TIMEOUT_SECONDS = 1800.0
_LOOK = timedelta(minutes=2)
_VERIFIED_EVERY = SyncConfig.model_fields["verify_reused_every"].default


@public_task(name="save-checkpoint", task_run_name="save {trial} step {step}", **RETRYING_REFUSALS)
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
    The next save sends only the bytes that are missing. A step whose save failed can be saved again, with the same
    files or with others. Saving a committed step again with the same files returns its checkpoint and sends nothing.

    Save one trial's steps one after another, and different trials as you like (`.map`). With `.submit`, pass
    `wait_for=[the save before]`.

    Args:
        directory: the local directory; all its files are published. It has one at least, and must not change during
            the save.
        target: where it is stored: a URI such as `s3://bucket/runs`, the `type/name` of a saved block, such as
            `s3-target/prod`, or the block.
        experiment: the experiment's name on the target; it is created if it does not exist.
        trial: the trial's name in the experiment.
        step: how many steps the trial has trained: 1 or more, and more than in the checkpoint before.
        metrics: the metrics of this step, as `show` and results list them. They are stored with the first save of it.
        trained_seconds: the training time up to this step, in seconds, for `show` and the report. Default: 0, which
            means that it was not measured, so that they leave it out.
        metadata: other facts, plain JSON, which `pt.Checkpoint.get_metadata` returns.
        retention: which of the trial's checkpoints to keep; the others are deleted after the commit. Default: all.
        timeout_seconds: limit of each try of the upload, in seconds.

    Returns:
        CommittedCheckpoint: the checkpoint's place, step, metrics and size.

    Raises:
        AlreadyCommitted: this step has a checkpoint of other files, or a later step has one. Restore the newest
            checkpoint before you train, or delete it.
        Superseded: another flow run has taken the experiment over. Stop.
        InvalidInput: an argument is invalid, the directory holds no file or something that cannot be saved, or the
            experiment is a search. Nothing was written.
        BadMetric: a metric or metadata value cannot be stored.
        StagedFilesChanged: a file changed during the save.
        ResumeFailed: the experiment exists and cannot be read.
        StoreUnavailable, StoreRefused, CommitUnknown: the target failed for longer than the retries last.
    """
    asked = SaveArguments(**locals())
    save = _Save(asked)
    return trying_again(save.committed)


def _require_files(directory: Path) -> None:
    """Refuse what cannot be saved, before anything is written."""
    if not StagedFiles(directory).files:
        raise InvalidInput(
            f"checkpoint directory {directory}: expected at least one file, found none. Nothing was written: save the "
            "state into it first, or journal a step without a checkpoint by pt.sync_experiment_state(reports=...)"
        )


class _Save:
    """One save of a directory, which may need several tries beside other tasks of the flow run."""

    def __init__(self, asked: SaveArguments) -> None:
        self._asked = asked
        self._target = asked.target
        self._folder = asked.folder
        self._report = asked.report
        self._log = run_log()
        # A retry of the task is the same save: it recognizes what an earlier try wrote and got no reply for.
        self._stamp = Stamp(write_id=task_run.id or new_write_id().write_id, at=new_write_id().at)

    def committed(self) -> CommittedCheckpoint:
        """Save and journal the checkpoint; `SaveOvertaken` if another task has changed the trial meanwhile."""
        _require_files(self._asked.directory)
        state = own(self._target, self._folder.experiment)
        if (found := self._existing(state)) is not None:
            return committed_checkpoint(self._target, self._folder, found)
        state = begin_attempt(self._target, state, self._folder, self._report.step, self._log)
        began = time.monotonic()
        saved = self._uploaded(state)
        seconds = time.monotonic() - began
        policy = self._asked.retention or Retention()
        entry = commit_entry(self._target, state, saved, self._report, policy, seconds, self._log)
        state = self._journaled(state, saved.key, [*self._reports(state), *entry.events])
        log_commit(saved, self._report.metrics, self._log)
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
        """Whether the directory is what was saved, or a copy of it with the metadata that were set since."""
        with self._target.open(timeout=_LOOK) as store:
            manifest, staged = read_manifest(store, key), StagedFiles(self._asked.directory)
            copy = manifest_of_copy(manifest, metadata_of_copy(store, key.metadata_folder, manifest))
            return has_same_files(manifest, staged) or has_same_files(copy, staged)

    def _reports(self, state: Experiment) -> Sequence[Reported]:
        """Return the report of this step, unless it was journaled before its checkpoint."""
        trial = self._folder.trial
        return [Reported(trial=trial, report=self._report)] if state.trial(trial).step < self._report.step else []

    def _uploaded(self, state: Experiment) -> engine.SavedCheckpoint:
        """Publish the checkpoint, for the entry that follows `state`.

        Raises:
            SaveOvertaken: an earlier save of the step was published, and failed before its entry was written. Its
                files may be others: it is abandoned, and this save needs another name.
        """
        try:
            return self._published(state)
        except AlreadyCommitted as unfinished:
            self._abandon(state)
            raise SaveOvertaken(f"step {self._report.step}: an earlier save of it was not journaled") from unfinished

    def _published(self, state: Experiment) -> engine.SavedCheckpoint:
        trial = state.trial(self._folder.trial)
        reports = [each.report for each in self._reports(state)]
        about = about_checkpoint(self._folder, state, self._report, reports, self._stamp)
        return engine.save_checkpoint.fn(
            self._target,
            CheckpointKey(trial=self._folder, step=self._report.step, sequence=state.number),
            self._asked.directory,
            about.model_copy(update={"metadata": self._asked.metadata}),
            parent=parent_of_next(self._folder, trial),
            collected_up_to=reused_from(trial),
            # The turn is the journal's length: it grows with each commit, and no process has to count them.
            reverification=Reverification(state.number, _VERIFIED_EVERY),
            timeout_seconds=self._asked.timeout_seconds,
        )

    def _journaled(self, state: Experiment, key: CheckpointKey, events: Sequence[Event]) -> Experiment:
        """Write the commit's entry. If a checkpoint was quarantined meanwhile, this save may share its damage."""
        trial = self._folder.trial
        try:
            return write(self._target, state, trial, events)
        except SaveOvertaken:
            now = own(self._target, self._folder.experiment)
            if is_overtaken(now.trial(trial), key.sequence):
                self._abandon(now)
            raise

    def _abandon(self, state: Experiment) -> None:
        """Write an entry after which no owner adopts a save that began before it; the next attempt deletes it."""
        trial = self._folder.trial
        write(self._target, state, trial, [Retired(trial=trial, retires=())])

    def _delete(self, state: Experiment, doomed: Sequence[CheckpointKey]) -> None:
        if doomed:
            trial = state.trial(self._folder.trial)
            delete_retired(
                lambda: engine.delete_checkpoint.fn(self._target, self._folder, trial, doomed),
                self._log,
            )
