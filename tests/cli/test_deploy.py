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
from tests.fakes.servers.refusing_server import refusing
from tests.long_cases import long_after

POOL = "deploying"
TRAINABLE = "tests.trainables.digits_table:DigitsTable"
TO = ("--work-pool", POOL, "--no-automations")


@pytest.fixture(scope="module")
def client(prefect_server: str) -> Iterator[SyncPrefectClient]:
    assert prefect_server
    with get_client(sync_client=True) as client:
        template = ProcessWorker.get_default_base_job_template()
        client.create_work_pool(WorkPoolCreate(name=POOL, type="process", base_job_template=template), overwrite=True)
        yield client


@pytest.fixture
def nightly(tmp_path: Path) -> Mapping[str, Any]:
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


def read(client: SyncPrefectClient, name: str) -> DeploymentResponse:
    return client.read_deployment_by_name(name)


# ------------------------------------------------------------------------------------------------------ deploying


def test_without_a_name_every_flow_is_deployed_and_the_automations_are_installed(
    run: Run, client: SyncPrefectClient
) -> None:
    done = json.loads(run("deploy", "--work-pool", POOL, "--json").out)
    assert {each["name"] for each in done["deployments"]} == {
        f"{offer.name}/{offer.name}" for offer in DEPLOYABLE_FLOWS
    }
    installed = {each.name for each in client.read_automations()}
    assert done["automations"]
    assert set(done["automations"]) <= installed


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "default_pool", "deployed"),
    [
        (["--all"], POOL, [offer.name for offer in DEPLOYABLE_FLOWS]),
        (["--name", "tune", "--pool", POOL], "", ["tune"]),
    ],
    ids=["all, to the default pool", "one, to a pool"],
)
def test_prefects_own_command_deploys_the_shipped_file(
    client: SyncPrefectClient, prefect_server: str, arguments: list[str], default_pool: str, deployed: Sequence[str]
) -> None:
    with suppress(ObjectNotFound):
        for name in deployed:
            client.delete_deployment(read(client, f"{name}/{name}").id)
    settings = {"PREFECT_API_URL": prefect_server, "PREFECT_DEFAULT_WORK_POOL_NAME": default_pool}
    done = subprocess.run(
        [sys.executable, "-m", "prefect", "--no-prompt", "deploy", *arguments],
        cwd=ROOT,
        env={**os.environ, **{name: value for name, value in settings.items() if value}},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name in deployed:
        made = read(client, f"{name}/{name}")
        assert (made.work_pool_name, made.tags, made.pull_steps) == (POOL, [TAG], [])
    form = read(client, "tune/tune").parameter_openapi_schema
    assert form is not None
    assert list(form["properties"])[-1] == "advanced"


@pytest.mark.long
def test_alerts_come_with_a_block_that_sends_them(run: Run, client: SyncPrefectClient) -> None:
    uninstall_automations()
    restarts = ["prefect-tune: restart a crashed run", "prefect-tune: mark a run without heartbeats as crashed"]
    said = run("deploy", "tune", "--work-pool", POOL).out
    assert [line for line in said.splitlines() if line.startswith("automation")] == [
        f"automation  on   {name}" for name in restarts
    ]
    assert "alerts are not installed; to install them: --notify slack-webhook/NAME\n" in said
    assert {each.name for each in client.read_automations()} & set(automation_names()) == set(restarts)

    CustomWebhookNotificationBlock(name="hook", url="http://127.0.0.1:9/").save("deploy-alerts", overwrite=True)
    said = run("deploy", "tune", "--work-pool", POOL, "--notify", "custom-webhook/deploy-alerts").out
    assert "automation  on   prefect-tune: alert on a new best trial\n" in said
    assert "alerts are not installed" not in said
    assert "prefect-tune: alert on a new best trial" in run("deploy", "tune", "--work-pool", POOL).out, (
        "existing automations are kept"
    )
    refused = run("deploy", "tune", *TO, "--notify", "custom-webhook/deploy-alerts")
    assert (refused.code, "remove --no-automations" in refused.err) == (2, True)
    uninstall_automations()


@pytest.mark.parametrize(
    ("status", "body", "said"),
    long_after(
        1, [(403, b'{"detail": "not in your plan"}', "request: not in your plan"), (422, b"no", "request: HTTP 422")]
    ),
)
def test_automations_that_are_refused_are_said_after_what_was_deployed(
    run: Run, client: SyncPrefectClient, prefect_server: str, status: int, body: bytes, said: str
) -> None:
    with (
        refusing(prefect_server, "/automations", status, body) as url,
        temporary_settings({PREFECT_API_URL: url}),
    ):
        done = run("deploy", "maintain", "--work-pool", POOL, "--prefix", f"refused-{status}-")
    assert f"created  maintain/refused-{status}-maintain" in done.out
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert said in done.err
    assert read(client, f"maintain/refused-{status}-maintain").work_pool_name == POOL


def test_one_experiment_has_a_deployment_of_its_own_that_runs_once_at_a_time(
    run: Run, client: SyncPrefectClient, nightly: Mapping[str, Any]
) -> None:
    times = ("--cron", "0 2 * * *", "--timezone", "Europe/Berlin")
    one = ("deploy", "tune", "--name", "nightly", "--params", json.dumps(nightly), "--param", "seed=3", *TO)
    done = run(*one, *times)
    assert (done.code, done.err) == (0, "")
    assert "runs at 0 2 * * * Europe/Berlin\n" in done.out
    made = read(client, "tune/nightly")
    assert flatten_parameters(made.parameters) == {
        **nightly,
        "target": Path(nightly["target"]).as_uri(),
        "experiment": "nightly",
        "seed": 3,
    }
    assert made.parameters["advanced"] == {"samples_per_run": 2, "isolation": "thread", "seed": 3}
    assert made.global_concurrency_limit is not None
    assert made.global_concurrency_limit.limit == 1
    assert made.concurrency_options is not None
    assert made.concurrency_options.collision_strategy is ConcurrencyLimitStrategy.CANCEL_NEW

    client.update_deployment_schedule(made.id, made.schedules[0].id, active=False)  # a person pauses it in the UI
    for same in ((*one, *times), one):
        assert "0 2 * * * Europe/Berlin (paused)" in run(*same).out
    assert "runs at every 1 h\n" in run(*one, "--cron", "0 3 * * *", "--every-seconds", 3600).out
    schedules = read(client, "tune/nightly").schedules
    assert sorted(getattr(each.schedule, "cron", "every") for each in schedules) == ["0 3 * * *", "every"]
    assert all(each.active for each in schedules)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--work-pool", "gone"), "there is no work pool 'gone' (existing pools: "),
        ((*TO, "--image", "me:1"), "('process') has no job variable 'image'"),
        ((*TO, "--cron", "0 2 * * *"), "need one FLOW and --name NAME"),
        ((*TO, "--name", "x", "--cron", "at two"), "schedule 'at two'"),
        ((*TO, "--name", "x", "--params", "[1]"), "--params: expected a JSON object"),
        ((*TO, "--name", "x", "--param", "target=s3-target/gone"), "no block 's3-target/gone' is saved"),
    ],
)
def test_what_cannot_be_is_one_line_and_nothing_is_written(
    run: Run, client: SyncPrefectClient, arguments: tuple[str, ...], said: str
) -> None:
    done = run("deploy", "tune", "--prefix", "not-", *arguments)
    assert done.code == 2, "2: what was typed is wrong, wherever it is typed"
    assert said in done.err
    assert done.err.count("\n") == 1
    for name in ("not-tune", "not-x"):
        with pytest.raises(ObjectNotFound):
            read(client, f"tune/{name}")
