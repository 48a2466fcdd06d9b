"""Show attempts that died with an earlier owner of their journal as Crashed in Prefect."""

from __future__ import annotations

import threading
from contextvars import copy_context
from uuid import UUID

from prefect.client.schemas.objects import TaskRun

from prefect_tune.core.events.experiment_events import Owner
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import Status, Trial
from prefect_tune.prefect_api.dead_task_runs import set_crashed

__all__ = ["settle_dead_attempts"]

_begun_here: set[str] = set()
"""The task runs with which this process has opened journals: they end by themselves."""


def settle_dead_attempts(before: Experiment, owner: Owner) -> None:
    """Set the task runs of attempts that were running when `owner` took the journal over to Crashed, in a thread.

    The thread does not delay the end of the process; errors of the Prefect server change nothing.

    Args:
        before: the experiment before the takeover, of a trial's own journal or of a single training's.
        owner: the new owner.
    """
    if owner.task_run is not None:
        _begun_here.add(owner.task_run)
    dead, running = before.owner, [each for each in before.trials.values() if _is_running_here(each)]
    if not running or dead is None or dead.flow_run is None or dead.task_run in _begun_here:
        return
    names = {f"train {each.trial} · attempt {each.attempt}" for each in running}

    def is_dead(run: TaskRun) -> bool:
        return str(run.id) == dead.task_run if dead.task_run else run.name in names

    message = f"superseded: {owner} took over"
    settle = (set_crashed, UUID(dead.flow_run), is_dead, message)
    threading.Thread(target=copy_context().run, args=settle, name="settle-dead-attempts", daemon=True).start()


def _is_running_here(trial: Trial) -> bool:
    """Whether the journal that holds `trial` is the one that its attempts write."""
    return trial.status is Status.RUNNING and not trial.apart
