"""The public task that restores a checkpoint of a trial."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from prefect_tune.core.errors import CheckpointCorrupt, CheckpointNotFound, ResumeFailed, StoreRefused
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.journal.journal import load
from prefect_tune.core.journal.trial_journal import trial_today
from prefect_tune.core.journal_events.experiment_events import CheckpointRef
from prefect_tune.core.operations.quarantine import quarantine
from prefect_tune.core.storage.layout import CheckpointKey
from prefect_tune.parameters.form_schema import TargetLike
from prefect_tune.prefect_api.task_runs.public_task import public_task
from prefect_tune.storage_retries import RETRYING, run_log
from prefect_tune.stores.local.staging import transfer_pool
from prefect_tune.supervisor.run_identity import new_write_id
from prefect_tune.tasks.public.arguments import Directory, RestoreArguments
from prefect_tune.tasks.public.results import RestoredCheckpoint
from prefect_tune.tasks.public.similar_names import similar_experiment, similar_name

__all__ = ["restore_checkpoint"]

_TIMEOUT_SECONDS = 1800.0
_LOOK = timedelta(minutes=2)
_TRIES = 16


class _RetiredMeanwhileError(Exception):
    """The checkpoint is no longer one: its trial has retired it, and has newer ones."""


@public_task(name="restore-checkpoint", task_run_name="restore {trial}", **RETRYING)
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
    for _ in range(_TRIES):
        found = _trial_at(asked)
        with suppress(_RetiredMeanwhileError):
            restored = _newest_good(asked, found)
            if restored is None and (missing := _misspelt(asked)):
                run_log().warning("Nothing was restored. %s", missing)
            return restored
    raise CheckpointNotFound(
        f"trial {trial!r} of {experiment!r} at {asked.target.uri}: {_TRIES} times its run deleted the checkpoint "
        "during the download. Keep more of them (retention=pt.Retention(last=2)), or restore when that run has ended"
    )


def _misspelt(asked: RestoreArguments) -> str:
    """Return that the experiment or the trial is not on the target, if its name may be misspelt; else an empty text."""
    with asked.target.open(timeout=_LOOK) as store, transfer_pool() as transfers:
        state = load(store, asked.experiment, side_by_side=transfers)
    if not state.number:
        hint = similar_experiment(asked.target, asked.experiment)
        return f"There is no experiment {asked.experiment!r} at {asked.target.uri}{hint}" if hint else ""
    hint = similar_name(asked.trial, state.trials) if asked.trial not in state.trials else ""
    return f"Experiment {asked.experiment!r} at {asked.target.uri} has no trial {asked.trial!r}{hint}" if hint else ""


def _trial_at(asked: RestoreArguments) -> Trial | None:
    with asked.target.open(timeout=_LOOK) as store, transfer_pool() as transfers:
        known = load(store, asked.experiment, side_by_side=transfers).trials.get(asked.trial)
        return trial_today(store, asked.experiment, known, side_by_side=transfers) if known else None


def _newest_good(asked: RestoreArguments, found: Trial | None) -> RestoredCheckpoint | None:
    for checkpoint in _candidates(asked, found):
        key = asked.folder.checkpoint_key(checkpoint)
        try:
            path = asked.target.checkpoint(key).to_directory(asked.directory, timeout=asked.timeout)
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


def _candidates(asked: RestoreArguments, found: Trial | None) -> Sequence[CheckpointRef]:
    """Return the checkpoints to try, newest first."""
    newest_first = list(reversed(found.checkpoints)) if found else []
    if asked.step is None:
        return newest_first
    steps = [each.step for each in reversed(newest_first)]
    if asked.step not in steps:
        missing = "" if found else _misspelt(asked)
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
        with asked.target.open(timeout=_LOOK) as store, transfer_pool() as transfers:
            is_aside = quarantine(store, key.trial, {key: reason}, new_write_id(), side_by_side=transfers)
    except StoreRefused as refused:  # it is live; these credentials only read, or the target serves one writer
        log.warning("step %d cannot be restored (%s), and could not be quarantined: %s", key.step, damage, refused)
        return
    if not is_aside:
        raise _RetiredMeanwhileError
    log.error("step %d cannot be restored, and is quarantined: %s", key.step, damage)
