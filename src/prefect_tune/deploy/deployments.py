"""Create or update deployments on a Prefect server, idempotently."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal, TypeAlias
from uuid import UUID

from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentScheduleCreate, DeploymentScheduleUpdate, DeploymentUpdate
from prefect.client.schemas.objects import ConcurrencyLimitStrategy, ConcurrencyOptions, WorkPool
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule, IntervalSchedule
from prefect.exceptions import ObjectNotFound
from prefect.utilities.urls import url_for
from pydantic import ValidationError

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.shown_text import did_you_mean_or_has
from prefect_tune.deploy.api_client import prefect_server
from prefect_tune.deploy.deployment_parameters import SavedBlocks, checked
from prefect_tune.deploy.deployment_specs import TAG, DeployableFlow, DeploymentSchedule, DeploymentSpec, Interval
from prefect_tune.parameters.forms import GroupedFlow, flattened, form_of

_Times: TypeAlias = CronSchedule | IntervalSchedule
_STRATEGIES = {"cancel-new": ConcurrencyLimitStrategy.CANCEL_NEW, "enqueue": ConcurrencyLimitStrategy.ENQUEUE}


@dataclass(frozen=True, kw_only=True)
class Pool:
    """The work pool, of any type, that runs the deployments."""

    name: str
    queue: str | None = None
    job_variables: Mapping[str, Any] = field(default_factory=dict)
    """Values for the variables of the pool's base job template, such as `image`."""


@dataclass(frozen=True, slots=True)
class Deployed:
    """The result of creating or updating one deployment."""

    name: str
    outcome: Literal["created", "updated"]
    link: str | None
    """The deployment's page in the Prefect UI; None if the UI's address is not known."""
    schedules: Sequence[str]


@dataclass(frozen=True)
class _Ready:
    """A deployment whose flow, parameters and schedules are checked."""

    wanted: DeploymentSpec
    flow: Flow[Any, Any]
    schema: Mapping[str, Any]
    parameters: Mapping[str, Any]
    times: Sequence[_Times] | None


def deploy(wanted: Sequence[DeploymentSpec], pool: Pool) -> Sequence[Deployed]:
    """Create or update these deployments; everything is checked before anything is written.

    Runs use the package as it is installed where they run: no code is pulled. Schedules that equal the existing
    ones keep their state, active or paused; others replace all existing ones.

    Raises:
        InvalidInput: a flow cannot be imported, the work pool does not exist, or a parameter or schedule is invalid.
        TuneError: no Prefect server answers, or it refuses.
    """
    with prefect_server("deployments") as client:
        _require_pool(client, pool)
        ready = [_ready(client, each) for each in wanted]
        return [_deployed(client, each, pool) for each in ready]


# ---------------------------------------------------------------------------------------------------------- checks


def _require_pool(client: SyncPrefectClient, pool: Pool) -> None:
    try:
        found = client.read_work_pool(pool.name)
    except ObjectNotFound as missing:
        there = ", ".join(sorted(each.name for each in client.read_work_pools())) or "none"
        raise InvalidInput(
            f"there is no work pool {pool.name!r} (existing pools: {there}); create it: "
            f"prefect work-pool create {pool.name} --type process"
        ) from missing
    _require_variables(found, pool.job_variables)


def _require_variables(pool: WorkPool, given: Mapping[str, Any]) -> None:
    """Refuse a job variable that the pool's template does not define: Prefect would ignore it."""
    known = pool.base_job_template.get("variables", {}).get("properties", {})
    for name in given:
        if known and name not in known:
            hint = did_you_mean_or_has(name, sorted(known))
            raise InvalidInput(f"work pool {pool.name!r} of type {pool.type!r} has no job variable {name!r}: {hint}")


def _ready(client: SyncPrefectClient, wanted: DeploymentSpec) -> _Ready:
    flow = _flow(wanted.offer)
    times = None if wanted.schedules is None else [_times(each) for each in wanted.schedules]
    parameters = _stored(client, flow, wanted.parameters, complete=bool(times))
    return _Ready(wanted, flow, form_of(flow), parameters, times)


def _stored(
    client: SyncPrefectClient, flow: Flow[Any, Any], given: Mapping[str, Any], *, complete: bool
) -> Mapping[str, Any]:
    """Return valid parameters as the flow's form shows them, whether they are given in its group or beside it."""
    if isinstance(flow, GroupedFlow):
        return flow.grouped(_stored(client, flow.flat, flattened(given), complete=complete))
    return checked(given, form_of(flow), SavedBlocks(client), complete=complete)


def _flow(offer: DeployableFlow) -> Flow[Any, Any]:
    module, _, name = offer.entrypoint.rpartition(".")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InvalidInput(f"{offer.name}: {offer.entrypoint} cannot be imported: {error}") from error
    if isinstance(found, Flow):
        return found
    raise InvalidInput(f"{offer.name}: expected a flow at {offer.entrypoint}, found a {type(found).__name__}")


def _times(schedule: DeploymentSchedule) -> _Times:
    try:
        if isinstance(schedule.when, Interval):
            return IntervalSchedule(interval=schedule.when.interval, timezone=schedule.time_zone)
        return CronSchedule(cron=schedule.when, timezone=schedule.time_zone)
    except ValidationError as error:
        problem = error.errors()[0]
        raise InvalidInput(f"schedule {problem['input']!r}: {problem['msg'].removeprefix('Value error, ')}") from error


# ---------------------------------------------------------------------------------------------------------- writing


def _deployed(client: SyncPrefectClient, ready: _Ready, pool: Pool) -> Deployed:
    before = _before(client, ready.wanted)
    if before is None:
        number = _created(client, ready, pool)
    else:
        number = before.id
        _updated(client, before, ready, pool)
    now = client.read_deployment(number)
    return Deployed(
        name=ready.wanted.full_name,
        outcome="created" if before is None else "updated",
        link=url_for("deployment", obj_id=number),
        schedules=[_said(each.schedule, active=each.active) for each in now.schedules],
    )


def _before(client: SyncPrefectClient, wanted: DeploymentSpec) -> DeploymentResponse | None:
    try:
        return client.read_deployment_by_name(wanted.full_name)
    except ObjectNotFound:
        return None


def _fields(ready: _Ready, pool: Pool) -> dict[str, Any]:
    wanted = ready.wanted
    strategy = _STRATEGIES[wanted.collision]
    return {
        "description": wanted.offer.description,
        "entrypoint": wanted.offer.entrypoint,
        "parameters": dict(ready.parameters),
        "parameter_openapi_schema": dict(ready.schema),
        "enforce_parameter_schema": True,
        "tags": [TAG],
        "work_pool_name": pool.name,
        "work_queue_name": pool.queue,
        "job_variables": dict(pool.job_variables),
        "concurrency_limit": wanted.at_once,
        "concurrency_options": ConcurrencyOptions(collision_strategy=strategy) if wanted.at_once else None,
        "pull_steps": [],
    }


def _created(client: SyncPrefectClient, ready: _Ready, pool: Pool) -> UUID:
    schedules = [DeploymentScheduleCreate(schedule=each, active=True) for each in ready.times or ()]
    flow_id = client.create_flow(ready.flow)
    return client.create_deployment(flow_id, ready.wanted.name, schedules=schedules, **_fields(ready, pool))


def _updated(client: SyncPrefectClient, before: DeploymentResponse, ready: _Ready, pool: Pool) -> None:
    """Update an existing deployment: creating it again would make Prefect delete its schedules."""
    fields = _fields(ready, pool)
    if not _has_times(before, ready.times):
        for each in before.schedules:
            client.delete_deployment_schedule(before.id, each.id)
        fields["schedules"] = [DeploymentScheduleUpdate(schedule=each, active=True) for each in ready.times or ()]
    client.update_deployment(before.id, DeploymentUpdate(**fields))


def _has_times(before: DeploymentResponse, times: Sequence[_Times] | None) -> bool:
    there = sorted(_key(each.schedule) for each in before.schedules)
    return times is None or there == sorted(_key(each) for each in times)


def _key(schedule: Any) -> str:
    """Return a comparable text of a schedule, without the anchor date of an interval, which users do not set."""
    return str(sorted(schedule.model_dump(exclude={"anchor_date"}).items()))


def _said(schedule: Any, *, active: bool) -> str:
    when = getattr(schedule, "cron", None) or getattr(schedule, "rrule", None) or f"every {schedule.interval}"
    return f"{when} {schedule.timezone}{'' if active else ' (paused)'}"
