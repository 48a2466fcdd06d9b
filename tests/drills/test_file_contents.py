"""What differs between two files: by array, key or column where the format is known, and no pickle is run."""

from __future__ import annotations

import copy
import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import joblib  # type: ignore[import-untyped]  # it has no types
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prefect_tune.drills.file_contents import compare_files

Write = Callable[[Path, Any], object]


@pytest.fixture
def differences(tmp_path: Path) -> Callable[..., list[str]]:
    def compared(name: str, write: Write, expected: object, found: object) -> list[str]:
        places = tmp_path / "expected", tmp_path / "found"
        for place, content in zip(places, (expected, found), strict=True):
            write(place, content)
        return [str(each) for each in compare_files(*places, name)]

    return compared


def as_npz(path: Path, arrays: dict[str, Any]) -> None:
    with path.open("wb") as file:
        np.savez(file, **arrays)


def as_npy(path: Path, array: Any) -> None:
    with path.open("wb") as file:
        np.save(file, array)


def as_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def as_parquet(path: Path, columns: dict[str, Any]) -> None:
    pq.write_table(pa.table(columns), path)


def as_zip(path: Path, members: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name, (2020 + len(data), 1, 1, 0, 0, 0)), data)


def near(value: float) -> Any:
    array = np.zeros((4, 8), np.float32)
    array[1, 3] = value
    return array


@pytest.mark.parametrize(
    ("name", "write", "expected", "found", "shown"),
    [
        ("w.npz", as_npz, {"w": near(0), "b": near(1)}, {"w": near(2e-9), "b": near(1)},
         ["`w.npz`, `w`, 1 of 32 values, max |Δ| 2e-09"]),
        ("w.npy", as_npy, near(0), near(-0.0), ["`w.npy`, 1 of 32 values, max |Δ| 0"]),
        ("w.npy", as_npy, near(np.nan), near(np.nan), []),
        ("w.npy", as_npy, near(0), near(np.nan), ["`w.npy`, 1 of 32 values, max |Δ| nan"]),
        ("w.npy", as_npy, np.zeros(0), np.zeros(0, np.float32), ["`w.npy`, float32 (0,), expected float64 (0,)"]),
        ("w.npy", as_npy, near(0), near(0).astype(np.float64), ["`w.npy`, float64 (4, 8), expected float32 (4, 8)"]),
        ("w.npy", as_npy, np.array([True, False]), np.array([True, True]), ["`w.npy`, 1 of 2 values, max |Δ| 1"]),
        ("s.json", as_json, {"epoch": 5, "lr": [0.1]}, {"epoch": 7, "lr": [0.1]}, ["`s.json`, `epoch`, 7, expected 5"]),
        ("s.json", as_json, {"a": {"b": 1}}, {"a": {}},
         ["`s.json`, `a.b`, missing", "`s.json`, `a`, not in the undisturbed run"]),
        ("s.json", as_json, {"a": 1, "b": 2}, {"b": 2, "a": 1},
         ["`s.json`, keys in another order: number 1 is `b`, expected `a`"]),
        ("t.parquet", as_parquet, {"x": [1, 2], "y": ["a", "b"]}, {"x": [1, 3], "y": ["a", "b"]},
         ["`t.parquet`, `x`, 1 of 2 values, max |Δ| 1"]),
        ("m.keras", as_zip, {"weights": b"123", "config": b"{}"}, {"weights": b"124", "config": b"{}"},
         ["`m.keras`, `weights`, bytes differ (3, expected 3)"]),
        ("m.keras", as_zip, {"weights": b"123"}, {"weights": b"123"}, []),
        ("x.bin", Path.write_bytes, b"ab\xffd", b"ab\xfed", ["`x.bin`, bytes differ from byte 2 on (4 bytes)"]),
        ("x.txt", Path.write_bytes, b"ab\n", b"ab\nc", ["`x.txt`, bytes differ from byte 3 on (4, expected 3 bytes)"]),
        ("x.txt", Path.write_bytes, b"a\nit: 8\n", b"a\nit: 10\n", ["`x.txt`, line 2: 'it: 10', expected 'it: 8'"]),
        ("x.bin", Path.write_bytes, b"abcd", b"abcd", []),
        ("s.json", Path.write_bytes, b"{", b"[", ["`s.json`, line 1: '[', expected '{'"]),
    ],
)  # fmt: skip
def test_a_difference_is_named_as_the_format_allows(
    name: str, write: Write, expected: object, found: object, shown: list[str], differences: Callable[..., list[str]]
) -> None:
    assert differences(name, write, expected, found) == shown


def test_large_arrays_are_compared_a_part_at_a_time(differences: Callable[..., list[str]]) -> None:
    expected, found = np.zeros((5, 1 << 19)), np.zeros((5, 1 << 19))
    found[0, 1], found[4, -1], found[2, 5] = 5, -0.0, -7
    assert differences("w.npy", as_npy, expected, found) == ["`w.npy`, 3 of 2,621,440 values, max |Δ| 7"]


def test_archives_that_differ_only_in_their_times_are_the_same(differences: Callable[..., list[str]]) -> None:
    members = iter((2001, 2002))

    def write(path: Path, content: bytes) -> None:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(zipfile.ZipInfo("w", (next(members), 1, 1, 0, 0, 0)), content)

    assert differences("m.keras", write, b"same", b"same") == []


def as_skops(path: Path, content: tuple[int, Any]) -> None:
    """Write what skops would: members and nodes have the ids that the objects had in this process."""
    number, array = content
    npy = io.BytesIO()
    np.save(npy, array)
    coefficients = {"__loader__": "NdArrayNode", "type": "numpy", "file": f"{number}.npy", "__id__": number}
    attributes = {"coef_": coefficients, "steps": [{"content": "7", "__id__": number + 16}]}
    schema = {"__class__": "SGDClassifier", "content": attributes, "__id__": number + 8}
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{number}.npy", npy.getvalue())
        archive.writestr("schema.json", json.dumps(schema))


def test_an_estimator_of_skops_is_compared_without_the_ids_of_objects(
    differences: Callable[..., list[str]],
) -> None:
    assert differences("e.skops", as_skops, (140551053593360, near(1)), (140551053590000, near(1))) == []
    (found,) = differences("e.skops", as_skops, (140551053593360, near(0)), (140551053590000, near(2e-9)))
    assert found == "`e.skops`, `content.coef_.file`, 1 of 32 values, max |Δ| 2e-09"


class Evil:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return (Path.mkdir, (self.folder,))


@pytest.mark.parametrize("name", ["m.pkl", "m.pt", "m.npy", "m.json"])
def test_no_pickle_is_run(name: str, tmp_path: Path, differences: Callable[..., list[str]]) -> None:
    evil = tmp_path / "was-run"
    shown = differences(name, Path.write_bytes, pickle.dumps(Evil(evil)), pickle.dumps([Evil(evil)]))
    by_value = f"`{name}`, `type(0)`, 'pathlib.Path.mkdir', expected 'pathlib.PosixPath'"
    assert by_value in shown or (name == "m.json" and "bytes differ" in shown[0])
    objects = (np.array([Evil(evil), size], dtype=object) for size in (1, 2))
    (found,) = differences(name, as_pickled_array, *objects)
    assert "bytes differ" in found
    assert not evil.exists()


def as_pickled_array(path: Path, array: Any) -> None:
    with path.open("wb") as file:
        np.save(file, array, allow_pickle=True)


class Model:
    def __init__(self, rate: float, *shared: object) -> None:
        self.rate, self.shared, self.weights = rate, shared, near(rate)
        self.itself, self.names = self, {"b", "a", ("c", rate)}


def as_pickle(path: Path, value: object) -> None:
    path.write_bytes(pickle.dumps(value))


def as_two_pickles(path: Path, value: object) -> None:
    path.write_bytes(pickle.dumps(1) + pickle.dumps(value, protocol=2))


def as_joblib(path: Path, value: object) -> None:
    joblib.dump(value, path)


def as_compressed_joblib(path: Path, value: object) -> None:
    joblib.dump(value, path, compress=3)


@pytest.mark.parametrize("write", [as_pickle, as_two_pickles, as_joblib, as_compressed_joblib])
def test_pickles_of_equal_values_are_equal_whatever_objects_are_shared(
    write: Write, differences: Callable[..., list[str]]
) -> None:
    one = [0.5, "text", np.arange(6.0).reshape(2, 3), np.array([None, "x"], dtype=object)]
    once, twice = (Model(0.1, one, other, np.float64) for other in (one, copy.deepcopy(one)))
    assert pickle.dumps(once) != pickle.dumps(twice)
    assert differences("m.pkl", write, once, twice) == []
    found = differences("m.pkl", write, once, Model(0.2, one, one, np.float64))
    assert any("rate`, 0.2, expected 0.1" in each for each in found)
    assert any("names.2" in each for each in found)


def test_an_array_of_joblib_is_compared_by_its_values(differences: Callable[..., list[str]]) -> None:
    (found,) = differences("m.joblib", as_joblib, {"w": near(0)}, {"w": near(2e-9)})
    assert found == "`m.joblib`, `w.values`, 1 of 32 values, max |Δ| 2e-09"


def nested(depth: int) -> object:
    value: object = depth
    for _ in range(40):  # 2**40 paths
        value = [value, value]
    return value


def test_a_pickle_of_too_many_values_is_compared_by_byte(
    differences: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefect_tune.drills.file_contents._MOST_VALUES", 1000)
    (shown,) = differences("m.pkl", as_pickle, nested(1), nested(2))
    assert "bytes differ from byte" in shown
