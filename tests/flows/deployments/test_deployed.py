"""Runs of deployments: their parameters, three that extend one experiment, and no secret is stored or logged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
from prefect import Flow
from prefect.blocks.core import Block
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import FlowRun, State
from prefect.deployments import run_deployment
from prefect.exceptions import PrefectHTTPStatusError
from prefect.flow_engine import run_flow
from prefect.logging.handlers import APILogWorker
from prefect.states import Pending

import prefect_tune as pt
from prefect_tune.blocks import LocalTarget, S3Target, StorageTarget
from prefect_tune.deploy.deployment_specs import find_deployable_flows, make_experiment_spec
from prefect_tune.deploy.deployments import WorkPool, deploy
from tests.fakes.untrusted import make_untrusted_target, write_settings
from tests.flows.training import experiment_at

POOL, SECRET = "deployed", "never-shown-to-anybody"
TRAINABLE = "tests.trainables.digits_table:DigitsTable"


@pytest.fixture(scope="module")
def client(prefect_server: str) -> Iterator[SyncPrefectClient]:
    assert prefect_server
    with get_client(sync_client=True) as client:
        client.create_work_pool(WorkPoolCreate(name=POOL, type="process"), overwrite=True)
        yield client


def make_deployment(flow: str, name: str, parameters: Mapping[str, Any]) -> str:
    """Make a deployment for one experiment; return its full name."""
    spec = make_experiment_spec(find_deployable_flows([flow])[0], name, parameters, None)
    return deploy([spec], WorkPool(name=POOL))[0].name


def create_run(client: SyncPrefectClient, name: str, **parameters: Any) -> FlowRun:
    """Create a run of a deployment like a schedule or a form."""
    deployment = client.read_deployment_by_name(name)
    return client.create_flow_run_from_deployment(deployment.id, parameters=parameters)


def execute_run(client: SyncPrefectClient, name: str, flow_run: FlowRun) -> State[Any]:
    """Execute the run like a worker's process, and return its final state."""
    module, _, attribute = str(client.read_deployment_by_name(name).entrypoint).rpartition(".")
    flow: Flow[..., Any] = getattr(import_module(module), attribute)
    return cast("Any", run_flow(flow, flow_run=client.read_flow_run(flow_run.id), return_type="state"))


# -------------------------------------------------------------------------------------------------------- secrets


@pytest.fixture
def vault(client: SyncPrefectClient, s3_port: int) -> S3Target:
    """A saved block with a secret that must appear nowhere else."""
    del client
    block = S3Target(
        bucket="durable",
        prefix="vault",
        region="us-east-1",
        endpoint_url=f"http://127.0.0.1:{s3_port}",
        allow_http=True,
        access_key_id="id",
        secret_access_key=SECRET,
    )
    block.save("vault", overwrite=True, _sync=True)  # type: ignore[call-arg]  # added by Prefect's async_dispatch
    return block


def read_everything(client: SyncPrefectClient) -> str:
    """Return everything that a user can read on the server."""
    APILogWorker.drain_all(timeout=30)
    records: list[Any] = [*client.read_deployments(limit=200), *client.read_flow_runs(limit=200)]
    records += client.read_artifacts(limit=200)
    for offset in range(0, 1000, 200):
        records += client.read_logs(limit=200, offset=offset)
    return "\n".join(record.model_dump_json() for record in records)


def block_references(client: SyncPrefectClient) -> Mapping[str, Any]:
    """Return all ways to refer to the block."""
    document = client.read_block_document_by_name("vault", "s3-target")
    return {
        "slug": "s3-target/vault",
        "reference": {"$ref": {"block_document_slug": "s3-target/vault"}},
        "form": {"$ref": {"block_document_id": str(document.id)}},
    }


@pytest.mark.long
@pytest.mark.usefixtures("vault")
@pytest.mark.parametrize("reference", ["slug", "reference", "form"])
def test_a_secret_is_used_and_never_told(client: SyncPrefectClient, reference: str) -> None:
    target = block_references(client)[reference]
    parameters = {"trainable": TRAINABLE, "config": {"row": 1}, "stop": {"step": 2}, "isolation": "thread"}
    name = make_deployment("durable-trainable", f"vault-{reference}", {**parameters, "target": target})
    assert client.read_deployment_by_name(name).parameters["target"] == "s3-target/vault"
    flow_run = create_run(client, name, target=target)
    assert flow_run.parameters["target"] == target
    assert execute_run(client, name, flow_run).is_completed()
    assert SECRET not in read_everything(client)


@pytest.mark.long
def test_a_script_that_passes_the_block_itself_tells_nothing_either(client: SyncPrefectClient, vault: S3Target) -> None:
    for target in (vault, Block.load("s3-target/vault", _sync=True)):  # type: ignore[call-arg]  # as above
        pt.durable_trainable(
            TRAINABLE, {"row": 1}, target=target, experiment="script", stop={"step": 1}, isolation="thread"
        )
    assert SECRET not in read_everything(client)


@pytest.mark.long
def test_a_deployment_of_resume_runs_what_it_trusts_and_a_retry_of_its_run_nothing_else(
    client: SyncPrefectClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attacker = make_untrusted_target(tmp_path, monkeypatch)
    settings = {"trainable": TRAINABLE, "space": {"row": 1}, "num_samples": 1, "metric": "error", "stop": {"step": 2}}
    write_settings(attacker.target, "theirs", {**settings, "isolation": "thread"})

    def execute(flow_run: FlowRun) -> State[Any]:
        client.set_flow_run_state(flow_run.id, Pending(), force=True)  # as *Retry* does
        return execute_run(client, name, flow_run)

    name = make_deployment("resume", "theirs", {"target": attacker.target.uri})
    distrusting = create_run(client, name)
    assert "no package is trusted" in str(execute(distrusting).message)
    make_deployment("resume", "theirs", {"target": attacker.target.uri, "trusted_packages": ["tests"]})
    trusting = create_run(client, name)
    assert execute(trusting).is_completed()
    assert "no package is trusted" in str(execute(distrusting).message)  # a run keeps its own parameters
    attacker.forge("trainable", "theirs")
    for flow_run in (trusting, create_run(client, name)):
        assert f"{attacker.module} is not in a trusted package" in str(execute(flow_run).message)
    assert not attacker.marker.exists()


# Option objects in the parameters of `run_deployment`: a real server stores their JSON form, and the run uses it.


ECHO = "tests.trainables.echoing:Echo"


class Kind(str, Enum):  # noqa: UP042 - the kind that is formatted as Kind.LINEAR
    LINEAR = "linear"


class Pair(NamedTuple):
    first: int
    second: str


def deploy_echo(flow: str, experiment: str, target: StorageTarget) -> str:
    return make_deployment(flow, experiment, {"trainable": ECHO, "target": target.uri, "isolation": "thread"})


def send_run(client: SyncPrefectClient, name: str, **parameters: object) -> FlowRun:
    """Create a run like a user, and return it from the server."""
    created = cast("FlowRun", run_deployment(name, parameters=parameters, timeout=0))
    return client.read_flow_run(created.id)


def test_objects_in_the_parameters_of_a_run_are_stored_as_json_and_used_as_they_were_meant(
    client: SyncPrefectClient, local_target: LocalTarget
) -> None:
    name = deploy_echo("tune", "sent", local_target)
    run = send_run(
        client,
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
    assert execute_run(client, name, run).is_completed()
    state = experiment_at(local_target, "sent")
    assert len(state.trials) == 3
    assert len({trial.config["lr"] for trial in state.trials.values()}) == 3
    for trial in state.trials.values():
        assert trial.step in (1, 2)
        assert type(trial.config["layers"][0]["width"]) in {int, dict}
        assert trial.metrics["config"] == trial.config
        assert trial.metrics["text"] == repr(dict(trial.config))


def test_objects_that_lost_their_classes_fail_the_run_before_anything_is_written(
    client: SyncPrefectClient, local_target: LocalTarget
) -> None:
    name = deploy_echo("tune", "lost", local_target)
    invalid: list[Mapping[str, Any]] = [
        {"space": {"x": {"options": ["adam", "sgd"], "weights": None}}},
        {"space": {"a": [{"x": {"low": 0.0, "high": 1.0, "scale": "log", "q": None}}]}},
        {"space": {"x": {"uniform": [0, 1]}}, "stop": {"steps": 3}},
        {"space": {"x": {"uniform": [0, 1]}}, "scheduler": {"max_t": 9, "grace_period": 1}},
    ]
    for parameters in invalid:
        state = execute_run(client, name, create_run(client, name, **parameters))
        assert state.is_failed()
        assert "InvalidInput" in str(state.message), state.message
    assert not experiment_at(local_target, "lost").entry_count


def test_a_distribution_in_the_config_of_a_single_training_fails_the_run(
    client: SyncPrefectClient, local_target: LocalTarget
) -> None:
    name = deploy_echo("durable-trainable", "single", local_target)
    run = send_run(client, name, config={"optimizer": pt.choice(["adam", "sgd"])})
    assert run.parameters["config"] == {"optimizer": {"choice": ["adam", "sgd"]}}
    state = execute_run(client, name, run)
    assert state.is_failed()
    assert "config: expected values, found distribution" in str(state.message)
    assert not experiment_at(local_target, "single").entry_count


@pytest.mark.long
def test_a_target_is_passed_by_a_reference_and_its_object_is_an_error_of_the_client(
    client: SyncPrefectClient, local_target: LocalTarget
) -> None:
    name = deploy_echo("tune", "target", local_target)
    secret = pt.S3Target(bucket="durable", access_key_id="k", secret_access_key="never shown")
    for target in (local_target, secret):
        with pytest.raises(PrefectHTTPStatusError, match="Validation failed for field 'target'") as refused:
            send_run(client, name, target=target, space={"x": pt.randint(0, 9)})
        assert "never shown" not in str(refused.value)
    secret.save("sent-bucket", overwrite=True)
    run = send_run(client, name, target="s3-target/sent-bucket", space={"x": pt.randint(0, 9)})
    assert run.parameters["target"] == "s3-target/sent-bucket"


def test_what_has_no_json_form_is_an_error_of_the_client(client: SyncPrefectClient, local_target: LocalTarget) -> None:
    name = deploy_echo("tune", "refused", local_target)
    with pytest.raises(ValueError, match="cannot be imported by name"):
        send_run(client, name, space={"x": pt.sample_from(lambda config: config["y"]), "y": 1})
    assert not experiment_at(local_target, "refused").entry_count
