"""Automations as code: installed once by name, they fire, and they restart killed runs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil  # type: ignore[import-untyped]  # the package has no types
import pytest
from prefect import flow
from prefect.automations import Automation, DoNothing, EventTrigger, SendNotification
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.events.schemas.events import Resource
from prefect.server.utilities.user_templates import render_user_template_sync, validate_user_template
from prefect.settings import PREFECT_API_URL, temporary_settings

import prefect_tune as pt
from prefect_tune.blocks import LocalTarget
from prefect_tune.core.errors import InvalidInput, TuneError
from prefect_tune.core.experiment.trial_transitions import Status
from prefect_tune.core.journal_events import CheckpointQuarantined
from prefect_tune.core.prefect_events import make_event_labels, make_event_payload
from prefect_tune.deploy import automations
from prefect_tune.deploy.automations import (
    automation_names,
    install_automations,
    make_automation_specs,
    uninstall_automations,
)
from prefect_tune.prefect_api.local_server import start_prefect_server
from tests.fakes.feed import Feed
from tests.fakes.servers.canned_http import canned_server
from tests.fakes.trial_processes import wait_until
from tests.flows.training import trial_at
from tests.trainables.moody import Moody

FAILED = "prefect-tune: alert on a failed run"
CORRUPT, BEST = "prefect-tune: alert on a damaged checkpoint", "prefect-tune: alert on a new best trial"
REPOSITORY = Path(__file__).parents[3]
POOL = "comes-back"


def read_automations() -> dict[str, Any]:
    """Return all automations on the server, by name."""
    with get_client(sync_client=True) as client:
        automations = client.request("POST", "/automations/filter", json={"limit": 200}).json()
    return {automation["name"]: automation for automation in automations}


def action_types_of(name: str) -> list[str]:
    return [action["type"] for action in read_automations()[name]["actions"]]


@pytest.fixture
def server_url(prefect_server: str) -> Iterator[str]:
    """A server without our automations."""
    uninstall_automations()
    yield prefect_server
    uninstall_automations()


# --------------------------------------------------------------------------------------------------- installing


@pytest.mark.usefixtures("server_url")
class TestInstalled:
    """The automations on the server after `install_automations`."""

    def test_all_are_installed_by_their_names_and_taken_away_again_and_nobody_elses_are_touched(self) -> None:
        trigger = EventTrigger(expect={"prefect-tune.trial-finished"}, posture="Reactive", threshold=1)
        own = Automation(name="prefect-tune: the user's own", trigger=trigger, actions=[DoNothing()]).create()
        before = read_automations()
        assert install_automations() == automation_names()
        assert set(read_automations()) == {*before, *automation_names()}
        assert set(uninstall_automations()) == set(automation_names())
        assert uninstall_automations() == []
        assert read_automations() == before
        own.delete()

    def test_an_alert_that_was_switched_on_without_an_action_is_switched_off(self) -> None:
        old: Any = Automation.read(name=install_automations(names=[BEST])[0])
        old.enabled = True
        old.update()
        install_automations()
        assert not read_automations()[BEST]["enabled"]
        assert read_automations()["prefect-tune: restart a crashed run"]["enabled"]

    def test_installing_twice_changes_nothing_and_another_window_is_brought_up_to_date(self) -> None:
        install_automations(heartbeat_window_seconds=90)
        first = read_automations()
        install_automations(heartbeat_window_seconds=90)
        assert read_automations() == first
        install_automations(heartbeat_window_seconds=120)
        second = read_automations()
        [changed] = [name for name in second if second[name]["updated"] != first[name]["updated"]]
        assert changed == "prefect-tune: mark a run without heartbeats as crashed"
        assert second[changed]["trigger"]["within"] == 120

    def test_one_that_another_process_deletes_at_the_same_time_is_no_error(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        install_automations()
        find_installed = automations._find_installed_automations

        def find_and_delete(client: Any, wanted: Any) -> Any:
            for automation in (installed := find_installed(client, wanted)):
                client.delete_automation(automation.id)
            return installed

        monkeypatch.setattr(automations, "_find_installed_automations", find_and_delete)
        assert set(uninstall_automations()) == set(automation_names())
        assert not set(read_automations()) & set(automation_names())

    def test_of_two_with_one_name_the_one_with_actions_stays(self) -> None:
        block = CustomWebhookNotificationBlock(name="hook", url="http://127.0.0.1:9/")
        document = block.save("tune-alerts", overwrite=True)
        install_automations(names=[BEST])  # without an action
        theirs: Any = Automation.read(name=BEST)
        theirs.actions = [SendNotification(block_document_id=document, subject="mine", body="mine")]
        theirs.enabled = True
        Automation(**theirs.model_dump(exclude={"id"})).create()  # by another client at the same time
        install_automations()
        with get_client(sync_client=True) as client:
            assert len(client.read_automations_by_name(BEST)) == 1
        assert (action_types_of(BEST), read_automations()[BEST]["enabled"]) == (["send-notification"], True)

    def test_what_somebody_has_changed_in_the_ui_stays(self) -> None:
        block = CustomWebhookNotificationBlock(name="hook", url="http://127.0.0.1:9/")
        document = block.save("tune-alerts", overwrite=True)
        mine: Any = Automation.read(name=install_automations(names=[BEST])[0])
        mine.actions = [SendNotification(block_document_id=document, subject="mine", body="mine")]
        mine.enabled = False  # although it has an action
        mine.update()
        install_automations()
        assert (read_automations()[BEST]["actions"][0]["body"], read_automations()[BEST]["enabled"]) == ("mine", False)
        install_automations(notify="custom-webhook/tune-alerts")
        assert "{{ event.payload.trial }}" in read_automations()[BEST]["actions"][0]["body"]
        assert action_types_of("prefect-tune: restart a crashed run") == ["change-flow-run-state"]
        assert not read_automations()[BEST]["enabled"]

    @pytest.mark.parametrize(
        ("options", "complaint"),
        [
            ({"names": ["new best"]}, "found 'new best'"),
            ({"notify": "slack-webhook/nowhere"}, "no such block"),
            ({"run": "nothing/at-all"}, "no such deployment"),
            ({"parameters": {"a": 1}}, "run='flow/deployment'"),
            ({"heartbeat_window_seconds": 1}, "at least 10"),
        ],
    )
    def test_what_cannot_be_installed_is_refused_before_anything_is(
        self, options: Mapping[str, Any], complaint: str
    ) -> None:
        with pytest.raises(InvalidInput, match=complaint):
            install_automations(**options)
        assert not set(read_automations()) & set(automation_names())


@pytest.mark.parametrize("act", [install_automations, uninstall_automations])
def test_a_server_that_does_not_answer_or_is_not_set_up_is_said(
    act: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    message = "automations: the Prefect server at http://127.0.0.1:9/api did not answer"
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}), pytest.raises(TuneError, match=message):
        act()
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    message = "automations: no Prefect server is configured"
    with temporary_settings(restore_defaults={PREFECT_API_URL}), pytest.raises(InvalidInput, match=message):
        act()


def test_a_run_is_started_again_by_itself_unless_it_goes_on_or_somebody_wanted_its_end() -> None:
    restart, heartbeat = (spec.trigger for spec in list(make_automation_specs(timedelta(seconds=90)).values())[:2])
    assert restart.expect >= {"prefect.flow-run.Cancelled", "prefect.flow-run.Failed", "prefect.flow-run.Running"}
    assert restart.after == {"prefect.flow-run.Crashed"}
    assert not restart.expect & restart.after
    assert heartbeat.expect >= {"prefect.flow-run.heartbeat", "prefect.flow-run.Suspended"}


def test_a_damaged_checkpoint_is_alerted_and_one_that_attempts_die_from_is_not() -> None:
    trigger = make_automation_specs(timedelta(seconds=90))[CORRUPT].trigger
    for crashes in (False, True):
        event = CheckpointQuarantined(trial="00000", sequence=3, reason="it is bad", crashes_trainable=crashes)
        resource = {
            "prefect.resource.id": "prefect-tune.trial.s3://b/e/00000",
            **make_event_labels(make_event_payload(event)),
        }
        assert trigger.match.matches(Resource(resource)) is not crashes


# ------------------------------------------------------------------------------------------------------- firing


@flow
def evaluate(experiment: str, trial: str) -> None:
    """A flow whose runs are scheduled, but never start."""


@pytest.mark.long
def test_a_damaged_checkpoint_and_a_new_best_do_what_they_were_installed_with(server_url: str, tmp_path: Path) -> None:
    target = LocalTarget(path=str(tmp_path / "target"))
    with get_client(sync_client=True) as client:
        deployment = create_deployment(client, "evaluate-best")
        parameters = {"experiment": "{{ event.payload.experiment }}", "trial": "{{ event.payload.trial }}"}
        install_automations(names=[BEST], run="evaluate/evaluate-best", parameters=parameters)
        create_deployment(client, "look-at-the-target")
        install_automations(names=[CORRUPT], run="evaluate/look-at-the-target", parameters=parameters)

        train(target, 2)
        damage_manifest(target, step=2)
        train(target, 3)
        pt.tune(Moody, {}, target=target, experiment="searched", metric="loss", num_samples=1, stop={"step": 1})

        def count_quarantines(events: Sequence[Mapping[str, Any]]) -> int:
            return [event["event"] for event in events].count("prefect-tune.checkpoint-quarantined")

        assert (
            count_quarantines(Feed(server_url, f"{target.uri}/alone").wait_until(count_quarantines, "prefect-tune."))
            == 1
        )
        Feed(server_url, read_automations()[CORRUPT]["id"]).wait_until(len, "prefect.automation.action.executed")
        wait_until(lambda: read_runs(client, deployment), seconds=60, what=lambda: "a run of the deployment")
        assert read_runs(client, deployment)[0]["parameters"] == {"experiment": "searched", "trial": "00000"}


@flow(name="nightly")
def nightly(target: str) -> None:
    """A user's flow that calls a search."""
    pt.tune(Moody, {}, target=target, experiment="e", metric="loss", num_samples=1, stop={"step": 1})


@pytest.mark.long
def test_a_run_that_fails_before_it_opens_its_experiment_alerts_once(server_url: str, tmp_path: Path) -> None:
    with canned_server(200) as hook:
        block = CustomWebhookNotificationBlock(name="hook", url=hook.url, json_data={"text": "{{body}}"})
        block.save("failed-runs", overwrite=True)
        install_automations(names=[FAILED], notify="custom-webhook/failed-runs")
        (tmp_path / "file").touch()
        for target in ("s3-target/nowhere", str(tmp_path / "file")):
            with pytest.raises(TuneError):
                nightly(target)
        with pytest.raises(pt.SearchFailed):
            pt.tune(Moody, {"fails": "raise"}, target=str(tmp_path), experiment="e", metric="loss", num_samples=1)
        feed = Feed(server_url, read_automations()[FAILED]["id"])
        feed.wait_until(lambda events: len(events) >= 3, "prefect.automation.action.executed")
    texts = [json.loads(body)["text"] for body in hook.bodies]
    assert len(texts) == 3
    assert all(re.match(r"Run [a-z-]+ of the flow tune failed: .+", text) for text in texts), texts
    assert not any(text.endswith("None") for text in texts), "the link, where the server has a UI"
    assert "s3-target/nowhere" in texts[0]


def test_the_text_of_an_alert_has_readable_numbers() -> None:
    template = make_automation_specs(timedelta(seconds=90))[BEST].message
    validate_user_template(template)
    trial = {"trial": "00002", "step": 82, "metrics": {"accuracy": 0.9577777777777777, "epoch": 3}}
    context = {"event": {"payload": {"experiment": "e", "target": "s3://b", **trial}}}
    text = render_user_template_sync(template, context)
    assert text.startswith("Experiment e at s3://b: ")
    assert text.endswith("accuracy 0.957778, epoch 3")


def create_deployment(client: SyncPrefectClient, name: str) -> UUID:
    return client.create_deployment(client.create_flow(evaluate), name)


def read_runs(client: SyncPrefectClient, deployment: UUID) -> Any:
    run_filter = {"deployments": {"id": {"any_": [str(deployment)]}}}
    return client.request("POST", "/flow_runs/filter", json=run_filter).json()


def train(target: LocalTarget, steps: int) -> None:
    pt.durable_trainable(
        Moody, {}, target=target, experiment="alone", stop={"step": steps}, checkpoint=pt.Cadence(every_steps=1)
    )


def damage_manifest(target: LocalTarget, *, step: int) -> None:
    (manifest,) = Path(target.path).rglob(f"{step:010d}-*/manifest.json")
    manifest.chmod(0o644)
    manifest.write_bytes(manifest.read_bytes()[:-2])


# --------------------------------------------------------------------------------------------- restart after kill -9


@contextmanager
def prefect_server_process(folder: Path) -> Iterator[dict[str, str]]:
    """A full Prefect server: that of the test harness evaluates no proactive triggers."""
    home = folder / "home"
    home.mkdir()
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PREFECT_SERVER_DATABASE")},
        "PREFECT_HOME": str(home),
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{home / 'prefect.db'}",
        "PREFECT_DEFAULT_WORK_POOL_NAME": POOL,
        "PYTHONPATH": str(REPOSITORY),
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    }
    with (folder / "server.log").open("wb") as log:
        server = start_prefect_server(environment, log)
        try:
            assert server.wait_until_healthy()
            with temporary_settings({PREFECT_API_URL: server.url}):
                yield environment | {"PREFECT_API_URL": server.url}
        finally:
            server.terminate()


def run_prefect(environment: Mapping[str, str], *args: str) -> None:
    command = [sys.executable, "-m", "prefect", *args]
    process = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr


@contextmanager
def worker_process(environment: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL]
    with log.open("ab") as output:
        process = subprocess.Popen(command, env=environment, cwd=REPOSITORY, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


class Run:
    """A run of the deployed `durable_trainable`."""

    def __init__(self, client: SyncPrefectClient, target: LocalTarget, experiment: str) -> None:
        self._client, self._target, self._experiment = client, target, experiment
        deployment = client.read_deployment_by_name("durable-trainable/durable-trainable")
        parameters = {
            "trainable": "tests.trainables.numpy_mlp:NumpyMlp",
            "config": {"seed": 1, "step_seconds": 0.2},
            "target": target.uri,
            "experiment": experiment,
            "stop": {"step": 300},
            "checkpoint": {"every_steps": 5},
        }
        self.id = client.create_flow_run_from_deployment(deployment.id, parameters=parameters).id

    @property
    def state(self) -> str:
        return str(self._client.read_flow_run(self.id).state_name)

    @property
    def pid(self) -> int:
        return int(str(self._client.read_flow_run(self.id).infrastructure_pid).rpartition(":")[2])

    @property
    def checkpoint_count(self) -> int:
        try:
            return len(self.trial.checkpoints)
        except (KeyError, AssertionError):
            return 0

    @property
    def trial(self) -> Any:
        return trial_at(self._target, self._experiment)

    def wait_until(self, goal: str, condition: Callable[[], object], seconds: float = 180) -> float:
        """Wait for the condition; return the seconds that it takes."""
        start = time.monotonic()
        wait_until(condition, seconds=seconds, what=lambda: f"{goal}: {self.state}, {self.checkpoint_count} commits")
        return time.monotonic() - start

    def require_end(self) -> None:
        """Require that the second attempt completes, and that it recomputes at most an interval."""
        self.wait_until("it is done", lambda: self.state == "Completed", 300)
        assert (self.trial.status, self.trial.attempt, self.trial.step) == (Status.COMPLETED, 2, 300)
        assert self.trial.recomputed_steps <= 5


@contextmanager
def automation_server(tmp_path: Path) -> Iterator[tuple[dict[str, str], SyncPrefectClient]]:
    """A server with our automations and a deployment of `durable_trainable`, without a worker."""
    with prefect_server_process(tmp_path) as environment, get_client(sync_client=True) as client:
        run_prefect(environment, "work-pool", "create", POOL, "--type", "process")
        run_prefect(environment, "--no-prompt", "deploy", "--name", "durable-trainable")
        install_automations(heartbeat_window_seconds=90)
        yield environment, client


@pytest.mark.deep
@pytest.mark.timeout(1200)
def test_what_is_killed_comes_back_once_with_its_machine_or_without(tmp_path: Path) -> None:
    """It prints how long a restart takes: some 45 s on a quiet machine, or the window of 90 s and 60 s more."""
    target = LocalTarget(path=str(tmp_path / "target"))
    with automation_server(tmp_path) as (environment, client):
        log = tmp_path / "worker.log"
        with worker_process(environment, log):
            run = Run(client, target, "crashed")
            run.wait_until("three commits", lambda: run.checkpoint_count >= 3)
            os.kill(run.pid, signal.SIGKILL)
            run.wait_until("the crash is known", lambda: run.state == "Crashed")
            seconds = run.wait_until("it runs again", lambda: run.trial.attempt == 2, 300)
            print(f"back {seconds:.0f} s after the crash was known")
            run.require_end()
        with worker_process(environment, log) as worker:
            run = Run(client, target, "vanished")
            run.wait_until("three commits", lambda: run.checkpoint_count >= 3)
            time.sleep(2)
            os.kill(worker.pid, signal.SIGKILL)
            os.kill(run.pid, signal.SIGKILL)
        with worker_process(environment, log):
            seconds = run.wait_until("it runs again", lambda: run.trial.attempt == 2, 420)
            print(f"back {seconds:.0f} s after its machine was gone")
            run.require_end()


@pytest.mark.deep
@pytest.mark.timeout(1200)
def test_a_false_alarm_about_a_machine_that_was_only_silent_hurts_nothing(tmp_path: Path) -> None:
    target = LocalTarget(path=str(tmp_path / "target"))
    log = tmp_path / "silent.log"
    with automation_server(tmp_path) as (environment, client), worker_process(environment, log) as silent:
        run = Run(client, target, "silent")
        run.wait_until("three commits", lambda: run.checkpoint_count >= 3)
        first = psutil.Process(run.pid)
        with suspending(psutil.Process(silent.pid), first), worker_process(environment, tmp_path / "other.log"):
            run.wait_until("it runs again, elsewhere", lambda: run.trial.attempt == 2, 420)
            before = run.checkpoint_count
            run.wait_until("the other owner commits", lambda: run.checkpoint_count >= before + 2)
            for process in (psutil.Process(silent.pid), first):
                process.resume()
            run.wait_until("the first one leaves", lambda: not first.is_running(), 120)
            run.require_end()
        assert [checkpoint.step for checkpoint in run.trial.checkpoints] == list(range(5, 301, 5))


@contextmanager
def suspending(*processes: psutil.Process) -> Iterator[None]:
    """Stop the processes in the block, like on a machine without a network: they neither run nor end."""
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.resume()
