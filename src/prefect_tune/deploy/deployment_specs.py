"""The deployable flows and the specifications of deployments, as plain values; `prefect.yaml` lists the same flows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, TypeAlias

from prefect_tune.core.display_text import did_you_mean
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.values import validate_name

TAG = "prefect-tune"
"""The tag of every deployment and of its runs; automations match runs by this tag."""
CollisionStrategy: TypeAlias = Literal["cancel-new", "enqueue"]


@dataclass(frozen=True, slots=True)
class DeployableFlow:
    """A flow of this package that can be deployed."""

    name: str
    """The name of the flow, and the default name of its deployment."""
    entrypoint: str
    """The flow's dotted path; from a file path, Prefect would load a second copy of the module and its classes."""
    description: str
    concurrency_limit: int | None = None
    """The maximum number of concurrent runs; None for no limit."""
    has_experiment: bool = True
    """Whether a run has exactly one experiment, which the parameter `experiment` names."""

    @property
    def module(self) -> str:
        return self.entrypoint.rpartition(".")[0]


DEPLOYABLE_FLOWS: Sequence[DeployableFlow] = (
    DeployableFlow(
        "durable-trainable",
        "prefect_tune.flows.deployed.durable_trainable",
        "Train one trial durably. Another run with the same experiment name resumes it from its newest checkpoint.\n\n"
        "| field | an example to copy |\n"
        "|---|---|\n"
        "| trainable | `my_project.train:Net` |\n"
        "| target | `s3://bucket/runs` |\n"
        '| config | `{"lr": 0.01, "layers": 2}` |\n'
        "| experiment | `first-training` |\n"
        '| stop | `{"step": 100}` |\n',
    ),
    DeployableFlow(
        "tune",
        "prefect_tune.flows.deployed.tune",
        "Search for the best configuration. Another run with the same experiment name resumes the search.\n\n"
        "| field | an example to copy |\n"
        "|---|---|\n"
        "| trainable | `my_project.train:Net` |\n"
        "| target | `s3://bucket/runs` |\n"
        '| space | `{"lr": {"loguniform": [0.0001, 0.1]}, "layers": {"choice": [1, 2, 3]}}` |\n'
        "| experiment | `first-search` |\n"
        "| metric | `loss` |\n"
        "| num_samples | `20` |\n"
        '| stop | `{"step": 100}` |\n'
        '| scheduler | `{"ASHA": {"max_t": 100}}` |\n',
    ),
    DeployableFlow(
        "resume",
        "prefect_tune.flows.deployed.resume",
        "Resume a search by its name, optionally with more samples or steps, or with another space. Or fork it.\n\n"
        "| field | an example to copy |\n"
        "|---|---|\n"
        "| experiment | `first-search` |\n"
        "| target | `s3://bucket/runs` |\n"
        "| trainable | `my_project.train:Net` |\n"
        "| num_samples | `40` |\n",
    ),
    DeployableFlow(
        "maintain",
        "prefect_tune.flows.maintain.maintain",
        "Maintain a target: verify checkpoints, quarantine damaged ones, collect garbage.",
        concurrency_limit=1,
        has_experiment=False,
    ),
    DeployableFlow(
        "train-trial",
        "prefect_tune.flows.train_trial.train_trial",
        'Run one attempt of a trial. Searches with trials="deployment" start this flow; do not start it yourself.',
        has_experiment=False,
    ),
)


@dataclass(frozen=True, slots=True)
class Interval:
    """A fixed time between the starts of two runs."""

    interval: timedelta


@dataclass(frozen=True, slots=True)
class DeploymentSchedule:
    """When Prefect starts runs of a deployment."""

    when: str | Interval
    """A cron expression, or an interval."""
    time_zone: str = "UTC"


@dataclass(frozen=True, kw_only=True)
class DeploymentSpec:
    """The specification of a deployment."""

    flow: DeployableFlow
    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    schedules: Sequence[DeploymentSchedule] | None = None
    """The schedules; None to keep those that the deployment already has."""
    concurrency_limit: int | None = None
    collision: CollisionStrategy = "cancel-new"
    """Whether Prefect cancels or queues a run above the concurrency limit."""

    @property
    def full_name(self) -> str:
        return f"{self.flow.name}/{self.name}"


def find_deployable_flows(names: Sequence[str]) -> Sequence[DeployableFlow]:
    """Return the deployable flows of these names; all flows if `names` is empty.

    Raises:
        InvalidInput: a name belongs to no flow.
    """
    flows = {flow.name: flow for flow in DEPLOYABLE_FLOWS}
    for name in names:
        if name not in flows:
            hint = did_you_mean(name, flows)
            raise InvalidInput(f"there is no deployable flow {name!r}: expected one of {', '.join(flows)}{hint}")
    return [flows[name] for name in dict.fromkeys(names or flows)]


def make_general_specs(flows: Sequence[DeployableFlow], prefix: str = "") -> Sequence[DeploymentSpec]:
    """Return specifications of general deployments, for no particular experiment; their names begin with `prefix`."""
    return [
        DeploymentSpec(
            flow=flow,
            name=validate_name(f"{prefix}{flow.name}"),
            parameters=_make_trial_deployment_parameter(flow, prefix),
            concurrency_limit=flow.concurrency_limit,
        )
        for flow in flows
    ]


def _make_trial_deployment_parameter(flow: DeployableFlow, prefix: str) -> Mapping[str, Any]:
    """Return the parameter of `tune` that names the `train-trial` deployment with this prefix; {} if none is needed."""
    return {"trial_deployment": f"train-trial/{prefix}train-trial"} if prefix and flow.name == "tune" else {}


def make_experiment_spec(
    flow: DeployableFlow,
    name: str,
    parameters: Mapping[str, Any],
    schedules: Sequence[DeploymentSchedule] | None,
    collision: CollisionStrategy = "cancel-new",
    prefix: str = "",
) -> DeploymentSpec:
    """Return the specification of the deployment `prefix` + `name`, of which at most one flow run runs at a time.

    If the flow has an experiment, the experiment gets the deployment's name, unless `parameters` names the experiment.
    """
    name = f"{prefix}{name}"
    experiment = {"experiment": name} if flow.has_experiment else {}
    return DeploymentSpec(
        flow=flow,
        name=validate_name(name),
        parameters={**_make_trial_deployment_parameter(flow, prefix), **experiment, **parameters},
        schedules=schedules,
        concurrency_limit=1,
        collision=collision,
    )
