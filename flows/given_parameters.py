"""A deployment's parameters, checked whole before anything is written, with nothing secret in them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Protocol
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.exceptions import ObjectNotFound
from prefect.utilities.schema_tools.validation import ValidationError, validate

from prefect_tune.blocks import StorageTarget, resolve_target, target_reference
from prefect_tune.blocks.resolve import validate_target
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.objective import objective_of
from prefect_tune.core.search.space_json import space_from_json
from prefect_tune.core.values import valid_name
from prefect_tune.flows.extending import require_one_count
from prefect_tune.flows.request import stopper_for
from prefect_tune.flows.resuming import resuming
from prefect_tune.flows.spelled import scheduler_from, search_from

__all__ = ["Blocks", "SavedBlocks", "checked"]

_TEMPLATE = re.compile(r"\{\{\s*prefect\.blocks\.([a-z0-9-]+)\.([^.\s}]+)\s*\}\}")
_SLUG = re.compile(r"[a-z0-9-]+/[^/\s]+")


class Blocks(Protocol):
    """Who knows which blocks are saved, and tells no secret of them."""

    def slug(self, document: str) -> str | None:
        """Return `type/name` of the block that this is the id or the `type/name` of; None where there is none."""


class SavedBlocks:
    """Those of a Prefect server."""

    def __init__(self, client: SyncPrefectClient) -> None:
        self._client = client

    def slug(self, document: str) -> str | None:
        try:
            if _SLUG.fullmatch(document):
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
    """Return parameters that can be stored; blocks are named in them, and nowhere spelled out.

    `complete` says that nobody will be asked for the rest.

    Raises:
        InvalidInput: one is unknown, missing, means nothing, or would tell a secret. No value is repeated.
    """
    _require_known(parameters, schema, complete=complete)
    found = dict(parameters)
    if "target" in found:
        found["target"] = _named(found["target"], "target", blocks)
    if isinstance(sync := found.get("sync"), Mapping):
        found["sync"] = _sync(sync, blocks)
    _require_meaning(found)
    try:
        validate(found, dict(schema), raise_on_error=True, ignore_required=True)
    except ValidationError as error:
        raise InvalidInput(f"parameters: {error}") from error
    return found


def _require_known(parameters: Mapping[str, Any], schema: Mapping[str, Any], *, complete: bool) -> None:
    known = schema["properties"]
    for name in parameters:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}"
            raise InvalidInput(f"parameters: no parameter {name!r}: {hint}")
    missing = [name for name in schema.get("required", ()) if name not in parameters]
    if complete and missing:
        raise InvalidInput(
            f"parameters: {', '.join(map(repr, missing))} missing: a run that is started by a schedule asks nobody"
        )


def _sync(sync: Mapping[str, Any], blocks: Blocks) -> object:
    if "$ref" in sync:
        return {"$ref": {"block_document_slug": _saved(sync["$ref"], "sync", blocks)}}
    if sync.get("upload_dir") is not None:
        return {**sync, "upload_dir": _named(sync["upload_dir"], "sync.upload_dir", blocks)}
    return dict(sync)


def _named(target: object, where: str, blocks: Blocks) -> str:
    """Return a URI, or `type/name`: text, which nobody ever replaces by what stands in the block."""
    if isinstance(target, StorageTarget):
        return _said(where, target)
    if isinstance(target, Mapping):
        if set(target) == {"$ref"}:
            return _saved(target["$ref"], where, blocks)
        raise InvalidInput(
            f"{where}: is spelled out here, where everybody could read its keys: save it as a block, and name it: "
            f"{where}=s3-target/NAME (`prefect-tune blocks register`, then Blocks in the UI)"
        )
    if not isinstance(target, str):
        raise InvalidInput(f"{where}: expected a URI or the type/name of a saved block, found {type(target).__name__}")
    if template := _TEMPLATE.fullmatch(target.strip()):
        return _saved({"block_document_slug": f"{template[1]}/{template[2]}"}, where, blocks)
    validate_target(target)
    if _SLUG.fullmatch(target):
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


def _require_meaning(found: Mapping[str, Any]) -> None:
    """What a run would refuse in its first second is refused now. The trainable is where the runs are."""
    require_one_count(found.get("num_samples"), found.get("samples_per_run"))
    if found.get("experiment") is not None:
        valid_name(str(found["experiment"]))
    if "metric" in found:
        objective_of(found["metric"], found.get("mode", "min"))
    if found.get("space") is not None:
        space_from_json(found["space"], load=lambda name: lambda _: name)
    if found.get("scheduler") is not None:
        scheduler_from(found["scheduler"])
    if found.get("search") is not None:
        search_from(found["search"], found.get("num_samples"))
    if found.get("stop") is not None and not isinstance(found["stop"], str):
        stopper_for(found["stop"])
    if "resume" in found:
        resuming(found["resume"])
