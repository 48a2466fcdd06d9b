"""Create or update deployments on a Prefect server, idempotently.

Their parameters are validated before, and hold no credentials.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Annotated, Any, Literal, Protocol, TypeAlias
from uuid import UUID

from jsonschema.exceptions import ValidationError as SchemaError
from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentScheduleCreate, DeploymentScheduleUpdate, DeploymentUpdate
from prefect.client.schemas.objects import ConcurrencyLimitStrategy, ConcurrencyOptions, WorkPool
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule, IntervalSchedule
from prefect.exceptions import ObjectNotFound
from prefect.utilities.schema_tools.validation import ValidationError as SchemaUnfit
from prefect.utilities.schema_tools.validation import validate
from prefect.utilities.urls import url_for
from pydantic import AfterValidator, BeforeValidator, ValidationError

from prefect_tune.blocks import StorageTarget, SyncConfig, resolve_target, target_reference
from prefect_tune.blocks.resolve_target import require_absolute, validate_target
from prefect_tune.blocks.storage_target import unknown_field
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.stoppers import Stopper
from prefect_tune.core.search.space_json import space_from_json
from prefect_tune.core.shown_text import did_you_mean_or_has, format_duration
from prefect_tune.core.values import valid_name
from prefect_tune.deploy.deployment_specs import TAG, DeployableFlow, DeploymentSchedule, DeploymentSpec, Interval
from prefect_tune.parameters.argument_checks import import_string, stopper_for
from prefect_tune.parameters.forms import GroupedFlow, flattened, form_of
from prefect_tune.parameters.json_specs import with_samples
from prefect_tune.parameters.search_limits import require_one_count
from prefect_tune.parameters.search_plan import OPTIONS, SearchPlan
from prefect_tune.prefect_api.api_client import prefect_server
from prefect_tune.stores.open_location import BLOCK_SLUG
from prefect_tune.trust import trusted_here
from prefect_tune.tuner.run_search import begun
from prefect_tune.tuner.warm_start import source_names

_TEMPLATE = re.compile(r"\{\{\s*prefect\.blocks\.([a-z0-9-]+)\.([^.\s}]+)\s*\}\}")


class Blocks(Protocol):
    """Looks up saved blocks, without reading their secrets."""

    def slug(self, document: str) -> str | None:
        """Return `type/name` of the block whose id or `type/name` is `document`; None if there is none."""


class SavedBlocks:
    """The saved blocks of a Prefect server."""

    def __init__(self, client: SyncPrefectClient) -> None:
        self._client = client

    def slug(self, document: str) -> str | None:
        try:
            if BLOCK_SLUG.fullmatch(document):
                kind, name = document.split("/")
                self._client.read_block_document_by_name(name, kind, include_secrets=False)
                return document
            found = self._client.read_block_document(UUID(document), include_secrets=False)
        except (ObjectNotFound, ValueError):
            return None
        return f"{found.block_type.slug}/{found.name}" if found.block_type else None


def checked(
    parameters: Mapping[str, Any], schema: Mapping[str, Any], blocks: Blocks, *, complete: bool
) -> dict[str, Any]:
    """Return the parameters as the deployment stores them: blocks by their names, never by their fields.

    `complete` requires all required parameters: runs of a schedule show no form.

    Raises:
        InvalidInput: a parameter is unknown, missing, invalid, or would reveal a secret. The message repeats no secret.
    """
    _require_known(parameters, schema, complete=complete)
    found = dict(parameters)
    if "target" in found:
        found["target"] = _named(found["target"], "target", blocks)
    if isinstance(sync := found.get("sync"), Mapping):
        found["sync"] = _sync(sync, blocks)
    if isinstance(sources := found.get("warm_start"), list):
        for source in source_names(sources):
            require_absolute(source.rpartition("/")[0] or "/", "warm_start")
    _require_fits(found, schema)
    is_resume = "trials" not in schema["properties"]  # whose journal has the other settings
    _require_meaning(found, complete=complete and not is_resume, is_resume=is_resume)
    return found


def _require_known(parameters: Mapping[str, Any], schema: Mapping[str, Any], *, complete: bool) -> None:
    known = schema["properties"]
    for name in parameters:
        if name not in known:
            raise InvalidInput(f"parameters: no parameter {name!r}: {did_you_mean_or_has(name, known)}")
    missing = [name for name in schema.get("required", ()) if name not in parameters]
    if complete and missing:
        raise InvalidInput(
            f"parameters: {', '.join(map(repr, missing))} missing: a scheduled run shows no form to enter them"
        )


def _require_fits(found: Mapping[str, Any], schema: Mapping[str, Any]) -> None:
    """Validate against the schema; an error names the type of a bad value, not the value, which may be a secret."""
    try:
        errors = validate(dict(found), dict(schema), ignore_required=True)
    except SchemaUnfit as error:
        raise InvalidInput(f"parameters: {error}") from error
    if errors:
        first = errors[0]
        where = ".".join(str(part) for part in first.absolute_path)
        kind = type(first.instance).__name__
        raise InvalidInput(f"parameters: {where}: expected {_expected(first)}, found a value of type {kind}")


def _expected(error: SchemaError) -> str:
    rule: Any = error.validator_value
    match error.validator:
        case "type":
            return str(rule)
        case "enum":
            return f"one of {', '.join(map(repr, rule))}"
        case "anyOf":
            return " or ".join(str(each.get("title") or each.get("type", "another kind")) for each in rule)
        case "additionalProperties":
            return f"only the fields {', '.join(error.schema.get('properties', {}))}"
        case other:
            return f"{other} {rule}"


def _sync(sync: Mapping[str, Any], blocks: Blocks) -> object:
    if "$ref" in sync:
        return {"$ref": {"block_document_slug": _saved(sync["$ref"], "sync", blocks)}}
    for name in sync:
        if name not in SyncConfig.model_fields:
            raise InvalidInput(f"sync: {unknown_field(SyncConfig, name)}")
    if sync.get("upload_dir") is not None:
        return {**sync, "upload_dir": _named(sync["upload_dir"], "sync.upload_dir", blocks)}
    return dict(sync)


def _named(target: object, where: str, blocks: Blocks) -> str:
    """Return a URI, or `type/name`: text that Prefect does not resolve to the block's fields when a run starts."""
    if isinstance(target, StorageTarget):
        return _reference(where, target)
    if isinstance(target, Mapping):
        if set(target) == {"$ref"}:
            return _saved(target["$ref"], where, blocks)
        raise InvalidInput(
            f"{where}: expected a URI or the name of a saved block, found a block's fields, whose credentials would be "
            "readable in the deployment: save it as a block, and name it: "
            f"{where}=s3-target/NAME (`prefect-tune blocks register`, then Blocks in the UI)"
        )
    if not isinstance(target, str):
        raise InvalidInput(f"{where}: expected a URI or the type/name of a saved block, found {type(target).__name__}")
    if template := _TEMPLATE.fullmatch(target.strip()):
        return _saved({"block_document_slug": f"{template[1]}/{template[2]}"}, where, blocks)
    validate_target(target)
    require_absolute(target, where)
    if BLOCK_SLUG.fullmatch(target):
        return _saved({"block_document_slug": target}, where, blocks)
    return _reference(where, resolve_target(target))


def _reference(where: str, target: StorageTarget) -> str:
    try:
        return target_reference(target)
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error}") from error


def _saved(reference: object, where: str, blocks: Blocks) -> str:
    document = reference
    if isinstance(reference, Mapping):
        document = reference.get("block_document_slug", reference.get("block_document_id"))
    found = blocks.slug(str(document))
    if found is None:
        raise InvalidInput(f"{where}: no block {str(document)!r} is saved on the Prefect server")
    return found


def _space(space: Mapping[str, Any]) -> Mapping[str, object]:
    return space_from_json(space, load=lambda name: lambda _: name)


def _named_as(where: str) -> Callable[[str], str]:
    return lambda name: ":".join(import_string(name, where))


class _DeployedPlan(SearchPlan):
    """The plan of a deployment's runs: their code is installed there, so here only the form of its name is checked."""

    trainable: Annotated[str, AfterValidator(_named_as("trainable"))] = "later:Later"
    target: Any = None  # like `sync`, it is checked above
    space: Annotated[Mapping[str, Any], BeforeValidator(_space)] | None = None
    experiment: Annotated[str, AfterValidator(valid_name)] = "later"
    sync: Any = None
    warm_start: Annotated[list[Any], AfterValidator(source_names)] | None = None
    callbacks: list[Annotated[str, AfterValidator(_named_as("callback"))]] | None = None

    @property
    def stopper(self) -> Stopper:
        if isinstance(self.stop, str) and ":" in self.stop:
            import_string(self.stop, "stop")
            return stopper_for(None)  # the run imports it
        return super().stopper


def _require_meaning(found: Mapping[str, Any], *, complete: bool, is_resume: bool) -> None:
    """Refuse now what a run would refuse at its start; `complete` requires all that it needs, such as a metric."""
    given = {name: value for name, value in found.items() if value is not None}
    if is_resume and "trial_job_variables" in given:
        given["trials"] = "deployment"
    require_one_count(given.get("num_samples"), given.get("samples_per_run"))
    if "trusted_packages" in given:
        trusted_here(given["trusted_packages"])
    plan = _DeployedPlan(**{name: value for name, value in given.items() if name in OPTIONS})
    if complete and plan.search is not None:
        search = with_samples(plan.search, plan.num_samples or plan.samples_per_run)
        search.begin(plan.space or {}, plan.objective, seed=0)
    if complete and plan.scheduler is not None:
        begun(plan.scheduler, plan.objective, seed=0)


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
        schedules=[_schedule_of(each.schedule, active=each.active) for each in now.schedules],
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


def _schedule_of(schedule: Any, *, active: bool) -> str:
    if isinstance(schedule, IntervalSchedule):
        when = f"every {format_duration(schedule.interval)}"
    else:
        when = f"{getattr(schedule, 'cron', None) or schedule.rrule} {schedule.timezone}"
    return f"{when}{'' if active else ' (paused)'}"
