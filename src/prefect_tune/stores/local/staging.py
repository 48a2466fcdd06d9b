"""Local directories at both ends of a transfer: directories to upload, to fill by a download, or to copy.

A directory or file appears complete or not at all, because it is created next to its destination and then renamed.
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
    FileRange,
    FileRef,
    FileStat,
    Manifest,
    StagedDirectory,
    read_newest_metadata,
)
from prefect_tune.core.errors import (
    CheckpointCorrupt,
    CheckpointNotFound,
    InvalidInput,
    ObjectNotFound,
    StagedFilesChanged,
    StoreUnavailable,
)
from prefect_tune.core.restore import restore_files
from prefect_tune.core.storage.documents import MAX_DOCUMENT_BYTES
from prefect_tune.core.storage.object_store import ListedObject, ObjectStore, is_normalized_path, is_path_too_long
from prefect_tune.core.values import hash_bytes
from prefect_tune.stores.parallel_map import parallel_map
from prefect_tune.stores.posix_store import sync_folder

_FileStatus: TypeAlias = tuple[int, int, int, int]
"""A file's size, mode, modification time in ns and inode when listed. A later write changes at least one of them."""


class StagedFiles:
    """A local directory as a `StagedDirectory`. It is listed once; files are read by byte range, and never written."""

    def __init__(self, directory: Path) -> None:
        """List `directory`.

        Raises:
            InvalidInput: `directory` does not exist or is a file, or has an entry that cannot be read here or restored
                elsewhere (a link to a directory, a dangling link, a socket, a name that is not UTF-8, a long path).
            StagedFilesChanged: a file was deleted during the listing.
        """
        self.directory = directory
        if not directory.is_dir():
            raise InvalidInput(f"checkpoint directory {directory}: expected a directory, found none")
        self._statuses, self.empty_directories = _list_directory(directory)
        self.files = tuple(FileStat(path, size_bytes, mode) for path, (size_bytes, mode, *_) in self._statuses.items())

    def require_unchanged(self) -> None:
        statuses, empty_directories = _list_directory(self.directory)
        if (statuses, empty_directories) != (self._statuses, self.empty_directories):
            names = {path for path in {*self._statuses, *statuses} if self._statuses.get(path) != statuses.get(path)}
            raise StagedFilesChanged(
                f"{self.directory}: {sorted(names)[:3] or 'its directories'} changed while it was being saved"
            )

    def read_into(self, piece: FileRange, buffer: memoryview) -> None:
        file = self.files[piece.file]
        with converting_read_errors(self.directory):
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


def _list_directory(directory: Path) -> tuple[dict[str, _FileStatus], tuple[str, ...]]:
    """Return the files below `directory`, sorted, and its empty directories."""
    files: dict[str, _FileStatus] = {}
    empty_directories: list[str] = []
    with converting_read_errors(directory):
        _scan_directory(str(directory), "", files, empty_directories)
    return dict(sorted(files.items())), tuple(sorted(empty_directories))


_READ_ERRNOS = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO, errno.ENODEV, errno.EISDIR)
"""The error numbers of reads that would fail in an attempt on another machine too, so a retry is useless."""
_MAX_PATH_BYTES, _MAX_LEVELS = 3_000, 200
"""Limits of a path within a checkpoint. A restore prepends a directory, and Linux allows 4,095 bytes in all."""
_SHOWN_CHARACTERS = 200


@contextmanager
def converting_read_errors(directory: Path) -> Iterator[None]:
    """Convert system errors of files below `directory` to errors that name the path for the user.

    Raises:
        InvalidInput: an entry cannot be read.
        StagedFilesChanged: an entry was deleted.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as gone:
        raise StagedFilesChanged(f"{gone.filename}: deleted while it was being saved") from gone
    except OSError as error:
        if error.errno in _READ_ERRNOS:
            raise InvalidInput(
                f"{_shorten_path(str(error.filename or directory))}: cannot be read or saved: {error.strerror}"
            ) from error
        raise


def _shorten_path(path: str) -> str:
    """Return a path for a message, shortened in the middle if it is very long."""
    return path if len(path) <= 2 * _SHOWN_CHARACTERS else f"{path[:_SHOWN_CHARACTERS]}…{path[-_SHOWN_CHARACTERS:]}"


def _scan_directory(directory: str, below: str, files: dict[str, _FileStatus], empty_directories: list[str]) -> None:
    with os.scandir(directory) as entries:
        sorted_entries = sorted(entries, key=lambda entry: entry.name)
    if not sorted_entries and below:
        empty_directories.append(below)
    for entry in sorted_entries:
        path = f"{below}/{entry.name}" if below else entry.name
        _require_portable(entry, path)
        status = entry.stat()
        if stat.S_ISREG(status.st_mode):
            mode = stat.S_IMODE(status.st_mode) & 0o777
            files[path] = (status.st_size, mode, status.st_mtime_ns, status.st_ino)
        else:
            _scan_directory(entry.path, path, files, empty_directories)


def _require_portable(entry: os.DirEntry[str], relative: str) -> None:
    path = entry.path
    try:
        entry.name.encode()
    except UnicodeEncodeError as undecodable:
        raise InvalidInput(f"{path!r}: the name is not UTF-8, so it cannot be restored elsewhere") from undecodable
    size_bytes, levels = len(relative.encode()), relative.count("/") + 1
    if size_bytes > _MAX_PATH_BYTES or levels > _MAX_LEVELS:
        raise InvalidInput(
            f"{_shorten_path(path)}: the path within the checkpoint has {size_bytes:,} bytes and {levels} levels, "
            f"expected at most {_MAX_PATH_BYTES:,} bytes and {_MAX_LEVELS} levels, so that it can be restored elsewhere"
        )
    if "\\" in entry.name:
        raise InvalidInput(f"{path}: the name holds a backslash, so it cannot be restored elsewhere")
    if entry.is_symlink() and (entry.is_dir() or not Path(path).exists()):
        raise InvalidInput(f"{path}: a link to a directory, or to nothing, cannot be saved; copy what it points to")
    if not (entry.is_file() or entry.is_dir()):
        raise InvalidInput(f"{path}: neither a file nor a directory, so it cannot be saved")


def has_same_files(manifest: Manifest, source: StagedDirectory) -> bool:
    """Return whether `source` has the files, bytes and empty directories of `manifest`; permissions may differ.

    Only the files of `source` are read, and compared with the digests in `manifest`; nothing is read from the target.

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
        (FileRange(indexes[file.path], offset, chunk.length), chunk)
        for file in manifest.files
        for offset, chunk in file.chunks_with_offset()
    )

    def has_same_digest(pair: tuple[FileRange, ChunkRef]) -> bool:
        buffer = memoryview(bytearray(pair[0].length))
        source.read_into(pair[0], buffer)
        return hash_bytes(buffer) == pair[1].digest

    return all(parallel_map(has_same_digest, chunks))


def matches_manifest(manifest: Manifest, directory: Path) -> bool:
    """Return whether `directory` has exactly the files, bytes and folders of `manifest`."""
    try:
        return has_same_files(manifest, StagedFiles(directory))
    except (InvalidInput, StagedFilesChanged):
        return False


class DirectorySink:
    """Writes the bytes of a manifest's files into existing files below a directory."""

    def __init__(self, manifest: Manifest, directory: Path) -> None:
        self._manifest = manifest
        self._directory = directory

    def write(self, file: int, offset: int, data: memoryview) -> None:
        _write_range(f"{self._directory}/{self._manifest.files[file].path}", offset, data)


def _write_range(path: str, offset: int, data: memoryview) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        done = 0
        while done < len(data):
            done += os.pwrite(descriptor, data[done:], offset + done)
    finally:
        os.close(descriptor)


@contextmanager
def restoring_directory(manifest: Manifest, destination: Path) -> Iterator[DirectorySink]:
    """Yield a sink for the files of `manifest`; at the end of the block, rename the filled directory to `destination`.

    Raises:
        InvalidInput: the path of a file or folder is too long for the file system.
    """
    other_modes: list[tuple[str, int]] = []  # set at the end: read-only modes, and modes that the umask forbids
    with building_directory(destination) as building:
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


# Download a checkpoint into a new local directory, or read its files into memory.

METADATA_FILE = ".metadata.json"
"""The metadata file in a directory without a manifest; Ray's checkpoints use the same name."""
_READ_BYTES = 16 * 1024 * 1024


def read_copy_metadata(store: ObjectStore, folder: str, manifest: Manifest | None = None) -> bytes | None:
    """Return the content for `METADATA_FILE` in a checkpoint's copy; None if the copy keeps the checkpoint's file.

    `folder` has the versions of the metadata that were written after the commit. If these are damaged, warn and return
    None. The copy then lacks these versions, but its other files are complete.
    """
    try:
        metadata = read_newest_metadata(store, folder)
        if metadata is None and manifest and manifest.metadata.user_metadata:
            metadata = read_committed_metadata(store, manifest)
    except CheckpointCorrupt as damaged:
        warnings.warn(f"the copy lacks metadata that was set after the commit: {damaged}", stacklevel=2)
        return None
    return None if metadata is None else json.dumps(metadata).encode()


def add_metadata_file(manifest: Manifest, metadata: bytes | None) -> Manifest:
    """Return `manifest` with `metadata` as last file, which replaces a committed metadata file and is in no blob."""
    if metadata is None:
        return manifest
    parts = [(start, metadata[start : start + CHUNK_BYTES]) for start in range(0, len(metadata), CHUNK_BYTES)]
    chunks = tuple(ChunkRef(blob=0, offset=start, length=len(part), digest=hash_bytes(part)) for start, part in parts)
    last = FileRef(path=METADATA_FILE, size_bytes=len(metadata), chunks=chunks)
    files = (file for file in manifest.files if file.path != METADATA_FILE)
    return manifest.model_copy(update={"files": (*files, last)})


def fetch_checkpoint(store: ObjectStore, manifest: Manifest, directory: Path, *, metadata: bytes | None = None) -> None:
    """Download the checkpoint of `manifest` to `directory`, with `metadata` as its metadata file; verify every byte.

    Raises:
        CheckpointCorrupt: bytes are missing or altered; `directory` is not created.
    """
    copy = add_metadata_file(manifest, metadata)
    with restoring_directory(copy, directory) as sink:
        if metadata is not None:
            sink.write(len(copy.files) - 1, 0, memoryview(metadata))
            copy = copy.model_copy(update={"files": copy.files[:-1]})
        restore_files(store, copy, sink)


def read_committed_metadata(store: ObjectStore, manifest: Manifest) -> dict[str, object]:
    """Return the metadata with which the checkpoint was committed."""
    files = tuple(file for file in manifest.files if file.path == METADATA_FILE)
    if not files:
        return dict(manifest.metadata.user_metadata)
    if files[0].size_bytes > MAX_DOCUMENT_BYTES:
        raise CheckpointCorrupt(f"{METADATA_FILE}: {files[0].size_bytes} bytes, expected at most {MAX_DOCUMENT_BYTES}")
    data = read_committed_file(store, manifest, files[0])
    return {**parse_metadata(data, METADATA_FILE), **manifest.metadata.user_metadata}


def read_committed_file(store: ObjectStore, manifest: Manifest, file: FileRef) -> bytearray:
    """Return the verified bytes of `file`, which is a file of `manifest`, or refers to some chunks of such a file."""
    sink = _MemorySink(file.size_bytes)
    restore_files(store, manifest.model_copy(update={"files": (file,)}), sink)
    return sink.data


class _MemorySink:
    def __init__(self, size_bytes: int) -> None:
        self.data = bytearray(size_bytes)

    def write(self, file: int, offset: int, data: memoryview) -> None:  # noqa: ARG002  there is one file
        self.data[offset : offset + len(data)] = data


def parse_metadata(data: bytes | bytearray, where: str) -> dict[str, object]:
    """Return the metadata in the bytes of a `.metadata.json`; raise `CheckpointCorrupt` if it is not a JSON object."""
    try:
        metadata = json.loads(data)
    except ValueError as unreadable:
        raise CheckpointCorrupt(f"{where}: not JSON ({len(data)} bytes): {unreadable}") from unreadable
    if not isinstance(metadata, dict):
        raise CheckpointCorrupt(f"{where}: expected a JSON object, found {type(metadata).__name__}")
    return metadata


# Directories without a manifest.


@dataclass(frozen=True, slots=True)
class PlainTree:
    """Files with sizes, and folders. All paths are relative to one folder and stay inside it."""

    files: tuple[ListedObject, ...]
    folders: tuple[str, ...]


def fetch_plain_directory(
    store: ObjectStore, folder: str, destination: Path, *, excluded_folder: str = "", metadata: bytes | None = None
) -> None:
    """Download all files below `folder`, but not below `excluded_folder`, to `destination`; add `metadata` as a file.

    The files have no digests, so their sizes are checked, and the files are listed again at the end to detect changes.

    Raises:
        CheckpointNotFound: there are no files.
        CheckpointCorrupt: a name leads out of the directory, or is both a file and a folder.
        StoreUnavailable: a file was shorter than listed, or the directory changed; another fetch may succeed.
    """
    tree = list_plain_tree(store, folder, excluded_folder=excluded_folder)

    def fetch_range(file_range: tuple[str, int, int]) -> None:
        name, offset, length = file_range
        path = f"{folder}/{name}" if folder else name
        try:
            data = memoryview(store.read(path, offset=offset, length=length))
        except ObjectNotFound as gone:
            raise StoreUnavailable(f"{path}: deleted after it was listed; read the directory again") from gone
        if len(data) != length:
            raise StoreUnavailable(f"{path} at {offset}: expected {length} bytes, found {len(data)}; read it again")
        _write_range(f"{building}/{name}", offset, data)

    with building_directory(destination) as building:
        building.mkdir()
        for name in tree.folders:
            (building / name).mkdir(parents=True, exist_ok=True)
        for file in tree.files:
            (building / file.path).touch()
        file_ranges = (
            (file.path, offset, min(_READ_BYTES, file.size_bytes - offset))
            for file in tree.files
            for offset in range(0, file.size_bytes, _READ_BYTES)
        )
        for _ in store.map(fetch_range, file_ranges):
            pass
        if list_plain_tree(store, folder, excluded_folder=excluded_folder) != tree:
            raise StoreUnavailable(f"{folder or 'the directory'}: changed while it was read; read it again")
        if metadata is not None:
            (building / METADATA_FILE).write_bytes(metadata)


def list_plain_tree(store: ObjectStore, folder: str, *, excluded_folder: str = "") -> PlainTree:
    """List the files and folders below `folder`, and check their names. Raises like `fetch_plain_directory`."""
    start = f"{folder}/" if folder else ""
    objects = [entry for entry in store.list(folder) if entry.path.rstrip("/") != folder]
    listed = [entry for entry in objects if not (excluded_folder and entry.path.startswith(f"{excluded_folder}/"))]
    if not listed:
        raise CheckpointNotFound(f"{folder or 'the root of the target'}: there are no files")
    by_path = {entry.path.removeprefix(start).rstrip("/"): entry for entry in listed}
    folders = {str(parent) for path in by_path for parent in PurePosixPath(path).parents} - {"."}
    for path, entry in by_path.items():
        if not is_normalized_path(path) or "\\" in path:
            raise CheckpointCorrupt(f"{entry.path!r}: the name leads out of {folder or 'its directory'}")
        if is_path_too_long(path):
            raise CheckpointCorrupt(f"{path[:40]!r}…: the name is longer than 255 bytes, or the path longer than 4096")
        if path in folders and entry.size_bytes:
            raise CheckpointCorrupt(f"{entry.path!r}: is both a file of {entry.size_bytes} bytes and a folder")
    folders |= {path for path, entry in by_path.items() if path not in folders and _is_folder_marker(store, entry)}
    files = (ListedObject(path, by_path[path].size_bytes) for path in sorted(by_path.keys() - folders))
    return PlainTree(tuple(files), tuple(sorted(folders)))


def _is_folder_marker(store: ObjectStore, listed: ListedObject) -> bool:
    """Return whether `listed` is an empty object `folder/`, with which some clients mark a folder.

    Some listings omit the slash. In that case, `size` shows which it is: it finds an empty file, but not a marker.
    """
    return not listed.size_bytes and (listed.path.endswith("/") or store.size(listed.path) is None)


# Local directories: detect changes, copy a directory, replace a directory or a file atomically.


def compute_stat_digest(directory: Path) -> str:
    """Return a digest of a directory's names, sizes, modification times and inodes. A write changes the digest.

    Raises:
        FileNotFoundError: the directory does not exist.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path, status in sorted(_iter_entries(directory, "")):
        kind, times = stat.S_IFMT(status.st_mode), (status.st_mtime_ns, status.st_ino)
        identity = (path, kind, *(() if stat.S_ISDIR(kind) else (status.st_size, *times)))
        digest.update(repr(identity).encode())
    return digest.hexdigest()


def _iter_entries(directory: Path, prefix: str) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(directory) as entries:
        for entry in entries:
            path = f"{prefix}{entry.name}"
            status = entry.stat(follow_symlinks=False)
            yield path, status
            if stat.S_ISDIR(status.st_mode):
                yield from _iter_entries(directory / entry.name, f"{path}/")


def copy_directory(source: Path, destination: Path) -> None:
    """Copy `source` to the new directory `destination`, completely or not at all.

    A link to a file inside `source` becomes a file.

    Raises:
        InvalidInput: a link leads out of `source` or to a directory, or an entry cannot be saved (see `StagedFiles`).
        StagedFilesChanged: `source` changed during the copy.
    """
    staged = StagedFiles(source)
    with building_directory(destination) as copy:
        copy.mkdir()
        for folder in staged.empty_directories:
            (copy / folder).mkdir(parents=True)
        for file in staged.files:
            if not (resolved := (source / file.path).resolve()).is_relative_to(source.resolve()):
                raise InvalidInput(f"{source / file.path}: a link that leads out of its directory, to {resolved}")
            (copy / file.path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / file.path, copy / file.path)
        staged.require_unchanged()


@contextmanager
def building_directory(destination: Path) -> Iterator[Path]:
    """Yield a path for a new directory; rename it to `destination` at the end, unless an error was raised.

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
    """Write `data` to `path` atomically, so that readers see the old or the new file, even after a power cut."""
    temporary = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
