"""Trainings and searches that are killed, and what a killed trial has started."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]  # the package has no types
import pytest

from prefect_tune.blocks import LocalTarget, StorageTarget
from prefect_tune.core.experiment.retention import Cadence
from prefect_tune.core.schedulers.asha import ASHA
from prefect_tune.core.schedulers.base import FIFO, Scheduler
from prefect_tune.core.search.domains import randint
from tests.fakes.task_runners import worker_of
from tests.fakes.trial_processes import wait_until
from tests.flows.driver import Driver, Drivers, Flow, Write
from tests.flows.interruptions.killing import Campaign, Victim, redone
from tests.flows.training import experiment_at
from tests.long_cases import deep_count, long_after
from tests.trainables.digits_table import EPOCHS, ROWS
from tests.trainables.witness import Act, acts_of

Struck = Callable[[Campaign, int], None]


@pytest.fixture
def struck(capsys: pytest.CaptureFixture[str]) -> Struck:
    """Run a campaign, print its figures, and require that nothing was violated."""

    def strike(campaign: Campaign, kills: int) -> None:
        figures = campaign.run(kills)
        with capsys.disabled():
            print(f"\n  {figures}")
        assert not campaign.violations, "\n".join(campaign.violations)

    return strike


@pytest.fixture(params=["local", "s3"])
def target(request: pytest.FixtureRequest) -> StorageTarget:
    chosen: StorageTarget = request.getfixturevalue(f"{request.param}_target")
    return chosen


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("target", "victim", "kills"),
    long_after(1, [("s3", "flow", 2), ("local", "trial", 2), ("s3", "machine", 2)]),
    indirect=["target"],
)
def test_a_training_that_is_killed_ends_bit_identical_and_loses_at_most_an_interval(
    victim: Victim, kills: int, target: StorageTarget, drivers: Drivers, tmp_path: Path, struck: Struck
) -> None:
    struck(Campaign(drivers, target, tmp_path, victim, seed=1), kills)


@pytest.mark.timeout(400)
@pytest.mark.usefixtures("each_process_model")
@pytest.mark.parametrize("each_process_model", long_after(1, ["started", "forked"]), indirect=True)
def test_a_kill_during_an_overlapping_upload_loses_only_that_upload(
    drivers: Drivers, local_target: StorageTarget, tmp_path: Path, struck: Struck
) -> None:
    struck(Campaign(drivers, local_target, tmp_path, "flow", seed=2, commit="async"), 2)


@pytest.mark.deep
@pytest.mark.timeout(400)
def test_a_function_trainable_that_is_killed_ends_bit_identical(
    drivers: Drivers, local_target: StorageTarget, tmp_path: Path, struck: Struck
) -> None:
    train = "tests.trainables.numpy_mlp:train"
    struck(Campaign(drivers, local_target, tmp_path, "flow", seed=3, trainable=train), 2)


@pytest.mark.deep
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("victim", ["flow", "trial", "machine"])
@pytest.mark.parametrize("commit", ["sync", "async"])
def test_many_kills_change_nothing_either(
    commit: str, victim: Victim, target: StorageTarget, drivers: Drivers, tmp_path: Path, struck: Struck
) -> None:
    assert commit in ("sync", "async")
    struck(Campaign(drivers, target, tmp_path, victim, seed=100, commit=commit), deep_count(5))  # type: ignore[arg-type]  # checked above


def _acts(*lines: str) -> list[Act]:
    return [Act(int(pid), act, int(step)) for pid, act, step in (line.split() for line in lines)]


def test_the_judge_sees_an_acknowledged_save_that_was_not_gone_on_from() -> None:
    before = _acts("1 begin 1", "1 trained 1", "1 saving 1", "1 begin 2", "1 trained 2")
    assert redone([*before, *_acts("2 loaded 1", "2 begin 2")], uncertain=0) == ([1], [])
    lost, wrong = redone([*before, *_acts("2 begin 1")], uncertain=0)
    assert lost == [2]
    assert wrong == ["resumed from step 0, and step 1 was acknowledged"]
    assert redone([*before, *_acts("2 begin 1")], uncertain=1) == ([2], [])


# `kill -9` of whole searches at random moments: the table of trials equals that of an undisturbed search.


Record = Callable[[str, object], None]
_SEED = 17
_INTERVAL = 2
_SLOWEST_KILL_SECONDS = 3.0
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

    def start(self, name: str, dies_at: Write | None = None) -> Driver:
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
            dies_at=dies_at,
        )

    def trained(self, name: str) -> int:
        return sum(each.act == "trained" for each in acts_of(self.folder / f"{name}-witness"))

    def table(self, name: str) -> Mapping[str, Any]:
        trials = experiment_at(self.target, name).trials.values()
        return {each.id: (each.config["row"], str(each.status), each.step, dict(each.metrics)) for each in trials}


def _killed_until_done(search: _Search, name: str, *, kills: int, seed: int) -> int:
    """Kill the search so many times, at random moments of its work; return the number of kills."""
    chance = random.Random(seed)
    for kill in range(kills):
        driver = search.start(name)
        before = search.trained(name)
        wait_until(
            lambda: search.trained(name) > before or not driver.is_alive(),  # noqa: B023  used within this round
            seconds=90,
            what=lambda: driver.log[-3000:],  # noqa: B023  used within this round
        )
        time.sleep(chance.uniform(0, _SLOWEST_KILL_SECONDS))
        if not driver.is_alive():
            return kill
        if chance.random() < 0.5:
            driver.kill()
        else:
            driver.kill_everything()
        driver.require_no_leftovers()
    return kills


def _require_same_in_the_end(search: _Search, kills: int, seed: int) -> int:
    undisturbed = search.start("undisturbed").wait(seconds=200)
    assert "error" not in undisturbed, undisturbed
    struck = _killed_until_done(search, "killed", kills=kills, seed=seed)
    outcome = search.start("killed").wait(seconds=200)
    assert "error" not in outcome, outcome
    assert search.table("killed") == search.table("undisturbed")
    wasted = search.trained("killed") - search.trained("undisturbed")
    assert 0 <= wasted <= _INTERVAL * search.slots * struck
    return struck


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
    record_property: Record,
) -> None:
    search = _Search(drivers, local_target, tmp_path, _SCHEDULERS[name], slots, samples)
    record_property("figure: kills of whole searches", _require_same_in_the_end(search, kills, seed=3))


@pytest.mark.deep
@pytest.mark.timeout(3600)
def test_a_search_and_its_deployment_runs_are_killed_and_the_table_is_the_same(
    worker: subprocess.Popen[bytes],
    drivers: Drivers,
    local_target: StorageTarget,
    tmp_path: Path,
    record_property: Record,
) -> None:
    search = _Search(drivers, local_target, tmp_path, FIFO(), slots=2, samples=6, trials="deployment", step_seconds=0.3)
    assert "error" not in search.start("undisturbed").wait(seconds=400)
    chance, kills, driver = random.Random(23), 0, search.start("killed")
    while kills < _KILLS_AMONG_DEPLOYMENTS and driver.is_alive():
        before = search.trained("killed")
        wait_until(
            lambda: search.trained("killed") > before or not driver.is_alive(),  # noqa: B023  used within this round
            seconds=180,
            what=lambda: driver.log[-3000:],  # noqa: B023  used within this round
        )
        time.sleep(chance.uniform(0, _SLOWEST_KILL_SECONDS))
        kills += _struck(driver, worker, chance)
        if not driver.is_alive() and not driver.outcome():
            driver = search.start("killed")
    outcome = driver.wait(seconds=400)
    assert "error" not in outcome, outcome
    assert search.table("killed") == search.table("undisturbed")
    assert 0 <= search.trained("killed") - search.trained("undisturbed") <= _INTERVAL * search.slots * kills
    record_property("figure: kills of searches and their deployment runs", kills)


def _struck(driver: Driver, worker: subprocess.Popen[bytes], chance: random.Random) -> bool:
    """Kill the search, a run of the deployment with its trial, or the trial alone; return whether there was one."""
    victim = chance.choice(["search", "prefect.engine", "trial"])
    if victim == "search":
        driver.kill()
        return True
    below = psutil.Process(worker.pid).children(recursive=True)
    found = [each for each in below if each.name() == victim or any(victim == word for word in each.cmdline())][:1]
    for each in [below for top in found for below in [*top.children(recursive=True), top]]:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    return bool(found)


def _require_same_after(search: _Search, deaths: int, seed: int) -> None:
    """Die so many times at one write or another, each time with a new owner; then run to the end."""
    chance, undisturbed = random.Random(seed), search.start("undisturbed").wait(seconds=300)
    writes = undisturbed["writes"]
    for death in range(deaths):
        name = f"died-{death}"
        for _ in range(chance.randint(1, 3)):
            where = Write(chance.randint(3, writes), is_done=chance.random() < 0.5)
            search.start(name, where).process.join(300)
        outcome = search.start(name).wait(seconds=300)
        assert "error" not in outcome, (where, outcome)
        assert search.table(name) == search.table("undisturbed"), where


@pytest.mark.parametrize("name", ["stopping", "promotion"])
@pytest.mark.parametrize(
    ("deaths", "seed"), [pytest.param(1, 5, marks=_DEEP), pytest.param(50, 11, marks=_LONG)], ids=["one", "many"]
)
def test_wherever_it_dies_between_two_writes_a_search_ends_with_the_same_table(
    name: str, deaths: int, seed: int, drivers: Drivers, local_target: StorageTarget, tmp_path: Path
) -> None:
    search = _Search(drivers, local_target, tmp_path, _SCHEDULERS[name], 1, isolation="thread")
    _require_same_after(search, deaths, seed)


# Processes that a trial started end before its next attempt and with its run, on every flow and task runner.


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
        wait_until(
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
    trainable = "tests.trainables.processes.forked:leave_children"
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
    wait_until(lambda: not living(pids), seconds=60, what=lambda: f"the end of {living(pids)}")
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
