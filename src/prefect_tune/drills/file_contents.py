"""What differs between two files of a checkpoint: by tensor or key where the format is known, else by byte.

No pickle is run: `torch.load` reads with `weights_only=True`, NumPy without pickles, and any other pickle is read with
stand-ins for its classes and functions. A file may hold several values one after another, and archives; all of it is
compared but the times in headers, and what follows from the values: sizes, checksums, offsets.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import math
import re
import shutil
import struct
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from prefect_tune.drills.pickled_values import pickled_leaves
from prefect_tune.drills.values import (
    CONTAINER,
    Container,
    Pairs,
    Scalar,
    ValuePath,
    array_of,
    canonical_text,
    differing_values,
    key_token,
    leaves,
    leaves_of_sequence,
    raw_array,
    scalar_of,
    shown_text,
)

Values = Mapping[ValuePath, Any]

_ZIP, _NPY, _PARQUET = b"PK\x03\x04", b"\x93NUMPY", b"PAR1"
_PICKLE, _ZLIB = b"\x80", b"\x78"
_GZIP, _BZIP2, _XZ, _TAR, _TAR_AT = b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"ustar", 257
_TORCH_SUFFIXES = {".bin", ".ckpt", ".pt", ".pth"}
_JSON_SUFFIXES = {".json", ".jsonl", ".ndjson"}
_TORCH_PICKLE = "data.pkl"
_CHECKSUM_OF_TORCH = ".data/serialization_id"
_OF_TORCH = {_TORCH_PICKLE, "version", "byteorder", ".format_version", ".storage_alignment", _CHECKSUM_OF_TORCH}
"""Members of an archive of `torch.save` that hold what its tensors do not, or what follows from the other members."""
_SKOPS = "schema.json"
"""The member of a file of skops that says what each other member is."""
_MAX_HEADER_BYTES = 1 << 17
_REST, _COMMENT, _METADATA = "[rest]", "[comment]", "[metadata]"
_NO_SPACE = re.compile(r"[^ \t\n\r]")
_CHUNK = 1 << 20
_MOST_PICKLED_BYTES, _MOST_VALUES = 1 << 28, 1_000_000
_MAX_LINE_BYTES = 200
"""Of a file that holds one number or one short text."""


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


def compare_files(expected: Path, found: Path, name: str) -> Sequence[FileDifference]:
    """Return what differs in file `name`; empty if both hold the same values, though their bytes may differ.

    Args:
        expected: the file of the undisturbed run.
        found: the file of the other run.
        name: its path in the checkpoint, which also tells the format where its content does not.
    """
    if (at := _first_difference(expected, found)) is None:
        return []
    left, right = (_values_of(path, name) for path in (expected, found))
    if left is not None and right is not None:
        differences = list(value_differences(left, right, name))
        # The writer of Parquet stores no times: what no column and no metadata explains is not known to be the same.
        if differences or not _has_head(expected, _PARQUET):
            return differences
    if what := _unlike_lines(expected, found):
        return [FileDifference(name, "", what, scalars=(_line_of(expected), _line_of(found)))]
    sizes = f"{expected.stat().st_size:,} bytes", f"{found.stat().st_size:,}"
    size = sizes[0] if expected.stat().st_size == found.stat().st_size else f"{sizes[1]}, expected {sizes[0]}"
    return [FileDifference(name, "", f"bytes differ from byte {at:,} on ({size})", is_of_bytes=True)]


def value_differences(expected: Values, found: Values, name: str) -> Iterator[FileDifference]:
    """Yield what differs between the values of two files, or the metrics of two steps."""
    for path, what, scalars in differing_values(expected, found):
        key, canonical = shown_text(path), canonical_text(path)
        yield FileDifference(name, key, what, path=canonical if canonical != key else "", scalars=scalars)


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
                    shown = (repr(line.strip()) for line in (other, one))
                    return "line {:,}: {}, expected {}".format(number, *map(_cut, shown))
    except UnicodeDecodeError:
        pass
    return ""


def _cut(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def _line_of(path: Path) -> Scalar | None:
    """Return the number or the short text that is all that a file holds; else None."""
    if path.stat().st_size > _MAX_LINE_BYTES or "\n" in (text := path.read_text(encoding="utf-8").strip()):
        return None
    with suppress(ValueError):
        return float(text)
    return scalar_of(text)


def _has_head(path: Path, head: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(head)) == head


# ------------------------------------------------------------------------------------------------------ the formats


def _values_of(path: Path, name: str) -> Values | None:
    """Return the values of a file by path; None if its format is unknown, or it cannot be read without a pickle."""
    try:
        found = _read(path, Path(name).suffix.lower(), name)
        pairs = None if found is None else list(found)
    except Exception:  # noqa: BLE001 - a damaged file, or one of another kind than its name says: bytes tell the rest
        return None
    if pairs is None or len(by_path := dict(pairs)) < len(pairs):  # two values at one place would hide each other
        return None
    return by_path


def _read(path: Path, suffix: str, name: str) -> Iterator[tuple[ValuePath, Any]] | None:
    with path.open("rb") as file:
        head = file.read(_TAR_AT + len(_TAR))
    for magic, read in _READERS.items():
        if head.startswith(magic):
            return read(path, name)
    if head[_TAR_AT:] == _TAR:
        return _read_tar(path)
    if suffix in _JSON_SUFFIXES:
        return _read_json(path)
    if suffix == ".safetensors" and find_spec("numpy"):
        return _read_safetensors(path)
    if suffix in _TORCH_SUFFIXES and find_spec("torch"):
        with suppress(Exception):  # it needs a pickle
            return iter(list(_read_torch(path)))
    if head.startswith((_PICKLE, _ZLIB)) and path.stat().st_size <= _MOST_PICKLED_BYTES:
        return _read_pickle(path)
    return None


def _read_pickle(path: Path) -> Iterator[tuple[ValuePath, Any]]:
    """Yield the values of pickles.

    Raises:
        OverflowError: they are too many: shared objects may be many paths.
    """
    data = path.read_bytes()
    pairs = list(islice(pickled_leaves(_unpacked(data) if data.startswith(_ZLIB) else data), _MOST_VALUES + 1))
    if len(pairs) > _MOST_VALUES:
        raise OverflowError
    return iter(pairs)


def _unpacked(data: bytes) -> bytes:
    """Return what zlib has packed, in one part or in several one after another."""
    unpacked = b""
    while data:
        unpacking = zlib.decompressobj()
        unpacked += unpacking.decompress(data, _MOST_PICKLED_BYTES)
        if not unpacking.eof or len(unpacked) > _MOST_PICKLED_BYTES:
            raise OverflowError
        data = unpacking.unused_data
    return unpacked


def _read_json(path: Path) -> Iterator[tuple[ValuePath, Any]]:
    """Yield the values of a document, or of several one after another: JSON Lines."""
    text = path.read_text(encoding="utf-8")
    decoder, documents, at = json.JSONDecoder(object_pairs_hook=Pairs), list[object](), 0
    while begin := _NO_SPACE.search(text, at):
        document, at = decoder.raw_decode(text, begin.start())
        documents.append(document)
    return leaves_of_sequence(documents)


def _memory_of(path: Path) -> Any:
    """Return the bytes of a file as an array, which reads them when they are compared."""
    numpy = import_module("numpy")
    return numpy.memmap(path, numpy.uint8, "r") if path.stat().st_size else numpy.zeros(0, numpy.uint8)


def _read_npy(path: Path, _name: str) -> Iterator[tuple[ValuePath, Any]]:
    """Yield the arrays of a file, of which `numpy.load` returns the first, and what follows them."""
    numpy, memory, arrays = import_module("numpy"), _memory_of(path), list[Any]()
    layouts = numpy.lib.format
    with path.open("rb") as file:
        while file.peek(len(_NPY))[: len(_NPY)] == _NPY:
            version = layouts.read_magic(file)
            header = {(1, 0): layouts.read_array_header_1_0, (2, 0): layouts.read_array_header_2_0}[version](file)
            shape, is_fortran, dtype = header
            end = file.tell() + math.prod(shape) * dtype.itemsize
            data = memory[file.tell() : end]
            array = data.view(dtype) if data.size else numpy.zeros(0, dtype)
            arrays.append(array.reshape(shape, order="F" if is_fortran else "C"))
            file.seek(end)
        yield (_REST,), file.read()
    yield from leaves_of_sequence(arrays)


def _read_safetensors(path: Path) -> Iterator[tuple[ValuePath, Any]]:
    """Yield the tensors by their bytes and types, the metadata, and the bytes that are in no tensor."""
    memory = _memory_of(path)
    (length,) = struct.unpack("<Q", memory[:8].tobytes())
    header = json.loads(memory[8 : 8 + length].tobytes(), object_pairs_hook=Pairs)
    data, covered = memory[8 + length :], list[tuple[int, int]]()
    for name, about in header:
        if name == "__metadata__":  # in no order: its writer has none
            yield from (((_METADATA, key_token(key)), value) for key, value in about)
            continue
        tensor = dict(about)
        begin, end = tensor["data_offsets"]
        covered.append((begin, end))
        size, shape, dtype = end - begin, tuple(tensor["shape"]), tensor["dtype"]
        width = size // (count := math.prod(shape)) if size else 1
        whole = size and width * count == size
        shown, raw = f"{_NAMES_OF_DTYPES.get(dtype, dtype)} {shape}", data[begin:end]
        yield (key_token(name),), raw_array(shown, raw, width if whole else 1, _numbers(raw, dtype))
    yield (_REST,), b"".join(data[begin:end].tobytes() for begin, end in _gaps(covered, len(data)))


_NAMES_OF_DTYPES = {
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"{kind}{bits}": f"{name}{bits}" for kind, name in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)},
    "BOOL": "bool", "BF16": "bfloat16", "C64": "complex64",
}  # fmt: skip


def _numbers(data: Any, dtype: str) -> Callable[[slice], Any] | None:
    """Return what reads numbers of a type of safetensors; None if NumPy has no such type."""
    numpy = import_module("numpy")
    if dtype == "BF16":
        return lambda part: (data.view(numpy.uint16)[part].astype(numpy.uint32) << 16).view(numpy.float32).astype(float)
    if dtype not in _NAMES_OF_DTYPES:
        return None
    return lambda part: data.view(_NAMES_OF_DTYPES[dtype])[part].astype(complex if dtype == "C64" else float)


def _gaps(covered: Sequence[tuple[int, int]], size: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges up to `size` that are in none of these."""
    at = 0
    for begin, end in sorted(covered):
        if begin > at:
            yield at, begin
        at = max(at, end)
    if at < size:
        yield at, size


def _read_parquet(path: Path, _name: str) -> Iterator[tuple[ValuePath, Any]]:
    with import_module("pyarrow.parquet").ParquetFile(path) as file:
        table = file.read()
        metadata = dict(file.metadata.metadata or {}) | dict(table.schema.metadata or {})
    metadata.pop(b"ARROW:schema", None)  # the same in another form
    yield from (((_METADATA, key_token(key.decode())), text.decode()) for key, text in metadata.items())
    for index, column in enumerate(table.columns):
        about = table.schema.field(index)
        is_twin = table.column_names.count(about.name) > 1
        place = (key_token(about.name), *([f"#{index}"] if is_twin else []))
        yield (*place, "[type]"), f"{about.type}{'' if about.nullable else ' not null'}"
        of_column = (about.metadata or {}).items()
        yield from (((*place, _METADATA, key_token(key.decode())), text.decode()) for key, text in of_column)
        is_numeric = not column.null_count and column.to_numpy().dtype.kind in "biuf"
        yield from leaves(column.to_numpy() if is_numeric else column.to_pylist(), place)


def _read_torch(path: Path) -> Iterator[tuple[ValuePath, Any]]:
    """Read from the disk what is compared when it is compared: a checkpoint may be larger than the memory."""
    torch = import_module("torch")
    if zipfile.is_zipfile(path):
        return leaves(torch.load(path, map_location="cpu", weights_only=True, mmap=True))
    objects, size = list[object](), path.stat().st_size
    with _Unmapped(io.FileIO(path)) as file:  # the old format, of which a file may hold several
        while file.tell() < size:
            objects.append(torch.load(file, map_location="cpu", weights_only=True))
    return leaves_of_sequence(objects)


class _Unmapped(io.BufferedReader):
    """A file of which PyTorch reads by `read`, and so does not lose its place."""

    def fileno(self) -> int:
        raise io.UnsupportedOperation


# --------------------------------------------------------------------------------------------------------- archives


def _read_zip(path: Path, _name: str) -> Iterator[tuple[ValuePath, Any]]:
    """Yield a file of `torch.save` by tensors, of `numpy.savez` by arrays, of skops by values, others by members.

    What is compared of the archive itself: its comments, the order of its members, and bytes that are in no member,
    such as an archive before this one. The times are not.
    """
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        names = [member.filename for member in members]
        gaps = _gaps(list(_ranges(archive, path)), path.stat().st_size)
        yield (_REST,), b"".join(_bytes_of(path, *gap) for gap in gaps)
        yield (_COMMENT,), archive.comment
        for number, member in enumerate(members):
            if member.comment:
                yield (key_token(member.filename), _COMMENT, f"#{number}"), member.comment
        top = next((name.removesuffix(_TORCH_PICKLE) for name in names if name.endswith(f"/{_TORCH_PICKLE}")), None)
        own = [f"{top}{_CHECKSUM_OF_TORCH}"]
        if top is not None and find_spec("torch"):
            with suppress(Exception):  # it needs a pickle: its members tell which tensors differ, not their names
                yield from list(_read_torch(path))
                own = [name for name in names if name.removeprefix(top) in _OF_TORCH or name.startswith(f"{top}data/")]
        elif _SKOPS in names:
            content = {name: archive.read(name) for name in names}
            schema = json.loads(content[_SKOPS], object_pairs_hook=Pairs)
            used = {_SKOPS}
            yield from leaves(_without_ids(schema, content, used))
            own = list(used)
        is_npz = all(name.endswith(".npy") for name in names)
        rest = [member for member in members if member.filename not in own]
        left = [member.filename.removeprefix(top or "") for member in rest]
        shown = [name.removesuffix(".npy") for name in left] if is_npz else left
        yield ("[archive]", CONTAINER), Container("archive", tuple(map(key_token, shown)))
        with tempfile.TemporaryDirectory(prefix="prefect-tune-drill-") as folder:
            for number, (member, name) in enumerate(zip(rest, shown, strict=True)):
                place = Path(folder, str(number))
                with archive.open(member) as packed, place.open("wb") as plain:
                    shutil.copyfileobj(packed, plain, _CHUNK)
                twin = [f"#{number}"] if shown.count(name) > 1 else []
                yield from _member_leaves(place, member.filename, (key_token(name), *twin))


def _member_leaves(path: Path, name: str, place: ValuePath) -> Iterator[tuple[ValuePath, Any]]:
    """Yield the values of a file that was packed in another one; its bytes if they cannot be read."""
    if (found := _values_of(path, name)) is not None:
        yield from (((*place, *inner), value) for inner, value in found.items() if (inner, value) != ((_REST,), b""))
    elif path.stat().st_size <= _MOST_PICKLED_BYTES:
        yield place, path.read_bytes()
    else:
        yield place, raw_array(f"{path.stat().st_size:,} bytes", _memory_of(path), 1)


def _bytes_of(path: Path, begin: int, end: int) -> bytes:
    if end - begin > _MOST_PICKLED_BYTES:
        raise OverflowError
    with path.open("rb") as file:
        file.seek(begin)
        return file.read(end - begin)


def _ranges(archive: zipfile.ZipFile, path: Path) -> Iterator[tuple[int, int]]:
    """Yield the ranges of the file that hold a member with its header, or the directory of the members."""
    with path.open("rb") as file:
        for member in archive.infolist():
            file.seek(member.header_offset + 26)
            name_size, extra_size = struct.unpack("<HH", file.read(4))
            end = member.header_offset + 30 + name_size + extra_size + member.compress_size
            if member.flag_bits & 8:  # sizes and the checksum follow
                file.seek(end)
                sign = 4 if file.read(4) == b"PK\x07\x08" else 0
                file.seek(end + sign + 4)
                is_small = file.read(8) == struct.pack(
                    "<LL", member.compress_size & 0xFFFFFFFF, member.file_size & 0xFFFFFFFF
                )
                end += sign + 4 + (8 if is_small else 16)
            yield member.header_offset, end
        size = path.stat().st_size
        tail = _bytes_of(path, archive.start_dir, size)
        at = tail.rfind(b"PK\x05\x06")
        yield archive.start_dir, archive.start_dir + at + 22 + len(archive.comment)


def _without_ids(node: Any, members: Mapping[str, bytes], used: set[str]) -> Any:
    """Return a node of skops with the values of its file, and without ids: they differ between processes.

    skops names its files by the ids of the objects, too, and writes sets in the order of their hashes.
    """
    if isinstance(node, list) and not isinstance(node, Pairs):
        return [_without_ids(inner, members, used) for inner in node]
    if not isinstance(node, Pairs):
        return node
    plain, is_set = Pairs(), ("__loader__", "SetNode") in node
    for key, value in node:
        if key == "file" and isinstance(value, str) and value in members:
            used.add(value)
            plain.append((key, _array_or_bytes(members[value])))
        elif key != "__id__" or not isinstance(value, int):
            inner = _without_ids(value, members, used)
            plain.append((key, sorted(inner, key=repr) if is_set and key == "content" else inner))
    return plain


def _array_or_bytes(data: bytes) -> object:
    file = io.BytesIO(data)
    with suppress(ValueError):  # it is none, or one of objects
        array = import_module("numpy").lib.format.read_array(file, allow_pickle=False)
        if file.tell() == len(data):
            return array_of(array)
    return data


def _read_tar(path: Path) -> Iterator[tuple[ValuePath, Any]]:
    """Yield the members, whatever their times and owners."""
    with (
        tempfile.TemporaryDirectory(prefix="prefect-tune-drill-") as folder,
        tarfile.open(path, "r:") as archive,
    ):
        members = archive.getmembers()
        names = [member.name for member in members]
        yield ("[archive]", CONTAINER), Container("archive", tuple(map(key_token, names)))
        for number, member in enumerate(members):
            place = (key_token(member.name), *([f"#{number}"] if names.count(member.name) > 1 else []))
            if (packed := archive.extractfile(member) if member.isreg() else None) is None:
                yield place, f"{member.type!r} {member.linkname}"
                continue
            plain = Path(folder, str(number))
            with plain.open("wb") as file:
                shutil.copyfileobj(packed, file, _CHUNK)
            yield from _member_leaves(plain, member.name, place)
        yield (_REST,), _bytes_of(path, archive.offset, path.stat().st_size).strip(b"\0")


def _read_packed(path: Path, name: str) -> Iterator[tuple[ValuePath, Any]]:
    """Yield the values of a file that is compressed by gzip, bzip2 or xz, whatever the time in its header."""
    with path.open("rb") as file:
        head = file.read(_MAX_HEADER_BYTES)
    opens: Callable[[Path], Any] = next(open_ for magic, open_ in _UNPACKERS.items() if head.startswith(magic))
    with tempfile.TemporaryDirectory(prefix="prefect-tune-drill-") as folder:
        plain = Path(folder, "plain")
        with opens(path) as packed, plain.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked, _CHUNK)
        yield from _member_leaves(plain, Path(name).stem, ())
    if head.startswith(_GZIP):
        yield ("[header]",), _names_in_gzip(head)


def _names_in_gzip(head: bytes) -> bytes:
    """Return what a header of gzip holds besides the time: a field of its writer, a name, a comment (RFC 1952)."""
    flags, at = head[3], 10
    if flags & 4:
        at += 2 + int.from_bytes(head[10:12], "little")
    for flag in (8, 16):
        if flags & flag:
            at = head.index(b"\0", at) + 1
    return head[10:at]


_UNPACKERS: Mapping[bytes, Callable[[Path], Any]] = {_GZIP: gzip.open, _BZIP2: bz2.open, _XZ: lzma.open}
_READERS: Mapping[bytes, Callable[[Path, str], Iterator[tuple[ValuePath, Any]]]] = {
    _ZIP: _read_zip,
    _NPY: _read_npy,
    _PARQUET: _read_parquet,
    **dict.fromkeys(_UNPACKERS, _read_packed),
}
