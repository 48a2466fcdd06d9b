"""Trials on other machines: they outlive the search that started them, and the next run of it finds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prefect_tune.blocks import LocalTarget
from prefect_tune.core.experiment.retention import Cadence
from prefect_tune.core.experiment.trial_transitions import Status
from prefect_tune.core.search.domains import grid_search
from prefect_tune.flows.tune import tune
from tests.flows.driver import Driver, Drivers, until
from tests.flows.training import experiment_at
from tests.trainables.witness import acts_of

_NAME = "elsewhere"
_STEPS = 24


class _Search:
    def __init__(self, drivers: Drivers, target: LocalTarget, folder: Path, **options: Any) -> None:
        self._drivers = drivers
        self.target = target
        self._witness = folder / "witness"
        self._options = options

    def start(self) -> Driver:
        return self._drivers.start(
            "tests.trainables.digits_table:DigitsTable",
            {"row": grid_search([3, 5]), "witness": str(self._witness), "step_seconds": 0.4},
            flow="tune",
            target=self.target,
            experiment=_NAME,
            num_samples=1,
            stop={"step": _STEPS},
            max_concurrent_trials=2,
            checkpoint=Cadence(every_steps=1),
            **self._options,
        )

    def trained(self) -> int:
        return sum(each.act == "trained" for each in acts_of(self._witness))

    def processes(self) -> int:
        return len({each.pid for each in acts_of(self._witness)})


@pytest.mark.long
@pytest.mark.usefixtures("prefect_server", "worker")
@pytest.mark.timeout(900)
def test_trials_that_outlive_their_search_are_found_by_the_next_one_and_not_run_twice(
    drivers: Drivers, local_target: LocalTarget, tmp_path: Path
) -> None:
    search = _Search(drivers, local_target, tmp_path, trials="deployment")
    killed = search.start()
    until(lambda: search.processes() == 2 and search.trained() > 4, seconds=240, what=lambda: killed.log[-3000:])
    killed.kill()
    before = search.trained()
    outcome = search.start().wait(seconds=200)
    assert outcome.get("trials") == {"00000": "completed", "00001": "completed"}, outcome
    trials = experiment_at(local_target, _NAME).trials
    assert [(each.status, each.step, each.attempt) for each in trials.values()] == [(Status.COMPLETED, _STEPS, 1)] * 2
    assert before < search.trained() == 2 * _STEPS
    assert search.processes() == 2


@pytest.mark.deep
@pytest.mark.usefixtures("prefect_server", "deployed")
def test_attempts_that_no_worker_begins_are_not_waited_for_when_the_time_is_up(local_target: LocalTarget) -> None:
    results = tune(
        "tests.trainables.digits_table:DigitsTable",
        {"row": grid_search([3, 5])},
        target=local_target,
        experiment=_NAME,
        num_samples=1,
        stop={"step": 1},
        trials="deployment",
        time_budget_seconds=3,
    )
    assert [(each.status, each.attempt) for each in results.trials.values()] == [(Status.PENDING, 0)] * 2
