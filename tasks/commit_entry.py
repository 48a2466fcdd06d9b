"""The journal entry of a saved checkpoint: the commit, what it retires, and earlier checkpoints that share damage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from prefect_tune.blocks import StorageTarget
from prefect_tune.core.checkpoints.manifest import About
from prefect_tune.core.errors import Superseded, TuneError
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.retention import Retention, retired, retired_aside
from prefect_tune.core.experiment.trial_transitions import newest_key
from prefect_tune.core.journal_events.experiment_events import CheckpointRef, Committed, Quarantined
from prefect_tune.core.models import Stamp, StepReport, flat, plural, shown_size
from prefect_tune.core.operations.checkpoint_gc import leftover
from prefect_tune.core.recovery.restore import checkpoints_with
from prefect_tune.core.storage.layout import CheckpointKey, TrialKey
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.core.texts import visible
from prefect_tune.stores.local.staging import transfer_pool
from prefect_tune.supervisor.processes.process_output import Log
from prefect_tune.tasks.checkpoints import SavedCheckpoint
from prefect_tune.tasks.on_target import on_target
from prefect_tune.terminal.formatting import format_value

_LOOK = timedelta(minutes=2)
_METRICS = 3


@dataclass(frozen=True, slots=True)
class CommitEntry:
    """The events of a commit, and the checkpoints that may be deleted once they are journaled."""

    committed: Committed
    quarantined: Sequence[Quarantined]
    """Earlier checkpoints that refer to blobs which the save found damaged."""
    retired: Sequence[CheckpointKey]

    @property
    def events(self) -> Sequence[Committed | Quarantined]:
        """The events, in order."""
        return (self.committed, *self.quarantined)


def about_checkpoint(
    folder: TrialKey, experiment: Experiment, report: StepReport, reports: Sequence[StepReport], stamp: Stamp
) -> About:
    """Return the metadata of the checkpoint of `report`'s step; `reports` are those that are not journaled yet."""
    trial = experiment.trial(folder.trial)
    return About(
        attempt=trial.attempt,
        epoch=experiment.epoch,
        write_id=stamp.write_id,
        created_at=stamp.at,
        parent=parent.name if (parent := newest_key(folder, trial)) else None,
        metrics=report.metrics,
        trained_seconds=report.trained_seconds,
        fingerprint=trial.fingerprint,
        reports=tuple(reports),
    )


def commit_entry(  # noqa: PLR0913, PLR0917 - where, the state before, what was saved and how, none follows from another
    target: StorageTarget,
    experiment: Experiment,
    saved: SavedCheckpoint,
    report: StepReport,
    policy: Retention,
    upload_seconds: float,
    log: Log,
) -> CommitEntry:
    """Return what the journal records when `saved` becomes a checkpoint of its trial, which keeps those of `policy`.

    If the save found damaged blobs, this reads the manifests of the trial's other checkpoints; if that fails, a
    warning says so, since the new checkpoint is whole.
    """
    key, trial = saved.key, experiment.trial(saved.key.trial.trial)
    new = CheckpointRef(
        step=key.step,
        sequence=key.sequence,
        metrics=report.metrics,
        trained_seconds=report.trained_seconds,
        size_bytes=saved.size_bytes,
    )
    live = (*trial.checkpoints, new)
    aside = retired_aside(trial.aside, live, policy)
    going = (*retired(live, policy), *(each.sequence for each in aside))
    committed = Committed(
        trial=trial.trial,
        checkpoint=new,
        retires=going,
        sent_bytes=saved.sent_bytes,
        upload_seconds=round(upload_seconds, 3),
    )
    stay = [key.trial.checkpoint_key(each) for each in trial.checkpoints if each.sequence not in going]
    known = {each.sequence: each for each in (*live, *aside)}
    doomed = [key.trial.checkpoint_key(known[sequence]) for sequence in going]
    return CommitEntry(committed, _sharing_damage(target, saved, stay, log), doomed)


def _sharing_damage(
    target: StorageTarget, saved: SavedCheckpoint, live: Sequence[CheckpointKey], log: Log
) -> Sequence[Quarantined]:
    """Return events that quarantine the `live` checkpoints which refer to blobs that the save found damaged."""
    if not saved.damaged:
        return []

    def look(store: ObjectStore) -> Mapping[CheckpointKey, str]:
        with transfer_pool() as transfers:
            return checkpoints_with(store, live, saved.damaged, side_by_side=transfers)

    try:
        found = on_target(target, look)
    except TuneError as error:  # the new checkpoint is whole, and is committed
        log.warning("earlier checkpoints may share the damage; they are not checked now: %s", error)
        return []
    trial = saved.key.trial.trial
    return [Quarantined(trial=trial, sequence=key.sequence, reason=why) for key, why in found.items()]


def log_damage(saved: SavedCheckpoint, quarantined: Sequence[Quarantined], log: Log) -> None:
    """Log the damaged blobs that the save found; call it once the entry of the commit is written."""
    if saved.damaged:
        log.error(
            "step %d: %s damaged on the target, and sent again; %d earlier checkpoints are quarantined: %s",
            saved.key.step,
            plural(len(saved.damaged), "blob that it would have reused is", "blobs that it would have reused are"),
            len(quarantined),
            "; ".join(saved.damaged.values()),
        )


def log_commit(saved: SavedCheckpoint, metrics: Mapping[str, object], log: Log, unlogged: int = 0) -> None:
    """Log a committed checkpoint with its first metrics and its size, and how many commits before it have no line."""
    new = "" if saved.sent_bytes >= saved.size_bytes else f", {shown_size(saved.sent_bytes)} of it new"
    named = "".join(f", {name} {format_value(value)}" for name, value in list(flat(metrics).items())[:_METRICS])
    others = f"; {plural(unlogged, 'other', 'others')} since the last line" if unlogged else ""
    log.info("step %d committed%s: %s%s%s", saved.key.step, visible(named), shown_size(saved.size_bytes), new, others)


def find_doomed(target: StorageTarget, folder: TrialKey, experiment: Experiment, log: Log) -> Sequence[CheckpointKey]:
    """Return what an earlier owner retired and did not delete; nothing, with a warning, if the target fails now."""
    try:
        with target.open(timeout=_LOOK) as store:
            return leftover(store, folder, experiment.trial(folder.trial), experiment.settled_from)
    except TuneError as error:
        log.warning("retired checkpoints of earlier attempts are not deleted now: %s", error)
        return ()


def delete_retired(delete: Callable[[], object], log: Log) -> None:
    """Delete retired checkpoints. A failure only costs space: the next attempt deletes them, from the journal.

    Raises:
        Superseded: the experiment is being deleted, or was deleted.
    """
    try:
        delete()
    except Superseded:
        raise
    except TuneError as error:
        log.warning("retired checkpoints stay on the target until the next attempt: %s", error)
