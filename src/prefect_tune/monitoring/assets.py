"""Checkpoints as Prefect assets: one asset for each trial's checkpoints, one for the experiment's best model.

A commit is a materialization. It is emitted as Prefect's own event of a materialization, without a task run for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from prefect.assets import Asset, AssetProperties
from prefect.context import AssetContext
from pydantic import ValidationError

__all__ = ["ExperimentAddress", "Materialized", "PrefectEvent", "asset_of", "referenced"]

_BY = "prefect-tune"


@dataclass(frozen=True, slots=True)
class PrefectEvent:
    """An event to be emitted."""

    event: str
    resource: Mapping[str, str]
    related: Sequence[Mapping[str, str]] = ()
    payload: Mapping[str, object] = field(default_factory=dict)
    identity: UUID | None = None
    """The event id if the event may be emitted twice: Prefect stores two events of one id once."""


@dataclass(frozen=True, slots=True)
class ExperimentAddress:
    """The names of an experiment and its parts in events and assets: stable, and without credentials."""

    target_uri: str
    experiment: str

    @property
    def target(self) -> str:
        """The target's URI, without the options and the password that it may carry."""
        return _plain(self.target_uri)

    @property
    def uri(self) -> str:
        """The experiment's URI: the target's, and the experiment's name."""
        return _within(self.target, self.experiment)

    @property
    def resource(self) -> Mapping[str, str]:
        """The experiment, as a resource of events."""
        return {"prefect.resource.id": f"prefect-tune.experiment.{self.uri}", "prefect.resource.name": self.experiment}

    def trial_resource(self, trial: str) -> Mapping[str, str]:
        """Return a trial of the experiment, as a resource of events."""
        name = f"{self.experiment}/{trial}"
        return {"prefect.resource.id": f"prefect-tune.trial.{self.uri}/{trial}", "prefect.resource.name": name}

    @property
    def related(self) -> Mapping[str, str]:
        """The experiment, as a related resource of a trial's events."""
        return {**self.resource, "prefect.resource.role": "experiment"}

    def checkpoints(self, trial: str) -> str:
        """Return the URI of a trial's checkpoints, which is the key of their asset."""
        return f"{self.uri}/trials/{trial}/checkpoints"

    @property
    def best(self) -> str:
        """The key of the best model's asset: a name only; no object is stored there."""
        return f"{self.uri}/best"

    def beside(self, experiment: str) -> ExperimentAddress:
        """Return another experiment on the same target."""
        return ExperimentAddress(self.target_uri, experiment)


@dataclass(frozen=True, slots=True)
class Materialized:
    """An asset has new content."""

    asset: Asset
    upstream: Sequence[Asset]
    """The assets that it was made from."""
    metadata: Mapping[str, object]

    def notice(self) -> PrefectEvent:
        """Return the event as Prefect's own `@materialize` tasks emit it."""
        made_from = [AssetContext.asset_as_related(each) for each in self.upstream]
        return PrefectEvent(
            "prefect.asset.materialization.succeeded",
            AssetContext.asset_as_resource(self.asset),
            [*made_from, AssetContext.related_materialized_by(_BY)],
            self.metadata,
        )


def asset_of(key: str, name: str = "", description: str = "") -> Asset | None:
    """Return the asset with this key; None if Prefect refuses the key, for a blank in it or its length."""
    properties = AssetProperties(name=name, description=description) if name else None
    try:
        return Asset(key=key, properties=properties)
    except ValidationError:
        return None


def referenced(asset: Asset) -> PrefectEvent:
    """Return the event by which Prefect records an asset as the source of others."""
    return PrefectEvent("prefect.asset.referenced", AssetContext.asset_as_resource(asset))


def _within(target: str, experiment: str) -> str:
    return f"{target if target.endswith('/') else f'{target}/'}{experiment}"


def _plain(uri: str) -> str:
    place = uri.partition("?")[0].partition("#")[0]
    scheme, separator, rest = place.partition("://")
    rest = rest.rstrip("/") or rest
    authority, slash, path = rest.partition("/")
    user, at, host = authority.rpartition("@")
    return f"{scheme}{separator}{user.partition(':')[0]}{at}{host}{slash}{path}"
