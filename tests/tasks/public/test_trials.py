"""The public task that runs one attempt of a trial, in real processes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prefect.logging import disable_run_logger

import prefect_tune as pt
from prefect_tune.core.experiment.trial_transitions import Status
from tests.tasks.public.conftest import Caller
from tests.trainables.moody import Moody

pytestmark = pytest.mark.usefixtures("no_prefect_server")


@pytest.fixture(autouse=True)
def _no_run_logger() -> Iterator[None]:
    with disable_run_logger():
        yield


def run_moody(tmp_path: Path, config: dict[str, Any] | None = None, **more: Any) -> pt.TrialState:
    options = {"target": str(tmp_path / "runs"), "stop": {"step": 4}, "checkpoint": pt.Cadence(every_steps=1), **more}
    return pt.run_trial.fn(Moody, config or {}, experiment="e", **options)


def test_a_trial_is_trained_to_its_end_and_returned_at_once_afterwards(caller: Caller, tmp_path: Path) -> None:
    state = run_moody(tmp_path, {"rate": 0.5})
    assert (state.status, state.step, state.metrics["loss"], state.attempts) == (Status.COMPLETED, 4, 0.25, 1)
    assert state.config == {"rate": 0.5}
    assert state.checkpoint is not None
    assert (state.checkpoint.step, state.checkpoint_steps) == (4, (1, 2, 3, 4))
    caller.start_run("later")
    assert run_moody(tmp_path, {"rate": 0.5}) == state
    further = run_moody(tmp_path, {"rate": 0.5}, stop={"step": 6})
    assert (further.step, further.attempts, further.recomputed_steps) == (6, 2, 0)


@pytest.mark.usefixtures("caller")
@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_a_misspelt_trainable_is_refused_before_there_is_an_experiment(tmp_path: Path, isolation: str) -> None:
    with pytest.raises(pt.InvalidInput, match=r"has no 'Mody'; did you mean 'Moody'\?"):
        pt.run_trial.fn("tests.trainables.moody:Mody", target=tmp_path / "runs", experiment="e", isolation=isolation)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("caller")
def test_a_paused_trial_is_trained_on(tmp_path: Path) -> None:
    options: dict[str, Any] = {"target": str(tmp_path / "runs"), "experiment": "e"}
    pt.sync_experiment_state.fn(**options, reports={1: {"count": 1}}, status="paused")
    state = run_moody(tmp_path, isolation="thread")
    assert (state.status, state.step, state.attempts) == (Status.COMPLETED, 4, 2)


def test_a_second_attempt_of_one_trial_in_one_flow_run_ends_the_first(caller: Caller, tmp_path: Path) -> None:
    """Both attempts run in one term: the attempt's number fences off the first one."""
    waiting = tmp_path / "waits"

    def train(_config: dict[str, Any]) -> None:
        checkpoint = tmp_path / "checkpoint"
        checkpoint.mkdir(exist_ok=True)
        pt.report({"first": 1}, checkpoint=pt.Checkpoint.from_directory(checkpoint))
        if pt.get_trial().attempt == 1:
            waiting.touch()
            while waiting.exists():
                time.sleep(0.05)
            pt.report({"second": 1})

    options: dict[str, Any] = {"target": str(tmp_path / "runs"), "experiment": "e", "isolation": "thread"}
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(pt.run_trial.fn, train, {}, **options)
        while not (waiting.exists() or first.done()):
            time.sleep(0.05)
        second = pt.run_trial.fn(train, {}, **options | {"stop": {"step": 2}})
        waiting.unlink()
        with pytest.raises(pt.Superseded, match="has begun attempt 2 or ended this one"):
            first.result()
    assert (second.status, second.attempts) == (Status.COMPLETED, 2)
    assert caller.experiment == "e"
