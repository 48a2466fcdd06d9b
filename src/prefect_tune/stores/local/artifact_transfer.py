"""Upload a trial's artifact directory to a target and download it: changed files only, published atomically."""

from __future__ import annotations

import os
import re
import stat
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from prefect_tune.core.checkpoints.artifacts import (
    NEVER_ARTIFACTS,
    ArtifactFile,
    ArtifactIndex,
    ArtifactPart,
    beyond_use,
    files_folder,
    is_excluded,
    joined,
    newest_index,
    part_path,
    publish_index,
)
from prefect_tune.core.errors import (
    AlreadyExists,
    CheckpointCorrupt,
    InvalidInput,
    ObjectNotFound,
    StoreUnavailable,
    Superseded,
)
from prefect_tune.core.shown_text import is_unicode
from prefect_tune.core.storage.object_store import ObjectStore, ParallelMap, is_inside, is_too_long
from prefect_tune.core.values import Digest, digest_of
from prefect_tune.stores.local.download import plain_tree
from prefect_tune.stores.local.staging import transfer_pool

_PART_BYTES = 16 * 1024 * 1024
_RACES = 10
_REREADS = 3
_SETTLED_NS = 2_000_000_000  # file systems stamp times as coarsely as this
_HALF_RECEIVED = re.compile(r"\.[0-9a-f]{32}\.part")
_Stamp: TypeAlias = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Sent:
    """The result of a sync: the index that is current, and the stamps of the local files it was made from.

    `stamps` holds size, modification time, inode and mode of the files that had not been written to for two
    seconds when they were read: while a file's stamp stays the same, the file is not read again.
    """

    index: ArtifactIndex | None = None
    stamps: Mapping[str, _Stamp] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    """By path: why the target does not have it. Without excluded files, and files that were deleted meanwhile."""


@dataclass(frozen=True, slots=True)
class Writer:
    """The attempt of a trial that syncs. A sync by hand keeps the attempt of the current index."""

    attempt: int = 0
    """0: no attempt, a sync by hand."""
    is_superseded: Callable[[], bool] = lambda: True
    """Called if the index is from a later attempt, which may belong to an earlier experiment of the same name."""


@dataclass(frozen=True, slots=True)
class _Local:
    path: str
    file: Path
    stamp: _Stamp


def send_artifacts(
    store: ObjectStore,
    folder: str,
    directory: Path,
    excludes: Sequence[str],
    before: Sent,
    *,
    writer: Writer = Writer(),
) -> Sent:
    """Make `folder` on the target show `directory`: upload changed files, and drop deleted files from the index.

    Readers see the state before or after, never a mixture. Left out are excluded files and empty folders, files that
    vanish before they are read, and what the result names: links that lead out of the directory or to folders, entries
    that are neither a file nor a folder or cannot be read, names that not every system can have, and
    `NEVER_ARTIFACTS`. A file that grows is uploaded up to the size it had when it was opened.

    Raises:
        InvalidInput: `directory` is not a directory.
        Superseded: a later attempt than `writer`'s has published its files; they are kept.
        StoreUnavailable: not synced, or other writers came first each time; the next try finds what was uploaded.
    """
    if not directory.is_dir():
        raise InvalidInput(f"{directory}: expected a directory to sync, found nothing of the kind")
    for _ in range(_RACES):
        base = newest_index(store, folder, before.index)
        _require_newest(writer, base, folder)
        known = before if base is before.index else Sent(base)
        try:
            with transfer_pool() as transfers:
                return _Sending(store, folder, known, writer).send(directory, excludes, transfers)
        except AlreadyExists:
            continue  # another writer published this number: start again from its index
    raise StoreUnavailable(f"{folder}: {_RACES} other syncs came first; is another attempt still alive?")


def _require_newest(writer: Writer, base: ArtifactIndex | None, folder: str) -> None:
    if base and 0 < writer.attempt < base.attempt and writer.is_superseded():
        raise Superseded(f"{folder}: attempt {base.attempt} has synced it, so attempt {writer.attempt} no longer does")


class _Sending:
    """One try to publish the next index."""

    def __init__(self, store: ObjectStore, folder: str, known: Sent, writer: Writer) -> None:
        base = known.index
        self._attempt = writer.attempt or (base.attempt if base else 0)
        self._store = store
        self._folder = folder
        self._stamps = known.stamps
        self._number = base.number + 1 if base else 1
        self._base = base
        self._of_path = {file.path: file for file in base.files} if base else {}
        self._of_digest = {(part.digest, _name(part.object)): part for part in base.parts()} if base else {}
        self._left_out: dict[str, str] = {}
        self._there: dict[str, int] = {}
        self._written: dict[str, int] = {}

    def send(self, directory: Path, excludes: Sequence[str], transfers: ParallelMap) -> Sent:
        now_ns = time.time_ns()
        local = sorted(_scan(directory, excludes, self._left_out), key=lambda each: each.path)
        if any(self._unchanged(each) is None for each in local):
            self._there = self._listed()  # files that a killed try uploaded for this number are not uploaded again
        files = tuple(file for file in transfers(self._sent, local) if file)
        kept = {file.path for file in files}
        stamps = {each.path: each.stamp for each in local if each.path in kept and _is_settled(each, now_ns)}
        if self._base and (files, self._attempt) == (self._base.files, self._base.attempt):
            return Sent(self._base, stamps, self._left_out)
        listed = self._listed()
        if not (self._base or files or listed):
            return Sent(left_out=self._left_out)  # most trials write no artifacts: publish no index
        index = ArtifactIndex(number=self._number, write_id=uuid.uuid4().hex, attempt=self._attempt, files=files)
        self._see(listed)
        publish_index(self._store, self._folder, index)
        self._store.delete(beyond_use(listed, self._folder, index))
        return Sent(index, stamps, self._left_out)

    def _listed(self) -> dict[str, int]:
        return {each.path: each.size_bytes for each in self._store.list(files_folder(self._folder))}

    def _unchanged(self, local: _Local) -> ArtifactFile | None:
        """Return the file's entry of the last index if its stamp is unchanged; None if it must be read."""
        return self._of_path.get(local.path) if self._stamps.get(local.path) == local.stamp else None

    def _sent(self, local: _Local) -> ArtifactFile | None:
        """Return the file's entry for the index, uploading it if needed; None if the file has vanished.

        Of a file that cannot be read, the entry of the last index stays.
        """
        if known := self._unchanged(local):
            return known
        for _ in range(_REREADS):
            try:
                with local.file.open("rb", buffering=0) as file:
                    size_bytes = os.fstat(file.fileno()).st_size
                    parts = tuple(self._parts(file.fileno(), size_bytes, local.file.name))
                    if sum(part.size_bytes for part in parts) == size_bytes:
                        break  # neither truncated nor replaced by a shorter file while it was read
            except FileNotFoundError:
                return None
            except OSError as error:
                self._left_out[local.path] = f"it cannot be read: {error.strerror}"
                return self._of_path.get(local.path)
        return ArtifactFile(path=local.path, mode=local.stamp[3] & 0o777, parts=parts)

    def _parts(self, file: int, size_bytes: int, name: str) -> Iterator[ArtifactPart]:
        several = size_bytes > _PART_BYTES
        for offset in range(0, size_bytes, _PART_BYTES):
            data = os.pread(file, min(_PART_BYTES, size_bytes - offset), offset)
            if not data:
                return
            of_part = f"{name}.{offset // _PART_BYTES:05d}" if several else name
            yield self._part(data, _portable(of_part))

    def _part(self, data: bytes, name: str) -> ArtifactPart:
        digest = digest_of(data)
        if known := self._of_digest.get((digest, name)):
            return known
        path = part_path(digest, self._number, name)
        whole = joined(self._folder, path)
        if self._there.get(whole) != len(data):
            self._store.put(whole, data)
            self._written[whole] = len(data)
        return ArtifactPart(object=path, size_bytes=len(data), digest=digest)

    def _see(self, listed: Mapping[str, int]) -> None:
        """Check on the target that every uploaded object has its full size, before the index refers to it."""
        for path, size_bytes in self._written.items():
            found = listed.get(path)
            if found != size_bytes and (found := self._store.size(path)) != size_bytes:
                raise StoreUnavailable(f"{path}: sent {size_bytes} bytes, but the target has {found or 'no object'}")


def _scan(directory: Path, excludes: Sequence[str], left_out: dict[str, str]) -> Iterator[_Local]:
    """Yield the files to send, and note in `left_out` why others are not."""
    folders = [""]
    while folders:
        folder = folders.pop()
        try:
            entries = list(os.scandir(directory / folder))
        except FileNotFoundError:
            continue  # deleted since its parent was read
        except OSError as error:
            left_out[folder] = f"it cannot be read: {error.strerror}"
            continue
        for entry in entries:
            path = f"{folder}/{entry.name}" if folder else entry.name
            if is_excluded(path, excludes) or _HALF_RECEIVED.fullmatch(entry.name):
                continue
            reason = _unsendable_reason(path)
            try:
                if reason is not None:
                    left_out[path] = reason
                elif entry.is_dir(follow_symlinks=False):
                    folders.append(path)
                elif entry.is_symlink() and not (entry.is_file() and _stays_inside(directory, path)):
                    left_out[path] = "a link to a folder, to nothing, or out of the trial's directory"
                elif entry.is_file():
                    yield _Local(path, directory / path, _stamp(entry.stat()))
                else:
                    left_out[path] = "neither a file nor a folder"
            except FileNotFoundError:
                continue  # deleted since the folder was read
            except OSError as error:
                left_out[path] = f"it cannot be read: {error.strerror}"


def _unsendable_reason(path: str) -> str | None:
    if not is_unicode(path):
        return "its name is not UTF-8"
    if "\\" in path:
        return "its name has a backslash"
    if is_too_long(path):
        return "its path is longer than 4,096 bytes"
    if is_excluded(path, NEVER_ARTIFACTS):
        return "files of this name are never artifacts"
    return None


def _stays_inside(directory: Path, path: str) -> bool:
    return (directory / path).resolve().is_relative_to(directory.resolve())


def _stamp(status: os.stat_result) -> _Stamp:
    return (status.st_size, status.st_mtime_ns, status.st_ino, stat.S_IMODE(status.st_mode))


def _is_settled(local: _Local, now_ns: int) -> bool:
    """Whether a later write would change the stamp: not for a file written within the clock's granularity."""
    return local.stamp[1] < now_ns - _SETTLED_NS


def _portable(name: str) -> str:
    """Return a name that every object store takes as the last part of a path."""
    plain = "".join(character if character.isprintable() else "_" for character in name)
    return plain.encode()[-100:].decode(errors="ignore")  # names are limited in bytes


def _name(path: str) -> str:
    return path.rpartition("/")[2]


# ------------------------------------------------------------------------------------------------ --- download


def receive_artifacts(store: ObjectStore, folder: str, directory: Path, excludes: Sequence[str]) -> None:
    """Download the files that `folder` on the target shows into `directory`; files that differ are replaced.

    Downloaded bytes are verified. Local files that the target does not have are kept. From a folder without an
    index (not written by prefect-tune) every file is downloaded, and only its size is checked.

    Raises:
        CheckpointNotFound: the target has no files there; a `FileNotFoundError` too.
        CheckpointCorrupt: bytes are missing or altered; the local file is not changed.
        InvalidInput: a local link or file has the name of a folder, or a folder that of a file.
    """
    for attempt in range(_REREADS):
        index = newest_index(store, folder)
        if index is None:
            return _receive_plain(store, folder, directory, excludes)
        try:
            wanted = [file for file in index.files if not is_excluded(file.path, excludes)]
            with transfer_pool() as transfers:
                for _ in transfers(lambda file: _receive(store, folder, directory, file), wanted):
                    pass
        except ObjectNotFound as gone:
            if attempt + 1 == _REREADS or newest_index(store, folder) == index:
                raise CheckpointCorrupt(f"{folder}: index {index.number} refers to a missing object: {gone}") from gone
        else:
            return None
    return None


def _receive(store: ObjectStore, folder: str, directory: Path, file: ArtifactFile) -> None:
    place = _place(directory, file.path)
    if _holds(place, file):
        return

    def parts() -> Iterator[bytes]:
        for part in file.parts:
            path = joined(folder, part.object)
            data = bytes(store.read(path, length=part.size_bytes + 1))
            if (found := digest_of(data)) != part.digest:
                raise CheckpointCorrupt(f"{file.path!r} at {path}: expected {part.digest[:12]}…, found {found[:12]}…")
            yield data

    _replace(place, parts(), file.mode)


def _receive_plain(store: ObjectStore, folder: str, directory: Path, excludes: Sequence[str]) -> None:
    for each in plain_tree(store, folder).files:
        if is_excluded(each.path, excludes):
            continue
        _replace(_place(directory, each.path), _runs(store, joined(folder, each.path), each.size_bytes), 0o644)


def _runs(store: ObjectStore, path: str, size_bytes: int) -> Iterator[bytes]:
    """Yield the bytes of a foreign file, of any size, a few at a time."""
    for offset in range(0, size_bytes, _PART_BYTES):
        length = min(_PART_BYTES, size_bytes - offset)
        data = bytes(store.read(path, offset=offset, length=length))
        if len(data) != length:
            raise StoreUnavailable(f"{path} at {offset}: expected {length} bytes, found {len(data)}; try again")
        yield data


def _place(directory: Path, path: str) -> Path:
    """Return the local path of `path`, making its folder; refuse links that lead out of `directory`."""
    place = directory / path
    if not is_inside(path):
        raise CheckpointCorrupt(f"{path!r}: the name leads out of the directory")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as in_the_way:
        raise InvalidInput(f"{place}: expected a local folder, found a file: remove it") from in_the_way
    if not place.parent.resolve().is_relative_to(directory.resolve()):
        raise InvalidInput(f"{place}: a local link leads out of {directory}: remove it")
    if place.is_dir():
        raise InvalidInput(f"{place}: expected a local file, found a folder: remove it")
    return place


def _holds(place: Path, file: ArtifactFile) -> bool:
    try:
        if place.is_symlink() or place.stat().st_size != file.size_bytes:
            return False
        with place.open("rb", buffering=0) as found:
            return all(digest_of(found.read(part.size_bytes)) == Digest(part.digest) for part in file.parts)
    except FileNotFoundError:
        return False


def _replace(place: Path, parts: Iterator[bytes], mode: int) -> None:
    fresh = place.with_name(f".{uuid.uuid4().hex}.part")
    try:
        with fresh.open("xb") as file:
            for data in parts:
                file.write(data)
        fresh.chmod(mode | stat.S_IRUSR)
        fresh.replace(place)
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
