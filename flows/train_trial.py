"""Flow that trains one attempt of a trial: a search starts it with `trials="deployment"`."""

from __future__ import annotations

from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Cancelled, Completed, Failed

from prefect_tune.core.events.experiment_events import Cause
from prefect_tune.executors.remote_link import StoreLink
from prefect_tune.executors.trial_executor import attempt_of
from prefect_tune.executors.trial_parameters import TrialParameters, request_from
from prefect_tune.supervisor.graceful_shutdown import interruptible
from prefect_tune.tasks import attempt_supervisor as outcomes

__all__ = ["train_trial"]


@flow(name="train-trial", flow_run_name="train {parameters.trial.trial}", persist_result=False)
def train_trial(parameters: TrialParameters, orders: dict[str, Any], attempt: int) -> State[Any]:
    """Train one attempt of a trial. Its journal records how it ends; the flow run's state only shows it.

    Args:
        parameters: the plan, from `TrialParameters.of`.
        orders: the request for this attempt, from `request_as_parameters`.
        attempt: its number, by which it finds its answers on the target.
    """
    plan = parameters.plan()
    link = StoreLink(plan.target, plan.trial, attempt, plan.sync.live_period)
    request = request_from(orders)
    found = interruptible(lambda stop: attempt_of(plan)(plan, request, link.stopped_by(stop)), grace=plan.grace)
    match found.outcome:
        case outcomes.Failed(cause=Cause.PREEMPTED, message=message):
            return Cancelled(message=message)
        case outcomes.Asking(question=asked):
            return Cancelled(message=f"the trial asks a person: {asked.question}")
        case outcomes.Failed(message=message):
            return Failed(message=message)
        case outcomes.Done(reason=reason) | outcomes.Yielded(reason=reason):
            return Completed(message=reason)
