"""PyTorch on several ranks: bit for bit as undisturbed after the death of any of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import prefect_tune as pt
from prefect_tune.testing import without_server
from tests.integrations.states import flat

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(900)]
torch = pytest.importorskip("torch")
STEPS = 12


@pytest.fixture(autouse=True)
def _without_server() -> Iterator[None]:
    with without_server():
        yield


def _example() -> Any:
    from examples.torch_ddp_digits import Digits

    return Digits


class Killed(_example()):  # type: ignore[misc]  # its base is known only with torch
    """The example, one rank of which is killed at one step of its first attempt."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.strike = config.get("strike")

    def step(self) -> dict[str, float]:
        if self.trial.attempt == 1 and self.strike == [self.trial.rank, self.trial.step]:
            os.kill(os.getpid(), signal.SIGKILL)
        return dict(super().step())


def trained(target: Path, ranks: int, strike: list[int] | None = None) -> tuple[pt.TrialResult, Mapping[str, Any]]:
    result = pt.durable_trainable(
        Killed,
        {"lr": 0.1, "width": 16, "strike": strike},
        target=str(target),
        experiment="e",
        stop={"step": STEPS},
        checkpoint=pt.Cadence(every_steps=5),
        processes_per_trial=ranks,
    )
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as directory:
        loaded = {
            path.parent.name: torch.load(path, weights_only=True, map_location="cpu")
            for path in Path(directory).rglob("*.pt")
        }
    generators = {name: [each["random"]["torch"], *each["random"]["cuda"]] for name, each in loaded.items()}
    return result, {name: flat([each["parts"], generators[name]]) for name, each in loaded.items()}


@pytest.mark.parametrize("ranks", [2])
def test_after_the_death_of_any_rank_the_state_of_each_is_bit_for_bit_as_undisturbed(
    ranks: int, tmp_path: Path
) -> None:
    _, undisturbed = trained(tmp_path / "undisturbed", ranks)
    assert len(undisturbed) == ranks
    for rank in range(ranks):
        for step in (2, 7):
            result, found = trained(tmp_path / f"{rank}-{step}", ranks, [rank, step])
            assert (result.status, result.step, result.attempts) == ("completed", STEPS, 2)
            assert found == undisturbed
