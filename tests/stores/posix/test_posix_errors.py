"""File systems that lack a needed feature, that refuse, or that fail: each call, each error."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from prefect_tune.blocks import LocalTarget
from prefect_tune.core.errors import CommitUnknown, StoreRefused, StoreUnavailable, TuneError
from prefect_tune.stores.local.staging import replace_file
from prefect_tune.stores.posix_store import UNSUPPORTED, FileSystemCalls, PosixStore
from tests.fakes.servers.processes import until_mounted

CANNOT = sorted(UNSUPPORTED)
NEEDED = {
    "create": ["open_root", "open_folder", "new_file", "write", "fsync", "link", "mkdir", "status"],
    "put": ["open_root", "open_folder", "new_file", "write", "fsync", "link", "mkdir", "status"],
    "replace": ["open_root", "open_folder", "new_file", "write", "fsync", "link", "rename", "status"],
    "read": ["open_file", "pread", "status"],
    "size": ["status_of"],
    "list": ["names"],
    "delete": ["unlink"],
}
"""The system calls that each operation of a store needs."""


class Failing(FileSystemCalls):
    """The kernel's calls, one of which always fails."""

    def __init__(self, call: str, number: int) -> None:
        self.tries = 0

        def fail(*_: object) -> None:
            self.tries += 1
            raise OSError(number, os.strerror(number))

        setattr(self, call, fail)


def _acts(store: PosixStore) -> dict[str, Callable[[], object]]:
    return {
        "create": lambda: store.create("folder/new", b"1"),
        "put": lambda: store.put("folder/new", b"1"),
        "replace": lambda: store.replace("old/object", [b"another"]),
        "read": lambda: store.read("old/object"),
        "size": lambda: store.size("old/object"),
        "list": lambda: store.list(""),
        "delete": lambda: store.delete(["old/object"]),
    }


def _error(root: Path, act: str, calls: FileSystemCalls) -> TuneError:
    if not root.exists():
        root.mkdir()
        PosixStore(root).put("old/object", b"old")
    with pytest.raises(TuneError) as raised:
        _acts(PosixStore(root, calls=calls))[act]()
    return raised.value


@pytest.mark.parametrize(("act", "call"), [(act, call) for act, calls in NEEDED.items() for call in calls])
def test_what_a_file_system_cannot_do_is_answered_at_once_with_the_reason(tmp_path: Path, act: str, call: str) -> None:
    for number in CANNOT:
        calls = Failing(call, number)
        error = _error(tmp_path / "root", act, calls)
        assert type(error) is StoreRefused, f"{call} {errno.errorcode[number]}: {error!r}"
        assert "use a local disk, NFS" in str(error)
        assert os.strerror(number) in str(error)
        assert calls.tries == 1


@pytest.mark.parametrize("act", ["create", "put"])
@pytest.mark.parametrize("number", [*CANNOT, errno.EPERM])
def test_a_file_system_without_hard_links_is_told_as_that(tmp_path: Path, act: str, number: int) -> None:
    error = _error(tmp_path / "root", act, Failing("link", number))
    assert type(error) is StoreRefused
    assert "has no hard links, which create-if-absent needs: use a local disk" in str(error)
    assert [found.path for found in PosixStore(tmp_path / "root").list("")] == ["old/object"]


def test_an_input_output_error_of_one_link_is_no_answer(tmp_path: Path) -> None:
    class FailsOnce(FileSystemCalls):
        tries = 0

        def link(self, name: str, folder: int, new_name: str, new_folder: int) -> None:
            self.tries += 1
            if self.tries == 1:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            super().link(name, folder, new_name, new_folder)

    assert type(_error(tmp_path / "root", "create", FailsOnce())) is CommitUnknown
    assert type(_error(tmp_path / "root", "put", FailsOnce())) is StoreUnavailable
    assert list((tmp_path / "root" / ".tmp").iterdir()) == []


@pytest.mark.parametrize("number", CANNOT)
def test_a_folder_that_has_nothing_to_sync_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    sync = os.fsync

    def fsync(file: Any) -> None:
        if Path(f"/proc/self/fd/{file}").resolve().is_dir() and number != errno.ENOTTY:
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
PASSING = [
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


@pytest.mark.parametrize("name", [*REFUSED, *PASSING])
@pytest.mark.parametrize("call", ["new_file", "write", "fsync", "mkdir"])
def test_a_refusal_and_a_failure_of_any_call_are_told_apart(tmp_path: Path, call: str, name: str) -> None:
    number = getattr(errno, name)
    error = _error(tmp_path / "root", "create", Failing(call, number))
    assert type(error) is (StoreRefused if name in REFUSED else StoreUnavailable)
    assert os.strerror(number) in str(error)


def test_a_folder_that_cannot_be_closed_is_told_as_an_error_of_the_store(tmp_path: Path) -> None:
    assert type(_error(tmp_path / "root", "read", Failing("close", errno.EIO))) is StoreUnavailable


# ---------------------------------------------------------------------------------------------- a real mount


@pytest.fixture
def fuse(tmp_path: Path) -> Iterator[Path]:
    """A folder mounted by rclone, whose FUSE file system has no hard links."""
    rclone, unmount = shutil.which("rclone"), shutil.which("fusermount3") or shutil.which("fusermount")
    if rclone is None or unmount is None or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("needs rclone, fusermount and /dev/fuse")
    behind, mounted = tmp_path / "behind", tmp_path / "mounted"
    behind.mkdir()
    mounted.mkdir()
    command = [rclone, "mount", "--vfs-cache-mode", "writes", "--config", os.devnull, str(behind), str(mounted)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            if not until_mounted(mounted, process):
                pytest.skip("this machine allows no mounts")
            yield mounted
        finally:
            subprocess.run([unmount, "-u", "-z", str(mounted)], check=False, capture_output=True)
            process.terminate()


@pytest.mark.skipif(sys.platform != "linux", reason="FUSE as Linux has it")
def test_a_fuse_mount_without_hard_links_is_refused_at_once_with_the_reason(fuse: Path) -> None:
    found = LocalTarget(path=str(fuse)).check()
    assert not found.ok
    assert not found.may_pass
    assert "unsuitable: this file system lacks what a store needs; use a local disk" in found.message
    assert "no hard links" in found.message
