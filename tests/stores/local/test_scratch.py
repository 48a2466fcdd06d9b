"""Scratch directories: new and empty, and removed with their process's last one."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from pathlib import Path

import pytest

from prefect_tune.stores.local import scratch
from prefect_tune.stores.local.scratch import ScratchDirectory, new_output_file

FOLDERS = ("staging", "artifacts")


def test_each_is_new_and_has_its_empty_folders() -> None:
    with ScratchDirectory(*FOLDERS) as first, ScratchDirectory(*FOLDERS) as second:
        assert first != second
        (first / "staging" / "file").write_text("left")
        for path, content in ((first, {"staging", "artifacts", "file"}), (second, {"staging", "artifacts"})):
            assert {each.name for each in path.rglob("*")} == content


def test_one_is_removed_with_its_content_and_the_last_with_their_parent() -> None:
    with ScratchDirectory() as kept:
        with ScratchDirectory(*FOLDERS) as path:
            (path / "staging" / "file").write_text("left")
        assert not path.exists()
        assert kept.is_dir()
    assert not kept.parent.exists()


def test_a_parent_that_was_tidied_away_is_made_again() -> None:
    with ScratchDirectory() as first:
        shutil.rmtree(first.parent)
        with ScratchDirectory(*FOLDERS) as second:
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
