"""Option objects in the parameters of `run_deployment`: a real server stores their JSON form, and the run uses it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from importlib import import_module
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import FlowRun, State
from prefect.deployments import run_deployment
from prefect.exceptions import PrefectHTTPStatusError
from prefect.flow_engine import run_flow

import prefect_tune as pt
from prefect_tune.blocks import LocalTarget, StorageTarget
from prefect_tune.deploy.deployment_specs import named, of_one_experiment
from prefect_tune.deploy.deployments import Pool, deploy
from tests.flows.training import experiment_at

pytestmark = pytest.mark.usefixtures("pool")
ECHO = "tests.trainables.echoing:Echo"


@pytest.fixture(scope="module")
def pool(prefect_server: str) -> None:
    assert prefect_server
    with get_client(sync_client=True) as client:
        client.create_work_pool(WorkPoolCreate(name="sent", type="process"), overwrite=True)


class Kind(str, Enum):  # noqa: UP042 - the kind that is formatted as Kind.LINEAR
    LINEAR = "linear"


class Pair(NamedTuple):
    first: int
    second: str


def deployed(flow: str, experiment: str, target: StorageTarget) -> str:
    parameters = {"trainable": ECHO, "target": target.uri, "isolation": "thread"}
    (made,) = deploy([of_one_experiment(named([flow])[0], experiment, parameters, None)], Pool(name="sent"))
    return made.name


def sent(name: str, **parameters: object) -> FlowRun:
    """Create a run as a user does, and return it as the server has it."""
    created = cast("FlowRun", run_deployment(name, parameters=parameters, timeout=0))
    with get_client(sync_client=True) as client:
        return client.read_flow_run(created.id)


def executed(name: str, flow_run: FlowRun) -> State[Any]:
    """Execute the run as a worker's process would, and return its final state."""
    with get_client(sync_client=True) as client:
        module, _, attribute = str(client.read_deployment_by_name(name).entrypoint).rpartition(".")
    flow: Flow[..., Any] = getattr(import_module(module), attribute)
    return cast("State[Any]", run_flow(flow, flow_run=flow_run, return_type="state"))


def as_an_older_client(name: str, **parameters: object) -> FlowRun:
    """Create a run with JSON in which objects have lost their classes."""
    with get_client(sync_client=True) as client:
        return flow_run_of(client, name, parameters)


def flow_run_of(client: SyncPrefectClient, name: str, parameters: Mapping[str, Any]) -> FlowRun:
    deployment = client.read_deployment_by_name(name)
    return client.create_flow_run_from_deployment(deployment.id, parameters=dict(parameters))


def test_objects_in_the_parameters_of_a_run_are_stored_as_json_and_used_as_they_were_meant(
    local_target: LocalTarget,
) -> None:
    name = deployed("tune", "sent", local_target)
    run = sent(
        name,
        space={
            "lr": pt.uniform(0, 1),
            "layers": [{"width": pt.choice([16, {"of": pt.randint(1, 4)}])}],
            "kind": Kind.LINEAR,
            "pair": Pair(np.int64(3).item(), "x"),
        },
        metric="loss",
        stop=pt.MaxSteps(2) | pt.MaxFailures(3),
        scheduler=pt.ASHA(max_t=2),
        search=pt.RandomSearch(3, [{"lr": 0.5}]),
        retention=pt.Retention(last=1),
        checkpoint=pt.Cadence(every_steps=1),
        failures=pt.FailurePolicy(max_failures=1),
        sync=pt.SyncConfig(sync_period_seconds=1),
    )
    assert run.parameters["space"] == {
        "lr": {"uniform": [0.0, 1.0]},
        "layers": [{"width": {"choice": [16, {"of": {"randint": [1, 4]}}]}}],
        "kind": "linear",
        "pair": [3, "x"],
    }
    assert run.parameters["scheduler"] == {"ASHA": {"max_t": 2}}
    assert run.parameters["search"] == {"RandomSearch": {"num_samples": 3, "points_to_evaluate": [{"lr": 0.5}]}}
    assert run.parameters["stop"] == [{"MaxSteps": {"steps": 2}}, {"MaxFailures": {"failures": 3}}]
    assert executed(name, run).is_completed()
    state = experiment_at(local_target, "sent")
    assert len(state.trials) == 3
    assert len({trial.config["lr"] for trial in state.trials.values()}) == 3
    for trial in state.trials.values():
        assert trial.step in (1, 2)
        assert type(trial.config["layers"][0]["width"]) in {int, dict}
        assert trial.metrics["config"] == trial.config
        assert trial.metrics["text"] == repr(dict(trial.config))


def test_objects_that_lost_their_classes_fail_the_run_before_anything_is_written(local_target: LocalTarget) -> None:
    name = deployed("tune", "lost", local_target)
    wrong: list[Mapping[str, Any]] = [
        {"space": {"x": {"options": ["adam", "sgd"], "weights": None}}},
        {"space": {"a": [{"x": {"low": 0.0, "high": 1.0, "scale": "log", "q": None}}]}},
        {"space": {"x": {"uniform": [0, 1]}}, "stop": {"steps": 3}},
        {"space": {"x": {"uniform": [0, 1]}}, "scheduler": {"max_t": 9, "grace_period": 1}},
    ]
    for parameters in wrong:
        state = executed(name, as_an_older_client(name, **parameters))
        assert state.is_failed()
        assert "InvalidInput" in str(state.message), state.message
    assert not experiment_at(local_target, "lost").number


def test_a_distribution_in_the_config_of_a_single_training_fails_the_run(local_target: LocalTarget) -> None:
    name = deployed("durable-trainable", "single", local_target)
    run = sent(name, config={"optimizer": pt.choice(["adam", "sgd"])})
    assert run.parameters["config"] == {"optimizer": {"choice": ["adam", "sgd"]}}
    state = executed(name, run)
    assert state.is_failed()
    assert "config: expected values, found the distribution" in str(state.message)
    assert not experiment_at(local_target, "single").number


@pytest.mark.long
def test_a_target_is_passed_by_a_reference_and_its_object_is_an_error_of_the_client(local_target: LocalTarget) -> None:
    name = deployed("tune", "target", local_target)
    secret = pt.S3Target(bucket="durable", access_key_id="k", secret_access_key="never shown")
    for target in (local_target, secret):
        with pytest.raises(PrefectHTTPStatusError, match="Validation failed for field 'target'") as refused:
            sent(name, target=target, space={"x": pt.randint(0, 9)})
        assert "never shown" not in str(refused.value)
    secret.save("sent-bucket", overwrite=True)
    run = sent(name, target="s3-target/sent-bucket", space={"x": pt.randint(0, 9)})
    assert run.parameters["target"] == "s3-target/sent-bucket"


def test_what_has_no_json_form_is_an_error_of_the_client(local_target: LocalTarget) -> None:
    name = deployed("tune", "refused", local_target)
    with pytest.raises(ValueError, match="cannot be imported by name"):
        sent(name, space={"x": pt.sample_from(lambda config: config["y"]), "y": 1})
    assert not experiment_at(local_target, "refused").number
