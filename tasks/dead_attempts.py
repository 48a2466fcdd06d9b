"""Show attempts that died with an earlier owner of their journal as Crashed in Prefect."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import copy_context
from uuid import UUID

from prefect.client.schemas.objects import TaskRun
from prefect.runtime import flow_run

from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import Status, Trial
from prefect_tune.core.journal_events.experiment_events import Owner
from prefect_tune.prefect_api.task_runs.dead_task_runs import set_crashed
from prefect_tune.supervisor.run_identity import is_gone

_KEY_OF_ATTEMPTS = "run_trial-"
"""Begins Prefect's key of the tasks that run attempts, the public one too: the name of their functions."""
_opened_here: set[Owner] = set()
"""The owners with which this process has opened journals: their attempts end by themselves."""


def settle_dead_attempts(before: Experiment, owner: Owner) -> None:
    """Set the task runs of attempts that were running when `owner` took the journal over to Crashed, in a thread.

    An attempt whose flow run is alive keeps its state: it ends by itself as soon as it finds that it was superseded. If
    the flow run is found dead later, while this process lives, the attempt is set to Crashed then. The thread does not
    delay the end of the process; errors of the Prefect server change nothing.

    Args:
        before: the experiment before the takeover, of a trial's own journal or of a single training's.
        owner: the new owner.
    """
    dead, is_own = before.owner, before.owner in _opened_here
    _opened_here.add(owner)
    if is_own or dead is None or dead.flow_run is None or not any(map(_is_running_here, before.trials.values())):
        return
    if dead.task_run is not None and dead.task_run == owner.task_run:
        return  # a task runner has started the same task again, on another machine
    is_same_run = dead.flow_run == owner.flow_run  # Prefect starts a run again once it has ended
    run_count = (owner.attempt or flow_run.run_count) if is_same_run and dead.task_run is None else None
    settle = threading.Thread(
        target=copy_context().run,
        args=(set_crashed, UUID(dead.flow_run), attempts_of(dead, run_count)),
        kwargs={
            "successor": _successor(dead, owner, run_count),
            "started_again": is_same_run,
            "has_ended": is_same_run or is_gone(dead),
        },
        name="settle-dead-attempts",
        daemon=True,
    )
    settle.start()


def _successor(dead: Owner, owner: Owner, run_count: int | None) -> str:
    """Return what took over from `dead`: a run, or within one flow run the trial's next attempt."""
    if dead.flow_run != owner.flow_run:
        return f"flow run {owner.name!r}" if owner.flow_run else str(owner)
    return "the trial's next attempt" if run_count is None else f"run {run_count} of this flow run"


def attempts_of(owner: Owner, run_count: int | None) -> Callable[[TaskRun], bool]:
    """Return whether a task run of its flow run is an attempt of `owner`.

    Args:
        owner: the owner of the journal that the attempts write. It names the task run, if a trial has the journal.
        run_count: how often the flow run was started, if it is running again: its present attempts are not those of
            `owner`. None if it is not.
    """

    def is_attempt(run: TaskRun) -> bool:
        if owner.task_run is not None:
            return str(run.id) == owner.task_run
        is_earlier = run_count is None or (run.start_time is not None and run.flow_run_run_count < run_count)
        return is_earlier and run.task_key.startswith(_KEY_OF_ATTEMPTS)

    return is_attempt


def _is_running_here(trial: Trial) -> bool:
    """Whether the journal that holds `trial` is the one that its attempts write."""
    return trial.status is Status.RUNNING and not trial.apart
