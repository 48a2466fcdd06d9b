"""A deployment run by a process worker: killed, and started again with the same experiment name, it resumes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, FlowRunFilter, FlowRunFilterId

from prefect_tune.blocks import LocalTarget
from prefect_tune.core.experiment.trial_transitions import Status
from tests.flows.training import experiment_at, trial_at
from tests.flows.ui import Ui, eventually


@pytest.mark.deep  # the gate has no room for it: the page on deployments starts deployed runs there
@pytest.mark.timeout(400)
def test_a_deployed_run_that_is_killed_goes_on_when_it_is_started_again(ui: Ui, tmp_path: Path) -> None:
    target = LocalTarget(path=str(tmp_path / "target"))

    def start() -> UUID:
        return ui.start(
            "durable-trainable",
            trainable="tests.trainables.numpy_mlp:NumpyMlp",
            config={"seed": 1, "step_seconds": 0.1},
            target=target.uri,
            experiment="deployed",
            stop={"step": 60},
            checkpoint={"every_steps": 5},
        )

    def committed() -> int:
        return sum(len(each.checkpoints) for each in experiment_at(target, "deployed").trials.values())

    killed = start()
    eventually("three commits", lambda: committed() >= 3)
    os.kill(ui.process_of(killed), signal.SIGKILL)
    eventually("the crash is known", lambda: ui.state(killed).is_final())
    assert ui.state(killed).is_crashed()
    before = committed()

    again = start()
    assert ui.until_final(again).is_completed(), ui.state(again)
    trial = trial_at(target, "deployed")
    assert (trial.status, trial.step, trial.attempt) == (Status.COMPLETED, 60, 2)
    assert trial.wasted_steps <= 5
    assert committed() > before
    _shows_what_one_would_want(ui, again)


def _shows_what_one_would_want(ui: Ui, flow_run: UUID) -> None:
    """Tasks named by what they did, an artifact on the trial, the log of its resume step and its commits."""
    only = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run]))
    begin = ["train trial", "open deployed", "restore trial step", "save trial step"]
    with get_client(sync_client=True) as client:

        def missing() -> list[str]:
            runs = client.read_task_runs(flow_run_filter=only, limit=200)
            return [each for each in begin if not any(run.name.startswith(each) for run in runs)]

        eventually("all task runs have arrived", lambda: not missing())
        artifacts = client.read_artifacts(artifact_filter=ArtifactFilter(), flow_run_filter=only)
    assert any(artifact.key == "report-deployed" and "committed, " in str(artifact.data) for artifact in artifacts)
    eventually("the log", lambda: "resumes from step" in ui.log(flow_run) and "committed" in ui.log(flow_run))
