"""Mirror a trial's artifact directory on a target and back: one plain object for each file, only changed ones are sent.

    <directory>/logs/events.out   ──►   <folder>/logs/events.out

A later upload replaces the object. Nothing else on the target depends on artifacts: a reader may see some files of one
sync and others of the one before, and an attempt that was taken for dead may replace a file of its successor.
Never: an object outside `folder`; a local file outside `directory`, whatever a key or a link says.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from prefect_tune.core.errors import InvalidInput, StoreUnavailable, UnknownVersion
from prefect_tune.core.shown_text import is_unicode
from prefect_tune.core.storage.layout import NEVER_ARTIFACTS, is_excluded
from prefect_tune.core.storage.object_store import Buffer, Listed, ObjectStore
from prefect_tune.stores.local.download import plain_tree
from prefect_tune.stores.local.staging import transfer_pool

_PIECE_BYTES = 8 * 1024 * 1024
_TICK_NS = 50_000_000  # the clock of a file system on Linux ticks every 10 ms or faster
_MAX_KEY_BYTES = 900  # S3, Google and Azure take 1,024; the rest is for the prefix of the target
_NO_KEY = re.compile(r"[\x00-\x1f\x7f\ufffe\uffff]")  # not in every listing, which is XML
_HALF_RECEIVED = re.compile(r"\.[0-9a-f]{32}\.part")
_FORMER_FORMAT, _FORMER_END_BYTES = b'"format":"prefect-tune/artifacts"', 1024
_FORMER_INDEX = re.compile(r"index/\d{10}\.json")

_Stamp: TypeAlias = tuple[int, int, int]
"""Size, modification time in ns and inode of a file; a later write changes it."""


class ArtifactMirror:
    """A directory and its mirror below a folder of a target. One thread at a time may use it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._mirrored: dict[str, _Stamp | None] = {}
        """By path: the stamp of the local file when it was sent or received; None if the copy may be another one."""

    def send(self, store: ObjectStore, folder: str, excludes: Sequence[str]) -> Mapping[str, str]:
        """Send new and changed files, delete those that are gone, and return by path why the others are left out.

        Only what this mirror has sent or received is deleted. Left out are excluded files and empty folders, files that
        vanish before they are read, and what the result names: links that lead out of the directory or to folders,
        entries that are neither a file nor a folder or cannot be read, names that not every target takes, and
        `NEVER_ARTIFACTS`.

        Raises:
            InvalidInput: the directory does not exist.
            StoreUnavailable, StoreRefused: not all files were sent; the next call sends the others.
        """
        if not self._directory.is_dir():
            raise InvalidInput(f"{self._directory}: expected a directory to sync, found nothing of the kind")
        left_out: dict[str, str] = {}
        settled_ns = time.time_ns() - _TICK_NS
        local = dict(_scan(self._directory, folder, excludes, left_out))
        mirrored = self._mirrored
        if deleted := sorted(mirrored.keys() - local.keys()):
            store.delete([_key(folder, path) for path in deleted])  # before a file takes the name of a folder
            for path in deleted:
                del mirrored[path]

        def send_file(path: str) -> None:
            try:
                file = (self._directory / path).open("rb", buffering=0)
            except FileNotFoundError:
                return  # deleted since it was listed
            except OSError as error:
                left_out[path] = f"it cannot be read: {error.strerror}"
                return
            mirrored[path] = None
            try:
                with file:
                    store.replace(_key(folder, path), _Pieces(file.fileno()))
            except InvalidInput as unsendable:  # lost by the disk, or of a name that the store reserves
                left_out[path] = str(unsendable)
                del mirrored[path]
                return
            if local[path][1] < settled_ns:  # else the next write may come within the same tick of the clock
                mirrored[path] = local[path]

        with transfer_pool() as transfers:
            for _ in transfers(send_file, [path for path, stamp in local.items() if mirrored.get(path) != stamp]):
                pass
        return left_out

    def receive(self, store: ObjectStore, folder: str, excludes: Sequence[str]) -> None:
        """Download the files below `folder`, in place of local ones of the same names; all others stay.

        Raises:
            CheckpointNotFound: the target has no files there; a `FileNotFoundError` too.
            CheckpointCorrupt: a key would lead out of the directory. Nothing is downloaded.
            InvalidInput: a local link or file has the name of a folder, or a folder that of a file.
            UnknownVersion: the files are those of a development version.
        """
        self._mirrored.clear()
        files = plain_tree(store, folder).files
        _require_plain_files(store, folder, files)

        def receive_file(file: Listed) -> None:
            local = _local_path(self._directory, file.path)
            _replace(local, _read_pieces(store, _key(folder, file.path), file.size_bytes))
            self._mirrored[file.path] = _stamp(local.stat())

        with transfer_pool() as transfers:
            for _ in transfers(receive_file, [file for file in files if not is_excluded(file.path, excludes)]):
                pass


def _key(folder: str, path: str) -> str:
    return f"{folder}/{path}" if folder else path  # the folder may be the root of a target


class _Pieces:
    """The bytes of an open file, up to its size when it was opened."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._size_bytes = os.fstat(file).st_size

    def __iter__(self) -> Iterator[bytes]:
        for offset in range(0, self._size_bytes, _PIECE_BYTES):
            try:
                piece = os.pread(self._file, min(_PIECE_BYTES, self._size_bytes - offset), offset)
            except OSError as error:  # of this disk, not of the target
                raise InvalidInput(f"it cannot be read: {error.strerror}") from error
            yield piece


def _scan(
    directory: Path, folder: str, excludes: Sequence[str], left_out: dict[str, str]
) -> Iterator[tuple[str, _Stamp]]:
    """Yield the files to send, and note in `left_out` why others are not."""
    below = [""]
    while below:
        above = below.pop()
        try:
            entries = list(os.scandir(directory / above))
        except FileNotFoundError:
            continue  # deleted since its parent was read
        except OSError as error:
            left_out[above] = f"it cannot be read: {error.strerror}"
            continue
        for entry in entries:
            path = f"{above}/{entry.name}" if above else entry.name
            if is_excluded(path, excludes) or _HALF_RECEIVED.fullmatch(entry.name):
                continue
            reason = _unsendable_reason(path, folder)
            try:
                if reason is not None:
                    left_out[path] = reason
                elif entry.is_dir(follow_symlinks=False):
                    below.append(path)
                elif entry.is_symlink() and not (entry.is_file() and _stays_inside(directory, path)):
                    left_out[path] = "a link to a folder, to nothing, or out of the trial's directory"
                elif entry.is_file():
                    yield path, _stamp(entry.stat())
                else:
                    left_out[path] = "neither a file nor a folder"
            except FileNotFoundError:
                continue  # deleted since the folder was read
            except OSError as error:
                left_out[path] = f"it cannot be read: {error.strerror}"


def _unsendable_reason(path: str, folder: str) -> str | None:
    if not is_unicode(path):
        return "its name is not UTF-8"
    if "\\" in path:
        return "its name has a backslash"
    if _NO_KEY.search(path):
        return "its name has control characters"
    if len(_key(folder, path).encode()) > _MAX_KEY_BYTES:
        return f"its path on the target is longer than {_MAX_KEY_BYTES} bytes"
    if is_excluded(path, NEVER_ARTIFACTS):
        return "files of this name are never artifacts"
    return None


def _stays_inside(directory: Path, path: str) -> bool:
    return (directory / path).resolve().is_relative_to(directory.resolve())


def _stamp(status: os.stat_result) -> _Stamp:
    return (status.st_size, status.st_mtime_ns, status.st_ino)


def _require_plain_files(store: ObjectStore, folder: str, files: Iterable[Listed]) -> None:
    """Refuse the layout of development versions, in which numbered indexes named the files and their parts."""
    for file in files:
        key = _key(folder, file.path)
        if _FORMER_INDEX.fullmatch(file.path) and _FORMER_FORMAT in bytes(
            store.read(key, offset=max(0, file.size_bytes - _FORMER_END_BYTES))
        ):
            raise UnknownVersion(
                f"{key}: the artifacts are those of a development version before the first release: read them with "
                f"that version, or delete {folder!r}"
            )


def _read_pieces(store: ObjectStore, key: str, size_bytes: int) -> Iterator[Buffer]:
    for offset in range(0, size_bytes, _PIECE_BYTES):
        length = min(_PIECE_BYTES, size_bytes - offset)
        data = store.read(key, offset=offset, length=length)
        if len(data) != length:
            raise StoreUnavailable(f"{key} at {offset}: expected {length} bytes, found {len(data)}; try again")
        yield data


def _local_path(directory: Path, path: str) -> Path:
    """Return the local path of `path`, making its folder; refuse links that lead out of `directory`."""
    local = directory / path
    if not local.parent.resolve().is_relative_to(directory.resolve()):
        raise InvalidInput(f"{local}: a local link leads out of {directory}: remove it")
    try:
        local.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as in_the_way:
        raise InvalidInput(f"{local}: expected a local folder, found a file: remove it") from in_the_way
    if local.is_dir():
        raise InvalidInput(f"{local}: expected a local file, found a folder: remove it")
    return local


def _replace(local: Path, pieces: Iterable[Buffer]) -> None:
    fresh = local.with_name(f".{uuid.uuid4().hex}.part")
    try:
        with fresh.open("xb") as file:
            file.writelines(pieces)
        fresh.replace(local)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def delete_everything(store: ObjectStore, folder: str) -> None:
    """Delete every object below `folder`. After an interruption, call it again to finish.

    Raises:
        InvalidInput: `folder` is empty, which would be the whole target.
    """
    if not folder:
        raise InvalidInput("delete: expected a folder of the target, found the whole target, which is never deleted")
    while listed := store.list(folder):
        store.delete([each.path for each in listed])
