"""Processes that frameworks start join the trial as ranks, or one clear error comes before training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import prefect_tune as pt
from prefect_tune.testing import without_server
from tests.integrations.ranks.several_ranks import fit_lightning, launch_fabric, launch_ranks

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(900)]
pytest.importorskip("torch")
if True:  # only with torch
    from tests.integrations.ranks.test_torch_ranks import read_ddp_state


@pytest.fixture(autouse=True)
def _without_server() -> Iterator[None]:
    with without_server():
        yield


def train_trial(target: Path, trainable: Any, config: dict[str, object] | None = None) -> pt.TrialResult:
    return pt.durable_trainable(trainable, config or {}, target=str(target), experiment="e")


@pytest.mark.parametrize("callback", [True, False])
@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_fork", "ddp"])
def test_processes_that_lightning_starts_train_the_trial(strategy: str, callback: bool, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    result = train_trial(tmp_path, fit_lightning, {"strategy": strategy, "callback": callback})
    assert (result.status, result.step, result.attempts) == ("completed", 4, 1), result
    assert (result.checkpoint is not None) == callback


def test_processes_that_accelerate_starts_train_the_trial(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    result = train_trial(tmp_path, launch_ranks)
    assert (result.status, result.step, result.attempts) == ("completed", 4, 1), result


def test_a_launcher_that_starts_the_program_again_starts_a_rank_of_the_trial(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    result = train_trial(tmp_path, launch_fabric)
    assert (result.status, result.step, result.attempts, result.metrics) == ("completed", 1, 1, {"rank": 0}), result


def test_after_the_death_of_any_rank_of_torchrun_the_state_of_each_is_bit_for_bit_as_undisturbed(
    tmp_path: Path,
) -> None:
    from tests.integrations.ranks.struck_program import train

    def train_and_read_state(name: str, strike: list[int] | None) -> tuple[int, Mapping[str, Any]]:
        config = {"lr": 0.1, "width": 16, "strike": strike}
        result = pt.durable_trainable(train, config, target=str(tmp_path / name), experiment="e", stop={"step": 12})
        assert (result.status, result.step) == ("completed", 12), result
        assert result.checkpoint is not None
        with result.checkpoint.as_directory() as directory:
            return result.attempts, read_ddp_state(Path(directory))

    attempts, undisturbed = train_and_read_state("undisturbed", None)
    assert (attempts, len(undisturbed)) == (1, 2)
    for rank in range(2):
        assert train_and_read_state(f"killed-{rank}", [rank, 7]) == (2, undisturbed)
