"""Create or update deployments on a Prefect server, idempotently.

Their parameters are validated before, and hold no credentials.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Annotated, Any, Literal, TypeAlias
from uuid import UUID

from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentScheduleCreate, DeploymentScheduleUpdate, DeploymentUpdate
from prefect.client.schemas.objects import ConcurrencyLimitStrategy, ConcurrencyOptions
from prefect.client.schemas.schedules import CronSchedule, IntervalSchedule
from prefect.exceptions import ObjectNotFound
from prefect.utilities.schema_tools.validation import ValidationError as SchemaError
from prefect.utilities.schema_tools.validation import validate
from prefect.utilities.urls import url_for
from pydantic import AfterValidator, BeforeValidator, ValidationError

from prefect_tune.blocks import StorageTarget, SyncConfig, resolve_target, target_reference
from prefect_tune.blocks.resolve_target import require_absolute, validate_target
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.stoppers import Stopper
from prefect_tune.core.search.space_json import space_from_json
from prefect_tune.core.shown_text import did_you_mean_or_has, format_duration
from prefect_tune.core.values import ExperimentName
from prefect_tune.deploy.deployment_specs import TAG, DeploymentSchedule, DeploymentSpec, Interval
from prefect_tune.parameters.argument_checks import import_string, stopper_for, with_samples
from prefect_tune.parameters.forms import GroupedFlow, flattened, form_of
from prefect_tune.parameters.search_plan import OPTIONS, SearchOptions, SearchPlan
from prefect_tune.prefect_api.api_client import prefect_server
from prefect_tune.stores.open_location import BLOCK_SLUG
from prefect_tune.trust import trusted_here
from prefect_tune.tuner.run_search import begun, source_names

_TEMPLATE = re.compile(r"\{\{\s*prefect\.blocks\.([a-z0-9-]+)\.([^.\s}]+)\s*\}\}")


SlugOf: TypeAlias = Callable[[str], str | None]
"""Returns `type/name` of the saved block whose id or `type/name` is given; None if there is none."""


def slug_on_server(client: SyncPrefectClient, document: str) -> str | None:
    """Return as `SlugOf`, of the blocks of a Prefect server, without reading their secrets."""
    try:
        if BLOCK_SLUG.fullmatch(document):
            kind, name = document.split("/")
            client.read_block_document_by_name(name, kind, include_secrets=False)
            return document
        found = client.read_block_document(UUID(document), include_secrets=False)
    except (ObjectNotFound, ValueError):
        return None
    return f"{found.block_type.slug}/{found.name}" if found.block_type else None


def checked(
    parameters: Mapping[str, Any], schema: Mapping[str, Any], slug_of: SlugOf, *, complete: bool
) -> dict[str, Any]:
    """Return the parameters as the deployment stores them: blocks by their names, never by their fields.

    `complete` requires all that a run needs: runs of a schedule show no form.

    Raises:
        InvalidInput: a parameter is unknown, missing, invalid, or would reveal a secret. The message repeats no secret.
    """
    for name in parameters:
        if name not in schema["properties"]:
            hint = did_you_mean_or_has(name, schema["properties"])
            raise InvalidInput(f"parameters: no parameter {name!r}: {hint}")
    found = dict(parameters)
    if "target" in found:
        found["target"] = _named(found["target"], "target", slug_of)
    if isinstance(sync := found.get("sync"), Mapping):
        found["sync"] = _sync(sync, slug_of)
    given = {name: value for name, value in found.items() if value is not None}
    is_resume = "fork" in schema["properties"]  # whose journal has the other settings
    if "trusted_packages" in given:
        trusted_here(given["trusted_packages"])
    kind = _DeployedOptions if is_resume else _DeployedPlan
    plan = kind(**{name: value for name, value in given.items() if name in OPTIONS})
    try:
        validate(found, dict(schema), raise_on_error=True, ignore_required=not complete)
    except SchemaError as error:
        raise InvalidInput(f"parameters: {error}") from None
    if complete and isinstance(plan, _DeployedPlan):
        if plan.search is not None:
            search = with_samples(plan.search, plan.num_samples or plan.samples_per_run)
            search.begin(plan.space or {}, plan.objective, seed=0)
        if plan.scheduler is not None:
            begun(plan.scheduler, plan.objective, seed=0)
    return found


def _sync(sync: Mapping[str, Any], slug_of: SlugOf) -> object:
    if "$ref" in sync:
        return {"$ref": {"block_document_slug": _saved(sync["$ref"], "sync", slug_of)}}
    SyncConfig(**{**sync, "upload_dir": None})
    target = sync.get("upload_dir")
    return dict(sync) if target is None else {**sync, "upload_dir": _named(target, "sync.upload_dir", slug_of)}


def _named(target: object, where: str, slug_of: SlugOf) -> str:
    """Return a URI, or `type/name`: text that Prefect does not resolve to the block's fields when a run starts."""
    if isinstance(target, Mapping):
        if set(target) == {"$ref"}:
            return _saved(target["$ref"], where, slug_of)
        raise InvalidInput(
            f"{where}: expected a URI or the name of a saved block, found a block's fields, whose credentials would be "
            "readable in the deployment: save it as a block, and name it: "
            f"{where}=s3-target/NAME (`prefect-tune blocks register`, then Blocks in the UI)"
        )
    if not isinstance(target, StorageTarget | str):
        raise InvalidInput(f"{where}: expected a URI or the type/name of a saved block, found {type(target).__name__}")
    if isinstance(target, str):
        if template := _TEMPLATE.fullmatch(target.strip()):
            return _saved(f"{template[1]}/{template[2]}", where, slug_of)
        validate_target(target)
        require_absolute(target, where)
        if BLOCK_SLUG.fullmatch(target):
            return _saved(target, where, slug_of)
    try:
        return target_reference(resolve_target(target))
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error}") from error


def _saved(reference: object, where: str, slug_of: SlugOf) -> str:
    document = reference
    if isinstance(reference, Mapping):
        document = reference.get("block_document_slug", reference.get("block_document_id"))
    found = slug_of(str(document))
    if found is None:
        raise InvalidInput(f"{where}: no block {str(document)!r} is saved on the Prefect server")
    return found


def _absolute_sources(warm_start: list[object]) -> Sequence[str]:
    sources = source_names(warm_start)
    for source in sources:
        require_absolute(source.rpartition("/")[0] or "/", "warm_start")
    return sources


def _named_as(where: str) -> AfterValidator:
    return AfterValidator(lambda name: ":".join(import_string(name, where)))


class _DeployedOptions(SearchOptions):
    """Options of a deployment's runs: their code is installed there, so here only the form of its name is checked."""

    trainable: Annotated[str, _named_as("trainable")] = "later:Later"
    target: Any = None  # like `sync`, it is checked above
    space: (
        Annotated[
            Mapping[str, Any],
            BeforeValidator(lambda space: space_from_json(space, load=lambda name: lambda _: name)),
        ]
        | None
    ) = None
    experiment: ExperimentName = "later"
    sync: dict[str, Any] | None = None  # type: ignore[assignment]  # it is the JSON of a form
    warm_start: Annotated[list[Any], AfterValidator(_absolute_sources)] | None = None
    callbacks: list[Annotated[str, _named_as("callback")]] | None = None

    @property
    def stopper(self) -> Stopper:
        if isinstance(self.stop, str) and ":" in self.stop:
            import_string(self.stop, "stop")
            return stopper_for(None)  # the run imports it
        return super().stopper


class _DeployedPlan(_DeployedOptions, SearchPlan):
    """The plan of a deployment's searches."""


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
    fields: Mapping[str, Any]
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
        ready = [_ready(client, spec, pool) for spec in wanted]
        return [_deploy(client, each) for each in ready]


def _require_pool(client: SyncPrefectClient, pool: Pool) -> None:
    """Require the work pool, and that its template defines each job variable: Prefect would ignore another one."""
    try:
        there = client.read_work_pool(pool.name)
    except ObjectNotFound as missing:
        names = ", ".join(sorted(each.name for each in client.read_work_pools())) or "none"
        raise InvalidInput(
            f"there is no work pool {pool.name!r} (existing pools: {names}); create it: "
            f"prefect work-pool create {pool.name} --type process"
        ) from missing
    variables = there.base_job_template.get("variables", {}).get("properties", {})
    for name in pool.job_variables if variables else ():
        if name not in variables:
            hint = did_you_mean_or_has(name, sorted(variables))
            raise InvalidInput(f"work pool {pool.name!r} of type {there.type!r} has no job variable {name!r}: {hint}")


def _ready(client: SyncPrefectClient, wanted: DeploymentSpec, pool: Pool) -> _Ready:
    module, _, name = wanted.offer.entrypoint.rpartition(".")
    flow: Flow[Any, Any] = getattr(import_module(module), name)
    times = None if wanted.schedules is None else [_times(each) for each in wanted.schedules]
    flat = flow.flat if isinstance(flow, GroupedFlow) else flow
    parameters = checked(
        flattened(wanted.parameters), form_of(flat), partial(slug_on_server, client), complete=bool(times)
    )
    strategy = ConcurrencyOptions(collision_strategy=_STRATEGIES[wanted.collision])
    fields = {
        "description": wanted.offer.description,
        "entrypoint": wanted.offer.entrypoint,
        "parameters": flow.grouped(parameters) if isinstance(flow, GroupedFlow) else parameters,
        "parameter_openapi_schema": form_of(flow),
        "enforce_parameter_schema": True,
        "tags": [TAG],
        "work_pool_name": pool.name,
        "work_queue_name": pool.queue,
        "job_variables": dict(pool.job_variables),
        "concurrency_limit": wanted.at_once,
        "concurrency_options": strategy if wanted.at_once else None,
        "pull_steps": [],
    }
    return _Ready(wanted, flow, fields, times)


def _times(schedule: DeploymentSchedule) -> _Times:
    try:
        if isinstance(schedule.when, Interval):
            return IntervalSchedule(interval=schedule.when.interval, timezone=schedule.time_zone)
        return CronSchedule(cron=schedule.when, timezone=schedule.time_zone)
    except ValidationError as error:
        problem = error.errors()[0]
        raise InvalidInput(f"schedule {problem['input']!r}: {problem['msg'].removeprefix('Value error, ')}") from error


def _deploy(client: SyncPrefectClient, ready: _Ready) -> Deployed:
    """Create a deployment, or update the existing one: creating it again would make Prefect delete its schedules."""
    fields, times = dict(ready.fields), ready.times
    try:
        before = client.read_deployment_by_name(ready.wanted.full_name)
    except ObjectNotFound:
        schedules = [DeploymentScheduleCreate(schedule=each, active=True) for each in times or ()]
        flow_id = client.create_flow(ready.flow)
        deployment_id = client.create_deployment(flow_id, ready.wanted.name, schedules=schedules, **fields)
        outcome: Literal["created", "updated"] = "created"
    else:
        there = sorted(_comparable(each.schedule) for each in before.schedules)
        if times is not None and there != sorted(map(_comparable, times)):
            for each in before.schedules:
                client.delete_deployment_schedule(before.id, each.id)
            fields["schedules"] = [DeploymentScheduleUpdate(schedule=each, active=True) for each in times]
        client.update_deployment(before.id, DeploymentUpdate(**fields))
        deployment_id, outcome = before.id, "updated"
    schedules_now = client.read_deployment(deployment_id).schedules
    return Deployed(
        name=ready.wanted.full_name,
        outcome=outcome,
        link=url_for("deployment", obj_id=deployment_id),
        schedules=[_format_schedule(each.schedule, active=each.active) for each in schedules_now],
    )


def _comparable(schedule: Any) -> str:
    """Return a comparable text of a schedule, without the anchor date of an interval, which users do not set."""
    return str(sorted(schedule.model_dump(exclude={"anchor_date"}).items()))


def _format_schedule(schedule: Any, *, active: bool) -> str:
    if isinstance(schedule, IntervalSchedule):
        when = f"every {format_duration(schedule.interval)}"
    else:
        when = f"{getattr(schedule, 'cron', None) or schedule.rrule} {schedule.timezone}"
    return f"{when}{'' if active else ' (paused)'}"
