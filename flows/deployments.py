"""What there is to deploy: plain descriptions, of which `prefect.yaml` and `prefect-tune deploy` make the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, TypeAlias

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.hints import did_you_mean
from prefect_tune.core.values import valid_name

__all__ = ["OFFERS", "TAG", "Collision", "Every", "Offer", "Schedule", "Wanted", "named", "of_one_experiment", "wanted"]

TAG = "prefect-tune"
"""Of every deployment and of its runs: automations know them by it."""
Collision: TypeAlias = Literal["cancel-new", "enqueue"]
_TRIAL_DEPLOYMENT = "trial_deployment"


@dataclass(frozen=True, slots=True)
class Offer:
    """A flow of this package, as it is deployed."""

    name: str
    """Of the flow, and of its deployment."""
    entrypoint: str
    """Dotted: a file's path would load a second copy of the module, whose classes are others."""
    description: str
    at_once: int | None = None
    """How many of its runs may go on at the same time; None: any number."""
    has_experiment: bool = True
    """Whether a run of it is a run of one experiment, which a parameter names."""

    @property
    def module(self) -> str:
        return self.entrypoint.rpartition(".")[0]


OFFERS: Sequence[Offer] = (
    Offer(
        "durable-trainable",
        "prefect_tune.flows.durable_trainable.durable_trainable",
        "Train one trial that cannot be lost. The same experiment name goes on where it was.",
    ),
    Offer(
        "tune",
        "prefect_tune.flows.tune.tune",
        "Search for the best configuration. The same experiment name goes on where it was.",
    ),
    Offer(
        "resume",
        "prefect_tune.flows.resume.resume",
        "Go on with a search by its name alone, with more samples, steps, another space; or fork it.",
    ),
    Offer(
        "maintain",
        "prefect_tune.flows.maintain.maintain",
        "Look after a target: verify checkpoints, put damaged ones aside, delete what nobody needs.",
        at_once=1,
        has_experiment=False,
    ),
    Offer(
        "train-trial",
        "prefect_tune.flows.train_trial.train_trial",
        'One attempt of a trial, started by a search with trials="deployment"; not for people.',
        has_experiment=False,
    ),
)


@dataclass(frozen=True, slots=True)
class Every:
    """A fixed time between one run and the next."""

    interval: timedelta


@dataclass(frozen=True, slots=True)
class Schedule:
    """When a deployment runs by itself."""

    when: str | Every
    """A cron expression, or how often."""
    time_zone: str = "UTC"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A deployment as it is to be."""

    offer: Offer
    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    schedules: Sequence[Schedule] | None = None
    """None: those that it has, if any, stay."""
    at_once: int | None = None
    collision: Collision = "cancel-new"
    """What becomes of a run that would be one too many."""

    @property
    def full_name(self) -> str:
        return f"{self.offer.name}/{self.name}"


def named(names: Sequence[str]) -> Sequence[Offer]:
    """Return the offers of these names, all where none is named.

    Raises:
        InvalidInput: there is none of a name.
    """
    known = {offer.name: offer for offer in OFFERS}
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known)
            raise InvalidInput(f"there is no flow {name!r} to deploy: expected one of {', '.join(known)}{hint}")
    return [known[name] for name in dict.fromkeys(names or known)]


def wanted(offers: Sequence[Offer], *, prefix: str = "", suffix: str = "") -> Sequence[Wanted]:
    """Return them as general deployments, for forms and calls, which belong together: their names are alike."""
    trials = _around("train-trial", prefix, suffix)
    elsewhere = {_TRIAL_DEPLOYMENT: f"train-trial/{trials}"} if trials != "train-trial" else {}
    return [
        Wanted(
            offer=offer,
            name=_around(offer.name, prefix, suffix),
            parameters=elsewhere if offer.name == "tune" else {},
            at_once=offer.at_once,
        )
        for offer in offers
    ]


def of_one_experiment(
    offer: Offer,
    name: str,
    parameters: Mapping[str, Any],
    schedules: Sequence[Schedule] | None,
    collision: Collision = "cancel-new",
) -> Wanted:
    """Return a deployment for one experiment, of its own name unless the parameters say another.

    One run of it goes on at a time.
    """
    experiment = {"experiment": name} if offer.has_experiment else {}
    return Wanted(
        offer=offer,
        name=valid_name(name),
        parameters={**experiment, **parameters},
        schedules=schedules,
        at_once=1,
        collision=collision,
    )


def _around(name: str, prefix: str, suffix: str) -> str:
    return valid_name(f"{prefix}{name}{suffix}")
