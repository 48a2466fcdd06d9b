"""What differs between two files of a checkpoint: by tensor or key where the format is known, else by byte.

No pickle is run: `torch.load` reads with `weights_only=True`, NumPy without pickles, and any other pickle is read with
stand-ins for its classes and functions. So equal values are equal though their bytes differ: the bytes of a pickle
depend on which of its objects are one object, and that changes when it is loaded.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, Self

_ZIP, _NPY, _PARQUET = b"PK\x03\x04", b"\x93NUMPY", b"PAR1"
_TORCH_SUFFIXES = {".bin", ".ckpt", ".pt", ".pth"}
_PICKLE, _ZLIB = b"\x80", b"\x78"
_SKOPS = "schema.json"
"""The member of a file of skops that says what each other member is."""
_JOBLIB_ARRAY = "joblib.numpy_pickle.NumpyArrayWrapper"
_CHUNK = 1 << 20
_SETS: Mapping[str, type[object]] = {"set": set, "frozenset": frozenset}
_MOST_PICKLED_BYTES, _MOST_VALUES = 1 << 28, 1_000_000


@dataclass(frozen=True, slots=True)
class FileDifference:
    """What differs in a file of two checkpoints of the same step."""

    file: str
    """Its path in the checkpoint."""
    key: str
    """The tensor, array, column, or path in JSON; empty if the file is compared as a whole."""
    what: str
    """For example `1 of 4,096 values, max |Δ| 2e-09`, or `5, expected 7`."""
    is_of_bytes: bool = False
    """Whether the bytes of the whole file were compared, since its values cannot be read."""

    def __str__(self) -> str:
        """Name the file, the key and the difference."""
        return ", ".join([f"`{self.file}`", *([f"`{self.key}`"] if self.key else []), self.what])


def compare_files(expected: Path, found: Path, name: str) -> Sequence[FileDifference]:
    """Return what differs in file `name`; empty if both hold the same values, though their bytes may differ.

    Args:
        expected: the file of the undisturbed run.
        found: the file of the other run.
        name: its path in the checkpoint, which also tells the format where its content does not.
    """
    if (at := _first_difference(expected, found)) is None:
        return []
    left, right = (_named_values(each, name) for each in (expected, found))
    if left is None or right is None:
        if what := _unlike_lines(expected, found):
            return [FileDifference(name, "", what)]
        sizes = f"{expected.stat().st_size:,} bytes", f"{found.stat().st_size:,}"
        size = sizes[0] if expected.stat().st_size == found.stat().st_size else f"{sizes[1]}, expected {sizes[0]}"
        return [FileDifference(name, "", f"bytes differ from byte {at:,} on ({size})", is_of_bytes=True)]
    return list(_compared(left, right, name))


def _first_difference(expected: Path, found: Path) -> int | None:
    """Return the first byte that differs; None if there is none."""
    at = 0
    with expected.open("rb") as left, found.open("rb") as right:
        while True:
            one, other = left.read(_CHUNK), right.read(_CHUNK)
            if one != other:
                pairs = zip(one, other, strict=False)
                return at + next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
            if not one:
                return None
            at += len(one)


def _unlike_lines(expected: Path, found: Path) -> str:
    """Return the first line of a text that differs; empty if one is no text, or ends where the other continues."""
    try:
        with expected.open(encoding="utf-8") as left, found.open(encoding="utf-8") as right:
            for number, (one, other) in enumerate(zip(left, right, strict=False), 1):
                if one != other:
                    return f"line {number:,}: {_shown(other.strip())}, expected {_shown(one.strip())}"
    except UnicodeDecodeError:
        pass
    return ""


def _compared(expected: Mapping[str, Any], found: Mapping[str, Any], name: str) -> Iterator[FileDifference]:
    for key in dict.fromkeys([*expected, *found]):
        if key not in found:
            yield FileDifference(name, key, "missing")
        elif key not in expected:
            yield FileDifference(name, key, "not in the undisturbed run")
        elif what := difference(expected[key], found[key]):
            yield FileDifference(name, key, what)


def difference(expected: Any, found: Any) -> str:
    """Return how two values differ: arrays, tensors, or JSON values without children; empty if no bit does."""
    expected, found = as_array(expected), as_array(found)
    if hasattr(expected, "dtype") and hasattr(found, "dtype"):
        return _of_arrays(expected, found)
    if type(expected) is type(found) and (expected == found or _both_nan(expected, found)):
        return ""
    if isinstance(expected, bytes) and isinstance(found, bytes):
        return f"bytes differ ({len(found):,}, expected {len(expected):,})"
    return f"{_shown(found)}, expected {_shown(expected)}"


def _both_nan(expected: object, found: object) -> bool:
    return all(isinstance(each, float) and math.isnan(each) for each in (expected, found))


def _of_arrays(expected: Any, found: Any) -> str:
    if (expected.dtype, expected.shape) != (found.dtype, found.shape):
        return f"{found.dtype} {found.shape}, expected {expected.dtype} {expected.shape}"
    numpy = import_module("numpy")
    one, other = (numpy.ascontiguousarray(each).reshape(-1) for each in (expected, found))
    count, farthest, is_number = 0, 0.0, one.dtype.kind in "biufc"
    wide = numpy.complex128 if one.dtype.kind == "c" else numpy.float64
    width = one.dtype.itemsize
    for start in range(0, one.size if width else 0, _CHUNK):  # checkpoints are large: a part of their values at a time
        left, right = (each[start : start + _CHUNK] for each in (one, other))
        unlike = (left.view(numpy.uint8) != right.view(numpy.uint8)).reshape(-1, width).any(axis=1)
        if here := int(unlike.sum()):
            count += here
            if is_number:
                with numpy.errstate(invalid="ignore", over="ignore"):
                    distances = numpy.abs(left[unlike].astype(wide) - right[unlike].astype(wide))
                farthest = float(numpy.maximum(farthest, distances.max()))  # NaN, if one of them is
    if not count:
        return ""
    return f"{count:,} of {one.size:,} values{f', max |Δ| {farthest:.2g}' if is_number else ''}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# ------------------------------------------------------------------------------------------------------ the formats


def _named_values(path: Path, name: str) -> Mapping[str, Any] | None:
    """Return the values of a file by name; None if its format is unknown, or it cannot be read without a pickle."""
    with path.open("rb") as file:
        head = file.read(8)
    try:
        return _read(path, Path(name).suffix.lower(), head)
    except Exception:  # noqa: BLE001 - a damaged file, or one of another kind than its name says: bytes tell the rest
        return None


def _read(path: Path, suffix: str, head: bytes) -> Mapping[str, Any] | None:
    if head.startswith(_ZIP):
        return _read_zip(path)
    if head.startswith(_NPY):
        mapped = "r" if path.stat().st_size > _CHUNK else None  # an array without values cannot be mapped
        return {"": import_module("numpy").load(path, mmap_mode=mapped, allow_pickle=False)}
    if head.startswith(_PARQUET):
        table = import_module("pyarrow.parquet").read_table(path)
        columns = {name: table.column(name) for name in table.column_names}
        return {name: each.to_numpy() if _is_numeric(each) else each.to_pylist() for name, each in columns.items()}
    if suffix == ".json":
        return dict(flat_values(json.loads(path.read_text(encoding="utf-8"))))
    if suffix == ".safetensors" and find_spec("safetensors"):
        framework = "pt" if find_spec("torch") else "np"
        with import_module("safetensors").safe_open(path, framework=framework) as tensors:
            return dict(flat_values({key: tensors.get_tensor(key) for key in tensors.keys()}))  # noqa: SIM118 - it is no dictionary
    if suffix in _TORCH_SUFFIXES and find_spec("torch"):
        with suppress(Exception):  # it needs a pickle
            return _read_torch(path)
    if head.startswith((_PICKLE, _ZLIB)) and path.stat().st_size <= _MOST_PICKLED_BYTES:
        return _pickled_values(path.read_bytes())
    return None


def _is_numeric(column: Any) -> bool:
    return not column.null_count and column.to_numpy().dtype.kind in "biuf"


def _read_zip(path: Path) -> Mapping[str, Any]:
    """Return a file of `torch.save` by tensors, of `numpy.savez` by arrays, of skops by values, others by members."""
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        if any(name.endswith("/data.pkl") for name in names) and find_spec("torch"):
            with suppress(Exception):  # it needs a pickle: its members tell which tensors differ, not their names
                return _read_torch(path)
        if names and all(name.endswith(".npy") for name in names):
            with import_module("numpy").load(path, allow_pickle=False) as arrays:
                return {name: arrays[name] for name in arrays.files}
        members = {name: archive.read(name) for name in names}
        if _SKOPS in members:
            return dict(flat_values(_without_ids(json.loads(members[_SKOPS]), members)))
        for name in [each for each in names if each.endswith("/data.pkl")]:
            with suppress(Exception):  # it stays bytes
                members |= {f"{name}.{key}": each for key, each in _pickled_values(members[name]).items()} | {name: b""}
        return members


def _without_ids(node: Any, members: Mapping[str, bytes]) -> Any:
    """Return a node of skops with the values of its file, and without ids: they differ between processes.

    skops names its files by the ids of the objects, too.
    """
    if isinstance(node, list):
        return [_without_ids(each, members) for each in node]
    if not isinstance(node, dict):
        return node
    found = {key: _without_ids(each, members) for key, each in node.items() if key != "__id__"}
    if isinstance(name := node.get("file"), str) and name in members:
        data = members[name]
        is_array = data.startswith(_NPY)
        found["file"] = import_module("numpy").load(io.BytesIO(data), allow_pickle=False) if is_array else data
    return found


def _read_torch(path: Path) -> Mapping[str, Any]:
    """Read from the disk what is compared when it is compared: a checkpoint may be larger than the memory."""
    torch, is_mapped = import_module("torch"), zipfile.is_zipfile(path)
    return dict(_leaves(torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)))


def flat_values(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested mappings and sequences with their paths, such as `state.3.exp_avg`."""
    return ((path, as_array(leaf)) for path, leaf in _leaves(value, name))


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, each in value.items():
            yield from _leaves(each, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple) and value:
        for index, each in enumerate(value):
            yield from _leaves(each, f"{name}.{index}" if name else str(index))
    else:
        yield name, value


def as_array(value: Any) -> Any:
    """Return a tensor as an array; NumPy has no bfloat16 and no 8-bit floats, so those are widened, which is exact."""
    if not all(hasattr(value, each) for each in ("detach", "is_floating_point")):
        return value
    own = value.to_local() if hasattr(value, "to_local") else value  # of a DTensor: the part of this rank
    plain = own.detach().cpu()
    plain = plain.to_dense() if getattr(plain, "is_sparse", False) else plain
    try:
        return plain.numpy()
    except TypeError:
        return plain.float().numpy()


# ------------------------------------------------------------------------------------------- pickles, without a run


class _StandIn:
    """A class or function that a pickle names, without its code: what the pickle passes to it is kept."""

    path: str
    file: io.BytesIO
    """Of the pickle, from which it is read."""

    def __new__(cls, *given: object, **options: object) -> Self:
        made = super().__new__(cls)
        made.parts = [*given, *([options] if options else [])]
        made.attributes, made.items = {}, []
        return made

    parts: list[object]
    attributes: dict[Any, object]
    items: list[object]

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.attributes |= state
        else:
            self.parts.append(state)
        if self.path == _JOBLIB_ARRAY:
            self.attributes["values"] = _after_its_header(self.file, state)

    def append(self, item: object) -> None:
        self.items.append(item)

    def extend(self, items: Sequence[object]) -> None:
        self.items.extend(items)

    def __setitem__(self, key: object, value: object) -> None:
        self.items.append((key, value))

    add = append


class _StandIns(pickle.Unpickler):
    """Reads a pickle, and imports nothing."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._file = file

    def find_class(self, module: str, name: str) -> type[object]:
        if module in {"builtins", "__builtin__"} and name in _SETS:
            return _SETS[name]  # in old protocols a call; they have no order
        return type("_Named", (_StandIn,), {"path": f"{module}.{name}", "file": self._file})

    def persistent_load(self, reference: object) -> object:
        return "persistent", reference


def _after_its_header(file: io.BytesIO, header: Mapping[str, Any]) -> object:
    """Return the values of an array of joblib, which are in the file after the object that describes them."""
    numpy = import_module("numpy")
    dtype = numpy.dtype(header["dtype"].parts[0])
    if dtype.hasobject:
        return _StandIns(file).load()
    if header.get("numpy_array_alignment_bytes") is not None:
        file.read(file.read(1)[0])
    return numpy.frombuffer(file.read(math.prod(header["shape"]) * dtype.itemsize), dtype)


def _pickled_values(data: bytes) -> Mapping[str, Any]:
    """Return the values of the pickles in `data`, one after another, by their paths.

    Raises:
        Exception: they cannot be read, or are too many.
    """
    if data.startswith(_ZLIB):
        unpacking = zlib.decompressobj()
        data = unpacking.decompress(data, _MOST_PICKLED_BYTES)
        if not unpacking.eof:
            raise OverflowError
    file, found = io.BytesIO(data), list[object]()
    while file.tell() < len(data):
        found.append(_StandIns(file).load())
    leaves = list(islice(_pickled_leaves(found[0] if len(found) == 1 else found, "", ()), _MOST_VALUES + 1))
    if len(leaves) > _MOST_VALUES or len(named := dict(leaves)) < len(leaves):
        raise OverflowError  # shared objects may be many paths; two values with one name would hide each other
    return named


def _pickled_leaves(value: Any, name: str, around: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    children: Sequence[tuple[object, object]] = ()
    if id(value) in around:
        value = f"<the object {len(around) - around.index(id(value))} levels up>"
    elif isinstance(value, _StandIn):
        yield f"type({name})", value.path
        children = [*value.attributes.items(), *enumerate([*value.parts, *([value.items] if value.items else [])])]
    elif isinstance(value, dict):
        children = list(value.items())
    elif isinstance(value, list | tuple):
        children = list(enumerate(value))
    elif isinstance(value, set | frozenset):
        children = list(enumerate(sorted(value, key=lambda each: repr(list(_pickled_leaves(each, "", ()))))))
    elif isinstance(value, type):
        value = f"<{getattr(value, 'path', value.__name__)}>"
    if not children and not isinstance(value, _StandIn):
        yield name, value
    for key, each in children:
        shown = str(key) if isinstance(key, str | int) else repr(list(_pickled_leaves(key, "", ())))
        yield from _pickled_leaves(each, f"{name}.{shown}" if name else shown, (*around, id(value)))
