"""Calls without an experiment name in one flow run: each has an experiment, which a repetition of it finds again."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.runtime import flow_run

import prefect_tune as pt
from prefect_tune.core.errors import InvalidInput
from tests.fakes.trial_processes import wait_until
from tests.flows.resuming import unnamed_run
from tests.flows.resuming.unnamed_run import SIZES, two_searches
from tests.trainables.witness import acts_of

pytestmark = pytest.mark.usefixtures("prefect_server")


def report_loss(config: Mapping[str, Any]) -> None:
    pt.report({"loss": float(config["data"])})


def run_search(folder: Path, data: int = 1, trainable: Callable[[Mapping[str, Any]], None] = report_loss) -> pt.Results:
    options: dict[str, Any] = {"metric": "loss", "num_samples": 1, "isolation": "thread"}
    return pt.tune(trainable, {"data": data}, target=str(folder), **options)


def loss_of(results: pt.Results) -> float:
    (trial,) = results.trials.values()
    return float(trial.metrics["loss"])


def experiment_names(folder: Path) -> set[str]:
    return {path.parts[-4] for path in folder.glob("*/1/journal/0000000001.json")}


def test_the_first_call_has_the_id_of_the_run_and_all_calls_have_experiments_of_their_own(tmp_path: Path) -> None:
    @flow
    def run_searches() -> tuple[str, list[float], str]:
        results = [run_search(tmp_path, data) for data in (1, 2, 3)]
        training = pt.durable_trainable(report_loss, {"data": 4}, target=str(tmp_path), isolation="thread")
        assert training.metrics == {"loss": 4}
        assert len({result.experiment.name for result in results} | {training.experiment}) == 4
        return results[0].experiment.name, [loss_of(result) for result in results], str(flow_run.id)

    first, losses, run = run_searches()
    assert (first, losses) == (run, [1, 2, 3])
    assert len(experiment_names(tmp_path)) == 4


def test_calls_by_tasks_are_found_again_when_the_flow_is_retried(tmp_path: Path) -> None:
    tries: list[dict[float, str]] = []

    @task
    def search_once(data: int) -> pt.Results:
        return run_search(tmp_path, data)

    @flow(retries=1)
    def run_searches() -> None:
        order = [1, 2, 3] if not tries else [3, 1, 2]  # as threads may run them
        results = [future.result() for future in search_once.map(order)]
        tries.append({loss_of(result): result.experiment.name for result in results})
        if len(tries) == 1:
            raise ConnectionError

    run_searches()
    assert tries[0] == tries[1]
    assert set(tries[0]) == {1, 2, 3}
    assert len(experiment_names(tmp_path)) == 3


@pytest.mark.long
def test_a_task_that_is_retried_finds_its_experiment_and_may_call_twice(tmp_path: Path) -> None:
    tries: list[list[str]] = []

    @task(retries=1)
    def search_once() -> None:
        tries.append([run_search(tmp_path, data).experiment.name for data in (1, 2)])
        if len(tries) == 1:
            raise ConnectionError

    @flow
    def call_twice() -> None:
        search_once()
        search_once()

    call_twice()
    assert tries[0] == tries[1]
    assert len({name for names in tries for name in names}) == len(experiment_names(tmp_path)) == 4


def test_a_retried_task_without_a_flow_finds_its_experiment(tmp_path: Path) -> None:
    names: list[str] = []

    @task(retries=1)
    def search_once() -> None:
        names.append(run_search(tmp_path).experiment.name)
        if len(names) == 1:
            raise ConnectionError

    search_once()
    assert names[0] == names[1]


_is_running, _may_end = threading.Event(), threading.Event()


def wait_and_report(config: Mapping[str, Any]) -> None:
    _is_running.set()
    assert _may_end.wait(120)
    report_loss(config)


def test_calls_at_the_same_time_that_only_their_order_tells_apart_are_refused(tmp_path: Path) -> None:
    def search_second() -> None:
        assert _is_running.wait(120)
        try:
            run_search(tmp_path, 1, trainable=wait_and_report)
        finally:
            _may_end.set()

    @flow
    async def run_both() -> Sequence[Any]:
        first = partial(run_search, tmp_path, 1, trainable=wait_and_report)
        return await asyncio.gather(asyncio.to_thread(first), asyncio.to_thread(search_second), return_exceptions=True)

    results, error = asyncio.run(run_both())
    assert isinstance(error, InvalidInput)
    assert "Pass experiment=" in str(error)
    assert experiment_names(tmp_path) == {results.experiment.name}


def _search_with_closure(folder: Path, data: str) -> pt.Results:
    """Search with a trainable that has the data in its closure."""

    def train(config: Mapping[str, Any]) -> None:
        pt.report({"loss": 0.0, "data": data, "space": str(sorted(config))})

    options: dict[str, Any] = {"metric": "loss", "num_samples": 1, "isolation": "thread"}
    return pt.tune(train, {"rate": pt.uniform(0, 1)}, target=str(folder), **options)


def test_a_retry_that_calls_in_another_order_finds_the_experiment_of_each_call(tmp_path: Path) -> None:
    tries: list[dict[str, str]] = []

    @flow(retries=1)
    def run_searches() -> None:
        order = ["small", "large"] if not tries else ["new", "large", "small"]
        tries.append({data: _search_with_closure(tmp_path, data).experiment.name for data in order})
        if len(tries) == 1:
            raise ConnectionError

    run_searches()
    first, second = tries
    assert {data: second[data] for data in first} == first
    assert len(experiment_names(tmp_path)) == 3


def _report_and_fail(config: Mapping[str, Any]) -> None:
    pt.report({"loss": float(config["data"])})
    raise ConnectionError


def test_a_retry_whose_first_call_is_another_one_does_not_take_over_an_unfinished_experiment(tmp_path: Path) -> None:
    @flow(retries=1)
    def run_searches() -> None:
        data = 1 if flow_run.run_count == 1 else 2
        run_search(tmp_path, data, _report_and_fail)

    with pytest.raises(InvalidInput, match=r"an earlier try of this run began '.*' by a call without a name.*pass"):
        run_searches()
    assert len(experiment_names(tmp_path)) == 1


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_run_that_is_killed_and_retried_by_another_process_finds_the_experiment_of_each_call(
    prefect_server: str, tmp_path: Path
) -> None:
    """With other hash seeds; the second process calls in another order, so that the interrupted search comes first."""
    with get_client(sync_client=True) as client:
        run = client.create_flow_run(two_searches, parameters={"folder": str(tmp_path), "sizes": list(SIZES)}).id
    command = [sys.executable, "-m", unnamed_run.__name__, str(run), str(tmp_path)]
    environment = {**os.environ, "PREFECT_API_URL": prefect_server}

    with (tmp_path / "log").open("wb") as log:
        first = subprocess.Popen([*command, *SIZES], env={**environment, "PYTHONHASHSEED": "1"}, stdout=log, stderr=log)
    try:
        wait_until(
            lambda: "held" in {act.act for act in acts_of(tmp_path / "witness-large")},
            seconds=120,
            what=(tmp_path / "log").read_text,
        )
    finally:
        first.kill()
        first.wait()
    before = {path.name: path.read_text() for path in tmp_path.glob("experiment-*")}
    (tmp_path / "gate").touch()

    second = subprocess.run(
        [*command, *reversed(SIZES)],
        env={**environment, "PYTHONHASHSEED": "2"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert second.returncode == 0, second.stderr
    assert before == {"experiment-small": (tmp_path / "experiment-small").read_text()}
    assert len(experiment_names(tmp_path / "runs")) == 2
    assert [act.step for act in acts_of(tmp_path / "witness-small") if act.act == "begin"] == [1]
    assert [act.step for act in acts_of(tmp_path / "witness-large") if act.act == "begin"] == [1, 2]
