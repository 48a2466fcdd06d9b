"""Users' flows built from the public tasks, on a real server: retries, other runs, futures, stored results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prefect import flow, unmapped

import prefect_tune as pt
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.journal.journal import load
from prefect_tune.stores.posix_store import PosixStore
from tests.fakes.checkpoints import first_generation, write

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture
def place(tmp_path: Path) -> dict[str, Any]:
    return {"target": str(tmp_path / "runs"), "experiment": "own"}


def state_at(place: dict[str, Any]) -> Experiment:
    return load(PosixStore(Path(place["target"])), first_generation("own"), side_by_side=map)


def directory(tmp_path: Path, step: int) -> Path:
    return write(tmp_path / f"step-{step}", {"state": str(step).encode()})


def test_a_retry_of_the_flow_run_is_a_new_owner_and_continues(place: dict[str, Any], tmp_path: Path) -> None:
    trained: list[int] = []

    @flow(retries=1)
    def mine() -> None:
        found = pt.restore_checkpoint(**place)
        for step in range(found.step + 1 if found else 1, 4):
            trained.append(step)
            pt.save_checkpoint(directory(tmp_path, step), step=step, **place)
            if trained == [1, 2]:
                raise RuntimeError("on purpose")

    mine()
    state = state_at(place)
    assert trained == [1, 2, 3]
    assert (state.term, state.trial("trial").attempt, state.trial("trial").step) == (2, 2, 3)
    assert state.owner is not None
    assert state.owner.attempt == 2


def test_tasks_can_be_mapped_submitted_and_have_their_results_stored(place: dict[str, Any], tmp_path: Path) -> None:
    stored = pt.save_checkpoint.with_options(persist_result=True, result_serializer="json")
    synced = pt.sync_experiment_state.with_options(persist_result=True, result_serializer="pickle")
    block = pt.LocalTarget(path=place["target"])

    @flow
    def mine() -> tuple[list[pt.CommittedCheckpoint], pt.ExperimentState]:
        saved = stored.map(
            unmapped(directory(tmp_path, 1)), target=unmapped(block), experiment="own", trial=["a", "b"], step=1
        )
        ended = synced.submit(trial="a", status="completed", wait_for=saved, **place)
        return saved.result(), ended.result()

    saved, ended = mine()
    assert [(each.trial, each.step) for each in saved] == [("a", 1), ("b", 1)]
    assert {name: str(each.status) for name, each in ended.trials.items()} == {"a": "completed", "b": "running"}
    assert state_at(place).term == 1
