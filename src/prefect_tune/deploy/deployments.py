"""Create or update deployments on a Prefect server, idempotently; validate their parameters, and store no secret."""

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
from prefect_tune.blocks.resolve_target import require_absolute_target, validate_target
from prefect_tune.core.display_text import did_you_mean_or_list, format_duration
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.stoppers import Stopper
from prefect_tune.core.search.space_json import space_from_json
from prefect_tune.core.values import ExperimentName
from prefect_tune.deploy.deployment_specs import TAG, DeploymentSchedule, DeploymentSpec, Interval
from prefect_tune.parameters.argument_checks import make_stopper, split_import_path, with_samples
from prefect_tune.parameters.forms import GroupedFlow, flatten_parameters, make_form_schema
from prefect_tune.parameters.search_plan import OPTIONS, SearchOptions, SearchPlan
from prefect_tune.prefect_api.api_client import open_server_client
from prefect_tune.stores.open_location import BLOCK_SLUG
from prefect_tune.trust import resolve_trusted_packages
from prefect_tune.tuner.run_search import begin_schedule, parse_warm_start

_TEMPLATE = re.compile(r"\{\{\s*prefect\.blocks\.([a-z0-9-]+)\.([^.\s}]+)\s*\}\}")
_SPACE_VALIDATOR = BeforeValidator(lambda space: space_from_json(space, load=lambda name: lambda _: name))


SlugLookup: TypeAlias = Callable[[str], str | None]
"""Takes the id or `type/name` of a saved block, and returns its `type/name`; None if there is no such block."""


def look_up_block_slug(client: SyncPrefectClient, block: str) -> str | None:
    """Look up a block without reading its secrets. With `client` bound by `partial`, this is a `SlugLookup`."""
    try:
        if BLOCK_SLUG.fullmatch(block):
            kind, name = block.split("/")
            client.read_block_document_by_name(name, kind, include_secrets=False)
            return block
        document = client.read_block_document(UUID(block), include_secrets=False)
    except (ObjectNotFound, ValueError):
        return None
    return f"{document.block_type.slug}/{document.name}" if document.block_type else None


def validate_parameters(
    parameters: Mapping[str, Any], schema: Mapping[str, Any], find_slug: SlugLookup, *, complete: bool
) -> dict[str, Any]:
    """Return the parameters as the deployment stores them: with the name of each block instead of the block's fields.

    With `complete`, every parameter that a run needs must be present, because no form asks for it in a scheduled run.

    Raises:
        InvalidInput: a parameter is unknown, missing, invalid, or would reveal a secret. The message has no secret.
    """
    for name in parameters:
        if name not in schema["properties"]:
            hint = did_you_mean_or_list(name, schema["properties"])
            raise InvalidInput(f"parameters: unknown parameter {name!r}: {hint}")
    validated = dict(parameters)
    if "target" in validated:
        validated["target"] = _target_to_text(validated["target"], "target", find_slug)
    if isinstance(sync := validated.get("sync"), Mapping):
        validated["sync"] = _normalize_sync(sync, find_slug)
    passed = {name: value for name, value in validated.items() if value is not None}
    is_resume = "fork" in schema["properties"]  # a resume may omit parameters, because the journal has them
    if "trusted_packages" in passed:
        resolve_trusted_packages(passed["trusted_packages"])
    plan_type = _DeploymentOptions if is_resume else _DeploymentPlan
    plan = plan_type(**{name: value for name, value in passed.items() if name in OPTIONS})
    try:
        validate(validated, dict(schema), raise_on_error=True, ignore_required=not complete)
    except SchemaError as error:
        raise InvalidInput(f"parameters: {error}") from None
    if complete and isinstance(plan, _DeploymentPlan):
        if plan.search is not None:
            search = with_samples(plan.search, plan.num_samples or plan.samples_per_run)
            search.begin(plan.space or {}, plan.objective, seed=0)
        if plan.scheduler is not None:
            begin_schedule(plan.scheduler, plan.objective, seed=0)
    return validated


def _normalize_sync(sync: Mapping[str, Any], find_slug: SlugLookup) -> object:
    if "$ref" in sync:
        return {"$ref": {"block_document_slug": _resolve_saved_block(sync["$ref"], "sync", find_slug)}}
    SyncConfig(**{**sync, "upload_dir": None})
    target = sync.get("upload_dir")
    return {**sync} if target is None else {**sync, "upload_dir": _target_to_text(target, "sync.upload_dir", find_slug)}


def _target_to_text(target: object, field: str, find_slug: SlugLookup) -> str:
    """Return the target as a URI or `type/name`; a run gets this text from Prefect unchanged, not a block's fields."""
    if isinstance(target, Mapping):
        if set(target) == {"$ref"}:
            return _resolve_saved_block(target["$ref"], field, find_slug)
        raise InvalidInput(
            f"{field}: expected a URI or the name of a saved block, found a block's fields, whose credentials would "
            "be readable in the deployment. Save the block, and pass its name: "
            f"{field}=s3-target/NAME (`prefect-tune blocks register`, then Blocks in the UI)"
        )
    if not isinstance(target, StorageTarget | str):
        raise InvalidInput(f"{field}: expected a URI or the type/name of a saved block, found {type(target).__name__}")
    if isinstance(target, str):
        if template := _TEMPLATE.fullmatch(target.strip()):
            return _resolve_saved_block(f"{template[1]}/{template[2]}", field, find_slug)
        validate_target(target)
        require_absolute_target(target, field)
        if BLOCK_SLUG.fullmatch(target):
            return _resolve_saved_block(target, field, find_slug)
    try:
        return target_reference(resolve_target(target))
    except InvalidInput as error:
        raise InvalidInput(f"{field}: {error}") from error


def _resolve_saved_block(reference: object, field: str, find_slug: SlugLookup) -> str:
    block = reference
    if isinstance(reference, Mapping):
        block = reference.get("block_document_slug", reference.get("block_document_id"))
    slug = find_slug(str(block))
    if slug is None:
        raise InvalidInput(f"{field}: no block {str(block)!r} is saved on the Prefect server")
    return slug


def _require_absolute_sources(warm_start: list[object]) -> Sequence[str]:
    sources = parse_warm_start(warm_start)
    for source in sources:
        require_absolute_target(source.rpartition("/")[0] or "/", "warm_start")
    return sources


def _make_import_path_validator(parameter: str) -> AfterValidator:
    return AfterValidator(lambda name: ":".join(split_import_path(name, parameter)))


class _DeploymentOptions(SearchOptions):
    """Options of a deployment's runs. Import paths are only parsed, because only the runs' machines have the code."""

    trainable: Annotated[str, _make_import_path_validator("trainable")] = "later:Later"
    target: Any = None  # `validate_parameters` checks `target` and `sync`
    space: Annotated[Mapping[str, Any], _SPACE_VALIDATOR] | None = None
    experiment: ExperimentName = "later"
    sync: dict[str, Any] | None = None  # type: ignore[assignment]  # the JSON of a form
    warm_start: Annotated[list[Any], AfterValidator(_require_absolute_sources)] | None = None
    callbacks: list[Annotated[str, _make_import_path_validator("callback")]] | None = None

    @property
    def stopper(self) -> Stopper:
        if isinstance(self.stop, str) and ":" in self.stop:
            split_import_path(self.stop, "stop")
            return make_stopper(None)  # a placeholder: the run imports the stopper
        return super().stopper


class _DeploymentPlan(_DeploymentOptions, SearchPlan):
    """The plan of a deployment's searches."""


_PrefectSchedule: TypeAlias = CronSchedule | IntervalSchedule
_COLLISION_STRATEGIES = {"cancel-new": ConcurrencyLimitStrategy.CANCEL_NEW, "enqueue": ConcurrencyLimitStrategy.ENQUEUE}


@dataclass(frozen=True, kw_only=True)
class WorkPool:
    """The work pool, of any type, that runs the deployments."""

    name: str
    queue: str | None = None
    job_variables: Mapping[str, Any] = field(default_factory=dict)
    """Values for the variables of the pool's base job template, such as `image`."""


@dataclass(frozen=True, slots=True)
class DeploymentResult:
    """The result of creating or updating one deployment."""

    name: str
    outcome: Literal["created", "updated"]
    link: str | None
    """The deployment's page in the Prefect UI; None if the address of the UI is unknown."""
    schedules: Sequence[str]


@dataclass(frozen=True)
class _ValidatedDeployment:
    """A deployment with a valid flow, parameters and schedules."""

    spec: DeploymentSpec
    flow: Flow[Any, Any]
    fields: Mapping[str, Any]
    schedules: Sequence[_PrefectSchedule] | None


def deploy(specs: Sequence[DeploymentSpec], pool: WorkPool) -> Sequence[DeploymentResult]:
    """Create or update these deployments; validate all of them before writing any.

    Runs use the package that is installed where they execute, since Prefect pulls no code. If the new schedules equal
    the existing ones, the existing ones stay as they are, active or paused; if not, the new ones replace them.

    Raises:
        InvalidInput: a flow cannot be imported, the work pool does not exist, or a parameter or schedule is invalid.
        TuneError: no Prefect server answers, or the server refuses the request.
    """
    with open_server_client("deployments") as client:
        _require_pool(client, pool)
        validated = [_validate_deployment(client, spec, pool) for spec in specs]
        return [_create_or_update_deployment(client, deployment) for deployment in validated]


def _require_pool(client: SyncPrefectClient, pool: WorkPool) -> None:
    """Require that the work pool exists and defines all job variables, because Prefect ignores undefined ones."""
    try:
        existing = client.read_work_pool(pool.name)
    except ObjectNotFound as missing:
        names = ", ".join(sorted(work_pool.name for work_pool in client.read_work_pools())) or "none"
        raise InvalidInput(
            f"there is no work pool {pool.name!r} (existing pools: {names}); create it: "
            f"prefect work-pool create {pool.name} --type process"
        ) from missing
    variables = existing.base_job_template.get("variables", {}).get("properties", {})
    for name in pool.job_variables if variables else ():
        if name not in variables:
            hint = did_you_mean_or_list(name, sorted(variables))
            raise InvalidInput(f"work pool {pool.name!r} ({existing.type!r}) has no job variable {name!r}: {hint}")


def _validate_deployment(client: SyncPrefectClient, spec: DeploymentSpec, pool: WorkPool) -> _ValidatedDeployment:
    module, _, name = spec.flow.entrypoint.rpartition(".")
    flow: Flow[Any, Any] = getattr(import_module(module), name)
    schedules = None if spec.schedules is None else [_make_schedule(schedule) for schedule in spec.schedules]
    schema = make_form_schema(flow.flat_flow if isinstance(flow, GroupedFlow) else flow)
    parameters, find_slug = flatten_parameters(spec.parameters), partial(look_up_block_slug, client)
    parameters = validate_parameters(parameters, schema, find_slug, complete=bool(schedules))
    strategy = ConcurrencyOptions(collision_strategy=_COLLISION_STRATEGIES[spec.collision])
    fields = {
        "description": spec.flow.description,
        "entrypoint": spec.flow.entrypoint,
        "parameters": flow.group_parameters(parameters) if isinstance(flow, GroupedFlow) else parameters,
        "parameter_openapi_schema": make_form_schema(flow),
        "enforce_parameter_schema": True,
        "tags": [TAG],
        "work_pool_name": pool.name,
        "work_queue_name": pool.queue,
        "job_variables": dict(pool.job_variables),
        "concurrency_limit": spec.concurrency_limit,
        "concurrency_options": strategy if spec.concurrency_limit else None,
        "pull_steps": [],
    }
    return _ValidatedDeployment(spec, flow, fields, schedules)


def _make_schedule(schedule: DeploymentSchedule) -> _PrefectSchedule:
    try:
        if isinstance(schedule.when, Interval):
            return IntervalSchedule(interval=schedule.when.interval, timezone=schedule.time_zone)
        return CronSchedule(cron=schedule.when, timezone=schedule.time_zone)
    except ValidationError as error:
        problem = error.errors()[0]
        raise InvalidInput(f"schedule {problem['input']!r}: {problem['msg'].removeprefix('Value error, ')}") from error


def _create_or_update_deployment(client: SyncPrefectClient, deployment: _ValidatedDeployment) -> DeploymentResult:
    """Create a deployment. If it exists, update it instead, because creating it again would delete its schedules."""
    fields, new_schedules = dict(deployment.fields), deployment.schedules
    try:
        existing = client.read_deployment_by_name(deployment.spec.full_name)
    except ObjectNotFound:
        schedules = [DeploymentScheduleCreate(schedule=schedule, active=True) for schedule in new_schedules or ()]
        flow_id = client.create_flow(deployment.flow)
        deployment_id = client.create_deployment(flow_id, deployment.spec.name, schedules=schedules, **fields)
        outcome: Literal["created", "updated"] = "created"
    else:
        old_keys = sorted(_make_schedule_key(schedule.schedule) for schedule in existing.schedules)
        if new_schedules is not None and old_keys != sorted(map(_make_schedule_key, new_schedules)):
            for schedule in existing.schedules:
                client.delete_deployment_schedule(existing.id, schedule.id)
            fields["schedules"] = [DeploymentScheduleUpdate(schedule=new, active=True) for new in new_schedules]
        client.update_deployment(existing.id, DeploymentUpdate(**fields))
        deployment_id, outcome = existing.id, "updated"
    schedules_now = client.read_deployment(deployment_id).schedules
    return DeploymentResult(
        name=deployment.spec.full_name,
        outcome=outcome,
        link=url_for("deployment", obj_id=deployment_id),
        schedules=[_format_schedule(schedule.schedule, active=schedule.active) for schedule in schedules_now],
    )


def _make_schedule_key(schedule: Any) -> str:
    """Return a text that is equal for equal schedules; it omits an interval's anchor date, which users do not set."""
    return str(sorted(schedule.model_dump(exclude={"anchor_date"}).items()))


def _format_schedule(schedule: Any, *, active: bool) -> str:
    if isinstance(schedule, IntervalSchedule):
        when = f"every {format_duration(schedule.interval)}"
    else:
        when = f"{getattr(schedule, 'cron', None) or schedule.rrule} {schedule.timezone}"
    return f"{when}{'' if active else ' (paused)'}"
