"""Lightning and Hugging Face's Trainer on two ranks: bit for bit as undisturbed after the death of any of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import prefect_tune as pt
from tests.integrations.ranks.several_ranks import train_and_kill
from tests.integrations.states import to_plain

pytestmark = [pytest.mark.usefixtures("no_prefect_server"), pytest.mark.integrations, pytest.mark.timeout(1800)]
torch = pytest.importorskip("torch")


def read_lightning_state(directory: Path) -> Mapping[str, Any]:
    from tests.integrations.test_lightning import read_state

    other = torch.load(directory / "random-1.pt", weights_only=True)
    return {**read_state(directory), "1": to_plain(other["torch"])}


def read_transformers_state(directory: Path) -> Mapping[str, Any]:
    from tests.integrations.test_transformers import safe_numpy

    states = {name: torch.load(directory / name, weights_only=True) for name in ("optimizer.pt", "scheduler.pt")}
    with safe_numpy():
        random = [torch.load(directory / f"rng_state_{rank}.pth", weights_only=True)["cpu"] for rank in range(2)]
    return {**to_plain(states), "random": to_plain(random), "weights": (directory / "model.safetensors").read_bytes()}


CASES: Mapping[str, tuple[str, Mapping[str, object], Callable[[Path], Mapping[str, Any]], int]] = {
    "lightning": ("lightning_digits", {"lr": 0.01, "width": 16}, read_lightning_state, 24),
    "transformers": ("transformers_digits", {"lr": 0.003, "weight_decay": 0.01}, read_transformers_state, 24),
}


def train_case(
    target: Path, framework: str, strike: list[int] | None = None
) -> tuple[pt.TrialResult, Mapping[str, Any]]:
    example, config, read_state, steps = CASES[framework]
    result = pt.durable_trainable(
        train_and_kill,
        {**config, "example": example, "strike": strike},
        target=str(target),
        experiment="e",
        stop={"step": steps // (3 if framework == "lightning" else 4)},
        checkpoint=pt.Cadence(every_steps=2),
        processes_per_trial=2,
    )
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as directory:
        return result, read_state(Path(directory))


@pytest.mark.parametrize("framework", CASES)
def test_after_the_death_of_any_rank_the_state_of_each_is_bit_for_bit_as_undisturbed(
    framework: str, tmp_path: Path
) -> None:
    pytest.importorskip(framework)
    _, undisturbed = train_case(tmp_path / "undisturbed", framework)
    for rank, step in ((0, 8), (1, 13)):
        result, state = train_case(tmp_path / f"{rank}-{step}", framework, [rank, step])
        assert (result.status, result.attempts) == ("completed", 2), result
        assert state == undisturbed
