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
from prefect_tune.core.experiment.retention import Cadence
from prefect_tune.core.experiment.trial_transitions import Status
from prefect_tune.core.search.domains import grid_search
from prefect_tune.flows.tune import tune
from tests.fakes.task_runners import dask, ray, worker_of
from tests.flows.driver import until
from tests.flows.training import experiment_at, require_trained_by_two_nodes
from tests.trainables.digits_table import curves
from tests.trainables.witness import acts_of

_STEPS = 12
_NODE_STEPS = 6
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


@pytest.mark.long
@pytest.mark.usefixtures("prefect_server")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "dies", [{}, {"rank": 3, "at": 5, "does": "die", "others": "hang"}], ids=["undisturbed", "killed"]
)
@pytest.mark.parametrize("runner", [dask, ray], ids=["Dask", "Ray"])
def test_two_tasks_train_a_trial_as_two_nodes(
    runner: Callable[[], TaskRunner], dies: dict[str, object], local_target: LocalTarget
) -> None:
    results = tune.with_options(task_runner=runner())(
        "tests.trainables.grouped:Sharded",
        dies,
        target=local_target,
        experiment="nodes",
        num_samples=1,
        stop={"step": _NODE_STEPS},
        checkpoint=Cadence(every_steps=2),
        processes_per_trial=2,
        nodes_per_trial=2,
        max_concurrent_trials=1,
    )
    require_trained_by_two_nodes(results, local_target, steps=_NODE_STEPS, attempts=1 + bool(dies))


@pytest.mark.long
@pytest.mark.usefixtures("prefect_server")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize("runner", [dask, ray], ids=["Dask", "Ray"])
def test_after_the_death_of_a_nodes_worker_all_nodes_begin_again(
    runner: Callable[[], TaskRunner], node: int, local_target: LocalTarget, tmp_path: Path
) -> None:
    search = tune.with_options(task_runner=runner())
    witness, killed = tmp_path / "witness", list[int]()
    killer = threading.Thread(target=kill_the_worker_of_a_node, args=(witness, node, killed))
    killer.start()
    results = search(
        "tests.trainables.grouped:Witnessed",
        {"witness": str(witness)},
        target=local_target,
        experiment="nodes",
        num_samples=1,
        stop={"step": 30},
        checkpoint=Cadence(every_steps=1),
        nodes_per_trial=2,
        max_concurrent_trials=1,
    )
    killer.join()
    assert killed
    [trial] = results.trials.values()
    assert (trial.status, trial.step) == ("completed", 30)
    assert 2 <= trial.attempt <= 3  # a task that its runner repeats ends at once


def kill_the_worker_of_a_node(witness: Path, node: int, killed: list[int]) -> None:
    until(lambda: any(each.step == 5 for each in acts_of(witness)), seconds=240, what=lambda: "a trial that trains")
    [trial] = {each.pid for each in acts_of(witness) if each.act == f"rank-{node}"}
    worker = worker_of(trial)
    assert worker != os.getpid()
    os.kill(worker, signal.SIGKILL)
    killed.append(worker)
