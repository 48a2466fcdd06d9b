"""SIGTERM, Ctrl-C and Cancel reach a search in any thread, and without a worker: it saves, then its process ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client

import prefect_tune as pt
from prefect_tune.core.experiment.trial_transitions import Status
from tests.flows.conftest import POOL
from tests.flows.driver import until
from tests.flows.training import experiment_at
from tests.flows.ui import Ui
from tests.long_cases import long_after

_FLOWS = Path(__file__).parent / "user_flows.py"
_INT, _TERM = signal.SIGINT, signal.SIGTERM
_NO_WORKER = {"PREFECT__ENABLE_CANCELLATION_AND_CRASHED_HOOKS": "false"}
"""What a worker sets for the process of a run, which then leaves its state *Cancelled* to that worker."""

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def client(prefect_server: str) -> Iterator[SyncPrefectClient]:
    assert prefect_server
    with get_client(sync_client=True) as client:
        yield client


@contextmanager
def _process(*arguments: str, url: str, log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    everything = {**os.environ, "PREFECT_API_URL": url, "PYTHONPATH": str(_FLOWS.parents[3]), **environment}
    with log.open("wb") as output:
        command = [sys.executable, *arguments]
        process = subprocess.Popen(command, env=everything, cwd=log.parent, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _until_training(target: pt.LocalTarget, log: Path, *names: str, count: int = 2) -> None:
    def trains(name: str) -> bool:
        trials = experiment_at(target, name).trials.values()
        return [trial.status for trial in trials] == [Status.RUNNING] * count

    until(lambda: all(map(trains, names)), seconds=200, what=log.read_text)


def _require_saved(target: pt.LocalTarget, *names: str) -> None:
    """Each trial has saved when it was asked to stop, and at no other time."""
    for name in names:
        trials = list(experiment_at(target, name).trials.values())
        assert [trial.status for trial in trials] == [Status.INTERRUPTED] * 2
        assert [len(trial.checkpoints) for trial in trials] == [1, 1]


@pytest.mark.parametrize(
    ("program", "number", "code", "states"),
    long_after(
        1,
        [
            ("running", _INT, -_INT, ["Interrupted"]),
            ("submitting", _TERM, -_TERM, ["Crashed", "Crashed"]),
            ("running", _TERM, -_TERM, ["Crashed"]),
            ("waiting", _TERM, -_TERM, ["Crashed", "Crashed"]),
            ("waiting", _INT, -_INT, ["Interrupted", "Interrupted"]),
            ("submitting", _INT, -_INT, ["Crashed", "Interrupted"]),
            ("awaiting", _INT, -_INT, ["Crashed", "Interrupted"]),
            ("awaiting", _TERM, 1, ["Crashed", "Crashed"]),  # as Prefect's asynchronous flows end
        ],
    ),
)
def test_a_search_in_another_thread_saves_and_its_process_ends_as_by_the_signal(
    program: str,
    number: signal.Signals,
    code: int,
    states: list[str],
    prefect_server: str,
    client: SyncPrefectClient,
    tmp_path: Path,
) -> None:
    target, log = pt.LocalTarget(path=str(tmp_path / "runs")), tmp_path / "log"
    names = ["e", "f"] if program == "waiting" else ["e"]
    earlier = {run.id for run in client.read_flow_runs()}
    with _process(str(_FLOWS), program, target.path, url=prefect_server, log=log) as process:
        _until_training(target, log, *names)
        process.send_signal(number)
        assert process.wait(120) == code, log.read_text()
    _require_saved(target, *names)
    assert log.read_text().count("; run it again under the same experiment name, to resume") >= len(names)
    ended = sorted(str(run.state and run.state.name) for run in client.read_flow_runs() if run.id not in earlier)
    assert ended == states, log.read_text()


def test_a_signal_before_the_search_has_begun_ends_it(prefect_server: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with _process(str(_FLOWS), "checking", str(tmp_path / "runs"), url=prefect_server, log=log) as process:
        assert process.wait(120) == -_INT, log.read_text()
    assert not (tmp_path / "runs").exists()


@pytest.mark.long
@pytest.mark.parametrize("program", long_after(1, ["main_thread", "training", "running"]))
def test_a_script_whose_run_is_cancelled_saves_and_says_so(
    program: str, prefect_server: str, client: SyncPrefectClient, tmp_path: Path
) -> None:
    target, log = pt.LocalTarget(path=str(tmp_path / "runs")), tmp_path / "log"
    earlier = {run.id for run in client.read_flow_runs()}
    with _process(str(_FLOWS), program, target.path, url=prefect_server, log=log) as process:
        _until_training(target, log, "e", count=1 if program == "training" else 2)
        (run,) = [run.id for run in client.read_flow_runs() if run.id not in earlier]
        Ui(client).cancel(run)
        assert process.wait(120) == 1, log.read_text()
    trials = list(experiment_at(target, "e").trials.values())
    assert [(trial.status, len(trial.checkpoints)) for trial in trials] == [(Status.INTERRUPTED, 1)] * len(trials)
    assert Ui(client).state(run).is_cancelled()
    assert "prefect.exceptions.CancelledRun: " in log.read_text()


@pytest.mark.parametrize("program", long_after(1, ["awaiting", "submitting", "tune"]))
def test_a_cancelled_run_saves_although_its_worker_was_killed(
    program: str, prefect_server: str, client: SyncPrefectClient, tmp_path: Path
) -> None:
    target, log = pt.LocalTarget(path=str(tmp_path / "runs")), tmp_path / "log"
    run = _run_of_deployment(client, program, target)
    with _process("-m", "prefect.engine", str(run), url=prefect_server, log=log, **_NO_WORKER) as process:
        _until_training(target, log, "e")
        Ui(client).cancel(run)
        assert process.wait(120) == 0, log.read_text()
    _require_saved(target, "e")
    assert Ui(client).state(run).is_cancelled(), log.read_text()


@pytest.mark.long
@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("program", ["awaiting", "submitting"])
def test_a_run_that_its_worker_cancels_saves_in_another_thread(
    program: str, client: SyncPrefectClient, tmp_path: Path
) -> None:
    target = pt.LocalTarget(path=str(tmp_path / "runs"))
    run = _run_of_deployment(client, program, target, POOL)
    _until_training(target, tmp_path / "worker.log", "e")
    Ui(client).cancel(run)
    assert Ui(client).until_final(run).is_cancelled(), Ui(client).log(run)
    _require_saved(target, "e")


def _run_of_deployment(
    client: SyncPrefectClient, program: str, target: pt.LocalTarget, work_pool_name: str | None = None
) -> UUID:
    entrypoint, parameters = f"{_FLOWS.name}:{program}", dict[str, Any](target=target.path)
    if program == "tune":
        entrypoint = "prefect_tune.flows.tune.tune"
        parameters |= {
            "trainable": "tests.trainables.counting:Fragile",
            "space": {"step_seconds": 0.2, "x": {"grid_search": [1, 2]}},
            "experiment": "e",
            "metric": "loss",
            "stop": {"step": 5000},
            "num_samples": 1,
            "checkpoint": {"every_steps": 4000, "every_seconds": None},
        }
    flow = client.create_flow_from_name(program)
    deployment = client.create_deployment(
        flow, f"{program}-threads", entrypoint=entrypoint, path=str(_FLOWS.parent), work_pool_name=work_pool_name
    )
    return client.create_flow_run_from_deployment(deployment, parameters=parameters).id
