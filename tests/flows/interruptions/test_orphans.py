"""Processes that a trial started end before its next attempt and with its run, on every flow and task runner."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prefect_tune.blocks import LocalTarget
from tests.fakes.task_runners import worker_of
from tests.flows.driver import Driver, Drivers, Flow, until
from tests.trainables.witness import Act, acts_of

Record = Callable[[str, object], None]
_PATIENCE_SECONDS = 240  # the machine may be busy with other tests
_STARTED = 3


class Attempts:
    """The witness of one trial's attempts: which processes trained, and which processes each of them started."""

    def __init__(self, folder: Path) -> None:
        self.witness = folder / "witness"
        self.gate = folder / "gate"
        self.begun = 0

    def next(self, driver: Driver) -> tuple[int, set[int]]:
        """Wait for an attempt that has begun since; return its process, and what it has started."""
        self.begun += 1
        until(
            lambda: len(self._acts("begin")) >= self.begun, seconds=_PATIENCE_SECONDS, what=lambda: driver.log[-3000:]
        )
        left = [each.step for each in self._acts("child", "orphan")][_STARTED * (self.begun - 1) :]
        assert len(left) == _STARTED
        return self._acts("begin")[-1].pid, set(left)

    def _acts(self, *acts: str) -> list[Act]:
        return [each for each in acts_of(self.witness) if each.act in acts]


@pytest.fixture
def attempts(tmp_path: Path) -> Iterator[Attempts]:
    made = Attempts(tmp_path)
    yield made
    made.gate.touch()  # runs of deployments outlive their search


def started(drivers: Drivers, flow: Flow, target: LocalTarget, attempts: Attempts, **options: object) -> Driver:
    config = {"witness": str(attempts.witness), "gate": str(attempts.gate), "seconds": 1000}
    options |= {} if flow == "durable_trainable" else {"num_samples": 1, "max_concurrent_trials": 1}
    trainable = "tests.trainables.processes.forked:daemonizes"
    return drivers.start(trainable, config, flow=flow, target=target, experiment="orphans", **options)


def living(pids: set[int]) -> set[int]:
    """Return the running processes: a zombie has no command line."""

    def runs(pid: int) -> bool:
        try:
            return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
        except (FileNotFoundError, ProcessLookupError):
            return False

    return {pid for pid in pids if runs(pid)}


def seconds_until_none_lives(pids: set[int]) -> float:
    began = time.monotonic()
    until(lambda: not living(pids), seconds=60, what=lambda: f"the end of {living(pids)}")
    return round(time.monotonic() - began, 2)


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "flow",
    [
        "durable_trainable",
        pytest.param("tune", marks=pytest.mark.deep),
        pytest.param("tune on Dask", marks=pytest.mark.deep),
        pytest.param("tune on Ray", marks=pytest.mark.deep),
    ],
)
def test_what_a_trial_has_started_ends_before_the_next_attempt_and_with_the_run(
    drivers: Drivers, local_target: LocalTarget, attempts: Attempts, flow: Flow, record_property: Record
) -> None:
    if flow == "tune on Ray":
        pytest.importorskip("prefect_ray")
    driver = started(drivers, flow, local_target, attempts)
    trial, left = attempts.next(driver)
    os.kill(trial, signal.SIGKILL)
    trial, new = attempts.next(driver)
    assert not living(left), "they train beside the next attempt"
    if (worker := worker_of(trial)) != driver.pid:
        os.kill(worker, signal.SIGKILL)
        record_property(f"seconds until nothing lived: {flow}, worker killed", seconds_until_none_lives({trial, *new}))
        trial, new = attempts.next(driver)
    driver.kill()
    record_property(f"seconds until nothing lived: {flow}, run killed", seconds_until_none_lives({trial, *new}))


@pytest.mark.deep
@pytest.mark.usefixtures("prefect_server", "worker")
@pytest.mark.timeout(900)
def test_what_a_trial_of_a_deployment_has_started_ends_with_its_process_and_with_its_run(
    drivers: Drivers, local_target: LocalTarget, attempts: Attempts, record_property: Record
) -> None:
    driver = started(drivers, "tune", local_target, attempts, trials="deployment")
    trial, left = attempts.next(driver)
    os.kill(trial, signal.SIGKILL)
    trial, new = attempts.next(driver)
    assert not living(left), "they train beside the next attempt"
    driver.kill()
    time.sleep(1)
    assert living({trial, *new}) == {trial, *new}  # they outlive their search
    os.kill(worker_of(trial), signal.SIGKILL)
    record_property("seconds until nothing lived: deployment, run killed", seconds_until_none_lives({trial, *new}))
