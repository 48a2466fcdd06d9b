"""`kill -9` of whole searches at random moments: the table of trials equals that of an undisturbed search."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]  # the package has no types
import pytest

from prefect_tune.blocks import StorageTarget
from prefect_tune.core.experiment.retention import Cadence
from prefect_tune.core.schedulers.asha import ASHA
from prefect_tune.core.schedulers.base import FIFO, Scheduler
from prefect_tune.core.search.domains import randint
from tests.flows.driver import Driver, Drivers, Write, until
from tests.flows.training import experiment_at
from tests.trainables.digits_table import EPOCHS, ROWS
from tests.trainables.witness import acts_of

Record = Callable[[str, object], None]
_SEED = 17
_INTERVAL = 2
_SLOWEST_KILL_SECONDS = 3.0
_KILLS_AMONG_DEPLOYMENTS = 20


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
        return {each.trial: (each.config["row"], str(each.status), each.step, dict(each.metrics)) for each in trials}


def _killed_until_done(search: _Search, name: str, *, kills: int, seed: int) -> int:
    """Kill the search so many times, at random moments of its work; return the number of kills."""
    chance = random.Random(seed)
    for kill in range(kills):
        driver = search.start(name)
        before = search.trained(name)
        until(
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
        pytest.param("fifo", 2, 40, 40, marks=_LONG),
        pytest.param("stopping", 1, 40, 40, marks=_LONG),
        pytest.param("promotion", 1, 40, 40, marks=_LONG),
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
        until(
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
