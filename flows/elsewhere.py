"""The ways to another machine: the flow's task runner (Dask, Ray), or a deployment run for each attempt."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import Any, TypeVar
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterIdempotencyKey
from prefect.client.schemas.objects import FlowRun, State
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.logging import get_run_logger
from prefect.states import Cancelled

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.resources import Resources
from prefect_tune.core.values import digest_of
from prefect_tune.flows.crew import attempt_of
from prefect_tune.flows.train_trial import TrialParameters, orders_as_parameters
from prefect_tune.tasks.plan import Orders, TrialPlan
from prefect_tune.tasks.store_line import StoreLine

__all__ = ["OnDeployment", "OnTaskRunner"]

_Answer = TypeVar("_Answer")
_LOOK_SECONDS = 2.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 30.0
_PATIENCE = timedelta(minutes=5)
"""How long a search waits for an API that is away when it begins an attempt: for a restart, or an upgrade."""
_AWAY = (PrefectException, httpx.HTTPError, OSError)
_TOO_BUSY = (408, 429)


class OnTaskRunner:
    """Start each attempt as a task of the flow's task runner, which sees to it what it has of a machine."""

    outlives = False

    def __init__(self, runner: object, resources: Resources | None) -> None:
        """Raises InvalidInput: that runner cannot."""
        self._reserving = _reserving(runner, resources)

    def __call__(self, plan: TrialPlan, orders: Orders, line: StoreLine, attempt: int) -> Callable[[], object]:
        del attempt
        with self._reserving():
            return attempt_of(plan).submit(plan, orders, line).result

    def withdraw(self) -> None:
        """A task that waits for a place begins all the same, and ends as soon as it is told to."""


def _reserving(runner: object, resources: Resources | None) -> Callable[[], AbstractContextManager[object]]:
    kind = type(runner).__name__
    if resources is None:
        return nullcontext
    if kind == "DaskTaskRunner":
        dask = import_module("dask")
        # Only what was asked for: a task that needs what no worker declares waits for ever.
        needed = {"CPU": resources.cpu if resources.cpu != 1 else 0, "GPU": resources.gpu}
        return lambda: dask.annotate(resources={name: amount for name, amount in needed.items() if amount})
    if kind == "RayTaskRunner":
        ray = import_module("prefect_ray.context")
        return lambda: ray.remote_options(num_cpus=resources.cpu, num_gpus=resources.gpu)
    raise InvalidInput(f"resources_per_trial: nothing is known of how a {kind} reserves them; leave them to it")


class OnDeployment:
    """Start each attempt as a run of one deployment of `train_trial`, found again by its idempotency key."""

    outlives = True

    def __init__(self, deployment: str, job_variables: Mapping[str, Any] | None = None) -> None:
        self._deployment = deployment
        self._job_variables = dict(job_variables) if job_variables else None
        self._begun: Counter[str] = Counter()
        self._withdrawn = threading.Event()

    def require(self, plan: TrialPlan) -> None:
        """Find out before anything is written whether it can be done.

        Raises:
            InvalidInput: there is no such deployment, or the plan cannot be said in its parameters.
        """
        TrialParameters.of(plan)
        try:
            with get_client(sync_client=True) as client:
                client.read_deployment_by_name(self._deployment)
        except ObjectNotFound as missing:
            raise InvalidInput(
                f"trial_deployment: there is no deployment {self._deployment!r}; make it: "
                "prefect-tune deploy train-trial --work-pool POOL"
            ) from missing

    def __call__(self, plan: TrialPlan, orders: Orders, line: StoreLine, attempt: int) -> Callable[[], object]:
        del line  # made there, of the same parts
        parameters: dict[str, object] = {
            "parameters": TrialParameters.of(plan).model_dump(mode="json"),
            "orders": orders_as_parameters(orders),
            "attempt": attempt,
        }
        run = self._latest_run(plan, parameters, _key(plan, orders, attempt))
        log = get_run_logger()
        log.info("trial %s, attempt %d: flow run %s", plan.trial.trial, attempt, run.name)
        return lambda: self._end_of(run.id)

    def withdraw(self) -> None:
        self._withdrawn.set()

    def _latest_run(self, plan: TrialPlan, parameters: dict[str, object], key: str) -> FlowRun:
        """Have the run after those that were begun here. Where it is over, an earlier owner may have begun more.

        One that an earlier owner's `withdraw` has cancelled is made up for.
        """
        run = self._run(plan, parameters, self._took(key))
        while run.state is not None and run.state.is_final():
            if run.state.is_cancelled():
                run = self._run(plan, parameters, self._took(key))
            elif (later := self._waiting(plan, partial(_run_of, self._next(key)))) is not None:
                self._took(key)
                run = later
            else:
                break
        return run

    def _next(self, key: str) -> str:
        """Another one where the run of the last is over, and no attempt came of it."""
        return f"{key}/{self._begun[key] + 1}" if self._begun[key] else key

    def _took(self, key: str) -> str:
        taken = self._next(key)
        self._begun[key] += 1
        return taken

    def _run(self, plan: TrialPlan, parameters: dict[str, object], key: str) -> FlowRun:
        """Have the run, be it made by a request before whose answer was lost."""
        return self._waiting(plan, partial(self._asked_for, plan, parameters, key))

    def _waiting(self, plan: TrialPlan, ask: Callable[[], _Answer]) -> _Answer:
        """Return what the API says. One that is away is waited for."""
        pause_seconds, until = _FIRST_PAUSE_SECONDS, time.monotonic() + _PATIENCE.total_seconds()
        while True:
            try:
                return ask()
            except _AWAY as error:
                if not _may_pass(error) or time.monotonic() + pause_seconds > until:
                    raise
                log = get_run_logger()
                log.warning("trial %s is begun again in %g s: %s", plan.trial.trial, pause_seconds, error)
                time.sleep(pause_seconds)
                pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)

    def _asked_for(self, plan: TrialPlan, parameters: dict[str, object], key: str) -> FlowRun:
        run = run_deployment(
            self._deployment,
            parameters=parameters,
            timeout=0,
            idempotency_key=key,
            tags=plan.tags or None,
            job_variables=self._job_variables,
        )
        if not isinstance(run, FlowRun):
            raise TypeError("run_deployment was called where it returns a coroutine")
        return run

    def _end_of(self, flow_run: UUID) -> None:
        """Return when the run has ended. An API that is away says nothing of it, so it is asked again."""
        while not _has_ended(flow_run, withdrawn=self._withdrawn.is_set()):
            time.sleep(_LOOK_SECONDS)


def _key(plan: TrialPlan, orders: Orders, attempt: int) -> str:
    """Experiments of one name may lie on several targets, one after the other on the same, and have one server."""
    target, experiment_id = digest_of(plan.target.uri.encode())[:16], orders.experiment_id[:16]
    return f"{target}/{plan.trial.experiment}/{experiment_id}/{plan.trial.trial}/{attempt}"


def _run_of(key: str) -> FlowRun | None:
    wanted = FlowRunFilter(idempotency_key=FlowRunFilterIdempotencyKey(any_=[key]))
    with get_client(sync_client=True) as client:
        return next(iter(client.read_flow_runs(flow_run_filter=wanted, limit=1)), None)


def _may_pass(error: Exception) -> bool:
    """Whether the API may do later what it did not do now."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code in _TOO_BUSY or error.response.is_server_error
    return not isinstance(error, ObjectNotFound)


def _has_ended(flow_run: UUID, *, withdrawn: bool) -> bool:
    """Whether it has, as far as the API says; one that has not begun is cancelled if it is `withdrawn`."""
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(flow_run).state
            if withdrawn and state is not None and (state.is_scheduled() or state.is_pending()):
                cancelled: State[None] = Cancelled(message="its search has ended, and it had not begun")
                state = client.set_flow_run_state(flow_run, cancelled).state
    except ObjectNotFound:
        return True  # deleted: nobody will hear of it again
    except _AWAY:
        return False
    return state is not None and state.is_final()
