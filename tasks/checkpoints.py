"""The tasks that publish, download and delete a checkpoint, and those that a flow of one's own calls.

The first kind takes keys. Beside the errors that each names, it raises `StoreRefused` (credentials, permission, bucket;
retried within `retrying_refusals`), and `StoreUnavailable` or `CommitUnknown` if all retries failed. The second kind
takes plain arguments, owns the experiment as `prefect_tune.ownership` says, and calls the functions of the first.
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
    about_checkpoint,
    commit_entry,
    delete_retired,
    find_doomed,
    log_commit,
    log_damage,
)
from prefect_tune.attempt.trial_spec import TrialSpec
from prefect_tune.blocks import StorageTarget, SyncConfig
from prefect_tune.clock import new_write_id
from prefect_tune.core.checkpoints.commit import PartsOfSave, Reverification, Save, commit, reusable, with_parts
from prefect_tune.core.checkpoints.manifest import About
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
    is_collectable,
    is_live,
    newest_checkpoint,
    parent_of_next,
    reused_from,
)
from prefect_tune.core.journal_events import CheckpointRef, Reported, Retired
from prefect_tune.core.operations.scrub import quarantine
from prefect_tune.core.operations.trial_gc import collect
from prefect_tune.core.restore import manifest_if_readable, read_manifest
from prefect_tune.core.shown_text import did_you_mean_or_has
from prefect_tune.core.storage.layout import CheckpointKey, TrialKey
from prefect_tune.core.values import Stamp
from prefect_tune.journal_access import no_experiment_at, read_journal, read_undamaged
from prefect_tune.ownership import MOST_RACES, going_back, opening_events, own, trying_again, write_if_unchanged
from prefect_tune.parameters.forms import TargetLike
from prefect_tune.prefect_api.task_runs import public_task, run_here, skip_prefect_introspection
from prefect_tune.storage_retries import READ_TIMEOUT, RETRYING, RETRYING_REFUSALS, is_away, run_log
from prefect_tune.stores.local.staging import (
    StagedFiles,
    fetch_committed,
    has_same_files,
    manifest_of_copy,
    metadata_of_copy,
)
from prefect_tune.task_values import (
    CommittedCheckpoint,
    DeleteArguments,
    Directory,
    RestoreArguments,
    RestoredCheckpoint,
    SaveArguments,
    committed_checkpoint,
    misspelt,
)

_TIMEOUT_SECONDS = 1800.0


@task(name="save-checkpoint", task_run_name="save {key.trial.trial} step {key.step}", **RETRYING)
def publish_checkpoint(
    target: StorageTarget,
    key: CheckpointKey,
    directory: Path,
    about: About,
    before: Trial | None = None,
    *,
    reverification: Reverification | None = None,
    parts: PartsOfSave | None = None,
    timeout_seconds: float = _TIMEOUT_SECONDS,
) -> Save:
    """Publish the local `directory` as the checkpoint `key` on `target`; on return it is complete and durable.

    A try that failed or was killed leaves no checkpoint, and the next try reuses its uploaded bytes. `directory`
    must not change during the save.

    Args:
        about: step, metrics, write id and so on. A try with the same write id is the same save.
        before: the state of the trial: the bytes of its newest live checkpoint are not sent again.
        reverification: which reused blobs are read back first; see `reverification`.
        parts: what other nodes add to the checkpoint, and how long to wait for it.
        timeout_seconds: limit of each try; no upload continues in the background after it.

    Raises:
        AlreadyCommitted: the key holds another save.
        InvalidInput: the directory holds something that cannot be saved.
        PartMissing: a node did not add its part; not retried, and nothing was committed.
        StagedFilesChanged: a file in the directory changed during the save.
    """
    with target.open(timeout=timedelta(seconds=timeout_seconds)) as store:
        parent = manifest_if_readable(store, parent_of_next(key.trial, before) if before else None)
        reuse = reusable(store, key.trial, parent, reused_from(before) if before else 0)
        return commit(
            store,
            key,
            StagedFiles(Path(directory).absolute()),
            about,
            reuse=reuse,
            reverification=reverification,
            complete=partial(with_parts, store, parts) if parts is not None else None,
        )


@task(name="restore-checkpoint", task_run_name="restore {key.trial.trial} step {key.step}", **RETRYING)
def download_checkpoint(
    target: StorageTarget, key: CheckpointKey, destination: Path, *, timeout_seconds: float = _TIMEOUT_SECONDS
) -> Path:
    """Download the checkpoint `key` into the new directory `destination` and verify every byte; all of it or nothing.

    `destination` does not exist yet; its absolute path is returned. Each try is limited to `timeout_seconds`.

    Raises:
        CheckpointNotFound: no such checkpoint is committed.
        CheckpointCorrupt: its bytes are missing or altered; not retried.
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
def delete_retired_checkpoints(
    target: StorageTarget,
    trial: TrialKey,
    state: Trial,
    retired: Sequence[CheckpointKey],
    *,
    timeout_seconds: float = _TIMEOUT_SECONDS,
) -> int:
    """Delete checkpoints that the journal has retired; keep the blobs that a live checkpoint or a clone refers to.

    Idempotent; returns how many objects were deleted. See `prefect_tune.core.operations.trial_gc.collect`.

    Args:
        state: the trial after the entry that retired them: its live checkpoints are not touched.
        timeout_seconds: limit of each try.

    Raises:
        CheckpointCorrupt: a live manifest cannot be read, so nothing may be deleted.
        StoreRefused: not retried, even within `retrying_refusals`: the trial's next commit waits for this.
        StoreUnavailable: all retries failed; the next owner of the experiment deletes them.
    """
    with target.open(timeout=timedelta(seconds=timeout_seconds)) as store:
        return collect(store, trial, state, retired)


@dataclass(frozen=True, slots=True)
class TasksOfAttempt:
    """The `AttemptTasks` of attempts of one trial, as task runs within the calling task."""

    spec: TrialSpec

    def save(
        self,
        key: CheckpointKey,
        directory: Path,
        about: About,
        before: Trial,
        reverification: Reverification,
        parts: PartsOfSave | None = None,
    ) -> Save:
        return run_here(
            publish_checkpoint,
            self.spec.target,
            key,
            directory,
            about,
            before,
            reverification=reverification,
            parts=parts,
            timeout_seconds=self.spec.sync.sync_timeout_seconds,
        )

    def restore(self, key: CheckpointKey, destination: Path) -> Path:
        timeout_seconds = self.spec.sync.sync_timeout_seconds
        return download_checkpoint(self.spec.target, key, destination, timeout_seconds=timeout_seconds)

    def delete(self, state: Trial, retired: Sequence[CheckpointKey]) -> None:
        delete_retired_checkpoints(self.spec.target, self.spec.trial, skip_prefect_introspection(state), retired)


# The same for a flow of one's own.


@public_task(name="save-checkpoint", task_run_name="save {trial} step {step}", **RETRYING_REFUSALS)
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
    if not StagedFiles(asked.directory).files:
        raise InvalidInput(
            f"checkpoint directory {asked.directory}: expected at least one file, found none. Nothing was written: "
            "save the state into it first, or journal a step without a checkpoint by "
            "pt.sync_experiment_state(reports=...)"
        )
    return trying_again(_Save(asked).committed)


class _Save:
    """One save of a directory, which may need several tries beside other tasks of the flow run."""

    def __init__(self, asked: SaveArguments) -> None:
        self._asked, self._target, self._report, self._log = asked, asked.target, asked.report, run_log()
        # A retry of the task is the same save: it recognizes what an earlier try wrote and got no reply for.
        self._stamp = Stamp(write_id=task_run.id or new_write_id().write_id, at=new_write_id().at)

    def committed(self) -> CommittedCheckpoint:
        """Save and journal the checkpoint.

        Raises:
            SaveOvertaken: another task has changed the trial meanwhile, or a checkpoint was quarantined, whose damage
                this one may share: it is quarantined, too.
        """
        state = own(self._target, self._asked.experiment)
        self._folder = state.trial_key(self._asked.trial)
        if (found := self._existing(state)) is not None:
            return committed_checkpoint(self._target, self._folder, found)
        state = self._begun(state)
        began, trial, policy = time.monotonic(), state.trial(self._folder.trial), self._asked.retention or Retention()
        save = self._published(state)
        committed, quarantined, retired = commit_entry(
            self._target, trial, save, policy, time.monotonic() - began, self._log
        )
        state = write_if_unchanged(self._target, state, trial.trial, [*self._reports(state), committed, *quarantined])
        if not is_live(state.trial(trial.trial), save.manifest.key):
            raise SaveOvertaken(f"step {self._report.step}: its save began before a checkpoint was quarantined")
        log_commit(save, self._log)
        log_damage(save, quarantined, self._log)
        self._delete(state, retired)
        return committed_checkpoint(self._target, self._folder, committed.checkpoint, save.sent_bytes)

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
        if same is not None:
            key = self._folder.checkpoint_key(same)
            with self._target.open(timeout=READ_TIMEOUT) as store:
                manifest, staged = read_manifest(store, key), StagedFiles(self._asked.directory)
                # A copy has the metadata that were set since.
                copy = manifest_of_copy(manifest, metadata_of_copy(store, key.metadata_folder, manifest))
                if has_same_files(manifest, staged) or has_same_files(copy, staged):
                    return same
        what = "it is committed with other files" if same else f"the newest checkpoint is of step {newest.step}"
        raise AlreadyCommitted(
            f"step {step} of trial {trial.trial!r} in experiment {state.name!r} at {self._target.uri}: {what}. Nothing "
            "was written: call pt.restore_checkpoint before the training and continue after the step that it returns; "
            f"or go back by pt.delete_checkpoint(step={newest.step}); or choose another trial name"
        )

    def _reports(self, state: Experiment) -> Sequence[Reported]:
        """Return the report of this step, unless it was journaled before its checkpoint."""
        trial = self._folder.trial
        return [Reported(trial=trial, report=self._report)] if state.trial(trial).step < self._report.step else []

    def _begun(self, state: Experiment) -> Experiment:
        """Return the experiment with the trial running, before it reports the step; begin an attempt if need be.

        A new attempt also deletes the bytes of checkpoints that earlier ones retired.
        """
        trial = self._folder.trial
        if events := opening_events(state.trials.get(trial), trial, self._report.step):
            state = write_if_unchanged(self._target, state, trial, events)
            self._delete(state, find_doomed(self._target, self._folder, state.trial(trial), self._log))
        return state

    def _published(self, state: Experiment) -> Save:
        """Publish the checkpoint, for the entry that follows `state`.

        Raises:
            SaveOvertaken: an earlier save of the step was published, and failed before its entry was written. Its
                files may be others: it is abandoned, and this save needs another name.
        """
        trial, reports = state.trial(self._folder.trial), [each.report for each in self._reports(state)]
        about = about_checkpoint(self._folder, trial, state.term, self._report, reports, self._stamp)
        try:
            return publish_checkpoint.fn(
                self._target,
                CheckpointKey(trial=self._folder, step=self._report.step, sequence=trial.next_sequence),
                self._asked.directory,
                about.model_copy(update={"metadata": self._asked.metadata}),
                trial,
                # The turn grows with each commit, and no process has to count them.
                reverification=Reverification(trial.next_sequence, SyncConfig().verify_reused_every),
                timeout_seconds=self._asked.timeout_seconds,
            )
        except AlreadyCommitted as unfinished:
            # After this entry no owner adopts a save that began before it; the next attempt deletes it.
            write_if_unchanged(self._target, state, trial.trial, [Retired(trial=trial.trial, retires=())])
            raise SaveOvertaken(f"step {self._report.step}: an earlier save of it was not journaled") from unfinished

    def _delete(self, state: Experiment, doomed: Sequence[CheckpointKey]) -> None:
        if doomed:
            trial = state.trial(self._folder.trial)
            delete_retired(lambda: delete_retired_checkpoints.fn(self._target, self._folder, trial, doomed), self._log)


class _RetiredMeanwhileError(Exception):
    """The checkpoint is no longer one: its trial has retired it, and has newer ones."""


@public_task(name="restore-checkpoint", task_run_name="restore {trial}", **RETRYING)
def restore_checkpoint(
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
    damaged is quarantined, and the one before it is restored instead, with an error in the log. A name that is not on
    the target and is similar to one that is there may be misspelt: a warning in the log says so.

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
        StoreUnavailable: the target failed for longer than the retries last.
        StoreRefused: the target refused, for example since credentials have expired; this is not retried.
    """
    asked = RestoreArguments(**locals())
    for _ in range(MOST_RACES):
        state = read_journal(asked.target, asked.experiment)
        with suppress(_RetiredMeanwhileError):
            restored = _newest_good(asked, state, state.trials.get(asked.trial))
            if restored is None and (missing := misspelt(asked.target, state, asked.trial)):
                run_log().warning("Nothing was restored. %s", missing)
            return restored
    raise CheckpointNotFound(
        f"trial {trial!r} of {experiment!r} at {asked.target.uri}: {MOST_RACES} times its run deleted the checkpoint "
        "during the download. Keep more of them (retention=pt.Retention(last=2)), or restore when that run has ended"
    )


def _newest_good(asked: RestoreArguments, state: Experiment, found: Trial | None) -> RestoredCheckpoint | None:
    folder, timeout = state.trial_key(asked.trial), timedelta(seconds=asked.timeout_seconds)
    for checkpoint in _candidates(asked, state, found):
        key = folder.checkpoint_key(checkpoint)
        try:
            path = asked.target.checkpoint(key).to_directory(asked.directory, timeout=timeout)
        except (CheckpointCorrupt, CheckpointNotFound) as damage:
            _quarantine(asked, key, damage)
            if asked.step is not None:
                raise
        else:
            return RestoredCheckpoint(
                directory=Path(path),
                experiment=asked.experiment,
                trial=asked.trial,
                step=checkpoint.step,
                metrics=checkpoint.metrics,
            )
    if found is None or not (found.checkpoints or found.lost_checkpoints):
        return None
    raise ResumeFailed(
        f"trial {asked.trial!r} of {asked.experiment!r} at {asked.target.uri}: all its committed checkpoints are "
        "damaged. Nothing was restarted from zero: repair the damaged objects and release the checkpoints "
        "(prefect-tune verify --release), or train under another trial name"
    )


def _candidates(asked: RestoreArguments, state: Experiment, found: Trial | None) -> Sequence[CheckpointRef]:
    """Return the checkpoints to try, newest first."""
    newest_first = list(reversed(found.checkpoints)) if found else []
    if asked.step is None:
        return newest_first
    steps = [each.step for each in reversed(newest_first)]
    if asked.step not in steps:
        missing = "" if found else misspelt(asked.target, state, asked.trial)
        raise CheckpointNotFound(
            f"trial {asked.trial!r} of experiment {asked.experiment!r} at {asked.target.uri}: no checkpoint of step "
            f"{asked.step} is committed; those that are: {steps or 'none'}{missing and f'. {missing}'}"
        )
    return [each for each in newest_first if each.step == asked.step][:1]


def _quarantine(asked: RestoreArguments, key: CheckpointKey, damage: Exception) -> None:
    """Quarantine a damaged checkpoint for all readers, so that its step can be saved again.

    Raises:
        _RetiredMeanwhileError: it is not damaged: its trial has retired it since the journal was read.
    """
    log, reason = run_log(), f"{type(damage).__name__}: {damage}"
    try:
        with asked.target.open(timeout=READ_TIMEOUT) as store:
            journal = key.trial.of_experiment
            is_quarantined = quarantine(store, journal, {key: reason}, new_write_id())
    except StoreRefused as refused:  # it is live; these credentials only read, or the target serves one writer
        log.warning("step %d cannot be restored (%s), and could not be quarantined: %s", key.step, damage, refused)
        return
    if not is_quarantined:
        raise _RetiredMeanwhileError
    log.error("step %d cannot be restored, and is quarantined: %s", key.step, damage)


@public_task(name="delete-checkpoint", task_run_name="delete {trial} step {step}", **RETRYING_REFUSALS)
def delete_checkpoint(
    *,
    target: TargetLike,
    experiment: str,
    trial: str = "trial",
    step: int,
    timeout_seconds: float = _TIMEOUT_SECONDS,
) -> int:
    """Delete the checkpoint of a trial's step: first in the journal, then the bytes that no other checkpoint needs.

    The flow run owns the experiment from then on, as with `save_checkpoint`. A quarantined checkpoint of the step is
    deleted too, and cannot be released then. Deleting it again deletes nothing. If the
    newest checkpoint is deleted, the trial goes back to the one before it, and may save that step again. If the trial
    is running, its next attempt begins there at once, so that `show` and results have the step and metrics of it.

    Args:
        target: where the checkpoint is stored: a URI, the `type/name` of a saved block, or the block.
        experiment: the experiment's name on the target.
        trial: the trial's name in the experiment.
        step: the step of the checkpoint.
        timeout_seconds: limit of each try, in seconds.

    Returns:
        int: how many objects were deleted; 0 if there is no such checkpoint. What a killed deletion leaves is deleted
            by the next call, by the trial's next attempt, or by `prefect-tune gc`.

    Raises:
        InvalidInput: an argument is invalid, the experiment or the trial does not exist, or the experiment is a
            search. Nothing was written.
        Superseded: another flow run has taken the experiment over. Stop.
        CheckpointCorrupt: another manifest of the trial cannot be read, so that no bytes may be deleted.
        StoreUnavailable, StoreRefused, CommitUnknown: the target failed for longer than the retries last.
    """
    asked = DeleteArguments(**locals())

    def retire() -> tuple[Experiment, Sequence[CheckpointKey]]:
        """Retire the checkpoints of the step; return those to delete, or what an interrupted deletion has left."""
        state = own(asked.target, asked.experiment)
        found, folder = state.trial(asked.trial), state.trial_key(asked.trial)
        every = (*found.checkpoints, *(each.checkpoint for each in found.quarantined_checkpoints))
        if going := [each for each in every if each.step == asked.step]:
            retired = Retired(trial=asked.trial, retires=tuple(each.sequence for each in going))
            state = write_if_unchanged(asked.target, state, asked.trial, [retired, *going_back(found, going)])
            return state, [folder.checkpoint_key(each) for each in going]
        with asked.target.open(timeout=READ_TIMEOUT) as store:
            keys = [CheckpointKey.from_manifest_path(folder, each.path) for each in store.list(folder.checkpoints)]
        return state, [key for key in keys if key and key.step == asked.step and is_collectable(found, key)]

    known = read_undamaged(asked.target, asked.experiment)  # before it is owned, which would create it
    if not known.number:
        raise InvalidInput(f"{no_experiment_at(asked.target, asked.experiment)}. Nothing was deleted")
    if asked.trial not in known.trials:
        where = f"experiment {asked.experiment!r} at {asked.target.uri}"
        hint = did_you_mean_or_has(asked.trial, known.trials)
        raise InvalidInput(f"{where} has no trial {asked.trial!r}; {hint}. Nothing was deleted")
    state, doomed = trying_again(retire)
    if not doomed:
        return 0
    folder, found = state.trial_key(asked.trial), state.trial(asked.trial)
    return delete_retired_checkpoints.fn(asked.target, folder, found, doomed, timeout_seconds=asked.timeout_seconds)
