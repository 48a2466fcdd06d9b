"""What differs between two values: trees of containers and leaves, compared side by side.

Values are the same if their types and bits are: `1` is not `1.0`, `0.0` not `-0.0`, a list no tuple, and two NaNs are
the same only if all their bits are. The order of a dictionary's keys is a value, too: a program may go through them.
"""

from __future__ import annotations

import datetime as dt
import re
import struct
import uuid
from ast import literal_eval
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, TypeAlias

ValuePath: TypeAlias = tuple[str, ...]
"""Tokens that no two keys share: `1` and `'1'`, `a.b` and `a` in `b` are different places."""
Scalar: TypeAlias = bool | int | float | str | dt.date | dt.time | dt.timedelta | uuid.UUID

MISSING, UNEXPECTED = "missing", "not in the undisturbed run"
"""What differs about a value or a file that only one of two runs has."""
_PLAIN_KEY = re.compile(r"[^\s.#'\"\[\]()]+")
_INTEGER = re.compile(r"-?\d+")
_MAX_SHOWN_CHARACTERS, _MAX_SCALAR_CHARACTERS = 60, 100
_MAX_DIFFERENCES = 1_000_000
_COMPARED_AT_ONCE = 1 << 20


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
    path: str = ""
    """The key as a text that no other key has, if that is another one."""
    scalars: tuple[Scalar | None, Scalar | None] = field(default=(None, None), compare=False)
    """The expected and the other value, if they are numbers, times or short texts."""

    def __str__(self) -> str:
        """Name the file, the key and the difference."""
        return ", ".join([f"`{self.file}`", *([f"`{self.key}`"] if self.key else []), self.what])


def compare_values(expected: object, found: object, name: str) -> Sequence[FileDifference]:
    """Return what differs between the values of two files, or the metrics of two steps.

    Raises:
        OverflowError: too much differs: shared objects may be at many paths.
    """
    comparison = _Comparison(name)
    comparison.compare(expected, found, ())
    return comparison.differences


@dataclass
class _Comparison:
    name: str
    differences: list[FileDifference] = field(default_factory=list)
    compared: dict[tuple[int, int], object] = field(default_factory=dict)
    """Pairs that are the same, or in which the present values are; with the objects, so that no other has their ids."""

    def compare(self, expected: object, found: object, path: ValuePath) -> None:
        pair = id(expected), id(found)
        if pair in self.compared:
            return
        left, right = node_of(expected), node_of(found)
        if left is None or right is None:
            one, other = left or _leaf_of(expected), right or _leaf_of(found)
            if what := _leaf_difference(one, other):
                self.add(path, what, (_scalar_of(one), _scalar_of(other)))
            return
        if left.kind != right.kind:
            self.add(path, f"{right.kind}, expected {left.kind}")
            return
        self.compared[pair], count = (expected, found), len(self.differences)
        if what := _order_difference(left, right):
            self.add(path, what)
        for token in dict.fromkeys([*left.parts, *right.parts]):
            if token in left.parts and token in right.parts:
                self.compare(left.parts[token], right.parts[token], (*path, token))
            else:
                self.add((*path, token), MISSING if token in left.parts else UNEXPECTED)
        if len(self.differences) > count:
            del self.compared[pair]  # it differs at its other paths, too

    def add(self, path: ValuePath, what: str, scalars: tuple[Scalar | None, Scalar | None] = (None, None)) -> None:
        if len(self.differences) == _MAX_DIFFERENCES:
            raise OverflowError
        key, unique = ".".join(map(_shown_token, path)), ".".join(path)
        self.differences.append(
            FileDifference(self.name, key, what, path=unique if unique != key else "", scalars=scalars)
        )


def _order_difference(expected: Node, found: Node) -> str:
    orders = list(found.parts), list(expected.parts)
    if not expected.is_ordered or orders[0] == orders[1] or set(orders[0]) != set(orders[1]):
        return ""  # a key that one of them lacks is a difference of its own
    at = next(index for index, (one, other) in enumerate(zip(*orders, strict=True)) if one != other)
    keys = (_shown_token(tokens[at]) for tokens in orders)
    return "keys in another order: number {} is `{}`, expected `{}`".format(at + 1, *keys)


def scalars_in(value: object) -> Iterator[tuple[str, Scalar | None]]:
    """Yield the innermost values with their paths, as in `FileDifference.path`; None for one that is no scalar."""

    def walk(value: object, path: ValuePath) -> Iterator[tuple[str, Scalar | None]]:
        if (node := node_of(value)) is None:
            yield ".".join(path), _scalar_of(_leaf_of(value))
            return
        for token, part in node.parts.items():
            yield from walk(part, (*path, token))

    return walk(value, ())


# ----------------------------------------------------------------------------------------------------------- paths


def is_in_list(canonical: str) -> bool:
    """Whether a value is an element of a list, such as one of many weights."""
    return re.search(r"(^|\.)#\d+$", canonical) is not None


def token_of(key: object) -> str:
    """Return the token of a key, which no other key has."""
    if type(key) is str:
        return key if _PLAIN_KEY.fullmatch(key) and not _INTEGER.fullmatch(key) else repr(key)
    return str(key) if type(key) is int else f"[{key!r}]"


def _shown_token(token: str) -> str:
    """Return the token as a person would write it, such as `exp_avg` or `3`."""
    if token[:1] not in {"'", '"'} or token[-1:] != token[:1]:
        return token.removeprefix("#")
    key = str(literal_eval(token))
    is_clear = key.isprintable() and key.strip() and not _INTEGER.fullmatch(key) and not set("#'\"[]()") & set(key)
    return key if is_clear else token


# ---------------------------------------------------------------------------------------------------------- values


class Pairs(list[tuple[object, object]]):
    """The keys and values of an object in JSON, in their order, in which a key may be twice."""


@dataclass(frozen=True, slots=True)
class Node:
    """A value that holds others: its type, and what it holds by the tokens of their paths."""

    kind: str
    parts: Mapping[str, Any]
    is_ordered: bool = False
    """Whether the order of its parts is a value."""


class Described:
    """The base class of objects that say what they hold."""

    def as_node(self) -> Node:
        """Return what it holds."""
        raise NotImplementedError


@dataclass(frozen=True)
class Array:
    """An array or a tensor: its bytes, which are compared, and its numbers, whose distance is shown."""

    shown_type: str
    """The dtype and the shape."""
    details: str
    """What else makes it another array: its class, the order of its axes in memory."""
    rows: Any
    """The bytes as a NumPy array, a row for each number."""
    numbers: Any = None
    """Its numbers, flat, as an array or a tensor; None if it has none."""
    scalar: Scalar | None = None
    """Its only number if it has no axis."""


class Line(str):
    """A line of a text, which may hold weights."""

    __slots__ = ()


def node_of(value: Any) -> Node | None:
    """Return what a container holds; None for all other values."""
    match value:
        case type():
            return None
        case Node():
            return value
        case Described():
            return value.as_node()
        case Pairs():
            return Node("dict", by_token(value), is_ordered=True)
        case Mapping():
            attributes = vars(value) if hasattr(value, "__dict__") else {}  # such as the metadata of a model's state
            parts = by_token(value.items()) | ({"[attributes]": attributes} if attributes else {})
            return Node(_shown_class(value), parts, is_ordered=True)
        case list() | tuple():
            return Node(_shown_class(value), {f"#{index}": part for index, part in enumerate(value)})
        case set() | frozenset():
            members = sorted(value, key=repr)
            return Node(_shown_class(value), {f"#{index}": part for index, part in enumerate(members)})
        case _ if _is_tensor(value):
            return _parts_of_tensor(value)
        case _ if _is_array(value) and value.dtype.hasobject:
            return Node(f"{value.dtype} {value.shape}", {f"#{index}": part for index, part in enumerate(value.flat)})
        case _:
            return None


def by_token(pairs: Iterable[tuple[object, object]]) -> dict[str, object]:
    """Return the values by the tokens of their keys, the second of a key with a token of its own."""
    parts: dict[str, object] = {}
    seen: dict[str, int] = {}
    for key, value in pairs:
        token = token_of(key)
        seen[token] = seen.get(token, 0) + 1
        parts[token if seen[token] == 1 else f"{token}[{seen[token]}]"] = value
    return parts


def _shown_class(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _is_tensor(value: object) -> bool:
    return hasattr(value, "detach") and hasattr(value, "is_floating_point")


def _is_array(value: object) -> bool:
    return all(hasattr(value, name) for name in ("dtype", "strides", "tobytes"))


def _parts_of_tensor(value: Any) -> Node | None:
    """Return the parts of a sparse or quantized tensor; None for one that is an array."""
    torch = import_module("torch")
    tensor = value.detach()
    if tensor.layout == torch.sparse_coo:
        parts = {"indices": tensor._indices(), "values": tensor._values(), "coalesced": tensor.is_coalesced()}  # noqa: SLF001 - the public ones raise unless it is coalesced
    elif tensor.layout != torch.strided:
        of_rows = tensor.layout in {torch.sparse_csr, torch.sparse_bsr}
        names = ("crow_indices", "col_indices") if of_rows else ("ccol_indices", "row_indices")
        parts = {name: getattr(tensor, name)() for name in (*names, "values")}
    elif tensor.is_quantized:
        parts = {"integers": tensor.int_repr(), "values": tensor.dequantize()}  # with its scales
    else:
        return None
    kind = f"{tensor.layout} {tensor.dtype} {tuple(tensor.shape)} {_details_of_tensor(value)}"
    return Node(kind, {f"[{name}]": part for name, part in parts.items()})


def _details_of_tensor(value: Any) -> str:
    return type(value).__qualname__ + (", requires a gradient" if value.requires_grad else "")


def _leaf_of(value: Any) -> object:
    """Return an array or a tensor as `Array`, and all other values as they are."""
    if isinstance(value, type):
        return f"<{value.__module__}.{value.__qualname__}>"
    if _is_tensor(value):
        torch = import_module("torch")
        own = value.to_local() if hasattr(value, "to_local") else value  # of a DTensor: the part of this rank
        tensor = own.detach().cpu()
        plain = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
        return Array(
            f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}",
            f"{_details_of_tensor(value)}{_axes(tuple(tensor.shape), tensor.stride())}",
            rows_of(plain.view(torch.uint8).numpy(), tensor.element_size()),
            plain,
            tensor.item() if tensor.dim() == 0 else None,
        )
    if not _is_array(value):
        return value
    numpy = import_module("numpy")
    array = numpy.asarray(value)
    flat = numpy.ascontiguousarray(array).reshape(-1)
    is_number = array.dtype.kind in "biufc"
    return Array(
        f"{array.dtype} {array.shape}",
        f"{type(value).__name__}{_axes(array.shape, array.strides)}",
        rows_of(flat, array.dtype.itemsize),
        flat if is_number else None,
        flat[0].item() if array.shape == () and is_number else None,
    )


def rows_of(flat: Any, width: int) -> Any:
    """Return the bytes of an array, a row for each number of this width."""
    numpy = import_module("numpy")
    if not (width and flat.size):
        return numpy.zeros((0, 1), numpy.uint8)
    return flat.view(numpy.uint8).reshape(-1, width)


def _axes(shape: tuple[int, ...], strides: tuple[int, ...]) -> str:
    """Return the order of the axes in memory: sums are rounded in an order that depends on it."""
    axes = [axis for axis, size in enumerate(shape) if size > 1]
    in_order = sorted(axes, key=lambda axis: -abs(strides[axis]))
    return "" if in_order == axes else f", axes in memory {', '.join(map(str, in_order))}"


def _scalar_of(value: object) -> Scalar | None:
    """Return a value that is a number, a time or a short text; else None."""
    if isinstance(value, Array):
        return value.scalar
    if isinstance(value, str):
        if len(value) > _MAX_SCALAR_CHARACTERS or isinstance(value, Line):
            return None
        try:
            return float(value)  # it may be a weight
        except ValueError:
            return value
    return value if isinstance(value, bool | int | float | dt.date | dt.time | dt.timedelta | uuid.UUID) else None


def _leaf_difference(expected: object, found: object) -> str:
    """Return how two values differ; empty if their types and all their bits are the same."""
    if isinstance(expected, Array) and isinstance(found, Array):
        return _array_difference(expected, found)
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
    return value if isinstance(value, bool | int | str | bytes | bytearray | None) else repr(value)


def _shown(value: object) -> str:
    if isinstance(value, Array):
        return value.shown_type
    text = value.kind if isinstance(value, Node) else repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[: _MAX_SHOWN_CHARACTERS - 3]}..."


def _array_difference(expected: Array, found: Array) -> str:
    if expected.shown_type != found.shown_type:
        return f"{found.shown_type}, expected {expected.shown_type}"
    if expected.details != found.details:
        return f"{found.shown_type}, {found.details}; expected {expected.details}"
    numpy = import_module("numpy")
    count, farthest = 0, 0.0
    for start in range(0, len(expected.rows), _COMPARED_AT_ONCE):  # checkpoints are large: a part at a time
        part = slice(start, start + _COMPARED_AT_ONCE)
        unlike = (expected.rows[part] != found.rows[part]).any(axis=1)
        if not unlike.any():
            continue
        count += int(unlike.sum())
        if expected.numbers is not None and found.numbers is not None:
            with numpy.errstate(invalid="ignore", over="ignore"):
                distances = numpy.abs(_wide(expected.numbers[part])[unlike] - _wide(found.numbers[part])[unlike])
            farthest = float(numpy.maximum(farthest, distances.max()))  # NaN, if one of them is
    if not count:
        return ""
    distance = "" if expected.numbers is None else f", max |Δ| {farthest:.2g}"
    return f"{count:,} of {len(expected.rows):,} values{distance}"


def _wide(numbers: Any) -> Any:
    if _is_tensor(numbers):
        torch = import_module("torch")
        return numbers.to(torch.complex128 if numbers.is_complex() else torch.float64).numpy()
    return numbers.astype(complex if numbers.dtype.kind == "c" else float)
