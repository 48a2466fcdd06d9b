"""Validate the parameters of a deployment before it is written, and keep credentials out of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Protocol
from uuid import UUID

from jsonschema.exceptions import ValidationError as SchemaError
from prefect.client.orchestration import SyncPrefectClient
from prefect.exceptions import ObjectNotFound
from prefect.utilities.schema_tools.validation import ValidationError, validate
from pydantic import AfterValidator, BeforeValidator

from prefect_tune.blocks import StorageTarget, SyncConfig, resolve_target, target_reference
from prefect_tune.blocks.resolve_target import validate_target
from prefect_tune.blocks.storage_target import unknown_field
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.stoppers import Stopper
from prefect_tune.core.search.space_json import space_from_json
from prefect_tune.core.shown_text import did_you_mean_or_has
from prefect_tune.core.values import valid_name
from prefect_tune.parameters.argument_checks import import_string, stopper_for
from prefect_tune.parameters.json_specs import with_samples
from prefect_tune.parameters.search_limits import require_one_count
from prefect_tune.parameters.search_plan import OPTIONS, SearchPlan
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
    except ValidationError as error:
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
        return _said(where, target)
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
    if BLOCK_SLUG.fullmatch(target):
        return _saved({"block_document_slug": target}, where, blocks)
    return _said(where, resolve_target(target))


def _said(where: str, target: StorageTarget) -> str:
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
