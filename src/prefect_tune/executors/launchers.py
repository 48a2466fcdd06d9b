"""Launch attempts on other machines: on the flow's task runner (Dask, Ray), or as deployment runs."""

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

from prefect_tune.attempt.attempt import NODE_0_SILENT
from prefect_tune.attempt.trial_spec import AttemptRequest, TrialSpec
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.resources import Resources
from prefect_tune.core.values import hash_bytes
from prefect_tune.executors.remote_executor import RemoteSearchChannel, make_request_parameter, make_spec_parameter
from prefect_tune.executors.trial_executor import AttemptCancelledError, make_attempt_task, make_node_task, task_error
from prefect_tune.prefect_api.api_client import is_temporary_error
from prefect_tune.storage_retries import with_retries

_Response = TypeVar("_Response")
_POLL_INTERVAL_SECONDS = 2.0
_NODES_END_TIMEOUT_SECONDS = 60.0
_NODE_0_END_TIMEOUT_SECONDS = 30.0  # node 0 must end within this time after the other nodes have ended
_MIN_CPU = 0.01
_WAIT_REASON_INTERVAL_SECONDS, _SLOT_RETRY_SECONDS = 10.0, 10.0
_RUNS_PER_REQUEST = 200  # Prefect's maximum
_START_TIMEOUT_SECONDS = 300.0  # retry for this time while the Prefect API is unavailable, such as during an upgrade
_PAUSES_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0, *(8 * (30.0,)))
_WITHDRAWN = "Withdrawn"
"""The name of the Cancelled state that a search, when it stops, sets on the attempts' flow runs that have not begun."""
_DEPLOY_COMMAND = "prefect-tune deploy train-trial --work-pool POOL"
_API_ERRORS = (PrefectException, httpx.HTTPError, OSError)


class _Canceller(Enum):
    """Who cancelled the flow run of an attempt."""

    USER = auto()
    CONCURRENCY_LIMIT = auto()
    """The deployment's concurrency limit: Prefect may cancel a run that finds no free slot."""


class TaskRunnerLauncher:
    """Starts each attempt in the flow's task runner, which reserves the trial's resources.

    Each node of the attempt is a task. Ray starts all nodes together, in a placement group. Dask starts each node when
    a worker is free. An attempt that still lacks a node after 10 minutes fails and releases its workers.
    """

    attempts_outlive_search = False

    def __init__(self, runner: object, resources: Resources | None) -> None:
        """Raises InvalidInput: the task runner cannot reserve `resources`."""
        self._make_resource_context = _make_context_factory(runner, resources)
        self._is_ray, self._resources = type(runner).__name__ == "RayTaskRunner", resources or Resources()

    def __call__(
        self, spec: TrialSpec, request: AttemptRequest, channel: RemoteSearchChannel, attempt: int
    ) -> Callable[[], object]:
        del attempt
        several = spec.nodes_per_trial > 1
        placement_group = _PlacementGroup(spec.nodes_per_trial, self._resources) if several and self._is_ray else None
        request = replace(request, secret=secrets.token_hex(16)) if several else request
        futures: list[PrefectFuture[Any]] = []
        for node in range(spec.nodes_per_trial):
            with self._make_resource_context() if placement_group is None else placement_group.submitting_to(node):
                if node:
                    futures.append(make_node_task().submit(spec, request, node, channel))
                else:
                    futures.append(make_attempt_task(spec.tags).submit(spec, request, channel))

        def wait_for_tasks() -> None:
            try:
                futures[0].wait()
                if (error := task_error(futures[0].state)) is not None:
                    raise error
            finally:
                if placement_group is not None:
                    for future in futures[1:]:
                        future.wait(_NODES_END_TIMEOUT_SECONDS)
                    placement_group.remove()

        return wait_for_tasks

    def cancel_unstarted_attempts(self) -> None:
        """Do nothing: when a task that waits for a worker starts, it reads on the target that it must end."""


class _PlacementGroup:
    """A placement group with a bundle per node of an attempt. Ray reserves all bundles of a group, or none."""

    def __init__(self, nodes: int, resources: Resources) -> None:
        self._ray: Any = import_module("ray.util")
        self._task_options = {"num_cpus": resources.cpu, "num_gpus": resources.gpu}
        amounts = {"CPU": resources.cpu or _MIN_CPU, "GPU": resources.gpu}  # Ray rejects an empty bundle
        bundle = {name: amount for name, amount in amounts.items() if amount}
        self._group = self._ray.placement_group([bundle] * nodes, strategy="SPREAD")

    def submitting_to(self, node: int) -> AbstractContextManager[object]:
        """Return a context manager in which a submitted task goes to the bundle of `node`."""
        strategies: Any = import_module("ray.util.scheduling_strategies")
        strategy = strategies.PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=node)
        ray: Any = import_module("prefect_ray.context")
        context: AbstractContextManager[object] = ray.remote_options(scheduling_strategy=strategy, **self._task_options)
        return context

    def remove(self) -> None:
        """Release the bundles. This ends the tasks that still run in them."""
        self._ray.remove_placement_group(self._group)


def _make_context_factory(runner: object, resources: Resources | None) -> Callable[[], AbstractContextManager[object]]:
    kind = type(runner).__name__
    if resources is None:
        return nullcontext
    if kind == "DaskTaskRunner":
        dask = import_module("dask")
        # Do not reserve the default of one CPU, because a task waits forever for a resource that no worker declares.
        needed = {"CPU": resources.cpu if resources.cpu != 1 else 0, "GPU": resources.gpu}
        return lambda: dask.annotate(resources={name: amount for name, amount in needed.items() if amount})
    if kind == "RayTaskRunner":
        ray = import_module("prefect_ray.context")
        return lambda: ray.remote_options(num_cpus=resources.cpu, num_gpus=resources.gpu)
    raise InvalidInput(
        f"resources_per_trial: expected a DaskTaskRunner or RayTaskRunner to reserve resources, found a {kind}; omit "
        "resources_per_trial, and configure the task runner"
    )


class DeploymentLauncher:
    """Starts each attempt as a run of a deployment of `train_trial`, or finds the run that an earlier start made."""

    attempts_outlive_search = True

    def __init__(self, deployment: str, job_variables: Mapping[str, Any] | None = None) -> None:
        self._deployment, self._job_variables = deployment, dict(job_variables) if job_variables else None
        self._key_counts: Counter[str] = Counter()
        self._withdrawn = threading.Event()
        self._poll_lock = threading.Lock()  # held while the attributes below are changed
        self._polled_at = self._wait_reason_polled_at = -math.inf
        self._awaited: set[UUID] = set()
        self._ended: dict[UUID, _Canceller | None] = {}
        """The runs that have ended, each with its canceller; None if neither a user nor a limit cancelled the run."""
        self._others: dict[UUID, set[UUID]] = {}
        """For the run of node 0 of each attempt on several nodes: the runs of the other nodes."""
        self._wait_reason: str | None = None
        self._alone_since: dict[UUID, float] = {}

    def check_deployment(self, spec: TrialSpec) -> None:
        """Check the deployment and the specification. Call this before anything is written.

        Raises:
            InvalidInput: the deployment is missing or of another version, or the specification cannot be sent as JSON.
        """
        parameters = make_spec_parameter(spec)
        try:
            with get_client(sync_client=True) as client:
                deployment = client.read_deployment_by_name(self._deployment)
        except ObjectNotFound as missing:
            text = f"trial_deployment: deployment {self._deployment!r} does not exist; create it: {_DEPLOY_COMMAND}"
            raise InvalidInput(text) from missing
        schema = (deployment.parameter_openapi_schema or {}).get("definitions", {}).get(TrialSpec.__name__, {})
        properties = schema.get("properties")
        if properties is not None and (unknown := sorted(parameters.keys() - properties.keys())):
            raise InvalidInput(
                f"trial_deployment: {self._deployment!r} was deployed by another version of prefect-tune, without the "
                f"parameters {', '.join(unknown)}; deploy it again: {_DEPLOY_COMMAND}"
            )

    def __call__(
        self, spec: TrialSpec, request: AttemptRequest, channel: RemoteSearchChannel, attempt: int
    ) -> Callable[[], object]:
        """Return a function that starts the attempt and waits for its end; both may take minutes."""
        del channel  # not used, since the deployment's run makes its own channel from its parameters

        def run_attempt() -> None:
            self.wait_for_run(first := self.start_attempt(spec, request, attempt))
            # Retry while the deployment's concurrency limit has no free slot.
            while self._ended[first] is _Canceller.CONCURRENCY_LIMIT and not self._withdrawn.wait(_SLOT_RETRY_SECONDS):
                self.wait_for_run(first := self.start_attempt(spec, request, attempt))

        return run_attempt

    def start_attempt(self, spec: TrialSpec, request: AttemptRequest, attempt: int) -> UUID:
        """Start the attempt on all its nodes, or find the runs of an earlier start; return the flow run of node 0.

        Raises PrefectException, httpx.HTTPError, OSError: the API rejects a run, or is unavailable for 5 minutes.
        """
        request = replace(request, secret=secrets.token_hex(16)) if spec.nodes_per_trial > 1 else request
        spec_parameters, request_parameters = make_spec_parameter(spec), make_request_parameter(request)
        parameters: dict[str, object] = {"spec": spec_parameters, "request": request_parameters, "attempt": attempt}
        # The key has the target and experiment id, since other targets and later experiments may use the same names.
        target, experiment_id = hash_bytes(spec.target.uri.encode())[:16], request.experiment_id[:16]
        key = f"{target}/{spec.trial.experiment}/{experiment_id}/{spec.trial.trial}/{request.trial.outbox}"
        first = self._find_or_create_run(spec, parameters, key)
        # An earlier owner may have started node 0 with another secret. The other nodes need the secret of node 0.
        parameters = {**parameters, "request": first.parameters.get("request", parameters["request"])}
        others = [
            self._find_or_create_run(spec, {**parameters, "node": node}, f"{key}/node {node}")
            for node in range(1, spec.nodes_per_trial)
        ]
        if others:
            with self._poll_lock:
                self._others[first.id] = {run.id for run in others}
                self._awaited |= self._others[first.id]  # so that `cancel_unstarted_attempts` can cancel them
        names = ", ".join(run.name for run in (first, *others))
        get_run_logger().info("trial %s, attempt %d: flow run %s", spec.trial.trial, attempt, names)
        return first.id

    def cancel_unstarted_attempts(self) -> None:
        self._withdrawn.set()

    def _find_or_create_run(self, spec: TrialSpec, parameters: dict[str, object], key: str) -> FlowRun:
        """Return the newest run of this attempt; create a run if there is none.

        If a run has ended, an earlier owner may have created later runs, so look for these by their keys. If a run was
        cancelled by a concurrency limit, or by an owner's `cancel_unstarted_attempts`, create a new run.
        """
        run = self._create_run(spec, parameters, self._take_next_key(key))
        while run.state is not None and run.state.is_final():
            if run.state.is_cancelled():
                with get_client(sync_client=True) as client:
                    if _find_canceller(client, run.id, run.state, self._deployment) is _Canceller.USER:
                        raise AttemptCancelledError(f"its flow run {run.name} was cancelled")
                run = self._create_run(spec, parameters, self._take_next_key(key))
                continue
            next_key = FlowRunFilterIdempotencyKey(any_=[self._take_next_key(key)])
            with get_client(sync_client=True) as client:
                read = partial(client.read_flow_runs, flow_run_filter=FlowRunFilter(idempotency_key=next_key), limit=1)
                later = self._retry_while_unavailable(spec, read)
            if not later:
                self._key_counts[key] -= 1
                break
            run = later[0]
        return run

    def _take_next_key(self, key: str) -> str:
        """Return the key for the next run of an attempt: `key`, then `key/2`, `key/3`, and so on."""
        self._key_counts[key] += 1
        return f"{key}/{self._key_counts[key]}" if self._key_counts[key] > 1 else key

    def _retry_while_unavailable(self, spec: TrialSpec, request: Callable[[], _Response]) -> _Response:
        """Call `request`. While the API is unavailable, retry with backoff for about 5 minutes."""
        deadline = time.monotonic() + _START_TIMEOUT_SECONDS

        def should_retry(error: Exception) -> bool:
            is_final = isinstance(error, httpx.HTTPStatusError | ObjectNotFound) and not is_temporary_error(error)
            is_late = time.monotonic() >= deadline or self._withdrawn.is_set()
            return isinstance(error, _API_ERRORS) and not (is_final or is_late)

        return with_retries(request, should_retry, _PAUSES_SECONDS, f"trial {spec.trial.trial}: starting it: ")

    def _create_run(self, spec: TrialSpec, parameters: dict[str, object], key: str) -> FlowRun:
        """Create the run; return the existing run if an earlier request, whose response was lost, has created it."""
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
                f"trial_deployment: the deployment {self._deployment!r} or the flow run of this search was deleted on "
                f"the Prefect server: deploy it again ({_DEPLOY_COMMAND}), and run the search again to continue"
            ) from missing
        if not isinstance(run, FlowRun):
            raise TypeError("run_deployment returned a coroutine, because it was called in an async context")
        return run

    def wait_for_run(self, flow_run: UUID) -> None:
        """Wait until the run has ended. One request every 2 s polls all runs; errors of the API are ignored.

        Raises:
            AttemptCancelledError: the user has cancelled the run, or a run of another node.
        """
        with self._poll_lock:
            self._awaited.add(flow_run)
        while not self._poll_and_check_end(flow_run):
            time.sleep(_POLL_INTERVAL_SECONDS)
        for run in (flow_run, *self._others.get(flow_run, ())):
            if self._ended.get(run) is _Canceller.USER:
                raise AttemptCancelledError(f"its flow run {run} was cancelled")

    def _poll_and_check_end(self, flow_run: UUID) -> bool:
        with self._poll_lock:
            if time.monotonic() - self._polled_at >= _POLL_INTERVAL_SECONDS:
                with suppress(*_API_ERRORS), get_client(sync_client=True) as client:
                    awaited, withdrawn = sorted(self._awaited), self._withdrawn.is_set()
                    states = _poll_runs(client, awaited, withdrawn=withdrawn)
                    for run, state in states.items():
                        if state is None or state.is_final():
                            self._ended[run] = _find_canceller(client, run, state, self._deployment)
                    self._mark_silent_runs_crashed(client)
                    has_waiting = any(state is not None and _is_waiting_to_start(state) for state in states.values())
                    if has_waiting and time.monotonic() - self._wait_reason_polled_at >= _WAIT_REASON_INTERVAL_SECONDS:
                        self._wait_reason_polled_at = time.monotonic()
                        reason = _get_wait_reason(client, self._deployment)
                        if reason and reason != self._wait_reason:
                            get_run_logger().warning("trials cannot start: %s", reason)
                        self._wait_reason = reason
                self._polled_at = time.monotonic()
                self._awaited -= self._ended.keys()
            return flow_run in self._ended

    def _mark_silent_runs_crashed(self, client: SyncPrefectClient) -> None:
        """Mark the run of node 0 as crashed if the other nodes have ended because node 0 has stopped sending messages.

        If a machine fails together with its worker, nothing else changes the run's state. A marked run that is still
        running ends at its next post, because the search has closed the outbox of its attempt.
        """
        for first, others in self._others.items():
            if first not in self._awaited or not others <= self._ended.keys():
                continue
            if time.monotonic() - self._alone_since.setdefault(first, time.monotonic()) < _NODE_0_END_TIMEOUT_SECONDS:
                continue
            self._alone_since[first] = time.monotonic()
            runs = client.read_flow_runs(flow_run_filter=_make_id_filter(others), limit=_RUNS_PER_REQUEST)
            states = [run.state for run in runs if run.state is not None and run.state.name == NODE_0_SILENT]
            if states:
                client.set_flow_run_state(first, Crashed(message=states[0].message))


def _make_id_filter(ids: Collection[UUID]) -> FlowRunFilter:
    return FlowRunFilter(id=FlowRunFilterId(any_=list(ids)))


def _get_wait_reason(client: SyncPrefectClient, deployment_name: str) -> str | None:
    """Return why the runs of a deployment cannot start, and what the user can do; None if they can start."""
    deployment = client.read_deployment_by_name(deployment_name)
    if (pool_name := deployment.work_pool_name) is None:
        return None
    pool, queue_name = client.read_work_pool(pool_name), deployment.work_queue_name
    if pool.is_paused:
        return f"work pool {pool_name!r} is paused; to resume it: prefect work-pool resume {pool_name}"
    if pool.concurrency_limit == 0:
        return f"the concurrency limit of work pool {pool_name!r} is 0"
    if queue_name is not None:
        queue = client.read_work_queue_by_name(queue_name, work_pool_name=pool_name)
        if queue.is_paused:
            resume = f"prefect work-queue resume {queue_name} --pool {pool_name}"
            return f"work queue {queue_name!r} of work pool {pool_name!r} is paused; to resume it: {resume}"
        if queue.concurrency_limit == 0:
            return f"the concurrency limit of work queue {queue_name!r} of work pool {pool_name!r} is 0"
    if pool.status is WorkPoolStatus.NOT_READY:
        return f"work pool {pool_name!r} has no worker; to start one: prefect worker start --pool {pool_name}"
    return None


def _poll_runs(client: SyncPrefectClient, runs: Sequence[UUID], *, withdrawn: bool) -> Mapping[UUID, State[Any] | None]:
    """Return each run's state; None if deleted. If the search stops (`withdrawn`), cancel the runs that have not begun.

    Raises PrefectException, httpx.HTTPError, OSError: the API is unavailable.
    """
    states: dict[UUID, State[Any] | None] = {}
    for first in range(0, len(runs), _RUNS_PER_REQUEST):
        batch = runs[first : first + _RUNS_PER_REQUEST]
        existing = client.read_flow_runs(flow_run_filter=_make_id_filter(batch), limit=_RUNS_PER_REQUEST)
        states |= {**dict.fromkeys(batch), **{run.id: run.state for run in existing}}
    for run, state in states.items():
        if withdrawn and state is not None and _is_waiting_to_start(state):
            cancelled: State[None] = Cancelled(name=_WITHDRAWN, message="the search ended before this run began")
            states[run] = client.set_flow_run_state(run, cancelled).state or state
    return states


def _is_waiting_to_start(state: State[Any]) -> bool:
    return state.is_scheduled() or state.is_pending()


def _find_canceller(
    client: SyncPrefectClient, run: UUID, state: State[Any] | None, deployment: str
) -> _Canceller | None:
    """Return the canceller of a run that has ended; None if the run was not cancelled, or if the search cancelled it.

    A run that had the state Cancelling was cancelled by a user, after it had begun.
    """
    if state is None or not state.is_cancelled():
        return None
    history = client.read_flow_run_states(run)
    if any(earlier.is_cancelling() for earlier in history):
        return _Canceller.USER
    if state.name == _WITHDRAWN or any(earlier.is_running() for earlier in history):
        return None
    options = client.read_deployment_by_name(deployment).concurrency_options
    has_no_slot = options is not None and options.collision_strategy is ConcurrencyLimitStrategy.CANCEL_NEW
    return _Canceller.CONCURRENCY_LIMIT if has_no_slot else _Canceller.USER
