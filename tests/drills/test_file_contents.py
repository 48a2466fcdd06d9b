"""Differences between two files: by array, key or column if the format is known; no pickle is executed."""

from __future__ import annotations

import bz2
import copy
import datetime as dt
import gzip
import io
import json
import pickle
import struct
import uuid
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import joblib  # type: ignore[import-untyped]  # it has no types
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prefect_tune.drills.file_contents import compare_files

ONES = np.ones(4, np.float32)


def describe_diff(name: str, expected: bytes, actual: bytes, folder: Path) -> list[str]:
    paths = folder / "expected", folder / "found"
    for path, data in zip(paths, (expected, actual), strict=True):
        path.write_bytes(data)
    return [str(difference) for difference in compare_files(*paths, name)]


def to_npy(*arrays: Any) -> bytes:
    file = io.BytesIO()
    for array in arrays:
        np.save(file, array)
    return file.getvalue()


def to_npz(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def to_zip(
    members: Sequence[tuple[str, bytes]], *, comment: bytes = b"", member_comment: bytes = b"", year: int = 2020
) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w") as archive:
        warnings.simplefilter("ignore")  # a name may be twice
        for name, data in members:
            info = zipfile.ZipInfo(name, (year, 1, 1, 0, 0, 0))
            info.comment = member_comment
            archive.writestr(info, data)
        archive.comment = comment
    return file.getvalue()


def to_gzip(data: bytes, time: float = 0.0, name: str = "") -> bytes:
    file = io.BytesIO()
    with gzip.GzipFile(name, "wb", fileobj=file, mtime=time) as archive:
        archive.write(data)
    return file.getvalue()


def to_safetensors(
    tensors: Mapping[str, tuple[str, bytes]], metadata: Mapping[str, str] | None = None, rest: bytes = b""
) -> bytes:
    header: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    data = b""
    for name, (dtype, raw) in tensors.items():
        size = {"F32": 4, "BF16": 2, "F16": 2}.get(dtype, 1)
        header[name] = {"dtype": dtype, "shape": [len(raw) // size], "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data + rest


def to_parquet(columns: Mapping[str, Any], **metadata: Mapping[str, str]) -> bytes:
    """Write a table with metadata by column; `table` is that of the table."""
    arrays = {name: pa.array(values) for name, values in columns.items()}
    fields = [pa.field(name, array.type, metadata=metadata.get(name)) for name, array in arrays.items()]
    table = pa.table(list(arrays.values()), schema=pa.schema(fields, metadata=metadata.get("table")))
    file = io.BytesIO()
    pq.write_table(table, file)
    return file.getvalue()


def to_skops(schema: str, **files: bytes) -> bytes:
    return to_zip([*files.items(), ("schema.json", schema.encode())])


def to_joblib(value: object, compress: Any = 0) -> bytes:
    file = io.BytesIO()
    joblib.dump(value, file, compress=compress)
    return file.getvalue()


def array_of(value: float) -> Any:
    array = np.zeros((4, 8), np.float32)
    array[1, 3] = value
    return array


def to_skops_model(number: int, array: Any) -> bytes:
    """Return a model as skops writes it: members and nodes have the ids of the objects in this process."""
    coefficients = {"__loader__": "NdArrayNode", "type": "numpy", "file": f"{number}.npy", "__id__": number}
    attributes = {"coef_": coefficients, "steps": [{"content": "7", "__id__": number + 16}]}
    schema = {"__class__": "SGDClassifier", "content": attributes, "__id__": number + 8}
    return to_skops(json.dumps(schema), **{f"{number}.npy": to_npy(array)})


NAN = struct.pack("<Q", 0x7FF8000000000001)
BF16_ONES, F32_ONES = struct.pack("<H", 0x3F80) * 4, struct.pack("<f", 1.0) * 4

UNLIKE: dict[str, tuple[str, bytes, bytes]] = {
    # several values one after another, and what follows the last one
    "a second array": ("w.npy", to_npy(ONES, ONES), to_npy(ONES, ONES * 2)),
    "an array that is missing": ("w.npy", to_npy(ONES, ONES), to_npy(ONES)),
    "a second array in a member": (
        "w.npz", to_zip([("w.npy", to_npy(ONES, ONES))]), to_zip([("w.npy", to_npy(ONES, -ONES))]),
    ),
    "an archive before another": ("w.npz", to_npz(w=ONES) + to_npz(w=ONES), to_npz(w=-ONES) + to_npz(w=ONES)),
    "bytes after an archive": ("w.npz", to_npz(w=ONES) + b"1", to_npz(w=ONES) + b"2"),
    "a member twice": ("w.zip", to_zip([("w", b"1"), ("w", b"3")]), to_zip([("w", b"2"), ("w", b"3")])),
    "a second pickle": ("m.pkl", pickle.dumps(1) + pickle.dumps(2), pickle.dumps(1) + pickle.dumps(3)),
    "bytes after a pickle": ("m.pkl", pickle.dumps(1) + b"\x00\x01", pickle.dumps(1) + b"\x00\x02"),
    "a second line of JSON": ("l.jsonl", b'{"a": 1}\n{"a": 2}\n', b'{"a": 1}\n{"a": 3}\n'),
    "two documents, and one list": ("l.json", b"1 2", b"[1, 2]"),
    "a second member of gzip": (
        "m.pkl.gz", to_gzip(pickle.dumps(1)) + to_gzip(pickle.dumps(2)), to_gzip(pickle.dumps(1)) * 2,
    ),
    "a second stream of bzip2": ("x.bz2", bz2.compress(b"1") + bz2.compress(b"2"), bz2.compress(b"1") * 2),
    "bytes after a table": ("t.parquet", to_parquet({"x": [1]}), to_parquet({"x": [1]}) + to_parquet({"x": [2]})),
    "bytes after tensors": (
        "w.safetensors", to_safetensors({"w": ("F32", F32_ONES)}, rest=b"1"),
        to_safetensors({"w": ("F32", F32_ONES)}, rest=b"2"),
    ),
    # paths that are written alike
    "dots in JSON": ("s.json", b'{"a.b": 1, "a": {"b": 2}}', b'{"a.b": 2, "a": {"b": 1}}'),
    "a list and an object": ("s.json", b'{"a": [1]}', b'{"a": {"0": 1}}'),
    "an empty list and an empty object": ("s.json", b'{"a": []}', b'{"a": {}}'),
    "a key twice": ("s.json", b'{"a": 1, "a": 3}', b'{"a": 2, "a": 3}'),
    "an empty key": ("s.json", b'{"": 1}', b"1"),
    "a quoted key": ("s.json", json.dumps({"'a.b'": 1}).encode(), b'{"a.b": 1}'),
    "the text of None": ("s.json", b'{"a": "None"}', b'{"a": null}'),
    "the key None": ("m.pkl", pickle.dumps({None: 1}), pickle.dumps({"None": 1})),
    "a number and its text": ("m.pkl", pickle.dumps({1: "a", "1": "b"}), pickle.dumps({1: "b", "1": "a"})),
    "a truth and a number": ("m.pkl", pickle.dumps({True: 1}), pickle.dumps({1: 1})),
    "a number and a float": ("m.pkl", pickle.dumps({1.0: 1}), pickle.dumps({1: 1})),
    "bytes and text": ("m.pkl", pickle.dumps({b"a": 1}), pickle.dumps({"a": 1})),
    "tuples of other types": ("m.pkl", pickle.dumps({(1,): 1}), pickle.dumps({(True,): 1})),
    "a list and a tuple": ("m.pkl", pickle.dumps([1]), pickle.dumps((1,))),
    "a set and a list": ("m.pkl", pickle.dumps({1}), pickle.dumps([1])),
    "a dictionary and an ordered one": ("m.pkl", pickle.dumps(OrderedDict(a=1)), pickle.dumps({"a": 1})),
    "slashes in an archive": ("w.npz", to_npz(**{"a/b": ONES, "a.b": -ONES}), to_npz(**{"a/b": -ONES, "a.b": ONES})),
    "keys of skops": (
        "e.skops", to_skops('{"content": {"1": {"content": "2"}, "1": {"content": "3"}}}'),
        to_skops('{"content": {"1": {"content": "3"}, "1": {"content": "2"}}}'),
    ),
    "a key of skops that is like an id": (
        "e.skops", to_skops('{"content": {"__id__": {"content": "2"}}, "__id__": 1}'),
        to_skops('{"content": {"__id__": {"content": "3"}}, "__id__": 2}'),
    ),
    "a member that no node of skops names": ("e.skops", to_skops("{}", extra=b"1"), to_skops("{}", extra=b"2")),
    # metadata
    "metadata of safetensors": (
        "w.safetensors", to_safetensors({"w": ("F32", F32_ONES)}, {"step": "1"}),
        to_safetensors({"w": ("F32", F32_ONES)}, {"step": "2"}),
    ),
    "metadata of a table": (
        "t.parquet", to_parquet({"x": [1]}, table={"step": "1"}), to_parquet({"x": [1]}, table={"step": "2"}),
    ),
    "metadata of a column": (
        "t.parquet", to_parquet({"x": [1]}, x={"unit": "s"}), to_parquet({"x": [1]}, x={"unit": "m"}),
    ),
    "the type of a column": (
        "t.parquet", to_parquet({"x": pa.array(["a"])}), to_parquet({"x": pa.array(["a"], pa.large_string())}),
    ),
    "the order of columns": ("t.parquet", to_parquet({"x": [1], "y": [1]}), to_parquet({"y": [1], "x": [1]})),
    "the place of a null": (
        "t.parquet", to_parquet({"x": pa.array([1.0, None])}), to_parquet({"x": pa.array([None, 1.0])}),
    ),
    "a comment of an archive": ("w.zip", to_zip([("w", b"1")], comment=b"1"), to_zip([("w", b"1")], comment=b"2")),
    "a comment of a member": (
        "w.zip", to_zip([("w", b"1")], member_comment=b"1"), to_zip([("w", b"1")], member_comment=b"2"),
    ),
    "the order of members": ("w.npz", to_npz(a=ONES, b=ONES), to_npz(b=ONES, a=ONES)),
    # types
    "bfloat16 and float32": (
        "w.safetensors", to_safetensors({"w": ("F32", F32_ONES)}), to_safetensors({"w": ("BF16", BF16_ONES)}),
    ),
    "the bits of a float of 8 bits": (
        "w.safetensors", to_safetensors({"w": ("F8_E4M3", b"\x01")}), to_safetensors({"w": ("F8_E4M3", b"\x81")}),
    ),
    "the byte order": ("w.npy", to_npy(ONES), to_npy(ONES.astype(">f4"))),
    "the order of axes": ("w.npy", to_npy(np.ones((2, 3))), to_npy(np.ones((2, 3), order="F"))),
    "the fields of a type": ("w.npy", to_npy(np.zeros(2, "i4,i4")), to_npy(np.zeros(2, "i4,f4"))),
    "float16 in a pickle": ("m.pkl", pickle.dumps(np.float16(1)), pickle.dumps(np.float32(1))),
    "a number of NumPy, and one of Python": ("m.pkl", pickle.dumps(np.float64(1)), pickle.dumps(1.0)),
    # values that are equal, and not the same
    "minus zero in JSON": ("s.json", b'{"a": 0.0}', b'{"a": -0.0}'),
    "minus zero in a pickle": ("m.pkl", pickle.dumps([0.0]), pickle.dumps([-0.0])),
    "minus zero in a complex": ("m.pkl", pickle.dumps({"a": complex(0, 0.0)}), pickle.dumps({"a": complex(0, -0.0)})),
    "minus zero in a nested column": (
        "t.parquet", to_parquet({"x": [[0.0], None]}), to_parquet({"x": [[-0.0], None]}),
    ),
    "another NaN": ("w.npy", to_npy(np.frombuffer(NAN)), to_npy(np.array([np.nan]))),
    "a number and a float in JSON": ("s.json", b'{"a": 1}', b'{"a": 1.0}'),
    "a number and a truth in JSON": ("s.json", b'{"a": 1}', b'{"a": true}'),
    "the order of keys in JSON": ("s.json", b'{"x": {"a": 1, "b": 2}}', b'{"x": {"b": 2, "a": 1}}'),
    "the order of keys in a pickle": ("m.pkl", pickle.dumps({"a": 1, "b": 2}), pickle.dumps({"b": 2, "a": 1})),
    "a time with another zone": (
        "m.pkl", pickle.dumps(dt.datetime(2026, 1, 1, 1, tzinfo=dt.UTC)),
        pickle.dumps(dt.datetime(2026, 1, 1, 2, tzinfo=dt.timezone(dt.timedelta(hours=1)))),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNLIKE)
def test_files_that_look_alike_differ(name: str, tmp_path: Path) -> None:
    file, expected, actual = UNLIKE[name]
    assert expected != actual
    assert describe_diff(file, expected, actual, tmp_path)
    assert describe_diff(file, actual, expected, tmp_path)
    same = tmp_path / "same"
    same.mkdir()
    assert describe_diff(file, expected, expected, same) == []


ALIKE: dict[str, tuple[str, bytes, bytes]] = {
    "the time in gzip": ("m.pkl.gz", to_gzip(pickle.dumps([1]), 1.0), to_gzip(pickle.dumps([1]), 2.0)),
    "the time in gzip of text": ("x.txt.gz", to_gzip(b"text", 1.0), to_gzip(b"text", 2.0)),
    "times in an archive": ("w.zip", to_zip([("w", b"1")]), to_zip([("w", b"1")], year=2021)),
    "times in an archive in an archive": (
        "w.zip", to_zip([("w", to_zip([("v", b"1")]))]), to_zip([("w", to_zip([("v", b"1")], year=2021))], year=2021),
    ),
    "the level of compression": ("m.pkl", to_joblib([ONES], ("gzip", 1)), to_joblib([ONES], ("gzip", 9))),
    "the ids in skops": ("e.skops", to_skops_model(140551053593360, ONES), to_skops_model(140551053590000, ONES)),
    "spaces in JSON": ("s.json", b'{"a":[1,2]}', b'{"a": [1, 2]}\n'),
    "the order of a set": ("m.pkl", pickle.dumps({1, 9, 17}), pickle.dumps({17, 9, 1})),
    "the protocol of a pickle": ("m.pkl", pickle.dumps([1, b"2"], 2), pickle.dumps([1, b"2"], 5)),
}  # fmt: skip


@pytest.mark.parametrize("name", ALIKE)
def test_files_that_differ_only_in_times_and_in_how_they_are_written_are_the_same(name: str, tmp_path: Path) -> None:
    assert describe_diff(*ALIKE[name], tmp_path) == []


@pytest.mark.parametrize(
    ("name", "expected", "actual", "description"),
    [
        ("s.json", b'{"layer.weight": [1]}', b'{"layer.weight": [2]}', "`layer.weight.0`, 2, expected 1"),
        ("s.json", b'{"1": 1}', b'{"1": 2}', "`'1'`, 2, expected 1"),
        ("s.json", b'{"a": {"b": 1}}', b'{"a": {}}', "`a.b`, missing"),
        ("s.json", b'{"a": 1, "b": 2}', b'{"b": 2, "a": 1}', "keys in another order: number 1 is `b`, expected `a`"),
        ("w.npy", to_npy(array_of(0)), to_npy(array_of(-0.0)), "1 of 32 values, max |Δ| 0"),
        ("w.npy", to_npy(array_of(0)), to_npy(array_of(np.nan)), "1 of 32 values, max |Δ| nan"),
        ("w.npy", to_npy(array_of(0)), to_npy(array_of(0).astype(float)),
         "float64 (4, 8), expected float32 (4, 8)"),
        ("w.npy", to_npy(ONES) + b"1", to_npy(ONES) + b"2", "bytes differ (145 bytes)"),
        ("w.npz", to_npz(w=array_of(0), b=ONES), to_npz(w=array_of(2e-9), b=ONES),
         "`w`, 1 of 32 values, max |Δ| 2e-09"),
        ("m.pkl", pickle.dumps({None: 1}), pickle.dumps({None: 2}), "`[None]`, 2, expected 1"),
        ("m.pkl", pickle.dumps({"w": ONES}), pickle.dumps({"w": -ONES}), "`w`, 4 of 4 values, max |Δ| 2"),
        ("m.joblib", to_joblib({"w": array_of(0)}), to_joblib({"w": array_of(2e-9)}),
         "`w.values`, 1 of 32 values, max |Δ| 2e-09"),
        ("t.parquet", to_parquet({"x": [1, 2], "y": ["a", "b"]}), to_parquet({"x": [1, 3], "y": ["a", "b"]}),
         "`x`, 1 of 2 values, max |Δ| 1"),
        ("w.safetensors",
         to_safetensors({"w": ("BF16", BF16_ONES)}), to_safetensors({"w": ("BF16", b"\x80\x40" + BF16_ONES[2:])}),
         "`w`, 1 of 4 values, max |Δ| 3"),
        ("m.keras", to_zip([("weights", b"12\xff")]), to_zip([("weights", b"1\xff")]),
         "`weights`, bytes differ (2, expected 3)"),
        ("c.zip", to_zip([("meta.json", b'{"saved": "1"}')]), to_zip([("meta.json", b'{"saved": "2"}')]),
         "`meta.json.saved`, '2', expected '1'"),
        ("e.skops", to_skops_model(140551053593360, array_of(0)), to_skops_model(140551053590000, array_of(2e-9)),
         "`content.coef_.file`, 1 of 32 values, max |Δ| 2e-09"),
        ("x.bin", b"ab\xffd", b"ab\xfed", "bytes differ (4 bytes)"),
        ("x.txt", b"a\nit: 8\n", b"a\nit: 10\n", "`line 2`, 'it: 10', expected 'it: 8'"),
    ],
)  # fmt: skip
def test_a_difference_is_shown_as_a_person_would_write_it(
    name: str, expected: bytes, actual: bytes, description: str, tmp_path: Path
) -> None:
    assert describe_diff(name, expected, actual, tmp_path) == [f"`{name}`, {description}"]


def test_large_arrays_are_compared_a_part_at_a_time(tmp_path: Path) -> None:
    expected, actual = np.zeros((5, 1 << 19)), np.zeros((5, 1 << 19))
    actual[0, 1], actual[4, -1], actual[2, 5] = 5, -0.0, -7
    descriptions = describe_diff("w.npy", to_npy(expected), to_npy(actual), tmp_path)
    assert descriptions == ["`w.npy`, 3 of 2,621,440 values, max |Δ| 7"]


def test_two_places_that_are_shown_alike_are_two_places(tmp_path: Path) -> None:
    for name, number in (("expected", 1), ("found", 2)):
        (tmp_path / name).write_text(json.dumps({"a.b": number, "a": {"b": number}}))
    differences = compare_files(tmp_path / "expected", tmp_path / "found", "s.json")
    assert [difference.key for difference in differences] == ["a.b", "a.b"]
    assert len({difference.path or difference.key for difference in differences}) == 2


def test_times_and_identifiers_in_a_pickle_are_values_of_their_own(tmp_path: Path) -> None:
    one, other = ({"at": dt.datetime(2026, 1, day, tzinfo=dt.UTC), "run": uuid.UUID(int=day)} for day in (1, 2))
    for name, value in (("expected", one), ("found", other)):
        (tmp_path / name).write_bytes(pickle.dumps(value))
    differences = compare_files(tmp_path / "expected", tmp_path / "found", "m.pkl")
    assert [(difference.key, difference.scalars) for difference in differences] == [
        (key, (one[key], other[key])) for key in ("at", "run")
    ]


class Evil:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return (Path.mkdir, (self.folder,))


@pytest.mark.parametrize("name", ["m.pkl", "m.pt", "m.npy", "m.json"])
def test_no_pickle_is_run(name: str, tmp_path: Path) -> None:
    evil = tmp_path / "was-run"
    descriptions = describe_diff(name, pickle.dumps([1, Evil(evil)]), pickle.dumps([2, Evil(evil)]), tmp_path)
    assert descriptions == [f"`{name}`, `0`, 2, expected 1"]
    objects = (to_npy(np.array([Evil(evil), size], dtype=object)) for size in (1, 2))
    (description,) = describe_diff(name, *objects, tmp_path)
    assert "bytes differ" in description
    assert not evil.exists()


class Model:
    def __init__(self, rate: float, *shared: object) -> None:
        self.rate, self.shared, self.weights = rate, shared, array_of(rate)
        self.itself, self.names = self, {"b", "a", ("c", rate)}


def to_two_pickles(value: object) -> bytes:
    return pickle.dumps(1) + pickle.dumps(value, protocol=2)


def to_compressed_joblib(value: object) -> bytes:
    return to_joblib(value, 3)


@pytest.mark.parametrize("write", [pickle.dumps, to_two_pickles, to_joblib, to_compressed_joblib])
def test_pickles_of_equal_values_are_equal_whatever_objects_are_shared(
    write: Callable[[object], bytes], tmp_path: Path
) -> None:
    one = [0.5, "text", np.arange(6.0).reshape(2, 3), np.array([None, "x"], dtype=object)]
    once, twice = (write(Model(0.1, one, other, np.float64)) for other in (one, copy.deepcopy(one)))
    assert once != twice
    assert describe_diff("m.pkl", once, twice, tmp_path) == []
    descriptions = describe_diff("m.pkl", once, write(Model(0.2, one, one, np.float64)), tmp_path)
    assert any("rate`, 0.2, expected 0.1" in description for description in descriptions)
    assert any("names.2" in description for description in descriptions)


def nest_pickle(value: object) -> bytes:
    for _ in range(40):  # 2**40 paths
        value = [value, value]
    return pickle.dumps(value)


def test_a_pickle_of_too_many_values_that_differ_is_compared_by_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert describe_diff("m.pkl", nest_pickle([1]), nest_pickle([1]) + b"\x80\x04N.", tmp_path)
    assert describe_diff("m.pkl", nest_pickle((0.5, 0.5)), nest_pickle((one := 0.5, one)), tmp_path) == []
    monkeypatch.setattr("prefect_tune.drills.values._MAX_DIFFERENCES", 1000)
    (description,) = describe_diff("m.pkl", nest_pickle(1), nest_pickle(2), tmp_path)
    assert "bytes differ" in description
