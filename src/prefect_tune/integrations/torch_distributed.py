"""Read and write a trial's checkpoint with `torch.distributed.checkpoint`; its metadata is JSON, and runs no code.

    rank 0: dcp.save ──► shard-0.bin, checkpoint.json ─┐
    rank 1: dcp.save ──► shard-1.bin                   ├──► pt.report, or save_checkpoint ──► one commit
                                                      ─┘
    any number of ranks: dcp.load ◄── the bytes that each needs ◄── the directory, or the checkpoint on its target

Each rank writes into its own directory, so nothing is overwritten, and a dead rank leaves no checkpoint behind. The
commit is that of a trial's ranks; this module only lays out the files.
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
from prefect_tune.integrations.common import missing
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
    raise missing(error, "torch", "torch") from error

__all__ = ["CheckpointReader", "CheckpointWriter"]

_METADATA = "checkpoint.json"
_SHARD = "shard-{}.bin"
_OF_A_SAVE = re.compile(r"checkpoint\.json|shard-\d+\.bin")
_ALIGNED_BYTES = 64
_RUN_BYTES, _GAP_BYTES = 1 << 26, 1 << 20
"""What is read at once, in chunks side by side, and what may be read between two parts: chunks are larger."""
_Number: TypeAlias = Annotated[int, Field(ge=0, lt=1 << 63)]
_Sizes: TypeAlias = tuple[_Number, ...]
_Path: TypeAlias = tuple[str | int, ...]
"""Where a value is in a state dict of dicts and lists."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _Bytes(_Model):
    """Where bytes are."""

    file: Annotated[str, Field(pattern=r"^shard-\d+\.bin$")]
    start: _Number
    length: _Number


class _Chunk(_Bytes):
    """Where a part of a tensor is: in row-major order, of the machine's byte order, which is little-endian."""

    offsets: _Sizes
    sizes: _Sizes


class _Tensor(_Model):
    dtype: str
    """Its name in PyTorch, such as `bfloat16`."""
    sizes: _Sizes
    requires_grad: bool
    chunks: list[_Chunk]


class _Document(_Model):
    """The file `checkpoint.json`."""

    format: Literal["prefect-tune-torch-distributed"] = "prefect-tune-torch-distributed"
    version: Literal[1] = 1
    tensors: dict[str, _Tensor]
    """By name."""
    objects: dict[str, _Bytes]
    """What is no tensor, as `torch.save` writes it, by name."""
    paths: dict[str, _Path] | None
    """Where each name was in the state dict before it was flattened; None if it was not."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Bytes of a file that an item of a plan needs."""

    file: str
    start: int
    end: int
    item: Any


class CheckpointWriter(StorageWriter):
    """Write a state dict into a directory of the trial, with `dcp.save` or `dcp.async_save`, on all ranks.

    ```python
    def save_checkpoint(self, checkpoint_dir):
        dcp.save(self.state(), storage_writer=CheckpointWriter(checkpoint_dir))
    ```

    Of a tensor that several ranks have, one writes it. Values that are no tensors must be such that `torch.load` reads
    them with `weights_only=True`. Report a directory of `dcp.async_save` once its future is done.

    Args:
        directory: of this rank: what `save_checkpoint` gets, or `pt.get_trial().new_checkpoint_dir()`. It is made if it
            is not there, such as `checkpoint_dir + "/model"`, and holds one `dcp.save`.
    """

    def __init__(self, directory: str | Path) -> None:
        super().__init__()
        self._directory = Path(directory)

    def reset(self, checkpoint_id: object = None) -> None:
        self._directory = Path(str(checkpoint_id)) if checkpoint_id else self._directory

    def set_up_storage_writer(
        self,
        is_coordinator: bool,  # noqa: FBT001 - the signature is DCP's
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Refuse what makes no checkpoint of all ranks, and make the directory.

        Raises:
            InvalidInput: `use_collectives=False`, with which each rank writes metadata of its own part only; or the
                directory holds another save, whose files would be lost.
        """
        del is_coordinator, args
        if not kwargs.get("use_collectives", True):
            raise InvalidInput(
                "CheckpointWriter: expected use_collectives=True, found False: no rank would know what the others wrote"
            )
        self._directory.mkdir(parents=True, exist_ok=True)
        if found := [path.name for path in self._directory.iterdir() if _OF_A_SAVE.fullmatch(path.name)]:
            raise InvalidInput(
                f"CheckpointWriter({str(self._directory)!r}): expected a directory without an earlier dcp.save, found "
                f"{sorted(found)}; pass a directory of its own, such as {str(self._directory / 'model')!r}"
            )

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return [replace(plan, storage_data=_SHARD.format(number)) for number, plan in enumerate(plans)]

    def write_data(self, plan: Any, planner: Any) -> Future[list[WriteResult]]:
        """Write what this rank has into one file.

        Raises:
            InvalidInput: a tensor is sparse or quantized, or `torch.load` refuses a value with `weights_only=True`.
        """
        written = []
        with Path(self._directory, plan.storage_data).open("xb") as file:
            for item in plan.items:
                data = planner.resolve_data(item)
                file.write(bytes(-file.tell() % _ALIGNED_BYTES))
                start = file.tell()
                is_object = item.type is WriteItemType.BYTE_IO
                file.write(_loadable(item.index.fqn, data) if is_object else _bytes_of(item.index.fqn, data))
                place = {"file": plan.storage_data, "start": start, "length": file.tell() - start}
                written.append(WriteResult(item.index, place["length"], place))
        done: Future[list[WriteResult]] = Future()
        done.set_result(written)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write what is where.

        Raises:
            InvalidInput: the planner keeps data of its own.
        """
        places = {each.index: each.storage_data for of_rank in results for each in of_rank}
        tensors, objects = {}, {}
        for name, stored in metadata.state_dict_metadata.items():
            if isinstance(stored, TensorStorageMetadata):
                tensors[name] = _Tensor(
                    dtype=str(stored.properties.dtype).removeprefix("torch."),
                    sizes=tuple(stored.size),
                    requires_grad=stored.properties.requires_grad,
                    chunks=[
                        _Chunk(
                            **places[MetadataIndex(name, each.offsets)],
                            offsets=tuple(each.offsets),
                            sizes=tuple(each.sizes),
                        )
                        for each in stored.chunks
                    ],
                )
            else:
                objects[name] = _Bytes(**places[MetadataIndex(name)])
        try:
            document = _Document(tensors=tensors, objects=objects, paths=metadata.planner_data)
        except ValidationError as error:
            raise InvalidInput(
                f"CheckpointWriter: expected DCP's default planner, found another with data: {error}"
            ) from error
        Path(self._directory, _METADATA).write_text(document.model_dump_json())

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        """Return whether it is a path."""
        return isinstance(checkpoint_id, str | Path)


class CheckpointReader(StorageReader):
    """Read with `dcp.load` what `CheckpointWriter` wrote, on any number of ranks.

    ```python
    def load_checkpoint(self, checkpoint_dir):
        state = self.state()
        dcp.load(state, storage_reader=CheckpointReader(checkpoint_dir))
    ```

    Each rank reads the rows that it needs: of a checkpoint on a target, the chunks of 4 MiB that hold them, each
    verified. Nothing that is read runs code.

    Args:
        checkpoint: a directory of this machine, or a `pt.Checkpoint`, such as `results.best_checkpoint()`.

    Raises:
        CheckpointCorrupt: there is no metadata, or none that fits its files.
    """

    def __init__(self, checkpoint: str | Path | Checkpoint) -> None:
        super().__init__()
        self._checkpoint = checkpoint
        # Not in `read_metadata`: `dcp.load` of PyTorch 2.11 says of its errors only "metadata is None".
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
            with self._open(_METADATA) as file:
                document = _Document.model_validate_json(file.read())
            return _metadata_of(document)
        except (OSError, ValidationError, _DoesNotFit) as error:
            raise CheckpointCorrupt(f"{self._checkpoint}: {_METADATA}: {error}") from error

    def set_up_storage_reader(
        self,
        metadata: Metadata,
        is_coordinator: bool,  # noqa: FBT001 - the signature is DCP's
        *args: Any,
        **kwargs: Any,
    ) -> None:
        del metadata, is_coordinator, args, kwargs  # the metadata is what `read_metadata` has returned

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return plans

    def read_data(self, plan: Any, planner: Any) -> Future[None]:
        """Read what this rank needs, in the order of the files' bytes.

        Raises:
            CheckpointCorrupt: a file is shorter than the metadata has it, or a value is a pickle that may run code.
        """
        parts = sorted(map(self._part, plan.items), key=attrgetter("file", "start"))
        for name, of_file in groupby(parts, key=attrgetter("file")):
            with self._open(name) as file:
                for run in _runs(of_file):
                    start = run[0].start // _ALIGNED_BYTES * _ALIGNED_BYTES
                    raw = memoryview(_read(file, start, max(part.end for part in run) - start))
                    for part in run:
                        self._load(part, raw[part.start - start : part.end - start], planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _part(self, item: Any) -> _Part:
        """Return the bytes that an item needs: of a tensor whole rows."""
        place = self._metadata.storage_data[item.storage_index]
        if item.type is LoadItemType.BYTE_IO or not place.sizes:  # an object, or a number
            return _Part(place.file, place.start, place.start + place.length, item)
        row_bytes = place.length // place.sizes[0] if place.sizes[0] else 0
        first = place.start + item.storage_offsets[0] * row_bytes
        return _Part(place.file, first, first + item.lengths[0] * row_bytes, item)

    def _load(self, part: _Part, raw: memoryview, planner: Any) -> None:
        item = part.item
        if item.type is LoadItemType.BYTE_IO:
            planner.load_bytes(item, _harmless(item.storage_index.fqn, raw))
            return
        stored = cast("TensorStorageMetadata", self._metadata.state_dict_metadata[item.storage_index.fqn])
        whole = self._metadata.storage_data[item.storage_index].sizes
        dtype = stored.properties.dtype
        values = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        if whole:  # the bytes are those of whole rows
            rows = values.reshape((item.lengths[0], *whole[1:]))
            values = narrow_tensor_by_index(rows, (0, *item.storage_offsets[1:]), item.lengths)
        target = planner.resolve_tensor(item).detach()
        target.copy_(values if whole else values.reshape(()))
        planner.commit_tensor(item, target)

    def _open(self, name: str) -> AbstractContextManager[IO[bytes]]:
        if isinstance(self._checkpoint, Checkpoint):
            files = cast("Any", self._checkpoint.filesystem)
            return cast("IO[bytes]", files.open_input_file(f"{self._checkpoint.path}/{name}"))
        return Path(self._checkpoint, name).open("rb")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        """Return whether it is a path or a URI."""
        return isinstance(checkpoint_id, str | Path)


class _DoesNotFit(ValueError):
    """What the metadata says contradicts itself."""


def _bytes_of(name: str, tensor: torch.Tensor) -> Any:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise InvalidInput(f"{name}: expected a dense tensor, found one that is sparse or quantized")
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # A tensor of one element counts as contiguous whatever its stride, which a view of bytes requires to be 1.
    return dense.reshape(-1).as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy()


def _loadable(name: str, data: io.BytesIO) -> memoryview:
    try:
        torch.load(io.BytesIO(data.getbuffer()), weights_only=True)
    except pickle.UnpicklingError as error:
        raise InvalidInput(
            f"{name}: expected tensors, numbers, text, and dicts and lists of these, found a value that torch.load "
            f"refuses with weights_only=True: {str(error).partition('. ')[0]}"
        ) from error
    return data.getbuffer()


def _harmless(name: str, raw: memoryview) -> io.BytesIO:
    """Return bytes that hold no code: DCP's planner reads them as any pickle."""
    try:
        value = torch.load(io.BytesIO(raw), weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointCorrupt(f"{name}: its pickle may run code, and was not read") from error
    except Exception as error:
        raise CheckpointCorrupt(f"{name}: expected what torch.save writes, found bytes that do not load") from error
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data


def _metadata_of(document: _Document) -> Metadata:
    stored: dict[str, Any] = {name: BytesStorageMetadata() for name in document.objects}
    places: dict[MetadataIndex, _Bytes] = {MetadataIndex(name): each for name, each in document.objects.items()}
    if twice := document.objects.keys() & document.tensors.keys():
        raise _DoesNotFit(f"expected a tensor or another value of each name, found both of {sorted(twice)}")
    for name, tensor in document.tensors.items():
        dtype = getattr(torch, tensor.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise _DoesNotFit(f"{name}: expected a type of tensors, found {tensor.dtype!r}")
        for chunk in sorted(tensor.chunks, key=attrgetter("length")):  # an empty one may begin where another does
            has_its_rank = len(chunk.offsets) == len(chunk.sizes) == len(tensor.sizes)
            ends = map(sum, zip(chunk.offsets, chunk.sizes, strict=False))
            is_inside = has_its_rank and all(end <= size for end, size in zip(ends, tensor.sizes, strict=True))
            if not is_inside or chunk.length != math.prod(chunk.sizes) * dtype.itemsize:
                raise _DoesNotFit(f"{name}: expected a part of {tensor.sizes}, found {chunk!r}")
            places[MetadataIndex(name, torch.Size(chunk.offsets))] = chunk
        if sum(math.prod(each.sizes) for each in tensor.chunks) != math.prod(tensor.sizes):
            raise _DoesNotFit(
                f"{name}: expected parts that make up {tensor.sizes}, each element once, found {len(tensor.chunks)} "
                "parts that leave elements out, or overlap"
            )
        stored[name] = TensorStorageMetadata(
            TensorProperties(dtype=dtype, requires_grad=tensor.requires_grad),
            torch.Size(tensor.sizes),
            [ChunkStorageMetadata(torch.Size(each.offsets), torch.Size(each.sizes)) for each in tensor.chunks],
        )
    return Metadata(stored, planner_data=document.paths, storage_data=places)


def _runs(parts: Iterable[_Part]) -> Iterator[list[_Part]]:
    """Yield parts of a file, in the order of its bytes, that are near enough to be read at once."""
    run: list[_Part] = []
    for each in parts:
        if run and (each.start - run[-1].end > _GAP_BYTES or each.end - run[0].start > _RUN_BYTES):
            yield run
            run = []
        run.append(each)
    yield run


def _read(file: IO[bytes], start: int, length: int) -> bytearray:
    raw, filled = bytearray(length), 0
    file.seek(start)
    while filled < length:
        read = cast("Any", file).readinto(memoryview(raw)[filled:])
        if not read:
            raise CheckpointCorrupt(f"{getattr(file, 'name', 'a shard')}: ends before byte {start + length}")
        filled += read
    return raw
