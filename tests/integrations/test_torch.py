"""PyTorch: bitwise identical after kills, also in the middle of an epoch; a checkpoint runs no code."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prefect_tune as pt
from tests.integrations.examples import Example
from tests.integrations.states import DirectoryMaker, to_plain

pytestmark = pytest.mark.integrations
torch = pytest.importorskip("torch")
if True:  # only with torch
    from prefect_tune.integrations import torch as integration
    from prefect_tune.integrations.torch import ResumableLoader, load_state, save_state


def read_state(directory: Path) -> Mapping[str, Any]:
    """Return the whole state: weights, momenta, schedule, position in the data, and the generator of dropout."""
    saved = torch.load(directory / "state.pt", weights_only=True)
    return {"parts": to_plain(saved["parts"]), "torch": to_plain(saved["random"]["torch"])}


@pytest.mark.timeout(2000)
def test_the_example_ends_with_the_state_of_an_undisturbed_one(example: Callable[[str, str], Example]) -> None:
    example("torch", "Digits").require_undisturbed_end(read_state, reach=13, interval=10, steps={18, 54})


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""This module looks for a GPU when it is imported, like many modules."""
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
    space = {"value": pt.grid_search([1.0, 2.0])}
    results = pt.tune(Holding, space, target=str(tmp_path), experiment="e", metric="sum", stop={"step": 20})
    assert [trial.status for trial in results.trials.values()] == ["completed"] * 2
    assert [trial.metrics["sum"] for trial in results.trials.values()] == [2.0, 3.0]
    (reason,) = (message for message in caplog.messages if "cannot be forked" in message)
    # The driver of the GPU has files open; if it also starts a thread, the thread is the reason.
    assert "/dev/nvidia" in reason or "a library's cuda" in reason
    for attempt in results.to_arrow("attempts").to_pylist():
        assert attempt["peak_gpu_memory_bytes"] > GIB
        assert 0 < attempt["mean_gpu_utilization"] <= 1


def test_a_checkpoint_of_somebody_else_runs_no_code(tmp_path: Path) -> None:
    torch.save({"parts": {}, "random": DirectoryMaker(tmp_path / "ran"), "extra": {}}, tmp_path / "state.pt")
    with pytest.raises(pickle.UnpicklingError):
        load_state(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("batches_done", [0, 1, 3, 4, 6])
def test_a_loader_goes_on_with_the_batches_that_come_next(batches_done: int) -> None:
    def iter_batches(data: Any) -> Iterator[Any]:
        while True:
            yield from (batch.tolist() for batch in data)

    undisturbed, first, second = (ResumableLoader(list(range(10)), 3) for _ in range(3))
    expected = list(islice(iter_batches(undisturbed), 12))
    first_batches = list(islice(iter_batches(first), batches_done))
    second.load_state_dict(first.state_dict())
    assert first_batches + list(islice(iter_batches(second), 12 - batches_done)) == expected


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("size", [5, 40, 41])
def test_ranks_divide_an_epoch_and_another_number_of_them_goes_on_with_what_none_has_had(
    size: int, drop_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def next_batch(rank: int, ranks: int, position: Mapping[str, int]) -> tuple[list[int], Mapping[str, int]]:
        monkeypatch.setattr(integration, "_get_rank_and_world_size", lambda: (rank, ranks))
        loader = integration.ResumableLoader(list(range(size)), 3, drop_last=drop_last)
        loader.load_state_dict(position)
        return next(iter(loader)).tolist(), loader.state_dict()

    seen: dict[int, list[int]] = {}
    position: Mapping[str, int] = {"epoch": 0, "examples_done": 0}
    for ranks in (2, 4, 1, 3, 2, 2, 4, *[1] * 8):
        if drop_last and size < 3 * ranks:
            continue
        drawn = [next_batch(rank, ranks, position) for rank in range(ranks)]
        (position,) = {tuple(after.items()): after for _, after in drawn}.values()
        assert all(batch for batch, _ in drawn)
        epoch = position["epoch"] - (position["examples_done"] == 0)
        seen.setdefault(epoch, []).extend(example for batch, _ in drawn for example in batch)
    assert position["epoch"] > 0
    for epoch in range(position["epoch"]):
        repeated = len(seen[epoch]) - len(set(seen[epoch]))
        assert repeated == 0 if drop_last else repeated < 4
        assert drop_last or set(seen[epoch]) == set(range(size))


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_loader_shuffles_unless_it_is_told_not_to(shuffle: bool) -> None:
    loader, default = ResumableLoader(list(range(20)), 4, shuffle=shuffle), ResumableLoader(list(range(20)), 4)
    first, second = (torch.cat(list(loader)).tolist() for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(20))
    assert (first != list(range(20))) == (first != second) == shuffle
    assert (torch.cat(list(default)).tolist() == first) == shuffle
    next(iter(loader))
    resumed = ResumableLoader(list(range(20)), 4, shuffle=shuffle)
    resumed.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in resumed] == [batch.tolist() for batch in loader]


class Stream(torch.utils.data.IterableDataset):  # type: ignore[name-defined]  # torch is imported if it is there
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))

    def __len__(self) -> int:
        return 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampler": torch.utils.data.SequentialSampler(range(4))}, r"sampler=...\): expected no sampler"),
        ({"batch_sampler": [[0], [1]]}, r"batch_sampler=...\): expected no batch_sampler"),
        ({"batch_size": None}, "batch_size=None.: expected an integer of 1 or more"),
        ({"batch_size": 0}, "expected an integer of 1 or more"),
        ({"batch_size": -2}, "expected an integer of 1 or more"),
        ({"batch_size": 2.0}, "expected an integer of 1 or more"),
        ({"batch_size": "4"}, "expected an integer of 1 or more"),
        ({"batch_size": True}, "expected an integer of 1 or more"),
        ({"seed": -1}, "expected an integer of 0 or more"),
        ({"seed": None}, "expected an integer of 0 or more"),
        ({"shuffle": None}, "expected True or False"),
        ({"shuffle": 1}, "expected True or False"),
        ({"drop_last": "no"}, "expected True or False"),
        ({"in_order": False}, "in_order=False"),
        ({"dataset": Stream()}, "a map-style dataset, with a length and examples by index, found Stream"),
        ({"dataset": iter([1])}, "a map-style dataset, with a length"),
    ],
)
def test_a_loader_refuses_what_would_leave_the_order_to_another(options: Mapping[str, Any], message: str) -> None:
    with pytest.raises(pt.InvalidInput, match=message):
        ResumableLoader(**{"dataset": list(range(4)), **options})


def test_a_loader_takes_all_other_options() -> None:
    options = {
        "sampler": None,
        "batch_sampler": None,
        "drop_last": np.bool_(True),
        "collate_fn": list,
        "num_workers": 0,
    }
    loader = ResumableLoader(list(range(10)), np.int64(3), seed=np.uint8(3), pin_memory=False, **options)
    assert len(loader) == len(list(loader)) == 3
    with pytest.raises(TypeError, match="shufle"):
        ResumableLoader(list(range(10)), shufle=True)


def make_values() -> Mapping[str, Any]:
    return {
        "float": 0.5,
        "int": 3,
        "big": 1 << 80,
        "bool": True,
        "text": "best",
        "none": None,
        "complex": 1 + 2j,
        "bytes": b"raw",
        "tuple": (1, [2.5, None], {"a": (np.float32(0.1),)}),
        "list": [np.arange(3), torch.ones(2)],
        "dict": {1: "one", "nested": {"array": np.eye(2, dtype=np.float16)}},
        "set": {1, 2},
        "numpy float": np.float64(0.1),
        "numpy int": np.int8(-3),
        "numpy bool": np.bool_(True),
        "numpy text": np.str_("text"),
        "array": np.arange(6).reshape(2, 3).T,
        "scalar array": np.array(2.5),
        "empty array": np.empty((0, 3), dtype=np.uint16),
        "texts": np.array(["a", "bcd"]),
        "dates": np.array(["2024-01-01"], dtype="datetime64[s]"),
        "record": np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")]),
        "big-endian": np.arange(3, dtype=">i4"),
        "tensor": torch.arange(6).reshape(2, 3)[:, 1],
        "scalar tensor": torch.tensor(1.5),
        "infinite": float("inf"),
    }


def is_same(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor | np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and bool((left == right).all())
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(is_same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(is_same, left, right))
    return bool(left == right)


@pytest.mark.parametrize("name", make_values())
def test_a_plain_value_among_the_parts_is_restored_by_value(name: str, tmp_path: Path) -> None:
    value, model = make_values()[name], torch.nn.Linear(2, 2)
    save_state(tmp_path, model=model, value=value, extra={"same": value})
    other = torch.nn.Linear(2, 2)
    for loaded in (load_state(tmp_path, model=other), load_state(tmp_path, model=other, value=make_values()[name])):
        assert is_same(loaded, {"same": value, "value": value})
    assert is_same(other.state_dict(), model.state_dict())


def test_containers_and_tensors_among_the_parts_are_changed_in_place(tmp_path: Path) -> None:
    def make_parts(number: float) -> dict[str, Any]:
        weight = torch.nn.Parameter(torch.full((2,), number))
        return {"history": [number], "seen": {"a": number}, "mean": np.full(2, number), "weight": weight}

    before, after = make_parts(1.0), make_parts(2.0)
    save_state(tmp_path, **before)
    load_state(tmp_path, **after)
    assert is_same(after, before)


class Stateful:
    def __init__(self, state: object) -> None:
        self.state = state

    def state_dict(self) -> object:
        return self.state

    def load_state_dict(self, state: object) -> None:
        self.state = state


def test_a_state_may_hold_what_a_plain_value_may(tmp_path: Path) -> None:
    save_state(tmp_path, part=Stateful(dict(make_values())))
    loaded = Stateful(None)
    assert load_state(tmp_path, part=loaded) == {}
    assert is_same(loaded.state, dict(make_values()))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"best": Path("best")}, r"save_state\(best=...\): .* found a value of type pathlib.PosixPath at best"),
        ({"best": [1, {"a": object()}]}, r"save_state\(best=...\): .* builtins.object at best\[1\]\['a'\]"),
        ({"best": lambda: 1}, r"save_state\(best=...\): .* builtins.function at best"),
        ({"model": torch.nn.Linear}, r"save_state\(model=...\): .* builtins.type at model"),
        ({"part": Stateful({"a": Path("a")})}, r"save_state\(part=...\): .*PosixPath at part\['a'\]"),
        ({"extra": {"a": Path("a")}}, r"save_state\(a=...\): .*PosixPath at a"),
        ({"extra": {"a": 1}, "a": 2}, r"expected each name once, found \['a'\]"),
    ],
)
def test_a_part_that_could_not_be_loaded_is_refused_by_name_when_it_is_saved(
    parts: Mapping[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(pt.InvalidInput, match=message):
        save_state(tmp_path / "new", **{"model": torch.nn.Linear(1, 1), **parts})
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"best": 0.0},
        {"model": 1.0},
        {"model": Stateful({}), "other": 1},
        {"model": Stateful({}), "best": Stateful({})},
    ],
)
def test_other_parts_than_those_saved_are_refused(parts: Mapping[str, Any], tmp_path: Path) -> None:
    save_state(tmp_path, model=Stateful({}), best=0.5)
    with pytest.raises(pt.InvalidInput, match="expected the parts"):
        load_state(tmp_path, **parts)


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    save_state(tmp_path, mean=torch.ones(2))
    with pytest.raises(pt.InvalidInput, match=r"mean=...\): expected Tensor of shape \(3,\)"):
        load_state(tmp_path, mean=torch.ones(3))
