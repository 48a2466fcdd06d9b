"""Read and write a trial's checkpoint with `torch.distributed.checkpoint`; reading runs no code.

    rank 0: dcp.save ──► shard-0.bin, checkpoint.json ─┐
    rank 1: dcp.save ──► shard-1.bin                   ├──► pt.report, or save_checkpoint ──► one commit
                                                      ─┘
    any number of ranks: dcp.load ◄── the bytes that each needs ◄── the directory, or the checkpoint on its target

Each rank writes to its own directory, so nothing is overwritten. If a rank is killed during a save, the save is never
committed. Checkpoints are committed as usual: this module defines only the files' layout. The metadata is plain JSON.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import IO, Annotated, Any, Literal, TypeAlias, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from prefect_tune.core.errors import CheckpointCorrupt, InvalidInput
from prefect_tune.integrations.common import missing_extra_error
from prefect_tune.runtime.checkpoint import Checkpoint

try:
    import torch
    from torch.distributed._shard._utils import narrow_tensor_by_index
    from torch.distributed.checkpoint import StorageReader, StorageWriter
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )
    from torch.distributed.checkpoint.planner import LoadItemType, WriteItemType
    from torch.distributed.checkpoint.storage import WriteResult
    from torch.futures import Future
except ModuleNotFoundError as error:
    raise missing_extra_error(error, "torch", "torch") from error

__all__ = ["CheckpointReader", "CheckpointWriter"]

_METADATA_FILE = "checkpoint.json"
_SHARD_FILE = "shard-{}.bin"
_SAVE_FILE_PATTERN = re.compile(r"checkpoint\.json|shard-\d+\.bin")
_ALIGNMENT_BYTES = 64
# Several ranges of a file that a rank needs share one read of at most the first size, if the gaps between them are at
# most the second size. Large reads are faster, because a read from a target fetches the chunks in parallel.
_MAX_READ_BYTES, _MAX_GAP_BYTES = 1 << 26, 1 << 20
_Number: TypeAlias = Annotated[int, Field(ge=0, lt=1 << 63)]
_Sizes: TypeAlias = tuple[_Number, ...]
_Path: TypeAlias = tuple[str | int, ...]
"""The path to a value in a state dict, whose dicts and lists may be nested."""


class _StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _ByteRange(_StrictModel):
    """A range of bytes in a file."""

    file: Annotated[str, Field(pattern=r"^shard-\d+\.bin$")]
    start: _Number
    length: _Number


class _Chunk(_ByteRange):
    """The bytes of a part of a tensor: row-major, in the machine's byte order (little-endian)."""

    offsets: _Sizes
    sizes: _Sizes


class _TensorEntry(_StrictModel):
    dtype: str
    """PyTorch's name of the type, such as `bfloat16`."""
    sizes: _Sizes
    requires_grad: bool
    chunks: list[_Chunk]


class _MetadataDocument(_StrictModel):
    """The file `checkpoint.json`."""

    format: Literal["prefect-tune-torch-distributed"] = "prefect-tune-torch-distributed"
    version: Literal[1] = 1
    tensors: dict[str, _TensorEntry]
    """The tensors, by name."""
    objects: dict[str, _ByteRange]
    """The other values by name, in the format of `torch.save`."""
    paths: dict[str, _Path] | None
    """For each name, the path to its value in the state dict before flattening; None if nothing was flattened."""


@dataclass(frozen=True, slots=True)
class _ItemRange:
    """The bytes of a file that an item of a read plan needs."""

    file: str
    start: int
    end: int
    item: Any


class CheckpointWriter(StorageWriter):
    """Write a state dict to a directory of the trial with `dcp.save` or `dcp.async_save`, on all ranks.

    ```python
    def save_checkpoint(self, checkpoint_dir):
        dcp.save(self.state(), storage_writer=CheckpointWriter(checkpoint_dir))
    ```

    If several ranks have the same tensor, one rank writes it. Values other than tensors must load with
    `torch.load(..., weights_only=True)`. After `dcp.async_save`, report the directory only when the future is done.

    Args:
        directory: this rank's directory, such as `pt.get_trial().new_checkpoint_dir()` or the argument of
            `save_checkpoint`; or a subdirectory of it, which is created if it is missing. One directory holds one save.
    """

    def __init__(self, directory: str | Path) -> None:
        super().__init__()
        self._directory = Path(directory)

    def reset(self, checkpoint_id: object = None) -> None:
        self._directory = Path(str(checkpoint_id)) if checkpoint_id else self._directory

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001 - DCP's signature
        """Check that the save makes one checkpoint of all ranks, and create the directory.

        Raises:
            InvalidInput: `use_collectives` is False, so no rank would know all files; or the directory contains a save.
        """
        del is_coordinator, args
        if not kwargs.get("use_collectives", True):
            raise InvalidInput(
                "CheckpointWriter: expected use_collectives=True, found False, with which no rank knows all files"
            )
        self._directory.mkdir(parents=True, exist_ok=True)
        if earlier := [path.name for path in self._directory.iterdir() if _SAVE_FILE_PATTERN.fullmatch(path.name)]:
            raise InvalidInput(
                f"CheckpointWriter({str(self._directory)!r}): expected a directory without an earlier dcp.save, found "
                f"{sorted(earlier)}; pass a separate directory, such as {str(self._directory / 'model')!r}"
            )

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return [replace(plan, storage_data=_SHARD_FILE.format(number)) for number, plan in enumerate(plans)]

    def write_data(self, plan: Any, planner: Any) -> Future[list[WriteResult]]:
        """Write this rank's values to one file.

        Raises:
            InvalidInput: a tensor is sparse or quantized, or `torch.load` refuses a value with `weights_only=True`.
        """
        results = []
        with Path(self._directory, plan.storage_data).open("xb") as file:
            for item in plan.items:
                data = planner.resolve_data(item)
                file.write(bytes(-file.tell() % _ALIGNMENT_BYTES))
                start = file.tell()
                encode = _encode_object if item.type is WriteItemType.BYTE_IO else _encode_tensor
                file.write(encode(item.index.fqn, data))
                location = {"file": plan.storage_data, "start": start, "length": file.tell() - start}
                results.append(WriteResult(item.index, location["length"], location))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata, which has the location of each value.

        Raises:
            InvalidInput: the planner adds data of its own.
        """
        locations = {result.index: result.storage_data for rank_results in results for result in rank_results}
        tensors, objects = {}, {}
        for name, value in metadata.state_dict_metadata.items():
            if not isinstance(value, TensorStorageMetadata):
                objects[name] = _ByteRange(**locations[MetadataIndex(name)])
                continue
            chunks = [
                _Chunk(**locations[MetadataIndex(name, it.offsets)], offsets=tuple(it.offsets), sizes=tuple(it.sizes))
                for it in value.chunks
            ]
            dtype, grad = str(value.properties.dtype).removeprefix("torch."), value.properties.requires_grad
            tensors[name] = _TensorEntry(dtype=dtype, sizes=tuple(value.size), requires_grad=grad, chunks=chunks)
        try:
            document = _MetadataDocument(tensors=tensors, objects=objects, paths=metadata.planner_data)
        except ValidationError as error:
            raise InvalidInput(
                f"CheckpointWriter: expected DCP's default planner, found a planner with its own data: {error}"
            ) from error
        Path(self._directory, _METADATA_FILE).write_text(document.model_dump_json())

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        """Return whether `checkpoint_id` is a path."""
        return isinstance(checkpoint_id, str | Path)


class CheckpointReader(StorageReader):
    """Read the files of `CheckpointWriter` with `dcp.load`, on any number of ranks.

    ```python
    def load_checkpoint(self, checkpoint_dir):
        state = self.state()
        dcp.load(state, storage_reader=CheckpointReader(checkpoint_dir))
    ```

    Each rank reads only the rows that it needs. From a checkpoint on a target, it reads the chunks of 4 MiB that
    contain these rows, and verifies the chunks. Reading runs no code.

    Args:
        checkpoint: a directory on this machine, or a `pt.Checkpoint`, such as `results.best_checkpoint()`.

    Raises:
        CheckpointCorrupt: the metadata is missing, or does not match the files.
    """

    def __init__(self, checkpoint: str | Path | Checkpoint) -> None:
        super().__init__()
        self._checkpoint = checkpoint
        # Read it here, since `dcp.load` of PyTorch 2.11 reports each error in `read_metadata` as "metadata is None".
        self._metadata = self._read_metadata()

    def reset(self, checkpoint_id: object = None) -> None:
        if checkpoint_id:
            self._checkpoint = str(checkpoint_id)
            self._metadata = self._read_metadata()

    def read_metadata(self, *args: Any, **_: Any) -> Metadata:
        del args
        return self._metadata

    def _read_metadata(self) -> Metadata:
        try:
            with self._open_file(_METADATA_FILE) as file:
                document = _MetadataDocument.model_validate_json(file.read())
            return _make_metadata(document)
        except (OSError, ValidationError, _MetadataError) as error:
            raise CheckpointCorrupt(f"{self._checkpoint}: {_METADATA_FILE}: {error}") from error

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001 - DCP's signature
        del metadata, is_coordinator, args, kwargs  # `metadata` is known: `read_metadata` returned it

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return plans

    def read_data(self, plan: Any, planner: Any) -> Future[None]:
        """Read the values that this rank needs, in the order in which the files contain them.

        Raises:
            CheckpointCorrupt: a file is shorter than the metadata says, or a value is a pickle that may run code.
        """
        parts = sorted(map(self._find_item_range, plan.items), key=attrgetter("file", "start"))
        for name, file_parts in groupby(parts, key=attrgetter("file")):
            with self._open_file(name) as file:
                for group in _group_into_reads(file_parts):
                    start = group[0].start // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES
                    raw = memoryview(_read_range(file, start, max(part.end for part in group) - start))
                    for part in group:
                        self._load_item(part, raw[part.start - start : part.end - start], planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _find_item_range(self, item: Any) -> _ItemRange:
        """Return the range of bytes that an item needs; for a part of a tensor, the complete rows that contain it."""
        chunk = self._metadata.storage_data[item.storage_index]
        if item.type is LoadItemType.BYTE_IO or not chunk.sizes:  # an object, or a scalar tensor
            return _ItemRange(chunk.file, chunk.start, chunk.start + chunk.length, item)
        row_bytes = chunk.length // chunk.sizes[0] if chunk.sizes[0] else 0
        first = chunk.start + item.storage_offsets[0] * row_bytes
        return _ItemRange(chunk.file, first, first + item.lengths[0] * row_bytes, item)

    def _load_item(self, part: _ItemRange, raw: memoryview, planner: Any) -> None:
        item = part.item
        if item.type is LoadItemType.BYTE_IO:
            planner.load_bytes(item, _sanitize_pickle(item.storage_index.fqn, raw))
            return
        tensor = cast("TensorStorageMetadata", self._metadata.state_dict_metadata[item.storage_index.fqn])
        chunk_sizes = self._metadata.storage_data[item.storage_index].sizes
        dtype = tensor.properties.dtype
        values = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        if chunk_sizes:  # the bytes are complete rows; the item may need only some columns
            rows = values.reshape((item.lengths[0], *chunk_sizes[1:]))
            values = narrow_tensor_by_index(rows, (0, *item.storage_offsets[1:]), item.lengths)
        target = planner.resolve_tensor(item).detach()
        target.copy_(values if chunk_sizes else values.reshape(()))
        planner.commit_tensor(item, target)

    def _open_file(self, name: str) -> AbstractContextManager[IO[bytes]]:
        if isinstance(self._checkpoint, Checkpoint):
            files = cast("Any", self._checkpoint.filesystem)
            return cast("IO[bytes]", files.open_input_file(f"{self._checkpoint.path}/{name}"))
        return Path(self._checkpoint, name).open("rb")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        """Return whether `checkpoint_id` is a path or a URI."""
        return isinstance(checkpoint_id, str | Path)


class _MetadataError(ValueError):
    """The metadata is inconsistent."""


def _encode_tensor(name: str, tensor: torch.Tensor) -> Any:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise InvalidInput(f"{name}: expected a dense tensor, found a sparse or quantized tensor")
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # A view as bytes requires a stride of 1. PyTorch calls a single element contiguous with any stride, so set it to 1.
    return dense.reshape(-1).as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy()


def _encode_object(name: str, data: io.BytesIO) -> memoryview:
    try:
        torch.load(io.BytesIO(data.getbuffer()), weights_only=True)
    except pickle.UnpicklingError as error:
        raise InvalidInput(
            f"{name}: expected tensors, numbers, text, and dicts and lists of these, found a value that torch.load "
            f"refuses with weights_only=True: {str(error).partition('. ')[0]}"
        ) from error
    return data.getbuffer()


def _sanitize_pickle(name: str, raw: memoryview) -> io.BytesIO:
    """Return the value in `raw` as a pickle without code, because DCP's planner unpickles without restrictions."""
    try:
        value = torch.load(io.BytesIO(raw), weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointCorrupt(f"{name}: its pickle may run code, so it was not read") from error
    except Exception as error:
        raise CheckpointCorrupt(f"{name}: expected the format of torch.save, found bytes that do not load") from error
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data


def _make_metadata(document: _MetadataDocument) -> Metadata:
    values: dict[str, Any] = {name: BytesStorageMetadata() for name in document.objects}
    locations: dict[MetadataIndex, _ByteRange] = {MetadataIndex(name): it for name, it in document.objects.items()}
    if twice := document.objects.keys() & document.tensors.keys():
        raise _MetadataError(f"expected one value per name, found a tensor and another value of {sorted(twice)}")
    for name, tensor in document.tensors.items():
        dtype = getattr(torch, tensor.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise _MetadataError(f"{name}: expected a tensor type, found {tensor.dtype!r}")
        for chunk in sorted(tensor.chunks, key=attrgetter("length")):  # first the empty ones, which others may replace
            has_same_rank = len(chunk.offsets) == len(chunk.sizes) == len(tensor.sizes)
            ends = map(sum, zip(chunk.offsets, chunk.sizes, strict=False))
            is_inside = has_same_rank and all(end <= size for end, size in zip(ends, tensor.sizes, strict=True))
            if not is_inside or chunk.length != math.prod(chunk.sizes) * dtype.itemsize:
                raise _MetadataError(f"{name}: expected a part of a tensor of sizes {tensor.sizes}, found {chunk!r}")
            locations[MetadataIndex(name, torch.Size(chunk.offsets))] = chunk
        if sum(math.prod(chunk.sizes) for chunk in tensor.chunks) != math.prod(tensor.sizes):
            raise _MetadataError(
                f"{name}: expected parts with each element of {tensor.sizes} once, found {len(tensor.chunks)} parts "
                "with missing or repeated elements"
            )
        values[name] = TensorStorageMetadata(
            TensorProperties(dtype=dtype, requires_grad=tensor.requires_grad),
            torch.Size(tensor.sizes),
            [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in tensor.chunks],
        )
    return Metadata(values, planner_data=document.paths, storage_data=locations)


def _group_into_reads(parts: Iterable[_ItemRange]) -> Iterator[list[_ItemRange]]:
    """Yield groups of ranges that are near enough for one read; `parts` are in the order of their bytes in a file."""
    group: list[_ItemRange] = []
    for part in parts:
        if group and (part.start - group[-1].end > _MAX_GAP_BYTES or part.end - group[0].start > _MAX_READ_BYTES):
            yield group
            group = []
        group.append(part)
    yield group


def _read_range(file: IO[bytes], start: int, length: int) -> bytearray:
    raw, filled = bytearray(length), 0
    file.seek(start)
    while filled < length:
        count = cast("Any", file).readinto(memoryview(raw)[filled:])
        if not count:
            raise CheckpointCorrupt(f"{getattr(file, 'name', 'a shard')}: ends before byte {start + length}")
        filled += count
    return raw
