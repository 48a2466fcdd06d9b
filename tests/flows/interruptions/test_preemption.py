"""Signals, cancellations and interrupts: everything saves within its grace, and says how to resume."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import State, StateType

import prefect_tune as pt
from prefect_tune.blocks import StorageTarget, SyncConfig
from prefect_tune.core.experiment.trial_transitions import Status
from prefect_tune.core.journal_events import AttemptStarted, Event
from prefect_tune.prefect_api import flow_with_server
from tests.fakes.servers.tcp_proxy import TcpProxy
from tests.fakes.trial_processes import wait_until
from tests.flows.conftest import s3_at
from tests.flows.driver import Driver, Drivers
from tests.flows.interruptions.mlp_training import MlpTraining
from tests.flows.training import (
    entries_at,
    experiment_at,
    find_violations,
    log_of_flow_run,
    owners_at,
    reference_training,
    state_of_flow_run,
    trial_at,
)
from tests.long_cases import long_after
from tests.trainables.moody import train

_NAME = "preempted"
_STEPS = 60
_INTERVAL = 5
_SLACK_SECONDS = 8  # a busy machine, and the end of a flow run


class _StoppedTraining(MlpTraining):
    """A training that is asked to stop."""

    def __init__(self, drivers: Drivers, target: StorageTarget, folder: Path) -> None:
        super().__init__(drivers, target, folder, _NAME, _STEPS)
        self.config["step_seconds"] = 0.05

    def wait_for_act(self, act: str, step: int) -> None:
        self.wait_until(lambda: max(self.steps_of(act), default=0) >= step)

    def require_resumable(self) -> None:
        assert trial_at(self.target, _NAME).status is Status.INTERRUPTED
        assert find_violations(self.target, _NAME, reference_training(_STEPS)) == []

    def require_continued(self, *, from_step: int) -> None:
        """Start again, and require that it resumes from `from_step` and ends like an undisturbed training."""
        self.require_identical_end(self.start().wait())
        assert self.steps_of("loaded") == ([from_step] if from_step else [])


@pytest.fixture
def training(drivers: Drivers, local_target: StorageTarget, tmp_path: Path) -> _StoppedTraining:
    return _StoppedTraining(drivers, local_target, tmp_path)


def _signal_and_wait(driver: Driver, number: signal.Signals, *, within: float) -> Mapping[str, Any]:
    """Send the signal; return the result of the driver, which has to end in time."""
    start = time.monotonic()
    driver.send_signal(number)
    outcome = driver.wait(seconds=within + _SLACK_SECONDS)
    driver.require_no_leftovers()
    if number == signal.SIGTERM:
        assert driver.process.exitcode == -signal.SIGTERM
    assert time.monotonic() - start < within + _SLACK_SECONDS
    return outcome


@pytest.mark.parametrize(("grace_seconds", "commit"), [pytest.param(2, "async", marks=pytest.mark.deep), (30, "sync")])
def test_a_terminated_flow_saves_its_last_step_and_ends_resumable(
    training: _StoppedTraining, grace_seconds: float, commit: Literal["sync", "async"]
) -> None:
    training.options |= {"grace_period_seconds": grace_seconds, "sync": SyncConfig(commit=commit)}
    training.config["save_seconds"] = 0.2
    driver = training.start()
    training.wait_for_act("trained", 7)
    _signal_and_wait(driver, signal.SIGTERM, within=2)
    assert training.newest_step() == max(training.steps_of("trained")) >= 7  # not one step is lost
    training.require_resumable()
    owner = owners_at(training.target, _NAME)[driver.pid]
    assert state_of_flow_run(owner)[0] == "Crashed"
    assert f"experiment {_NAME!r}: resumable at step {training.newest_step()}; " in log_of_flow_run(owner)
    training.require_continued(from_step=training.newest_step())


@pytest.mark.long
@pytest.mark.parametrize(("grace_seconds", "save_seconds"), [(0, 0.0), (2, 60.0)])
def test_a_trial_that_cannot_save_within_the_grace_is_ended_and_loses_at_most_an_interval(
    training: _StoppedTraining, grace_seconds: float, save_seconds: float
) -> None:
    training.options["grace_period_seconds"] = grace_seconds
    training.config |= {"save_seconds": save_seconds, "slow_from_step": 8}
    driver = training.start()
    training.wait_for_act("trained", 8)
    _signal_and_wait(driver, signal.SIGTERM, within=grace_seconds)
    assert max(training.steps_of("trained")) - training.newest_step() <= _INTERVAL
    training.require_resumable()


@pytest.mark.deep
def test_a_terminated_flow_does_not_wait_for_a_hung_target_beyond_its_grace(
    drivers: Drivers, s3_port: int, tmp_path: Path
) -> None:
    with TcpProxy(s3_port) as proxy:
        training = _StoppedTraining(drivers, s3_at(proxy.port), tmp_path)
        training.options |= {"grace_period_seconds": 3, "sync": SyncConfig(commit="async")}
        training.config |= {"save_seconds": 1.0, "slow_from_step": 8}  # time to cut the line before step 10 is sent
        driver = training.start()
        training.wait_for_act("begin", 8)
        driver.wait_until(lambda: training.newest_step() == 5, seconds=30)
        proxy.swallow()
        training.wait_for_act("saving", 10)
        _signal_and_wait(driver, signal.SIGTERM, within=3)
        wait_until(
            lambda: proxy.connection_count == 0, seconds=5, what=lambda: f"{proxy.connection_count} connections left"
        )
        proxy.restore()
        assert training.newest_step() == 5
        training.require_continued(from_step=5)


@pytest.mark.long
def test_a_group_wide_termination_still_lets_the_trial_save(training: _StoppedTraining) -> None:
    driver = training.start()
    training.wait_for_act("trained", 7)
    for pid in driver.find_trial_pids():
        os.kill(pid, signal.SIGTERM)
    _signal_and_wait(driver, signal.SIGTERM, within=25)
    assert training.newest_step() == max(training.steps_of("trained"))
    training.require_resumable()


@pytest.mark.deep
def test_a_function_trainable_hears_of_the_termination_and_saves(training: _StoppedTraining) -> None:
    training.trainable = "tests.trainables.numpy_mlp:train"
    driver = training.start()
    training.wait_for_act("trained", 7)
    _signal_and_wait(driver, signal.SIGTERM, within=25)
    assert training.newest_step() == max(training.steps_of("trained"))
    training.require_continued(from_step=training.newest_step())


@pytest.mark.deep
def test_a_termination_before_the_first_step_ends_resumable_too(training: _StoppedTraining) -> None:
    def read_events() -> list[Event]:
        return [event for entry in entries_at(training.target, _NAME) for event in entry.events]

    driver = training.start()
    driver.wait_until(lambda: any(isinstance(event, AttemptStarted) for event in read_events()), seconds=60)
    _signal_and_wait(driver, signal.SIGTERM, within=25)
    training.require_resumable()
    training.require_continued(from_step=training.newest_step())


def test_a_second_ctrl_c_does_not_wait_for_a_slow_save(training: _StoppedTraining) -> None:
    training.config |= {"save_seconds": 60.0, "slow_from_step": 8}
    driver = training.start()
    training.wait_for_act("trained", 8)
    driver.send_signal(signal.SIGINT)
    training.wait_for_act("saving", 8)
    assert _signal_and_wait(driver, signal.SIGINT, within=1)["error"] == "KeyboardInterrupt"
    assert training.newest_step() == 5


# What a script prints when it is interrupted or fails: one message, how to resume, and no traceback of Prefect.


SCRIPT = """
import sys
import prefect_tune as pt
from tests.trainables.counting import Fragile

space = {"x": pt.grid_search([1, 2]), "step_seconds": 0.1}
pt.tune(Fragile, space, target=sys.argv[1], experiment="e", metric="loss", stop={"step": 1000}, num_samples=1)
"""


def raise_interrupt(*_args: object, **_options: object) -> object:
    raise KeyboardInterrupt


@pytest.mark.timeout(900)
def test_the_last_line_says_what_is_committed_and_how_to_resume(prefect_server: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "runs")],
        env={**os.environ, "PREFECT_API_URL": prefect_server, "PYTHONPATH": str(Path(__file__).parents[3])},
        stderr=subprocess.PIPE,
        text=True,
    )
    entry = tmp_path / "runs/e/1/journal/0000000004.json"
    wait_until(entry.exists, seconds=150, what=lambda: f"{process.poll()}")
    process.send_signal(signal.SIGINT)
    _, output = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGINT
    last = output.splitlines()[-1]
    assert last.startswith("KeyboardInterrupt: experiment 'e': ")
    assert last.endswith("; run it again under the same experiment name, to resume")
    assert "Crash" not in output
    assert "Finished in state Interrupted(" in output


def test_before_the_run_begins_it_is_said_that_nothing_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flow_with_server, "validate_arguments", raise_interrupt)
    with pytest.raises(KeyboardInterrupt) as interrupt:
        pt.tune(train, {}, target=tmp_path)
    assert str(interrupt.value) == "tune was interrupted before it began: run it again"
    assert "raise_interrupt" not in "".join(traceback.format_exception(interrupt.value))


def test_during_the_import_of_the_package_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(vars(pt), "tune", raising=False)
    monkeypatch.setattr(pt, "import_module", raise_interrupt)
    with pytest.raises(KeyboardInterrupt) as interrupt:
        _ = pt.tune
    assert str(interrupt.value) == "interrupted while prefect_tune.tune was imported: nothing was started"
    assert "raise_interrupt" not in "".join(traceback.format_exception(interrupt.value))


# SIGTERM, Ctrl-C and Cancel reach a search in any thread, and without a worker: it saves, then its process ends.


_FLOWS = Path(__file__).parent / "user_flows.py"
_INT, _TERM = signal.SIGINT, signal.SIGTERM
_NO_WORKER = {"PREFECT__ENABLE_CANCELLATION_AND_CRASHED_HOOKS": "false"}
"""What a worker sets for the process of a run, which then leaves its state *Cancelled* to that worker."""


@pytest.fixture
def client(prefect_server: str) -> Iterator[SyncPrefectClient]:
    assert prefect_server
    with get_client(sync_client=True) as client:
        yield client


@contextmanager
def _python_process(*arguments: str, url: str, log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    variables = {**os.environ, "PREFECT_API_URL": url, "PYTHONPATH": str(_FLOWS.parents[3]), **environment}
    with log.open("wb") as output:
        command = [sys.executable, *arguments]
        process = subprocess.Popen(command, env=variables, cwd=log.parent, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _cancel(client: SyncPrefectClient, run: UUID) -> None:
    """Cancel a flow run like the button *Cancel*."""
    client.set_flow_run_state(run, State(type=StateType.CANCELLING, name="Cancelling"), force=True)


def _wait_until_training(target: pt.LocalTarget, log: Path, *names: str, count: int = 2) -> None:
    def is_training(name: str) -> bool:
        trials = experiment_at(target, name).trials.values()
        return [trial.status for trial in trials] == [Status.RUNNING] * count

    wait_until(lambda: all(map(is_training, names)), seconds=200, what=log.read_text)


def _require_saved(target: pt.LocalTarget, *names: str) -> None:
    """Require that each trial saved once: when it was asked to stop."""
    for name in names:
        trials = experiment_at(target, name).trials.values()
        assert [(trial.status, len(trial.checkpoints)) for trial in trials] == [(Status.INTERRUPTED, 1)] * 2


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("program", "number", "code", "states"),
    [
        ("search_in_thread", _INT, -_INT, ["Interrupted"]),
        ("submit_search", _TERM, -_TERM, ["Crashed", "Crashed"]),
        ("search_in_thread", _TERM, -_TERM, ["Crashed"]),
        ("search_in_threads", _TERM, -_TERM, ["Crashed", "Crashed"]),
        ("search_in_threads", _INT, -_INT, ["Interrupted", "Interrupted"]),
        ("await_search", _TERM, 1, ["Crashed", "Crashed"]),  # as Prefect's asynchronous flows end
    ],
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
    names = ["e", "f"] if program == "search_in_threads" else ["e"]
    earlier = {run.id for run in client.read_flow_runs()}
    with _python_process(str(_FLOWS), program, target.path, url=prefect_server, log=log) as process:
        _wait_until_training(target, log, *names)
        process.send_signal(number)
        assert process.wait(120) == code, log.read_text()
    _require_saved(target, *names)
    assert log.read_text().count("; run it again under the same experiment name, to resume") >= len(names)
    state_names = sorted(str(run.state and run.state.name) for run in client.read_flow_runs() if run.id not in earlier)
    assert state_names == states, log.read_text()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_signal_before_the_search_has_begun_ends_it(prefect_server: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with _python_process(
        str(_FLOWS), "interrupt_check", str(tmp_path / "runs"), url=prefect_server, log=log
    ) as process:
        assert process.wait(120) == -_INT, log.read_text()
    assert not (tmp_path / "runs").exists()


@pytest.mark.timeout(900)
@pytest.mark.long
@pytest.mark.parametrize(
    "program", long_after(1, ["search_in_main_thread", "train_in_main_thread", "search_in_thread"])
)
def test_a_script_whose_run_is_cancelled_saves_and_says_so(
    program: str, prefect_server: str, client: SyncPrefectClient, tmp_path: Path
) -> None:
    target, log = pt.LocalTarget(path=str(tmp_path / "runs")), tmp_path / "log"
    earlier = {run.id for run in client.read_flow_runs()}
    with _python_process(str(_FLOWS), program, target.path, url=prefect_server, log=log) as process:
        count = 1 if program == "train_in_main_thread" else 2
        _wait_until_training(target, log, "e", count=count)
        (run,) = [run.id for run in client.read_flow_runs() if run.id not in earlier]
        _cancel(client, run)
        assert process.wait(120) == 1, log.read_text()
    trials = list(experiment_at(target, "e").trials.values())
    assert [(trial.status, len(trial.checkpoints)) for trial in trials] == [(Status.INTERRUPTED, 1)] * count
    assert client.read_flow_run(run).state_type is StateType.CANCELLED
    assert "prefect.exceptions.CancelledRun: " in log.read_text()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("program", long_after(1, ["await_search", "submit_search", "tune"]))
def test_a_cancelled_run_saves_although_its_worker_was_killed(
    program: str, prefect_server: str, client: SyncPrefectClient, tmp_path: Path
) -> None:
    target, log = pt.LocalTarget(path=str(tmp_path / "runs")), tmp_path / "log"
    run = _create_run(client, program, target)
    with _python_process("-m", "prefect.engine", str(run), url=prefect_server, log=log, **_NO_WORKER) as process:
        _wait_until_training(target, log, "e")
        _cancel(client, run)
        assert process.wait(120) == 0, log.read_text()
    _require_saved(target, "e")
    assert client.read_flow_run(run).state_type is StateType.CANCELLED, log.read_text()


def _create_run(client: SyncPrefectClient, program: str, target: pt.LocalTarget) -> UUID:
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
    flow, name = client.create_flow_from_name(program), f"{program}-threads"
    deployment = client.create_deployment(flow, name, entrypoint=entrypoint, path=str(_FLOWS.parent))
    return client.create_flow_run_from_deployment(deployment, parameters=parameters).id
