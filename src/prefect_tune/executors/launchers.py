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
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import Any, TypeVar
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId, FlowRunFilterIdempotencyKey
from prefect.client.schemas.objects import FlowRun, State
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.futures import PrefectFuture
from prefect.logging import get_run_logger
from prefect.states import Cancelled, Crashed

from prefect_tune.attempt.nodes.node_stream import IS_SILENT
from prefect_tune.attempt.trial_spec import AttemptRequest, TrialSpec
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.resources import Resources
from prefect_tune.core.values import digest_of
from prefect_tune.executors.remote_link import StoreLink, request_as_parameters, spec_as_parameters
from prefect_tune.executors.trial_executor import attempt_of, error_in, node_task
from prefect_tune.prefect_api.api_client import is_temporary

_Answer = TypeVar("_Answer")
_LOOK_SECONDS = 2.0
_NODES_END_SECONDS = 60.0
_ENDS_AFTER_OTHERS_SECONDS = 30.0  # how long node 0 may end after the other nodes
_LEAST_CPU = 0.01
_RUNS_PER_REQUEST = 200  # the most that Prefect returns
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 30.0
_PATIENCE = timedelta(minutes=5)
"""How long starting an attempt retries while the Prefect API is unavailable, for example during an upgrade."""
_DEPLOY = "prefect-tune deploy train-trial --work-pool POOL"
_AWAY = (PrefectException, httpx.HTTPError, OSError)


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
        if spec.nodes_per_trial > 1:
            return self._on_nodes(spec, replace(request, secret=secrets.token_hex(16)), link)
        with self._reserving():
            future = attempt_of(spec).submit(spec, request, link)
        return partial(_wait_for, future)

    def _on_nodes(self, spec: TrialSpec, request: AttemptRequest, link: StoreLink) -> Callable[[], object]:
        places = _PlacementGroup(spec.nodes_per_trial, self._resources) if self._is_ray else None
        futures: list[PrefectFuture[Any]] = []
        for node in range(spec.nodes_per_trial):
            with self._reserving() if places is None else places.at(node):
                futures.append(
                    node_task().submit(spec, request, node, link)
                    if node
                    else attempt_of(spec).submit(spec, request, link)
                )

        def wait() -> None:
            try:
                _wait_for(futures[0])
            finally:
                if places is not None:
                    for each in futures[1:]:
                        each.wait(_NODES_END_SECONDS)
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


def _wait_for(future: PrefectFuture[Any]) -> None:
    """Wait for an attempt's task. Raises what the task raised."""
    future.wait()
    if (error := error_in(future.state)) is not None:
        raise error


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
        self._begun: Counter[str] = Counter()
        self._withdrawn = threading.Event()
        self._poll = threading.Lock()  # of the three below
        self._polled_at = -math.inf
        self._awaited: set[UUID] = set()
        self._ended: set[UUID] = set()
        self._others: dict[UUID, set[UUID]] = {}
        """The runs of the other nodes, by that of node 0."""
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
        if unknown := _unknown_to(deployment.parameter_openapi_schema or {}, parameters):
            raise InvalidInput(
                f"trial_deployment: {self._deployment!r} was deployed by another version of prefect-tune, which does "
                f"not know {', '.join(unknown)}; deploy it again: {_DEPLOY}"
            )

    def __call__(self, spec: TrialSpec, request: AttemptRequest, link: StoreLink, attempt: int) -> Callable[[], object]:
        """Return a function that starts the attempt and waits for its end: a start may wait for the API for minutes."""
        del link  # the deployment run creates its own from the parameters
        return lambda: self.wait_for(self.start(spec, request, attempt))

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
        key, log = _key(spec, request, attempt), get_run_logger()
        first = self._latest_run(spec, parameters, key)
        # Node 0 may have been started by an earlier run of the search: the others sign as it does.
        parameters = {**parameters, "orders": first.parameters.get("orders", parameters["orders"])}
        others = [
            self._latest_run(spec, {**parameters, "node": node}, _of_node(key, node))
            for node in range(1, spec.nodes_per_trial)
        ]
        if others:
            with self._poll:
                self._others[first.id] = {each.id for each in others}
                self._awaited |= self._others[first.id]  # to be withdrawn, if they have not begun then
        names = ", ".join(each.name for each in (first, *others))
        log.info("trial %s, attempt %d: flow run %s", spec.trial.trial, attempt, names)
        return first.id

    def withdraw(self) -> None:
        self._withdrawn.set()

    def _latest_run(self, spec: TrialSpec, parameters: dict[str, object], key: str) -> FlowRun:
        """Return the newest run of this attempt; create it if needed.

        If the run has ended, an earlier owner may have created later ones: follow them by their keys. A run that was
        cancelled before it began, by an earlier owner's `withdraw`, is replaced by a new one.
        """
        run = self._run(spec, parameters, self._took(key))
        while run.state is not None and run.state.is_final():
            if run.state.is_cancelled():
                run = self._run(spec, parameters, self._took(key))
            elif (later := self._waiting(spec, partial(_run_of, self._next(key)))) is not None:
                self._took(key)
                run = later
            else:
                break
        return run

    def _next(self, key: str) -> str:
        """Return the key of the next run of an attempt: `key` first, then `key/2`, `key/3`, and so on."""
        return f"{key}/{self._begun[key] + 1}" if self._begun[key] else key

    def _took(self, key: str) -> str:
        taken = self._next(key)
        self._begun[key] += 1
        return taken

    def _run(self, spec: TrialSpec, parameters: dict[str, object], key: str) -> FlowRun:
        """Create the run, or return it if an earlier request, whose answer was lost, has created it."""
        return self._waiting(spec, partial(self._asked_for, spec, parameters, key))

    def _waiting(self, spec: TrialSpec, ask: Callable[[], _Answer]) -> _Answer:
        """Call `ask`; while the API is unavailable, retry with backoff for up to 5 minutes."""
        pause_seconds, until = _FIRST_PAUSE_SECONDS, time.monotonic() + _PATIENCE.total_seconds()
        while True:
            try:
                return ask()
            except _AWAY as error:
                is_given_up = self._withdrawn.is_set() or time.monotonic() + pause_seconds > until
                if is_given_up or not _may_pass(error):
                    raise
                log = get_run_logger()
                log.warning("trial %s: retrying its start in %g s: %s", spec.trial.trial, pause_seconds, error)
                time.sleep(pause_seconds)
                pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)

    def _asked_for(self, spec: TrialSpec, parameters: dict[str, object], key: str) -> FlowRun:
        run = run_deployment(
            self._deployment,
            parameters=parameters,
            timeout=0,
            idempotency_key=key,
            tags=spec.tags or None,
            job_variables=self._job_variables,
        )
        if not isinstance(run, FlowRun):
            raise TypeError("run_deployment was called where it returns a coroutine")
        return run

    def wait_for(self, flow_run: UUID) -> None:
        """Return when the run has ended. One request every 2 s asks for all runs, also while the API is unavailable."""
        with self._poll:
            self._awaited.add(flow_run)
        while not self._has_ended(flow_run):
            time.sleep(_LOOK_SECONDS)

    def _has_ended(self, flow_run: UUID) -> bool:
        with self._poll:
            if time.monotonic() - self._polled_at >= _LOOK_SECONDS:
                with suppress(*_AWAY), get_client(sync_client=True) as client:
                    self._ended |= _ended_among(client, sorted(self._awaited), withdrawn=self._withdrawn.is_set())
                    self._mark_silent(client)
                self._polled_at = time.monotonic()
                self._awaited -= self._ended
            return flow_run in self._ended

    def _mark_silent(self, client: SyncPrefectClient) -> None:
        """Mark the run of a node 0 as crashed where the other nodes have ended since it writes nothing any more.

        A machine that dies together with its worker leaves the run as it was. One that was marked by mistake ends at
        its next write, which its journal refuses.
        """
        for first, others in self._others.items():
            if first not in self._awaited or not others <= self._ended:
                continue
            if time.monotonic() - self._alone_since.setdefault(first, time.monotonic()) < _ENDS_AFTER_OTHERS_SECONDS:
                continue
            self._alone_since[first] = time.monotonic()
            runs = client.read_flow_runs(flow_run_filter=_runs_with(others), limit=_RUNS_PER_REQUEST)
            messages = [each.state.message or "" for each in runs if each.state is not None]
            if said := next((each for each in messages if f"node 0 {IS_SILENT}" in each), None):
                client.set_flow_run_state(first, Crashed(message=said))


def _runs_with(ids: Collection[UUID]) -> FlowRunFilter:
    return FlowRunFilter(id=FlowRunFilterId(any_=list(ids)))


def _key(spec: TrialSpec, request: AttemptRequest, attempt: int) -> str:
    """Return the idempotency key of an attempt, unique among targets and among later experiments of one name."""
    target, experiment_id = digest_of(spec.target.uri.encode())[:16], request.experiment_id[:16]
    return f"{target}/{spec.trial.experiment}/{experiment_id}/{spec.trial.trial}/{attempt}"


def _unknown_to(schema: Mapping[str, Any], parameters: Mapping[str, object]) -> Sequence[str]:
    """Return the fields of a specification that the schema of a deployment of `train_trial` does not have."""
    known = schema.get("definitions", {}).get(TrialSpec.__name__, {}).get("properties")
    return [] if known is None else sorted(parameters.keys() - known.keys())


def _of_node(key: str, node: int) -> str:
    return f"{key}/node {node}"


def _run_of(key: str) -> FlowRun | None:
    wanted = FlowRunFilter(idempotency_key=FlowRunFilterIdempotencyKey(any_=[key]))
    with get_client(sync_client=True) as client:
        return next(iter(client.read_flow_runs(flow_run_filter=wanted, limit=1)), None)


def _may_pass(error: Exception) -> bool:
    """Whether the API error may be transient."""
    return is_temporary(error) or not isinstance(error, httpx.HTTPStatusError | ObjectNotFound)


def _ended_among(client: SyncPrefectClient, awaited: Sequence[UUID], *, withdrawn: bool) -> set[UUID]:
    """Return the runs that have ended or were deleted. If `withdrawn`, cancel those that have not begun.

    Raises PrefectException, httpx.HTTPError, OSError: the API is unavailable.
    """
    ended: set[UUID] = set()
    for first in range(0, len(awaited), _RUNS_PER_REQUEST):
        batch = awaited[first : first + _RUNS_PER_REQUEST]
        runs = client.read_flow_runs(flow_run_filter=_runs_with(batch), limit=_RUNS_PER_REQUEST)
        states = {run.id: run.state for run in runs}
        for run in batch:
            state = states.get(run)
            if withdrawn and state is not None and (state.is_scheduled() or state.is_pending()):
                cancelled: State[None] = Cancelled(message="the search ended before this run began")
                state = client.set_flow_run_state(run, cancelled).state
            if run not in states or (state is not None and state.is_final()):
                ended.add(run)
    return ended
