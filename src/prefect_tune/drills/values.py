"""The values in a file of a checkpoint by their paths, and how two values differ.

A path is a tuple of tokens that no two keys share: `1` and `'1'`, `a.b` and `a` in `b` are different places, though a
person may write them alike. Values are the same if their types and bits are: `1` is not `1.0`, `0.0` not `-0.0`, a list
no tuple, and two NaNs are the same only if all their bits are. The order of a dictionary's keys is a value, too: a
program may go through them.
"""

from __future__ import annotations

import re
import struct
from ast import literal_eval
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time, timedelta
from importlib import import_module
from typing import Any, TypeAlias
from uuid import UUID

ValuePath: TypeAlias = tuple[str, ...]
Scalar: TypeAlias = bool | int | float | str | date | time | timedelta | UUID

TYPE = "type()"
"""The last token of the path at which the class of an object is."""
CONTAINER = "[container]"
"""The last token of the path at which it is said what a container is."""
_PLAIN_KEY = re.compile(r"[^\s.#'\"\[\]()]+")
_INTEGER = re.compile(r"-?\d+")
_COMPARED_AT_ONCE = 1 << 20
_MAX_SHOWN_CHARACTERS = 60
_MAX_SCALAR_CHARACTERS = 100


class Pairs(list[tuple[object, object]]):
    """The keys and values of an object in JSON, in their order, in which a key may be twice."""


@dataclass(frozen=True, slots=True)
class Container:
    """What holds other values: its type, and the order of its keys; empty if it has none."""

    kind: str
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Array:
    """An array or a tensor: its bytes, which are compared, and its numbers, whose distance is shown."""

    shown_type: str
    """The dtype and the shape."""
    details: str
    """What else makes it another array: its class, the order of its axes in memory."""
    rows: Any
    """The bytes as a NumPy array, a row for each number."""
    numbers: Callable[[slice], Any] | None = None
    """Return some of its numbers as 64-bit floats; None if it has none."""
    scalar: Scalar | None = None
    """Its only number if it has no axis."""


# ----------------------------------------------------------------------------------------------------------- paths


def key_token(key: object) -> str:
    """Return the token of a dictionary's key, which no other key has."""
    if type(key) is str:
        return key if _PLAIN_KEY.fullmatch(key) and not _INTEGER.fullmatch(key) else repr(key)
    if type(key) is int:
        return str(key)
    if key is None or type(key) in {bool, float, complex, bytes}:
        return f"[{key!r}]"
    return f"[{list(leaves(key))!r}]"


def canonical_text(path: ValuePath) -> str:
    """Return the path as a text that no other path has."""
    return ".".join(path)


def shown_text(path: ValuePath) -> str:
    """Return the path as a person would write it, such as `state.3.exp_avg`."""
    if path[-1:] == (CONTAINER,):
        return shown_text(path[:-1])
    if path[-1:] == (TYPE,):
        return f"type({shown_text(path[:-1])})"
    return ".".join(map(_shown_token, path))


def is_in_list(canonical: str) -> bool:
    """Whether a value is an element of a list, such as one of many weights."""
    return re.search(r"(^|\.)#\d+$", canonical) is not None


def _shown_token(token: str) -> str:
    if token[:1] not in {"'", '"'} or token[-1:] != token[:1]:
        return token.removeprefix("#")
    key = str(literal_eval(token))
    is_clear = key.isprintable() and key.strip() and not _INTEGER.fullmatch(key) and not set("#'\"[]()") & set(key)
    return key if is_clear else token


# ---------------------------------------------------------------------------------------------------------- leaves


def leaves(
    value: Any, path: ValuePath = (), around: tuple[int, ...] = (), parts_of: Callable[[Any], Any] = lambda _: None
) -> Iterator[tuple[ValuePath, Any]]:
    """Yield the innermost values with their paths, and at the paths of containers what they are.

    Args:
        value: a value, or a container of values.
        path: where it is.
        around: the ids of the containers that it is in: what contains itself ends there.
        parts_of: returns a container's class and its parts by token, or a value in place of an object; None if it
            does not know the object.
    """
    if id(value) in around:
        yield path, Container(f"<the object {len(around) - around.index(id(value))} levels up>")
        return
    found = parts_of(value)
    if isinstance(found, tuple):
        name, parts = found
        yield (*path, TYPE), name
        keys: tuple[str, ...] = ()
    else:
        value = value if found is None else found
        if isinstance(value, Mapping | Pairs):
            pairs = value if isinstance(value, Pairs) else value.items()
            parts = _without_twins((_token_of(key, parts_of), each) for key, each in pairs)
            keys = tuple(token for token, _ in parts)
            if not isinstance(value, Pairs) and (attributes := getattr(value, "__dict__", None)):
                parts = [*parts, ("[attributes]", dict(attributes))]  # such as the metadata of a model's state
        elif isinstance(value, list | tuple):
            parts, keys = [(f"#{index}", each) for index, each in enumerate(value)], ()
        elif isinstance(value, set | frozenset):
            members = sorted(value, key=lambda member: _rank_in_set(list(leaves(member, parts_of=parts_of))))
            parts, keys = [(f"#{index}", each) for index, each in enumerate(members)], ()
        else:
            yield from _leaves_of_one(value, path, (*around, id(value)))
            return
        yield (*path, CONTAINER), Container(_kind_of(value), keys)
        if not parts:
            yield path, ()
    for token, each in parts:
        yield from leaves(each, (*path, token), (*around, id(value)), parts_of)


def leaves_of_sequence(
    documents: Sequence[object], parts_of: Callable[[Any], Any] = lambda _: None
) -> Iterator[tuple[ValuePath, Any]]:
    """Yield the leaves of a file that holds one value, or several one after another.

    Raises:
        ValueError: it holds none.
    """
    if not documents:
        raise ValueError("no value")
    if len(documents) == 1:
        yield from leaves(documents[0], parts_of=parts_of)
        return
    yield (CONTAINER,), Container("values one after another")
    for index, document in enumerate(documents):
        yield from leaves(document, (f"#{index}",), parts_of=parts_of)


def _token_of(key: object, parts_of: Callable[[Any], Any]) -> str:
    if isinstance(key, str | int | float | complex | bytes | None):
        return key_token(key)
    return f"[{list(leaves(key, parts_of=parts_of))!r}]"


def _rank_in_set(found: list[tuple[ValuePath, Any]]) -> tuple[int, str]:
    return len(found), repr(found)


def _without_twins(parts: Any) -> list[tuple[str, Any]]:
    """Return the parts, the second of a token with a token of its own."""
    seen: dict[str, int] = {}
    unlike = []
    for token, value in parts:
        seen[token] = seen.get(token, 0) + 1
        unlike.append((token if seen[token] == 1 else f"{token}[{seen[token]}]", value))
    return unlike


def _kind_of(value: object) -> str:
    kind = dict if isinstance(value, Pairs) else type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _leaves_of_one(value: Any, path: ValuePath, around: tuple[int, ...]) -> Iterator[tuple[ValuePath, Any]]:
    if all(hasattr(value, each) for each in ("detach", "is_floating_point")):
        yield from _leaves_of_tensor(value, path, around)
    elif all(hasattr(value, each) for each in ("dtype", "strides", "tobytes")):
        yield path, array_of(value)
    else:
        yield path, value


def array_of(array: Any) -> Array:
    """Return an array or a scalar of NumPy.

    Raises:
        TypeError: it holds Python objects.
    """
    numpy = import_module("numpy")
    kind = type(array).__name__ if not isinstance(array, numpy.memmap) else "ndarray"
    plain = numpy.asarray(array)
    if plain.dtype.hasobject:
        raise TypeError("an array of objects has no bytes of its own")
    flat = numpy.ascontiguousarray(plain).reshape(-1)
    wide = numpy.complex128 if flat.dtype.kind == "c" else numpy.float64
    is_number = flat.dtype.kind in "biufc"
    return Array(
        f"{plain.dtype} {plain.shape}",
        f"{kind}, {_axes(plain.shape, plain.strides)}",
        _rows_of(flat, plain.dtype.itemsize),
        (lambda part: flat[part].astype(wide)) if is_number else None,
        flat[0].item() if plain.shape == () and is_number else None,
    )


def raw_array(shown_type: str, data: Any, width: int, numbers: Callable[[slice], Any] | None = None) -> Array:
    """Return an array of which the bytes are known, as a NumPy array of bytes, and how many a number has."""
    return Array(shown_type, "", _rows_of(data, width), numbers)


def _rows_of(flat: Any, width: int) -> Any:
    numpy = import_module("numpy")
    if not (width and flat.size):
        return numpy.zeros((0, 1), numpy.uint8)
    return flat.view(numpy.ndarray).view(numpy.uint8).reshape(-1, width)


def _leaves_of_tensor(value: Any, path: ValuePath, around: tuple[int, ...]) -> Iterator[tuple[ValuePath, Any]]:
    torch = import_module("torch")
    own = value.to_local() if hasattr(value, "to_local") else value  # of a DTensor: the part of this rank
    tensor = own.detach().cpu()
    details = [type(value).__qualname__, *(["requires a gradient"] if value.requires_grad else [])]
    parts: dict[str, object] = {}
    if tensor.layout == torch.sparse_coo:
        parts = {"indices": tensor._indices(), "values": tensor._values(), "coalesced": tensor.is_coalesced()}  # noqa: SLF001 - the public ones raise unless it is coalesced
    elif tensor.layout != torch.strided:
        names = ("crow_indices", "col_indices", "ccol_indices", "row_indices", "values")
        parts = {name: getattr(tensor, name)() for name in names if _has_part(tensor, name)}
    elif tensor.is_quantized:
        parts = {"integers": tensor.int_repr(), "values": tensor.dequantize()}  # with its scales
    if parts:
        yield (*path, TYPE), f"{tensor.layout} {tensor.dtype} {tuple(tensor.shape)} {', '.join(details)}"
        for name, part in parts.items():
            yield from leaves(part, (*path, f"[{name}]"), around)
        return
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    yield (
        path,
        Array(
            f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}",
            ", ".join([*details, _axes(tuple(tensor.shape), tensor.stride())]),
            _rows_of(flat.view(torch.uint8).numpy(), tensor.element_size()),
            lambda part: flat[part].to(wide).numpy(),
            tensor.item() if tensor.dim() == 0 else None,
        ),
    )


def _has_part(tensor: Any, name: str) -> bool:
    try:
        return getattr(tensor, name)() is not None
    except RuntimeError:  # of another layout
        return False


def _axes(shape: tuple[int, ...], strides: tuple[int, ...]) -> str:
    """Return the order of the axes in memory: sums are rounded in an order that depends on it."""
    axes = [axis for axis, size in enumerate(shape) if size > 1]
    in_order = sorted(axes, key=lambda axis: -abs(strides[axis]))
    return "" if in_order == axes else f"axes in memory {', '.join(map(str, in_order))}"


# ------------------------------------------------------------------------------------------------------ comparisons


def differing_values(
    expected: Mapping[ValuePath, Any], found: Mapping[ValuePath, Any]
) -> Iterator[tuple[ValuePath, str, tuple[Scalar | None, Scalar | None]]]:
    """Yield what differs: the path, the difference in words, and both values where they are scalars."""
    for path in dict.fromkeys([*expected, *found]):
        if path in expected and path in found:
            if what := difference(expected[path], found[path]):
                yield path, what, (scalar_of(expected[path]), scalar_of(found[path]))
        elif not isinstance((expected if path in expected else found)[path], Container):
            yield path, "missing" if path in expected else "not in the undisturbed run", (None, None)


def scalar_of(value: object) -> Scalar | None:
    """Return a value that is a number, a time or a short text; else None."""
    if isinstance(value, Array):
        return value.scalar
    if isinstance(value, str):
        return value if len(value) <= _MAX_SCALAR_CHARACTERS else None
    return value if isinstance(value, bool | int | float | date | time | timedelta | UUID) else None


def difference(expected: Any, found: Any) -> str:
    """Return how two values differ; empty if their types and all their bits are the same."""
    if isinstance(expected, Array) and isinstance(found, Array):
        return _difference_of_arrays(expected, found)
    if isinstance(expected, Container) and isinstance(found, Container):
        return _difference_of_containers(expected, found)
    if type(expected) is type(found) and _bits_of(expected) == _bits_of(found):
        return ""
    if isinstance(expected, bytes) and isinstance(found, bytes):
        return f"bytes differ ({len(found):,}, expected {len(expected):,})"
    return f"{_shown(found)}, expected {_shown(expected)}"


def _bits_of(value: Any) -> object:
    """Return what is equal for the same values of one type only."""
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, complex):
        return struct.pack("<dd", value.real, value.imag)
    if isinstance(value, bool | int | str | bytes | bytearray | None):
        return value
    return repr(value)


def _difference_of_containers(expected: Container, found: Container) -> str:
    if expected.kind != found.kind:
        return f"{found.kind}, expected {expected.kind}"
    if expected.keys == found.keys or sorted(expected.keys) != sorted(found.keys):
        return ""  # a key that one of them lacks is a difference of its own
    first = next(index for index, (a, b) in enumerate(zip(expected.keys, found.keys, strict=True)) if a != b)
    keys = (_shown_token(each.keys[first]) for each in (found, expected))
    return "keys in another order: number {} is `{}`, expected `{}`".format(first + 1, *keys)


def _difference_of_arrays(expected: Array, found: Array) -> str:
    if expected.shown_type != found.shown_type:
        return f"{found.shown_type}, expected {expected.shown_type}"
    if expected.details != found.details:
        return f"{found.shown_type}, {found.details}; expected {expected.details}"
    if expected.rows.shape != found.rows.shape:
        return f"{found.rows.size:,} bytes, expected {expected.rows.size:,}"
    numpy = import_module("numpy")
    count, farthest = 0, 0.0
    for start in range(0, len(expected.rows), _COMPARED_AT_ONCE):  # checkpoints are large: a part at a time
        part = slice(start, start + _COMPARED_AT_ONCE)
        unlike = (expected.rows[part] != found.rows[part]).any(axis=1)
        if here := int(unlike.sum()):
            count += here
            if expected.numbers and found.numbers:
                with numpy.errstate(invalid="ignore", over="ignore"):
                    distances = numpy.abs(expected.numbers(part)[unlike] - found.numbers(part)[unlike])
                farthest = float(numpy.maximum(farthest, distances.max()))  # NaN, if one of them is
    if not count:
        return ""
    return f"{count:,} of {len(expected.rows):,} values{f', max |Δ| {farthest:.2g}' if expected.numbers else ''}"


def _shown(value: object) -> str:
    if isinstance(value, Array):
        return value.shown_type
    text = value.kind if isinstance(value, Container) else repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[: _MAX_SHOWN_CHARACTERS - 3]}..."
