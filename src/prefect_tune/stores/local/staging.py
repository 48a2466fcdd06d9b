"""Local directories: files to upload, the directory that a restore fills, and copies that are whole or not there."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NewType, Self, TypeVar
from uuid import uuid4

from prefect_tune.core.checkpoints.manifest import FileRef, FileStat, Manifest, Piece
from prefect_tune.core.checkpoints.verified_reads import has_same_files
from prefect_tune.core.errors import InvalidInput, StagedFilesChanged
from prefect_tune.core.storage.object_store import ParallelMap
from prefect_tune.stores.posix_files import sync_folder

_In = TypeVar("_In")
_Out = TypeVar("_Out")
TRANSFERS = 8


@contextmanager
def transfer_pool(workers: int = TRANSFERS) -> Iterator[ParallelMap]:
    """Yield a `map` that runs up to `workers` calls at once, in threads; the first error cancels the rest.

    At most `2 * workers` calls are submitted ahead of the result that is awaited.
    """
    with ThreadPoolExecutor(workers, thread_name_prefix="transfer") as pool:

        def windowed(function: Callable[[_In], _Out], items: Iterable[_In], /) -> Iterator[_Out]:
            waiting = iter(items)
            first = list(islice(waiting, 2 * workers))
            if len(first) == 1:  # for a single call, a thread costs more than it saves
                yield function(first[0])
                return
            running = [_begun(pool, function, item) for item in first]
            try:
                while running:
                    yield running.pop(0).result()
                    running.extend(_begun(pool, function, item) for item in islice(waiting, 1))
            finally:
                for future in running:
                    future.cancel()

        yield windowed


def _begun(pool: ThreadPoolExecutor, function: Callable[[_In], _Out], item: _In) -> Future[_Out]:
    """Begin a call in the pool; make it here where no thread can be started, as after the end of the main thread."""
    try:
        return pool.submit(function, item)
    except RuntimeError:
        made: Future[_Out] = Future()
        made.set_result(function(item))
        return made


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
        self.files: tuple[FileStat, ...]
        self.empty_directories: tuple[str, ...]
        if not directory.is_dir():
            raise InvalidInput(f"checkpoint directory {directory}: expected a directory, found none")
        self._found = _found_in(directory)
        self.files = tuple(FileStat(path, each.size_bytes, each.mode) for path, each in self._found.files.items())
        self.empty_directories = self._found.empty_directories

    def require_unchanged(self) -> None:
        now = _found_in(self.directory)
        if now == self._found:
            return
        before = self._found.files
        names = {path for path in {*before, *now.files} if before.get(path) != now.files.get(path)}
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


@dataclass(frozen=True, slots=True)
class _File:
    """A file's status when the directory was listed; a later write changes it."""

    size_bytes: int
    mode: int
    modified_ns: int
    inode: int


@dataclass(frozen=True, slots=True)
class _LocalFiles:
    files: Mapping[str, _File]
    empty_directories: tuple[str, ...]


def _found_in(directory: Path) -> _LocalFiles:
    files: dict[str, _File] = {}
    empty: list[str] = []
    with naming_unreadable(directory):
        _scan(str(directory), "", files, empty)
    return _LocalFiles(dict(sorted(files.items())), tuple(sorted(empty)))


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


def _scan(directory: str, below: str, files: dict[str, _File], empty: list[str]) -> None:
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
            files[path] = _File(status.st_size, mode, status.st_mtime_ns, status.st_ino)
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


def holds_exactly(manifest: Manifest, directory: Path) -> bool:
    """Read `directory` and return whether it has exactly the files and folders of `manifest`, byte for byte."""
    try:
        with transfer_pool() as readers:
            return has_same_files(manifest, StagedFiles(directory), side_by_side=readers)
    except (InvalidInput, StagedFilesChanged):
        return False


class DirectorySink:
    """A new directory beside `destination`, renamed to it when all files are written."""

    def __init__(self, manifest: Manifest, destination: Path) -> None:
        self._manifest = manifest
        self._destination = destination
        self._building = destination.with_name(f".{destination.name}.{uuid4().hex}")
        self._other_modes: list[tuple[str, int]] = []  # set at the end: read-only, or against the umask

    def __enter__(self) -> Self:
        try:
            self._building.mkdir(parents=True)
            folders = {file.path.rpartition("/")[0] for file in self._manifest.files}
            for folder in sorted({*folders, *self._manifest.empty_directories}):
                (self._building / folder).mkdir(parents=True, exist_ok=True)
            for file in self._manifest.files:
                self._create(file)
        except BaseException as error:
            shutil.rmtree(self._building, ignore_errors=True)
            if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
                raise InvalidInput(
                    f"{self._destination}: this file system cannot hold the checkpoint's file "
                    f"{error.filename.removeprefix(f'{self._building}/')!r}: its path is too long; choose a directory "
                    "with a shorter path, or another file system"
                ) from error
            raise
        return self

    def write(self, file: int, offset: int, data: memoryview) -> None:
        path = f"{self._building}/{self._manifest.files[file].path}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(descriptor, data[done:], offset + done)
        finally:
            os.close(descriptor)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if error is None:
                for path, mode in self._other_modes:
                    Path(path).chmod(mode)
                if self._destination.is_dir() and not any(self._destination.iterdir()):
                    self._destination.rmdir()
                self._building.rename(self._destination)
        finally:
            shutil.rmtree(self._building, ignore_errors=True)  # was renamed if all went well

    def _create(self, file: FileRef) -> None:
        readable = file.mode | stat.S_IRUSR
        path = f"{self._building}/{file.path}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, readable | stat.S_IWUSR)
        try:
            if stat.S_IMODE(os.fstat(descriptor).st_mode) != readable:
                self._other_modes.append((path, readable))
        finally:
            os.close(descriptor)


# Local directories: detect changes, copy a directory, replace a directory or a file atomically.

Seal = NewType("Seal", str)
"""A digest of a directory's names, sizes, modification times and inodes. Any write to it changes the seal."""


def seal_of(directory: Path) -> Seal:
    """Return the seal of `directory`, without reading its files.

    Raises:
        FileNotFoundError: there is no such directory.
    """
    seen = hashlib.blake2b(digest_size=16)
    for path, status in sorted(_below(directory, "")):
        kind, times = stat.S_IFMT(status.st_mode), (status.st_mtime_ns, status.st_ino)
        about = (path, kind, *(() if stat.S_ISDIR(kind) else (status.st_size, *times)))
        seen.update(repr(about).encode())
    return Seal(seen.hexdigest())


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
    before = seal_of(source)
    staged = StagedFiles(source)
    with fresh_directory(destination) as copy:
        copy.mkdir()
        for folder in staged.empty_directories:
            (copy / folder).mkdir(parents=True)
        for file in staged.files:
            _require_inside(source, file.path)
            (copy / file.path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / file.path, copy / file.path)
        if seal_of(source) != before:
            raise StagedFilesChanged(f"{source}: was written to while it was copied")


def _require_inside(directory: Path, path: str) -> None:
    meant = (directory / path).resolve()
    if not meant.is_relative_to(directory.resolve()):
        raise InvalidInput(f"{directory / path}: a link that leads out of its directory, to {meant}")


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
