"""The flow that trains one attempt of a trial; a search with `trials="deployment"` starts it."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.logging import get_run_logger

from prefect_tune.attempt.attempt import state_of_node
from prefect_tune.attempt.graceful_stop import interruptible
from prefect_tune.attempt.nodes import train_node
from prefect_tune.attempt.processes.process_pool import TrialProcessPool
from prefect_tune.attempt.trial_spec import AttemptRequest, TrialSpec
from prefect_tune.executors.remote_executor import StoreLink, request_from
from prefect_tune.executors.trial_executor import attempt_task
from prefect_tune.prefect_api.call_paths import own_context
from prefect_tune.prefect_api.task_runs import ending_waits
from prefect_tune.tasks.checkpoints import TasksOfAttempt

__all__ = ["train_trial"]


@flow(name="train-trial", flow_run_name="train {parameters.trial.trial} · attempt {attempt}", persist_result=False)
def train_trial(parameters: TrialSpec, orders: dict[str, Any], attempt: int, node: int = 0) -> State[Any]:
    """Train one attempt of a trial. The journal records how it ends; the state of the flow run is for display only.

    With `nodes_per_trial`, each node has its own flow run; only the run of node 0 posts to the outbox.

    Args:
        parameters: the specification, from `spec_as_parameters`.
        orders: the request for this attempt, from `request_as_parameters`.
        attempt: the number of the attempt, part of the paths of its answers on the target.
        node: the number of this run's node, from 0.
    """
    spec, request = parameters, request_from(orders)
    train = partial(interruptible, grace=spec.grace, request_period=spec.sync.request_period)
    with own_context(), TrialProcessPool(slots=0) as pool:
        pool.prepare(spec.trainable, get_run_logger(), request.environment)  # the import overlaps opening the journal
        link = StoreLink(spec.target, spec.trial, attempt, pool=pool)
        if node:
            log, tasks = get_run_logger(), TasksOfAttempt(spec)
            return state_of_node(train(lambda stop: train_node(spec, request, node, link.stopped_by(stop), tasks, log)))
        end_state = train(partial(_train_attempt, spec, request, link))
    # The state's name is part of Prefect's event: keep a standard name, which automations can match.
    return State(type=end_state.type, message=f"{end_state.name}: {end_state.message}")


def _train_attempt(spec: TrialSpec, request: AttemptRequest, link: StoreLink, stop: threading.Event) -> State[Any]:
    with ending_waits(stop):
        return attempt_task(spec.tags)(spec, request, link.stopped_by(stop))
