"""Dask and Ray on this machine, and which of their processes supervises a trial."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from prefect.task_runners import TaskRunner


def dask() -> TaskRunner:
    from prefect_dask.task_runners import DaskTaskRunner

    return DaskTaskRunner(cluster_kwargs={"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None})


def ray() -> TaskRunner:
    prefect_ray = pytest.importorskip("prefect_ray")  # pip install 'prefect-tune[ray]': a hundred megabytes
    os.environ.setdefault("PYTHONPATH", str(Path(__file__).parents[2]))  # its workers import the tests' trainables
    options = {"num_cpus": 2, "include_dashboard": False, "log_to_driver": False}
    return prefect_ray.RayTaskRunner("local", init_kwargs=options)  # and not a cluster that was left running


def worker_of(pid: int) -> int:
    """Return the process that supervises a trial: the parent of the one that it was forked from."""
    while Path(f"/proc/{pid}/comm").read_text().startswith("trial"):
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid
