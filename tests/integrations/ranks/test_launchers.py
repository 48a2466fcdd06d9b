"""What frameworks start by themselves: processes that join the trial as ranks, or one clear error before training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import prefect_tune as pt
from prefect_tune.testing import without_server
from tests.integrations.ranks.several_ranks import fabric, launches_ranks, trainer

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(900)]
pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def _without_server() -> Iterator[None]:
    with without_server():
        yield


def trained(target: Path, trainable: Any, config: dict[str, object] | None = None) -> pt.TrialResult:
    return pt.durable_trainable(trainable, config or {}, target=str(target), experiment="e")


@pytest.mark.parametrize("callback", [True, False])
@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_fork", "ddp"])
def test_processes_that_lightning_starts_train_the_trial(strategy: str, callback: bool, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    result = trained(tmp_path, trainer, {"strategy": strategy, "callback": callback})
    assert (result.status, result.step, result.attempts) == ("completed", 4, 1), result
    assert (result.checkpoint is not None) == callback


def test_processes_that_accelerate_starts_train_the_trial(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    result = trained(tmp_path, launches_ranks)
    assert (result.status, result.step, result.attempts) == ("completed", 4, 1), result


def test_a_launcher_that_starts_the_program_again_starts_a_rank_of_the_trial(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    result = trained(tmp_path, fabric)
    assert (result.status, result.step, result.attempts, result.metrics) == ("completed", 1, 1, {"rank": 0}), result
