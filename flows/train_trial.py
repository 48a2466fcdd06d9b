"""The flow that trains one attempt of a trial; a search with `trials="deployment"` starts it."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.logging import get_run_logger

from prefect_tune.attempt.attempt import make_node_state
from prefect_tune.attempt.graceful_stop import run_interruptible
from prefect_tune.attempt.nodes import train_node
from prefect_tune.attempt.processes.process_pool import TrialProcessPool
from prefect_tune.attempt.trial_spec import TrialSpec
from prefect_tune.executors.remote_executor import RemoteSearchChannel, parse_request
from prefect_tune.executors.trial_executor import make_attempt_task
from prefect_tune.prefect_api.call_paths import isolated_run_context
from prefect_tune.prefect_api.task_runs import ending_slot_waits
from prefect_tune.tasks.checkpoints import PrefectAttemptTasks

__all__ = ["train_trial"]


@flow(name="train-trial", flow_run_name="train {spec.trial.trial} · attempt {attempt}", persist_result=False)
def train_trial(spec: TrialSpec, request: dict[str, Any], attempt: int, node: int = 0) -> State[Any]:
    """Train one attempt of a trial. The journal records how the attempt ends; the state of the run is for display only.

    With `nodes_per_trial`, each node has its own flow run; only the run of node 0 posts to the outbox.

    Args:
        spec: the trial's specification, as `make_spec_parameter` returns it.
        request: the request for this attempt, as `make_request_parameter` returns it.
        attempt: the number of the attempt; the paths of the attempt's answers on the target contain this number.
        node: the number of this run's node, from 0.
    """
    attempt_request = parse_request(request)
    train = partial(run_interruptible, grace=spec.grace_period, poll_interval=spec.sync.request_period)
    with isolated_run_context(), TrialProcessPool(slots=0) as pool:
        # Start the import of the trainable now, so that it runs while the journal is read.
        pool.start_import(spec.trainable, get_run_logger(), attempt_request.environment)
        channel = RemoteSearchChannel(spec.target, spec.trial, attempt, pool=pool)
        if node:
            log, tasks = get_run_logger(), PrefectAttemptTasks(spec)
            return make_node_state(
                train(lambda stop: train_node(spec, attempt_request, node, channel.use_stop_event(stop), tasks, log))
            )

        def train_attempt(stop: threading.Event) -> State[Any]:
            with ending_slot_waits(stop):
                return make_attempt_task(spec.tags)(spec, attempt_request, channel.use_stop_event(stop))

        end_state = train(train_attempt)
    # Automations match the standard names of states, so a special name, such as Pruned, is only in the message.
    return State(type=end_state.type, message=f"{end_state.name}: {end_state.message}")
