"""Begin an attempt of a trial in a flow of one's own, and the events of its reports and of its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from prefect_tune.blocks import StorageTarget
from prefect_tune.core.errors import SaveOvertaken, StoreUnavailable
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import ENDED, Phase, Trial
from prefect_tune.core.journal_events.experiment_events import AttemptEnded, Cause, Event, Requeued, Started, TrialAdded
from prefect_tune.core.models import Stamp
from prefect_tune.core.storage.layout import TrialKey
from prefect_tune.supervisor.processes.process_output import Log
from prefect_tune.supervisor.run_identity import new_write_id
from prefect_tune.tasks.checkpoints import delete_checkpoint
from prefect_tune.tasks.commit_entry import delete_retired, find_doomed
from prefect_tune.tasks.public.ownership import append_beside_others
from prefect_tune.tasks.trial_attempt import next_start

__all__ = ["begin_attempt", "opening_events", "restarted", "trying_again", "write"]

_TRIES = 16
_Result = TypeVar("_Result")


def trying_again(act: Callable[[], _Result]) -> _Result:
    """Return `act()`, repeated while other tasks of this flow run change the trial meanwhile.

    Raises:
        StoreUnavailable: they did so 16 times.
    """
    for _ in range(_TRIES):
        try:
            return act()
        except SaveOvertaken as overtaken:
            last = overtaken
    raise StoreUnavailable(f"{last}; tried {_TRIES} times: save one trial from one task at a time") from last


def write(
    target: StorageTarget, known: Experiment, trial: str, events: Sequence[Event], stamp: Stamp | None = None
) -> Experiment:
    """Write `events` of `trial` as one entry; raise `SaveOvertaken` if another task has changed the trial."""

    def require_same(now: Experiment) -> None:
        if now.trials.get(trial) != known.trials.get(trial):
            raise SaveOvertaken(f"{now.key}: another task has changed trial {trial!r} meanwhile")

    return append_beside_others(target, known, events, stamp or new_write_id(), require_same)


def begin_attempt(target: StorageTarget, state: Experiment, folder: TrialKey, step: int, log: Log) -> Experiment:
    """Return the experiment with `folder`'s trial running, before it reports `step`; begin an attempt if need be.

    A new attempt also deletes the bytes of checkpoints that earlier ones retired.
    """
    events = opening_events(state.trials.get(folder.trial), folder.trial, step)
    if not events:
        return state
    state = write(target, state, folder.trial, events)
    if doomed := find_doomed(target, folder, state, log):
        delete_retired(lambda: delete_checkpoint.fn(target, folder, state.trial(folder.trial), doomed), log)
    return state


def opening_events(
    trial: Trial | None, name: str, step: int, config: Mapping[str, object] | None = None
) -> Sequence[Event]:
    """Return the events after which the trial runs and may report `step`; none if it may already."""
    if trial is None:
        return [TrialAdded(trial=name, config=config or {}), Started(trial=name, attempt=1, from_step=0)]
    started = next_start(trial)
    if trial.phase is Phase.RUNNING:
        why = f"step {step} is trained again, after step {started.from_step}"
        return [] if step >= trial.step else restarted(trial, why)
    if trial.phase in ENDED:
        return [Requeued(trial=name, reason=f"trained on, after it had {trial.status}"), started]
    return [started]


def restarted(trial: Trial, why: str) -> Sequence[Event]:
    """Return the events that end the running attempt of `trial` and begin the next, from its newest checkpoint."""
    return [AttemptEnded(trial=trial.trial, cause=Cause.PREEMPTED, message=why), next_start(trial)]
