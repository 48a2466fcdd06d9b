"""Files of PyTorch, safetensors and skops that look alike but differ; each library writes its own files."""

from __future__ import annotations

import io
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefect_tune.drills.file_contents import compare_files

pytestmark = pytest.mark.integrations
torch = pytest.importorskip("torch")


def serialize(*values: object, is_old: bool = False) -> bytes:
    file = io.BytesIO()
    for value in values:
        torch.save(value, file, _use_new_zipfile_serialization=not is_old)
    return file.getvalue()


def describe_differences(name: str, expected: bytes, actual: bytes, folder: Path) -> list[str]:
    (folder / "expected").write_bytes(expected)
    (folder / "actual").write_bytes(actual)
    return [str(difference) for difference in compare_files(folder / "expected", folder / "actual", name)]


def make_state(metadata: int) -> Any:
    state = OrderedDict(w=torch.ones(2))
    state._metadata = {"": {"version": metadata}}  # type: ignore[attr-defined]  # as `Module.state_dict` sets it
    return state


ONES = torch.ones(2, 3)
SPARSE = torch.sparse_coo_tensor([[0, 1]], [1.0, 0.0], (3,))
FLOAT8 = torch.ones(2).to(torch.float8_e4m3fn)
UNLIKE: dict[str, tuple[Any, Any]] = {
    "dots": ({"a.b": 1, "a": {"b": 2}}, {"a.b": 2, "a": {"b": 1}}),
    "a number and its text": ({1: 1, "1": 2}, {1: 2, "1": 1}),
    "a truth and a number": ({True: 1}, {1: 1}),
    "a list and a tuple": ({"a": [1]}, {"a": (1,)}),
    "a list and a dictionary": ({"a": [1]}, {"a": {0: 1}}),
    "bfloat16 and float32": (ONES.bfloat16(), ONES),
    "bfloat16 and float16": (ONES.bfloat16(), ONES.half()),
    "two types of 8 bits": (FLOAT8, torch.ones(2).to(torch.float8_e5m2)),
    "a float of 8 bits": (FLOAT8, (torch.ones(2) * 1.125).to(torch.float8_e4m3fn)),
    "minus zero in bfloat16": (torch.zeros(2).bfloat16(), -torch.zeros(2).bfloat16()),
    "minus zero": (torch.zeros(2), -torch.zeros(2)),
    "minus zero of Python": ({"a": 0.0}, {"a": -0.0}),
    "the bits of a NaN": (torch.full((1,), torch.nan), -torch.full((1,), torch.nan)),
    "a complex": (torch.zeros(1, dtype=torch.complex64), -torch.zeros(1, dtype=torch.complex64)),
    "the shape": (torch.ones(6), ONES),
    "the order of axes": (ONES, torch.ones(3, 2).t()),
    "a gradient": (ONES, torch.ones(2, 3, requires_grad=True)),
    "a parameter": (ONES, torch.nn.Parameter(ONES.clone())),
    "a tensor and a number": (torch.tensor(1.0), 1.0),
    "a zero in a sparse tensor": (SPARSE, SPARSE.coalesce().to_dense().to_sparse()),
    "metadata of a model": (make_state(1), make_state(2)),
    "the order of keys": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "a dictionary and an ordered one": ({"a": 1}, OrderedDict(a=1)),
    "a type": ({"a": torch.float16}, {"a": torch.bfloat16}),
    "a size": ({"a": torch.Size([1])}, {"a": [1]}),
    "a quantizer": (
        torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8),
        torch.quantize_per_tensor(torch.zeros(2), 0.1, 8, torch.qint8),
    ),
    "a generator": (torch.manual_seed(1).get_state(), torch.manual_seed(2).get_state()),
    "an object": ({"a": random.Random(1).getstate()}, {"a": random.Random(2).getstate()}),
}


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("name", UNLIKE)
def test_values_of_torch_that_look_alike_differ(name: str, *, is_old: bool, tmp_path: Path) -> None:
    expected, actual = (serialize(value, is_old=is_old) for value in UNLIKE[name])
    assert describe_differences("m.pt", expected, actual, tmp_path)
    assert describe_differences("m.pt", actual, expected, tmp_path)
    (tmp_path / "other.name").write_bytes(expected)
    (tmp_path / "actual").write_bytes(expected + b"")
    assert compare_files(tmp_path / "other.name", tmp_path / "actual", "m.pt") == []


@pytest.mark.parametrize("is_old", [False, True])
def test_the_values_of_several_saves_into_one_file_are_compared(*, is_old: bool, tmp_path: Path) -> None:
    expected, actual = (serialize(torch.ones(2), ONES * factor, {"a": 1}, is_old=is_old) for factor in (1, 2))
    difference = "`1`, 6 of 6 values, max |Δ| 1" if is_old else f"bytes differ ({len(actual):,} bytes)"
    assert describe_differences("m.pt", expected, actual, tmp_path) == [f"`m.pt`, {difference}"]


def test_a_file_that_was_saved_from_equal_values_twice_is_the_same(tmp_path: Path) -> None:
    value = {"step": torch.tensor(3.0), "rate": 0.1, "w": ONES, "v": [ONES, ONES.clone()], "n": {3: None}}
    (tmp_path / "one.pt").write_bytes(serialize(value))
    torch.save(torch.load(tmp_path / "one.pt", weights_only=True), tmp_path / "another name.pt")
    assert (tmp_path / "one.pt").read_bytes() != (tmp_path / "another name.pt").read_bytes()
    assert compare_files(tmp_path / "one.pt", tmp_path / "another name.pt", "m.pt") == []


class Holder:
    def __init__(self, number: float) -> None:
        self.number, self.tensor = number, ONES * number


def test_a_file_of_torch_that_needs_a_pickle_is_compared_by_its_members(tmp_path: Path) -> None:
    differences = describe_differences("m.pt", serialize(Holder(1.0)), serialize(Holder(2.0)), tmp_path)
    assert "`m.pt`, `data.pkl.number`, 2.0, expected 1.0" in differences
    assert any("data/0" in difference for difference in differences)
    assert not any("serialization_id" in difference for difference in differences), "it follows from the others"
    assert describe_differences("m.pt", serialize(Holder(1.0)), serialize(Holder(1.0)), tmp_path) == []


def test_what_safetensors_writes_is_read(tmp_path: Path) -> None:
    save = pytest.importorskip("safetensors.torch").save
    tensors = {"a.b": ONES.bfloat16(), "c": torch.ones(0, 2), "d": torch.tensor(2), "e": FLOAT8}
    tensors["f"] = torch.tensor([True])
    expected = save(tensors, {"step": "1"})
    actual = save(tensors | {"a.b": ONES.bfloat16() * 2}, {"step": "2"})
    assert sorted(describe_differences("w.safetensors", expected, actual, tmp_path)) == [
        "`w.safetensors`, `[metadata].step`, '2', expected '1'", "`w.safetensors`, `a.b`, 6 of 6 values, max |Δ| 1",
    ]  # fmt: skip
    assert describe_differences("w.safetensors", expected, save(tensors | {"e": ONES}, {"step": "1"}), tmp_path) == [
        "`w.safetensors`, `e`, float32 (2, 3), expected F8_E4M3 (2,)"
    ]


@pytest.mark.parametrize(
    ("expected", "actual"),
    [
        ({"a": 1, 1: 2, "1": 3}, {"a": 1, 1: 3, "1": 2}),
        ({"__id__": 1}, {"__id__": 2}),
        ({"file": np.ones(2)}, {"file": -np.ones(2)}),
        ([0.0], [-0.0]),
        ([1], (1,)),
        (np.float32(1), np.float64(1)),
        ({"a": True}, {"a": 1}),
    ],
)
def test_what_skops_writes_is_read(expected: object, actual: object, tmp_path: Path) -> None:
    dumps = pytest.importorskip("skops.io").dumps
    assert describe_differences("e.skops", dumps(expected), dumps(actual), tmp_path)
    assert describe_differences("e.skops", dumps(expected), dumps(expected), tmp_path) == []


def test_the_order_of_a_set_of_skops_is_no_value(tmp_path: Path) -> None:
    dumps = pytest.importorskip("skops.io").dumps
    assert describe_differences("e.skops", dumps({1, 9, 17}), dumps({17, 9, 1}), tmp_path) == []
