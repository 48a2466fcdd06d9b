"""A target in memory, and calls of the public tasks by several flow runs; each flow run is a separate owner."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import prefect_tune as pt
from prefect_tune import journal_access, ownership
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.journal.journal import load_experiment
from prefect_tune.core.journal_events import Owner
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.tasks import checkpoints
from tests.fakes.artifacts import BUCKETS, Bucket, BucketTarget
from tests.fakes.checkpoints import first_generation, write_files

_task_runs = itertools.count()  # unique, unlike addresses of objects


@dataclass
class Caller:
    """Calls the public tasks as one flow run, without Prefect."""

    target: BucketTarget
    folder: Path
    patch: pytest.MonkeyPatch
    run: str = "first"
    run_count: int = 1
    task_run: str | None = None
    experiment: str = "e"

    @property
    def bucket(self) -> Bucket:
        return BUCKETS[self.target.name]

    def start_run(self, run: str, run_count: int = 1) -> Caller:
        """Make all later calls as another flow run, or as a retry of one."""
        self.run, self.run_count = run, run_count
        return self

    def use_store(self, store: ObjectStore) -> Caller:
        """Make the target use this store from now on."""
        BUCKETS[self.target.name] = store  # type: ignore[assignment]  # any store works
        return self

    def make_owner(self) -> Owner:
        return Owner(name=self.run, host="here", pid=1, flow_run=self.run, attempt=self.run_count)

    def write_directory(self, step: int, content: str = "") -> Path:
        files = {"weights": f"step {step}{content}".encode() * 100, "empty/nothing": b""}
        folder = self.folder / f"step-{step}-{content}"
        return folder if folder.exists() else write_files(folder, files)  # another thread may be saving the same step

    def save_checkpoint(self, step: int, content: str = "", **more: Any) -> pt.CommittedCheckpoint:
        self.task_run = None  # a new task run for each save
        return self.save_again(step, content, **more)

    def save_again(self, step: int, content: str = "", **more: Any) -> pt.CommittedCheckpoint:
        """Save as a retry of the last task run does."""
        self.task_run = self.task_run or f"{self.run}-{step}-{next(_task_runs)}"
        options = {"target": self.target, "experiment": self.experiment, "metrics": {"loss": 1 / step}, **more}
        return pt.save_checkpoint.fn(self.write_directory(step, content), step=step, **options)

    def restore_checkpoint(self, step: int | None = None, **more: Any) -> pt.RestoredCheckpoint | None:
        return pt.restore_checkpoint.fn(target=self.target, experiment=self.experiment, step=step, **more)

    def sync(self, **more: Any) -> pt.ExperimentState:
        return pt.sync_experiment_state.fn(target=self.target, experiment=self.experiment, **more)

    def delete_checkpoints(self, step: int, **more: Any) -> int:
        return pt.delete_checkpoint.fn(**{"target": self.target, "experiment": self.experiment, "step": step, **more})

    def load_state(self) -> Experiment:
        return load_experiment(self.bucket, first_generation(self.experiment))


@pytest.fixture
def caller(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Caller]:
    name = request.node.name
    BUCKETS[name] = Bucket()
    caller = Caller(BucketTarget(name=name), tmp_path, monkeypatch)
    monkeypatch.setattr(ownership, "make_run_owner", caller.make_owner)
    monkeypatch.setattr(checkpoints, "task_run", _TaskRun(caller))
    yield caller
    del BUCKETS[name]


@dataclass
class _TaskRun:
    """Replaces `prefect.runtime.task_run`."""

    caller: Caller

    @property
    def id(self) -> str | None:
        return self.caller.task_run


@pytest.fixture(autouse=True)
def _no_prefect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not set task runs to Crashed: no server knows these flow runs."""
    monkeypatch.setattr(journal_access, "mark_dead_attempts_crashed", lambda *_: None)
