"""PyTorch: bitwise identical after kills, also in the middle of an epoch; a checkpoint runs no code."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import prefect_tune as pt
from tests.integrations.examples import Example
from tests.integrations.states import flat

pytestmark = pytest.mark.integrations
torch = pytest.importorskip("torch")


def learned(directory: Path) -> Mapping[str, Any]:
    """Return the whole state: weights, momenta, schedule, place in the data, and the generator that dropout uses."""
    saved = torch.load(directory / "state.pt", weights_only=True)
    return {"parts": flat(saved["parts"]), "torch": flat(saved["random"]["torch"])}


@pytest.mark.timeout(2000)
def test_the_example_ends_with_the_state_of_an_undisturbed_one(example: Callable[[str, str], Example]) -> None:
    example("torch", "Digits").ends_as_undisturbed(learned, reach=13, interval=10, steps={18, 54})


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""As many modules do, this one looks for a GPU when it is imported."""
GIB = 1 << 30


class Holding(pt.Trainable):
    """Holds 1 GiB of a GPU, and multiplies matrices."""

    def setup(self, config: dict[str, Any]) -> None:
        self.held = torch.full((GIB // 4,), config["value"], device=DEVICE)
        self.square = torch.ones(4096, 4096, device=DEVICE)

    def step(self) -> Mapping[str, float]:
        for _ in range(100):
            self.square = self.square @ self.square / 4096
        return {"sum": self.square.mean().item() + self.held[-1].item()}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        torch.save(self.square[0], f"{checkpoint_dir}/row.pt")

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        self.square[0] = torch.load(f"{checkpoint_dir}/row.pt", weights_only=True, map_location=DEVICE)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU of NVIDIA, and PyTorch for CUDA")
@pytest.mark.usefixtures("prefect_server")
def test_a_module_that_looks_for_a_gpu_is_not_forked_and_its_use_of_the_gpu_is_measured(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    results = pt.tune(
        Holding,
        {"value": pt.grid_search([1.0, 2.0])},
        target=str(tmp_path),
        experiment="e",
        metric="sum",
        stop={"step": 20},
    )
    assert [(each.status, each.metrics["sum"]) for each in results.trials.values()] == [
        ("completed", 2.0),
        ("completed", 3.0),
    ]
    (why_not,) = (each for each in caplog.messages if "cannot be forked" in each)
    # The driver has its files open; where it also starts a thread, that is the reason.
    assert "/dev/nvidia" in why_not or "a library's cuda" in why_not
    for attempt in results.to_arrow("attempts").to_pylist():
        assert attempt["peak_gpu_memory_bytes"] > GIB
        assert 0 < attempt["mean_gpu_utilization"] <= 1


class Evil:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.folder),))


def test_a_checkpoint_of_somebody_else_runs_no_code(tmp_path: Path) -> None:
    from prefect_tune.integrations.torch import load_state

    torch.save({"parts": {}, "random": Evil(tmp_path / "ran"), "extra": {}}, tmp_path / "state.pt")
    with pytest.raises(pickle.UnpicklingError):
        load_state(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("batches_done", [0, 1, 3, 4, 6])
def test_a_loader_goes_on_with_the_batches_that_come_next(batches_done: int) -> None:
    from prefect_tune.integrations.torch import ResumableLoader

    def loader() -> Any:
        return ResumableLoader(list(range(10)), 3)

    def batches(data: Any) -> Iterator[Any]:
        while True:
            yield from (each.tolist() for each in data)

    undisturbed, first, second = loader(), loader(), loader()
    expected = list(islice(batches(undisturbed), 12))
    begun = list(islice(batches(first), batches_done))
    second.load_state_dict(first.state_dict())
    assert begun + list(islice(batches(second), 12 - batches_done)) == expected


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("size", [5, 40, 41])
def test_ranks_divide_an_epoch_and_another_number_of_them_goes_on_with_what_none_has_had(
    size: int, drop_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect_tune.integrations import torch as integration

    def next_batch(rank: int, ranks: int, place: Mapping[str, int]) -> tuple[list[int], Mapping[str, int]]:
        monkeypatch.setattr(integration, "_rank_and_world_size", lambda: (rank, ranks))
        loader = integration.ResumableLoader(list(range(size)), 3, drop_last=drop_last)
        loader.load_state_dict(place)
        return next(iter(loader)).tolist(), loader.state_dict()

    seen: dict[int, list[int]] = {}
    place: Mapping[str, int] = {"epoch": 0, "examples_done": 0}
    for ranks in (2, 4, 1, 3, 2, 2, 4, *[1] * 8):
        if drop_last and size < 3 * ranks:
            continue
        drawn = [next_batch(rank, ranks, place) for rank in range(ranks)]
        (place,) = {tuple(after.items()): after for _, after in drawn}.values()
        assert all(batch for batch, _ in drawn)
        epoch = place["epoch"] - (place["examples_done"] == 0)
        seen.setdefault(epoch, []).extend(example for batch, _ in drawn for example in batch)
    assert place["epoch"] > 0
    for epoch in range(place["epoch"]):
        again = len(seen[epoch]) - len(set(seen[epoch]))
        assert again == 0 if drop_last else again < 4
        assert drop_last or set(seen[epoch]) == set(range(size))
