"""Record Prefect artifacts without an event for each update, and assets without a task run for each asset."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from httpx import HTTPStatusError
from prefect.assets import Asset, AssetProperties
from prefect.client.orchestration import SyncPrefectClient
from prefect.exceptions import ObjectNotFound
from pydantic import ValidationError


def update_artifact(client: SyncPrefectClient, artifact: UUID, data: str | float, description: str) -> bool:
    """Update an artifact in place; return False if it has been deleted.

    `client.update_artifact`, in contrast, also sends an event with the complete content, and the server keeps this
    event for a week.

    To ask upstream: an update that sends an event without the content.
    """
    content = {"data": data, "description": description}
    try:
        client.request("PATCH", "/artifacts/{id}", path_params={"id": artifact}, json=content)
    except ObjectNotFound:
        return False
    except HTTPStatusError as error:
        if error.response.status_code != 404:
            raise
        return False
    return True


# Make the events by which Prefect records assets, so that they can be emitted without task runs.
#
# `@materialize` emits the same events when its task run ends. Each checkpoint and each new best model would need a task
# run, which takes 34 to 41 ms of the server's CPU time; an event takes 0.07 ms. Also, the process that emits the event
# often has not written the checkpoint itself. A test compares these events with those of `@materialize`.
#
# To ask upstream: a function that records a materialization outside of a task.

_CREATOR: Mapping[str, str] = {"prefect.resource.id": "prefect-tune", "prefect.resource.role": "asset-materialized-by"}


@dataclass(frozen=True, slots=True)
class PrefectEvent:
    """An event to emit."""

    event: str
    resource: Mapping[str, str]
    related: Sequence[Mapping[str, str]] = ()
    payload: Mapping[str, object] = field(default_factory=dict)


def make_asset(key: str, name: str = "", description: str = "") -> Asset | None:
    """Return the asset with this key; None if Prefect rejects the key because it has a space or is too long."""
    properties = AssetProperties(name=name, description=description) if name else None
    try:
        return Asset(key=key, properties=properties)
    except ValidationError:
        return None


def make_materialization_event(asset: Asset, sources: Iterable[Asset], metadata: Mapping[str, object]) -> PrefectEvent:
    """Return the event which records that `asset` has new content, made from `sources`."""
    related = [*map(to_related_resource, sources), _CREATOR]
    return PrefectEvent("prefect.asset.materialization.succeeded", _make_asset_resource(asset), related, metadata)


def make_reference_event(asset: Asset) -> PrefectEvent:
    """Return the event by which Prefect records an asset as a source of other assets."""
    return PrefectEvent("prefect.asset.referenced", _make_asset_resource(asset))


def to_related_resource(asset: Asset) -> Mapping[str, str]:
    """Return the asset as a related resource of an event."""
    return {"prefect.resource.id": asset.key, "prefect.resource.role": "asset"}


def _make_asset_resource(asset: Asset) -> Mapping[str, str]:
    resource = {"prefect.resource.id": asset.key}
    if asset.properties is not None:
        resource["prefect.resource.name"] = str(asset.properties.name)
        resource["prefect.asset.description"] = str(asset.properties.description)
    return resource
