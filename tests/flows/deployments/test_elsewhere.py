"""Searches whose trials train on other machines: deployments, Dask and Ray, several nodes; some are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from prefect.task_runners import TaskRunner

import prefect_tune as pt
from benchmarks import throughput
from benchmarks.cluster.clusters import dask_cluster
from benchmarks.cluster.measure import measure_recovery
from benchmarks.cluster.work import Outcome, Work
from prefect_tune.blocks import LocalTarget, S3Target
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.retention import Cadence
from prefect_tune.core.experiment.trial_transitions import Status
from prefect_tune.core.search.domains import grid_search
from prefect_tune.flows.tune import tune
from prefect_tune.testing import without_server
from tests.fakes.servers.postgres_server import is_postgres_installed, postgres_server
from tests.fakes.servers.tcp_proxy import TcpProxy
from tests.fakes.task_runners import dask, ray, worker_of
from tests.fakes.trial_processes import wait_until
from tests.flows.conftest import POOL, s3_at
from tests.flows.driver import Driver, Drivers
from tests.flows.training import experiment_at, require_trained_by_two_nodes
from tests.trainables.digits_table import curves
from tests.trainables.witness import acts_of

pytest.importorskip("torch")
if True:  # only with torch
    from tests.integrations.ranks.test_torch_ranks import CASES, KilledDDP, train_case
    from tests.integrations.ranks.test_torch_ranks import STEPS as RANK_STEPS


class SlowDDP(KilledDDP):
    """The example with DDP, whose steps leave time to end a machine."""

    def step(self) -> dict[str, float]:
        time.sleep(0.5)
        return super().step()


_BRIDGE, _NETWORK = "ptune0", "10.203.0"
_ROUTER = f"{_NETWORK}.1"


def _run_ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True)


@pytest.fixture
def network() -> Iterator[str]:
    """A network between machines; yields the address of this one in it."""
    if os.geteuid():
        pytest.skip("namespaces take root")
    try:
        _run_ip("link", "add", "name", _BRIDGE, "type", "bridge")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network between namespaces: {error}")
    try:
        _run_ip("addr", "add", f"{_ROUTER}/24", "dev", _BRIDGE)
        _run_ip("link", "set", _BRIDGE, "up")
        yield _ROUTER
    finally:
        _run_ip("link", "del", _BRIDGE)


class Machine:
    """A worker on a machine of its own."""

    def __init__(self, number: int, api: str, folder: Path) -> None:
        self.name = f"node-{number}"
        self._network = f"ptune-{number}"
        self._address = f"{_NETWORK}.{number + 2}"
        self._folder = folder
        self._environment = {
            **os.environ,
            "PREFECT_API_URL": api,
            "TMPDIR": str(folder / "own"),
            "PREFECT_HOME": str(folder / "own" / "prefect"),
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "PYTHONPATH": str(Path.cwd()),
            "GLOO_SOCKET_IFNAME": "eth0",  # gloo asks for the machine's name, which no one resolves here
            "NO_PROXY": "*",
        }

    def start(self) -> None:
        _run_ip("netns", "add", self._network)
        outside = f"veth-{self.name}"
        _run_ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", self._network)
        _run_ip("link", "set", outside, "master", _BRIDGE, "up")
        for args in (
            ("addr", "add", f"{self._address}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
            ("route", "add", "default", "via", _ROUTER),
        ):
            _run_ip("-n", self._network, *args)
        worker = f"{sys.executable} -m prefect worker start --pool {POOL} --limit 1"
        own_files = f"mount -t tmpfs tmpfs {self._folder}/own && mount -t tmpfs tmpfs /dev/shm && cd {self._folder}/own"
        inside = f"hostname {self.name} && {own_files} && exec {worker}"
        own = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts", "--ipc")
        with (self._folder / f"{self.name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                ["ip", "netns", "exec", self._network, *own, "sh", "-c", inside],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def lose_power(self) -> None:
        self._process.kill()  # the first process of the namespace: all others end with it
        self._process.wait()
        _run_ip("link", "del", f"veth-{self.name}")  # the network lasts until its last process has ended
        _run_ip("netns", "del", self._network)

    def log(self) -> str:
        return (self._folder / f"{self.name}.log").read_text(errors="replace")


@contextmanager
def machines(api: str, folder: Path) -> Iterator[list[Machine]]:
    (folder / "own").mkdir()  # where each machine mounts its own files
    machines = [Machine(number, api, folder) for number in range(2)]
    with ExitStack() as at_end:
        for machine in machines:
            machine.start()
            at_end.callback(machine.lose_power)
        yield machines


def _list_manifests(target: S3Target) -> list[str]:
    with target.open(timeout=timedelta(seconds=60)) as store:
        return [item.path for item in store.list("apart/") if item.path.endswith("/manifest.json")]


@pytest.mark.integrations
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("deployment")
@pytest.mark.parametrize("victim", [0, 1])
def test_two_machines_train_and_after_one_has_lost_its_power_they_go_on_bit_for_bit(
    victim: int, network: str, prefect_server: str, s3_port: int, tmp_path: Path
) -> None:
    with without_server():
        _, reference = train_case(tmp_path / "reference", "ddp", 2)
    api = urlsplit(prefect_server)
    with TcpProxy(s3_port, network) as store, TcpProxy(int(api.port or 0), network) as server:
        target = s3_at(s3_port).model_copy(update={"endpoint_url": store.url})
        target.save("apart", overwrite=True)
        with machines(f"{server.url}/api", tmp_path) as nodes:

            def restart_victim() -> None:
                wait_until(lambda: _list_manifests(target), seconds=300, what=nodes[victim].log)
                nodes[victim].lose_power()
                nodes[victim].start()

            thread = threading.Thread(target=restart_victim)
            thread.start()
            results = pt.tune(
                f"{SlowDDP.__module__}:{SlowDDP.__name__}",
                {"lr": 0.1, "width": 16},
                target="s3-target/apart",
                experiment="apart",
                num_samples=1,
                stop={"step": RANK_STEPS},
                checkpoint=pt.Cadence(every_steps=5),
                trials="deployment",
                nodes_per_trial=2,
            )
            thread.join()
        [trial] = results.trials.values()
        assert (trial.status, trial.step, trial.attempt) == ("completed", RANK_STEPS, 2), [node.log() for node in nodes]
        checkpoint = results.checkpoint(trial.id)
        assert checkpoint is not None
        with checkpoint.as_directory() as directory:
            assert CASES["ddp"][1](Path(directory)) == reference


# Trials on other machines: they outlive the search that started them, and the next run of it finds them.


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

    def count_steps(self) -> int:
        return sum(act.act == "trained" for act in acts_of(self._witness))

    def count_processes(self) -> int:
        return len({act.pid for act in acts_of(self._witness)})


@pytest.mark.long
@pytest.mark.usefixtures("prefect_server", "worker")
@pytest.mark.timeout(900)
def test_trials_that_outlive_their_search_are_found_by_the_next_one_and_not_run_twice(
    drivers: Drivers, local_target: LocalTarget, tmp_path: Path
) -> None:
    search = _Search(drivers, local_target, tmp_path, trials="deployment")
    killed = search.start()
    killed.wait_until(lambda: search.count_processes() == 2 and search.count_steps() > 4, seconds=240)
    killed.kill()
    before = search.count_steps()
    outcome = search.start().wait(seconds=200)
    assert outcome.get("trials") == {"00000": "completed", "00001": "completed"}, outcome
    trials = experiment_at(local_target, _NAME).trials
    assert [(trial.status, trial.step, trial.attempt) for trial in trials.values()] == [
        (Status.COMPLETED, _STEPS, 1)
    ] * 2
    assert before < search.count_steps() == 2 * _STEPS
    assert search.count_processes() == 2


# Trials on several nodes, each a flow run of a process worker: the nodes share the target only.


STEPS = 6


@pytest.mark.deep
@pytest.mark.usefixtures("prefect_server", "worker")
@pytest.mark.timeout(900)
def test_two_nodes_train_a_trial_and_after_the_death_of_a_rank_its_next_attempt(local_target: LocalTarget) -> None:
    results = tune(
        "tests.trainables.grouped:Sharded",
        {"rank": 3, "at": 5, "does": "die", "others": "hang"},
        target=local_target,
        experiment="nodes",
        num_samples=1,
        stop={"step": STEPS},
        checkpoint=Cadence(every_steps=2),
        trials="deployment",
        processes_per_trial=2,
        nodes_per_trial=2,
    )
    require_trained_by_two_nodes(results, local_target, steps=STEPS, attempts=2)


def test_what_nodes_cannot_be_is_refused_before_anything_is_written(local_target: LocalTarget) -> None:
    with without_server():
        with pytest.raises(InvalidInput, match="nodes_per_trial=2: expected trials='deployment'"):
            tune("tests.trainables.grouped:Sharded", {}, target=local_target, nodes_per_trial=2)
        options = {"target": local_target, "nodes_per_trial": 2, "min_nodes": 3, "trials": "deployment"}
        with pytest.raises(InvalidInput, match="min_nodes=3: expected at most nodes_per_trial, which is 2"):
            tune("tests.trainables.grouped:Sharded", {}, **options)
    assert not list(Path(local_target.path).glob("*"))


# The same search on Dask's and Ray's workers, some of which are killed.


_ROW_STEPS = 12
_NODE_STEPS = 6
_ROWS = [3, 5, 8]


def kill_first_worker(witness: Path, killed: list[int]) -> None:
    wait_until(lambda: len(acts_of(witness)) > 3, seconds=240, what=lambda: "a trial that trains")
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
    killer = threading.Thread(target=kill_first_worker, args=(witness, killed))
    killer.start()
    results = search(
        "tests.trainables.digits_table:DigitsTable",
        {"row": grid_search(_ROWS), "witness": str(witness), "step_seconds": 0.2},
        target=local_target,
        experiment="there",
        metric="error",
        num_samples=1,
        stop={"step": _ROW_STEPS},
        max_concurrent_trials=2,
        checkpoint=Cadence(every_steps=1),
    )
    killer.join()
    assert killed
    trials = experiment_at(local_target, "there").trials
    assert [(trial.status, trial.step) for trial in trials.values()] == [(Status.COMPLETED, _ROW_STEPS)] * len(_ROWS)
    assert sum(trial.attempt for trial in trials.values()) <= len(_ROWS) + 2, "a neighbour lost an attempt"
    assert results.best.metrics["error"] == min(curves()[row][_ROW_STEPS - 1] for row in _ROWS)
    trained = sum(act.act == "trained" for act in acts_of(witness))
    assert trained <= len(_ROWS) * _ROW_STEPS + 2


@pytest.mark.long
@pytest.mark.usefixtures("prefect_server")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "config", [{}, {"rank": 3, "at": 5, "does": "die", "others": "hang"}], ids=["undisturbed", "killed"]
)
@pytest.mark.parametrize("runner", [dask, ray], ids=["Dask", "Ray"])
def test_two_tasks_train_a_trial_as_two_nodes(
    runner: Callable[[], TaskRunner], config: dict[str, object], local_target: LocalTarget
) -> None:
    results = tune.with_options(task_runner=runner())(
        "tests.trainables.grouped:Sharded",
        config,
        target=local_target,
        experiment="nodes",
        num_samples=1,
        stop={"step": _NODE_STEPS},
        checkpoint=Cadence(every_steps=2),
        processes_per_trial=2,
        nodes_per_trial=2,
        max_concurrent_trials=1,
    )
    require_trained_by_two_nodes(results, local_target, steps=_NODE_STEPS, attempts=1 + bool(config))


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
    killer = threading.Thread(target=kill_worker_of_node, args=(witness, node, killed))
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


def kill_worker_of_node(witness: Path, node: int, killed: list[int]) -> None:
    wait_until(lambda: any(act.step == 5 for act in acts_of(witness)), seconds=240, what=lambda: "a trial that trains")
    [trial] = {act.pid for act in acts_of(witness) if act.act == f"rank-{node}"}
    worker = worker_of(trial)
    assert worker != os.getpid()
    os.kill(worker, signal.SIGKILL)
    killed.append(worker)


# Many concurrent trials on Dask workers, with a Prefect server on PostgreSQL; a worker and a machine are killed.


_TRIALS, _MAX_CONCURRENT, _CLUSTER_STEPS, _SAVE_INTERVAL = 100, 16, 10, 5


@pytest.fixture
def search_environment(tmp_path: Path) -> Iterator[Mapping[str, str]]:
    """The environment of a process that searches, with a Prefect server on PostgreSQL."""
    if not is_postgres_installed():
        pytest.skip("apt-get install postgresql")
    if os.geteuid():
        pytest.skip("control groups take root")
    with postgres_server() as url:
        settings = {**throughput.make_environment(tmp_path / "prefect"), "PREFECT_API_DATABASE_CONNECTION_URL": url}
        with throughput.prefect_server(sys.executable, settings) as served:
            yield served.environment


@pytest.mark.deep
@pytest.mark.timeout(1800)
def test_a_killed_worker_and_a_killed_machine_lose_nothing_of_a_search_on_a_cluster(
    search_environment: Mapping[str, str], tmp_path: Path
) -> None:
    """The killed machine runs the search and Dask's scheduler."""
    folder = tmp_path / "search"
    folder.mkdir()
    work = Work(_TRIALS, _MAX_CONCURRENT, _CLUSTER_STEPS, 0.2, _SAVE_INTERVAL, str(folder))
    with dask_cluster(search_environment, tmp_path) as cluster:
        result = measure_recovery(cluster, work)
    committed = _TRIALS * _CLUSTER_STEPS // _SAVE_INTERVAL
    assert result.outcome == Outcome(complete=_TRIALS, reported=_TRIALS, checkpoints=committed, unreadable=0)
    assert result.max_repeats <= 3, "two kills interrupt a step twice"
    # A worker has a quarter of the trials, the machine all; each repeats what it trained since its newest checkpoint.
    assert result.trained <= _TRIALS * _CLUSTER_STEPS + (_MAX_CONCURRENT // 4 + _MAX_CONCURRENT) * _SAVE_INTERVAL
