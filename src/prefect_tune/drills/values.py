"""Compare two values, which are trees of containers and leaves.

Values are equal if their types and all their bits are equal. So `1` differs from `1.0`, `0.0` from `-0.0`, a list from
a tuple, and a NaN from a NaN with other bits. The order of keys counts, since a program may iterate over a dictionary.
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
"""The path to a value: a unique text (token) for each key. Key `1` differs from `'1'`, and `a.b` from `b` in `a`."""
Scalar: TypeAlias = bool | int | float | str | dt.date | dt.time | dt.timedelta | uuid.UUID

MISSING, UNEXPECTED = "missing", "not in the undisturbed run"
"""The descriptions of a value or file that only one of the two runs has."""
_PLAIN_KEY = re.compile(r"[^\s.#'\"\[\]()]+")
_INTEGER = re.compile(r"-?\d+")
_MAX_SHOWN_CHARACTERS, _MAX_SCALAR_CHARACTERS = 60, 100
_MAX_DIFFERENCES = 1_000_000
_COMPARE_CHUNK_ROWS = 1 << 20


@dataclass(frozen=True, slots=True)
class FileDifference:
    """A difference between two files with the same path, in two checkpoints of the same step."""

    file: str
    """The path in the checkpoint."""
    key: str
    """The name of the tensor, array or column, or the path in JSON; empty if the file is compared as a whole."""
    description: str
    """For example `1 of 4,096 values, max |Δ| 2e-09`, or `5, expected 7`."""
    is_byte_comparison: bool = False
    """Whether the bytes of the whole file were compared, because the values cannot be read."""
    path: str = ""
    """The path to the value in the file, as joined tokens; empty if it equals `key`."""
    scalars: tuple[Scalar | None, Scalar | None] = field(default=(None, None), compare=False)
    """The expected and the actual value; None for a value that is not a number, time or short text."""

    def __str__(self) -> str:
        return ", ".join([f"`{self.file}`", *([f"`{self.key}`"] if self.key else []), self.description])


def compare_values(expected: object, actual: object, name: str) -> Sequence[FileDifference]:
    """Return the differences between the values of two files, or between the metrics of two steps.

    Raises:
        OverflowError: there are too many differences, for example because a shared object has many paths.
    """
    comparison = _Comparison(name)
    comparison.compare(expected, actual, ())
    return comparison.differences


@dataclass
class _Comparison:
    name: str
    differences: list[FileDifference] = field(default_factory=list)
    compared: dict[tuple[int, int], object] = field(default_factory=dict)
    """Pairs that are equal or being compared, by both objects' ids; storing the objects prevents a reuse of the ids."""

    def compare(self, expected: object, actual: object, path: ValuePath) -> None:
        pair = id(expected), id(actual)
        if pair in self.compared:
            return
        left, right = to_tree_node(expected), to_tree_node(actual)
        if left is None or right is None:
            one, other = left or _to_leaf(expected), right or _to_leaf(actual)
            if difference := _describe_leaf_difference(one, other):
                self.add(path, difference, (_to_scalar(one), _to_scalar(other)))
            return
        if left.kind != right.kind:
            self.add(path, f"{right.kind}, expected {left.kind}")
            return
        self.compared[pair], count = (expected, actual), len(self.differences)
        if difference := _describe_order_difference(left, right):
            self.add(path, difference)
        for token in dict.fromkeys([*left.parts, *right.parts]):
            if token in left.parts and token in right.parts:
                self.compare(left.parts[token], right.parts[token], (*path, token))
            else:
                self.add((*path, token), MISSING if token in left.parts else UNEXPECTED)
        if len(self.differences) > count:
            del self.compared[pair]  # if the objects occur at other paths, report their differences there, too

    def add(self, path: ValuePath, text: str, scalars: tuple[Scalar | None, Scalar | None] = (None, None)) -> None:
        if len(self.differences) == _MAX_DIFFERENCES:
            raise OverflowError
        key, path_text = ".".join(map(_format_token, path)), ".".join(path)
        unique = "" if path_text == key else path_text
        self.differences.append(FileDifference(self.name, key, text, path=unique, scalars=scalars))


def _describe_order_difference(expected: TreeNode, actual: TreeNode) -> str:
    orders = list(actual.parts), list(expected.parts)
    if not expected.is_ordered or orders[0] == orders[1] or set(orders[0]) != set(orders[1]):
        return ""  # if a key is missing, `compare` reports it
    position = next(index for index, (one, other) in enumerate(zip(*orders, strict=True)) if one != other)
    keys = (_format_token(tokens[position]) for tokens in orders)
    return "keys in another order: number {} is `{}`, expected `{}`".format(position + 1, *keys)


def iter_scalars(value: object) -> Iterator[tuple[str, Scalar | None]]:
    """Yield the path of each leaf, as joined tokens, with its value, or with None if the leaf is not a scalar."""

    def walk(value: object, path: ValuePath) -> Iterator[tuple[str, Scalar | None]]:
        if (node := to_tree_node(value)) is None:
            yield ".".join(path), _to_scalar(_to_leaf(value))
            return
        for token, part in node.parts.items():
            yield from walk(part, (*path, token))

    return walk(value, ())


# ----------------------------------------------------------------------------------------------------------- paths


def is_list_element(path: str) -> bool:
    """Return whether a path ends with an element of a list, such as one of many weights."""
    return re.search(r"(^|\.)#\d+$", path) is not None


def make_key_token(key: object) -> str:
    """Return the unique token of a key."""
    if type(key) is str:
        return key if _PLAIN_KEY.fullmatch(key) and not _INTEGER.fullmatch(key) else repr(key)
    return str(key) if type(key) is int else f"[{key!r}]"


def _format_token(token: str) -> str:
    """Return the token in the form for display, such as `exp_avg` or `3`."""
    if token[:1] not in {"'", '"'} or token[-1:] != token[:1]:
        return token.removeprefix("#")
    key = str(literal_eval(token))
    is_clear = key.isprintable() and key.strip() and not _INTEGER.fullmatch(key) and not set("#'\"[]()") & set(key)
    return key if is_clear else token


# ---------------------------------------------------------------------------------------------------------- values


class KeyValuePairs(list[tuple[object, object]]):
    """The keys and values of a JSON object in their order; a key may occur twice."""


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A container: its type, and its parts by the tokens of their keys."""

    kind: str
    parts: Mapping[str, Any]
    is_ordered: bool = False
    """Whether the order of the parts counts."""


class TreeNodeConvertible:
    """The base class of objects that convert to a `TreeNode`."""

    def as_tree_node(self) -> TreeNode:
        raise NotImplementedError


@dataclass(frozen=True)
class Array:
    """An array or a tensor: its bytes, for the comparison, and its numbers, for the distance."""

    type_text: str
    """The dtype and the shape."""
    details: str
    """Other properties that must be equal: the class, and the order of the axes in memory."""
    rows: Any
    """The bytes as a NumPy array, with a row for each number."""
    numbers: Any = None
    """The numbers as a flat array or tensor; None if there are no numbers."""
    scalar: Scalar | None = None
    """The number of an array without axes; None for other arrays."""


class Line(str):
    """A line of a text. It is not a scalar, because it may contain weights."""

    __slots__ = ()


def to_tree_node(value: Any) -> TreeNode | None:
    """Return the node of a container; None for a leaf."""
    match value:
        case type():
            return None
        case TreeNode():
            return value
        case TreeNodeConvertible():
            return value.as_tree_node()
        case KeyValuePairs():
            return TreeNode("dict", index_by_token(value), is_ordered=True)
        case Mapping():
            attributes = vars(value) if hasattr(value, "__dict__") else {}  # such as the metadata of a model's state
            parts = index_by_token(value.items()) | ({"[attributes]": attributes} if attributes else {})
            return TreeNode(_get_class_name(value), parts, is_ordered=True)
        case list() | tuple():
            return TreeNode(_get_class_name(value), {f"#{index}": part for index, part in enumerate(value)})
        case set() | frozenset():
            members = sorted(value, key=repr)
            return TreeNode(_get_class_name(value), {f"#{index}": part for index, part in enumerate(members)})
        case _ if _is_tensor(value):
            return _split_tensor(value)
        case _ if _is_array(value) and value.dtype.hasobject:
            return TreeNode(
                f"{value.dtype} {value.shape}", {f"#{index}": part for index, part in enumerate(value.flat)}
            )
        case _:
            return None


def index_by_token(pairs: Iterable[tuple[object, object]]) -> dict[str, object]:
    """Return the values by the tokens of their keys; each repetition of a key gets another token."""
    parts: dict[str, object] = {}
    counts: dict[str, int] = {}
    for key, value in pairs:
        token = make_key_token(key)
        counts[token] = counts.get(token, 0) + 1
        parts[token if counts[token] == 1 else f"{token}[{counts[token]}]"] = value
    return parts


def _get_class_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _is_tensor(value: object) -> bool:
    return hasattr(value, "detach") and hasattr(value, "is_floating_point")


def _is_array(value: object) -> bool:
    return all(hasattr(value, name) for name in ("dtype", "strides", "tobytes"))


def _split_tensor(value: Any) -> TreeNode | None:
    """Return the parts of a sparse or quantized tensor; None for a dense tensor."""
    torch = import_module("torch")
    tensor = value.detach()
    if tensor.layout == torch.sparse_coo:
        parts = {"indices": tensor._indices(), "values": tensor._values(), "coalesced": tensor.is_coalesced()}  # noqa: SLF001 - the public ones raise unless it is coalesced
    elif tensor.layout != torch.strided:
        is_row_compressed = tensor.layout in {torch.sparse_csr, torch.sparse_bsr}
        names = ("crow_indices", "col_indices") if is_row_compressed else ("ccol_indices", "row_indices")
        parts = {name: getattr(tensor, name)() for name in (*names, "values")}
    elif tensor.is_quantized:
        parts = {"integers": tensor.int_repr(), "values": tensor.dequantize()}  # equal integers can have other scales
    else:
        return None
    kind = f"{tensor.layout} {tensor.dtype} {tuple(tensor.shape)} {_format_tensor_details(value)}"
    return TreeNode(kind, {f"[{name}]": part for name, part in parts.items()})


def _format_tensor_details(value: Any) -> str:
    return type(value).__qualname__ + (", requires a gradient" if value.requires_grad else "")


def _to_leaf(value: Any) -> object:
    """Return an array or a tensor as an `Array`, a class as its name, and any other leaf unchanged."""
    if isinstance(value, type):
        return f"<{value.__module__}.{value.__qualname__}>"
    if _is_tensor(value):
        torch = import_module("torch")
        local = value.to_local() if hasattr(value, "to_local") else value  # this rank's part of a DTensor
        tensor = local.detach().cpu()
        plain = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
        return Array(
            f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}",
            f"{_format_tensor_details(value)}{_format_axis_order(tuple(tensor.shape), tensor.stride())}",
            to_byte_rows(plain.view(torch.uint8).numpy(), tensor.element_size()),
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
        f"{type(value).__name__}{_format_axis_order(array.shape, array.strides)}",
        to_byte_rows(flat, array.dtype.itemsize),
        flat if is_number else None,
        flat[0].item() if array.shape == () and is_number else None,
    )


def to_byte_rows(flat: Any, width: int) -> Any:
    """Return the bytes of an array, with a row of `width` bytes for each number."""
    numpy = import_module("numpy")
    if not (width and flat.size):
        return numpy.zeros((0, 1), numpy.uint8)
    return flat.view(numpy.uint8).reshape(-1, width)


def _format_axis_order(shape: tuple[int, ...], strides: tuple[int, ...]) -> str:
    """Return the order of the axes in memory, which determines the order in which sums are rounded."""
    axes = [axis for axis, size in enumerate(shape) if size > 1]
    in_order = sorted(axes, key=lambda axis: -abs(strides[axis]))
    return "" if in_order == axes else f", axes in memory {', '.join(map(str, in_order))}"


def _to_scalar(value: object) -> Scalar | None:
    """Return the value if it is a number, a time or a short text; None otherwise."""
    if isinstance(value, Array):
        return value.scalar
    if isinstance(value, str):
        if len(value) > _MAX_SCALAR_CHARACTERS or isinstance(value, Line):
            return None
        try:
            return float(value)  # a text that is a number may be a weight
        except ValueError:
            return value
    return value if isinstance(value, bool | int | float | dt.date | dt.time | dt.timedelta | uuid.UUID) else None


def _describe_leaf_difference(expected: object, actual: object) -> str:
    """Return how two leaves differ; an empty text if their types and all their bits are equal."""
    if isinstance(expected, Array) and isinstance(actual, Array):
        return _describe_array_difference(expected, actual)
    if type(expected) is type(actual) and _to_comparable_bits(expected) == _to_comparable_bits(actual):
        return ""
    if isinstance(expected, bytes) and isinstance(actual, bytes):
        return f"bytes differ ({len(actual):,}, expected {len(expected):,})"
    return f"{_format_value(actual)}, expected {_format_value(expected)}"


def _to_comparable_bits(value: Any) -> object:
    """Return an object that, for two values of one type, is equal only if all their bits are equal."""
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, complex):
        return struct.pack("<dd", value.real, value.imag)
    return value if isinstance(value, bool | int | str | bytes | bytearray | None) else repr(value)


def _format_value(value: object) -> str:
    if isinstance(value, Array):
        return value.type_text
    text = value.kind if isinstance(value, TreeNode) else repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[: _MAX_SHOWN_CHARACTERS - 3]}..."


def _describe_array_difference(expected: Array, actual: Array) -> str:
    if expected.type_text != actual.type_text:
        return f"{actual.type_text}, expected {expected.type_text}"
    if expected.details != actual.details:
        return f"{actual.type_text}, {actual.details}; expected {expected.details}"
    numpy = import_module("numpy")
    count, max_distance = 0, 0.0
    for start in range(0, len(expected.rows), _COMPARE_CHUNK_ROWS):  # in parts, since arrays may be large
        part = slice(start, start + _COMPARE_CHUNK_ROWS)
        differs = (expected.rows[part] != actual.rows[part]).any(axis=1)
        if not differs.any():
            continue
        count += int(differs.sum())
        if expected.numbers is not None and actual.numbers is not None:
            with numpy.errstate(invalid="ignore", over="ignore"):
                distances = numpy.abs(_widen(expected.numbers[part])[differs] - _widen(actual.numbers[part])[differs])
            max_distance = float(numpy.maximum(max_distance, distances.max()))  # NaN if any distance is NaN
    if not count:
        return ""
    distance_text = "" if expected.numbers is None else f", max |Δ| {max_distance:.2g}"
    return f"{count:,} of {len(expected.rows):,} values{distance_text}"


def _widen(numbers: Any) -> Any:
    if _is_tensor(numbers):
        torch = import_module("torch")
        return numbers.to(torch.complex128 if numbers.is_complex() else torch.float64).numpy()
    return numbers.astype(complex if numbers.dtype.kind == "c" else float)
