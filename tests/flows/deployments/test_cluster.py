"""Many concurrent trials on Dask workers, with a Prefect server on PostgreSQL; a worker and a machine are killed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from benchmarks import throughput
from benchmarks.cluster.clusters import dask_cluster
from benchmarks.cluster.measure import disturbed
from benchmarks.cluster.work import Outcome, Work
from tests.fakes.servers.postgres_server import is_installed, postgres_server

_TRIALS, _AT_ONCE, _STEPS, _SAVE_EVERY = 100, 16, 10, 5


@pytest.fixture
def environment_of_a_search(tmp_path: Path) -> Iterator[Mapping[str, str]]:
    """The environment of a process that searches, with a Prefect server on PostgreSQL."""
    if not is_installed():
        pytest.skip("apt-get install postgresql")
    if os.geteuid():
        pytest.skip("control groups take root")
    with postgres_server() as url:
        settings = {**throughput.surroundings(tmp_path / "prefect"), "PREFECT_API_DATABASE_CONNECTION_URL": url}
        with throughput.prefect_server(sys.executable, settings) as served:
            yield served.environment


@pytest.mark.deep
@pytest.mark.timeout(1800)
def test_a_killed_worker_and_a_killed_machine_lose_nothing_of_a_search_on_a_cluster(
    environment_of_a_search: Mapping[str, str], tmp_path: Path
) -> None:
    """The killed machine runs the search and Dask's scheduler."""
    folder = tmp_path / "search"
    folder.mkdir()
    work = Work(_TRIALS, _AT_ONCE, _STEPS, 0.2, _SAVE_EVERY, str(folder))
    with dask_cluster(environment_of_a_search, tmp_path) as cluster:
        found = disturbed(cluster, work)
    committed = _TRIALS * _STEPS // _SAVE_EVERY
    assert found.outcome == Outcome(complete=_TRIALS, reported=_TRIALS, checkpoints=committed, unreadable=0)
    assert found.most_of_one <= 3, "two kills interrupt a step twice"
    # A worker has a quarter of the trials, the machine all; each repeats what it trained since its newest checkpoint.
    assert found.trained <= _TRIALS * _STEPS + (_AT_ONCE // 4 + _AT_ONCE) * _SAVE_EVERY
