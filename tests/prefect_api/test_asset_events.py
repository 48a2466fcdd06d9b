"""The events of assets equal those that Prefect emits itself."""

from __future__ import annotations

from typing import Any

import pytest
from prefect import flow
from prefect.assets import add_asset_metadata, materialize

from prefect_tune.prefect_api.artifacts_and_assets import PrefectEvent, asset_of, materialized, referenced

_METADATA = {"step": 3}


@pytest.mark.usefixtures("prefect_server")
def test_they_are_those_of_a_materializing_task(monkeypatch: pytest.MonkeyPatch) -> None:
    emitted: list[PrefectEvent] = []

    def emit(event: str, resource: Any, related: Any = (), payload: Any = None) -> None:
        emitted.append(PrefectEvent(event, resource, list(related), payload or {}))

    monkeypatch.setattr("prefect.events.emit_event", emit)
    source = asset_of("s3://bucket/runs/first/best")
    model = asset_of("s3://bucket/runs/second/best", "second: best model", "The best model.")
    assert source
    assert model

    @materialize(model, asset_deps=[source], by="prefect-tune")
    def train() -> None:
        add_asset_metadata(model, _METADATA)

    flow(name="trains")(train)()
    listed = [each for each in emitted if each.event.startswith("prefect.asset.")]
    assert listed == [_listed(referenced(source)), _listed(materialized(model, [source], _METADATA))]


def _listed(event: PrefectEvent) -> PrefectEvent:
    return PrefectEvent(event.event, event.resource, list(event.related), event.payload)
