"""`prefect-tune deploy` on a real server: a second call changes nothing, and invalid input is refused first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import ConcurrencyLimitStrategy
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.workers.process import ProcessWorker

from prefect_tune.deploy.automations import automation_names, uninstall_automations
from prefect_tune.deploy.deployment_specs import DEPLOYABLE_FLOWS, TAG
from prefect_tune.parameters.forms import flatten_parameters
from tests.fakes.command_line import Run
from tests.fakes.pages import ROOT
from tests.fakes.servers.refusing_server import refusing_server
from tests.long_cases import long_after

POOL = "deploying"
TRAINABLE = "tests.trainables.digits_table:DigitsTable"
OPTIONS = ("--work-pool", POOL, "--no-automations")


@pytest.fixture(scope="module")
def client(prefect_server: str) -> Iterator[SyncPrefectClient]:
    assert prefect_server
    with get_client(sync_client=True) as client:
        template = ProcessWorker.get_default_base_job_template()
        client.create_work_pool(WorkPoolCreate(name=POOL, type="process", base_job_template=template), overwrite=True)
        yield client


@pytest.fixture
def parameters(tmp_path: Path) -> Mapping[str, Any]:
    """The parameters of a search."""
    return {
        "trainable": TRAINABLE,
        "space": {"row": {"randint": [0, 160]}},
        "target": str(tmp_path / "target"),
        "metric": "error",
        "stop": {"step": 2},
        "samples_per_run": 2,
        "max_concurrent_trials": 1,
        "isolation": "thread",
    }


def read_deployment(client: SyncPrefectClient, name: str) -> DeploymentResponse:
    return client.read_deployment_by_name(name)


def test_without_a_name_every_flow_is_deployed_and_the_automations_are_installed(
    run: Run, client: SyncPrefectClient
) -> None:
    result = json.loads(run("deploy", "--work-pool", POOL, "--json").out)
    assert {deployment["name"] for deployment in result["deployments"]} == {
        f"{flow.name}/{flow.name}" for flow in DEPLOYABLE_FLOWS
    }
    installed = {automation.name for automation in client.read_automations()}
    assert result["automations"]
    assert set(result["automations"]) <= installed


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "default_pool", "deployed"),
    [(["--all"], POOL, [flow.name for flow in DEPLOYABLE_FLOWS]), (["--name", "tune", "--pool", POOL], "", ["tune"])],
    ids=["all, to the default pool", "one, to a pool"],
)
def test_prefects_own_command_deploys_the_shipped_file(
    client: SyncPrefectClient, prefect_server: str, arguments: list[str], default_pool: str, deployed: Sequence[str]
) -> None:
    with suppress(ObjectNotFound):
        for name in deployed:
            client.delete_deployment(read_deployment(client, f"{name}/{name}").id)
    settings = {"PREFECT_API_URL": prefect_server, "PREFECT_DEFAULT_WORK_POOL_NAME": default_pool}
    process = subprocess.run(
        [sys.executable, "-m", "prefect", "--no-prompt", "deploy", *arguments],
        cwd=ROOT,
        env={**os.environ, **{name: value for name, value in settings.items() if value}},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    for name in deployed:
        deployment = read_deployment(client, f"{name}/{name}")
        assert (deployment.work_pool_name, deployment.tags, deployment.pull_steps) == (POOL, [TAG], [])
    form = read_deployment(client, "tune/tune").parameter_openapi_schema
    assert form is not None
    assert list(form["properties"])[-1] == "advanced"


@pytest.mark.long
def test_alerts_come_with_a_block_that_sends_them(run: Run, client: SyncPrefectClient) -> None:
    uninstall_automations()
    restarts = ["prefect-tune: restart a crashed run", "prefect-tune: mark a run without heartbeats as crashed"]
    output = run("deploy", "tune", "--work-pool", POOL).out
    assert [line for line in output.splitlines() if line.startswith("automation")] == [
        f"automation  on   {name}" for name in restarts
    ]
    assert "alerts are not installed; to install them: --notify slack-webhook/NAME\n" in output
    assert {automation.name for automation in client.read_automations()} & set(automation_names()) == set(restarts)

    CustomWebhookNotificationBlock(name="hook", url="http://127.0.0.1:9/").save("deploy-alerts", overwrite=True)
    output = run("deploy", "tune", "--work-pool", POOL, "--notify", "custom-webhook/deploy-alerts").out
    assert "automation  on   prefect-tune: alert on a new best trial\n" in output
    assert "alerts are not installed" not in output
    assert "prefect-tune: alert on a new best trial" in run("deploy", "tune", "--work-pool", POOL).out, (
        "existing automations are kept"
    )
    refused = run("deploy", "tune", *OPTIONS, "--notify", "custom-webhook/deploy-alerts")
    assert (refused.code, "remove --no-automations" in refused.err) == (2, True)
    uninstall_automations()


@pytest.mark.parametrize(
    ("status", "body", "message"),
    long_after(
        1, [(403, b'{"detail": "not in your plan"}', "request: not in your plan"), (422, b"no", "request: HTTP 422")]
    ),
)
def test_automations_that_are_refused_are_said_after_what_was_deployed(
    run: Run, client: SyncPrefectClient, prefect_server: str, status: int, body: bytes, message: str
) -> None:
    with (
        refusing_server(prefect_server, "/automations", status, body) as url,
        temporary_settings({PREFECT_API_URL: url}),
    ):
        result = run("deploy", "maintain", "--work-pool", POOL, "--prefix", f"refused-{status}-")
    assert f"created  maintain/refused-{status}-maintain" in result.out
    assert (result.code, result.err.count("\n")) == (1, 1)
    assert message in result.err
    assert read_deployment(client, f"maintain/refused-{status}-maintain").work_pool_name == POOL


def test_one_experiment_has_a_deployment_of_its_own_that_runs_once_at_a_time(
    run: Run, client: SyncPrefectClient, parameters: Mapping[str, Any]
) -> None:
    schedule_options = ("--cron", "0 2 * * *", "--timezone", "Europe/Berlin")
    command = ("deploy", "tune", "--name", "nightly", "--params", json.dumps(parameters), "--param", "seed=3", *OPTIONS)
    result = run(*command, *schedule_options)
    assert (result.code, result.err) == (0, "")
    assert "runs at 0 2 * * * Europe/Berlin\n" in result.out
    deployment = read_deployment(client, "tune/nightly")
    assert flatten_parameters(deployment.parameters) == {
        **parameters,
        "target": Path(parameters["target"]).as_uri(),
        "experiment": "nightly",
        "seed": 3,
    }
    assert deployment.parameters["advanced"] == {"samples_per_run": 2, "isolation": "thread", "seed": 3}
    assert deployment.global_concurrency_limit is not None
    assert deployment.global_concurrency_limit.limit == 1
    assert deployment.concurrency_options is not None
    assert deployment.concurrency_options.collision_strategy is ConcurrencyLimitStrategy.CANCEL_NEW

    client.update_deployment_schedule(deployment.id, deployment.schedules[0].id, active=False)  # as a user in the UI
    for arguments in ((*command, *schedule_options), command):
        assert "0 2 * * * Europe/Berlin (paused)" in run(*arguments).out
    assert "runs at every 1 h\n" in run(*command, "--cron", "0 3 * * *", "--every-seconds", 3600).out
    schedules = read_deployment(client, "tune/nightly").schedules
    assert sorted(getattr(schedule.schedule, "cron", "every") for schedule in schedules) == ["0 3 * * *", "every"]
    assert all(schedule.active for schedule in schedules)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--work-pool", "gone"), "there is no work pool 'gone' (existing pools: "),
        ((*OPTIONS, "--image", "me:1"), "('process') has no job variable 'image'"),
        ((*OPTIONS, "--cron", "0 2 * * *"), "need one FLOW and --name NAME"),
        ((*OPTIONS, "--name", "x", "--cron", "at two"), "schedule 'at two'"),
        ((*OPTIONS, "--name", "x", "--params", "[1]"), "--params: expected a JSON object"),
        ((*OPTIONS, "--name", "x", "--param", "target=s3-target/gone"), "no block 's3-target/gone' is saved"),
    ],
)
def test_what_cannot_be_is_one_line_and_nothing_is_written(
    run: Run, client: SyncPrefectClient, arguments: tuple[str, ...], message: str
) -> None:
    result = run("deploy", "tune", "--prefix", "not-", *arguments)
    assert result.code == 2, "2: what was typed is wrong, wherever it is typed"
    assert message in result.err
    assert result.err.count("\n") == 1
    for name in ("not-tune", "not-x"):
        with pytest.raises(ObjectNotFound):
            read_deployment(client, f"tune/{name}")
