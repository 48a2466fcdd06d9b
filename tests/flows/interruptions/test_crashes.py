"""Trainings and searches that are killed, and what a killed trial has started."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import psutil  # type: ignore[import-untyped]  # the package has no types
import pytest

from prefect_tune.blocks import LocalTarget, StorageTarget
from prefect_tune.core.experiment.retention import Cadence
from prefect_tune.core.schedulers.asha import ASHA
from prefect_tune.core.schedulers.base import FIFO, Scheduler
from prefect_tune.core.search.domains import randint
from tests.fakes.task_runners import worker_of
from tests.fakes.trial_processes import read_proc, wait_until
from tests.flows.driver import Driver, Drivers, Flow, Write
from tests.flows.interruptions.killing import Campaign, Victim, find_lost_steps
from tests.flows.training import experiment_at
from tests.long_cases import deep_count, long_after
from tests.trainables.digits_table import EPOCHS, ROWS
from tests.trainables.witness import Act, acts_of

RunCampaign = Callable[[Campaign, int], None]


@pytest.fixture
def campaign_runner(capsys: pytest.CaptureFixture[str]) -> RunCampaign:
    """Run a campaign, print its figures, and require that it has no violations."""

    def run(campaign: Campaign, kills: int) -> None:
        figures = campaign.run(kills)
        with capsys.disabled():
            print(f"\n  {figures}")
        assert not campaign.violations, "\n".join(campaign.violations)

    return run


@pytest.fixture(params=["local", "s3"])
def target(request: pytest.FixtureRequest) -> StorageTarget:
    target: StorageTarget = request.getfixturevalue(f"{request.param}_target")
    return target


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("target", "victim", "kills"),
    long_after(1, [("s3", "flow", 2), ("local", "trial", 2), ("s3", "machine", 2)]),
    indirect=["target"],
)
def test_a_training_that_is_killed_ends_bit_identical_and_loses_at_most_an_interval(
    victim: Victim, kills: int, target: StorageTarget, drivers: Drivers, tmp_path: Path, campaign_runner: RunCampaign
) -> None:
    campaign_runner(Campaign(drivers, target, tmp_path, victim, seed=1), kills)


@pytest.mark.timeout(400)
@pytest.mark.usefixtures("process_model")
@pytest.mark.parametrize("process_model", long_after(1, ["started", "forked"]), indirect=True)
def test_a_kill_during_an_overlapping_upload_loses_only_that_upload(
    drivers: Drivers, local_target: StorageTarget, tmp_path: Path, campaign_runner: RunCampaign
) -> None:
    campaign_runner(Campaign(drivers, local_target, tmp_path, "flow", seed=2, commit="async"), 2)


@pytest.mark.deep
@pytest.mark.timeout(400)
def test_a_function_trainable_that_is_killed_ends_bit_identical(
    drivers: Drivers, local_target: StorageTarget, tmp_path: Path, campaign_runner: RunCampaign
) -> None:
    train = "tests.trainables.numpy_mlp:train"
    campaign_runner(Campaign(drivers, local_target, tmp_path, "flow", seed=3, trainable=train), 2)


@pytest.mark.deep
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("victim", ["flow", "trial", "machine"])
@pytest.mark.parametrize("commit", ["sync", "async"])
def test_many_kills_change_nothing_either(
    commit: str, victim: Victim, target: StorageTarget, drivers: Drivers, tmp_path: Path, campaign_runner: RunCampaign
) -> None:
    assert commit in ("sync", "async")
    campaign_runner(Campaign(drivers, target, tmp_path, victim, seed=100, commit=commit), deep_count(5))  # type: ignore[arg-type]  # checked above


def _parse_acts(*lines: str) -> list[Act]:
    return [Act(int(pid), act, int(step)) for pid, act, step in (line.split() for line in lines)]


def test_the_judge_sees_an_acknowledged_save_that_was_not_gone_on_from() -> None:
    before = _parse_acts("1 begin 1", "1 trained 1", "1 saving 1", "1 begin 2", "1 trained 2")
    assert find_lost_steps([*before, *_parse_acts("2 loaded 1", "2 begin 2")], uncertain=0) == ([1], [])
    lost, errors = find_lost_steps([*before, *_parse_acts("2 begin 1")], uncertain=0)
    assert lost == [2]
    assert errors == ["resumed from step 0, and step 1 was acknowledged"]
    assert find_lost_steps([*before, *_parse_acts("2 begin 1")], uncertain=1) == ([2], [])


# `kill -9` of whole searches at random moments: the table of trials equals that of an undisturbed search.


Recorder = Callable[[str, object], None]
_SEED = 17
_INTERVAL = 2
_MAX_DELAY_SECONDS = 3.0
_KILLS_AMONG_DEPLOYMENTS = deep_count(8)


@dataclass(frozen=True)
class _Search:
    """A search on recorded curves; the same one under two names proposes and decides the same."""

    drivers: Drivers
    target: StorageTarget
    folder: Path
    scheduler: Scheduler
    slots: int
    samples: int = 9
    isolation: str = "process"
    trials: str = "tasks"
    step_seconds: float = 0.02

    def start(self, name: str, crash_at: Write | None = None) -> Driver:
        space = {
            "row": randint(0, ROWS),
            "witness": str(self.folder / f"{name}-witness"),
            "step_seconds": self.step_seconds if self.isolation == "process" else 0,
        }
        return self.drivers.start(
            "tests.trainables.digits_table:DigitsTable",
            space,
            flow="tune",
            target=self.target,
            experiment=name,
            metric="error",
            num_samples=self.samples,
            scheduler=self.scheduler,
            seed=_SEED,
            stop={"step": EPOCHS},
            max_concurrent_trials=self.slots,
            checkpoint=Cadence(every_steps=_INTERVAL),
            isolation=self.isolation,
            trials=self.trials,
            crash_at=crash_at,
        )

    def count_steps(self, name: str) -> int:
        return sum(act.act == "trained" for act in acts_of(self.folder / f"{name}-witness"))

    def table(self, name: str) -> Mapping[str, Any]:
        trials = experiment_at(self.target, name).trials.values()
        return {trial.id: (trial.config["row"], str(trial.status), trial.step, dict(trial.metrics)) for trial in trials}

    def wait_at_random(self, driver: Driver, rng: Random, *, seconds: float = 90) -> None:
        """Wait until the search `killed` trains a further step or ends, and then a random time."""
        before = self.count_steps("killed")
        driver.wait_until(lambda: self.count_steps("killed") > before or not driver.is_alive(), seconds=seconds)
        time.sleep(rng.uniform(0, _MAX_DELAY_SECONDS))

    def require_same_table(self, kill_count: int) -> None:
        """Compare the search `killed` with the search `undisturbed`."""
        assert self.table("killed") == self.table("undisturbed")
        recomputed = self.count_steps("killed") - self.count_steps("undisturbed")
        assert 0 <= recomputed <= _INTERVAL * self.slots * kill_count


_MANY = deep_count(14)
"""Trials of a search, and kills of it."""
_DEEP, _LONG = (pytest.mark.deep, pytest.mark.timeout(900)), (pytest.mark.deep, pytest.mark.timeout(7200))
_SCHEDULERS: Mapping[str, Scheduler] = {
    "fifo": FIFO(),
    "stopping": ASHA(max_t=EPOCHS, reduction_factor=3, variant="stopping"),
    "promotion": ASHA(max_t=EPOCHS, reduction_factor=3, variant="promotion"),
}


@pytest.mark.parametrize(
    ("name", "slots", "samples", "kills"),
    [
        pytest.param("promotion", 1, 9, 2, marks=pytest.mark.timeout(400)),
        pytest.param("fifo", 2, 9, 2, marks=_DEEP),
        pytest.param("fifo", 2, _MANY, _MANY, marks=_LONG),
        pytest.param("stopping", 1, _MANY, _MANY, marks=_LONG),
        pytest.param("promotion", 1, _MANY, _MANY, marks=_LONG),
    ],
)
def test_a_search_that_is_killed_ends_with_the_table_of_an_undisturbed_one(
    name: str,
    slots: int,
    samples: int,
    kills: int,
    drivers: Drivers,
    local_target: StorageTarget,
    tmp_path: Path,
    record_property: Recorder,
) -> None:
    search, rng, kill_count = _Search(drivers, local_target, tmp_path, _SCHEDULERS[name], slots, samples), Random(3), 0
    reference = search.start("undisturbed").wait(seconds=200)
    assert "error" not in reference, reference
    while kill_count < kills:
        driver = search.start("killed")
        search.wait_at_random(driver, rng)
        if not driver.is_alive():
            break
        if rng.random() < 0.5:
            driver.kill()
        else:
            driver.kill_everything()
        driver.require_no_leftovers()
        kill_count += 1
    outcome = search.start("killed").wait(seconds=200)
    assert "error" not in outcome, outcome
    search.require_same_table(kill_count)
    record_property("figure: kills of whole searches", kill_count)


@pytest.mark.deep
@pytest.mark.timeout(3600)
def test_a_search_and_its_deployment_runs_are_killed_and_the_table_is_the_same(
    worker: subprocess.Popen[bytes],
    drivers: Drivers,
    local_target: StorageTarget,
    tmp_path: Path,
    record_property: Recorder,
) -> None:
    search = _Search(drivers, local_target, tmp_path, FIFO(), slots=2, samples=6, trials="deployment", step_seconds=0.3)
    assert "error" not in search.start("undisturbed").wait(seconds=400)
    rng, kills, driver = Random(23), 0, search.start("killed")
    while kills < _KILLS_AMONG_DEPLOYMENTS and driver.is_alive():
        search.wait_at_random(driver, rng, seconds=180)
        kills += _kill_victim(driver, worker, rng)
        if not driver.is_alive() and not driver.read_outcome():
            driver = search.start("killed")
    outcome = driver.wait(seconds=400)
    assert "error" not in outcome, outcome
    search.require_same_table(kills)
    record_property("figure: kills of searches and their deployment runs", kills)


def _kill_victim(driver: Driver, worker: subprocess.Popen[bytes], rng: Random) -> bool:
    """Kill the search, a flow run of the deployment with its trial, or the trial; return whether there was one."""
    victim = rng.choice(["search", "prefect.engine", "trial"])
    if victim == "search":
        driver.kill()
        return True
    for process in psutil.Process(worker.pid).children(recursive=True):
        if process.name() == victim or victim in process.cmdline():
            for killed in [*process.children(recursive=True), process]:
                with suppress(psutil.NoSuchProcess):
                    killed.kill()
            return True
    return False


@pytest.mark.parametrize("name", ["stopping", "promotion"])
@pytest.mark.parametrize(
    ("crashes", "seed"), [pytest.param(1, 5, marks=_DEEP), pytest.param(50, 11, marks=_LONG)], ids=["one", "many"]
)
def test_wherever_it_dies_between_two_writes_a_search_ends_with_the_same_table(
    name: str, crashes: int, seed: int, drivers: Drivers, local_target: StorageTarget, tmp_path: Path
) -> None:
    """A search crashes at one to three writes, each time with a new owner, and then runs to its end."""
    search, rng = _Search(drivers, local_target, tmp_path, _SCHEDULERS[name], 1, isolation="thread"), Random(seed)
    writes = search.start("undisturbed").wait(seconds=300)["writes"]
    for number in range(crashes):
        name = f"died-{number}"
        for _ in range(rng.randint(1, 3)):
            crash = Write(rng.randint(3, writes), is_done=rng.random() < 0.5)
            search.start(name, crash).process.join(300)
        outcome = search.start(name).wait(seconds=300)
        assert "error" not in outcome, (crash, outcome)
        assert search.table(name) == search.table("undisturbed"), crash


# Processes that a trial started end before its next attempt and with its run, on every flow and task runner.


_STARTED = 3


class Attempts:
    """The processes of one trial's attempts, and the processes that each of them started."""

    def __init__(self, folder: Path) -> None:
        self.witness = folder / "witness"
        self.gate = folder / "gate"
        self.count = 0

    def wait_for_next(self, driver: Driver) -> tuple[int, set[int]]:
        """Wait until the next attempt begins; return its process and those that it started."""
        self.count += 1
        driver.wait_until(lambda: len(self._acts_of("begin")) >= self.count, seconds=240)
        started = [act.step for act in self._acts_of("child", "orphan")][_STARTED * (self.count - 1) :]
        assert len(started) == _STARTED
        return self._acts_of("begin")[-1].pid, set(started)

    def _acts_of(self, *acts: str) -> list[Act]:
        return [act for act in acts_of(self.witness) if act.act in acts]


@pytest.fixture
def attempts(tmp_path: Path) -> Iterator[Attempts]:
    attempts = Attempts(tmp_path)
    yield attempts
    attempts.gate.touch()  # runs of deployments outlive their search


def start_flow(drivers: Drivers, flow: Flow, target: LocalTarget, attempts: Attempts, **options: object) -> Driver:
    config = {"witness": str(attempts.witness), "gate": str(attempts.gate), "seconds": 1000}
    options |= {} if flow == "durable_trainable" else {"num_samples": 1, "max_concurrent_trials": 1}
    trainable = "tests.trainables.processes.forked:leave_children"
    return drivers.start(trainable, config, flow=flow, target=target, experiment="orphans", **options)


def running_pids(pids: set[int]) -> set[int]:
    return {pid for pid in pids if read_proc(pid, "cmdline")}  # a zombie has no command line


def measure_end(pids: set[int]) -> float:
    """Wait until none of the processes runs; return the seconds that it takes."""
    start = time.monotonic()
    wait_until(lambda: not running_pids(pids), seconds=60, what=lambda: f"the end of {running_pids(pids)}")
    return round(time.monotonic() - start, 2)


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
    drivers: Drivers, local_target: LocalTarget, attempts: Attempts, flow: Flow, record_property: Recorder
) -> None:
    if flow == "tune on Ray":
        pytest.importorskip("prefect_ray")
    driver = start_flow(drivers, flow, local_target, attempts)
    trial, old_pids = attempts.wait_for_next(driver)
    os.kill(trial, signal.SIGKILL)
    trial, new_pids = attempts.wait_for_next(driver)
    assert not running_pids(old_pids), "they train beside the next attempt"
    if (worker := worker_of(trial)) != driver.pid:
        os.kill(worker, signal.SIGKILL)
        record_property(f"seconds until nothing lived: {flow}, worker killed", measure_end({trial, *new_pids}))
        trial, new_pids = attempts.wait_for_next(driver)
    driver.kill()
    record_property(f"seconds until nothing lived: {flow}, run killed", measure_end({trial, *new_pids}))


@pytest.mark.deep
@pytest.mark.usefixtures("prefect_server", "worker")
@pytest.mark.timeout(900)
def test_what_a_trial_of_a_deployment_has_started_ends_with_its_process_and_with_its_run(
    drivers: Drivers, local_target: LocalTarget, attempts: Attempts, record_property: Recorder
) -> None:
    driver = start_flow(drivers, "tune", local_target, attempts, trials="deployment")
    trial, old_pids = attempts.wait_for_next(driver)
    os.kill(trial, signal.SIGKILL)
    trial, new_pids = attempts.wait_for_next(driver)
    assert not running_pids(old_pids), "they train beside the next attempt"
    driver.kill()
    time.sleep(1)
    assert running_pids({trial, *new_pids}) == {trial, *new_pids}  # they outlive their search
    os.kill(worker_of(trial), signal.SIGKILL)
    record_property("seconds until nothing lived: deployment, run killed", measure_end({trial, *new_pids}))
