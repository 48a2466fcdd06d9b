"""The same search on Dask's and Ray's workers, some of which are killed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from prefect.task_runners import TaskRunner

from prefect_tune.blocks import LocalTarget
from prefect_tune.core.checkpoints.cadence import Cadence
from prefect_tune.core.experiment.trial_transitions import Status
from prefect_tune.core.search.domains import grid_search
from prefect_tune.flows.tune import tune
from tests.fakes.task_runners import dask, ray, worker_of
from tests.flows.driver import until
from tests.flows.training import experiment_at
from tests.trainables.digits_table import curves
from tests.trainables.witness import acts_of

_STEPS = 12
_ROWS = [3, 5, 8]


def kill_the_first_worker(witness: Path, killed: list[int]) -> None:
    until(lambda: len(acts_of(witness)) > 3, seconds=240, what=lambda: "a trial that trains")
    with suppress(ProcessLookupError, FileNotFoundError):
        worker = worker_of(acts_of(witness)[-1].pid)
        assert worker != os.getpid()
        os.kill(worker, signal.SIGKILL)
        killed.append(worker)


@pytest.mark.deep
@pytest.mark.usefixtures("prefect_server")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("runner", [dask, ray], ids=["Dask", "Ray"])
def test_a_worker_that_is_killed_costs_one_attempt_and_nothing_else(
    runner: Callable[[], TaskRunner], local_target: LocalTarget, tmp_path: Path
) -> None:
    search = tune.with_options(task_runner=runner())  # first: where the runner is not installed, no thread is left
    witness, killed = tmp_path / "witness", list[int]()
    killer = threading.Thread(target=kill_the_first_worker, args=(witness, killed))
    killer.start()
    results = search(
        "tests.trainables.digits_table:DigitsTable",
        {"row": grid_search(_ROWS), "witness": str(witness), "step_seconds": 0.2},
        target=local_target,
        experiment="there",
        metric="error",
        num_samples=1,
        stop={"step": _STEPS},
        max_concurrent_trials=2,
        checkpoint=Cadence(every_steps=1),
    )
    killer.join()
    assert killed
    trials = experiment_at(local_target, "there").trials
    assert [(each.status, each.step) for each in trials.values()] == [(Status.COMPLETED, _STEPS)] * len(_ROWS)
    assert sum(each.attempt for each in trials.values()) <= len(_ROWS) + 2, "a neighbour lost an attempt"
    assert results.best.metrics["error"] == min(curves()[row][_STEPS - 1] for row in _ROWS)
    trained = sum(each.act == "trained" for each in acts_of(witness))
    assert trained <= len(_ROWS) * _STEPS + 2
