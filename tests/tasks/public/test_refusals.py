"""A target that refuses requests: the first request, and requests in the middle of a user's flow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from prefect import flow

import prefect_tune as pt
from prefect_tune.core.storage.object_store import Buffer, Listed
from tests.fakes.artifacts import BUCKETS, Bucket, BucketTarget
from tests.fakes.checkpoints import write

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

    def list(self, prefix: str, *, after: str = "") -> Sequence[Listed]:
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
    BUCKETS[request.node.name] = found = RefusingBucket()
    yield found
    del BUCKETS[request.node.name]


@pytest.fixture
def place(request: pytest.FixtureRequest, bucket: RefusingBucket) -> dict[str, Any]:
    del bucket
    return {"target": BucketTarget(name=request.node.name), "experiment": "e"}


def at_once(task: Any) -> Any:
    """Return the task with retries without delay."""
    return task.with_options(retry_delay_seconds=0, retry_jitter_factor=None)


@pytest.mark.parametrize("count", [1, 3])
def test_what_was_trained_is_saved_after_a_refusal_has_passed(
    tmp_path: Path, bucket: RefusingBucket, place: dict[str, Any], count: int
) -> None:
    directory = write(tmp_path / "a", {"w": b"1"})

    @flow
    def trains() -> pt.ExperimentState:
        pt.restore_experiment_state(**place)
        for act in (
            lambda: at_once(pt.save_checkpoint)(directory, step=1, **place),
            lambda: at_once(pt.save_checkpoint)(directory, step=2, **place),
            lambda: at_once(pt.delete_checkpoint)(step=2, **place),
            lambda: at_once(pt.sync_experiment_state)(reports={2: {"loss": 0.5}}, **place),
        ):
            bucket.refusals = count
            act()
        return pt.restore_experiment_state(**place)

    trial = trains().trials["trial"]
    assert (trial.step, trial.checkpoint_steps, trial.metrics) == (2, (1,), {"loss": 0.5})
    assert bucket.refused == 4 * count


def test_a_target_that_refuses_from_the_beginning_is_an_error_at_once(
    bucket: RefusingBucket, place: dict[str, Any]
) -> None:
    bucket.refusals = 100

    @flow
    def opens() -> None:
        at_once(pt.restore_experiment_state)(**place)

    @flow
    def restores() -> None:
        at_once(pt.restore_checkpoint)(**place)

    for begins in (opens, restores):
        with pytest.raises(pt.StoreRefused, match="the token has expired"):
            begins()
    assert bucket.refused == 2


def test_a_task_runner_of_other_processes_is_refused_on_a_target_for_one(tmp_path: Path) -> None:
    from prefect.task_runners import ProcessPoolTaskRunner

    target = pt.FsspecTarget(location=f"memory://{tmp_path.name}")

    @flow(task_runner=ProcessPoolTaskRunner(max_workers=1))  # type: ignore[arg-type]  # a runner of results of any type
    def trains() -> None:
        pt.restore_experiment_state(target=target, experiment="e")

    with pytest.raises(pt.InvalidInput, match=r"task runner: ProcessPoolTaskRunner, at memory://.*ONE RUNNER ONLY"):
        trains()
