"""Scratch directories: new ones, or reused ones that are empty; none outlives its process."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prefect_tune.stores.local import scratch
from prefect_tune.stores.local.scratch import ScratchDirectory, new_output_file

FOLDERS = ("staging", "artifacts")


@pytest.fixture(autouse=True)
def kept() -> Iterator[Path]:
    """While this is open, a directory that was given back is reused."""
    with ScratchDirectory() as directory:
        yield directory


def goes_on_after(act: Callable[[Path], object]) -> bool:
    """Whether a directory is reused after `act`."""
    with ScratchDirectory(*FOLDERS) as first:
        held = os.open(first, os.O_RDONLY)  # while it is open, its inode number is not reused
        act(first)
    with ScratchDirectory(*FOLDERS) as second:
        assert sorted(each.name for each in second.iterdir()) == ["artifacts", "staging"]
        assert not any(any((second / each).iterdir()) for each in FOLDERS)
        assert not first.exists()
        same = os.path.samestat(os.fstat(held), second.stat())
    os.close(held)
    return same


def test_one_that_nothing_was_left_in_goes_on_under_another_name() -> None:
    assert goes_on_after(lambda _: None)


def _link(directory: Path) -> None:
    (directory / "artifacts").rmdir()
    (directory / "artifacts").symlink_to(directory / "staging")


@pytest.mark.parametrize(
    "act",
    [
        lambda directory: (directory / "more").mkdir(),
        lambda directory: (directory / "staging" / "file").write_text("left"),
        lambda directory: (directory / "artifacts" / "folder").mkdir(),
        lambda directory: (directory / "artifacts").rmdir(),
        lambda directory: (directory / "artifacts").chmod(0o500),
        lambda directory: directory.chmod(0o710),
        _link,
    ],
    ids=["a folder", "a file", "a folder in a folder", "no folder", "a lock", "an opening", "a link"],
)
def test_one_that_is_not_as_it_was_made_is_removed(act: Callable[[Path], object]) -> None:
    assert not goes_on_after(act)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a directory away, which takes root")
def test_one_that_was_given_to_somebody_else_is_removed() -> None:
    assert not goes_on_after(lambda directory: os.chown(directory / "artifacts", 1234, 1234))


def test_two_at_once_are_two() -> None:
    with ScratchDirectory(*FOLDERS):
        pass
    with ScratchDirectory(*FOLDERS) as first, ScratchDirectory(*FOLDERS) as second:
        assert first != second
        assert first.stat().st_ino != second.stat().st_ino


def test_one_that_was_tidied_away_is_made_again(kept: Path) -> None:
    with ScratchDirectory(*FOLDERS) as first:
        pass
    for spare in kept.parent.glob("*/staging"):
        shutil.rmtree(spare.parent)
    with ScratchDirectory(*FOLDERS) as second:
        assert first != second
        assert (second / "staging").is_dir()


def test_its_path_leaves_room_for_sockets_whatever_the_machine_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket's path has at most 107 bytes, and multiprocessing uses 32 of them."""
    monkeypatch.setattr(socket, "gethostname", lambda: "m" * 64)
    monkeypatch.setattr(scratch, "_home", scratch._Home())
    with ScratchDirectory("1") as path:
        assert len(str(path / "1")) - len(tempfile.gettempdir()) <= 48


def test_a_file_of_output_is_left_for_its_reader_and_removed_after_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(scratch, "_home", scratch._Home())
    old, new = (Path(str(new_output_file().name)) for _ in range(2))
    other_machine = old.with_name("output-0123abcd-x.log")
    other_machine.touch()
    day_seconds = 24 * 60 * 60
    for file in (old, other_machine):
        os.utime(file, (time.time() - day_seconds - 1,) * 2)
    os.utime(new, (time.time() - day_seconds + 600,) * 2)
    with ScratchDirectory():
        assert [each.exists() for each in (old, new, other_machine)] == [False, True, True]
