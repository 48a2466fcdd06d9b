"""PyTorch on several ranks: bit for bit as undisturbed after the death of any of them."""

from __future__ import annotations

import importlib
import json
import os
import signal
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import prefect_tune as pt
from tests.integrations.states import to_plain

pytestmark = [pytest.mark.usefixtures("no_prefect_server"), pytest.mark.integrations, pytest.mark.timeout(900)]
torch = pytest.importorskip("torch")
STEPS = 12


def _import_example(name: str) -> Any:
    return importlib.import_module(f"examples.{name}").Digits


class RankKiller:
    """A mixin that kills one rank at one step of the first attempt."""

    trial: pt.TrialInfo

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)  # type: ignore[misc]  # of the base
        self.strike = config.get("strike")

    def step(self) -> dict[str, float]:
        if self.trial.attempt == 1 and self.strike == [self.trial.rank, self.trial.step]:
            os.kill(os.getpid(), signal.SIGKILL)
        return dict(super().step())  # type: ignore[misc]  # of the base


class KilledDDP(RankKiller, _import_example("torch_ddp_digits")):  # type: ignore[misc]  # its base exists only with torch
    """The example with DDP."""


class KilledFSDP(RankKiller, _import_example("torch_fsdp_digits")):  # type: ignore[misc]  # its base exists only with torch
    """The example with FSDP2 and distributed checkpoints."""


def read_ddp_state(directory: Path) -> Mapping[str, Any]:
    paths = {path.parent.name: path for path in directory.rglob("*.pt")}
    states = {name: torch.load(path, weights_only=True, map_location="cpu") for name, path in paths.items()}
    return {
        name: to_plain([state["parts"], [state["random"]["torch"], *state["random"]["cuda"]]])
        for name, state in states.items()
    }


def read_fsdp_state(directory: Path) -> Mapping[str, Any]:
    assert json.loads((directory / "checkpoint.json").read_text())["format"] == "prefect-tune-torch-distributed"
    return {path.name: path.read_bytes() for path in directory.glob("shard-*.bin")}


CASES: dict[str, tuple[type[Any], Callable[[Path], Mapping[str, Any]]]] = {
    "ddp": (KilledDDP, read_ddp_state),
    "fsdp": (KilledFSDP, read_fsdp_state),
}
if find_spec("deepspeed"):  # `pip install deepspeed`: it compiles a part of itself, for minutes

    class KilledDeepSpeed(RankKiller, _import_example("deepspeed_digits")):  # type: ignore[misc]  # like the others
        """The example with DeepSpeed."""

    def read_deepspeed_state(directory: Path) -> Mapping[str, Any]:
        return {path.name: path.read_bytes() for path in directory.rglob("*.pt")}

    CASES["deepspeed"] = (KilledDeepSpeed, read_deepspeed_state)


def train_case(
    target: Path, case: str, ranks: int, strike: list[int] | None = None, failures: pt.FailurePolicy | None = None
) -> tuple[pt.TrialResult, Mapping[str, Any]]:
    trainable, read_state = CASES[case]
    result = pt.durable_trainable(
        trainable,
        {"lr": 0.1, "width": 16, "strike": strike},
        target=str(target),
        experiment="e",
        stop={"step": STEPS},
        checkpoint=pt.Cadence(every_steps=5),
        processes_per_trial=ranks,
        failures=failures,
    )
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as directory:
        return result, read_state(Path(directory))


@pytest.mark.parametrize("case", CASES)
def test_after_the_death_of_any_rank_the_state_of_each_is_bit_for_bit_as_undisturbed(case: str, tmp_path: Path) -> None:
    _, undisturbed = train_case(tmp_path / "undisturbed", case, 2)
    assert len(undisturbed) == (3 if case == "deepspeed" else 2)
    for rank, step in ((0, 7), (1, 7), (1, 2)):
        result, state = train_case(tmp_path / f"{rank}-{step}", case, 2, [rank, step])
        assert (result.status, result.step, result.attempts) == ("completed", STEPS, 2)
        assert state == undisturbed


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU of NVIDIA, and PyTorch for CUDA")
@pytest.mark.parametrize("case", CASES)
def test_after_the_death_of_a_rank_the_state_on_each_gpu_is_bit_for_bit_as_undisturbed(
    case: str, tmp_path: Path
) -> None:
    """NCCL connects the ranks, one for each GPU."""
    ranks = torch.cuda.device_count()
    _, undisturbed = train_case(tmp_path / "undisturbed", case, ranks)
    result, state = train_case(tmp_path / "killed", case, ranks, [ranks - 1, 7])
    assert (result.status, result.step, result.attempts) == ("completed", STEPS, 2)
    assert state == undisturbed


@pytest.mark.parametrize("ranks", [1, 4])
def test_another_number_of_ranks_goes_on_from_a_distributed_checkpoint(ranks: int, tmp_path: Path) -> None:
    """The batches are the same, so only the order in which FSDP adds up gradients differs."""
    undisturbed, _ = train_case(tmp_path / "undisturbed", "fsdp", 2)
    with pytest.raises(pt.TrialFailed):
        train_case(tmp_path, "fsdp", 2, [1, 7], failures=pt.FailurePolicy(max_machine_failures=0))
    trial, _ = train_case(tmp_path, "fsdp", ranks, [1, 7])
    assert (trial.step, trial.attempts) == (STEPS, 2)
    assert trial.metrics["loss"] != undisturbed.metrics["loss"]  # that of rank 0, which has another part of the batch
    weights = [load_weights(checkpoint) for checkpoint in (trial.checkpoint, undisturbed.checkpoint)]
    assert all(torch.allclose(ours, theirs, atol=1e-5) for ours, theirs in zip(*weights, strict=True))


def load_weights(checkpoint: pt.Checkpoint | None) -> list[Any]:
    """Read whole tensors in one process from the target, without a copy of the directory."""
    from torch.distributed import checkpoint as dcp

    from prefect_tune.integrations.torch_distributed import CheckpointReader

    assert checkpoint is not None
    state = {"model": {f"{layer}.weight": torch.zeros(size) for layer, size in ((0, (16, 64)), (2, (10, 16)))}}
    dcp.load(state, storage_reader=CheckpointReader(checkpoint), no_dist=True)
    return list(state["model"].values())
