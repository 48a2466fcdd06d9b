"""The file store on real file systems, and on ones that lack a feature, refuse, or fail: each call, each error."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from prefect_tune.blocks import LocalTarget
from prefect_tune.core.errors import (
    AlreadyExists,
    CommitUnknown,
    DeadlineExceeded,
    InvalidInput,
    ObjectNotFound,
    StoreRefused,
    StoreUnavailable,
    TuneError,
)
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.stores.deadline import Deadline
from prefect_tune.stores.local.staging import replace_file
from prefect_tune.stores.posix_store import UNSUPPORTED_ERRNOS, FileSystemCalls, PosixStore, make_root
from tests.fakes.servers.processes import wait_until_mounted
from tests.stores.contract import StoreContract

NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system of its own, which takes root")


class TestPosixStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> PosixStore:
        make_root(tmp_path / "new" / "root")
        return PosixStore(tmp_path / "new" / "root")


@pytest.fixture
def store(tmp_path: Path) -> PosixStore:
    return PosixStore(tmp_path)


def _operations(store: ObjectStore, path: str) -> dict[str, Callable[[], object]]:
    return {
        "create": lambda: store.create(path, b"1"),
        "put": lambda: store.put(path, b"1"),
        "replace": lambda: store.replace(path, [b"1"]),
        "read": lambda: store.read(path),
        "size": lambda: store.size(path),
        "list": lambda: store.list(path),
        "delete": lambda: store.delete([path]),
    }


# -------------------------------------------------------------------------------------------- absent objects


@pytest.mark.parametrize("operation", ["create", "put", "replace", "read", "size", "list", "delete"])
def test_a_missing_root_is_not_an_empty_one(tmp_path: Path, operation: str) -> None:
    store = PosixStore(tmp_path / "unmounted")
    with pytest.raises(StoreUnavailable, match="the root does not exist"):
        _operations(store, "a")[operation]()
    assert not (tmp_path / "unmounted").exists()


def test_a_root_that_is_replaced_under_an_open_store_is_noticed(tmp_path: Path) -> None:
    make_root(tmp_path / "root")
    store = PosixStore(tmp_path / "root")
    store.put("a", b"1")
    (tmp_path / "root").rename(tmp_path / "moved away")
    make_root(tmp_path / "root")
    with pytest.raises(StoreUnavailable, match="not the same directory as before"):
        store.list("")


def test_a_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreRefused):
        PosixStore(tmp_path / "file").list("")
    with pytest.raises(StoreRefused):
        make_root(tmp_path / "file")


def test_a_root_where_no_folder_can_be_made_is_refused_and_not_tried_again() -> None:
    with pytest.raises(StoreRefused, match="making /proc/nope: this file system cannot make a folder there"):
        make_root(Path("/proc/nope/runs"))


def test_an_object_is_no_folder_and_a_folder_no_object(store: PosixStore) -> None:
    store.put("object", b"1")
    store.put("folder/object", b"1")
    assert store.size("object/below") is None
    assert store.list("object") == []
    with pytest.raises(ObjectNotFound):
        store.read("folder")
    with pytest.raises(StoreRefused, match="expected a folder"):
        store.put("object/below", b"1")
    for write in (store.create, store.put, store.replace):
        with pytest.raises((StoreRefused, AlreadyExists)):
            write("folder", [b"1"] if write == store.replace else b"1")  # type: ignore[operator]  # as each takes it
    assert store.size("folder/object") == 1


def test_the_hidden_folder_cannot_be_addressed(store: PosixStore) -> None:
    with pytest.raises(InvalidInput, match="unpublished"):
        store.put(".tmp/a", b"")


# -------------------------------------------------------------------------------------------- escaping links


@pytest.fixture
def outside(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that links below the root lead to."""
    outside = tmp_path_factory.mktemp("outside")
    (outside / "secret").write_bytes(b"secret")
    (tmp_path / "folder").symlink_to(outside)
    (tmp_path / "object").symlink_to(outside / "secret")
    (tmp_path / "dangling").symlink_to(outside / "new")
    return outside


@pytest.mark.parametrize("path", ["folder/secret", "folder/new", "folder/deep/new", "object", "dangling"])
@pytest.mark.parametrize("operation", ["create", "put", "replace", "read", "size"])
def test_a_symbolic_link_leads_nowhere(store: PosixStore, outside: Path, operation: str, path: str) -> None:
    with pytest.raises((StoreRefused, AlreadyExists)):
        _operations(store, path)[operation]()
    assert [path.name for path in outside.iterdir()] == ["secret"]
    assert (outside / "secret").read_bytes() == b"secret"


def test_links_are_not_listed_and_not_deleted_through(store: PosixStore, outside: Path) -> None:
    store.put("real", b"1")
    assert [listed.path for listed in store.list("")] == ["real"]
    with pytest.raises(StoreRefused):
        store.list("folder")
    with pytest.raises(StoreRefused):
        store.delete(["folder/secret"])
    assert (outside / "secret").exists()


def test_a_hidden_folder_that_is_a_link_is_refused(store: PosixStore, tmp_path: Path, outside: Path) -> None:
    (tmp_path / ".tmp").symlink_to(outside)
    with pytest.raises(StoreRefused):
        store.put("a", b"1")
    assert [path.name for path in outside.iterdir()] == ["secret"]


def test_a_pipe_under_an_objects_name_is_refused_at_once(store: PosixStore, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StoreRefused, match="expected a plain file"):
        store.read("pipe")
    assert store.list("") == []


# -------------------------------------------------------------------------------------------------- leftovers


def test_nothing_but_the_object_is_left(store: PosixStore, tmp_path: Path) -> None:
    store.create("a/b", b"1")
    store.put("a/c", b"1")
    store.replace("a/b", [b"2"])
    with pytest.raises(AlreadyExists):
        store.create("a/b", b"2")
    assert list((tmp_path / ".tmp").iterdir()) == []
    assert (tmp_path / "a" / "b").stat().st_nlink == 1


def test_empty_folders_go_with_their_last_object(store: PosixStore, tmp_path: Path) -> None:
    store.put("a/b/c", b"")
    store.put("a/d", b"")
    store.delete(["a/b/c"])
    assert not (tmp_path / "a" / "b").exists()
    store.delete(["a/d"])
    assert sorted(path.name for path in tmp_path.iterdir()) == [".tmp"]


def test_creating_and_pruning_the_same_folder_at_once_loses_nothing(store: PosixStore) -> None:
    deadline = time.monotonic() + 1.0
    counts = [0, 0]

    def create_and_delete(worker: int) -> None:
        while time.monotonic() < deadline:
            store.create(f"deep/er/folder/{worker}", b"1")
            assert store.size(f"deep/er/folder/{worker}") == 1
            store.delete([f"deep/er/folder/{worker}"])
            counts[worker] += 1

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(create_and_delete, range(2)))
    assert min(counts) > 10
    assert store.list("") == []


class _PrunedOnce(FileSystemCalls):
    """A disk on which another process prunes the folder between mkdir and link."""

    def __init__(self, other: PosixStore) -> None:
        self.other = other
        self.pruned = 0

    def link(self, name: str, folder: int, new_name: str, new_folder: int) -> None:
        if not self.pruned:
            self.pruned += 1
            self.other.delete(["a/b/never-there"])
        super().link(name, folder, new_name, new_folder)


@pytest.mark.parametrize("method", ["create", "put", "replace"])
def test_a_folder_that_is_pruned_before_the_link_is_made_again(tmp_path: Path, method: str) -> None:
    calls = _PrunedOnce(PosixStore(tmp_path))
    store = PosixStore(tmp_path, calls=calls)
    _operations(store, "a/b/object")[method]()
    assert calls.pruned == 1
    assert store.read("a/b/object") == b"1"


def test_a_hidden_file_is_swept_a_day_after_the_last_write(tmp_path: Path) -> None:
    hidden = tmp_path / ".tmp"
    hidden.mkdir()
    for name, age_seconds in (("dead", 90_000), ("alive", 80_000)):
        (hidden / name).write_bytes(b"half")
        os.utime(hidden / name, (time.time() - age_seconds,) * 2)
    PosixStore(tmp_path).put("a", b"1")
    assert [file.name for file in hidden.iterdir()] == ["alive"]


class _SlowWrite(FileSystemCalls):
    """A disk that waits in the middle of a write."""

    def __init__(self) -> None:
        self.writing = threading.Event()
        self.resume = threading.Event()

    def write(self, file: int, data: memoryview) -> int:
        written = super().write(file, data[: max(1, len(data) // 2)])
        self.writing.set()
        self.resume.wait(10)
        return written


def test_a_writer_whose_hidden_file_is_taken_away_publishes_nothing(tmp_path: Path) -> None:
    calls = _SlowWrite()
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(PosixStore(tmp_path, calls=calls).create, "slow", b"12345678")
        assert calls.writing.wait(10)
        for file in (tmp_path / ".tmp").iterdir():
            file.unlink()
        calls.resume.set()
        assert isinstance(slow.exception(10), StoreUnavailable)
    assert PosixStore(tmp_path).size("slow") is None


class _DrippingDisk(FileSystemCalls):
    def write(self, file: int, data: memoryview) -> int:
        time.sleep(0.05)
        return super().write(file, data[:1])


def test_nothing_is_begun_or_published_after_the_deadline(tmp_path: Path) -> None:
    with pytest.raises(DeadlineExceeded):
        PosixStore(tmp_path, deadline=Deadline.after(timedelta(0))).put("a", b"1")
    assert list(tmp_path.iterdir()) == []

    slow = PosixStore(tmp_path, deadline=Deadline.after(timedelta(seconds=0.2)), calls=_DrippingDisk())
    with pytest.raises(DeadlineExceeded):
        slow.create("a", b"x" * 1000)
    assert list((tmp_path / ".tmp").iterdir()) == []
    assert PosixStore(tmp_path).size("a") is None


# ----------------------------------------------------------------------------- refusals of real file systems


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 64 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", folder], check=True)
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@NEEDS_ROOT
def test_a_disk_that_fills_up_says_so_loses_nothing_and_goes_on_once_there_is_room(small_disk: Path) -> None:
    store = PosixStore(small_disk)
    written: list[str] = []

    def fill() -> None:
        for number in range(100):
            store.create(f"objects/{number}", bytes(6000))
            written.append(f"objects/{number}")

    with pytest.raises(StoreUnavailable, match=rf"{small_disk}.*disk is full"):
        fill()
    assert 5 <= len(written) <= 10
    assert sorted(listed.path for listed in store.list("")) == sorted(written)
    assert all(store.read(path) == bytes(6000) for path in written)
    assert list((small_disk / ".tmp").iterdir()) == []

    store.delete(written[:1])
    store.create("objects/again", bytes(6000))
    assert store.size("objects/again") == 6000


@NEEDS_ROOT
def test_a_read_only_file_system_refuses(small_disk: Path) -> None:
    store = PosixStore(small_disk)
    store.put("a", b"1")
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    for operation in ("create", "put", "replace", "delete"):
        with pytest.raises(StoreRefused, match="read-only"):
            _operations(PosixStore(small_disk), "b" if operation != "delete" else "a")[operation]()
    assert store.read("a") == b"1"


@NEEDS_ROOT
def test_another_file_system_below_the_root_is_refused_for_writing(small_disk: Path) -> None:
    store = PosixStore(small_disk.parent)
    for operation in ("create", "put", "replace"):
        with pytest.raises(StoreRefused, match="another file system"):
            _operations(store, "small/a")[operation]()
    assert list((small_disk.parent / ".tmp").iterdir()) == []


AS_NOBODY = """
import os, sys
from pathlib import Path
from prefect_tune.core.errors import StoreRefused
from prefect_tune.stores.posix_store import PosixStore, make_root
os.setgid(65534); os.setuid(65534)
store = PosixStore(Path(sys.argv[1]))
acts = [
    lambda: store.create("new", b""), lambda: store.put("closed/new", b""), lambda: store.read("closed/object"),
    lambda: store.size("closed/object"), lambda: store.list(""), lambda: store.delete(["closed/object"]),
    lambda: store.read("unreadable"), lambda: make_root(Path(sys.argv[1], "made")),
]
for act in acts:
    try:
        act()
    except StoreRefused as error:
        assert "permission" in str(error), error
    else:
        raise SystemExit("not refused")
print("all refused")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which takes root")
def test_what_the_user_may_not_do_is_refused_and_never_taken_for_absence(tmp_path: Path) -> None:
    root = tmp_path / "root"
    make_root(root)
    store = PosixStore(root)
    store.put("closed/object", b"1")
    store.put("unreadable", b"1")
    (root / "unreadable").chmod(0)
    (root / "closed").chmod(0)
    for folder in (root, *tmp_path.parents, tmp_path):
        if folder.stat().st_uid == 0 and str(folder).startswith("/tmp/"):
            folder.chmod(stat.S_IMODE(folder.stat().st_mode) | 0o055)
    command, environment = [sys.executable, "-c", AS_NOBODY, str(root)], {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | environment)
    assert process.stdout.strip() == "all refused", process.stderr


UNSUPPORTED_NUMBERS = sorted(UNSUPPORTED_ERRNOS)
NEEDED_CALLS = {
    "create": ["open_root", "open_folder", "create_file", "write", "fsync", "link", "mkdir", "fstat"],
    "put": ["open_root", "open_folder", "create_file", "write", "fsync", "link", "mkdir", "fstat"],
    "replace": ["open_root", "open_folder", "create_file", "write", "fsync", "link", "rename", "fstat"],
    "read": ["open_file", "pread", "fstat"],
    "size": ["stat"],
    "list": ["listdir"],
    "delete": ["unlink"],
}
"""The system calls that each operation of a store needs."""


class FailingCall(FileSystemCalls):
    """The kernel's calls, one of which always fails."""

    def __init__(self, call: str, number: int) -> None:
        self.tries = 0

        def fail(*_: object) -> None:
            self.tries += 1
            raise OSError(number, os.strerror(number))

        setattr(self, call, fail)


def _operations_on_old(store: PosixStore) -> dict[str, Callable[[], object]]:
    return {
        "create": lambda: store.create("folder/new", b"1"),
        "put": lambda: store.put("folder/new", b"1"),
        "replace": lambda: store.replace("old/object", [b"another"]),
        "read": lambda: store.read("old/object"),
        "size": lambda: store.size("old/object"),
        "list": lambda: store.list(""),
        "delete": lambda: store.delete(["old/object"]),
    }


def _run_to_error(root: Path, operation: str, calls: FileSystemCalls) -> TuneError:
    if not root.exists():
        root.mkdir()
        PosixStore(root).put("old/object", b"old")
    with pytest.raises(TuneError) as raised:
        _operations_on_old(PosixStore(root, calls=calls))[operation]()
    return raised.value


@pytest.mark.parametrize(
    ("operation", "call"), [(name, call) for name, calls in NEEDED_CALLS.items() for call in calls]
)
def test_what_a_file_system_cannot_do_is_answered_at_once_with_the_reason(
    tmp_path: Path, operation: str, call: str
) -> None:
    for number in UNSUPPORTED_NUMBERS:
        calls = FailingCall(call, number)
        error = _run_to_error(tmp_path / "root", operation, calls)
        assert type(error) is StoreRefused, f"{call} {errno.errorcode[number]}: {error!r}"
        assert "use a local disk, NFS" in str(error)
        assert os.strerror(number) in str(error)
        assert calls.tries == 1


@pytest.mark.parametrize("operation", ["create", "put"])
@pytest.mark.parametrize("number", [*UNSUPPORTED_NUMBERS, errno.EPERM])
def test_a_file_system_without_hard_links_is_told_as_that(tmp_path: Path, operation: str, number: int) -> None:
    error = _run_to_error(tmp_path / "root", operation, FailingCall("link", number))
    assert type(error) is StoreRefused
    assert "has no hard links, which create-if-absent needs: use a local disk" in str(error)
    assert [listed.path for listed in PosixStore(tmp_path / "root").list("")] == ["old/object"]


def test_an_input_output_error_of_one_link_is_no_answer(tmp_path: Path) -> None:
    class FailsOnce(FileSystemCalls):
        tries = 0

        def link(self, name: str, folder: int, new_name: str, new_folder: int) -> None:
            self.tries += 1
            if self.tries == 1:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            super().link(name, folder, new_name, new_folder)

    assert type(_run_to_error(tmp_path / "root", "create", FailsOnce())) is CommitUnknown
    assert type(_run_to_error(tmp_path / "root", "put", FailsOnce())) is StoreUnavailable
    assert list((tmp_path / "root" / ".tmp").iterdir()) == []


@pytest.mark.parametrize("number", [number for number in UNSUPPORTED_NUMBERS if number != errno.ENOTTY])
def test_a_folder_that_has_nothing_to_sync_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    sync = os.fsync

    def fsync(file: Any) -> None:
        if Path(f"/proc/self/fd/{file}").resolve().is_dir():
            raise OSError(number, os.strerror(number))
        sync(file)

    monkeypatch.setattr(os, "fsync", fsync)
    store = PosixStore(tmp_path)
    store.create("folder/object", b"1")
    store.put("folder/object", b"12")
    store.delete(["folder/object"])
    assert store.list("") == []
    replace_file(tmp_path / "metadata.json", b"{}")
    assert (tmp_path / "metadata.json").read_bytes() == b"{}"


REFUSED = [
    "EACCES",
    "EPERM",
    "EROFS",
    "EKEYEXPIRED",
    "EKEYREVOKED",
    "ENOKEY",
    "EFBIG",
    "EMLINK",
    "EXDEV",
    "ENAMETOOLONG",
]
TRANSIENT = [
    "ENOSPC",
    "EDQUOT",
    "EIO",
    "ESTALE",
    "ENOTCONN",
    "ETIMEDOUT",
    "EBUSY",
    "EMFILE",
    "ENFILE",
    "ENOMEM",
    "EAGAIN",
]


@pytest.mark.parametrize("name", [*REFUSED, *TRANSIENT])
@pytest.mark.parametrize("call", ["create_file", "write", "fsync", "mkdir"])
def test_a_refusal_and_a_failure_of_any_call_are_told_apart(tmp_path: Path, call: str, name: str) -> None:
    number = getattr(errno, name)
    error = _run_to_error(tmp_path / "root", "create", FailingCall(call, number))
    assert type(error) is (StoreRefused if name in REFUSED else StoreUnavailable)
    assert os.strerror(number) in str(error)


def test_a_folder_that_cannot_be_closed_is_told_as_an_error_of_the_store(tmp_path: Path) -> None:
    assert type(_run_to_error(tmp_path / "root", "read", FailingCall("close", errno.EIO))) is StoreUnavailable


# ---------------------------------------------------------------------------------------------- a real mount


@pytest.fixture
def fuse(tmp_path: Path) -> Iterator[Path]:
    """A FUSE mount by rclone, without hard links."""
    rclone, unmount = shutil.which("rclone"), shutil.which("fusermount3") or shutil.which("fusermount")
    if rclone is None or unmount is None or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("needs rclone, fusermount and /dev/fuse")
    source, mounted = tmp_path / "source", tmp_path / "mounted"
    source.mkdir()
    mounted.mkdir()
    command = [rclone, "mount", "--vfs-cache-mode", "writes", "--config", os.devnull, str(source), str(mounted)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            if not wait_until_mounted(mounted, process):
                pytest.skip("this machine allows no mounts")
            yield mounted
        finally:
            subprocess.run([unmount, "-u", "-z", str(mounted)], check=False, capture_output=True)
            process.terminate()


@pytest.mark.skipif(sys.platform != "linux", reason="FUSE as Linux has it")
def test_a_fuse_mount_without_hard_links_is_refused_at_once_with_the_reason(fuse: Path) -> None:
    result = LocalTarget(path=str(fuse)).check()
    assert not result.ok
    assert not result.may_be_temporary
    assert "no hard links" in result.message
