"""Local directories on both ends of a transfer: files to upload, the directories that a download fills, and copies.

A directory or file appears whole or not at all: it is made beside its destination, and then renamed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeAlias
from uuid import uuid4

from prefect_tune.core.checkpoints.manifest import (
    CHUNK_BYTES,
    ChunkRef,
    FileRef,
    FileStat,
    Manifest,
    Piece,
    Source,
    newest_metadata,
)
from prefect_tune.core.errors import (
    CheckpointCorrupt,
    CheckpointNotFound,
    InvalidInput,
    ObjectNotFound,
    StagedFilesChanged,
    StoreUnavailable,
)
from prefect_tune.core.restore import restore
from prefect_tune.core.storage.documents import DOCUMENT_BYTES
from prefect_tune.core.storage.object_store import Listed, ObjectStore, is_inside, is_too_long
from prefect_tune.core.values import digest_of
from prefect_tune.stores.parallel_map import parallel_map
from prefect_tune.stores.posix_store import sync_folder

_Status: TypeAlias = tuple[int, int, int, int]
"""Size, mode, modification time in ns and inode of a file when its directory was listed; a later write changes it."""


class StagedFiles:
    """A directory as a `Source`: listed once, read by position, never written."""

    def __init__(self, directory: Path) -> None:
        """List `directory`.

        Raises:
            InvalidInput: it is not a directory, or has an entry that cannot be read, or not be restored elsewhere
                (a link to a directory, a dangling link, a socket, a name that is not UTF-8, a very long path).
            StagedFilesChanged: a file was deleted meanwhile.
        """
        self.directory = directory
        if not directory.is_dir():
            raise InvalidInput(f"checkpoint directory {directory}: expected a directory, found none")
        self._found, self.empty_directories = _found_in(directory)
        self.files = tuple(FileStat(path, size_bytes, mode) for path, (size_bytes, mode, *_) in self._found.items())

    def require_unchanged(self) -> None:
        now, empty_directories = _found_in(self.directory)
        if (now, empty_directories) != (self._found, self.empty_directories):
            names = {path for path in {*self._found, *now} if self._found.get(path) != now.get(path)}
            raise StagedFilesChanged(
                f"{self.directory}: {sorted(names)[:3] or 'its directories'} changed while it was being saved"
            )

    def read_into(self, piece: Piece, buffer: memoryview) -> None:
        file = self.files[piece.file]
        with naming_unreadable(self.directory):
            descriptor = os.open(f"{self.directory}/{file.path}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            done = 0
            while done < piece.length and (read := os.preadv(descriptor, [buffer[done:]], piece.offset + done)):
                done += read
        finally:
            os.close(descriptor)
        if done != piece.length:
            raise StagedFilesChanged(
                f"{self.directory / file.path}: expected {file.size_bytes} bytes, found "
                f"{piece.offset + done}: the file was truncated while it was being saved"
            )


def _found_in(directory: Path) -> tuple[dict[str, _Status], tuple[str, ...]]:
    """Return the files below `directory`, sorted, and its empty directories."""
    files: dict[str, _Status] = {}
    empty: list[str] = []
    with naming_unreadable(directory):
        _scan(str(directory), "", files, empty)
    return dict(sorted(files.items())), tuple(sorted(empty))


_UNREADABLE = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO, errno.ENODEV, errno.EISDIR)
"""The errors of a file that another attempt on another machine would meet too."""
_MAX_PATH_BYTES, _MAX_LEVELS = 3_000, 200
"""Of a file within a checkpoint: its path in the directory of a restore is longer, and 4,095 bytes is Linux's limit."""
_SHOWN = 200


@contextmanager
def naming_unreadable(directory: Path) -> Iterator[None]:
    """Raise errors of files below `directory` as the user's, with the path.

    Raises:
        InvalidInput: an entry cannot be read.
        StagedFilesChanged: an entry was deleted.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as gone:
        raise StagedFilesChanged(f"{gone.filename}: was deleted while it was being saved") from gone
    except OSError as error:
        if error.errno in _UNREADABLE:
            raise InvalidInput(
                f"{_shown(str(error.filename or directory))}: cannot be read, so it cannot be saved: {error.strerror}"
            ) from error
        raise


def _shown(path: str) -> str:
    """Return a path for a message; of a very long one its begin and its end."""
    return path if len(path) <= 2 * _SHOWN else f"{path[:_SHOWN]}…{path[-_SHOWN:]}"


def _scan(directory: str, below: str, files: dict[str, _Status], empty: list[str]) -> None:
    with os.scandir(directory) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    if not found and below:
        empty.append(below)
    for entry in found:
        path = f"{below}/{entry.name}" if below else entry.name
        _require_portable(entry, path)
        status = entry.stat()
        if stat.S_ISREG(status.st_mode):
            mode = stat.S_IMODE(status.st_mode) & 0o777
            files[path] = (status.st_size, mode, status.st_mtime_ns, status.st_ino)
        else:
            _scan(entry.path, path, files, empty)


def _require_portable(entry: os.DirEntry[str], relative: str) -> None:
    path = entry.path
    try:
        entry.name.encode()
    except UnicodeEncodeError as undecodable:
        raise InvalidInput(f"{path!r}: the name is not UTF-8, so it cannot be restored elsewhere") from undecodable
    size_bytes, levels = len(relative.encode()), relative.count("/") + 1
    if size_bytes > _MAX_PATH_BYTES or levels > _MAX_LEVELS:
        raise InvalidInput(
            f"{_shown(path)}: the path within the checkpoint has {size_bytes:,} bytes and {levels} levels, expected at "
            f"most {_MAX_PATH_BYTES:,} bytes and {_MAX_LEVELS} levels, so that it can be restored elsewhere"
        )
    if "\\" in entry.name:
        raise InvalidInput(f"{path}: the name holds a backslash, so it cannot be restored elsewhere")
    if entry.is_symlink() and (entry.is_dir() or not Path(path).exists()):
        raise InvalidInput(f"{path}: a link to a directory, or to nothing, cannot be saved; copy what it points to")
    if not (entry.is_file() or entry.is_dir()):
        raise InvalidInput(f"{path}: neither a file nor a directory, so it cannot be saved")


def has_same_files(manifest: Manifest, source: Source) -> bool:
    """Return whether `source` has the files, bytes and empty directories of the checkpoint; permissions may differ.

    It reads the directory, and nothing from the target.

    Raises:
        StagedFilesChanged: a file is shorter now than when it was listed.
    """
    sizes = {file.path: file.size_bytes for file in source.files}
    if sizes != {file.path: file.size_bytes for file in manifest.files}:
        return False
    if set(source.empty_directories) != set(manifest.empty_directories):
        return False
    indexes = {file.path: index for index, file in enumerate(source.files)}
    chunks = (
        (Piece(indexes[file.path], offset, chunk.length), chunk)
        for file in manifest.files
        for offset, chunk in file.placed_chunks()
    )

    def is_same(wanted: tuple[Piece, ChunkRef]) -> bool:
        buffer = memoryview(bytearray(wanted[0].length))
        source.read_into(wanted[0], buffer)
        return digest_of(buffer) == wanted[1].digest

    return all(parallel_map(is_same, chunks))


def holds_exactly(manifest: Manifest, directory: Path) -> bool:
    """Read `directory` and return whether it has exactly the files and folders of `manifest`, byte for byte."""
    try:
        return has_same_files(manifest, StagedFiles(directory))
    except (InvalidInput, StagedFilesChanged):
        return False


class DirectorySink:
    """The files of a manifest below a directory in which all of them exist already."""

    def __init__(self, manifest: Manifest, directory: Path) -> None:
        self._manifest = manifest
        self._directory = directory

    def write(self, file: int, offset: int, data: memoryview) -> None:
        _write_at(f"{self._directory}/{self._manifest.files[file].path}", offset, data)


def _write_at(path: str, offset: int, data: memoryview) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        done = 0
        while done < len(data):
            done += os.pwrite(descriptor, data[done:], offset + done)
    finally:
        os.close(descriptor)


@contextmanager
def restored_directory(manifest: Manifest, destination: Path) -> Iterator[DirectorySink]:
    """Yield a sink for the files of `manifest`; at the end of the block, when all are written, they get their place.

    Raises:
        InvalidInput: the file system cannot hold one of their paths.
    """
    other_modes: list[tuple[str, int]] = []  # set at the end: read-only, or against the umask
    with fresh_directory(destination) as building:
        try:
            building.mkdir()
            folders = {file.path.rpartition("/")[0] for file in manifest.files}
            for folder in sorted({*folders, *manifest.empty_directories}):
                (building / folder).mkdir(parents=True, exist_ok=True)
            for file in manifest.files:
                path, readable = f"{building}/{file.path}", file.mode | stat.S_IRUSR
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, readable | stat.S_IWUSR)
                try:
                    if stat.S_IMODE(os.fstat(descriptor).st_mode) != readable:
                        other_modes.append((path, readable))
                finally:
                    os.close(descriptor)
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                raise InvalidInput(
                    f"{destination}: this file system cannot hold the checkpoint's file "
                    f"{error.filename.removeprefix(f'{building}/')!r}: its path is too long; choose a directory "
                    "with a shorter path, or another file system"
                ) from error
            raise
        yield DirectorySink(manifest, building)
        for path, mode in other_modes:
            Path(path).chmod(mode)


# A checkpoint of a target in a new local directory, or in memory.

METADATA_FILE = ".metadata.json"
"""The metadata file of a plain directory; Ray's checkpoints use the same name."""
_READ_BYTES = 16 * 1024 * 1024


def metadata_of_copy(store: ObjectStore, folder: str, manifest: Manifest | None = None) -> bytes | None:
    """Return what a copy has in its `METADATA_FILE`; None for what the checkpoint's own files have there.

    `folder` has the versions that were written later. Metadata that cannot be read is left out, with a warning: the
    files are whole.
    """
    try:
        said = newest_metadata(store, folder)
        if said is None and manifest and manifest.about.metadata:
            said = written_metadata(store, manifest)
    except CheckpointCorrupt as damaged:
        warnings.warn(f"the copy has no metadata that was set after the commit: {damaged}", stacklevel=2)
        return None
    return None if said is None else json.dumps(said).encode()


def manifest_of_copy(manifest: Manifest, metadata: bytes | None) -> Manifest:
    """Return the manifest with `metadata` as its last file, in place of one that was committed; no blob holds it."""
    if metadata is None:
        return manifest
    starts = range(0, len(metadata), CHUNK_BYTES)
    cuts = [(start, metadata[start : start + CHUNK_BYTES]) for start in starts]
    chunks = tuple(ChunkRef(blob=0, offset=start, length=len(cut), digest=digest_of(cut)) for start, cut in cuts)
    last = FileRef(path=METADATA_FILE, size_bytes=len(metadata), chunks=chunks)
    return manifest.model_copy(
        update={"files": (*(each for each in manifest.files if each.path != METADATA_FILE), last)}
    )


def fetch_committed(
    store: ObjectStore, manifest: Manifest, destination: Path, *, metadata: bytes | None = None
) -> None:
    """Download the checkpoint of `manifest` to `destination` with this `METADATA_FILE`, and verify every byte.

    Raises:
        CheckpointCorrupt: bytes are missing or altered; `destination` is not created.
    """
    copy = manifest_of_copy(manifest, metadata)
    with restored_directory(copy, destination) as sink:
        if metadata is not None:
            sink.write(len(copy.files) - 1, 0, memoryview(metadata))
            copy = copy.model_copy(update={"files": copy.files[:-1]})
        restore(store, copy, sink)


def written_metadata(store: ObjectStore, manifest: Manifest) -> dict[str, object]:
    """Return the metadata with which a checkpoint was committed."""
    only = tuple(file for file in manifest.files if file.path == METADATA_FILE)
    if not only:
        return dict(manifest.about.metadata)
    if only[0].size_bytes > DOCUMENT_BYTES:
        raise CheckpointCorrupt(f"{METADATA_FILE}: {only[0].size_bytes} bytes are no metadata")
    return {**read_metadata(read_committed(store, manifest, only[0]), METADATA_FILE), **manifest.about.metadata}


def read_committed(store: ObjectStore, manifest: Manifest, file: FileRef) -> bytearray:
    """Return the verified bytes of a file of `manifest`, or of those of its chunks that `file` lists."""
    memory = _Memory(file.size_bytes)
    restore(store, manifest.model_copy(update={"files": (file,)}), memory)
    return memory.data


class _Memory:
    def __init__(self, size_bytes: int) -> None:
        self.data = bytearray(size_bytes)

    def write(self, file: int, offset: int, data: memoryview) -> None:  # noqa: ARG002  there is one file
        """Store `data` at `offset`."""
        self.data[offset : offset + len(data)] = data


def read_metadata(data: bytes | bytearray, where: str) -> dict[str, object]:
    """Return the metadata in the bytes of a `.metadata.json`.

    Raises:
        CheckpointCorrupt: they are not a JSON object.
    """
    try:
        found = json.loads(data)
    except ValueError as unreadable:
        raise CheckpointCorrupt(f"{where}: not JSON ({len(data)} bytes): {unreadable}") from unreadable
    if not isinstance(found, dict):
        raise CheckpointCorrupt(f"{where}: expected a JSON object, found {type(found).__name__}")
    return found


# Directories without a manifest.


@dataclass(frozen=True, slots=True)
class PlainTree:
    """Files with their sizes, and folders; all paths are relative to one folder and stay inside it."""

    files: tuple[Listed, ...]
    folders: tuple[str, ...]


def fetch_plain(
    store: ObjectStore, folder: str, destination: Path, *, without: str = "", metadata: bytes | None = None
) -> None:
    """Download every file below `folder`, except those below `without`, to `destination`, with this `METADATA_FILE`.

    There are no digests. Checked are the sizes, and that the listing is the same before and after.

    Raises:
        CheckpointNotFound: there are no files.
        CheckpointCorrupt: a name leads out of the directory, or is both a file and a folder.
        StoreUnavailable: a file was shorter than listed, or the directory changed: fetch again.
    """
    tree = plain_tree(store, folder, without=without)

    def copy(run: tuple[str, int, int]) -> None:
        name, offset, length = run
        path = f"{folder}/{name}" if folder else name
        try:
            data = memoryview(store.read(path, offset=offset, length=length))
        except ObjectNotFound as gone:
            raise StoreUnavailable(f"{path}: was deleted after it was listed; read the directory again") from gone
        if len(data) != length:
            raise StoreUnavailable(f"{path} at {offset}: expected {length} bytes, found {len(data)}; read it again")
        _write_at(f"{building}/{name}", offset, data)

    with fresh_directory(destination) as building:
        building.mkdir()
        for each in tree.folders:
            (building / each).mkdir(parents=True, exist_ok=True)
        for file in tree.files:
            (building / file.path).touch()
        runs = (
            (file.path, offset, min(_READ_BYTES, file.size_bytes - offset))
            for file in tree.files
            for offset in range(0, file.size_bytes, _READ_BYTES)
        )
        for _ in store.map(copy, runs):
            pass
        if plain_tree(store, folder, without=without) != tree:
            raise StoreUnavailable(f"{folder or 'the directory'}: was written to while it was read; read it again")
        if metadata is not None:
            (building / METADATA_FILE).write_bytes(metadata)


def plain_tree(store: ObjectStore, folder: str, *, without: str = "") -> PlainTree:
    """List the files and folders below `folder`, and check that no name leads out of it.

    Raises:
        CheckpointNotFound, CheckpointCorrupt: as `fetch_plain`.
    """
    start = f"{folder}/" if folder else ""
    found = [each for each in store.list(folder) if each.path.rstrip("/") != folder]
    listed = [each for each in found if not (without and each.path.startswith(f"{without}/"))]
    if not listed:
        raise CheckpointNotFound(f"{folder or 'the root of the target'}: there are no files")
    inside = {each.path.removeprefix(start).rstrip("/"): each for each in listed}
    folders = {str(above) for path in inside for above in PurePosixPath(path).parents} - {"."}
    for path, each in inside.items():
        if not is_inside(path) or "\\" in path:
            raise CheckpointCorrupt(f"{each.path!r}: the name leads out of {folder or 'its directory'}")
        if is_too_long(path):
            raise CheckpointCorrupt(f"{path[:40]!r}…: the name is longer than 255 bytes, or the path longer than 4096")
        if path in folders and each.size_bytes:
            raise CheckpointCorrupt(f"{each.path!r}: is both a file of {each.size_bytes} bytes and a folder")
    folders |= {path for path, each in inside.items() if path not in folders and _is_mark(store, each)}
    files = (Listed(path, inside[path].size_bytes) for path in sorted(inside.keys() - folders))
    return PlainTree(tuple(files), tuple(sorted(folders)))


def _is_mark(store: ObjectStore, listed: Listed) -> bool:
    """Whether this is an empty object `folder/`, with which some clients mark a folder.

    Not every client lists the closing slash; without it, an empty file has a size by its name and a mark has none.
    """
    return not listed.size_bytes and (listed.path.endswith("/") or store.size(listed.path) is None)


# Local directories: detect changes, copy a directory, replace a directory or a file atomically.


def seal_of(directory: Path) -> str:
    """Return a digest of its names, sizes, modification times and inodes, without reading files. A write changes it.

    Raises:
        FileNotFoundError: there is no such directory.
    """
    seen = hashlib.blake2b(digest_size=16)
    for path, status in sorted(_below(directory, "")):
        kind, times = stat.S_IFMT(status.st_mode), (status.st_mtime_ns, status.st_ino)
        about = (path, kind, *(() if stat.S_ISDIR(kind) else (status.st_size, *times)))
        seen.update(repr(about).encode())
    return seen.hexdigest()


def _below(directory: Path, below: str) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(directory) as entries:
        for entry in entries:
            path = f"{below}{entry.name}"
            status = entry.stat(follow_symlinks=False)
            yield path, status
            if stat.S_ISDIR(status.st_mode):
                yield from _below(directory / entry.name, f"{path}/")


def copy_directory(source: Path, destination: Path) -> None:
    """Make the new directory `destination` a copy of `source`, whole or not at all.

    A link to a file inside becomes that file.

    Raises:
        InvalidInput: `source` has a link that leads out of it or to a directory, or cannot be saved (`StagedFiles`).
        StagedFilesChanged: `source` was written to during the copy.
    """
    staged = StagedFiles(source)
    with fresh_directory(destination) as copy:
        copy.mkdir()
        for folder in staged.empty_directories:
            (copy / folder).mkdir(parents=True)
        for file in staged.files:
            if not (meant := (source / file.path).resolve()).is_relative_to(source.resolve()):
                raise InvalidInput(f"{source / file.path}: a link that leads out of its directory, to {meant}")
            (copy / file.path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / file.path, copy / file.path)
        staged.require_unchanged()


@contextmanager
def fresh_directory(destination: Path) -> Iterator[Path]:
    """Yield a path at which to make a directory; rename it to `destination` if nothing was raised.

    `destination` must be missing or empty.
    """
    building = destination.with_name(f".{destination.name}.{uuid4().hex}")
    building.mkdir(parents=True)
    try:
        yield building / "whole"
        (building / "whole").rename(destination)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def replace_file(path: Path, data: bytes) -> None:
    """Write `data` to `path` atomically: readers see the old file or the new one, also after a power cut."""
    fresh = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        with fresh.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
