"""The CPUs and GPUs of each trial, and Prefect's concurrency limits applied to trials."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from prefect import tags
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate, GlobalConcurrencyLimitUpdate
from prefect.client.schemas.filters import TaskRunFilter, TaskRunFilterTags
from prefect.task_runners import ThreadPoolTaskRunner

import prefect_tune as pt
from prefect_tune.executors import trial_executor
from prefect_tune.executors.trial_executor import make_local_slots
from prefect_tune.parameters.search_plan import SearchPlan
from tests.fakes.trial_processes import wait_until
from tests.long_cases import long_after

TENANT = "tests.trainables.tenant:Tenant"


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs, named by `CUDA_VISIBLE_DEVICES` only."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def train_tenants(folder: Path, **options: Any) -> pt.Results:
    space = {"house": str(folder), "number": pt.grid_search([*range(3)]), **options.pop("config", {})}
    common: dict[str, Any] = {
        "target": str(folder / "target"),
        "experiment": "e",
        "metric": "loss",
        "num_samples": 1,
        "stop": {"step": 4},
        **({"resources_total": {"cpu": 8}} if "resources_per_trial" in options else {}),
    }
    return options.pop("flow", pt.tune)(TENANT, space, **{**common, **options})


def metric_values(results: pt.Results, metric: str) -> list[object]:
    assert results.errors == {}
    return [trial.metrics[metric] for trial in results.trials.values()]


@pytest.mark.long
@pytest.mark.usefixtures("no_prefect_server", "two_gpus")
def test_each_trial_has_a_gpu_of_its_own_and_a_process_stays_on_the_one_it_began_with(tmp_path: Path) -> None:
    results = train_tenants(tmp_path, resources_per_trial={"cpu": 2, "gpu": 1})
    assert (set(metric_values(results, "gpus")), set(metric_values(results, "threads"))) == ({"4", "7"}, {"2"})
    assert len(set(metric_values(results, "pid"))) < 3, "processes are kept, each for its GPU"


@pytest.mark.usefixtures("no_prefect_server", "two_gpus")
def test_parts_of_a_gpu_are_shared_and_all_of_them_belong_to_one(tmp_path: Path) -> None:
    shared = train_tenants(tmp_path, resources_per_trial={"gpu": 0.5}, config={"share": 2}, max_concurrent_trials=4)
    assert set(metric_values(shared, "gpus")) == {"4", "7"}
    whole = train_tenants(tmp_path, experiment="both", resources_per_trial={"gpu": 2})
    assert set(metric_values(whole, "gpus")) == {"4,7"}


@pytest.mark.parametrize(
    ("cpu_count", "options", "threads"),
    [
        (8, {}, "1"),
        (8, {"max_concurrent_trials": 2}, "4"),
        (8, {"max_concurrent_trials": 16}, "1"),
        (8, {"num_samples": 2}, "4"),
        (8, {"num_samples": 2, "max_concurrent_trials": 4}, "4"),
        (8, {"num_samples": -1}, "1"),
        (64, {"num_samples": 1}, ""),
        (8, {"samples_per_run": 2}, "1"),  # earlier runs may have left others
        (2, {"max_concurrent_trials": 1}, "2"),  # a container with a quota: libraries count the CPUs of its host
        (64, {"max_concurrent_trials": 1}, ""),
        (8, {"isolation": "thread"}, ""),
    ],
    ids=str,
)
def test_trials_that_request_no_resources_share_the_processors(
    cpu_count: int, options: dict[str, Any], threads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(trial_executor, "count_available_cpus", lambda: cpu_count)
    monkeypatch.setattr(trial_executor, "os", SimpleNamespace(cpu_count=lambda: 64, environ=os.environ))
    plan = SearchPlan(trainable=print, target="/nowhere", experiment="e", **options)
    slots = make_local_slots(plan)
    assert slots.count == options.get("max_concurrent_trials", cpu_count)
    assert {environment.get("OMP_NUM_THREADS", "") for environment in slots.environments or [{}]} == {threads}
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert not any(make_local_slots(plan).environments), "what the user has set stays set"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"resources_per_trial": {"cpu": 4, "gpu": 2}}, [{"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "2"}] * 2),
        ({"resources_per_trial": {"cpu": 4}}, [{"LOCAL_WORLD_SIZE": "3", "OMP_NUM_THREADS": "1"}] * 2),
        ({"resources_per_trial": {"cpu": 0, "gpu": 0.5}}, [{"LOCAL_WORLD_SIZE": "1"}] * 8),
        ({"max_concurrent_trials": 1}, [{"LOCAL_WORLD_SIZE": "3", "OMP_NUM_THREADS": "2"}]),
        ({"max_concurrent_trials": 2}, [{"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "2"}] * 2),
        ({"max_concurrent_trials": 4, "gpus": ""}, [{"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}] * 4),
        ({"processes_per_trial": 2, "max_concurrent_trials": 4}, [{"OMP_NUM_THREADS": "1"}] * 4),
    ],
    ids=str,
)
def test_a_trial_of_a_range_of_processes_has_as_many_as_its_slot_has_devices(
    options: dict[str, Any], expected: Sequence[Mapping[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", options.get("gpus", "0,1,2,3"))
    monkeypatch.setattr(trial_executor, "count_available_cpus", lambda: 8)
    options = {name: value for name, value in options.items() if name != "gpus"}
    plan = SearchPlan(trainable=print, target="/nowhere", experiment="e", **{"processes_per_trial": (1, 3), **options})
    slots = [dict(environment) for environment in make_local_slots(plan).environments]
    assert [{name: value for name, value in slot.items() if name != "CUDA_VISIBLE_DEVICES"} for slot in slots] == [
        *expected
    ]


@pytest.mark.long
@pytest.mark.usefixtures("no_prefect_server")
@pytest.mark.parametrize("options", [{}, {"max_concurrent_trials": 4}, {"resources_per_trial": {"cpu": 1}}], ids=str)
def test_no_more_trials_train_at_once_than_the_flows_task_runner_has_workers(
    tmp_path: Path, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    one_at_a_time = pt.tune.with_options(task_runner=ThreadPoolTaskRunner(max_workers=1))
    results = train_tenants(tmp_path, flow=one_at_a_time, **{"resources_total": None, **options})
    assert set(metric_values(results, "gpus")) == {"any"}, "they share one device"
    assert "slots: 1 trial at once on this machine (its task runner has max_workers=1)" in caplog.text


@pytest.mark.usefixtures("no_prefect_server", "two_gpus")
@pytest.mark.parametrize(
    ("options", "message"),
    long_after(
        3,
        [
            ({"resources_per_trial": {"gpu": 3}}, "needs 1 CPU and 3 GPUs, but this process may use 8 CPUs and 2 GPUs"),
            ({"resources_per_trial": {"cpu": 9}}, "needs 9 CPUs and 0 GPUs, but this process may use 8 CPUs"),
            ({"resources_per_trial": {"gpu": 1}, "resources_total": {"gpu": 0}}, "and 0 GPUs; if that is wrong"),
            ({"resources_per_trial": {"gpus": 1}}, "expected 'cpu' or 'gpu', found 'gpus'; did you mean 'gpu'"),
            ({"resources_per_trial": {"gpu": 1}, "resources_total": {"gpu": 0.5}}, "resources_total: expected whole"),
            ({"resources_per_trial": {"gpu": 1}, "isolation": "thread"}, "with isolation='thread' all trials share"),
            ({"resources_per_trial": {"gpu": 1}, "trials": "deployment"}, "pass trial_job_variables="),
            ({"trial_job_variables": {"cpu": 1}}, "requires trials='deployment'"),
        ],
    ),
)
def test_resources_that_are_not_there_are_refused_before_anything_is_written(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(pt.InvalidInput, match=message):
        train_tenants(tmp_path, **options)
    assert not (tmp_path / "target").exists()


def share_device(folder: Path, **options: Any) -> pt.Results:
    """Train two concurrent trials on one device, which fails if both use it at once."""
    return train_tenants(folder, config={"number": pt.grid_search([1, 2])}, max_concurrent_trials=2, **options)


@contextmanager
def creating_limits(*names: str, limit: int) -> Iterator[Callable[[int], None]]:
    """Create global concurrency limits; yield a function that changes them."""

    def change(to: int) -> None:
        with get_client(sync_client=True) as client:
            for name in names:
                client.update_global_concurrency_limit(name, GlobalConcurrencyLimitUpdate(limit=to))

    with get_client(sync_client=True) as client:
        for name in names:
            client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=limit))
        yield change
        for name in names:
            client.delete_global_concurrency_limit_by_name(name)


@pytest.mark.usefixtures("prefect_server")
def test_a_limit_that_is_not_there_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(pt.InvalidInput, match="Prefect has no global concurrency limit 'none-such'"):
        train_tenants(tmp_path, concurrency_limits=["none-such"])
    assert not (tmp_path / "target").exists()


@pytest.mark.usefixtures("prefect_server")
def test_trials_wait_while_a_limit_is_0_and_begin_when_it_is_raised(tmp_path: Path) -> None:
    name, tag = f"gpu-{uuid4().hex}", f"big-{uuid4().hex}"
    ways: Mapping[str, Mapping[str, Any]] = {name: {"concurrency_limits": [name]}, f"tag:{tag}": {"trial_tags": [tag]}}
    for number, (limit_name, options) in enumerate(ways.items()):
        with creating_limits(limit_name, limit=0) as change:
            raised = threading.Timer(1, change, args=[1])
            raised.start()
            results = share_device(tmp_path, experiment=f"e{number}", **options)
            raised.join()
        assert metric_values(results, "gpus") == ["any"] * 2
        assert [trial.attempt for trial in results.trials.values()] == [1, 1]


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize("limit", [0, 1])
def test_a_tag_of_the_caller_is_that_of_its_attempts_only_and_their_waits_end_with_the_search(
    tmp_path: Path, limit: int
) -> None:
    tag = f"big-{uuid4().hex}"
    with creating_limits(f"tag:{tag}", limit=limit), tags(tag):
        results = share_device(tmp_path, time_budget_seconds=None if limit else 1)
    assert [trial.attempt for trial in results.trials.values()] == [limit] * 2
    assert {str(trial.phase) for trial in results.trials.values()} == {"finished" if limit else "pending"}
    if not limit:
        return

    def read_names() -> set[str]:
        with get_client(sync_client=True) as client:
            tagged = TaskRunFilter(tags=TaskRunFilterTags(all_=[tag]))
            return {run.name for run in client.read_task_runs(task_run_filter=tagged)}

    expected = {f"train {trial} · attempt 1" for trial in results.trials}
    wait_until(lambda: read_names() == expected, seconds=60, what=lambda: str(read_names()))


@pytest.mark.deep
@pytest.mark.usefixtures("prefect_server")
@pytest.mark.timeout(900)
def test_dask_gives_trials_what_its_workers_declare(tmp_path: Path) -> None:
    runner = pytest.importorskip("prefect_dask").DaskTaskRunner(
        cluster_kwargs={"n_workers": 1, "threads_per_worker": 3, "resources": {"GPU": 1}, "dashboard_address": None}
    )
    search = pt.tune.with_options(task_runner=runner)
    space = {"house": str(tmp_path), "number": pt.grid_search([1, 2, 3])}  # with one device
    options: dict[str, Any] = {"target": str(tmp_path / "target"), "metric": "loss", "num_samples": 1}
    options |= {"stop": {"step": 8}, "max_concurrent_trials": 3}
    results = search(TENANT, space, experiment="one", resources_per_trial={"gpu": 1}, **options)
    assert metric_values(results, "gpus") == ["any"] * 3
    crowded = search(TENANT, space, experiment="all", **options)
    assert crowded.errors, "without it they use the device at once"
