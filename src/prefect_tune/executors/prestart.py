"""Start the processes of trials while the Prefect server of a script starts: they import the trainable meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from prefect_tune.core.errors import TuneError
from prefect_tune.executors.trial_slots import slots_here
from prefect_tune.parameters.search_plan import SearchPlan
from prefect_tune.prefect_api.task_runs.task_runner import max_workers_of
from prefect_tune.supervisor.processes.prestarted_pool import prestarting
from prefect_tune.supervisor.trial_spec import pickled_or_path

_LATER = {"target": ".", "experiment": "prestart", "sync": None, "callbacks": None}
"""Parameters that the processes do not depend on: what they were given may be on the server."""


@contextmanager
def prestart_search(arguments: Mapping[str, Any], runner: TaskRunner[Any]) -> Iterator[None]:
    """Start them for `pt.tune` with these arguments, if its trials train here; the flow reports what is wrong."""
    with ExitStack() as started:
        with suppress(TuneError, OSError):
            plan = SearchPlan(**{**arguments, **_LATER})
            if _trains_here(plan) and isinstance(runner, ThreadPoolTaskRunner):
                slots = slots_here(plan, max_workers_of(runner))
                environment = next(iter(slots.environments), {})
                trainable = pickled_or_path(plan.trainable)
                started.enter_context(
                    prestarting(trainable, slots=slots.count, reuse=plan.reuse, environment=environment)
                )
        yield


@contextmanager
def prestart_training(arguments: Mapping[str, Any], _runner: TaskRunner[Any]) -> Iterator[None]:
    """Start one for `pt.durable_trainable` with these arguments."""
    with ExitStack() as started:
        with suppress(TuneError, OSError):
            given = {name: value for name, value in arguments.items() if name != "config"}
            plan = SearchPlan(**{**given, **_LATER})
            if _trains_here(plan):
                started.enter_context(prestarting(pickled_or_path(plan.trainable), slots=0))
        yield


def _trains_here(plan: SearchPlan) -> bool:
    return plan.isolation == "process" and plan.trials == "tasks"
