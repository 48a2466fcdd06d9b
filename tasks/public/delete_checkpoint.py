"""The public task that deletes a checkpoint of a trial."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from prefect_tune.core.did_you_mean import did_you_mean_or_has
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import Phase, Trial, is_collectable, newest_checkpoint
from prefect_tune.core.journal_events.experiment_events import CheckpointRef, Event, Retired
from prefect_tune.core.storage.layout import CheckpointKey
from prefect_tune.parameters.form_schema import TargetLike
from prefect_tune.prefect_api.task_runs.public_task import public_task
from prefect_tune.storage_retries import RETRYING_REFUSALS
from prefect_tune.tasks import checkpoints as engine
from prefect_tune.tasks.existing_experiment import read_undamaged
from prefect_tune.tasks.experiment_state import no_experiment_at
from prefect_tune.tasks.public.arguments import DeleteArguments
from prefect_tune.tasks.public.attempts import restarted, trying_again, write
from prefect_tune.tasks.public.ownership import own

__all__ = ["delete_checkpoint"]

_TIMEOUT_SECONDS = 1800.0
_LOOK = timedelta(minutes=2)


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
    _require_trial(asked)
    state, doomed = trying_again(lambda: _retired(asked))
    if not doomed:
        return 0
    found = state.trial(asked.trial)
    return engine.delete_checkpoint.fn(asked.target, asked.folder, found, doomed, timeout_seconds=asked.timeout_seconds)


def _require_trial(asked: DeleteArguments) -> None:
    """Refuse a misspelt name, before the experiment is owned, which would create it."""
    state = read_undamaged(asked.target, asked.experiment).experiment
    if not state.number:
        raise InvalidInput(f"{no_experiment_at(asked.target, asked.experiment)}. Nothing was deleted")
    if asked.trial not in state.trials:
        hint = did_you_mean_or_has(asked.trial, state.trials)
        where = f"experiment {asked.experiment!r} at {asked.target.uri}"
        raise InvalidInput(f"{where} has no trial {asked.trial!r}; {hint}. Nothing was deleted")


def _retired(asked: DeleteArguments) -> tuple[Experiment, Sequence[CheckpointKey]]:
    """Retire the checkpoints of the step; return those to delete: these, or what an interrupted deletion has left."""
    state = own(asked.target, asked.experiment)
    found = state.trial(asked.trial)
    every = (*found.checkpoints, *(each.checkpoint for each in found.aside))
    going = [each for each in every if each.step == asked.step]
    if not going:
        return state, _left_over(asked, found)
    events = [Retired(trial=asked.trial, retires=tuple(each.sequence for each in going)), *_going_back(found, going)]
    state = write(asked.target, state, asked.trial, events)
    return state, [asked.folder.checkpoint_key(each) for each in going]


def _going_back(found: Trial, going: Sequence[CheckpointRef]) -> Sequence[Event]:
    """Return the events by which a running trial goes back to the checkpoint before those of `going`."""
    newest = newest_checkpoint(found)
    if found.phase is not Phase.RUNNING or newest is None or newest not in going:
        return []
    left = tuple(each for each in found.checkpoints if each not in going)
    why = f"it goes back to step {left[-1].step if left else 0}: the checkpoint of step {newest.step} was deleted"
    return restarted(found.model_copy(update={"checkpoints": left}), why)


def _left_over(asked: DeleteArguments, found: Trial) -> Sequence[CheckpointKey]:
    """Return checkpoints of the step that an earlier call has retired, and not deleted."""
    with asked.target.open(timeout=_LOOK) as store:
        listed = store.list(asked.folder.checkpoints)
    keys = (CheckpointKey.from_manifest_path(asked.folder, each.path) for each in listed)
    return [key for key in keys if key and key.step == asked.step and is_collectable(found, key)]
