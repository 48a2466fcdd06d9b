"""Launch attempts on other machines: by the flow's task runner (Dask, Ray), or as one deployment run each."""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from importlib import import_module
from typing import Any, TypeVar
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId, FlowRunFilterIdempotencyKey
from prefect.client.schemas.objects import ConcurrencyLimitStrategy, FlowRun, State, WorkPoolStatus
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.futures import PrefectFuture
from prefect.logging import get_run_logger
from prefect.states import Cancelled, Crashed

from prefect_tune.attempt.attempt import FIRST_NODE_SILENT
from prefect_tune.attempt.trial_spec import AttemptRequest, TrialSpec
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.resources import Resources
from prefect_tune.core.values import digest_of
from prefect_tune.executors.remote_executor import StoreLink, request_as_parameters, spec_as_parameters
from prefect_tune.executors.trial_executor import AttemptCancelledError, attempt_task, error_in, node_task
from prefect_tune.prefect_api.api_client import is_temporary
from prefect_tune.storage_retries import with_retries

_Answer = TypeVar("_Answer")
_LOOK_SECONDS = 2.0
_NODES_END_SECONDS = 60.0
_ENDS_AFTER_OTHERS_SECONDS = 30.0  # how long node 0 may end after the other nodes
_LEAST_CPU = 0.01
_WAITING_LOOK_SECONDS, _NO_SLOT_SECONDS = 10.0, 10.0
_RUNS_PER_REQUEST = 200  # the most that Prefect returns
_START_SECONDS = 300.0  # of retries while the Prefect API is unavailable, for example during an upgrade
_PAUSES_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0, *(8 * (30.0,)))
_WITHDRAWN = "Withdrawn"
"""The name of the state Cancelled of runs that their search has cancelled."""
_DEPLOY = "prefect-tune deploy train-trial --work-pool POOL"
_AWAY = (PrefectException, httpx.HTTPError, OSError)


class _Cancelled(Enum):
    """Who cancelled the flow run of an attempt."""

    BY_PERSON = auto()
    NO_SLOT = auto()
    """The deployment, whose concurrency limit cancels what it has no slot for."""


class TaskRunnerLauncher:
    """Start each attempt as a task of the flow's task runner, which reserves the trial's resources.

    With several nodes it is a task for each. Ray starts all of them or none, in a placement group. Dask starts each
    when a worker is free: an attempt that lacks a node for 10 minutes fails, and gives the others back.
    """

    survives_search = False

    def __init__(self, runner: object, resources: Resources | None) -> None:
        """Raises InvalidInput: the task runner cannot reserve `resources`."""
        self._reserving = _reserving(runner, resources)
        self._is_ray, self._resources = type(runner).__name__ == "RayTaskRunner", resources or Resources()

    def __call__(self, spec: TrialSpec, request: AttemptRequest, link: StoreLink, attempt: int) -> Callable[[], object]:
        del attempt
        several = spec.nodes_per_trial > 1
        places = _PlacementGroup(spec.nodes_per_trial, self._resources) if several and self._is_ray else None
        request = replace(request, secret=secrets.token_hex(16)) if several else request
        futures: list[PrefectFuture[Any]] = []
        for node in range(spec.nodes_per_trial):
            with self._reserving() if places is None else places.at(node):
                if node:
                    futures.append(node_task().submit(spec, request, node, link))
                else:
                    futures.append(attempt_task(spec.tags).submit(spec, request, link))

        def wait() -> None:
            try:
                futures[0].wait()
                if (error := error_in(futures[0].state)) is not None:
                    raise error
            finally:
                if places is not None:
                    for future in futures[1:]:
                        future.wait(_NODES_END_SECONDS)
                    places.remove()

        return wait

    def withdraw(self) -> None:
        """Do nothing: a task that waits for a worker starts later, and ends when it reads the request to stop."""


class _PlacementGroup:
    """Places for the nodes of an attempt, which Ray reserves all at once."""

    def __init__(self, nodes: int, resources: Resources) -> None:
        self._ray: Any = import_module("ray.util")
        self._needs = {"num_cpus": resources.cpu, "num_gpus": resources.gpu}
        amounts = {"CPU": resources.cpu or _LEAST_CPU, "GPU": resources.gpu}  # Ray refuses a place without any
        bundle = {name: amount for name, amount in amounts.items() if amount}
        self._group = self._ray.placement_group([bundle] * nodes, strategy="SPREAD")

    def at(self, node: int) -> AbstractContextManager[object]:
        """Return a block in which a task is submitted to the place of `node`."""
        strategies: Any = import_module("ray.util.scheduling_strategies")
        place = strategies.PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=node)
        options: Any = import_module("prefect_ray.context").remote_options
        there: AbstractContextManager[object] = options(scheduling_strategy=place, **self._needs)
        return there

    def remove(self) -> None:
        """Give the places back; tasks that still run there end."""
        self._ray.remove_placement_group(self._group)


def _reserving(runner: object, resources: Resources | None) -> Callable[[], AbstractContextManager[object]]:
    kind = type(runner).__name__
    if resources is None:
        return nullcontext
    if kind == "DaskTaskRunner":
        dask = import_module("dask")
        # Only requested resources: a task that needs a resource that no worker declares waits forever.
        needed = {"CPU": resources.cpu if resources.cpu != 1 else 0, "GPU": resources.gpu}
        return lambda: dask.annotate(resources={name: amount for name, amount in needed.items() if amount})
    if kind == "RayTaskRunner":
        ray = import_module("prefect_ray.context")
        return lambda: ray.remote_options(num_cpus=resources.cpu, num_gpus=resources.gpu)
    raise InvalidInput(
        f"resources_per_trial: expected a DaskTaskRunner or RayTaskRunner to reserve them, found a {kind}; leave "
        "resources_per_trial out, and configure the task runner"
    )


class DeploymentLauncher:
    """Start each attempt as a run of one deployment of `train_trial`, found again by its idempotency key."""

    survives_search = True

    def __init__(self, deployment: str, job_variables: Mapping[str, Any] | None = None) -> None:
        self._deployment = deployment
        self._job_variables = dict(job_variables) if job_variables else None
        self._key_counts: Counter[str] = Counter()
        self._withdrawn = threading.Event()
        self._poll = threading.Lock()  # of the three below
        self._polled_at = -math.inf
        self._awaited: set[UUID] = set()
        self._ended: dict[UUID, _Cancelled | None] = {}
        """The runs that have ended, with who cancelled them, if they were cancelled."""
        self._others: dict[UUID, set[UUID]] = {}
        """The runs of the other nodes, by that of node 0."""
        self._waiting_looked_at = -math.inf
        self._waits_for = ""
        self._alone_since: dict[UUID, float] = {}

    def require(self, spec: TrialSpec) -> None:
        """Check the deployment and the specification, before anything is written.

        Raises:
            InvalidInput: there is no such deployment, another version has deployed it, or the specification has no
                form as JSON parameters.
        """
        parameters = spec_as_parameters(spec)
        try:
            with get_client(sync_client=True) as client:
                deployment = client.read_deployment_by_name(self._deployment)
        except ObjectNotFound as missing:
            raise InvalidInput(
                f"trial_deployment: there is no deployment {self._deployment!r}; create it: " + _DEPLOY
            ) from missing
        schema = (deployment.parameter_openapi_schema or {}).get("definitions", {}).get(TrialSpec.__name__, {})
        known = schema.get("properties")
        if known is not None and (unknown := sorted(parameters.keys() - known.keys())):
            raise InvalidInput(
                f"trial_deployment: {self._deployment!r} was deployed by another version of prefect-tune, which does "
                f"not know {', '.join(unknown)}; deploy it again: {_DEPLOY}"
            )

    def __call__(self, spec: TrialSpec, request: AttemptRequest, link: StoreLink, attempt: int) -> Callable[[], object]:
        """Return a function that starts the attempt and waits for its end: a start may wait for the API for minutes."""
        del link  # the deployment run creates its own from the parameters
        return lambda: self._train(spec, request, attempt)

    def _train(self, spec: TrialSpec, request: AttemptRequest, attempt: int) -> None:
        """Start the attempt and wait for its end; start it again where the limit of its deployment had no slot."""
        self.wait_for(first := self.start(spec, request, attempt))
        while self._ended[first] is _Cancelled.NO_SLOT and not self._withdrawn.wait(_NO_SLOT_SECONDS):
            self.wait_for(first := self.start(spec, request, attempt))

    def start(self, spec: TrialSpec, request: AttemptRequest, attempt: int) -> UUID:
        """Start the attempt on all its nodes, or find it if it was started before; return the flow run of node 0.

        Raises PrefectException, httpx.HTTPError, OSError: the API refuses, or is unavailable for 5 minutes.
        """
        if spec.nodes_per_trial > 1:
            request = replace(request, secret=secrets.token_hex(16))
        parameters: dict[str, object] = {
            "parameters": spec_as_parameters(spec),
            "orders": request_as_parameters(request),
            "attempt": attempt,
        }
        # It is unique among targets, and among later experiments of one name.
        target, experiment_id = digest_of(spec.target.uri.encode())[:16], request.experiment_id[:16]
        key = f"{target}/{spec.trial.experiment}/{experiment_id}/{spec.trial.trial}/{request.trial.outbox}"
        first = self._latest_run(spec, parameters, key)
        # Node 0 may have been started by an earlier run of the search: the others sign as it does.
        parameters = {**parameters, "orders": first.parameters.get("orders", parameters["orders"])}
        others = [
            self._latest_run(spec, {**parameters, "node": node}, f"{key}/node {node}")
            for node in range(1, spec.nodes_per_trial)
        ]
        if others:
            with self._poll:
                self._others[first.id] = {each.id for each in others}
                self._awaited |= self._others[first.id]  # to be withdrawn, if they have not begun then
        names = ", ".join(each.name for each in (first, *others))
        get_run_logger().info("trial %s, attempt %d: flow run %s", spec.trial.trial, attempt, names)
        return first.id

    def withdraw(self) -> None:
        self._withdrawn.set()

    def _latest_run(self, spec: TrialSpec, parameters: dict[str, object], key: str) -> FlowRun:
        """Return the newest run of this attempt; create it if needed.

        If the run has ended, an earlier owner may have created later ones: follow them by their keys. A run that was
        cancelled before it began, by an earlier owner's `withdraw`, is replaced by a new one.
        """
        run = self._create_run(spec, parameters, self._next_key(key))
        while run.state is not None and run.state.is_final():
            if run.state.is_cancelled():
                with get_client(sync_client=True) as client:
                    if _cancellation_of(client, run.id, run.state, self._deployment) is _Cancelled.BY_PERSON:
                        raise AttemptCancelledError(f"its flow run {run.name} was cancelled")
                run = self._create_run(spec, parameters, self._next_key(key))
                continue
            wanted = FlowRunFilterIdempotencyKey(any_=[self._next_key(key)])
            with get_client(sync_client=True) as client:
                read = partial(client.read_flow_runs, flow_run_filter=FlowRunFilter(idempotency_key=wanted), limit=1)
                later = self._retry_while_unavailable(spec, read)
            if not later:
                self._key_counts[key] -= 1
                break
            run = later[0]
        return run

    def _next_key(self, key: str) -> str:
        """Take the key of the next run of an attempt: `key` first, then `key/2`, `key/3`, and so on."""
        self._key_counts[key] += 1
        return f"{key}/{self._key_counts[key]}" if self._key_counts[key] > 1 else key

    def _retry_while_unavailable(self, spec: TrialSpec, ask: Callable[[], _Answer]) -> _Answer:
        """Call `ask`; while the API is unavailable, retry with backoff for about 5 minutes."""
        until = time.monotonic() + _START_SECONDS

        def is_retried(error: Exception) -> bool:
            is_final = isinstance(error, httpx.HTTPStatusError | ObjectNotFound) and not is_temporary(error)
            return isinstance(error, _AWAY) and not (is_final or time.monotonic() >= until or self._withdrawn.is_set())

        return with_retries(ask, is_retried, _PAUSES_SECONDS, f"trial {spec.trial.trial}: starting it: ")

    def _create_run(self, spec: TrialSpec, parameters: dict[str, object], key: str) -> FlowRun:
        """Create the run, or return it if an earlier request, whose answer was lost, has created it."""
        create = partial(
            run_deployment,
            self._deployment,
            parameters=parameters,
            timeout=0,
            idempotency_key=key,
            tags=spec.tags or None,
            job_variables=self._job_variables,
        )
        try:
            run = self._retry_while_unavailable(spec, create)
        except ObjectNotFound as missing:
            raise InvalidInput(
                f"trial_deployment: deployment {self._deployment!r}, or the flow run of this search, was deleted on "
                f"the Prefect server: deploy it again ({_DEPLOY}), and run the search again to continue"
            ) from missing
        if not isinstance(run, FlowRun):
            raise TypeError("run_deployment was called where it returns a coroutine")
        return run

    def wait_for(self, flow_run: UUID) -> None:
        """Return when the run has ended. One request every 2 s asks for all runs, also while the API is unavailable.

        Raises:
            AttemptCancelledError: a person has cancelled it, or a run of another node.
        """
        with self._poll:
            self._awaited.add(flow_run)
        while not self._has_ended(flow_run):
            time.sleep(_LOOK_SECONDS)
        for run in (flow_run, *self._others.get(flow_run, ())):
            if self._ended.get(run) is _Cancelled.BY_PERSON:
                raise AttemptCancelledError(f"its flow run {run} was cancelled")

    def _has_ended(self, flow_run: UUID) -> bool:
        with self._poll:
            if time.monotonic() - self._polled_at >= _LOOK_SECONDS:
                with suppress(*_AWAY), get_client(sync_client=True) as client:
                    awaited, withdrawn = sorted(self._awaited), self._withdrawn.is_set()
                    states = _states_of(client, awaited, withdrawn=withdrawn)
                    for run, state in states.items():
                        if state is None or state.is_final():
                            self._ended[run] = _cancellation_of(client, run, state, self._deployment)
                    self._mark_silent(client)
                    has_waiting = any(state is not None and _has_not_begun(state) for state in states.values())
                    if has_waiting and time.monotonic() - self._waiting_looked_at >= _WAITING_LOOK_SECONDS:
                        self._waiting_looked_at = time.monotonic()
                        reason = _reason_to_wait(client, self._deployment)
                        if reason and reason != self._waits_for:
                            get_run_logger().warning("trials wait: %s", reason)
                        self._waits_for = reason
                self._polled_at = time.monotonic()
                self._awaited -= self._ended.keys()
            return flow_run in self._ended

    def _mark_silent(self, client: SyncPrefectClient) -> None:
        """Mark the run of a node 0 as crashed where the other nodes have ended since it writes nothing any more.

        A machine that dies together with its worker leaves the run as it was. One that was marked by mistake ends at
        its next post, since the search has closed its outbox.
        """
        for first, others in self._others.items():
            if first not in self._awaited or not others <= self._ended.keys():
                continue
            if time.monotonic() - self._alone_since.setdefault(first, time.monotonic()) < _ENDS_AFTER_OTHERS_SECONDS:
                continue
            self._alone_since[first] = time.monotonic()
            runs = client.read_flow_runs(flow_run_filter=_runs_with(others), limit=_RUNS_PER_REQUEST)
            states = [run.state for run in runs if run.state is not None and run.state.name == FIRST_NODE_SILENT]
            if states:
                client.set_flow_run_state(first, Crashed(message=states[0].message))


def _runs_with(ids: Collection[UUID]) -> FlowRunFilter:
    return FlowRunFilter(id=FlowRunFilterId(any_=list(ids)))


def _reason_to_wait(client: SyncPrefectClient, name: str) -> str:
    """Return why no run of a deployment begins now, and what to do; empty if its work pool starts runs."""
    deployment = client.read_deployment_by_name(name)
    if (name_of_pool := deployment.work_pool_name) is None:
        return ""
    pool, queue = client.read_work_pool(name_of_pool), deployment.work_queue_name
    if pool.is_paused:
        return f"work pool {name_of_pool!r} is paused; to resume it: prefect work-pool resume {name_of_pool}"
    if pool.concurrency_limit == 0:
        return f"the concurrency limit of work pool {name_of_pool!r} is 0"
    if queue is not None:
        found = client.read_work_queue_by_name(queue, work_pool_name=name_of_pool)
        if found.is_paused:
            resume = f"prefect work-queue resume {queue} --pool {name_of_pool}"
            return f"work queue {queue!r} of work pool {name_of_pool!r} is paused; to resume it: {resume}"
        if found.concurrency_limit == 0:
            return f"the concurrency limit of work queue {queue!r} of work pool {name_of_pool!r} is 0"
    if pool.status is WorkPoolStatus.NOT_READY:
        return f"work pool {name_of_pool!r} has no worker; to start one: prefect worker start --pool {name_of_pool}"
    return ""


def _states_of(client: SyncPrefectClient, runs: Sequence[UUID], *, withdrawn: bool) -> Mapping[UUID, State[Any] | None]:
    """Return the states of runs, None for one that was deleted. If `withdrawn`, cancel those that have not begun.

    Raises PrefectException, httpx.HTTPError, OSError: the API is unavailable.
    """
    states: dict[UUID, State[Any] | None] = {}
    for first in range(0, len(runs), _RUNS_PER_REQUEST):
        batch = runs[first : first + _RUNS_PER_REQUEST]
        found = client.read_flow_runs(flow_run_filter=_runs_with(batch), limit=_RUNS_PER_REQUEST)
        states |= {**dict.fromkeys(batch), **{run.id: run.state for run in found}}
    for run, state in states.items():
        if withdrawn and state is not None and _has_not_begun(state):
            cancelled: State[None] = Cancelled(name=_WITHDRAWN, message="the search ended before this run began")
            states[run] = client.set_flow_run_state(run, cancelled).state or state
    return states


def _has_not_begun(state: State[Any]) -> bool:
    return state.is_scheduled() or state.is_pending()


def _cancellation_of(
    client: SyncPrefectClient, run: UUID, state: State[Any] | None, deployment: str
) -> _Cancelled | None:
    """Return who cancelled a run that has ended; None if nobody did, and the attempt ended by itself or its search.

    A person's request is the state Cancelling, except for a run that has not begun.
    """
    if state is None or not state.is_cancelled():
        return None
    states = client.read_flow_run_states(run)
    if any(each.is_cancelling() for each in states):
        return _Cancelled.BY_PERSON
    if state.name == _WITHDRAWN or any(each.is_running() for each in states):
        return None
    options = client.read_deployment_by_name(deployment).concurrency_options
    has_no_slot = options is not None and options.collision_strategy is ConcurrencyLimitStrategy.CANCEL_NEW
    return _Cancelled.NO_SLOT if has_no_slot else _Cancelled.BY_PERSON
