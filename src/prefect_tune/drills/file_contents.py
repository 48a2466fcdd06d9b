"""Compare the same file of two checkpoints: by its values if the format is known, and by its bytes if not.

Files with equal values are equal even if their bytes differ. For example, the bytes of a pickle depend on whether two
equal values in it are one object, and loading changes that. No pickle is executed: `torch.load` reads with
`weights_only=True`, NumPy reads without pickles, and any other pickle is read with stand-ins for classes and functions.

Never report two files as equal if a part of them was not compared. The only exceptions are times in headers, and bytes
that follow from the values (sizes, checksums, offsets).
"""

from __future__ import annotations

import bz2
import datetime as dt
import filecmp
import gzip
import io
import json
import lzma
import math
import mmap
import pickle
import re
import struct
import uuid
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from prefect_tune.drills.values import (
    Array,
    FileDifference,
    KeyValuePairs,
    Line,
    TreeNode,
    TreeNodeConvertible,
    compare_values,
    index_by_token,
    make_key_token,
    to_byte_rows,
    to_tree_node,
)

_NON_SPACE = re.compile(r"[^ \t\n\r]")
_MAX_PICKLED_BYTES = 1 << 28
_NPY, _PARQUET = b"\x93NUMPY", b"PAR1"
_TORCH_SUFFIXES = {".bin", ".ckpt", ".pt", ".pth"}
_JSON_SUFFIXES = {".json", ".jsonl", ".ndjson"}
_TORCH_PICKLE, _TORCH_CHECKSUM = "data.pkl", ".data/serialization_id"
_TORCH_FILES = {_TORCH_PICKLE, "version", "byteorder", ".format_version", ".storage_alignment", _TORCH_CHECKSUM}
"""Members of a `torch.save` archive that have no tensors, or whose content follows from other members."""
_SKOPS_SCHEMA = "schema.json"
"""The member of a skops file that describes all other members."""


def compare_files(expected: Path, actual: Path, name: str) -> Sequence[FileDifference]:
    """Return the differences in file `name`; empty if both files have the same values, even if their bytes differ.

    Args:
        expected: the file of the undisturbed run.
        actual: the file of the other run.
        name: the path in the checkpoint; its suffix determines the format if the content does not.
    """
    if filecmp.cmp(expected, actual, shallow=False):
        return []
    with suppress(Exception):  # if a file is damaged, or its name does not match its format, compare bytes
        files = [_FileContent(name, _mmap_file(path), path) for path in (expected, actual)]
        differences = compare_values(_read_values(files[0]), _read_values(files[1]), name)
        # A Parquet file does not store when it was written, so different bytes count even if the columns are equal.
        if differences or bytes(files[0].data[: len(_PARQUET)]) != _PARQUET:
            return differences
    sizes = [path.stat().st_size for path in (expected, actual)]
    size = f"{sizes[0]:,} bytes" if sizes[0] == sizes[1] else f"{sizes[1]:,}, expected {sizes[0]:,} bytes"
    return [FileDifference(name, "", f"bytes differ ({size})", is_byte_comparison=True)]


# --------------------------------------------------------------------------------------------------------- formats


@dataclass(frozen=True)
class _FileContent:
    """A file, or a member of an archive."""

    name: str
    data: memoryview
    path: Path | None = None
    """The path of the file; None for a member of an archive."""

    def open(self) -> Any:
        return io.BytesIO(self.data) if self.path is None else self.path.open("rb")


def _mmap_file(path: Path) -> memoryview:
    """Map the bytes of a file into memory, so that they are read only when they are compared."""
    if not path.stat().st_size:
        return memoryview(b"")
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _read_values(file: _FileContent) -> Any:
    """Return the values of a file; raise an exception if the file is damaged or its format is unknown."""
    head, suffix = bytes(file.data[:8]), Path(file.name).suffix.lower()
    for magic, read in _READERS.items():
        if head.startswith(magic):
            return read(file)
    if suffix == ".safetensors":
        return _read_safetensors(file)
    if suffix in _JSON_SUFFIXES:
        with suppress(ValueError):
            return _read_json(file)
    if suffix in _TORCH_SUFFIXES and find_spec("torch"):
        with suppress(Exception):  # torch refuses an unsafe pickle: read it with stand-ins below
            return _read_torch(file)
    if len(file.data) > _MAX_PICKLED_BYTES:
        raise OverflowError
    if head.startswith((b"\x80", b"\x78")):
        with suppress(Exception):  # the file need not be a pickle: a text can begin with the second of these bytes
            return _read_pickles(file)
    text = str(file.data, "utf-8")
    if "\n" in text.strip():
        return TreeNode("text", {f"line {number:,}": Line(line) for number, line in enumerate(text.split("\n"), 1)})
    return text


def _read_member(file: _FileContent) -> Any:
    """Return the values of a member of an archive, or its bytes if the values cannot be read."""
    try:
        return _read_values(file)
    except Exception:  # noqa: BLE001 - see `_read_values`
        return bytes(file.data)


def _combine_values(values: Sequence[object]) -> object:
    """Return the only value of a file, or a node of its consecutive values; raise `ValueError` if it has no value."""
    if not values:
        raise ValueError("no value")
    several = {f"#{index}": value for index, value in enumerate(values)}
    return values[0] if len(values) == 1 else TreeNode("values one after another", several)


def _read_json(file: _FileContent) -> object:
    """Return the value of a JSON document, or the values of consecutive documents (JSON Lines)."""
    text = str(file.data, "utf-8")
    decoder, documents, position = json.JSONDecoder(object_pairs_hook=KeyValuePairs), list[object](), 0
    while begin := _NON_SPACE.search(text, position):
        document, position = decoder.raw_decode(text, begin.start())
        documents.append(document)
    return _combine_values(documents)


def _read_npy(file: _FileContent) -> object:
    """Return all arrays of a file; `numpy.load` would return only the first."""
    numpy, arrays = import_module("numpy"), list[Any]()
    layouts = numpy.lib.format
    headers = {(1, 0): layouts.read_array_header_1_0, (2, 0): layouts.read_array_header_2_0}
    with file.open() as stream:
        while stream.tell() < len(file.data):
            shape, is_fortran, dtype = headers[layouts.read_magic(stream)](stream)
            start, size = stream.tell(), math.prod(shape) * dtype.itemsize
            if size > len(file.data) - start:
                raise EOFError
            flat = numpy.frombuffer(file.data[start : start + size], dtype) if size else numpy.zeros(0, dtype)
            arrays.append(flat.reshape(shape, order="F" if is_fortran else "C"))
            stream.seek(start + size)
    return _combine_values(arrays)


def _read_safetensors(file: _FileContent) -> TreeNode:
    """Return the tensors and the metadata; sort the metadata, whose order in the file is arbitrary."""
    numpy = import_module("numpy")
    (length,) = struct.unpack("<Q", file.data[:8])
    header = dict(json.loads(bytes(file.data[8 : 8 + length]), object_pairs_hook=KeyValuePairs))
    parts: dict[str, Any] = {"[metadata]": dict(sorted(header.pop("__metadata__", ())))}
    data, position = file.data[8 + length :], 0
    for name, description in sorted(header.items(), key=lambda pair: dict(pair[1])["data_offsets"]):
        tensor = dict(description)
        start, end = tensor["data_offsets"]
        if start != position:
            raise ValueError("bytes outside of tensors")
        position, shape, dtype = end, tuple(tensor["shape"]), tensor["dtype"]
        raw = numpy.frombuffer(data[start:end], numpy.uint8) if end > start else numpy.zeros(0, numpy.uint8)
        if dtype in _DTYPES:
            parts[make_key_token(name)] = raw.view(_DTYPES[dtype]).reshape(shape)
        else:  # a type that NumPy lacks; bfloat16 is the first half of a float32
            numbers = (raw.view("u2").astype("u4") << 16).view("f4") if dtype == "BF16" else None
            width = len(raw) // count if (count := math.prod(shape)) and len(raw) % count == 0 else 1
            parts[make_key_token(name)] = Array(
                f"{dtype} {shape}", f"{len(raw):,} bytes", to_byte_rows(raw, width), numbers
            )
    if position != len(data):
        raise ValueError("bytes outside of tensors")
    return TreeNode("safetensors", parts)


_DTYPES = {
    **{f"F{bits}": f"f{bits // 8}" for bits in (16, 32, 64)},
    **{f"{kind}{bits}": f"{kind.lower()}{bits // 8}" for kind in "IU" for bits in (8, 16, 32, 64)},
    "BOOL": "?", "C64": "c8",
}  # fmt: skip


def _read_parquet(file: _FileContent) -> TreeNode:
    with import_module("pyarrow.parquet").ParquetFile(file.open()) as table_file:
        table = table_file.read()
    parts: list[tuple[str, Any]] = []
    for name, column in zip(table.column_names, table.columns, strict=True):
        is_numeric = not column.null_count and column.to_numpy().dtype.kind in "biuf"
        parts.append((name, column.to_numpy() if is_numeric else column.to_pylist()))
    return TreeNode("table", index_by_token(parts) | {"[schema]": table.schema.to_string(truncate_metadata=False)})


def _read_torch(file: _FileContent) -> object:
    """Return the saved object. Its tensors may be larger than the memory; they are read only when they are compared."""
    torch, objects = import_module("torch"), list[object]()
    if bytes(file.data[:4]) == b"PK\x03\x04":
        source, is_mapped = (file.open(), None) if file.path is None else (file.path, True)
        return torch.load(source, map_location="cpu", weights_only=True, mmap=is_mapped)
    stream = io.BytesIO(file.data)
    while stream.tell() < len(file.data):  # the old format: a file may contain several objects
        objects.append(torch.load(stream, map_location="cpu", weights_only=True))
    return _combine_values(objects)


def _read_compressed(file: _FileContent, decompress: Callable[[bytes], bytes]) -> object:
    return _read_member(_FileContent(Path(file.name).stem, memoryview(decompress(bytes(file.data)))))


def _read_zip(file: _FileContent) -> Any:
    """Return the object that `torch.save` or skops wrote, and the values of all other members by their names."""
    with file.open() as stream, zipfile.ZipFile(stream) as archive:
        _require_no_gaps(archive, file.data)
        names = archive.namelist()
        comments = [archive.comment, *(member.comment for member in archive.infolist())]
        members = [(info.filename, _read_member_data(archive, info, file.data)) for info in archive.infolist()]
    content, used = None, set[str]()
    top = next((name.removesuffix(_TORCH_PICKLE) for name in names if name.endswith(f"/{_TORCH_PICKLE}")), None)
    if top is not None and find_spec("torch"):
        used = {f"{top}{_TORCH_CHECKSUM}"}
        with suppress(Exception):  # torch refuses an unsafe pickle: compare the members, without tensor names
            content = _read_torch(file)
            used = {name for name in names if name.removeprefix(top) in _TORCH_FILES or name.startswith(f"{top}data/")}
    elif _SKOPS_SCHEMA in names:
        used = {_SKOPS_SCHEMA}
        schema = json.loads(bytes(dict(members)[_SKOPS_SCHEMA]), object_pairs_hook=KeyValuePairs)
        content = _strip_ids(schema, dict(members), used)
    is_npz = all(name.endswith(".npy") for name in names)
    values = [
        (name.removesuffix(".npy") if is_npz else name.removeprefix(top or ""), _read_member(_FileContent(name, data)))
        for name, data in members
        if name not in used
    ]
    others = index_by_token(values) | ({"[comments]": comments} if any(comments) else {})
    if content is None:
        return TreeNode("archive", others, is_ordered=True)
    if not others:
        return content
    node = to_tree_node(content) or TreeNode("value", {"[value]": content})
    return TreeNode(
        node.kind, {**node.parts, "[archive]": TreeNode("archive", others, is_ordered=True)}, node.is_ordered
    )


def _require_no_gaps(archive: zipfile.ZipFile, data: memoryview) -> None:
    """Raise `ValueError` if the file has bytes that belong to no member, such as another archive before this one."""
    end = 0
    for member in archive.infolist():
        if member.header_offset != end:
            raise ValueError("bytes between members")
        end = _find_data_start(member, data) + member.compress_size
        if member.flag_bits & 8:  # the checksum and the sizes follow; in zip64 a size has 8 bytes
            magic = 4 if bytes(data[end : end + 4]) == b"PK\x07\x08" else 0
            sizes = struct.pack("<LL", member.compress_size & 0xFFFFFFFF, member.file_size & 0xFFFFFFFF)
            end += magic + (12 if bytes(data[end + magic + 4 : end + magic + 12]) == sizes else 20)
    last = len(data) - 22 - len(archive.comment)
    if archive.start_dir != end or bytes(data[last : last + 4]) != b"PK\x05\x06":
        raise ValueError("bytes around the directory")


def _find_data_start(member: zipfile.ZipInfo, data: memoryview) -> int:
    offset = member.header_offset
    name_size, extra_size = struct.unpack("<HH", data[offset + 26 : offset + 30])
    return int(offset + 30 + name_size + extra_size)


def _read_member_data(archive: zipfile.ZipFile, member: zipfile.ZipInfo, data: memoryview) -> memoryview:
    if member.compress_type != zipfile.ZIP_STORED:
        return memoryview(archive.read(member))
    start = _find_data_start(member, data)
    return data[start : start + member.file_size]


def _strip_ids(node: Any, members: Mapping[str, memoryview], used: set[str]) -> Any:
    """Return a skops node without what differs between processes: ids, names of files, and the order of sets.

    skops names files by object ids, and writes sets in hash order, so replace such a name by the values, and sort sets.
    """
    if isinstance(node, list) and not isinstance(node, KeyValuePairs):
        return [_strip_ids(inner, members, used) for inner in node]
    if not isinstance(node, KeyValuePairs):
        return node
    stripped, is_set = KeyValuePairs(), ("__loader__", "SetNode") in node
    for key, value in node:
        if key == "file" and isinstance(value, str) and value in members:
            used.add(value)
            stripped.append((key, _read_member(_FileContent(value, members[value]))))
        elif key != "__id__" or not isinstance(value, int):
            inner = _strip_ids(value, members, used)
            stripped.append((key, sorted(inner, key=repr) if is_set and key == "content" else inner))
    return stripped


_READERS: Mapping[bytes, Callable[[_FileContent], Any]] = {
    b"PK\x03\x04": _read_zip,
    _NPY: _read_npy,
    _PARQUET: _read_parquet,
    b"\x1f\x8b": lambda file: _read_compressed(file, gzip.decompress),  # ignore the time in the header
    b"BZh": lambda file: _read_compressed(file, bz2.decompress),
    b"\xfd7zXZ": lambda file: _read_compressed(file, lzma.decompress),
}


# --------------------------------------------------------------------------------------------------------- pickles


class _StandIn(TreeNodeConvertible):
    """Replaces a class or function that a pickle names. It stores the arguments and the state, and runs no code."""

    path: str
    file: io.BytesIO
    """The file of the pickle."""
    arguments: list[Any]
    attributes: dict[Any, object]
    items: list[object]
    pairs: KeyValuePairs

    def __new__(cls, *arguments: object, **options: object) -> Self:
        instance = super().__new__(cls)
        instance.arguments = [*arguments, *([options] if options else [])]
        instance.attributes, instance.items, instance.pairs = {}, [], KeyValuePairs()
        return instance

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.attributes |= state
        else:
            self.arguments.append(state)
        if self.path == "joblib.numpy_pickle.NumpyArrayWrapper":
            self.attributes["values"] = _read_joblib_array(self.file, state)

    def append(self, item: object) -> None:
        self.items.append(item)

    def extend(self, items: Sequence[object]) -> None:
        self.items.extend(items)

    def __setitem__(self, key: object, value: object) -> None:
        self.pairs.append((key, value))

    def as_tree_node(self) -> TreeNode:
        attributes = index_by_token(self.attributes.items())
        positional = {f"#{index}": part for index, part in enumerate(self.arguments)}
        contained = {name: part for name, part in (("[items]", self.items), ("[keys]", self.pairs)) if part}
        return TreeNode(self.path, attributes | positional | contained)

    def __repr__(self) -> str:
        return f"<{self.path} {self.arguments} {self.attributes} {self.items} {self.pairs}>"

    add = append


_PLAIN_CLASSES: Mapping[tuple[str, str], object] = {
    **{(module, kind.__name__): kind for module in ("builtins", "__builtin__") for kind in (set, frozenset)},
    **{("datetime", kind.__name__): kind for kind in (dt.date, dt.time, dt.datetime, dt.timedelta, dt.timezone)},
    ("uuid", "UUID"): uuid.UUID,
}
"""Classes of plain values, whose creation runs no code of the pickle's author."""
_NUMPY_CALLS = {"_reconstruct", "_frombuffer", "scalar", "ndarray", "dtype"}
"""The functions and classes that pickles of NumPy's arrays and numbers call."""
_NUMPY_MODULES = {"numpy", *(f"numpy.{core}.{of}" for core in ("core", "_core") for of in ("multiarray", "numeric"))}


class _StandInUnpickler(pickle.Unpickler):
    """Reads a pickle with stand-ins, and imports only NumPy."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._file = file

    def find_class(self, module: str, name: str) -> Any:
        if (plain := _PLAIN_CLASSES.get((module, name))) is not None:
            return plain
        if (module, name) == ("_codecs", "encode"):
            return _encode_latin1  # old protocols pickle bytes this way
        if name in _NUMPY_CALLS and module in _NUMPY_MODULES:
            return super().find_class(module, name)
        attributes = {"path": f"{module}.{name}", "file": self._file, "__module__": module, "__qualname__": name}
        return type("_Named", (_StandIn,), attributes)

    def persistent_load(self, reference: object) -> object:
        return "persistent", reference


def _encode_latin1(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"unexpected encoding {encoding!r}")
    return text.encode("latin1")


def _read_joblib_array(file: io.BytesIO, header: Mapping[str, Any]) -> object:
    """Return the values of a joblib array, which follow the array's pickled `header` in the file."""
    numpy, dtype = import_module("numpy"), header["dtype"]
    if dtype.hasobject:
        return _StandInUnpickler(file).load()
    if header.get("numpy_array_alignment_bytes") is not None:
        file.read(file.read(1)[0])
    return numpy.frombuffer(file.read(math.prod(header["shape"]) * dtype.itemsize), dtype)


def _read_pickles(file: _FileContent) -> object:
    """Return the values of the consecutive pickles in a file, or in a zlib stream such as joblib writes."""
    data = bytes(file.data)
    if data.startswith(b"\x78"):
        unpacking = zlib.decompressobj()
        data = unpacking.decompress(data, _MAX_PICKLED_BYTES)
        if not unpacking.eof or unpacking.unused_data:
            raise OverflowError
    stream, pickles = io.BytesIO(data), list[object]()
    while stream.tell() < len(data):
        pickles.append(_StandInUnpickler(stream).load())
    return _combine_values(pickles)
