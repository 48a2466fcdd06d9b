"""File locks that end with the process that holds them."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from prefect_tune.core.errors import DeadlineExceeded, StoreRefused
from prefect_tune.stores.deadline import Deadline
from prefect_tune.stores.local.file_lock import FileLock, Share


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.lock"


def test_readers_share_and_who_is_alone_is_alone_also_within_one_process(path: Path) -> None:
    with FileLock.take(path, Share.WITH_READERS, Deadline.never()) as one:
        with FileLock.take(path, Share.WITH_READERS, Deadline.never()):
            assert FileLock.try_take(path, Share.ALONE) is None
        assert FileLock.try_take(path, Share.ALONE) is None
        one.release()
        one.release()  # done already is fine
        with FileLock.take(path, Share.ALONE, Deadline.never()):
            assert FileLock.try_take(path, Share.WITH_READERS) is None


def test_who_waits_gives_up_at_the_deadline(path: Path) -> None:
    with FileLock.take(path, Share.ALONE, Deadline.never()), pytest.raises(DeadlineExceeded, match="another process"):
        FileLock.take(path, Share.ALONE, Deadline.after(timedelta(seconds=0.05)))


def test_a_killed_holder_holds_nothing(path: Path) -> None:
    script = (
        "import sys, pathlib; from prefect_tune.stores.local.file_lock import *; "
        "lock = FileLock.try_take(pathlib.Path(sys.argv[1]), Share.ALONE); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == b"held\n"
        assert FileLock.try_take(path, Share.ALONE) is None
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with FileLock.take(path, Share.ALONE, Deadline.after(timedelta(seconds=10))):
            pass


def test_a_lock_whose_file_was_removed_meanwhile_is_taken_on_the_file_that_others_see(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fcntl.flock
    removed: list[Path] = []

    def flock(file: int, how: int) -> None:
        if not removed:
            removed.append(path)
            path.unlink()  # its holder leaves, and takes the file with it
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with FileLock.take(path, Share.ALONE, Deadline.never()):
        assert removed
        assert FileLock.try_take(path, Share.ALONE) is None


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP, errno.EINVAL, errno.ENOLCK])
def test_a_file_system_without_locks_is_told_as_that_with_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def flock(_file: object, _how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(StoreRefused, match="set TMPDIR to a local disk"):
        FileLock.try_take(tmp_path / "lock", Share.ALONE)
