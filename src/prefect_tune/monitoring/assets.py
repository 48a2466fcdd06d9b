"""Checkpoints and best models as Prefect assets: their names, and which of them one was made from.

There is one asset for each trial's checkpoints, and one for the experiment's best model; a commit is a materialization.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prefect.assets import Asset

from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import Trial, newest_checkpoint
from prefect_tune.core.journal_events import CheckpointRef, Cloned, Committed
from prefect_tune.core.prefect_events import BestImproved, abbreviated, payload_of
from prefect_tune.core.storage.layout import JournalKey, TrialKey
from prefect_tune.prefect_api.artifacts_and_assets import PrefectEvent, as_related, asset_of, materialized, referenced

_MOST_SOURCES = 20
_OF_A_TRIAL = "The checkpoints of one trial; each commit is a materialization."
_OF_AN_EXPERIMENT = "The best model of an experiment; each better one is a materialization."


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

    def checkpoints(self, trial: TrialKey) -> str:
        """Return the URI of a trial's checkpoints, which is the key of their asset."""
        return _within(self.target, trial.checkpoints)

    @property
    def best(self) -> str:
        """The key of the best model's asset: a name only; no object is stored there."""
        return f"{self.uri}/best"

    def beside(self, experiment: str) -> ExperimentAddress:
        """Return another experiment on the same target."""
        return ExperimentAddress(self.target_uri, experiment)


def _within(target: str, experiment: str) -> str:
    return f"{target if target.endswith('/') else f'{target}/'}{experiment}"


def _plain(uri: str) -> str:
    place = uri.partition("?")[0].partition("#")[0]
    scheme, separator, rest = place.partition("://")
    rest = rest.rstrip("/") or rest
    authority, slash, path = rest.partition("/")
    user, at, host = authority.rpartition("@")
    return f"{scheme}{separator}{user.partition(':')[0]}{at}{host}{slash}{path}"


class Lineage:
    """Builds the asset events of one experiment; none if Prefect refuses its URI as an asset key."""

    def __init__(self, place: ExperimentAddress, journal: JournalKey) -> None:
        self._place = place
        self._journal = journal
        self._exploited: dict[str, str] = {}
        self._known: set[str] = set()

    def added(self, event: Committed | Cloned, before: Trial | None, after: Trial) -> Iterator[PrefectEvent]:
        """Return the events of a new checkpoint of a trial: a commit, or a clone of another trial's checkpoint."""
        if isinstance(event, Cloned):
            self._exploited[event.trial] = event.source
        source = self._exploited.get(event.trial)
        parent = newest_checkpoint(before) if before else None
        metadata = self._metadata(event.checkpoint, parent, after) | {"exploited": source}
        name = f"{self._place.experiment}/{event.trial}: checkpoints"
        asset = asset_of(self._checkpoints(event.trial), name, _OF_A_TRIAL)
        yield from self._made(asset, [self._checkpoints(source)] if source else [], metadata)

    def related(self, trial: str) -> Sequence[Mapping[str, str]]:
        """Return the asset of a trial's checkpoints, as a related resource of a commit."""
        asset = asset_of(self._checkpoints(trial))
        return [as_related(asset)] if asset else []

    def best(self, news: BestImproved, experiment: Experiment) -> Iterator[PrefectEvent]:
        """Return the events of a better model; none if it is not saved.

        Its sources are the trial's checkpoints, and the best models of the fork's origin and of warm-start experiments.
        """
        if news.manifest is None:
            return
        warm_starts = list(experiment.warm_start_places[:_MOST_SOURCES])
        origin = experiment.origin.experiment if experiment.origin else None
        forked = [self._place.beside(origin).best] if origin else []
        upstream = [*forked, *(f"{each}/best" for each in warm_starts)]
        metadata = {**payload_of(news), "warm_start": warm_starts, "forked_from": origin}
        best = asset_of(self._place.best, f"{self._place.experiment}: best model", _OF_AN_EXPERIMENT)
        yield from self._made(best, [self._checkpoints(news.trial), *upstream], metadata)

    def _checkpoints(self, trial: str) -> str:
        return self._place.checkpoints(self._journal.trial_key(trial))

    def _metadata(self, checkpoint: CheckpointRef, parent: CheckpointRef | None, trial: Trial) -> dict[str, object]:
        folder = self._journal.trial_key(trial.trial)
        known = checkpoint.model_dump(mode="json", include={"step", "sequence", "metrics", "size_bytes"})
        return {
            "trial": trial.trial,
            "attempt": trial.attempt,
            **{name: abbreviated(value) for name, value in known.items()},
            "manifest": folder.checkpoint_key(checkpoint).manifest_path,
            "parent": folder.checkpoint_key(parent).name if parent else None,
        }

    def _made(
        self, asset: Asset | None, upstream: Sequence[str], metadata: Mapping[str, object]
    ) -> Iterator[PrefectEvent]:
        if asset is None:
            return
        sources = [found for key in upstream if (found := asset_of(key)) is not None]
        for source in sources:
            if source.key not in self._known:
                self._known.add(source.key)
                yield referenced(source)
        yield materialized(asset, sources, metadata)
