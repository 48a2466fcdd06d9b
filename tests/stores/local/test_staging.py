"""Real directories on both ends of a transfer: valid contents, the restored files, and the rest after a failure."""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from prefect_tune.core.checkpoints.commit import commit_checkpoint, find_reusable_bytes
from prefect_tune.core.checkpoints.manifest import BLOB_BYTES, CHUNK_BYTES, CheckpointMetadata, FileRange, Manifest
from prefect_tune.core.errors import CheckpointCorrupt, InvalidInput, StagedFilesChanged
from prefect_tune.core.restore import restore_files
from prefect_tune.core.storage.layout import CheckpointKey, TrialKey
from prefect_tune.core.storage.object_store import Buffer
from prefect_tune.runtime.session import copy_directory
from prefect_tune.stores.local.staging import StagedFiles, restoring_directory
from tests.fakes.checkpoints import read_files, write_files
from tests.fakes.stores.memory_store import ParallelMemoryStore
from tests.trainables.unreadable import make_deep

TRIAL = TrialKey(experiment="e", generation=1, trial="t")
METADATA = CheckpointMetadata(attempt=1, term=1, write_id="w", created_at="now")


def read_tree(root: Path) -> Mapping[str, object]:
    """Return files (bytes and mode) and empty directories by path."""
    return {
        path.relative_to(root).as_posix(): (path.read_bytes(), stat.S_IMODE(path.stat().st_mode))
        if path.is_file()
        else "directory"
        for path in root.rglob("*")
        if path.is_file() or not any(path.iterdir())
    }


def save(store: ParallelMemoryStore, directory: Path) -> Manifest:
    reuse = find_reusable_bytes(store, TRIAL, None, 0)
    key = CheckpointKey(trial=TRIAL, step=1, sequence=1)
    return commit_checkpoint(store, key, StagedFiles(directory), METADATA, reuse=reuse).manifest


def restore(store: ParallelMemoryStore, manifest: Manifest, destination: Path) -> None:
    with restoring_directory(manifest, destination) as sink:
        restore_files(store, manifest, sink)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "source"
    (root / "deep" / "er").mkdir(parents=True)
    (root / "none" / "at all").mkdir(parents=True)
    (root / "weights.bin").write_bytes(os.urandom(2 * CHUNK_BYTES + 12345))
    (root / "deep" / "er" / "ünïcode name").write_bytes(b"small")
    (root / "deep" / "empty").touch()
    (root / "run.sh").write_bytes(b"#!/bin/sh\n")
    (root / "run.sh").chmod(0o750)
    (root / "secret").write_bytes(b"x")
    (root / "secret").chmod(0o600)
    (root / "linked").symlink_to("weights.bin")
    return root


def test_a_directory_comes_back_byte_for_byte_with_its_modes_and_empty_folders(source: Path, tmp_path: Path) -> None:
    store = ParallelMemoryStore()
    manifest = save(store, source)
    restore(store, manifest, tmp_path / "far" / "away")

    assert read_tree(tmp_path / "far" / "away") == read_tree(source)
    assert not (tmp_path / "far" / "away" / "linked").is_symlink()
    assert manifest.size_bytes == sum(path.stat().st_size for path in source.rglob("*") if path.is_file())


@pytest.mark.parametrize("destination", ["nothing", "an empty directory"])
def test_a_checkpoint_without_files_is_an_empty_directory(destination: str, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    if destination != "nothing":
        (tmp_path / "restored").mkdir()
    store = ParallelMemoryStore()
    restore(store, save(store, tmp_path / "source"), tmp_path / "restored")
    assert list((tmp_path / "restored").iterdir()) == []


def test_a_destination_that_holds_something_is_left_as_it_is(source: Path, tmp_path: Path) -> None:
    store = ParallelMemoryStore()
    manifest = save(store, source)
    (tmp_path / "restored").mkdir()
    (tmp_path / "restored" / "mine").write_bytes(b"keep")

    with pytest.raises(OSError, match="restored"):
        restore(store, manifest, tmp_path / "restored")

    assert sorted(path.name for path in tmp_path.iterdir()) == ["restored", "source"]
    assert read_tree(tmp_path / "restored") == {"mine": (b"keep", 0o644)}


def test_a_restore_that_fails_leaves_nothing(source: Path, tmp_path: Path) -> None:
    store = ParallelMemoryStore()
    manifest = save(store, source)
    store.delete(sorted(manifest.blob_paths())[:1])
    with pytest.raises(CheckpointCorrupt):
        restore(store, manifest, tmp_path / "restored")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_directory_that_cannot_be_furnished_leaves_nothing(source: Path, tmp_path: Path) -> None:
    manifest = save(ParallelMemoryStore(), source)
    long = manifest.files[0].model_copy(update={"path": "x" * 300})
    with pytest.raises(InvalidInput, match=f"restored: this file system cannot hold .*{'x' * 300}.*shorter path"):
        restoring_directory(manifest.model_copy(update={"files": (long,)}), tmp_path / "restored").__enter__()
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def _put_socket(root: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(root / "bad"))


_UNSAVABLE: Mapping[str, Callable[[Path], object]] = {
    "a dangling link": lambda root: (root / "bad").symlink_to("nowhere"),
    "a linked directory": lambda root: (root / "bad").symlink_to(".."),
    "a socket": _put_socket,
    "a pipe": lambda root: os.mkfifo(root / "bad"),
    "bytes for a name": lambda root: Path(os.fsdecode(os.fsencode(root) + b"/bad\xff")).touch(),
    "a backslash": lambda root: (root / "bad\\name").touch(),
    "a link to itself": lambda root: (root / "bad").symlink_to("bad"),
    "a device": lambda root: (root / "bad").symlink_to("/dev/full"),
    "a path that is too long to open": lambda root: make_deep(root, ["bad", *["n" * 250] * 17]),
    "a path with many levels": lambda root: make_deep(root, ["bad", *["n"] * 300]),
}


@pytest.mark.parametrize("add", _UNSAVABLE.values(), ids=_UNSAVABLE)
def test_what_could_not_be_restored_elsewhere_is_refused_by_name(add: Callable[[Path], object], tmp_path: Path) -> None:
    add(tmp_path)
    with pytest.raises(InvalidInput, match="bad"):
        StagedFiles(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("name", ["bad", "folder"])
def test_what_another_user_owns_is_refused_by_name(name: str) -> None:
    with TemporaryDirectory() as folder:
        root = write_files(Path(folder), {"bad": b"1", "folder/file": b"2"})
        root.chmod(0o755)
        (root / name).chmod(0)
        staged_before = StagedFiles(root)
        os.seteuid(65534)
        try:
            with pytest.raises(InvalidInput, match=f"/{name}: cannot be read or saved: Permission den"):
                _read_all(StagedFiles(root) if name == "folder" else staged_before)
        finally:
            os.seteuid(0)


def _read_all(staged: StagedFiles) -> None:
    for number, file in enumerate(staged.files):
        staged.read_into(FileRange(number, 0, file.size_bytes), memoryview(bytearray(file.size_bytes)))


def test_what_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "missing"):
        with pytest.raises(InvalidInput, match="expected a directory"):
            StagedFiles(path)


@pytest.mark.parametrize("change", ["cut", "removed"])
def test_files_that_change_while_they_are_read_are_said_to(change: str, tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"0123456789")
    staged = StagedFiles(tmp_path)
    if change == "cut":
        os.truncate(tmp_path / "weights", 4)
    else:
        (tmp_path / "weights").unlink()
    with pytest.raises(StagedFilesChanged, match="weights"):
        staged.read_into(FileRange(0, 2, 8), memoryview(bytearray(8)))


class _PairingStore(ParallelMemoryStore):
    """A store on which each read and each write waits for a second one."""

    barrier = threading.Barrier(2, timeout=20)

    def put(self, path: str, data: Buffer) -> None:
        self.barrier.wait()
        super().put(path, data)

    def read(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        self.barrier.wait()
        return super().read(path, offset=offset, length=length)


def test_the_blobs_of_a_save_and_of_a_restore_are_transferred_side_by_side(tmp_path: Path) -> None:
    large = {name: name.encode() * BLOB_BYTES for name in "ab"}
    write_files(tmp_path / "source", large)
    store = _PairingStore()
    restore(store, save(store, tmp_path / "source"), tmp_path / "copy")
    assert read_files(tmp_path / "copy") == large


@pytest.mark.parametrize("change", ["rewritten", "grown", "added", "removed", "replaced"])
def test_a_directory_that_changed_while_it_was_saved_is_not_committed(tmp_path: Path, change: str) -> None:
    (tmp_path / "weights").write_bytes(b"x" * 100)
    (tmp_path / "optimizer").write_bytes(b"y" * 100)
    StagedFiles(tmp_path).require_unchanged()
    os.utime(tmp_path / "weights", ns=(0, 0))  # as if listed long ago: a clock's tick may be longer than this test
    staged = StagedFiles(tmp_path)
    match change:
        case "rewritten":
            (tmp_path / "weights").write_bytes(b"z" * 100)
        case "grown":
            (tmp_path / "weights").write_bytes(b"x" * 101)
        case "added":
            (tmp_path / "more").touch()
        case "removed":
            (tmp_path / "optimizer").unlink()
        case "replaced":
            (tmp_path / "new").write_bytes(b"x" * 100)
            os.utime(tmp_path / "new", ns=(0, 0))
            (tmp_path / "new").replace(tmp_path / "weights")
    store = ParallelMemoryStore()
    key = CheckpointKey(trial=TRIAL, step=1, sequence=1)
    with pytest.raises(StagedFilesChanged):
        commit_checkpoint(store, key, staged, METADATA, reuse=find_reusable_bytes(store, TRIAL, None, 0))
    assert not any(path.endswith("manifest.json") for path in store.objects)


@pytest.mark.parametrize("deleted", ["deep/weights", "deep"])
@pytest.mark.parametrize("operation", [StagedFiles, lambda source: copy_directory(source, source.with_name("copy"))])
def test_a_file_that_vanishes_while_a_directory_is_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: Callable[[Path], object], deleted: str
) -> None:
    """Another process deletes the file between the listing of its folder and its opening."""
    write_files(source := tmp_path / "source", {"deep/weights": b"1"})
    scan = os.scandir

    def scan_and_delete(folder: str | Path) -> object:
        scanned = scan(folder)
        if Path(folder) != (source / deleted).parent:
            return scanned
        with scanned:
            entries = list(scanned)
        (source / "deep" / "weights").unlink()
        if deleted == "deep":
            (source / deleted).rmdir()
        return nullcontext(entries)

    def list_and_delete(folder: Path) -> list[Path]:
        with scan_and_delete(folder) as entries:  # type: ignore[attr-defined]  # a context of entries
            return [folder / entry.name for entry in entries]

    monkeypatch.setattr(os, "scandir", scan_and_delete)
    monkeypatch.setattr(Path, "iterdir", list_and_delete)
    with pytest.raises(StagedFilesChanged, match=rf"source/{deleted}.*: .*deleted while it was being saved"):
        operation(source)
