"""Users' flows built from the public tasks, on a real server: refused requests, retries, futures, stored results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from prefect import flow, unmapped

import prefect_tune as pt
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.journal.journal import load_experiment
from prefect_tune.core.storage.object_store import Buffer, ListedObject
from prefect_tune.stores.posix_store import PosixStore
from tests.fakes.artifacts import BUCKETS, Bucket, BucketTarget
from tests.fakes.checkpoints import first_generation, write_files

pytestmark = pytest.mark.usefixtures("prefect_server")


class RefusingBucket(Bucket):
    """Refuses the next `refusals` requests, like a store whose credentials have expired."""

    def __init__(self) -> None:
        super().__init__()
        self.refusals = 0
        self.refused = 0

    def read(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        self._answer()
        return super().read(path, offset=offset, length=length)

    def list(self, prefix: str, *, after: str = "") -> Sequence[ListedObject]:
        self._answer()
        return super().list(prefix, after=after)

    def create(self, path: str, data: Buffer) -> None:
        self._answer()
        super().create(path, data)

    def put(self, path: str, data: Buffer) -> None:
        self._answer()
        super().put(path, data)

    def _answer(self) -> None:
        if self.refusals:
            self.refusals -= 1
            self.refused += 1
            raise pt.StoreRefused("the token has expired")


@pytest.fixture
def bucket(request: pytest.FixtureRequest) -> Iterator[RefusingBucket]:
    BUCKETS[request.node.name] = bucket = RefusingBucket()
    yield bucket
    del BUCKETS[request.node.name]


@pytest.fixture
def options(request: pytest.FixtureRequest, bucket: RefusingBucket) -> dict[str, Any]:
    del bucket
    return {"target": BucketTarget(name=request.node.name), "experiment": "e"}


def without_delay(task: Any) -> Any:
    """Return the task with retries without delay."""
    return task.with_options(retry_delay_seconds=0, retry_jitter_factor=None)


def test_what_was_trained_is_saved_after_refusals_have_passed(
    tmp_path: Path, bucket: RefusingBucket, options: dict[str, Any]
) -> None:
    checkpoint_dir = write_files(tmp_path / "a", {"w": b"1"})

    @flow
    def train() -> pt.ExperimentState:
        pt.restore_experiment_state(**options)
        for act in (
            lambda: without_delay(pt.save_checkpoint)(checkpoint_dir, step=1, **options),
            lambda: without_delay(pt.save_checkpoint)(checkpoint_dir, step=2, **options),
            lambda: without_delay(pt.delete_checkpoint)(step=2, **options),
            lambda: without_delay(pt.sync_experiment_state)(reports={2: {"loss": 0.5}}, **options),
        ):
            bucket.refusals = 3
            act()
        return pt.restore_experiment_state(**options)

    trial = train().trials["trial"]
    assert (trial.step, trial.checkpoint_steps, trial.metrics) == (2, (1,), {"loss": 0.5})
    assert bucket.refused == 4 * 3


def test_a_target_that_refuses_from_the_beginning_is_an_error_at_once(
    bucket: RefusingBucket, options: dict[str, Any]
) -> None:
    bucket.refusals = 100

    @flow
    def acquire() -> None:
        without_delay(pt.restore_experiment_state)(**options)

    @flow
    def restore() -> None:
        without_delay(pt.restore_checkpoint)(**options)

    for begins in (acquire, restore):
        with pytest.raises(pt.StoreRefused, match="the token has expired"):
            begins()
    assert bucket.refused == 2


def test_a_task_runner_of_other_processes_is_refused_on_a_target_for_one(tmp_path: Path) -> None:
    from prefect.task_runners import ProcessPoolTaskRunner

    target = pt.FsspecTarget(location=f"memory://{tmp_path.name}")

    @flow(task_runner=ProcessPoolTaskRunner(max_workers=1))  # type: ignore[arg-type]  # a runner of results of any type
    def train() -> None:
        pt.restore_experiment_state(target=target, experiment="e")

    with pytest.raises(pt.InvalidInput, match=r"task runner: ProcessPoolTaskRunner, at memory://.*ONE RUNNER ONLY"):
        train()


# Retries of the flow run, futures and stored results.


@pytest.fixture
def local_options(tmp_path: Path) -> dict[str, Any]:
    return {"target": str(tmp_path / "runs"), "experiment": "own"}


def load_state(local_options: dict[str, Any]) -> Experiment:
    return load_experiment(PosixStore(Path(local_options["target"])), first_generation("own"))


def write_directory(tmp_path: Path, step: int) -> Path:
    return write_files(tmp_path / f"step-{step}", {"state": str(step).encode()})


def test_a_retry_of_the_flow_run_is_a_new_owner_and_continues(local_options: dict[str, Any], tmp_path: Path) -> None:
    trained: list[int] = []

    @flow(retries=1)
    def train() -> None:
        restored = pt.restore_checkpoint(**local_options)
        for step in range(restored.step + 1 if restored else 1, 4):
            trained.append(step)
            pt.save_checkpoint(write_directory(tmp_path, step), step=step, **local_options)
            if trained == [1, 2]:
                raise RuntimeError("on purpose")

    train()
    state = load_state(local_options)
    assert trained == [1, 2, 3]
    assert (state.term, state.trial("trial").attempt, state.trial("trial").step) == (2, 2, 3)
    assert state.owner is not None
    assert state.owner.attempt == 2


def test_tasks_can_be_mapped_submitted_and_have_their_results_stored(
    local_options: dict[str, Any], tmp_path: Path
) -> None:
    stored = pt.save_checkpoint.with_options(persist_result=True, result_serializer="json")
    synced = pt.sync_experiment_state.with_options(persist_result=True, result_serializer="pickle")
    block = pt.LocalTarget(path=local_options["target"])

    @flow
    def train() -> tuple[list[pt.CommittedCheckpoint], pt.ExperimentState]:
        saved = stored.map(
            unmapped(write_directory(tmp_path, 1)), target=unmapped(block), experiment="own", trial=["a", "b"], step=1
        )
        ended = synced.submit(trial="a", status="completed", wait_for=saved, **local_options)
        return saved.result(), ended.result()

    saved, ended = train()
    assert [(checkpoint.trial, checkpoint.step) for checkpoint in saved] == [("a", 1), ("b", 1)]
    assert {name: str(trial.status) for name, trial in ended.trials.items()} == {"a": "completed", "b": "running"}
    assert load_state(local_options).term == 1
