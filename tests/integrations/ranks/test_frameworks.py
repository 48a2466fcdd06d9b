"""Lightning and Hugging Face's Trainer on two ranks: bit for bit as undisturbed after the death of any of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import prefect_tune as pt
from tests.integrations.ranks.several_ranks import killed
from tests.integrations.states import flat

pytestmark = [pytest.mark.usefixtures("no_prefect_server"), pytest.mark.integrations, pytest.mark.timeout(1800)]
torch = pytest.importorskip("torch")


def of_lightning(directory: Path) -> Mapping[str, Any]:
    saved = torch.load(directory / "checkpoint.ckpt", weights_only=True)
    names = ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch")
    (callback,) = saved["callbacks"].values()
    loops = saved["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    other = torch.load(directory / "random-1.pt", weights_only=True)
    return flat(
        {**{name: saved[name] for name in names}, "data": loops, "0": callback["random"]["torch"], "1": other["torch"]}
    )


def of_transformers(directory: Path) -> Mapping[str, Any]:
    from tests.integrations.test_transformers import safe_numpy

    states = {name: torch.load(directory / name, weights_only=True) for name in ("optimizer.pt", "scheduler.pt")}
    with safe_numpy():
        random = [torch.load(directory / f"rng_state_{rank}.pth", weights_only=True)["cpu"] for rank in range(2)]
    return {**flat(states), "random": flat(random), "weights": (directory / "model.safetensors").read_bytes()}


CASES: Mapping[str, tuple[str, Mapping[str, object], Callable[[Path], Mapping[str, Any]], int]] = {
    "lightning": ("lightning_digits", {"lr": 0.01, "width": 16}, of_lightning, 24),
    "transformers": ("transformers_digits", {"lr": 0.003, "weight_decay": 0.01}, of_transformers, 24),
}


def trained(target: Path, framework: str, strike: list[int] | None = None) -> tuple[pt.TrialResult, Mapping[str, Any]]:
    example, config, learned, steps = CASES[framework]
    result = pt.durable_trainable(
        killed,
        {**config, "example": example, "strike": strike},
        target=str(target),
        experiment="e",
        stop={"step": steps // (3 if framework == "lightning" else 4)},
        checkpoint=pt.Cadence(every_steps=2),
        processes_per_trial=2,
    )
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as directory:
        return result, learned(Path(directory))


@pytest.mark.parametrize("framework", CASES)
def test_after_the_death_of_any_rank_the_state_of_each_is_bit_for_bit_as_undisturbed(
    framework: str, tmp_path: Path
) -> None:
    pytest.importorskip(framework)
    _, undisturbed = trained(tmp_path / "undisturbed", framework)
    for rank, step in ((0, 8), (1, 13)):
        result, found = trained(tmp_path / f"{rank}-{step}", framework, [rank, step])
        assert (result.status, result.attempts) == ("completed", 2), result
        assert found == undisturbed
