"""What differs between two files of a checkpoint: by tensor or key where the format is known, else by byte.

No pickle is run: `torch.load` reads with `weights_only=True`, NumPy without pickles, and any other pickle is bytes.
"""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_ZIP, _NPY, _PARQUET = b"PK\x03\x04", b"\x93NUMPY", b"PAR1"
_TORCH_SUFFIXES = {".bin", ".ckpt", ".pt", ".pth"}
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class FileDifference:
    """What differs in a file of two checkpoints of the same step."""

    file: str
    """Its path in the checkpoint."""
    key: str
    """The tensor, array, column, or path in JSON; empty if the file is compared as a whole."""
    what: str
    """For example `1 of 4,096 values, max |Δ| 2e-09`, or `5, expected 7`."""

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
        return [FileDifference(name, "", f"bytes differ from byte {at:,} on ({size})")]
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
    """Return how two values differ: arrays, or JSON values without children; empty if they are the same, bit by bit."""
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
    width = one.dtype.itemsize
    unlike = (one.view(numpy.uint8) != other.view(numpy.uint8)).reshape(-1, width).any(axis=1) if width else one[:0]
    count = int(unlike.sum())
    if not count:
        return ""
    far = ""
    if one.dtype.kind in "biufc":
        with numpy.errstate(invalid="ignore", over="ignore"):
            wide = numpy.complex128 if one.dtype.kind == "c" else numpy.float64
            far = f", max |Δ| {float(numpy.abs(one[unlike].astype(wide) - other[unlike].astype(wide)).max()):.2g}"
    return f"{count:,} of {one.size:,} values{far}"


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
        return {"": import_module("numpy").load(path, allow_pickle=False)}
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
        return _read_torch(path)
    return None


def _is_numeric(column: Any) -> bool:
    return not column.null_count and column.to_numpy().dtype.kind in "biuf"


def _read_zip(path: Path) -> Mapping[str, Any]:
    """Return a file of `torch.save` by tensors, one of `numpy.savez` by arrays, another archive by its members."""
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        if any(name.endswith("/data.pkl") for name in names) and find_spec("torch"):
            with suppress(Exception):  # it needs a pickle: its members tell which tensors differ, not their names
                return _read_torch(path)
        if names and all(name.endswith(".npy") for name in names):
            with import_module("numpy").load(path, allow_pickle=False) as arrays:
                return {name: arrays[name] for name in arrays.files}
        return {name: archive.read(name) for name in names}


def _read_torch(path: Path) -> Mapping[str, Any]:
    return dict(flat_values(import_module("torch").load(path, map_location="cpu", weights_only=True)))


def flat_values(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested mappings and sequences with their paths, such as `state.3.exp_avg`."""
    if isinstance(value, Mapping) and value:
        for key, each in value.items():
            yield from flat_values(each, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple) and value:
        for index, each in enumerate(value):
            yield from flat_values(each, f"{name}.{index}" if name else str(index))
    else:
        yield name, as_array(value)


def as_array(value: Any) -> Any:
    """Return a tensor as an array; NumPy has no bfloat16 and no 8-bit floats, so those are widened, which is exact."""
    if not all(hasattr(value, each) for each in ("detach", "is_floating_point")):
        return value
    plain = value.detach().cpu()
    plain = plain.to_dense() if getattr(plain, "is_sparse", False) else plain
    try:
        return plain.numpy()
    except TypeError:
        return plain.float().numpy()
