"""The values of pickles, and of files of joblib, read without running them: stand-ins take the place of classes.

So equal values are equal though their bytes differ: the bytes of a pickle depend on which of its objects are one
object, and that changes when it is loaded.
"""

from __future__ import annotations

import datetime as dt
import io
import math
import pickle
import uuid
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, Self

from prefect_tune.drills.values import Pairs, ValuePath, key_token, leaves_of_sequence

_JOBLIB_ARRAY = "joblib.numpy_pickle.NumpyArrayWrapper"
_PLAIN_CLASSES: Mapping[tuple[str, str], type[object]] = {
    **{(module, kind.__name__): kind for module in ("builtins", "__builtin__") for kind in (set, frozenset)},
    **{("datetime", kind.__name__): kind for kind in (dt.date, dt.time, dt.datetime)},
    **{("datetime", kind.__name__): kind for kind in (dt.timedelta, dt.timezone)},
    ("uuid", "UUID"): uuid.UUID,
}
"""Classes that only hold a value: no code of the pickle's author runs when they are made."""


class _StandIn:
    """A class or function that a pickle names, without its code: what the pickle passes to it is kept."""

    path: str
    file: io.BytesIO
    """Of the pickle, from which it is read."""

    def __new__(cls, *arguments: object, **options: object) -> Self:
        made = super().__new__(cls)
        made.parts = [*arguments, *([options] if options else [])]
        made.attributes, made.items, made.pairs = {}, [], Pairs()
        return made

    parts: list[Any]
    attributes: dict[Any, object]
    items: list[object]
    pairs: Pairs

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.attributes |= state
        else:
            self.parts.append(state)
        if self.path == _JOBLIB_ARRAY:
            self.attributes["values"] = _values_after_header(self.file, state)

    def append(self, item: object) -> None:
        self.items.append(item)

    def extend(self, items: Sequence[object]) -> None:
        self.items.extend(items)

    def __setitem__(self, key: object, value: object) -> None:
        self.pairs.append((key, value))

    add = append


class _StandIns(pickle.Unpickler):
    """Reads a pickle, and imports nothing."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._file = file

    def find_class(self, module: str, name: str) -> Any:
        if (plain := _PLAIN_CLASSES.get((module, name))) is not None:
            return plain
        if (module, name) == ("_codecs", "encode"):
            return _encode  # of bytes, in old protocols
        return type("_Named", (_StandIn,), {"path": f"{module}.{name}", "file": self._file})

    def persistent_load(self, reference: object) -> object:
        return "persistent", reference


def _encode(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"unexpected encoding {encoding!r}")
    return text.encode("latin1")


def _values_after_header(file: io.BytesIO, header: Mapping[str, Any]) -> object:
    """Return the values of an array of joblib, which are in the file after the object that describes them."""
    numpy = import_module("numpy")
    dtype = _dtype_of(header["dtype"])
    if dtype.hasobject:
        return _StandIns(file).load()
    if header.get("numpy_array_alignment_bytes") is not None:
        file.read(file.read(1)[0])
    return numpy.frombuffer(file.read(math.prod(header["shape"]) * dtype.itemsize), dtype)


def _dtype_of(stand_in: Any) -> Any:
    """Return the dtype that a stand-in describes: its name, and its byte order in its state.

    Raises:
        TypeError: it is one with fields, whose parts describe it.
    """
    numpy = import_module("numpy")
    dtype = numpy.dtype(stand_in.parts[0])
    state = stand_in.parts[-1]
    if not isinstance(state, tuple) or dtype.hasobject:
        return dtype
    if dtype.kind == "V" or state[2] is not None:
        raise TypeError("a dtype with fields")
    return dtype.newbyteorder(state[1]) if state[1] in {"<", ">"} else dtype


def pickled_leaves(data: bytes) -> Iterator[tuple[ValuePath, Any]]:
    """Yield the values of the pickles in `data`, one after another, by their paths.

    Raises:
        Exception: they cannot be read.
    """
    file, pickles = io.BytesIO(data), list[object]()
    while file.tell() < len(data):
        pickles.append(_StandIns(file).load())
    yield from leaves_of_sequence(pickles, _parts_of)


def _parts_of(value: Any) -> object:
    """Return the class and the parts of a stand-in, or the array that it describes; None for all other values."""
    if isinstance(value, type):
        return f"<{getattr(value, 'path', value.__name__)}>"
    if not isinstance(value, _StandIn):
        return None
    if (array := _array_of(value)) is not None:
        return array
    named = value.attributes.items()
    attributes = ((key_token(name) if isinstance(name, str) else f"[{name!r}]", part) for name, part in named)
    parts: list[tuple[str, object]] = [*attributes, *((f"#{index}", part) for index, part in enumerate(value.parts))]
    parts += [("[items]", value.items)] if value.items else []
    parts += [("[keys]", value.pairs)] if value.pairs else []
    return value.path, parts


def _array_of(stand_in: Any) -> Any:
    """Return the array or number of NumPy that a stand-in describes; None if it describes none, or one of objects."""
    numpy = import_module("numpy") if stand_in.path.startswith("numpy.") else None
    try:
        match stand_in.path.rpartition(".")[2], stand_in.parts:
            case "scalar", [dtype, bytes(data)] if numpy:
                return numpy.frombuffer(data, _dtype_of(dtype))[0]
            case "_reconstruct", [kind, _, _, (_, shape, dtype, is_fortran, bytes(data))] if numpy and (
                kind.path == "numpy.ndarray"
            ):
                found = numpy.frombuffer(data, _dtype_of(dtype))
                return found.reshape(shape, order="F" if is_fortran else "C")
            case "_frombuffer", [bytes() | bytearray() as data, dtype, shape, order] if numpy:
                return numpy.frombuffer(data, _dtype_of(dtype)).reshape(shape, order=order)
    except (AttributeError, TypeError, ValueError):
        pass  # then its parts are compared
    return None
