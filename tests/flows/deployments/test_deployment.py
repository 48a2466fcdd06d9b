"""A deployment run by a process worker: killed, and started again with the same experiment name, it resumes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import ArtifactFilter, FlowRunFilter, FlowRunFilterId, LogFilter
from prefect.client.schemas.objects import FlowRun, State

from prefect_tune.blocks import LocalTarget
from prefect_tune.core.experiment.trial_transitions import Status
from prefect_tune.core.journal.journal import load
from prefect_tune.stores.local.staging import transfer_pool

_DEPLOYMENT = "durable-trainable/durable-trainable"


@pytest.mark.deep  # the gate has no room for it: the page on deployments starts deployed runs there
@pytest.mark.usefixtures("prefect_server", "worker")
@pytest.mark.timeout(400)
def test_a_deployed_run_that_is_killed_goes_on_when_it_is_started_again(tmp_path: Path) -> None:
    target = LocalTarget(path=str(tmp_path / "target"))
    parameters = {
        "trainable": "tests.trainables.numpy_mlp:NumpyMlp",
        "config": {"seed": 1, "step_seconds": 0.1},
        "target": target.uri,
        "experiment": "deployed",
        "stop": {"step": 60},
        "checkpoint": {"every_steps": 5},
    }
    with get_client(sync_client=True) as client:
        killed = _start(client, parameters)
        _until("three commits", lambda: _committed(target) >= 3)
        os.kill(_process_of(client, killed.id), signal.SIGKILL)
        _until("the crash is known", lambda: _state(client, killed.id).is_final())
        assert _state(client, killed.id).is_crashed()
        before = _committed(target)

        again = _start(client, parameters)
        _until("the second run is over", lambda: _state(client, again.id).is_final())
        assert _state(client, again.id).is_completed(), _state(client, again.id)

        trial = _trial(target)
        assert (trial.status, trial.step, trial.attempt) == (Status.COMPLETED, 60, 2)
        assert trial.wasted_steps <= 5
        assert _committed(target) > before
        _shows_what_one_would_want(client, again.id)


def _shows_what_one_would_want(client: SyncPrefectClient, flow_run: UUID) -> None:
    """Tasks named by what they did, an artifact on the trial, the log of its resume step and its commits."""
    only = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run]))
    begin = ["train trial", "open deployed", "restore trial step", "save trial step"]

    def missing() -> list[str]:
        runs = client.read_task_runs(flow_run_filter=only, limit=200)
        return [each for each in begin if not any(run.name.startswith(each) for run in runs)]

    _until("all task runs have arrived", lambda: not missing())
    artifacts = client.read_artifacts(artifact_filter=ArtifactFilter(), flow_run_filter=only)
    assert any(artifact.key == "report-deployed" and "committed, " in str(artifact.data) for artifact in artifacts)

    def logged() -> str:
        logs = client.read_logs(
            log_filter=LogFilter.model_validate({"flow_run_id": {"any_": [str(flow_run)]}}), limit=200
        )
        return "\n".join(log.message for log in logs)

    _until("the logs have arrived", lambda: "resumes from step" in logged() and "committed" in logged())


def _start(client: SyncPrefectClient, parameters: dict[str, Any]) -> FlowRun:
    deployment = client.read_deployment_by_name(_DEPLOYMENT)
    return client.create_flow_run_from_deployment(deployment.id, parameters=parameters)


def _state(client: SyncPrefectClient, flow_run: UUID) -> State[Any]:
    state = client.read_flow_run(flow_run).state
    assert state is not None
    return state


def _trial(target: LocalTarget) -> Any:
    with target.open(timeout=timedelta(seconds=30)) as store, transfer_pool() as transfers:
        return load(store, "deployed", side_by_side=transfers).trials.get("trial")


def _committed(target: LocalTarget) -> int:
    trial = _trial(target)
    return len(trial.checkpoints) if trial else 0


def _process_of(client: SyncPrefectClient, flow_run: UUID) -> int:
    """The process that the worker runs the flow in: it reports `host:pid`."""
    return int(str(client.read_flow_run(flow_run).infrastructure_pid).rpartition(":")[2])


def _until(what: str, holds: Callable[[], bool], patience: timedelta = timedelta(seconds=150)) -> None:
    end = time.monotonic() + patience.total_seconds()
    while not holds():
        assert time.monotonic() < end, f"not within {patience}: {what}"
        time.sleep(0.3)
